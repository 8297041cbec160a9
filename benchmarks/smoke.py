"""The first minute on a GPU: does every kernel run, is it right, how fast is it, and which products are fast.

    python benchmarks/smoke.py --out DIR
    python benchmarks/smoke.py --out DIR --shape 1024x1024x32768 --only statistics     # one kernel, for a profiler

Each kernel runs once at its target size and is compared with float64; then it is timed beside a copy or a read of as
many bytes. Meanwhile many processes compile the variants that the suites launch. Then come the table of the products
that the linear loss could be made of, its time in several chunks, and with an upstream gradient of 0.25. Writes
smoke.json again after every line. The exit status is 1 if something failed or an error is too large.

Log-probabilities, entropies and losses are compared at all rows, gradients at 64 rows (and 32 of the head's), supports
at 64 rows. An error may be twice that of eager torch in the same dtype, and a rounding more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from precompile import running
from torch import Tensor
from tune import CLIP, run_head

from fastrl.backend.choice import kernels
from fastrl.backend.contract import LossTerms, Statistics, Support, Transform
from fastrl.backend.cuda import row_forward_gradient as cluster_kernel
from fastrl.bench import ceilings, machine
from fastrl.bench.candidates import BOTH, LOSS, POLICY, SETS_POLICY, STATISTICS, Candidate, ours
from fastrl.bench.clock import synchronize, time_runs
from fastrl.bench.contenders import EAGER, Outcome, Run, without_results
from fastrl.bench.measure import Bench, default_device, errors
from fastrl.bench.problems import Expected, Problem, Tokens, linear_problem, logits_problem
from fastrl.objectives.rows import RowInputs

_REPEATS, _SECONDS = 5, 1.0
#: Rows so few that a row's segments get programs of their own.
_FEW_ROWS = 256
#: Recorded ids per token, in the mean.
_MEAN_SET = 8
_TOP_P = 0.95
_UPSTREAM = 0.25
_CLUSTER = "forward-gradient, cluster kernel (off by default)"
#: Lengths of the sums of the products that form d_weight: rows of a chunk. And widths of the others'.
_LENGTHS = (2048, 4096, 8192)
#: Errors may be so many times those of eager torch, and more: in nats so many units of float32, in gradients one of
#: their dtype.
_TIMES, _UNITS = 2.0, 64
#: Of a support's mass: sums of float32 probabilities.
_MASS_ERROR = 1e-5

Found = dict[str, float | None]


@dataclass
class Part:
    """One kernel or call: `run` is timed, `check` gives its errors from a fresh call's outcome."""

    name: str
    run: Run
    check: Callable[[Outcome], Found]
    bounds: Found  # on the errors
    moved_bytes: int | None = None  # the least that it has to read and write
    written: bool = True  # whether it writes as well as reads
    products: bool = False  # whether it is made of the three products


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


def bounds(
    of: list[Candidate],
    problem: Problem,
    expected: Expected,
    gradients: tuple[str, ...],
    upstream: tuple[Tensor, ...] | None = None,
) -> Found:
    """What the errors may be, from those of eager torch among the candidates."""
    eager = next(c for c in of if c.name == EAGER).on(problem, gradients, upstream).prepare()
    eager.restore()
    dtype = next(iter(problem.inputs.values())).dtype
    more = {True: torch.finfo(dtype).eps, False: _UNITS * torch.finfo(torch.float32).eps}
    return {
        name: None if error is None else _TIMES * error + more[name.startswith("d_")]
        for name, error in errors(eager.call(), expected).items()
    }


