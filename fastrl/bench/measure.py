"""Time, peak temporary memory and error of one contender."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.bench.clock import FLUSHED_BYTES, synchronize, time_runs
from fastrl.bench.contenders import Contender, Outcome, Run, Unavailable
from fastrl.bench.problems import Expected
from fastrl.planning.budget import free_bytes

#: (run, device, most repeats, seconds after which no repeat begins) -> the seconds of each repeat
Clock = Callable[[Run, str, int, float], list[float]]


class Limit(NamedTuple):
    """The least time of a workload, measured in the same run, and its source, such as "a copy of as many bytes"."""

    seconds: float
    of: str


@dataclass
class Row:
    """One line of a table: a contender's results, or the reason why it has none."""

    suite: str
    shape: dict[str, int]
    dtype: str
    workload: str
    contender: str
    skipped: str | None = None
    failed: bool = False  # skipped because of an error in fastrl
    ours: bool = False
    is_limit: bool = False  # the bare workload that the others are compared with
    plan: str | None = None  # which memory plan fastrl took
    milliseconds_median: float | None = None
    milliseconds_min: float | None = None
    milliseconds_hot: float | None = None  # the median with what the previous call left in a GPU's L2 cache
    repeats: int | None = None
    tokens_per_second: float | None = None
    workload_bytes: int | None = None  # the least that the workload has to move
    bytes_per_second: float | None = None
    workload_flops: int | None = None  # the least that its matrix products cost
    flops_per_second: float | None = None
    limit: str | None = None  # what the row is compared with
    milliseconds_limit: float | None = None
    fraction_of_limit: float | None = None
    peak_temporary_bytes: int | None = None
    speedup_over_eager: float | None = None
    speedup_over_compile: float | None = None
    share_of_step: float | None = None  # the head's and the loss's share of a whole training step's time
    errors: dict[str, float | None] = field(default_factory=dict)  # None = not finite

    @property
    def tokens(self) -> int:
        """The number of tokens per call: N, or B responses of T."""
        return self.shape["N"] if "N" in self.shape else self.shape["B"] * self.shape["T"]


def default_device() -> str:
    """The GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _kilobytes(path: Path, name: str) -> int | None:
    """The value of a field in a Linux status file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def peak_temporary_bytes(run: Run, device: str) -> int | None:
    """The peak memory of a call beyond its inputs and results; None if it cannot be measured.

    On a GPU by torch's allocator; on Linux by the process's high-water mark, which includes the buffers of every
    library and counts only touched pages.
    """
    run.restore()
    if device == "cuda":
        gc.collect()
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        outcome = run.call()
        synchronize(device)
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        del outcome
        return peak
    if sys.platform != "linux":
        return None
    release_free_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    except OSError:
        return None
    outcome = run.call()
    highest = _kilobytes(Path("/proc/self/status"), "VmHWM")
    release_free_memory()
    held = _kilobytes(Path("/proc/self/status"), "VmRSS")
    del outcome
    return None if highest is None or held is None else max(highest - held, 0) << 10


def release_free_memory() -> None:
    """Return freed memory to the system, so that it does not count as memory in use."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def errors(outcome: Outcome, expected: Expected) -> dict[str, float | None]:
    """Largest errors against float64: absolute for loss and statistics, relative to the largest entry for gradients."""
    largest: dict[str, float] = {}
    for name in ("loss", "logprobs", "entropy"):
        actual, exact = getattr(outcome, name), getattr(expected, name)
        if actual is not None and exact is not None:
            largest[name] = _largest(actual.reshape(-1).double() - exact.reshape(-1))
    for name, gradient in outcome.gradients.items():
        rows, exact = expected.gradients[name]
        if gradient.dim() == 3:  # (B, T, V), possibly not contiguous, so that reshape would copy
            actual = gradient[rows // gradient.shape[1], rows % gradient.shape[1]]
        else:
            actual = gradient[rows]
        largest[f"d_{name}"] = _largest(actual.double() - exact) / max(_largest(exact), 1e-300)
    return {name: value if math.isfinite(value) else None for name, value in largest.items()}


def _largest(x: Tensor) -> float:
    return float(x.abs().max())  # propagates NaN


def measure(
    contender: Contender,
    row: Row,
    expected: Expected | None,
    device: str,
    repeats: int,
    seconds: float = math.inf,
    clock: Clock = time_runs,
    hot: bool = False,
) -> None:
    """Fill the row: error in a first run, memory in a second, then timed runs, and if `hot` also ones with a hot cache.

    An exception of another package becomes the row's reason; one of fastrl is raised, with its first line in the row.
    """
    row.ours = contender.ours
    free = free_bytes(device)
    needed = contender.bytes_needed + (FLUSHED_BYTES if device == "cuda" else 0)
    if free is not None and needed > free:
        row.skipped = f"needs about {_gib(needed)}, and {_gib(free)} are free"
        return
    try:
        run = contender.prepare()
        run.restore()
        outcome = run.call()
        if expected is not None:
            row.errors = errors(outcome, expected)
        del outcome
        row.peak_temporary_bytes = peak_temporary_bytes(run, device)
        times = clock(run, device, repeats, seconds)
        hot_times = time_runs(run, device, repeats, seconds, hot=True) if hot else None
    except Unavailable as reason:
        row.skipped = str(reason)
    except torch.OutOfMemoryError as error:
        row.skipped = f"out of memory: {_first_line(error)}"
    except Exception as error:  # a peer may raise anything and must not end the run; fastrl must
        row.skipped = f"{type(error).__name__}: {_first_line(error)}"
        if contender.ours:
            row.failed = True
            raise
    else:
        row.repeats = len(times)
        row.milliseconds_median = 1e3 * statistics.median(times)
        row.milliseconds_min = 1e3 * min(times)
        row.milliseconds_hot = None if hot_times is None else 1e3 * statistics.median(hot_times)
    finally:
        run = None  # type: ignore[assignment]  # free its tensors before the next contender is measured
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def finish(rows: list[Row], limit: Limit | None, eager: str, compiled: str) -> None:
    """Fill derived fields of a workload's rows: rates, fraction of the limit, speed-ups over two of the contenders."""
    medians: dict[str, Any] = {row.contender: row.milliseconds_median for row in rows}
    for row in rows:
        if row.milliseconds_median is None:
            continue
        seconds = row.milliseconds_median / 1e3
        row.tokens_per_second = row.tokens / seconds
        row.bytes_per_second = None if row.workload_bytes is None else row.workload_bytes / seconds
        row.flops_per_second = None if row.workload_flops is None else row.workload_flops / seconds
        if limit is not None:
            row.limit, row.milliseconds_limit = limit.of, 1e3 * limit.seconds
            row.fraction_of_limit = limit.seconds / seconds
        for name, attribute in ((eager, "speedup_over_eager"), (compiled, "speedup_over_compile")):
            if medians.get(name) is not None:
                setattr(row, attribute, medians[name] / row.milliseconds_median)
