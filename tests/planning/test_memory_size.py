"""The size of a CPU's memory: the machine's, or what a container may take of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastrl
from fastrl.base.devices import CPU
from fastrl.planning import budget
from fastrl.planning.budget import default_budget, memory_bytes

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else CPU.memory


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    budget._machine_bytes.cache_clear()
    yield
    budget._machine_bytes.cache_clear()


@pytest.mark.parametrize(
    ("limit", "size"), [("max", MACHINE), (str(3 << 20), 3 << 20), (str(MACHINE << 10), MACHINE), (None, MACHINE)]
)
def test_a_container_has_what_it_may_take(monkeypatch: pytest.MonkeyPatch, limit: str | None, size: int) -> None:
    read: list[str] = []

    def text(path: Path, **_: Any) -> str:
        read.append(str(path))
        if limit is None:
            raise FileNotFoundError(path)
        return f"{limit}\n"

    monkeypatch.setattr(Path, "read_text", text)
    assert memory_bytes("cpu") == size and default_budget.__wrapped__("cpu") == size // 16
    assert read == ["/sys/fs/cgroup/memory.max"], "once"


def test_a_machine_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.setattr(Path, "read_text", lambda path: "max")
    assert memory_bytes("cpu") == CPU.memory


def test_a_call_that_names_no_gpu_may_take_a_share_of_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [80 << 30, 40 << 30]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i]))
    default_budget.cache_clear()
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert fastrl.plan_memory(8192, 4096, 151936, device="cuda").budget == sizes[current] // 16
    default_budget.cache_clear()
