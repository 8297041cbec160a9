"""Commands of the trainer as each of several processes runs them."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from fastrl.base.errors import UserError
from fastrl.training.commands import COMMANDS
from fastrl.training.parallel.seeds import seed_step


def rank() -> int:
    """This process's number, 0 where it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def train(
    name: str, tables: dict[str, Any], resume: bool = False, stop: tuple[int, int] | None = None
) -> dict[str, Any] | str:
    """The summary of a command's run with this config, or what it refuses; without curves and report.

    With `stop` that rank gets SIGTERM in that step.
    """
    command = COMMANDS[name]
    module: Any = import_module(f"fastrl.training.{command.module}")

    def seed(seed: int, step: int) -> None:
        seed_step(seed, step)
        if (rank(), step) == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    with (
        patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
        patch("fastrl.training.run.log.RunLog.draw", lambda self: None),
        patch("fastrl.training.run.loop.seed_step", seed),
    ):
        try:
            summary: dict[str, Any] = module.train(command.kind.model_validate(tables), resume=resume)
        except UserError as error:
            return str(error)
        return summary


def train_with_rank_0s_weights(name: str, *arguments: Any) -> dict[str, Any] | str:
    """`train`, in which no other rank may read weights."""
    with ExitStack() as stack:
        for reader in ("models.loading._read_weights", "run.checkpoint._load_weights") if rank() else ():
            error = AssertionError(f"rank {rank()} reads weights")
            stack.enter_context(patch(f"fastrl.training.{reader}", side_effect=error))
        return train(name, *arguments)
