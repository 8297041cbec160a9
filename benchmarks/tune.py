"""Time each size that the linear loss's tile and the row kernels could have at each shape, to choose the defaults.

    python benchmarks/tune.py --out DIR                         # all, at the linear and the logits suites' GPU shapes
    python benchmarks/tune.py --out DIR --kernel forward-gradient --shape 8192x151936
    python benchmarks/tune.py --out DIR --kernel head --shape 8192x4096x151936

`head` is the linear loss with its gradients: by default, and where no tile, not even one of all rows, may take more
than `tile_bytes`, so that there are several chunks. On a GPU the sizes of the row kernels are compiled by many
processes meanwhile. Prints the fastest first, the default marked, and writes tune.json again after every choice.
Statistics and forward-gradient must keep the same `vector`, `block` and `segments` for a row, or their results are no
longer bitwise equal: choose these for both. A choice takes half a second when it is compiled: there are some 50 of
statistics, 30 of gradient, 60 of forward-gradient, and 4 of the head, of a few seconds. Of forward-gradient's,
"cluster" is the CUDA C++ kernel, where it takes the rows, with sizes of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from precompile import running
from triton import TritonError

import fastrl
from fastrl.backend.contract import Transform
from fastrl.backend.cuda import row_forward_gradient as cluster_kernel
from fastrl.backend.triton import backend as triton_backend
from fastrl.bench import machine
from fastrl.bench.candidates import ours
from fastrl.bench.clock import time_runs
from fastrl.bench.contenders import without_results
from fastrl.bench.measure import default_device
from fastrl.bench.problems import Problem, linear_problem
from fastrl.bench.suites import SUITES
from fastrl.kernels import row_forward_gradient, row_gradient, row_statistics
from fastrl.kernels.configuration import Configuration, configuration, launch_options, registers
from fastrl.objectives.rows import Numbers, RowInputs, RowObjective
from fastrl.planning import plans, tiling

HEAD = "head"
ROW_KERNELS = {"statistics": row_statistics, "gradient": row_gradient, "forward-gradient": row_forward_gradient}
CLIP = RowObjective("clip", numbers=Numbers(0.2, 0.2, 1e30, 1e30))
_REPEATS, _SECONDS = 20, 0.5

Choice = dict[str, Any]
Keep = Callable[[list[Choice]], None]  # is given the rows measured so far, the fastest first


def row_choices(kernel: str, vocab: int, itemsize: int) -> list[Choice]:
    """Block, segments, warps, registers per thread (None: the compiler's choice), stages. Default first.

    For statistics also whether rows' segments are apart, for any number of rows (None: as by default). Other sizes have
    the default's stages; the default's block and segments have all stages.
    """
    base = configuration(vocab, itemsize)
    forward = kernel == "forward-gradient"
    warps = base.forward_gradient_warps if forward else base.warps
    limit = 128 if forward else registers(itemsize, light=True)
    sizes = itertools.product(
        (1024, 2048, 4096, 8192),
        (1, 2, 4) if forward else (base.segments,),
        (4, 8, 16, 32),
        (64, None),
        (base.stages,),
        (True, False) if kernel == "statistics" else (None,),
    )
    loads = (
        (base.block, base.segments, *threads, stages, None)
        for threads in ((warps, limit), (warps, None), (2 * warps, 64), (2 * warps, 48))
        for stages in (1, 2, 3, 4)
    )
    names = ("block", "segments", "warps", "maxnreg", "stages", "apart")
    choices = [dict(zip(names, (base.block, base.segments, warps, limit, base.stages, None), strict=True))]
    for values in (*sizes, *loads):
        choice = dict(zip(names, values, strict=True))
        # Per thread and step.
        entries = choice["block"] * (choice["segments"] if forward else 1) // (32 * choice["warps"])
        enough = choice["maxnreg"] is None or choice["maxnreg"] >= 96 or entries < 32
        fits = enough and (choice["maxnreg"] or 0) * 32 * choice["warps"] <= 65536
        if 8 <= entries <= 32 and fits and choice not in choices:
            choices.append(choice)
    return choices


@contextmanager
def chosen(kernel: str, choice: Choice) -> Iterator[None]:
    """Within the context, the kernel's launcher uses these sizes."""
    module = ROW_KERNELS[kernel]

    def sizes(vocab: int, itemsize: int) -> Configuration:
        warps = choice["warps"]
        return Configuration(16 // itemsize, choice["block"], choice["segments"], warps, warps, choice["stages"])

    def options(warps: int, most: int = 128) -> dict[str, Any]:
        launch = {k: v for k, v in launch_options(warps, most).items() if k != "maxnreg"}
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


def sweep(
    choices: list[Choice],
    within: Callable[[Choice], AbstractContextManager[None]],
    call: Callable[[], Any],
    device: str,
    keep: Keep = lambda rows: None,
) -> list[Choice]:
    """Each choice with the milliseconds of a call within it, or the error if it does not run; the fastest first.

    A choice is entered once, for all its calls: what the first plans or compiles the others find.
    `keep` gets what there is after every choice.
    """
    rows: list[Choice] = []
    for place, choice in enumerate(choices):
        row = {**choice, "default": place == 0, "milliseconds": None, "error": None}
        try:
            with within(choice):
                row["milliseconds"] = timed(call, device)
        except (TritonError, RuntimeError) as error:  # too many registers, or too much shared memory
            row["error"] = str(error).splitlines()[0]
        rows.append(row)
        rows.sort(key=lambda row: float("inf") if row["milliseconds"] is None else row["milliseconds"])
        keep(rows)
    return rows


#: What any tile of the linear loss may take, beside the default.
TILES = tuple(mib << 20 for mib in (640, 960, 1280, 1920, 2560, 5120))


class _InTheBound(tiling.Pass):
    """A pass of which one tile of all rows takes no more than each of several."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sums_bytes = 0


@contextmanager
def bounded(device: str, tile_bytes: int | None) -> Iterator[None]:
    """Within the context no tile, not even one of all rows, may take more than these bytes; None: as by default."""
    if tile_bytes is None:
        yield
        return
    with patch.dict(tiling.TILE_BYTES, {device: tile_bytes}), patch.object(plans, "Pass", _InTheBound):
        yield


def head_choices(problem: Problem, device: str) -> list[Choice]:
    """The bounds on a tile (None: the default) that lead to different tiles, and the rows of these. Default first.

    `rows` are those of the plan that the call takes without a budget.
    """
    size, weight = problem.size, problem.inputs["weight"]
    found: dict[tuple[str, int], Choice] = {}
    for tile_bytes in (None, *TILES):
        with bounded(device, tile_bytes):
            sizes = (size.tokens, size.hidden, size.vocab, weight.dtype)
            plan = fastrl.plan_memory(*sizes, objective=fastrl.PPO(), device=device).chosen
            rows = max((tile.rows for tile in plan.tiles.values()), default=0)
        found.setdefault((plan.name, rows), {"tile_bytes": tile_bytes, "plan": plan.name, "rows": rows})
    return list(found.values())


def run_head(problem: Problem, device: str, keep: Keep = lambda rows: None) -> list[Choice]:
    """The sweep of the linear loss and its gradients on a problem."""
    run = ours("fastrl").on(problem).prepare()

    def with_tile(choice: Choice) -> AbstractContextManager[None]:
        return bounded(device, choice["tile_bytes"])

    return sweep(head_choices(problem, device), with_tile, torch.enable_grad()(run.call), device, keep)


def run_rows(
    kernel: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, keep: Keep = lambda rows: None
) -> list[Choice]:
    """The sweep of a row kernel at N x V."""
    call, moved = row_call(kernel, *shape, dtype, device)
    choices = row_choices(kernel, shape[1], dtype.itemsize)
    row = torch.empty(1, 1, shape[1], dtype=dtype, device=device)
    with cluster_kernel.use_clusters(True):
        if kernel == "forward-gradient" and cluster_kernel.fits(row, None, Transform()):
            choices.insert(1, {"cluster": True, **choices[0]})

    @contextmanager
    def with_sizes(choice: Choice) -> Iterator[None]:
        with chosen(kernel, choice), cluster_kernel.use_clusters("cluster" in choice):
            yield

    def keep_speeds(rows: list[Choice]) -> None:
        for row in rows:
            row["bytes_per_second"] = None if row["milliseconds"] is None else 1e3 * moved / row["milliseconds"]
        keep(rows)

    return sweep(choices, with_sizes, call, device, keep_speeds)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=[HEAD, *ROW_KERNELS], action="append")
    parser.add_argument("--shape", action="append", metavar="NxV|NxHxV")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(argv)
    dtype, device = getattr(torch, options.dtype), default_device()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape or []]
    shapes = shapes or [*SUITES["linear"].defaults["cuda"][:2], *SUITES["logits"].defaults["cuda"]]
    kernels = options.kernel or [HEAD, *ROW_KERNELS]
    sweeps = [(kernel, shape) for kernel in kernels for shape in shapes if len(shape) == 2 + (kernel == HEAD)]
    if not sweeps:
        parser.error(f"argument --shape: {HEAD} takes NxHxV, the row kernels NxV, got {', '.join(options.shape)}")
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {**machine.describe([]), "command": " ".join(["python benchmarks/tune.py", *argv])}
    report["sweeps"] = []
    with running(wanted=device == "cuda" and kernels != [HEAD], sizes=True) as compiling:
        for kernel, shape in sweeps:
            torch.manual_seed(0)
            found = {"kernel": kernel, "shape": shape, "dtype": options.dtype, "rows": []}
            report["sweeps"].append(found)

            def keep(rows: list[Choice], found: dict[str, Any] = found) -> None:
                found["rows"] = rows
                written = options.out / "tune.json.new"
                written.write_text(json.dumps(report, indent=2) + "\n")
                written.replace(options.out / "tune.json")  # whole at any time

            if kernel == HEAD:
                rows = run_head(linear_problem(*shape, dtype, device), device, keep)
            else:
                if compiling is not None:
                    compiling.wait()  # from here on nothing else runs on the machine
                rows = run_rows(kernel, shape, dtype, device, keep)
            print(f"\n{kernel} {'x'.join(map(str, shape))} {options.dtype}")
            for row in rows[:8] + [row for row in rows[8:] if row["default"]]:
                sizes = {
                    k: v for k, v in row.items() if k not in ("default", "milliseconds", "error", "bytes_per_second")
                }
                speed = f"{row['bytes_per_second'] / 1e12:7.3f} TB/s" if row.get("bytes_per_second") else ""
                time = row["error"] or f"{row['milliseconds']:9.4f} ms"
                print(time, speed, "default" if row["default"] else "       ", sizes, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
