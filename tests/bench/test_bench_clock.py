"""How calls are timed: on this machine, and on a GPU that only writes down what it is asked for."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_rows import measure_alone

from fastrl.bench import clock
from fastrl.bench.clock import time_issue, time_runs
from fastrl.bench.contenders import Contender, Outcome, Run
from fastrl.bench.measure import default_device

DEVICE = default_device()
NOTHING = Outcome(None, None, None, {})


def test_a_slow_contender_is_repeated_often_enough_for_a_median_only() -> None:
    run = Run(lambda: NOTHING)
    assert len(time_runs(run, DEVICE, 10, seconds=0.0)) == 3
    assert len(time_runs(run, DEVICE, 2, seconds=0.0)) == 2
    assert len(time_runs(run, DEVICE, 10, seconds=1e3)) == 10


@pytest.mark.parametrize("timed", [time_runs, time_issue])
def test_restoring_is_not_timed_on_a_cpu(timed: Any) -> None:
    steps: list[str] = []

    def call() -> Outcome:
        steps.append("call")
        time.sleep(0.01)
        return NOTHING

    def restore() -> None:
        steps.append("restore")
        time.sleep(0.1)

    times = timed(Run(call, restore), "cpu", 3)
    assert steps == ["restore", "call"] * 3
    assert all(0.01 <= seconds < 0.1 for seconds in times)


class Recorder:
    """Stands in for torch and its GPU: what is asked of them, in order; an event's time is the calls before it."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.calls = 0
        self.cuda = SimpleNamespace(
            Event=self.event,
            _sleep=lambda cycles: self.steps.append("sleep"),
            synchronize=lambda: self.steps.append("synchronize"),
        )

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        found = SimpleNamespace(synchronize=lambda: self.steps.append("wait"))

        def record() -> None:
            self.steps.append("event")
            found.at = self.calls

        found.record, found.elapsed_time = record, lambda end: 5.0 * (end.at - found.at)
        return found

    def zeros(self, entries: int, device: str) -> Any:
        assert (4 * entries, device) == (1 << 30, "cuda")
        self.steps.append("allocate")
        return SimpleNamespace(sum=lambda: self.steps.append("flush"))

    def call(self) -> Outcome:
        self.steps.append("call")
        self.calls += 1
        return NOTHING

    def run(self) -> Run:
        return Run(self.call, lambda: self.steps.append("restore"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(clock, "torch", found)
    return found


def test_on_a_gpu_the_cache_is_emptied_and_the_call_issued_before_the_clock_starts(gpu: Recorder) -> None:
    assert time_runs(gpu.run(), "cuda", 2) == [0.005, 0.005]
    assert gpu.steps == ["allocate", *["restore", "sleep", "flush", "event", "call", "event", "wait"] * 2]


def test_on_a_gpu_a_hot_cache_is_left_alone(gpu: Recorder) -> None:
    assert time_runs(gpu.run(), "cuda", 2, hot=True) == [0.005, 0.005]
    assert gpu.steps == ["restore", "sleep", "event", "call", "event", "wait"] * 2


def test_on_a_gpu_calls_are_issued_without_waiting(gpu: Recorder) -> None:
    (seconds,) = time_issue(gpu.run(), "cuda", 1)
    assert gpu.steps == ["synchronize", *["restore", "call"] * 20, "synchronize"]
    assert 0 < seconds < 0.001


def test_a_row_has_the_hot_median_where_it_is_asked_for() -> None:
    contender = Contender("a contender", lambda: Run(lambda: NOTHING), 0)
    for hot in (False, True):
        assert (measure_alone(contender, repeats=3, hot=hot).milliseconds_hot is not None) == hot


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_events_see_the_workload_and_not_the_launches() -> None:
    x = torch.zeros(1 << 26, device="cuda")

    def adding(entries: int) -> Run:
        def call() -> Outcome:
            for _ in range(20):
                x[:entries].add_(1)
            return NOTHING

        return Run(call)

    # 20 launches take the host longer than the 2 us that each kernel runs; 256 MiB are read and written 20 times.
    few, many = (sorted(time_runs(adding(entries), "cuda", 5))[2] for entries in (1, 1 << 26))
    assert few < 0.0002 < 0.001 < many
