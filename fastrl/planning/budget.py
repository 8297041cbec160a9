"""Memory budgets in bytes: parsing, formatting, and what a call may take without one."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import torch

from fastrl.base.devices import CPU, H100

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class BudgetTooSmall(ValueError):
    """No plan fits the budget. Its arguments: a message that names the smallest possible one, and that in bytes.

    Without an `__init__`, which torch.compile cannot trace.
    """

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def least(self) -> int:
        """The smallest possible budget in bytes."""
        return int(self.args[1])


def parse_budget(value: object, name: str = "memory_budget") -> int | None:
    """Returns bytes from an integer, or from text such as "256MiB"; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} must be a number of bytes or a string such as '256MiB', got {type(value).__name__}")
    size = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", value, re.IGNORECASE | re.ASCII)
        if match is None or (match[3] and not match[2]):
            raise ValueError(
                f"{name} must be a number of bytes, alone or with a unit (B; KiB, MiB, GiB, TiB; KB, MB, GB, TB),"
                f" such as '256MiB' or '1.5GB', got {value!r}"
            )
        whole, _, decimals = match[1].partition(".")
        unit = (1024 if match[3] else 1000) ** _UNITS[match[2].lower()]
        size = int(whole + decimals) * unit // 10 ** len(decimals)
    assert isinstance(size, int)
    if size <= 0:
        raise ValueError(f"{name} must be greater than 0, got {value!r}")
    return size


@cache
def default_budget(device: str, index: int | None = None) -> int:
    """What a call without a budget may take: a sixteenth of the device's memory in bytes, in use or not."""
    return memory_bytes(device, index) // 16


def memory_bytes(device: str, index: int | None = None) -> int:
    """The size of the device's memory; for "cuda" without a GPU here, that of an H100."""
    if device != "cuda":
        return _machine_bytes()
    return torch.cuda.get_device_properties(index).total_memory if torch.cuda.is_available() else H100.memory


@cache
def _machine_bytes() -> int:
    """The size of the machine's memory, or of what a container may take of it."""
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on every system
        size = CPU.memory
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return size
    return size if limit == "max" else min(size, int(limit))


def text(size: int) -> str:
    """Readable size such as "1.5 GiB", to four digits. Rounded up, so `parse_budget` never reads less than `size`."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            decimals = max(4 - len(str(size >> power)), 0)
            return f"{-(-size * 10**decimals >> power) / 10**decimals:.15g} {unit}"
    return f"{size} B"
