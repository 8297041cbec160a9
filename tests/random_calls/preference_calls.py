"""Random calls of `preference_loss`, `linear_preference_loss`, `kto_loss` and `linear_kto_loss`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from comparing import Comparison, NearBorder
from drawing import Draw, Layout, draw_layout
from exact_preferences import kto_term, pair_loss
from exact_vocabulary import EPS, UNIT
from policy_calls import backward, made
from torch import Tensor
from vocabulary_draw import Vocabulary, draw_backend

import fastrl


class Judged(NamedTuple):
    """Exact losses (B,) of scores (k, B) and their slopes (k, B), and how far each may be off."""

    losses: Tensor
    losses_error: Tensor
    slopes: Tensor
    slopes_error: Tensor


def judged(losses: Tensor, scores: Tensor, errors: Tensor, steepness: float) -> Judged:
    """To first order; an exponential tail of this steepness changes by a factor where a score is off by more than 1."""
    slopes, *_ = torch.autograd.grad(losses.sum(), scores, create_graph=True, materialize_grads=True)
    of_slopes = torch.zeros_like(scores)
    for i in range(len(scores)):
        if slopes.requires_grad:
            curvature, *_ = torch.autograd.grad(
                slopes[i].sum(), scores, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            of_slopes[i] = (curvature.abs() * errors).sum(0)
    losses, slopes = losses.detach(), slopes.detach()
    change = (steepness * errors.sum(0)).exp()
    of_losses = (slopes.abs() * errors).sum(0) * change + 16 * EPS * (1 + losses.abs())
    if not (losses.isfinite().all() and slopes.isfinite().all() and of_slopes.isfinite().all()):
        raise NearBorder("beyond the naive text's float64")
    return Judged(losses, of_losses, slopes, of_slopes * change + 16 * EPS * slopes.abs())


def draw_preference(draw: Draw) -> fastrl.Preference:
    """Any preset, with other numbers and with the fields that all formulas read."""
    name = draw.choice(list(fastrl.PREFERENCES))
    beta = draw.choice((0.1, 0.5, 2.0))
    own: dict[str, Any] = {"beta": beta}
    if name in ("DPO", "CPO", "SimPO", "RobustDPO", "EXOPair") and draw.often(0.5):
        own["label_smoothing"] = draw.choice((0.01, 0.2, 0.4))
    if name in ("SimPO", "DPO", "Hinge") and draw.often(0.5):
        own["gamma"] = draw.choice((0.3, 1.4))
    if name == "DiscoPOP" and draw.often(0.5):
        own["tau"] = draw.choice((0.2, 1.0))
    if draw.often(0.3):
        own["nll_coef"] = draw.choice((0.0, 0.4))
    if name != "ORPO":
        own |= {field: draw.often(0.5) for field in ("average", "reference") if draw.often(0.2)}
    objective = fastrl.PREFERENCES[name](**own)
    draw.tell(objective=objective)
    return objective


def judged_pairs(objective: fastrl.Preference, sums: Tensor, errors: Tensor, ref: Tensor, counts: Tensor) -> Judged:
    """Of the sums, their errors, the reference's sums and the numbers of tokens, (2, B) each; slopes are by the sum."""
    divisor = torch.where(counts > 0, counts, torch.inf) if objective.average else torch.ones_like(sums)
    scores = ((sums - ref if objective.reference else sums) / divisor).requires_grad_()
    errors = (errors + 8 * EPS * (sums.abs() + ref.abs() + 1)) / divisor
    if objective.formula == "odds-ratio" and (scores > -torch.maximum(10 * errors, torch.tensor(0.01))).any():
        raise NearBorder("a certain response")
    margin = objective.beta * (scores[0] - scores[1]) - objective.gamma
    if objective.formula == "hinge" and ((1 - margin).abs() <= objective.beta * 4 * errors.sum(0)).any():
        raise NearBorder("the bend")
    steepness = objective.beta / objective.tau if objective.formula == "discopop" else 2 * objective.beta
    found = judged(pair_loss(objective, scores[0], scores[1]), scores, errors, steepness)
    return found._replace(slopes=found.slopes / divisor, slopes_error=found.slopes_error / divisor)


