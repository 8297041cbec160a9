"""Shared by the suites: how one subject of `fastrl.bench` is handed to pytest-benchmark."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastrl.bench.measure import Run, default_device, synchronize


@pytest.fixture
def time_run(benchmark) -> Callable[[str, Run], None]:
    """Times a run in a group, its consumed inputs restored before every round outside the clock."""

    device = default_device()

    def time_run(group: str, run: Run) -> None:
        def call() -> None:
            run.call()
            synchronize(device)

        def setup() -> None:
            run.restore()
            synchronize(device)

        benchmark.group = group
        benchmark.pedantic(call, setup=setup, rounds=20 if device == "cuda" else 5, warmup_rounds=1)

    return time_run
