"""Seconds of a contender's calls: by the host's clock on a CPU, by events on a GPU; and what issuing them costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fastrl.bench.contenders import Run

#: Repeats that a slow contender still gets: a median of fewer says nothing.
_FEWEST_REPEATS = 3
#: Bytes that are read before a call, to leave nothing of its inputs in a GPU's cache: 20 times an H200's.
FLUSHED_BYTES = 1 << 30
#: Cycles that a GPU is kept waiting before a call, 5 ms on an H200: the host issues the call meanwhile, so that
#: launches are not counted.
_LEAD_CYCLES = 10_000_000
#: Calls that are issued one after the other without waiting, to tell what one costs the host.
_ISSUED_CALLS = 20


def synchronize(device: str) -> None:
    """Wait for the device's work."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_runs(run: Run, device: str, repeats: int, seconds: float = math.inf, hot: bool = False) -> list[float]:
    """Seconds of each repeat; no further one is begun after `seconds` in all, once there are enough for a median.

    On a GPU by events, with nothing in its L2 cache or, if `hot`, with what restoring and the call before left there.
    """
    if device != "cuda":
        return _repeated(partial(_seconds_on_host, run), repeats, seconds)
    # Read, not written: a cache of written lines would have to be stored while the call runs.
    flushed = None if hot else torch.zeros(FLUSHED_BYTES // 4, device=device)
    return _repeated(partial(_seconds_on_gpu, run, flushed), repeats, seconds)


def time_issue(run: Run, device: str, repeats: int, seconds: float = math.inf) -> list[float]:
    """Seconds that the host spends on a call, on a GPU each the mean of a round of calls that wait for nothing.

    On a CPU the work itself is in them.
    """
    return _repeated(partial(_seconds_to_issue, run, device), repeats, seconds)


def _repeated(once: Callable[[], float], repeats: int, seconds: float) -> list[float]:
    times: list[float] = []
    while len(times) < repeats and (sum(times) < seconds or len(times) < _FEWEST_REPEATS):
        times.append(once())
    return times


def _seconds_on_host(run: Run) -> float:
    run.restore()
    start = time.perf_counter()
    run.call()
    return time.perf_counter() - start


def _seconds_on_gpu(run: Run, flushed: Tensor | None) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run.restore()
    torch.cuda._sleep(_LEAD_CYCLES)
    if flushed is not None:
        flushed.sum()
    start.record()
    run.call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _seconds_to_issue(run: Run, device: str) -> float:
    calls = _ISSUED_CALLS if device == "cuda" else 1
    synchronize(device)
    total = 0.0
    for _ in range(calls):
        run.restore()
        start = time.perf_counter()
        run.call()
        total += time.perf_counter() - start
    synchronize(device)
    return total / calls