def preference_loss_call(draw: Draw, compare: Comparison) -> None:
    """`preference_loss` of given sums, with its gradients."""
    dtype, pairs, objective = draw.choice((torch.float32, torch.float64)), draw.randint(0, 6), draw_preference(draw)
    draw.tell(dtype=dtype, pairs=pairs)
    sums = (-3 * draw.normal(2, pairs).abs() - draw.choice((0.1, 20.0))).to(dtype).double()
    ref = (sums + draw.normal(2, pairs) * draw.choice((0.1, 10.0))).clamp(max=0.0).to(dtype).double()
    counts = draw.integers(10, 2, pairs)
    exactly = judged_pairs(objective, sums, UNIT[dtype] * torch.ones_like(sums), ref, counts.double())
    of, nll_of = draw.choice((None, 4.5)), draw.choice((None, 11.0))
    leaves = [x.to(dtype).requires_grad_() for x in sums]
    out = fastrl.preference_loss(
        *leaves,
        *(x.to(dtype) if objective.reference else None for x in ref),
        objective=objective,
        chosen_lengths=counts[0],
        rejected_lengths=counts[1].to(draw.choice((torch.int32, torch.float32))),
        denominator=of,
        nll_denominator=nll_of,
    )
    _compare_loss(compare, objective, out, exactly, sums, counts, of, nll_of, 0.0)
    out.loss.backward()
    likely = objective.nll_coef * (counts[0] > 0) / (nll_of or max(int(counts[0].sum()), 1))  # (B,)
    for i, (name, leaf) in enumerate(zip(("chosen", "rejected"), leaves, strict=True)):
        slope = exactly.slopes[i] / (of or max(pairs, 1)) - (likely if i == 0 else 0.0 * likely)
        allowed = exactly.slopes_error[i] / (of or max(pairs, 1)) + 16 * EPS * likely + 1e-37
        compare.close(f"{name}.grad", leaf.grad, slope, allowed)


def _compare_loss(
    compare: Comparison,
    objective: fastrl.Preference,
    out: fastrl.PreferenceLoss,
    exactly: Judged,
    sums: Tensor,
    counts: Tensor,
    of: float | None,
    nll_of: float | None,
    nll_error: Any,
    likely: Tensor | None = None,
) -> None:
    pairs = len(exactly.losses)
    compare.close("losses", out.losses, exactly.losses, exactly.losses_error)
    value, allowed = (x.sum() / (of or max(pairs, 1)) for x in (exactly.losses, exactly.losses_error))
    if objective.nll_coef:
        total = -sums[0].where(counts[0] > 0, 0.0).sum() if likely is None else -likely.sum()
        tokens = int(counts[0].sum()) if likely is None else len(likely)
        nll = total / (nll_of or max(tokens, 1))
        doubt = (nll_error + 16 * EPS * total.abs()) / (nll_of or max(tokens, 1)) + 1e-37
        compare.close("nll", out.nll, nll, doubt)
        value, allowed = value + objective.nll_coef * nll, allowed + objective.nll_coef * doubt
    compare.close("loss", out.loss, value, allowed + 4 * EPS * value.abs() + 1e-37)


class Summed(NamedTuple):
    """A linear call's vocabulary work, its responses' exact sums and their errors, and their numbers of tokens."""

    work: Vocabulary
    layout: Layout
    sums: Tensor
    errors: Tensor
    counts: Tensor

    @classmethod
    def drawn(cls, draw: Draw, count: int) -> Summed:
        layout = draw_layout(draw, draw.choice((6, 24)), count=count)
        work = Vocabulary(draw, layout.shape, linear=True)
        work.options.setdefault("mask", work.mask.view(layout.shape))
        work.options |= layout.options
        sums, errors, counts = torch.zeros(3, count, dtype=torch.float64)
        for i, response in enumerate(layout.responses):
            sums[i], errors[i] = work.rows.logp[response].sum(), work.rows.logp_error[response].sum()
            counts[i] = work.mask[response].sum()
        return cls(work, layout, sums, errors, counts)

    def gradients(self, draw: Draw, compare: Comparison, loss: Tensor, c: Tensor, c_error: Tensor) -> None:
        """Compared, of a loss with these slopes by the tokens' log-probabilities."""
        if not self.work.differentiable:
            return
        factor = backward(draw, loss, self.work, draw.choice((1.0, 0.37)))
        zero, mask = torch.zeros_like(c), self.work.mask
        given = self.work.slopes(factor * c * mask, zero, abs(factor) * c_error * mask, zero)
        self.work.compare_gradients(compare, given)


