"""Seconds of a contender's calls, by the host's clock on a CPU and by events on a GPU; and the time to issue them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fastrl.bench.contenders import Run

#: The fewest repeats, even of a slow contender: a median of fewer says nothing.
_FEWEST_REPEATS = 3
#: Bytes read before a call, to evict its inputs from a GPU's cache: 20 times an H200's.
FLUSHED_BYTES = 1 << 30
#: Cycles that a GPU waits before a call, 5 ms on an H200. The host issues the call meanwhile, so that launches are
#: not counted.
_LEAD_CYCLES = 10_000_000
#: Calls issued one after the other without waiting, to measure the host's time per call.
_ISSUED_CALLS = 20


def synchronize(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_runs(run: Run, device: str, repeats: int, seconds: float = math.inf, hot: bool = False) -> list[float]:
    """Seconds of each repeat; after `seconds` in total no further one begins, once there are enough for a median.

    On a GPU by events, with a cold L2 cache or, if `hot`, with what `restore` and the previous call left in it.
    """
    if device != "cuda":
        return _repeated(partial(_seconds_on_host, run), repeats, seconds)
    # Read, not written: written cache lines would be stored to memory while the call runs.
    flushed = None if hot else torch.zeros(FLUSHED_BYTES // 4, device=device)
    return _repeated(partial(_seconds_on_gpu, run, flushed), repeats, seconds)


def time_issue(run: Run, device: str, repeats: int, seconds: float = math.inf) -> list[float]:
    """Seconds that the host spends on a call; on a GPU each is the mean of a round of calls that do not wait.

    On a CPU they include the work itself.
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
