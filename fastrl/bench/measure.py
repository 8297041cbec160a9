"""Time, peak temporary memory and error of one subject."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.budget import free_bytes

from .problems import Truth

#: Repeats that a slow subject still gets: a median of fewer says nothing.
_FEWEST_REPEATS = 3


class Outcome(NamedTuple):
    """What a subject gave, detached; None or missing where it does not give that."""

    loss: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None
    gradients: dict[str, Tensor]


class Run(NamedTuple):
    """A subject, ready: `call` is what is timed; `restore` brings consumed inputs back before it, untimed."""

    call: Callable[[], Outcome]
    restore: Callable[[], None] = lambda: None


class Unavailable(Exception):
    """Why a subject cannot run here."""


@dataclass(frozen=True)
class Subject:
    """One way to do a work."""

    name: str
    prepare: Callable[[], Run]  # raises Unavailable or ImportError where it cannot run
    bytes_needed: int  # beyond the inputs, roughly: it is left out where there is less
    ours: bool = False  # an error of ours is no reason to skip


@dataclass
class Row:
    """One line of a table: a subject's numbers, or the reason why it has none."""

    suite: str
    shape: dict[str, int]
    dtype: str
    work: str
    subject: str
    skipped: str | None = None
    failed: bool = False  # skipped, and that is our mistake
    ours: bool = False
    is_limit: bool = False  # the bare work that the others are held against
    plan: str | None = None  # which memory plan fastrl took
    milliseconds_median: float | None = None
    milliseconds_min: float | None = None
    repeats: int | None = None
    tokens_per_second: float | None = None
    work_bytes: int | None = None  # what the work has to move at least
    bytes_per_second: float | None = None
    work_flops: int | None = None  # what its matrix products cost at least
    flops_per_second: float | None = None
    fraction_of_limit: float | None = None
    peak_temporary_bytes: int | None = None
    speedup_over_eager: float | None = None
    speedup_over_compile: float | None = None
    share_of_step: float | None = None  # of a whole training step's time: what head and loss take
    errors: dict[str, float | None] = field(default_factory=dict)  # None = not finite

    @property
    def tokens(self) -> int:
        """How many tokens a call handles: N, or B responses of T."""
        return self.shape["N"] if "N" in self.shape else self.shape["B"] * self.shape["T"]


def default_device() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize(device: str) -> None:
    """Wait for the device's work."""
    if device == "cuda":
        torch.cuda.synchronize()


def _kilobytes(path: Path, name: str) -> int | None:
    """A number of a Linux status file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def time_runs(run: Run, device: str, repeats: int, seconds: float = math.inf) -> list[float]:
    """Seconds of each repeat; no further one is begun after `seconds` in all, once there are enough for a median."""
    times: list[float] = []
    while len(times) < repeats and (sum(times) < seconds or len(times) < _FEWEST_REPEATS):
        run.restore()
        synchronize(device)
        start = time.perf_counter()
        run.call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def peak_temporary_bytes(run: Run, device: str) -> int | None:
    """The most memory the call held beyond its inputs and what it returns; None where that cannot be told.

    On a GPU by torch's allocator; on Linux by the process' high-water mark, which includes every library's own
    buffers and counts only pages that were touched.
    """
    run.restore()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        outcome = run.call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        del outcome
        return peak
    if sys.platform != "linux":
        return None
    release_free_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    except OSError:
        return None
    outcome = run.call()
    highest = _kilobytes(Path("/proc/self/status"), "VmHWM")
    release_free_memory()
    held = _kilobytes(Path("/proc/self/status"), "VmRSS")
    del outcome
    return None if highest is None or held is None else max(highest - held, 0) << 10


def release_free_memory() -> None:
    """Hand freed memory back to the system, so that it is not taken for memory in use."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def errors(outcome: Outcome, truth: Truth) -> dict[str, float | None]:
    """Largest errors against float64: absolute for loss and statistics, relative to the largest entry for gradients."""
    found: dict[str, float] = {}
    for name in ("loss", "logprobs", "entropy"):
        actual, expected = getattr(outcome, name), getattr(truth, name)
        if actual is not None and expected is not None:
            found[name] = _largest(actual.reshape(-1).double() - expected.reshape(-1))
    for name, gradient in outcome.gradients.items():
        rows, expected = truth.gradients[name]
        if gradient.dim() == 3:  # (B, T, V), perhaps with gaps, which reshape would copy
            actual = gradient[rows // gradient.shape[1], rows % gradient.shape[1]]
        else:
            actual = gradient[rows]
        found[f"d_{name}"] = _largest(actual.double() - expected) / max(_largest(expected), 1e-300)
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _largest(x: Tensor) -> float:
    return float(x.abs().max())  # a NaN stays one


def measure(
    subject: Subject, row: Row, truth: Truth | None, device: str, repeats: int, seconds: float = math.inf
) -> None:
    """Fill the row: error in a first run, memory in a second, then the timed ones (see `time_runs`).

    What another package raises becomes the row's reason; what ours raises is raised, its first line in the row.
    """
    row.ours = subject.ours
    free = free_bytes(device)
    if free is not None and subject.bytes_needed > free:
        row.skipped = f"needs about {_gib(subject.bytes_needed)}, and {_gib(free)} are free"
        return
    try:
        run = subject.prepare()
        run.restore()
        outcome = run.call()
        if truth is not None:
            row.errors = errors(outcome, truth)
        del outcome
        row.peak_temporary_bytes = peak_temporary_bytes(run, device)
        times = time_runs(run, device, repeats, seconds)
    except Unavailable as reason:
        row.skipped = str(reason)
    except torch.OutOfMemoryError as error:
        row.skipped = f"out of memory: {_first_line(error)}"
    except Exception as error:  # a peer's code may raise anything, and must not end the run; ours must
        row.skipped = f"{type(error).__name__}: {_first_line(error)}"
        if subject.ours:
            row.failed = True
            raise
    else:
        row.repeats = len(times)
        row.milliseconds_median = 1e3 * statistics.median(times)
        row.milliseconds_min = 1e3 * min(times)
    finally:
        run = None  # type: ignore[assignment]  # frees its tensors before the next subject is measured
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def finish(rows: list[Row], limit_seconds: float | None, eager: str, compiled: str) -> None:
    """Derived numbers of a work's rows: rates, fraction of the limit, speed-ups over two of the subjects."""
    medians: dict[str, Any] = {row.subject: row.milliseconds_median for row in rows}
    for row in rows:
        if row.milliseconds_median is None:
            continue
        seconds = row.milliseconds_median / 1e3
        row.tokens_per_second = row.tokens / seconds
        row.bytes_per_second = None if row.work_bytes is None else row.work_bytes / seconds
        row.flops_per_second = None if row.work_flops is None else row.work_flops / seconds
        row.fraction_of_limit = None if limit_seconds is None else limit_seconds / seconds
        for name, attribute in ((eager, "speedup_over_eager"), (compiled, "speedup_over_compile")):
            if medians.get(name) is not None:
                setattr(row, attribute, medians[name] / row.milliseconds_median)
