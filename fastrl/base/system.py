"""What Linux says of the machine in its information files; other systems have none of them."""

from __future__ import annotations

import platform
from pathlib import Path


def field(path: str, name: str) -> str | None:
    """The first value of a `name : value` line of a Linux information file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def cpu_name() -> str:
    """The processor's model, or its architecture where the system does not say."""
    return field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
