"""Random calls of `linear_divergence` and `topk_divergence`, and what they must give."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from comparing import Comparison, NearBorder
from drawing import Draw, give, lay
from exact_vocabulary import EPS, UNIT, Gradient, Head, Rows, Settings, statistics
from policy_calls import backward, made
from torch import Tensor
from vocabulary_draw import Vocabulary, draw_backend

import fastrl

KINDS = ("forward_kl", "reverse_kl", "jsd")


class Sides(NamedTuple):
    """Log-probabilities of student and teacher (N, V), and the errors of the logits that they are formed of."""

    log_p: Tensor
    log_q: Tensor
    p_error: Tensor
    q_error: Tensor


class Divergences(NamedTuple):
    """D (N,), dD/dz of the student (N, V), and how far rounding may move both."""

    value: Tensor
    error: Tensor
    slope: Tensor
    slope_error: Tensor
    parts: Tensor  # the sizes of what the slope is a difference of


def _expected(weights: Tensor, value: Tensor) -> Tensor:
    """The sum of weights times values over a row; a weight of 0 counts 0."""
    return torch.where(weights > 0, weights * value, 0.0).sum(1, keepdim=True)


def divergences(sides: Sides, kind: str, beta: float) -> Divergences:
    """From the definitions; errors to first order in those of the logits, plus the rounding of each sum's terms."""
    log_p, log_q = sides.log_p, sides.log_q
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta)) if kind == "jsd" else None
    if log_m is None:
        first, second = (log_q, log_p) if kind == "forward_kl" else (log_p, log_q)
        value = _expected(first.exp(), first - second)
        size = _expected(first.exp(), (first - second).abs()) + 1
        own = torch.where(first.exp() > 0, first.exp() * (first - second - value), 0.0)
        other = second.exp() - first.exp()
        to_p, to_q = (other, own) if kind == "forward_kl" else (own, other)
        distance = (first - second - value).abs()
        parts = p + q if kind == "forward_kl" else torch.where(p > 0, p * (distance + 1), 0.0)
        far = torch.where(p > 0, p * ((log_p - log_q).abs() + value), 0.0) * (kind == "reverse_kl")
        far = far.nan_to_num(0.0, 0.0)  # of an infinite forward KL, whose slope is finite
    else:
        student, teacher = _expected(p, log_p - log_m), _expected(q, log_q - log_m)
        value = beta * teacher + (1 - beta) * student
        size = torch.ones_like(value)
        to_p = (1 - beta) * torch.where(p > 0, p * (log_p - log_m - student), 0.0)
        to_q = beta * torch.where(q > 0, q * (log_q - log_m - teacher), 0.0)
        parts = (1 - beta) * torch.where(p > 0, p * ((log_p - log_m).abs() + student), 0.0)
        far = parts
    sums = 16 * EPS * (1 + math.log(max(log_p.shape[1], 2)))  # the normalisers, and the sum itself
    error = (to_p.abs() * sides.p_error).sum(1) + (to_q.abs() * sides.q_error).sum(1)
    error = (error[:, None] + sums * size + _second_order(p, q, sides)).nan_to_num(0.0)
    doubt = torch.expm1(2 * sides.p_error.amax(1, keepdim=True) + 2 * sides.q_error.amax(1, keepdim=True) + sums)
    slope_error = doubt * (parts + p) + error.where(value < math.inf, 0.0) * p + 16 * EPS * far + 1e-36
    return Divergences(value[:, 0], error[:, 0], to_p, slope_error, parts)


def _second_order(p: Tensor, q: Tensor, sides: Sides) -> Tensor:
    """Where the slopes vanish, as they do for equal distributions, the squares of the errors are what is left."""
    return ((p + q) * (sides.p_error + sides.q_error) ** 2).sum(1, keepdim=True)


