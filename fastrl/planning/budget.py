"""Memory budgets in bytes: parsing, formatting, and how much memory is free."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SMALL = 4 << 30  # free bytes to assume if the system reports none


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


def default_budget(device: str, index: int | None = None) -> int:
    """Half of the device's free memory in bytes: what a call without a budget may take."""
    free = free_bytes(device, index)
    if free is None:
        if device == "cuda":
            raise ValueError("a budget is needed: there is no GPU here whose free memory could be shared")
        free = _SMALL
    return max(free // 2, 1 << 24)


def rounded_down(size: int) -> int:
    """At most an eighth less, so that small changes of what is free alter no plan, and with it no result."""
    step = 1 << max(size.bit_length() - 4, 0)
    return size // step * step


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
    free = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), _SMALL)
    try:  # a container may be allowed less than the machine has
        limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else max(min(free, int(limit) - int(used)), 0)


def text(size: int) -> str:
    """Readable size such as "1.5 GiB", to four digits. Rounded up, so `parse_budget` never reads less than `size`."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            decimals = max(4 - len(str(size >> power)), 0)
            return f"{-(-size * 10**decimals >> power) / 10**decimals:.15g} {unit}"
    return f"{size} B"
