"""The first minute on a GPU: does every kernel run, is it right, how fast is it, and which products are fast.

    python benchmarks/smoke.py --out DIR
    python benchmarks/smoke.py --out DIR --shape 1024x1024x32768 --only statistics     # one kernel, for a profiler

Each kernel runs once at its target size and is compared with float64; then it is timed beside a copy or a read of as
many bytes. Meanwhile many processes compile the variants that the suites launch. Then come the table of the products
that the linear loss could be made of, its time in several chunks, and with an upstream gradient of 0.25. Writes
smoke.json again after every line. The exit status is 1 if something failed or an error is too large.

Log-probabilities, entropies, losses and divergences are compared at all rows, gradients at 64 rows (and 32 of the
head's), supports at 64 rows. An error may be twice that of eager torch in the same dtype, and a rounding more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from precompile import running
from smoke_distillation import distillation_parts
from smoke_parts import Part, head_parts, row_parts, set_parts, too_large
from torch import Tensor
from tune import run_head

from fastrl.bench import ceilings, machine
from fastrl.bench.clock import synchronize, time_runs
from fastrl.bench.contenders import Run, without_results
from fastrl.bench.measure import Bench, default_device
from fastrl.bench.problems import linear_problem, logits_problem

_REPEATS, _SECONDS = 5, 1.0
#: Recorded ids per token, in the mean.
_MEAN_SET = 8
#: Lengths of the sums of the products that form d_weight: rows of a chunk. And widths of the others'.
_LENGTHS = (2048, 4096, 8192)
#: One row of so many of a padded head is no entry of the vocabulary: 267 of Qwen's 151,936.
_PADDED = 569


@dataclass
class Report:
    """What was found so far; written whenever a line is added."""

    path: Path
    facts: dict[str, Any]
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, table: str, **line: Any) -> None:
        """Print the line and write everything."""
        self.lines.append({"table": table, **line})
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps({**self.facts, "lines": self.lines}, indent=2) + "\n")
        written.replace(self.path)  # whole at any time
        print(f"{table}: " + ", ".join(f"{k} {_text(v)}" for k, v in line.items() if v not in (None, "")), flush=True)

    @property
    def failed(self) -> bool:
        """Whether a line tells of a failure."""
        return any(line.get("failed") for line in self.lines)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k} {_text(v)}" for k, v in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def seconds_of(run: Run, device: str) -> float:
    """The median of a few calls after a first one, with a cold cache."""
    run.restore()
    run.call()
    return statistics.median(time_runs(run, device, _REPEATS, _SECONDS))


# --- the kernels ------------------------------------------------------------------------------------------------------


def measure(parts: Iterator[Part], report: Report, bench: Bench, speeds: dict[str, float | None]) -> None:
    """A line for each part: its errors, its time, and the share of its limit. One that fails stops no other."""
    try:
        for part in parts:
            try:
                line = measured(part, bench.device, speeds)
            except Exception as error:
                traceback.print_exc()
                line = {"error": _first_line(error), "failed": True}
            report.add("kernels", name=part.name, **line)
    except Exception as error:  # in what a part is compared with
        traceback.print_exc()
        report.add("kernels", name=f"after {_last(report)}", error=_first_line(error), failed=True)


def measured(part: Part, device: str, speeds: dict[str, float | None]) -> dict[str, Any]:
    """The part's line."""
    part.run.restore()
    found = part.check(part.run.call())
    seconds = seconds_of(part.run, device)
    limit = speeds["products"] if part.products else None
    if part.moved_bytes is not None and (speed := speeds["copy" if part.written else "read"]) is not None:
        limit = part.moved_bytes / speed
    return {
        "milliseconds": 1e3 * seconds,
        "share_of_limit": None if limit is None else limit / seconds,
        "errors": found,
        "bounds": {name: part.bounds.get(name) for name in found},
        "failed": too_large(found, part.bounds),
    }


def _last(report: Report) -> str:
    return str(report.lines[-1].get("name")) if report.lines else "nothing"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# --- the products -----------------------------------------------------------------------------------------------------


