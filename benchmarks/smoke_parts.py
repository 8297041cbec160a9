"""The kernels that smoke.py checks and times: those over rows of logits, the linear loss, and those over supports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tune import CLIP

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import LossTerms, Statistics, Support, Transform
from fastrl.backend.cuda import row_forward_gradient as cluster_kernel
from fastrl.bench.candidates import BOTH, LOSS, POLICY, SETS_POLICY, STATISTICS, Candidate, ours
from fastrl.bench.contenders import EAGER, Outcome, Run
from fastrl.bench.measure import errors
from fastrl.bench.problems import Expected, Problem, Tokens
from fastrl.objectives.rows import RowInputs

#: Rows so few that a row's segments get programs of their own.
_FEW_ROWS = 256
_TOP_P = 0.95
_UPSTREAM = 0.25
#: Errors may be so many times those of eager torch, and more: in nats so many units of float32, in gradients one of
#: their dtype.
_TIMES = 2.0
NATS = 64 * torch.finfo(torch.float32).eps
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
    return allowed(errors(eager.call(), expected), next(iter(problem.inputs.values())).dtype)


def allowed(eager: Found, dtype: torch.dtype) -> Found:
    """What the errors may be, given those of eager torch in this dtype."""
    more = {True: torch.finfo(dtype).eps, False: NATS}
    return {
        name: None if error is None else _TIMES * error + more[name.startswith("d_")] for name, error in eager.items()
    }


def row_parts(problem: Problem) -> Iterator[Part]:
    """The kernels over rows of logits."""
    logits, tokens, identity = problem.inputs["logits"], problem.tokens, Transform()
    backend = row_functions("triton", logits)
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
    in_place = Run(lambda: visit(out, None), lambda: copy(rows, out))
    yield Part("forward-gradient, in place", in_place, check, bound, 2 * once)
    if cluster_kernel.fits(rows, None, identity):
        yield Part("forward-gradient, in place, by Triton", _by_triton(in_place), check, bound, 2 * once)

    quarter = torch.tensor(_UPSTREAM, device=logits.device)

    def scale(source: Tensor, target: Tensor) -> Outcome:
        backend.scale(source, quarter, target)
        return Outcome(None, None, None, {"scaled": target})

    def scaled(source: Tensor, outcome: Outcome) -> Found:
        target, some = outcome.gradients["scaled"], tokens.sampled()
        some = some[some < len(target)]
        exact = source[some].double() * _UPSTREAM
        return {"scaled": float((target[some] - exact).abs().max() / exact.abs().max())}

    run = Run(lambda: scale(out[0], out[0]), lambda: copy(rows, out))
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


def _by_triton(run: Run) -> Run:
    """The run with Triton's kernel where that in CUDA C++ would be taken."""

    def call() -> Outcome:
        with cluster_kernel.use_clusters(False):
            return run.call()

    return Run(call, run.restore)


def _outcome(found: Statistics) -> Outcome:
    return Outcome(None, found.logprobs, found.entropy, {})


def visit_of(problem: Problem) -> Callable[[Tensor, Tensor | None], Outcome]:
    """Forward-gradient of the clipped loss: of logits (1, N, V), beside them or (None) in place."""
    tokens, backend = problem.tokens, row_functions("triton", problem.inputs["logits"])
    inputs = _inputs(tokens)

    def visit(logits: Tensor, out: Tensor | None) -> Outcome:
        found = backend.row_forward_gradient(logits, tokens.targets, None, Transform(), CLIP, inputs, out)
        return _loss_outcome(found, {"logits": (logits if out is None else out)[0]})

    return visit


def _inputs(tokens: Tokens) -> RowInputs:
    """What the clipped loss reads."""
    return RowInputs(tokens.advantages, torch.full_like(tokens.advantages, 1 / tokens.count), tokens.old)


def _loss_outcome(found: LossTerms, gradients: dict[str, Tensor]) -> Outcome:
    return Outcome(found.terms[0].sum(), found.logprobs, found.entropy, gradients)


def copy(source: Tensor, target: Tensor) -> None:
    """What a run in place begins with."""
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

    backend, valid = row_functions("triton", tokens.targets), torch.ones_like(tokens.targets, dtype=torch.bool)
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
        name: None if error is None else _TIMES * error + NATS for name, error in errors(in_float32, exact).items()
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
