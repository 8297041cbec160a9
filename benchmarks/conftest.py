"""The fixture that times one contender of `fastrl.bench` with pytest-benchmark."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastrl.bench.measure import Run, Unavailable, default_device, synchronize


@pytest.fixture
def time_run(benchmark) -> Callable[[str, Run], None]:
    """Times a run in a group; its consumed inputs are restored before every round, untimed.

    A run that raises Unavailable skips the test.
    """

    device = default_device()

    def time_run(group: str, run: Run) -> None:
        def call() -> None:
            run.call()
            synchronize(device)

        def setup() -> None:
            run.restore()
            synchronize(device)

        benchmark.group = group
        try:
            benchmark.pedantic(call, setup=setup, rounds=20 if device == "cuda" else 5, warmup_rounds=1)
        except Unavailable as reason:
            pytest.skip(str(reason))

    return time_run