def products(n: int, width: int, vocab: int, dtype: torch.dtype, device: str) -> Iterator[tuple[str, int, int, Run]]:
    """Name, length K of the sums, operations, and a run of each product that a linear loss could be made of."""

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    for k in sorted({width, *(k for k in _LENGTHS if k <= max(n, width))}):
        hidden, weight, out = tensor(n, k), tensor(vocab, k), torch.empty(n, vocab, dtype=dtype, device=device)
        flops = 2 * n * k * vocab
        yield "logits", k, flops, without_results(partial(torch.mm, hidden, weight.t(), out=out))
        if k == width:
            gradient = torch.empty_like(hidden)
            yield "d_hidden", vocab, flops, without_results(partial(torch.mm, out, weight, out=gradient))
            # Of a padded head: a tile of its entries alone, whose rows are not aligned, and one whose rows are.
            entries = vocab - max(vocab // _PADDED, 1)
            for rows, alone in (("", tensor(n, entries)), (", aligned rows", out[:, :entries])):
                multiply = partial(torch.mm, hidden, weight[:entries].t(), out=alone)
                yield f"logits of a padded head{rows}", k, 2 * n * k * entries, without_results(multiply)
    del hidden, weight, out
    total = torch.zeros(vocab, width, dtype=torch.float32, device=device)
    narrow = torch.empty(vocab, width, dtype=dtype, device=device)
    for k in sorted({n, *(k for k in _LENGTHS if k <= n)}):
        gradient, hidden = tensor(k, vocab).t(), tensor(k, width)
        flops, wide = 2 * k * vocab * width, {"out_dtype": torch.float32, "out": total}
        yield "d_weight", k, flops, without_results(partial(torch.mm, gradient, hidden, out=narrow))
        yield "d_weight into a float32 out", k, flops, without_results(partial(torch.mm, gradient, hidden, **wide))
        for beta in (0, 1):
            add = partial(torch.addmm, total, gradient, hidden, beta=beta, **wide)
            yield f"d_weight added in float32, beta {beta}", k, flops, without_results(add)


def measure_products(shape: tuple[int, ...], report: Report, bench: Bench) -> float | None:
    """The table of the products; one that the library does not have is told with the reason.

    Returns the seconds of the three that a linear loss needs; None if one is missing.
    """
    n, width, vocab = shape
    needed: dict[tuple[str, int], float | None]
    needed = {("logits", width): None, ("d_hidden", vocab): None, ("d_weight", n): None}
    for name, k, flops, run in products(*shape, bench.dtype, bench.device):
        line: dict[str, Any] = {"name": name, "K": k}
        try:
            seconds = seconds_of(run, bench.device)
            line |= {"milliseconds": 1e3 * seconds, "TFLOP_per_second": flops / seconds / 1e12}
            if (name, k) in needed:
                needed[name, k] = seconds
        except (RuntimeError, TypeError) as error:
            line["error"] = _first_line(error)
        report.add("products", **line)
    return None if None in needed.values() else sum(filter(None, needed.values()))


# --- the whole --------------------------------------------------------------------------------------------------------


def limits(logits: Tensor, report: Report, bench: Bench) -> dict[str, float | None]:
    """Bytes per second of a copy and, on a GPU, of a read."""
    source = ceilings.stream(logits)
    speeds = {"copy": ceilings.copy_speed(bench, source)}
    speeds["read"] = ceilings.read_speed(bench, source) if bench.device == "cuda" else speeds["copy"]
    for name, speed in speeds.items():
        report.add("limits", name=name, TB_per_second=None if speed is None else speed / 1e12)
    return speeds


def run(shape: tuple[int, ...], dtype: torch.dtype, only: str | None, report: Report, bench: Bench) -> None:
    """All lines, or those of the kernels whose names begin with `only`."""
    (n, width, vocab), device = shape, bench.device

    def chosen(parts: Iterator[Part]) -> Iterator[Part]:
        return (part for part in parts if part.name.startswith(only or ""))

    speeds: dict[str, float | None] = {"copy": None, "read": None, "products": None}
    problem = logits_problem(n, vocab, dtype, device)
    if only is None:
        speeds |= limits(problem.inputs["logits"], report, bench)
    measure(chosen(row_parts(problem)), report, bench, speeds)
    if only is None or only.startswith(("pair", "entries")):
        measure(chosen(distillation_parts(problem)), report, bench, speeds)
    del problem
    if only is None:
        speeds["products"] = measure_products(shape, report, bench)
    if only is None or only.startswith("linear"):
        problem = linear_problem(n, width, vocab, dtype, device)
        measure(chosen(head_parts(problem)), report, bench, speeds)
        if only is None:
            for row in run_head(problem, device):
                report.add("tiles", **row, failed=row["error"] is not None)
        del problem
    if only is None or only.startswith(("loss", "support")):
        sets = linear_problem(n, width, vocab, dtype, device, mean_set=_MEAN_SET)
        measure(chosen(set_parts(sets)), report, bench, speeds)
        del sets
    synchronize(device)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8192x4096x151936", metavar="NxHxV")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--only", metavar="NAME", help="the kernels whose names begin so, and nothing else")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(argv)
    n, _, vocab = shape = tuple(map(int, options.shape.split("x")))
    dtype, device = getattr(torch, options.dtype), default_device()
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {**machine.describe([]), "command": " ".join(["python benchmarks/smoke.py", *argv])}
    report = Report(options.out / "smoke.json", {**facts, "shape": shape, "dtype": options.dtype})
    bench = Bench("smoke", {"N": n, "V": vocab}, dtype, device, _REPEATS, seconds=_SECONDS)
    with running(wanted=options.only is None and device == "cuda", sizes=False) as compiling:
        run(shape, dtype, options.only, report, bench)
        if compiling is not None:
            failed = compiling.wait() != 0
            report.add("compiled meanwhile", name="kernels that the suites launch", failed=failed)
    print(f"smoke: {'FAILED' if report.failed else 'all right'}, {len(report.lines)} lines")
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
