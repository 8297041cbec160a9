"""Compile the kernels before they are timed, by many processes that do not touch the GPU.

    python benchmarks/precompile.py                        # the variants that the suites launch
    python benchmarks/precompile.py --sizes --processes 14 # and every size that tune.py tries

What is compiled goes to Triton's cache, where the first launch finds it. Without a GPU it is compiled for sm_90.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import jit

from fastrl.backend.contract import Best, Divergence, Entries, Pair, Statistics, Support, Transform
from fastrl.backend.triton import backend
from fastrl.kernels import row_statistics
from fastrl.objectives.rows import RowInputs
from fastrl.passes import linear

#: Triton defines its kernels for the interpreter if it sees this.
_INTERPRETER = "TRITON_INTERPRET"
_VOCAB = 151936
_DTYPES = (torch.bfloat16, torch.float32)
_KINDS = ("forward_kl", "reverse_kl", "jsd")
_ROWS = 2

Case = tuple[str, Callable[[], object]]  # a name, and calls whose launches are to be compiled


class _CompileOnly:
    """Stands in for the GPU's driver: tells what to compile for, and has no device."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compile_only(target: GPUTarget) -> Iterator[None]:
    """Within the context every launch only compiles; what it would have written is undefined."""
    triton.runtime.driver.set_active(_CompileOnly(target))
    try:
        with patch.object(jit.KernelInterface, "__getitem__", lambda kernel, grid: partial(kernel.warmup, grid=grid)):
            yield
    finally:
        triton.runtime.driver._active = None  # found again when it is asked for


def suite_cases() -> list[Case]:
    """What smoke.py and the suites launch: those of smoke.py first, then rarer variants."""
    plain, capped = Transform(), Transform(softcap=30.0)
    row: list[Case] = []
    rare: list[Case] = []
    for dtype, aligned, transform, masked in itertools.product(_DTYPES, (True, False), (plain, capped), (False, True)):
        cases = row if aligned and transform is plain and not masked else rare
        logits = torch.zeros(1, _ROWS, _VOCAB + (not aligned), dtype=dtype)[:, :, : _VOCAB - (not aligned)]
        given = (logits, masked, transform)
        name = f"{dtype}, {'aligned' if aligned else 'plain'}, softcap {transform.softcap}, masked {masked}"
        cases += [
            (f"statistics, {name}", partial(_statistics, *given, apart=False)),
            (f"statistics of segments, {name}", partial(_statistics, *given, apart=True)),
            *((f"gradient, {name}, entropy {h}", partial(_gradient, *given, h)) for h in (False, True)),
            *(
                (f"forward-gradient, {name}, entropy {h}, beside {beside}", partial(_visit, *given, h, beside))
                for h, beside in itertools.product((False, True), repeat=2)
            ),
        ]
    for dtype in _DTYPES:
        row.append((f"scale, {dtype}", partial(_scale, dtype, dtype)))
        row += [(f"find_support, {dtype}, top_k {k}", partial(_find_support, dtype, k)) for k in (0, 50)]
        row.append((f"supports, {dtype}", partial(_supports, dtype, add=False)))
        row += [(f"pair, {dtype}, {kind}", partial(_pair, dtype, plain, kind)) for kind in _KINDS]
        rare += [(f"pair, {dtype}, {kind}, softcap", partial(_pair, dtype, capped, kind)) for kind in _KINDS]
        row.append((f"entries, {dtype}", partial(_entries, dtype)))
        rare.append((f"supports beside dense rows, {dtype}", partial(_supports, dtype, add=True)))
        rare += [(f"slope {vector}, {dtype}", partial(_slope, dtype, vector)) for vector in (0, 1)]
    row.append(("scale, float32 to bfloat16", partial(_scale, torch.float32, torch.bfloat16)))
    return row + rare


def size_cases() -> list[Case]:
    """The sizes that tune.py tries, in bfloat16."""
    import tune  # here, because it imports this program

    found: list[Case] = []
    for kernel in tune.ROW_KERNELS:
        for choice in tune.row_choices(kernel, _VOCAB, 2):
            found.append((f"{kernel}, {choice}", partial(_size, kernel, choice)))
    return found


def _size(kernel: str, choice: dict[str, Any]) -> None:
    import tune

    # Which of the two a default takes depends on the number of rows.
    apart = (True, False) if kernel == "statistics" and choice["apart"] is None else (choice["apart"],)
    for each in apart:
        with tune.chosen(kernel, {**choice, "apart": each}):
            tune.row_call(kernel, _ROWS, _VOCAB, torch.bfloat16, "cpu")[0]()


def _per_row() -> tuple[Tensor, Tensor]:
    """Targets and float32 numbers."""
    return torch.zeros(_ROWS, dtype=torch.int64), torch.zeros(_ROWS)


def _mask(masked: bool) -> Tensor | None:
    return torch.ones(_ROWS, dtype=torch.bool) if masked else None


def _statistics(logits: Tensor, masked: bool, transform: Transform, apart: bool) -> None:
    with patch.object(row_statistics, "_PROGRAMS", 1 << 30 if apart else 0):
        backend.row_statistics(logits, _per_row()[0], _mask(masked), transform)


def _gradient(logits: Tensor, masked: bool, transform: Transform, entropy: bool) -> None:
    targets, c = _per_row()
    statistics = Statistics(c, c, c, c)
    backend.row_gradient(logits, targets, _mask(masked), transform, statistics, c, c if entropy else None, logits)