def divergence_call(draw: Draw, compare: Comparison) -> None:
    """`linear_divergence`: two heads, a transform of each side, weights, every plan and budget."""
    shape = draw.choice(((), (0,), (3,), (11,), (2, 5), (3, 2, 2)))
    work = Vocabulary(draw, shape, linear=True, supports=False)
    work.arguments.pop()  # the targets
    work.options.setdefault("mask", work.mask.view(shape))
    teacher = _teacher(draw, work)
    kind, beta = draw.choice(KINDS), draw.scale(0.05, 0.95)
    options: dict[str, Any] = {"kind": kind, "beta": beta}
    weights, count = work.mask.double(), int(work.mask.sum())
    if draw.often(0.4):
        drawn = (2 * draw.floats(work.tokens) * (draw.floats(work.tokens) < 0.7)).float()
        options["token_weights"] = lay(draw, drawn.view(shape))
        weights = weights * drawn.double()
    of = float(max(count, 1))
    if draw.often(0.3):
        of = float(torch.tensor(draw.uniform(0.5, 20.0)))
        options["denominator"] = torch.tensor(of) if draw.often(0.3) else of
    if draw.often(0.2):
        options["num_tokens"] = count
    draw.tell(**{k: v for k, v in options.items() if k != "token_weights"})

    sides = Sides(work.rows.log_p, teacher.log_p, work.rows.z_error, teacher.z_error)
    exact = divergences(sides, kind, beta)
    seen = work.mask[:, None]
    if (seen & (sides.log_q > -math.inf) & (sides.log_q < -80) & (sides.log_p == -math.inf)).any():
        raise NearBorder("float32 may lose a probability whose divergence is infinite")
    if kind == "reverse_kl" and (exact.value[work.mask] == math.inf).any():
        raise NearBorder("an infinite divergence has no gradient")
    with draw_backend(draw):
        out = made(draw, fastrl.linear_divergence, work, **options)
        zero = torch.zeros(())
        value, error = (torch.where(work.mask, x, zero) for x in (exact.value, exact.error))
        compare.close("per_token", out.per_token, value.view(shape), error.view(shape) + 1e-37)
        weighted = torch.where(weights > 0, weights * value, 0.0)
        allowed = torch.where(weights > 0, weights * error, 0.0).sum() + 16 * EPS * weighted.nan_to_num(posinf=0).sum()
        compare.close("loss", out.loss, weighted.sum() / of, allowed / of + 1e-37)
        if not work.differentiable:
            return
        factor = backward(draw, out.loss, work, draw.choice((1.0, 0.37, -2.0)))
        work.compare_gradients(compare, _gradient(work, exact, factor * weights / of))


def _teacher(draw: Draw, work: Vocabulary) -> Rows:
    """The teacher's rows; adds its arguments to the call. Its numbers are often near the student's."""
    n, vocab = work.tokens, work.vocab
    assert work.head is not None
    dtype = work.dtype if draw.often(0.7) else draw.dtype()
    bias = draw.normal(vocab) if draw.often(0.3) else None
    if draw.often(0.3):  # the student's own head, and states that have moved
        hidden, weight = work.head.hidden + 0.1 * draw.normal(n, work.head.hidden.shape[1]), work.head.weight
    else:
        width = draw.choice((1, 4, 12, 33))
        hidden = draw.normal(n, width)
        weight = draw.normal(vocab, width) * (draw.choice((0.3, 1.0, 4.0)) / math.sqrt(width))
    hidden, weight = (x.to(dtype).double() for x in (hidden, weight))
    bias = None if bias is None else bias.to(dtype).double()
    given = settings = work.settings
    if draw.often(0.4):
        temperature, scale, softcap = given.temperature, given.logit_scale, given.softcap
        if draw.often(0.5):
            value = draw.scale(0.3, 3.0)
            temperature, work.options["teacher_temperature"] = torch.full((n,), value).double(), value
        if draw.often(0.3):
            scale = work.options["teacher_logit_scale"] = draw.scale(0.3, 2.0)
        if draw.often(0.5):
            softcap = draw.choice((None, 3.0, 20.0))
            work.options["teacher_softcap"] = softcap or 0
        settings = Settings(temperature, scale, softcap)
    head = Head(hidden, weight, bias, dtype, exact=False)
    more = draw.choice((0, 2)) if work.padding else 0
    states, entries = hidden.view(*work.shape, hidden.shape[1]), work.padded(weight, 0, more)
    work.arguments += [give(draw, x, dtype, False).argument for x in (states, entries)]
    if bias is not None:
        work.options["teacher_bias"] = work.padded(bias, 0, more).to(dtype)
    draw.tell(teacher_dtype=dtype, teacher_width=hidden.shape[1])
    return statistics(*head.logits(), work.targets, work.mask, settings)


