"""Where a linear loss and its backward spend their time: products, row kernels, elementwise work, copies and gaps.

On a GPU by the times of its kernels, on a CPU by the operators' own. (A file profile.py would hide Python's module.)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import profile

from fastrl.bench import machine
from fastrl.bench.candidates import ours
from fastrl.bench.clock import synchronize
from fastrl.bench.measure import default_device
from fastrl.bench.problems import linear_problem

_CALLS = 3
_PRODUCT_OPS = ("aten::mm", "aten::addmm", "aten::addmm_")
_PRODUCT_KERNELS = re.compile(r"gemm|nvjet|cutlass|xmma", re.IGNORECASE)
_COPIES = ("gpu_memcpy", "gpu_memset", "aten::copy_", "aten::fill_", "aten::zero_")


class Piece(NamedTuple):
    """A kernel, or on a CPU an operator without the operators that it calls."""

    name: str
    kind: str  # the trace's category, or the operator
    op: str  # the operator that launched it
    dims: Sequence[Any]  # of the operator's inputs
    start: float  # milliseconds, like length
    length: float


def kernels_of(events: list[dict[str, Any]]) -> list[Piece]:
    """The pieces that ran on the GPU, ordered by their start, from the events of a Chrome trace."""
    ops = {e["args"].get("External id"): e for e in events if e.get("cat") == "cpu_op"}
    pieces = []
    for e in sorted(events, key=lambda e: e.get("ts", 0.0)):
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            op = ops.get(e["args"].get("External id"), {"name": "", "args": {}})
            dims = op["args"].get("Input Dims", [])
            pieces.append(Piece(e["name"], e["cat"], op["name"], dims, e["ts"] / 1e3, e["dur"] / 1e3))
    return pieces


def groups_of(pieces: list[Piece], width: int) -> list[str]:
    """The group of each piece; products by the axis they sum over: H, the tile's columns, or else its rows."""
    columns, groups = 0, []
    for piece in pieces:
        first = piece.op != "aten::mm"  # the first operand of the others is the summand
        group, factors = _group(piece), piece.dims[first : first + 2]
        if group == "products" and piece.op in _PRODUCT_OPS and len(factors) == 2:
            (_, summed), (_, wide) = factors
            # A tile may have H rows: then d_weight also sums over H, but has H columns.
            forms_logits = summed == width != wide
            columns = wide if forms_logits else columns
            group += ": " + ("logits" if forms_logits else "d_hidden" if summed == columns else "d_weight")
        groups.append(group)
    return groups


def _group(piece: Piece) -> str:
    if piece.kind in _COPIES:
        return "copies and fills"
    if piece.op in _PRODUCT_OPS or _PRODUCT_KERNELS.search(piece.name):
        return "products"
    if "fastrl" in piece.kind or re.fullmatch(r"\w+_kernel", piece.name):
        return f"row kernels: {piece.name}"
    return "casts, sums and other elementwise work"


def span(pieces: list[Piece]) -> tuple[float, float]:
    """Milliseconds from the first kernel's start to the last one's end, and those in which any kernel ran."""
    end, busy = pieces[0].start, 0.0
    for piece in pieces:
        busy += max(0.0, piece.start + piece.length - max(end, piece.start))
        end = max(end, piece.start + piece.length)
    return end - pieces[0].start, busy


def profiled(call: Callable[[], Any], device: str) -> tuple[list[Piece], float, float]:
    """The pieces of one call, its milliseconds, and those in which any piece ran."""
    with profile(record_shapes=True) as profiler:
        start = time.perf_counter()
        call()
        synchronize(device)
        wall = 1e3 * (time.perf_counter() - start)
    if device == "cuda":
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiler.export_chrome_trace(file.name)
            pieces = kernels_of(json.loads(Path(file.name).read_text())["traceEvents"])
        return pieces, *span(pieces)
    pieces = [Piece(*[e.name] * 3, e.input_shapes, 0.0, e.self_cpu_time_total / 1e3) for e in profiler.events()]
    return pieces, wall, sum(piece.length for piece in pieces)


def summary(calls: list[tuple[list[Piece], float, float]], width: int) -> dict[str, Any]:
    """Mean milliseconds and counts per call."""
    lengths: dict[tuple[str, str], list[float]] = defaultdict(list)
    for pieces, *_ in calls:
        for piece, group in zip(pieces, groups_of(pieces, width), strict=True):
            lengths[group, piece.name].append(piece.length)
            lengths[group, ""].append(piece.length)
    rows = [
        {"group": group, "name": name, "milliseconds": sum(times) / len(calls), "count": len(times) / len(calls)}
        for (group, name), times in sorted(lengths.items(), key=lambda item: -sum(item[1]))
    ]
    wall, busy = (sum(call[place] for call in calls) / len(calls) for place in (1, 2))
    return {
        "milliseconds_wall": wall,
        "milliseconds_busy": busy,
        "milliseconds_gaps": wall - busy,
        "groups": [row for row in rows if not row["name"]],
        "kernels": [row for row in rows if row["name"]],
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", metavar="NxHxV")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--budget", help="such as 512MiB; default: none")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(argv)
    device, (n, width, vocab) = default_device(), map(int, options.shape.split("x"))
    problem = linear_problem(n, width, vocab, getattr(torch, options.dtype), device, clipped=0.0)
    contender = ours("fastrl", budget=options.budget).on(problem)
    assert contender.plans is not None
    run = contender.prepare()
    calls = [profiled(run.call, device) for _ in range(2 + _CALLS)][2:]  # two calls warm up kernels and profiler
    facts = {
        **machine.describe([]),
        "command": " ".join(["python benchmarks/profile_loss.py", *argv]),
        "shape": {"N": n, "H": width, "V": vocab},
        "dtype": options.dtype,
        "budget": options.budget,
        "plan": contender.plans()[0],
        "calls": _CALLS,
        **summary(calls, width),
    }
    name = "-".join(filter(None, ("profile", options.shape, options.dtype, options.budget)))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"{name}: {facts['plan']}, {facts['milliseconds_wall']:.3f} ms a call: gaps {facts['milliseconds_gaps']:.3f}")
    for row in facts["groups"]:
        print(f"{row['milliseconds']:12.3f} ms {row['count']:8.1f} x  {row['group']}")


if __name__ == "__main__":
    main(sys.argv[1:])