def _visit(logits: Tensor, masked: bool, transform: Transform, entropy: bool, beside: bool) -> None:
    import tune

    targets, c = _per_row()
    inputs = RowInputs(c, c, c, entropy_weights=c if entropy else None)
    out = torch.empty(logits.shape, dtype=logits.dtype) if beside else None
    backend.row_forward_gradient(logits, targets, _mask(masked), transform, tune.CLIP, inputs, out)


def _slope(dtype: torch.dtype, vector: int) -> None:
    """What a frozen head visits its rows for: d logp, like cross-entropy, or d entropy."""
    logits, (targets, _) = torch.zeros(1, _ROWS, _VOCAB, dtype=dtype), _per_row()
    inputs, out = linear._slope_inputs(vector, targets, 1.0), torch.empty_like(logits) if vector else None
    backend.row_forward_gradient(logits, targets, None, Transform(), linear._SLOPE, inputs, out)


def _scale(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    tensor = torch.zeros(64, dtype=dtype)
    backend.scale(tensor, torch.ones(()), tensor if out_dtype == dtype else torch.empty(64, dtype=out_dtype))


def _find_support(dtype: torch.dtype, top_k: int) -> None:
    # The host reads how many entries are kept: none, if nothing runs and memory is zeros.
    with patch.object(torch, "empty", torch.zeros):
        backend.find_support(torch.zeros(1, _ROWS, _VOCAB, dtype=dtype), 1.0, top_k, 0.95, 0.0)


def _supports(dtype: torch.dtype, add: bool) -> None:
    import tune

    width, transform = 64, Transform()
    targets, c = _per_row()
    hidden, weight = torch.zeros(_ROWS, width, dtype=dtype), torch.zeros(_VOCAB, width, dtype=dtype)
    ids, values = torch.zeros(_ROWS, dtype=torch.int32), torch.zeros(_ROWS)
    support = Support(ids, torch.arange(_ROWS + 1), torch.ones(_ROWS, dtype=torch.bool))
    backend.support_products(hidden, weight, None, support)
    backend.support_statistics(values, targets, support, transform)
    backend.support_gradient(values, targets, support, transform, Statistics(c, c, c, c), c, None, values)
    backend.support_forward_gradient(values, targets, support, transform, tune.CLIP, RowInputs(c, c, c), values)
    backend.support_hidden(values, weight, support, hidden, add)
    backend.support_weight(values, hidden, backend.by_token(support, _VOCAB), weight, None, add)
    backend.support_restrict(torch.zeros(_ROWS, _VOCAB, dtype=dtype), 0, targets, ids, support.offsets)


def _pair(dtype: torch.dtype, transform: Transform, kind: str) -> None:
    logits, c = torch.zeros(_ROWS, _VOCAB, dtype=dtype), _per_row()[1]
    pair = Pair(logits, torch.empty_like(logits), transform, transform, Divergence(kind))
    known = backend.pair_statistics(pair)
    backend.pair_gradient(pair, known, c, logits)
    backend.pair_forward_gradient(pair, c)


def _entries(dtype: torch.dtype) -> None:
    logits, (rows, values) = torch.zeros(1, _ROWS, _VOCAB, dtype=dtype), _per_row()
    entries = Entries(torch.zeros(_ROWS, dtype=torch.int32), torch.arange(_ROWS + 1))
    backend.gather_entries(logits, 0, rows, entries, values, Best(rows, values))
    backend.scatter_entries(values, 0, rows, entries, logits)


def current_target() -> str:
    """What to compile for: this machine's GPU, or sm_90."""
    if not torch.cuda.is_available():
        return "cuda:90:32"
    target = triton.runtime.driver.active.get_current_target()
    return f"{target.backend}:{target.arch}:{target.warp_size}"


@contextmanager
def running(wanted: bool, sizes: bool) -> Iterator[subprocess.Popen[bytes] | None]:
    """Within the context this program runs in the background, if it is wanted; it ends with the context."""
    if not wanted:
        yield None
        return
    command = [sys.executable, __file__, "--target", current_target(), *["--sizes"] * sizes]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # its processes too
        process.wait()


def _compile(cases: list[Case], target: str) -> int:
    """The number of cases that failed."""
    vendor, arch, warp = target.split(":")
    failed = 0
    with compile_only(GPUTarget(vendor, int(arch) if arch.isdecimal() else arch, int(warp))):
        for name, call in cases:
            try:
                call()
            except Exception as error:  # the first launch says it again, where it matters
                failed += 1
                print(f"{name}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
    return failed


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--sizes", action="store_true", help="compile the sizes that tune.py tries instead")
    parser.add_argument("--target", help="BACKEND:ARCHITECTURE:WARP; default: this machine's GPU, or cuda:90:32")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)  # which of the processes this is
    options = parser.parse_args(argv)
    cases = size_cases() if options.sizes else suite_cases()
    if options.share is not None:
        return int(_compile(cases[options.share :: options.processes], options.target) > 0)
    began, target = time.monotonic(), options.target or current_target()
    # No GPU for them, and one core each; and no interpreter.
    environment = {k: v for k, v in os.environ.items() if k != _INTERPRETER}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *argv, "--processes", str(options.processes), "--target", target]
    workers = [
        subprocess.Popen([*command, "--share", str(share)], env=environment) for share in range(options.processes)
    ]
    failed = sum(worker.wait() != 0 for worker in workers)
    print(
        f"{len(cases)} calls compiled for {target} by {options.processes} processes in"
        f" {time.monotonic() - began:.0f} s" + (f", {failed} processes failed" if failed else "")
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
