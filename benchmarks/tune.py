"""Time each size that the row kernels could have at each shape, to choose the defaults.

    python benchmarks/tune.py --out DIR                         # all kernels, at the logits suite's GPU shapes
    python benchmarks/tune.py --out DIR --kernel forward-gradient --shape 8192x151936

Prints the fastest first, the default marked, and writes tune.json. Statistics and forward-gradient must keep the same
`vector`, `block` and `segments` for a row, or their results are no longer bitwise equal: choose these for both. A
choice takes 2 to 5 s, mostly to compile: there are some 40 of statistics, 20 of gradient, 50 of forward-gradient.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from triton import TritonError

from fastrl.backend.contract import Transform
from fastrl.backend.triton import backend as triton_backend
from fastrl.bench import machine
from fastrl.bench.clock import time_runs
from fastrl.bench.contenders import without_results
from fastrl.bench.measure import default_device
from fastrl.bench.suites import SUITES
from fastrl.kernels import row_forward_gradient, row_gradient, row_statistics
from fastrl.kernels.configuration import Configuration, configuration, launch_options
from fastrl.objectives.rows import RowInputs, RowObjective

ROW_KERNELS = {"statistics": row_statistics, "gradient": row_gradient, "forward-gradient": row_forward_gradient}
CLIP = RowObjective("clip", (0.2, 0.2, 1e30, 1e30), "none", "none", 0.0, 2.0, 20.0)
_REPEATS, _SECONDS = 20, 0.5

Choice = dict[str, Any]


def row_choices(kernel: str, vocab: int, itemsize: int) -> list[Choice]:
    """Block, warps, registers per thread (None: the compiler's choice), segments in forward-gradient. Default first.

    For statistics also whether rows' segments are apart, for any number of rows (None: as by default).
    """
    base = configuration(vocab, itemsize)
    warps = base.forward_gradient_warps if kernel == "forward-gradient" else base.warps
    default = {"block": base.block, "segments": base.segments, "warps": warps, "maxnreg": 64, "apart": None}
    choices = [default]
    for block, segments, warps, registers, apart in itertools.product(
        (1024, 2048, 4096, 8192),
        (1, 2, 4) if kernel == "forward-gradient" else (base.segments,),
        (4, 8, 16, 32),
        (64, None),
        (True, False) if kernel == "statistics" else (None,),
    ):
        entries = block * (segments if kernel == "forward-gradient" else 1) // (32 * warps)  # per thread and step
        choice = {"block": block, "segments": segments, "warps": warps, "maxnreg": registers, "apart": apart}
        if choice != default and 8 <= entries <= 32 and (registers or 0) * 32 * warps <= 65536:
            choices.append(choice)
    return choices


@contextmanager
def chosen(kernel: str, choice: Choice) -> Iterator[None]:
    """Within the context, the kernel's launcher uses these sizes."""
    module = ROW_KERNELS[kernel]

    def sizes(vocab: int, itemsize: int) -> Configuration:
        return Configuration(16 // itemsize, choice["block"], choice["segments"], choice["warps"], choice["warps"])

    def options(warps: int, light: bool) -> dict[str, Any]:
        launch = {k: v for k, v in launch_options(warps, light).items() if k != "maxnreg"}
        return launch if choice["maxnreg"] is None else launch | {"maxnreg": choice["maxnreg"]}

    programs = row_statistics._PROGRAMS if choice["apart"] is None else (1 << 30 if choice["apart"] else 0)
    with (
        patch.object(module, "configuration", sizes),
        patch.object(module, "launch_options", options),
        patch.object(row_statistics, "_PROGRAMS", programs),
    ):
        yield


def row_call(kernel: str, n: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Callable[[], Any], int]:
    """A call of the kernel on N rows of random logits, and the bytes that it has to move."""
    logits = torch.randn(1, n, vocab, dtype=dtype, device=device)
    targets, c = torch.randint(vocab, (n,), device=device), torch.randn(n, device=device)
    once, identity = logits.numel() * logits.element_size(), Transform()
    if kernel == "statistics":
        return lambda: triton_backend.row_statistics(logits, targets, None, identity), once
    if kernel == "gradient":
        forward, out = triton_backend.row_statistics(logits, targets, None, identity), torch.empty_like(logits)
        return lambda: triton_backend.row_gradient(logits, targets, None, identity, forward, c, None, out), 2 * once
    inputs = RowInputs(c, c.abs())
    # In place: the second call reads a gradient, which takes equally long.
    return lambda: triton_backend.row_forward_gradient(logits, targets, None, identity, CLIP, inputs), 2 * once


def timed(call: Callable[[], Any], device: str) -> float:
    """The median milliseconds, with a cold cache."""
    call()  # compiles
    return 1e3 * statistics.median(time_runs(without_results(call), device, _REPEATS, _SECONDS))


def sweep(choices: list[Choice], call: Callable[[Choice], Any], device: str) -> list[Choice]:
    """Each choice with its milliseconds, or the error if it does not run; the fastest first."""
    rows = []
    for place, choice in enumerate(choices):
        row = {**choice, "default": place == 0, "milliseconds": None, "error": None}
        try:
            row["milliseconds"] = timed(partial(call, choice), device)
        except (TritonError, RuntimeError) as error:  # too many registers, or too much shared memory
            row["error"] = str(error).splitlines()[0]
        rows.append(row)
    return sorted(rows, key=lambda row: float("inf") if row["milliseconds"] is None else row["milliseconds"])


def run_rows(kernel: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Choice]:
    """The sweep of a row kernel at N x V."""
    call, moved = row_call(kernel, *shape, dtype, device)

    def with_sizes(choice: Choice) -> None:
        with chosen(kernel, choice):
            call()

    rows = sweep(row_choices(kernel, shape[1], dtype.itemsize), with_sizes, device)
    for row in rows:
        row["bytes_per_second"] = None if row["milliseconds"] is None else 1e3 * moved / row["milliseconds"]
    return rows


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=[*ROW_KERNELS], action="append")
    parser.add_argument("--shape", action="append", metavar="NxV")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(argv)
    dtype, device = getattr(torch, options.dtype), default_device()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape or []]
    shapes = shapes or SUITES["logits"].defaults["cuda"]
    options.out.mkdir(parents=True, exist_ok=True)
    report = {**machine.describe([]), "command": " ".join(["python benchmarks/tune.py", *argv]), "sweeps": []}
    for kernel, shape in itertools.product(options.kernel or ROW_KERNELS, shapes):
        torch.manual_seed(0)
        rows = run_rows(kernel, shape, dtype, device)
        report["sweeps"].append({"kernel": kernel, "shape": shape, "dtype": options.dtype, "rows": rows})
        (options.out / "tune.json").write_text(json.dumps(report, indent=2) + "\n")
        print(f"\n{kernel} {'x'.join(map(str, shape))} {options.dtype}")
        for row in rows[:8] + [row for row in rows[8:] if row["default"]]:
            sizes = {k: v for k, v in row.items() if k not in ("default", "milliseconds", "error", "bytes_per_second")}
            speed = f"{row['bytes_per_second'] / 1e12:7.3f} TB/s" if row.get("bytes_per_second") else ""
            time = row["error"] or f"{row['milliseconds']:9.4f} ms"
            print(time, speed, "default" if row["default"] else "       ", sizes, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
