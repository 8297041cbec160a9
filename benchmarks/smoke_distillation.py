"""The kernels of distillation that smoke.py checks and times: divergences of two rows, and entries asked for.

The teacher's logits are the student's of the row before. Divergences are compared at all rows, gradients at 64 rows;
entries are gathered and scattered in two slices of the vocabulary, and must be right to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from smoke_parts import NATS, Found, Part, allowed, copy
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Best, Divergence, Entries, Pair, Transform
from fastrl.bench import plain
from fastrl.bench.contenders import Outcome, Run
from fastrl.bench.problems import Problem, chunks

_DIVERGENCES = (Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("jsd", 0.5))
#: Entries asked for in each row, and the bytes that a GPU moves for each from another place of memory.
_ENTRIES, _SECTOR = 64, 32


def distillation_parts(problem: Problem) -> Iterator[Part]:
    """The kernels over pairs of rows, by divergence, and those over entries."""
    for divergence in _DIVERGENCES:
        yield from _pair_parts(problem, divergence)
    yield from _entry_parts(problem)


def _pair_parts(problem: Problem, divergence: Divergence) -> Iterator[Part]:
    logits, c = problem.inputs["logits"], problem.tokens.upstream[0]
    teacher, out, identity = logits.roll(1, 0), torch.empty_like(logits), Transform()
    backend, once = row_functions("triton", logits), problem.size.once
    rows = problem.tokens.sampled()
    exact, eager = (_answers(logits, teacher, divergence, c, rows, dtype) for dtype in (torch.float64, logits.dtype))
    bound = allowed(_errors(eager, exact), logits.dtype)
    bound["d_logits"] = (bound["d_logits"] or 0.0) + NATS  # a factor is a difference of logarithms

    def check(outcome: Outcome) -> Found:
        found = outcome.gradients
        return _errors(found if "d_logits" not in found else found | {"d_logits": found["d_logits"][rows]}, exact)

    pair = Pair(logits, teacher, identity, identity, divergence)
    known = backend.pair_statistics(pair)

    def statistics() -> Outcome:
        return Outcome(None, None, None, {"divergence": backend.pair_statistics(pair).divergence})

    def gradient() -> Outcome:
        backend.pair_gradient(pair, known, c, out)
        return Outcome(None, None, None, {"d_logits": out})

    def visit() -> Outcome:
        found = backend.pair_forward_gradient(pair._replace(logits=out), c)
        return Outcome(None, None, None, {"divergence": found.divergence, "d_logits": out})

    in_place = Run(visit, lambda: copy(logits, out))
    yield Part(f"pair statistics, {divergence.kind}", Run(statistics), check, bound, 2 * once, written=False)
    yield Part(f"pair gradient, {divergence.kind}", Run(gradient), check, bound, 3 * once)
    yield Part(f"pair forward-gradient, {divergence.kind}", in_place, check, bound, 3 * once)


def _answers(
    logits: Tensor, teacher: Tensor, divergence: Divergence, c: Tensor, rows: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The divergence of each row (N,), and the gradient of sum c D for some rows, by torch in this dtype."""

    def per_token(x: Tensor, part: Tensor) -> Tensor:
        return plain.divergence(x, teacher[part].to(dtype), *divergence)

    every = [per_token(logits[part].to(dtype), part) for part in chunks(*logits.shape, logits.device)]
    x = logits[rows].to(dtype).requires_grad_()
    (gradient,) = torch.autograd.grad((c[rows] * per_token(x, rows)).sum(), x)
    return {"divergence": torch.cat(every), "d_logits": gradient}


def _errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> Found:
    """The largest errors: in nats, and of the gradients relative to their largest entry."""
    largest = {name: float((x.double() - exact[name]).abs().max()) for name, x in found.items()}
    return {name: x / float(exact[name].abs().max()) if name == "d_logits" else x for name, x in largest.items()}


def _entry_parts(problem: Problem) -> Iterator[Part]:
    logits, targets = problem.inputs["logits"], problem.tokens.targets
    (count, vocab), backend = logits.shape, row_functions("triton", logits)
    k = min(_ENTRIES, vocab)
    # Distinct in each row, in an order of its own, and in both slices.
    ids = (targets[:, None] - torch.arange(k, device=logits.device) * (vocab // k)) % vocab
    rows = torch.arange(count, device=logits.device)
    entries = Entries(ids.int().view(-1), torch.arange(count + 1, device=logits.device) * k)
    slices = [(0, logits[None, :, : vocab // 2]), (vocab // 2, logits[None, :, vocab // 2 :])]
    exact = logits.gather(1, ids).float()
    best = ids.where(exact == exact.amax(1, keepdim=True), vocab).amin(1)
    # Per entry its id in each slice, its logit or gradient, and a sector of the row.
    moved = (2 * 4 + 4 + _SECTOR) * exact.numel()
    none: Found = {"values": 0.0, "best": 0.0}

    def gather() -> Outcome:
        values = torch.full_like(exact, torch.nan).view(-1)
        found = Best(torch.full_like(targets, -1), exact.new_full((count,), -torch.inf))
        for first, part in slices:
            backend.gather_entries(part, first, rows, entries, values, found)
        return Outcome(None, None, None, {"values": values, "best": found.ids})

    def gathered(outcome: Outcome) -> Found:
        values, ids = outcome.gradients["values"], outcome.gradients["best"]
        wrong = float((ids != best).sum())
        return {"values": float((values.view_as(exact) - exact).abs().max()), "best": wrong}

    yield Part("entries, gathered", Run(gather), gathered, none, moved, written=False)

    out = torch.zeros_like(logits)

    def scatter() -> Outcome:
        for first, part in slices:
            columns = slice(first, first + part.shape[-1])
            backend.scatter_entries(exact.view(-1), first, rows, entries, out[None, :, columns])
        return Outcome(None, None, None, {"out": out})

    def scattered(outcome: Outcome) -> Found:
        some = problem.tokens.sampled()
        expected = torch.zeros_like(logits[some]).scatter_(1, ids[some], exact[some].to(logits.dtype))
        return {"out": float((outcome.gradients["out"][some] - expected).abs().max())}

    yield Part("entries, scattered", Run(scatter), scattered, {"out": 0.0}, moved)