def linear_preference_call(draw: Draw, compare: Comparison) -> None:
    """`linear_preference_loss`: 2B responses, the chosen ones first."""
    pairs, objective = draw.randint(0, 3), draw_preference(draw)
    drawn = Summed.drawn(draw, 2 * pairs)
    work, sums = drawn.work, drawn.sums.view(2, pairs)
    ref = (sums + draw.normal(2, pairs) * draw.choice((0.1, 3.0))).clamp(max=0.0).float().double()
    exactly = judged_pairs(objective, sums, drawn.errors.view(2, pairs), ref, drawn.counts.view(2, pairs))
    of, nll_of = draw.choice((None, 4.5)), draw.choice((None, 11.0))
    options: dict[str, Any] = {"objective": objective, "denominator": of, "nll_denominator": nll_of}
    likely = torch.zeros(work.tokens, dtype=torch.bool)
    for response in drawn.layout.responses[:pairs]:
        likely[response] = work.mask[response]
    if draw.often(0.3):
        likely = work.mask & (draw.floats(work.tokens) < 0.5)
        options["nll_mask"] = likely.view(work.shape).to(draw.choice((torch.bool, torch.int64)))
    draw.tell(pairs=pairs, **{k: x for k, x in options.items() if k != "nll_mask"})
    c, c_error = torch.zeros(2, work.tokens, dtype=torch.float64)
    for i, response in enumerate(drawn.layout.responses):
        at = divmod(i, pairs)
        c[response] = exactly.slopes[at] / (of or pairs)
        c_error[response] = exactly.slopes_error[at] / (of or pairs)
    weight = objective.nll_coef / (nll_of or max(int(likely.sum()), 1))
    c, c_error = c - weight * likely, c_error + 16 * EPS * weight
    with draw_backend(draw):
        work.arguments += [work.options.pop("mask"), ref.view(-1).float() if objective.reference else None]
        out = made(draw, fastrl.linear_preference_loss, work, **options)
        of_tokens = work.rows.logp[likely], work.rows.logp_error[likely].sum()
        _compare_loss(compare, objective, out, exactly, sums, drawn.counts, of, nll_of, of_tokens[1], of_tokens[0])
        allowed = drawn.errors.view(2, pairs) + 8 * EPS * sums.abs() + 1e-37
        for i, name in enumerate(("chosen_logprobs", "rejected_logprobs")):
            compare.close(name, getattr(out, name), sums[i], allowed[i])
        drawn.gradients(draw, compare, out.loss, c, c_error)


def kto_call(draw: Draw, compare: Comparison) -> None:
    """`kto_loss` or `linear_kto_loss`."""
    count, linear = draw.randint(0, 5), draw.often(0.6)
    beta, weights = draw.choice((0.1, 0.5, 2.0)), (draw.choice((1.0, 1.5)), draw.choice((1.0, 0.25)))
    labels = draw.floats(count) < 0.5
    kind = draw.choice(("none", "number", "tensor", "estimate"))
    ratios = draw.normal(draw.randint(0, 4))
    z = {"none": 0.0, "estimate": max(float(ratios.sum()) / max(len(ratios), 1), 0.0)}.get(kind, 0.4)
    kl = {"none": None, "number": 0.4, "tensor": torch.tensor(0.4), "estimate": ratios.float()}[kind]
    of = draw.choice((None, 7.5))
    draw.tell(linear=linear, count=count, beta=beta, weights=weights, kl=kl, denominator=of, desirable=labels.tolist())
    given: dict[str, Any] = {"kl": kl, "beta": beta, "denominator": of}
    given |= {"desirable_weight": weights[0], "undesirable_weight": weights[1]}
    drawn = Summed.drawn(draw, count) if linear else None
    sums = drawn.sums if drawn else (-3 * draw.normal(count).abs() - 2).float().double()
    ref = (sums + draw.normal(count) * draw.choice((0.1, 3.0))).clamp(max=0.0).float().double()
    errors = (drawn.errors if drawn else 0 * sums) + 8 * EPS * (sums.abs() + ref.abs() + 1)
    scores = (sums - ref)[None].requires_grad_()
    terms = [kto_term(scores[0, i], bool(labels[i]), z, beta, weights) for i in range(count)]
    losses = torch.stack(terms) if terms else scores[0] * 0
    exactly = judged(losses, scores, errors[None], 2 * beta)
    label = labels.to(draw.choice((torch.bool, torch.int64, torch.float32)))
    divisor = of or max(count, 1)
    with draw_backend(draw):
        if drawn:
            work = drawn.work
            work.arguments += [work.options.pop("mask"), ref.float(), label]
            out = made(draw, fastrl.linear_kto_loss, work, **given)
        else:
            leaf = sums.float().requires_grad_()
            out = fastrl.kto_loss(leaf, ref.float(), label, **given)
        compare.close("losses", out.losses, exactly.losses, exactly.losses_error)
        compare.close("kl", out.kl, z, 8 * EPS)
        compare.close("rewards", out.rewards, beta * (sums - ref), beta * errors)
        compare.close("loss", out.loss, exactly.losses.sum() / divisor, exactly.losses_error.sum() / divisor + 1e-37)
        slopes, of_slopes = exactly.slopes[0] / divisor, exactly.slopes_error[0] / divisor + 1e-37
        if drawn is None:
            out.loss.backward()
            compare.close("logprobs.grad", leaf.grad, slopes, of_slopes)
            return
        c, c_error = torch.zeros(2, drawn.work.tokens, dtype=torch.float64)
        for i, response in enumerate(drawn.layout.responses):
            c[response], c_error[response] = slopes[i], of_slopes[i]
        drawn.gradients(draw, compare, out.loss, c, c_error)
