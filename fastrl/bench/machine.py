"""The machine and the versions that a result was measured with: without them a number means nothing."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fastrl
from fastrl.base.system import cpu_name, field

_PACKAGES = ("liger-kernel", "trl", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl", "transformers")
_TRITON = ("triton", "triton-rocm", "pytorch-triton-rocm")  # depending on the torch that installed it


def describe(argv: Sequence[str]) -> dict[str, Any]:
    """Machine, versions, commit, command line and time, ready for JSON."""
    return {
        "command": shlex.join(["fastrl", "bench", *argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": _machine(),
        "versions": {
            "fastrl": fastrl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "rocm": torch.version.hip,
            "triton": next(filter(None, map(installed_version, _TRITON)), None),
            **{name: installed_version(name) for name in _PACKAGES},
        },
        "backends": fastrl.backends(),
    }


def installed_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    memory = field("/proc/meminfo", "MemTotal")
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": None if memory is None else round(int(memory.split()[0]) / 2**20, 1),
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        facts["gpu"] = gpu.name
        facts["gpu_memory_gib"] = round(gpu.total_memory / 2**30, 1)
    return facts


def commit() -> str | None:
    """The commit of the checkout that fastrl runs from, with "-dirty" if it has changes; None for an installed package.

    A copy without git may name its commit in a file `.commit`.
    """
    root = Path(fastrl.__file__).resolve().parents[1]
    commit_file = root / ".commit"
    if commit_file.is_file() and not (root / ".git").exists():
        return commit_file.read_text().strip()

    def git(*arguments: str) -> str | None:
        try:
            process = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return process.stdout.strip()

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:  # not a checkout, or an environment inside another checkout
        return None
    head = git("rev-parse", "HEAD")
    return f"{head}-dirty" if head is not None and git("status", "--porcelain") else head


def free_bytes(device: str, index: int | None = None) -> int | None:
    """Bytes on the device that are free for this process; None if not known."""
    if device == "cuda":
        if not torch.cuda.is_available():
            return None
        free, _ = torch.cuda.mem_get_info(index)
        return free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None  # not Linux
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    try:  # a container may be allowed less than the machine has
        limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else max(min(free, int(limit) - int(used)), 0)
