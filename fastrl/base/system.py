"""What Linux says of the machine in its information files, which other systems lack, and torchrun of its processes."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def field(path: str, name: str) -> str | None:
    """The first value of a `name : value` line of a Linux information file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def started_processes() -> int:
    """How many processes torchrun has started, of which this is one; 1 if it has started none."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else 1


def cpu_name() -> str:
    """The processor's model, or its architecture where the system does not say."""
    return field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
