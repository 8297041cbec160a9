"""What a process computes with: its device, torch's threads, the versions of its packages."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import torch
from transformers import set_seed
from transformers.utils import logging as transformers_logging

import fastrl
from fastrl.base.errors import UserError
from fastrl.training.config.sections import MachineConfig


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Set torch's CPU threads for the block; None keeps torch's own choice."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def start(machine: MachineConfig) -> torch.device:
    """Seed everything, quiet transformers' bars (ours show the progress), and return the device."""
    set_seed(machine.seed)
    transformers_logging.disable_progress_bar()
    device = find_device(machine.device)
    if device.type == "cuda":
        torch.cuda.init()  # applies the seed, which a user's code could still replace before
    return device


def find_device(name: str) -> torch.device:
    """The device of `training.device`. Raises UserError for one that is not available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch built without CUDA
        raise UserError(f"training.device: cannot use {name!r}: {str(error).splitlines()[0]}") from error
    if device.type == "meta":
        raise UserError(f"training.device: cannot use {name!r}: it computes nothing")
    if device.type == "cuda":  # kernels are launched on the current one
        torch.cuda.set_device(device)
    return device


def versions() -> dict[str, str]:
    """Package -> its version, of those that a run's numbers depend on most."""
    return {
        "fastrl": fastrl.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "Python": platform.python_version(),
    }
