"""Random calls of the functions that give log-probabilities, of cross-entropy and of DPO from hidden states."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from comparing import Comparison, NearBorder
from drawing import Draw, draw_layout
from exact_vocabulary import EPS
from policy_calls import backward, made
from torch import Tensor
from torch.nn.functional import logsigmoid
from vocabulary_draw import Vocabulary, draw_backend

import fastrl

EXTRAS = ("mean_logits", "is_top1", "log_sum_sq_probs")


def draw_shape(draw: Draw) -> tuple[int, ...]:
    """Any leading shape: none, several dimensions, empty ones."""
    size = partial(draw.randint, 1, 6)
    shapes: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (size() * 4,), (size(), size()), (2, size(), size()), (3, 0))
    return draw.choices(shapes, (1, 1, 1, 4, 6, 2, 1))[0]


def statistics_call(draw: Draw, compare: Comparison, *, linear: bool) -> None:
    """`token_logprobs` and `linear_token_logprobs`, with gradients of both outputs and extras."""
    inplace = not linear and draw.often(0.25)
    work = Vocabulary(draw, draw_shape(draw), linear=linear, inplace=inplace)
    entropy = draw.often(0.6)
    options: dict[str, Any] = {"entropy": entropy}
    if linear and "sampling_mask" not in work.options and draw.often(0.4):
        options["extras"] = tuple(draw.sample(EXTRAS, draw.randint(1, 3)))
    draw.tell(**options)
    with draw_backend(draw):
        function = fastrl.linear_token_logprobs if linear else fastrl.token_logprobs
        out = made(draw, function, work, **options)
        work.compare_rows(compare, out.logprobs, out.entropy)
        compare.equal("entropy is None", out.entropy is None, not entropy)
        _compare_extras(compare, work, out, options.get("extras", ()))
        if not work.differentiable:
            return
        zero = torch.zeros(work.tokens, dtype=torch.float64)
        which = draw.choice(("logprobs", "entropy", "both")) if entropy else "logprobs"
        u, v = (
            draw_upstream(draw, work.tokens) if which in (name, "both") else zero for name in ("logprobs", "entropy")
        )
        total = (out.logprobs * u.view(work.shape).float()).sum()
        if which != "logprobs":
            total = total + (out.entropy * v.view(work.shape).float()).sum()
        draw.tell(upstream=which)
        factor = backward(draw, total, work, 1.0)
        given = work.slopes(factor * u, factor * v, zero, zero)
        work.compare_gradients(compare, given)


def draw_upstream(draw: Draw, tokens: int) -> Tensor:
    """Gradients from above, some of them 0."""
    return draw.normal(tokens) * (draw.floats(tokens) < draw.choice((0.5, 1.0)))


def _compare_extras(compare: Comparison, work: Vocabulary, out: Any, extras: tuple[str, ...]) -> None:
    rows, mask, shape = work.rows, work.mask, work.shape
    p = rows.log_p.exp()
    if "mean_logits" in extras:
        size = torch.where(p > 0, rows.z, 0.0).abs().mean(1)
        allowed = rows.z_error.mean(1) + 16 * EPS * size + 1e-37
        compare.close(
            "mean_logits", out.mean_logits, torch.where(mask, rows.z.mean(1), 0.0).view(shape), allowed.view(shape)
        )
    if "log_sum_sq_probs" in extras:
        value = torch.logsumexp(2 * rows.log_p, 1)
        allowed = 2 * rows.logp_error.clamp(min=0) + 2 * (p**2 * rows.z_error).sum(1) / (p**2).sum(1)
        allowed = allowed + 2 * (p * rows.z_error).sum(1) + 16 * EPS * (1 + value.abs())
        compare.close(
            "log_sum_sq_probs", out.log_sum_sq_probs, torch.where(mask, value, 0.0).view(shape), allowed.view(shape)
        )
    if "is_top1" in extras and work.tokens:
        others = torch.where(rows.target, -math.inf, rows.z)
        error = rows.z_error.amax(1) * 2 + 4 * EPS * rows.z.abs().nan_to_num(posinf=0).amax(1)
        lead = rows.z[rows.target] - others.amax(1)
        if (mask & (lead.abs() <= error) & (lead != 0)).any():
            raise NearBorder("is_top1")
        sure = mask & ((lead != 0) | torch.tensor(work.head.exact and work.settings.identity))
        found = out.is_top1.reshape(-1)
        compare.equal("is_top1", found[sure], (lead >= 0)[sure])
        compare.equal("is_top1 where masked", found[~mask].any(), False)


def cross_entropy_call(draw: Draw, compare: Comparison) -> None:
    """`linear_cross_entropy`, each reduction."""
    ignore = draw.choice((-100, -1, 0))
    work = Vocabulary(draw, draw_shape(draw), linear=True, ignored=ignore)
    work.keep_only((work.targets != ignore) & work.mask)
    count = int(work.mask.sum())
    reduction = draw.choice(("mean", "mean", "sum", "none"))
    options: dict[str, Any] = {"ignore_index": ignore, "reduction": reduction}
    of = max(count, 1) if reduction == "mean" else 1
    if reduction == "mean" and draw.often(0.3):
        of = float(torch.tensor(draw.uniform(0.5, 20.0)))
        options["denominator"] = torch.tensor(of) if draw.often(0.3) else of
    if draw.often(0.2):
        options["num_tokens"] = count
    draw.tell(**options)
    rows, zero = work.rows, torch.zeros(work.tokens, dtype=torch.float64)
    with draw_backend(draw):
        loss = made(draw, fastrl.linear_cross_entropy, work, **options)
        if reduction == "none":
            u = draw_upstream(draw, work.tokens)
            compare.close("losses", loss, -rows.logp.view(work.shape), rows.logp_error.view(work.shape))
            loss = (loss * u.view(work.shape).float()).sum()
        else:
            u = torch.full_like(zero, 1 / of)
            allowed = (rows.logp_error.sum() + 16 * EPS * rows.logp.abs().sum()) / of + 1e-37
            compare.close("loss", loss, -rows.logp.sum() / of, allowed)
        if work.differentiable:
            factor = backward(draw, loss, work, draw.choice((1.0, 0.37)))
            c = -factor * u * work.mask
            work.compare_gradients(compare, work.slopes(c, zero, 4 * EPS * c.abs(), zero))


def dpo_call(draw: Draw, compare: Comparison) -> None:
    """`linear_dpo_loss`: 2B responses, the chosen ones first."""
    pairs = draw.randint(0, 3)
    layout = draw_layout(draw, draw.choice((6, 24)), count=2 * pairs)
    work = Vocabulary(draw, layout.shape, linear=True)
    work.options.setdefault("mask", work.mask.view(layout.shape))
    work.options |= layout.options
    rows, beta = work.rows, draw.choice((0.1, 0.5, 2.0))
    summed, error = torch.zeros(2, 2 * pairs, dtype=torch.float64)
    for i, response in enumerate(layout.responses):
        summed[i], error[i] = rows.logp[response].sum(), rows.logp_error[response].sum()
    ref = (summed + draw.normal(2 * pairs) * draw.choice((0.1, 3.0))).clamp(max=0.0).float().double()
    error = error + 8 * EPS * (summed.abs() + ref.abs() + 1)
    rewards = beta * (summed - ref)
    reward_error = beta * error
    margins, margin_error = rewards[:pairs] - rewards[pairs:], reward_error[:pairs] + reward_error[pairs:]
    draw.tell(beta=beta, pairs=pairs)
    losses, slopes = -logsigmoid(margins), torch.sigmoid(-margins)
    c, c_error = torch.zeros(2, work.tokens, dtype=torch.float64)
    for i, response in enumerate(layout.responses):
        slope = beta * slopes[i % pairs] / pairs
        c[response] = -slope if i < pairs else slope
        c_error[response] = slope * (margin_error[i % pairs].expm1() + 16 * EPS)
    with draw_backend(draw):
        work.arguments += [work.options.pop("mask"), ref.float()]
        out = made(draw, fastrl.linear_dpo_loss, work, beta=beta)
        mean_error = (slopes * margin_error + 8 * EPS * losses).sum() / max(pairs, 1) + 4 * EPS
        compare.close("loss", out.loss, losses.sum() / max(pairs, 1), mean_error)
        compare.close("chosen_rewards", out.chosen_rewards, rewards[:pairs], reward_error[:pairs])
        compare.close("rejected_rewards", out.rejected_rewards, rewards[pairs:], reward_error[pairs:])
        compare.close("margins", out.margins, margins, margin_error)
        if work.differentiable:
            factor = backward(draw, out.loss, work, draw.choice((1.0, 0.37)))
            zero = torch.zeros_like(c)
            given = work.slopes(factor * c * work.mask, zero, abs(factor) * c_error * work.mask, zero)
            work.compare_gradients(compare, given)