def _gradient(work: Vocabulary, exact: Divergences, c: Tensor) -> Gradient:
    """dL/dlogits from each token's weight."""
    slope, size = work.rows.slope, c.abs()[:, None]
    error = slope * size * exact.slope_error + 16 * EPS * slope.amax(1, keepdim=True) * size * exact.parts
    keep = (c != 0)[:, None]
    value, error, parts = (
        torch.where(keep, x, 0.0) for x in (slope * c[:, None] * exact.slope, error, slope * size * exact.parts)
    )
    return Gradient(value, error, parts, float(size.max()) if len(size) else 0.0)


def topk_divergence_call(draw: Draw, compare: Comparison) -> None:
    """`topk_divergence`: with and without the tail, some entries not there."""
    rows, k = draw.choice((0, 1, 4)), draw.choice((1, 1, 3, 16))
    dtype = draw.choices((torch.float32, torch.float64, torch.bfloat16), (4, 3, 1))[0]
    vocab, unit = k + draw.randint(1, 9), UNIT[torch.float64] if dtype == torch.float64 else EPS
    z = [draw.normal(rows, vocab) * draw.choice((0.3, 1.0, 4.0)) for _ in range(2)]
    log_p, log_q = (x.log_softmax(1)[:, :k].to(dtype).double() for x in z)
    there = draw.floats(rows, k) < draw.choice((0.6, 2.0))
    kind, beta, tail = draw.choice(KINDS), draw.scale(0.05, 0.95), draw.often(0.6)
    options: dict[str, Any] = {"kind": kind, "beta": beta, "tail": tail}
    draw.tell(rows=rows, k=k, dtype=dtype, **options)
    exact_p = log_p.clone().requires_grad_()
    log_p, log_q = (torch.where(there, x, -math.inf) for x in (exact_p, log_q))
    if tail:
        rest = [1 - x.exp().sum(1, keepdim=True) for x in (log_p, log_q)]
        # A rest below what the dtype tells of 1 - p of the likeliest is taken as that.
        if any((x < max(1e-3, 2 * torch.finfo(dtype).eps)).any() for x in rest):
            raise NearBorder("hardly any mass is left for the tail")
        log_p, log_q = (torch.cat([x, r.log()], 1) for x, r in zip((log_p, log_q), rest, strict=True))
    keep = log_p.detach() > -math.inf
    p, q = log_p.exp(), log_q.exp()
    mixed = (beta * q + (1 - beta) * p).clamp_min(1e-300).log()
    a, b = torch.where(keep, log_p, 0.0), torch.where(keep, log_q, 0.0)
    value = {
        "forward_kl": (q * (b - a)).sum(1),
        "reverse_kl": (p * (a - b)).sum(1),
        "jsd": (beta * q * (b - mixed) + (1 - beta) * p * (a - mixed)).where(keep, 0.0).sum(1),
    }[kind]
    leaf = give(draw, exact_p.detach(), dtype, True)
    if draw.often(0.5) or not there.all():
        options["mask"] = lay(draw, there)
    out = fastrl.topk_divergence(leaf.argument, torch.where(there, log_q[:, :k], -1.0).to(dtype), **options)
    size = 32 * unit * (1 + a.abs().amax(1) + b.abs().amax(1)).detach() / (1e-3 if tail else 1)
    compare.close("divergence", out, value, size * 0.1 + 1e-37)
    out.sum().backward()
    (gradient,) = torch.autograd.grad(value.sum(), exact_p)
    found, allowed = leaf.pulled(gradient, size[:, None] * (1 + gradient.abs()) + 2 * UNIT[dtype] * gradient.abs())
    compare.close("d logprobs", torch.zeros_like(found) if leaf.leaf.grad is None else leaf.leaf.grad, found, allowed)
