"""Time, peak temporary memory and error of one contender."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastrl.bench.clock import FLUSHED_BYTES, synchronize, time_runs
from fastrl.bench.contenders import Contender, Outcome, Run, Unavailable
from fastrl.bench.problems import Expected
from fastrl.bench.results import Row
from fastrl.planning.budget import free_bytes

#: (run, device, most repeats, seconds after which no repeat begins) -> the seconds of each repeat
Clock = Callable[[Run, str, int, float], list[float]]


@dataclass(frozen=True)
class Setting:
    """What all contenders of a suite are measured with."""

    dtype: torch.dtype
    device: str
    repeats: int
    log: Callable[[str], None] = lambda text: None
    seconds: float = math.inf  # after these no further repeat of a contender begins
    clock: Clock = time_runs
    hot: bool = False  # whether contenders are also timed with a hot cache

    @property
    def dtype_name(self) -> str:
        """The dtype's name without the module: "float32"."""
        return str(self.dtype).removeprefix("torch.")


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
        if gradient.dim() == 3:  # (B, T, V) or, with a position that is ignored, (B, T + 1, V)
            length = expected.logprobs.shape[0] // gradient.shape[0]
            actual = gradient[rows // length, rows % length]
        else:
            actual = gradient[rows]
        largest[f"d_{name}"] = _largest(actual.double() - exact) / max(_largest(exact), 1e-300)
    return {name: value if math.isfinite(value) else None for name, value in largest.items()}


def _largest(x: Tensor) -> float:
    return float(x.abs().max())  # propagates NaN


def measure(contender: Contender, row: Row, expected: Expected | None, setting: Setting) -> None:
    """Fill the row: error in a first run, memory in a second, then timed runs, and if `hot` also ones with a hot cache.

    An exception of another package becomes the row's reason; one of fastrl is raised, with its first line in the row.
    """
    device = setting.device
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
        times = setting.clock(run, device, setting.repeats, setting.seconds)
        if setting.hot:
            hot_times = time_runs(run, device, setting.repeats, setting.seconds, hot=True)
            row.milliseconds_hot = 1e3 * statistics.median(hot_times)
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