def row_parts(problem: Problem) -> Iterator[Part]:
    """The kernels over rows of logits."""
    logits, tokens, identity = problem.inputs["logits"], problem.tokens, Transform()
    backend = kernels("triton", logits)
    rows, few = logits[None], logits[None, : min(_FEW_ROWS, len(logits))]
    once = problem.size.once

    def statistics_of(part: Tensor) -> Run:
        return Run(lambda: _outcome(backend.row_statistics(part, tokens.targets[: part.shape[1]], None, identity)))

    forward, both = problem.expected_forward(), problem.expected_statistics()
    bound = bounds(STATISTICS, problem, both, ("logits",), tokens.upstream)
    yield Part("statistics", statistics_of(rows), partial(errors, expected=forward), bound, once, written=False)
    first = Expected(None, forward.logprobs[: few.shape[1]], forward.entropy[: few.shape[1]], {})
    few_bytes = few.numel() * few.element_size()
    check = partial(errors, expected=first)
    yield Part("statistics, few rows", statistics_of(few), check, bound, few_bytes, written=False)

    exact = Statistics(*backend.row_statistics(rows, tokens.targets, None, identity))
    out, (c, h) = torch.empty_like(rows), tokens.upstream

    def gradient() -> Outcome:
        backend.row_gradient(rows, tokens.targets, None, identity, exact, c, h, out)
        return Outcome(None, None, None, {"logits": out[0]})

    yield Part("gradient", Run(gradient), partial(errors, expected=both), bound, 2 * once)

    visit, loss = visit_of(problem), problem.expected_loss()
    check, bound = partial(errors, expected=loss), bounds(LOSS, problem, loss, ("logits",))
    yield Part("forward-gradient, beside", Run(lambda: visit(rows, out)), check, bound, 2 * once)
    in_place = Run(lambda: visit(out, None), lambda: _copy(rows, out))
    yield Part("forward-gradient, in place", in_place, check, bound, 2 * once)

    quarter = torch.tensor(_UPSTREAM, device=logits.device)

    def scale(source: Tensor, target: Tensor) -> Outcome:
        backend.scale(source, quarter, target)
        return Outcome(None, None, None, {"scaled": target})

    def scaled(source: Tensor, outcome: Outcome) -> Found:
        target, some = outcome.gradients["scaled"], tokens.sampled()
        some = some[some < len(target)]
        exact = source[some].double() * _UPSTREAM
        return {"scaled": float((target[some] - exact).abs().max() / exact.abs().max())}

    run = Run(lambda: scale(out[0], out[0]), lambda: _copy(rows, out))
    yield Part("scale", run, partial(scaled, logits), {"scaled": 0.0}, 2 * once)  # a power of two rounds nothing
    wide = logits[: (len(logits) + 1) // 2].float() / 3
    narrow = torch.empty_like(wide, dtype=torch.bfloat16)
    into, a_rounding = Run(lambda: scale(wide, narrow)), {"scaled": torch.finfo(narrow.dtype).eps}
    yield Part("scale, float32 to bfloat16", into, partial(scaled, wide), a_rounding, 6 * wide.numel())

    def kept() -> Outcome:
        ids, offsets = backend.find_support(rows, 1.0, 0, _TOP_P, 0.0)
        return Outcome(None, None, None, {"ids": ids, "offsets": offsets})

    mass: Found = {"mass": _MASS_ERROR}
    yield Part("find_support, top-p", Run(kept), partial(_support_error, problem), mass, once, written=False)


def _outcome(found: Statistics) -> Outcome:
    return Outcome(None, found.logprobs, found.entropy, {})


def visit_of(problem: Problem) -> Callable[[Tensor, Tensor | None], Outcome]:
    """Forward-gradient of the clipped loss: of logits (1, N, V), beside them or (None) in place."""
    tokens, backend = problem.tokens, kernels("triton", problem.inputs["logits"])
    inputs = _inputs(tokens)

    def visit(logits: Tensor, out: Tensor | None) -> Outcome:
        found = backend.row_forward_gradient(logits, tokens.targets, None, Transform(), CLIP, inputs, out)
        return _loss_outcome(found, {"logits": (logits if out is None else out)[0]})

    return visit


def cluster_parts(problem: Problem) -> Iterator[Part]:
    """The CUDA C++ kernel that keeps a row on chip."""
    rows, loss, visit = problem.inputs["logits"][None], problem.expected_loss(), visit_of(problem)
    out, bound = torch.empty_like(rows), bounds(LOSS, problem, loss, ("logits",))

    def call() -> Outcome:
        with cluster_kernel.use_clusters():
            return visit(out, None)

    run = Run(call, lambda: _copy(rows, out))
    yield Part(_CLUSTER, run, partial(errors, expected=loss), bound, 2 * problem.size.once)


def clusters_fit(vocab: int, dtype: torch.dtype, device: str) -> bool:
    """Whether that kernel takes such logits here."""
    with cluster_kernel.use_clusters():
        return cluster_kernel.fits(torch.empty(1, 1, vocab, dtype=dtype, device=device), None)


def _inputs(tokens: Tokens) -> RowInputs:
    """What the clipped loss reads."""
    return RowInputs(tokens.advantages, torch.full_like(tokens.advantages, 1 / tokens.count), tokens.old)


def _loss_outcome(found: LossTerms, gradients: dict[str, Tensor]) -> Outcome:
    return Outcome(found.terms[0].sum(), found.logprobs, found.entropy, gradients)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _support_error(problem: Problem, outcome: Outcome) -> Found:
    """By how much the kept mass misses top-p at some rows, in float64: too little is kept, or an entry too many."""
    worst, found = 0.0, outcome.gradients
    for row in problem.tokens.sampled().tolist():
        ids = found["ids"][found["offsets"][row] : found["offsets"][row + 1]].long()
        p = problem.inputs["logits"][row].double().softmax(-1)
        mass = p[ids]
        worst = max(worst, _TOP_P - float(mass.sum()), float(mass.sum() - mass.min()) - _TOP_P)
        others = p.clone()
        others[ids] = 0.0
        worst = max(worst, float(others.max() - mass.min()))  # none of them is larger than a kept one
    return {"mass": worst}


def head_parts(problem: Problem) -> Iterator[Part]:
    """The linear loss, with an upstream gradient of 1 and of a quarter; the plan that it takes is in the name."""
    contender = ours("fastrl").on(problem)
    assert contender.plans is not None
    taken, cheapest = contender.plans()
    name = f"linear loss, {taken}" + ("" if taken == cheapest else f" (cheapest: {cheapest})")
    expected = problem.expected_loss()
    bound = bounds(POLICY, problem, expected, BOTH)
    yield Part(name, contender.prepare(), partial(errors, expected=expected), bound, products=True)
    scaled = Expected(
        expected.loss,
        expected.logprobs,
        expected.entropy,
        {k: (rows, _UPSTREAM * exact) for k, (rows, exact) in expected.gradients.items()},
    )
    check = partial(errors, expected=scaled)
    yield Part(f"{name}, upstream {_UPSTREAM}", _upstream(problem), check, bound, products=True)


def _upstream(problem: Problem) -> Run:
    """The linear loss whose gradient comes scaled, as from accumulation over micro-batches."""
    function = ours("fastrl").make(problem.tokens)
    inputs = {name: x.detach().requires_grad_() for name, x in problem.inputs.items()}
    upstream = torch.tensor(_UPSTREAM, device=problem.tokens.targets.device)

    def call() -> Outcome:
        result = function(**inputs)
        assert result.loss is not None
        gradients = torch.autograd.grad(result.loss, list(inputs.values()), upstream)
        return result.outcome(dict(zip(inputs, gradients, strict=True)))

    return Run(call)


def set_parts(problem: Problem) -> Iterator[Part]:
    """The kernels over recorded supports, together in a loss; and the one that forms all of its rows' terms alone."""
    size, tokens = problem.size, problem.tokens
    assert tokens.sets is not None
    entries, width = tokens.sets.token_ids.numel(), size.hidden * size.element_size
    # Per entry a row of the head twice and one of the hidden states; the hidden states, d_hidden and d_weight once.
    moved = 3 * entries * width + 2 * size.tokens * width + size.vocab * width
    expected, run = problem.expected_loss(), SETS_POLICY[0].on(problem).prepare()
    bound = bounds(SETS_POLICY, problem, expected, BOTH)
    yield Part("loss over recorded sets", run, partial(errors, expected=expected), bound, moved)

    backend, valid = kernels("triton", tokens.targets), torch.ones_like(tokens.targets, dtype=torch.bool)
    support = Support(tokens.sets.token_ids, tokens.sets.offsets, valid)
    values = backend.support_products(problem.inputs["hidden"], problem.inputs["weight"], None, support)
    out, inputs = torch.empty_like(values), _inputs(tokens)

    def visit() -> Outcome:
        given = (values, tokens.targets, support, Transform(), CLIP, inputs, out)
        return _loss_outcome(backend.support_forward_gradient(*given), {"values": out})

    exact = _over_entries(problem, support, values.double())
    assert exact.loss is not None
    single = _over_entries(problem, support, values)
    in_float32 = Outcome(single.loss, *single[1:3], {"values": single.gradients["values"][1]})
    bound = {
        name: None if error is None else _TIMES * error + _UNITS * torch.finfo(torch.float32).eps
        for name, error in errors(in_float32, exact).items()
    }
    # Per entry an id, a logit and its gradient; per row eight terms, two results, three inputs, target, offset, mask.
    moved = 12 * entries + (4 * 13 + 8 + 8 + 1) * size.tokens
    yield Part("support forward-gradient", Run(visit), partial(errors, expected=exact), bound, moved)


def _over_entries(problem: Problem, support: Support, values: Tensor) -> Expected:
    """The clipped loss of the support's logits, as autograd forms it in their dtype."""
    rows, values = support.rows(), values.clone().requires_grad_()

    def sums(x: Tensor) -> Tensor:
        return x.new_zeros(problem.tokens.count).index_add(0, rows, x)

    relative = values - values.detach().amax()
    of_all = relative - sums(relative.exp()).log()[rows]
    logprobs = sums(of_all * (support.token_ids == problem.tokens.targets[rows]))
    loss = problem.loss(logprobs)
    gradient = torch.autograd.grad(loss, values)[0]
    entropy = -sums(of_all.exp() * of_all)
    every = torch.arange(len(values), device=values.device)
    return Expected(loss.detach(), logprobs.detach(), entropy.detach(), {"values": (every, gradient)})


def too_large(found: Found, bound: Found) -> bool:
    """Whether an error is larger than its bound, or is not finite; torch's losses over sets return no entropies."""

    def within(name: str, error: float | None) -> bool:
        most = bound.get(name, bound.get("logprobs"))
        return error is not None and most is not None and error <= most

    return not all(within(name, error) for name, error in found.items())


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
    # Last: it is young, and a process whose GPU made an illegal access measures nothing more.
    if _CLUSTER.startswith(only or "") and clusters_fit(vocab, dtype, device):
        measure(chosen(cluster_parts(logits_problem(n, vocab, dtype, device))), report, bench, speeds)
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
