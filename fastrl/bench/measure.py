"""Time, peak temporary memory and error of one contender, and of all contenders of a suite at one shape."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fastrl.base.errors import one_line
from fastrl.base.system import field
from fastrl.bench.clock import FLUSHED_BYTES, synchronize, time_runs
from fastrl.bench.contenders import Contender, Outcome, Run, Unavailable, Workload
from fastrl.bench.machine import free_bytes
from fastrl.bench.problems import Expected
from fastrl.bench.results import Limit, Row, Section, finish

#: (run, device, most repeats, seconds after which no repeat begins) -> the seconds of each repeat
Clock = Callable[[Run, str, int, float], list[float]]
P = TypeVar("P")
#: The suites whose rows name the memory plan that fastrl took.
_SUITES_OF_PLANS = ("plans", "memory")


def default_device() -> str:
    """The GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _kilobytes(name: str) -> int | None:
    """The value of a field of this process's status file on Linux."""
    value = field("/proc/self/status", name)
    return None if value is None else int(value.split()[0])


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
    highest = _kilobytes("VmHWM")
    release_free_memory()
    held = _kilobytes("VmRSS")
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
        if gradient.dim() == 3:  # (B, T, V) or, with a position that is ignored, (B, T + 1, V)
            assert expected.logprobs is not None
            length = expected.logprobs.shape[0] // gradient.shape[0]
            actual = gradient[rows // length, rows % length]
        else:
            actual = gradient[rows]
        largest[f"d_{name}"] = _largest(actual.double() - exact) / max(_largest(exact), 1e-300)
    return {name: value if math.isfinite(value) else None for name, value in largest.items()}


def _largest(x: Tensor) -> float:
    return float(x.abs().max())  # propagates NaN


def measure(contender: Contender, row: Row, expected: Expected | None, bench: Bench) -> None:
    """Fill the row: error in a first run, memory in a second, then timed runs, and if `hot` also ones with a hot cache.

    An exception of another package becomes the row's reason; one of fastrl is raised, with its first line in the row.
    """
    device = bench.device
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
        times = bench.clock(run, device, bench.repeats, bench.seconds)
        if bench.hot:
            hot_times = time_runs(run, device, bench.repeats, bench.seconds, hot=True)
            row.milliseconds_hot = 1e3 * statistics.median(hot_times)
    except Unavailable as reason:
        row.skipped = str(reason)
    except Exception as error:  # a peer may raise anything and must not end the run; fastrl must
        row.skipped = one_line(error)
        if contender.ours and not isinstance(error, torch.OutOfMemoryError):
            row.failed = True
            raise
    else:
        row.repeats = len(times)
        row.milliseconds_median = 1e3 * statistics.median(times)
        row.milliseconds_min = 1e3 * min(times)
    finally:
        run = None  # type: ignore[assignment]  # free its tensors before the next contender is measured
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


@dataclass(frozen=True)
class Bench:
    """A suite at a shape, whose axes have names, and what its contenders are measured with."""

    suite: str
    shape: dict[str, int]
    dtype: torch.dtype
    device: str
    repeats: int
    log: Callable[[str], None] = lambda text: None
    seconds: float = math.inf  # after these no further repeat of a contender begins
    clock: Clock = time_runs
    hot: bool = False  # whether contenders are also timed with a hot cache

    def problem(self, make: Callable[..., P], what: str = "inputs and float64 answers", **more: float) -> P:
        """The problem of this shape."""
        self.log(what)
        return make(*self.shape.values(), self.dtype, self.device, **more)

    def run(
        self,
        workloads: Iterable[Workload],
        limit: Callable[[Workload], Limit | None] = lambda workload: None,
        limits: dict[str, float | None] | None = None,
    ) -> Section:
        """The results of the workloads, each compared with its limit."""
        section = self.section(limits or {})
        for workload in workloads:
            self.add(section, workload, self.measure_workload(workload), limit(workload))
        return section

    def section(self, limits: dict[str, float | None]) -> Section:
        """A section without results."""
        return Section(self.suite, self.shape, limits, {}, [])

    def add(self, section: Section, workload: Workload, rows: list[Row], limit: Limit | None = None) -> None:
        """Add a workload's finished rows to the section."""
        finish(rows, limit)
        section.workloads[workload.name] = workload.description
        section.rows.extend(rows)

    def measure_workload(self, workload: Workload) -> list[Row]:
        """The rows of all contenders of the workload."""
        return [self.measure_contender(contender, workload) for contender in workload.contenders]

    def measure_contender(self, contender: Contender, workload: Workload, with_expected: bool = True) -> Row:
        """The contender's row. An error in fastrl is logged and marks the row; other contenders are still measured."""
        self.log(f"{workload.name}: {contender.name}")
        row = self._row(workload.name, contender.name)
        row.workload_bytes, row.workload_flops = workload.workload_bytes, workload.workload_flops
        try:
            measure(contender, row, workload.expected if with_expected else None, self)
        except Exception:
            if not row.failed:
                raise
            self.log(traceback.format_exc())
        if self.suite in _SUITES_OF_PLANS and contender.plans is not None and row.skipped is None:
            row.plan, row.cheapest_plan = contender.plans()
        return row

    def seconds_of(self, contender: Contender) -> float | None:
        """The median of a contender that belongs to no workload; None if it cannot run."""
        self.log(contender.name)
        row = self._row(contender.name, contender.name)
        measure(contender, row, None, self)
        return row.seconds

    def _row(self, workload: str, contender: str) -> Row:
        return Row(self.suite, self.shape, str(self.dtype).removeprefix("torch."), workload, contender)
