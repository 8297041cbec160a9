"""How much of a CPU's memory is free: what the system says, and what a container may still take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastrl.bench.machine import free_bytes

AVAILABLE = 6 << 30
MEMINFO = f"MemTotal: 16000000 kB\nMemFree: 1000 kB\nMemAvailable: {AVAILABLE >> 10} kB\n"


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [
        ("max", "123", AVAILABLE),
        (str(5 << 30), str(2 << 30), 3 << 30),
        (str(5 << 30), str(7 << 30), 0),
        (str(9 << 40), "0", AVAILABLE),
        (None, None, AVAILABLE),
    ],
)
def test_a_container_has_what_it_does_not_use_yet(
    monkeypatch: pytest.MonkeyPatch, limit: str | None, used: str | None, free: int
) -> None:
    texts = {"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory.max": limit, "/sys/fs/cgroup/memory.current": used}

    def read(path: Path, **_: Any) -> str:
        if (text := texts[str(path)]) is None:
            raise FileNotFoundError(path)
        return f"{text}\n"

    monkeypatch.setattr(Path, "read_text", read)
    assert free_bytes("cpu") == free
