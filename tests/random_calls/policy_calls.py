"""Random calls of `policy_loss`, `logits_policy_loss` and `linear_policy_loss`, and what they must give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from comparing import Comparison, NearBorder
from draw_objective import Custom, draw_objective, with_entropy
from drawing import Draw, Layout, draw_layout, draw_mask, garbage, give, lay
from exact_policy import Batch, Exact, exact_policy
from exact_vocabulary import EPS, UNIT
from torch import Tensor
from vocabulary_draw import Vocabulary, draw_backend

import fastrl
from fastrl.passes.forward_gradient import gradients_backward
from fastrl.passes.operator import hand_over
from fastrl.planning.plans import PLANS, use_plan


def policy_call(draw: Draw, compare: Comparison) -> None:
    """From log-probabilities; float64 ones are held to float64's rounding."""
    layout = draw_layout(draw, draw.choice((4, 12, 40)))
    dtype = draw.choices((torch.float32, torch.float64, torch.bfloat16, torch.float16), (5, 4, 1, 1))[0]
    mask, mask_argument = draw_mask(draw, layout.shape)
    logp = -(draw.normal(layout.tokens) * draw.choice((0.5, 1.0, 2.0))).exp()
    logp[draw.floats(layout.tokens) < 0.05] = 0.0
    entropy = draw.floats(layout.tokens) * draw.choice((0.1, 3.0, 11.0))
    logp, entropy = logp.to(dtype).double(), entropy.to(dtype).double()
    objective = draw_objective(draw)
    batch, options = draw_batch(draw, layout, mask, logp, entropy, objective, dtype)
    given = {name: give(draw, t.view(layout.shape), dtype, True) for name, t in (("logp", logp), ("entropy", entropy))}
    if mask_argument is not None:
        options["mask"] = mask_argument
    with_entropies = needs_entropy(objective, options) or draw.often(0.3)
    if with_entropies:
        options["entropy"] = given["entropy"].argument
    draw.tell(dtype=dtype, shape=layout.shape, given=sorted(options))
    unit = UNIT[torch.float64] if dtype == torch.float64 else EPS
    floor = 4 * unit * (1 + logp.abs())
    expected = Expected(draw, objective, batch, logp, entropy if with_entropies else None, floor, floor, unit)
    out = fastrl.policy_loss(
        given["logp"].argument, objective=objective, advantages=options.pop("advantages"), **options
    )
    expected.compare(compare, out)
    compare.equal("logprobs", out.logprobs, torch.where(mask, logp, 0.0).view(layout.shape).to(out.logprobs.dtype))
    factor = draw.choice((1.0, 0.37))
    (out.loss * factor).backward()
    for name, slope, error in (("logp", expected.c, expected.c_error), ("entropy", expected.h, expected.h_error)):
        if name == "entropy" and not with_entropies:
            continue
        allowed = factor * error + 2 * UNIT[dtype] * slope.abs() + (2.0**-23 if dtype == torch.float16 else 1e-37)
        if dtype == torch.float16 and (slope.abs() > 3e4).any():
            raise NearBorder("beyond float16")
        grad = given[name].leaf.grad
        value, allowed = given[name].pulled(factor * slope, allowed)
        compare.close(f"d {name}", torch.zeros_like(value) if grad is None else grad, value, allowed)


def vocabulary_policy_call(draw: Draw, compare: Comparison, *, linear: bool) -> None:
    """From logits, or from hidden states and a head."""
    layout = draw_layout(draw, draw.choice((4, 12, 24)))
    inplace = not linear and draw.often(0.3)
    work = Vocabulary(draw, layout.shape, linear=linear, inplace=inplace)
    rows = work.rows
    objective = draw_objective(draw)
    batch, options = draw_batch(draw, layout, work.mask, rows.logp, rows.entropy, objective, work.dtype)
    if linear and draw.often(0.2):
        options["num_tokens"] = int(work.mask.sum())
    floor = 4 * EPS * (1 + rows.logp.abs())
    expected = Expected(
        draw, objective, batch, rows.logp, rows.entropy, rows.logp_error + floor, rows.entropy_error + floor, EPS
    )
    function = fastrl.linear_policy_loss if linear else fastrl.logits_policy_loss
    draw.tell(given=sorted(options))
    with draw_backend(draw):
        out = made(draw, function, work, objective=objective, **options)
        expected.compare(compare, out)
        work.compare_rows(compare, out.logprobs, out.entropy)
        if work.differentiable:
            factor = backward(draw, out.loss, work, draw.choice((1.0, 1.0, 0.37, -2.0)))
            g = work.slopes(expected.c, expected.h, expected.c_error, expected.h_error)
            work.compare_gradients(compare, g.times(factor))


def made(draw: Draw, function: Any, work: Vocabulary, **options: Any) -> Any:
    """The call; from a head within a drawn budget, down to the smallest that is possible, and by a drawn plan."""
    options |= work.options
    if not work.linear:
        return function(*work.arguments, **options)
    plan = draw.choice((None, *PLANS)) if "extras" not in options else None  # they are a pass, and a plan, of their own
    try:
        return _by_plan(draw, plan, function, work, options)
    except ValueError as error:
        possible = re.search(r"cannot be followed here, only (.*)", str(error))
        if possible is None:
            raise
        return _by_plan(draw, draw.choice((None, *possible[1].split(", "))), function, work, options)


def _by_plan(draw: Draw, plan: str | None, function: Any, work: Vocabulary, options: dict[str, Any]) -> Any:
    draw.tell(plan=plan)
    with nullcontext() if plan is None else use_plan(plan):
        if draw.often(0.4):
            return function(*work.arguments, **options)
        try:
            return function(*work.arguments, **options, memory_budget=1)
        except ValueError as error:
            smallest = re.search(r"the smallest possible is (\d+)", str(error))
            if smallest is None:
                raise
        size = int(smallest[1]) + draw.choice((0, 0, int(draw.scale(1, 2**20))))
        budget = draw.choice((size, f"{-(-size // 1024)}KiB"))
        draw.tell(memory_budget=budget)
        return function(*work.arguments, **options, memory_budget=budget)


#: The backwards of functions whose gradients are formed with the loss, and handed over once.
FORMED = {hand_over, gradients_backward}


def backwards(function: Any) -> Iterator[Any]:
    """The backwards of fastrl's functions in a graph."""
    if function is not None:
        yield getattr(function, "run_backward", None)
        for following, _ in function.next_functions:
            yield from backwards(following)


def backward(draw: Draw, loss: Tensor, work: Vocabulary, factor: float) -> float:
    """The gradients of `factor * loss`, once or twice; returns what they are multiples of."""
    twice = draw.often(0.2) and work.tokens > 0
    draw.tell(factor=factor, backward="twice" if twice else "once")
    scaled = loss if factor == 1.0 else loss * factor
    scaled.backward(retain_graph=twice)
    if not twice:
        return factor
    if work.inplace or FORMED & set(backwards(loss.grad_fn)):
        with pytest.raises(RuntimeError, match="compute the loss again"):
            scaled.backward()
        return factor
    scaled.backward()
    work.times *= 2
    return 2 * factor


class Expected:
    """The exact loss, its slopes, and how far they move when log-probabilities and entropies do by their errors."""

    def __init__(
        self,
        draw: Draw,
        objective: Any,
        batch: Batch,
        logp: Tensor,
        entropy: Tensor | None,
        logp_error: Tensor,
        entropy_error: Tensor,
        unit: float,
    ) -> None:
        self.exact = exact_policy(objective, batch, logp, entropy)
        moved = []
        drawn = 2 * draw.integers(2, len(logp)).double() - 1
        # Together, at random, and as the loss feels it most: of two tokens that nearly cancel, the first two may too.
        for signs in ((1.0, 1.0), (drawn, drawn), (self.exact.c.sign(), self.exact.h.sign())):
            other = None if entropy is None else entropy + signs[1] * entropy_error
            moved.append(exact_policy(objective, batch, logp + signs[0] * logp_error, other))
        self.unit, self.tokens = unit, batch.tokens
        self.unknown = {"entropy"} if entropy is None else set()
        if not isinstance(objective, fastrl.Objective):
            self.unknown |= {"gate_mean", "clip_frac", "clip_frac_low", "clip_frac_high"}
        self._check_borders(moved)
        self.moved = moved
        self.c, self.h = self.exact.c, self.exact.h
        self.c_error = self._doubt(lambda e: e.c) + 64 * unit * (self.exact.c_magnitude + self.c.abs())
        self.h_error = self._doubt(lambda e: e.h) + 64 * unit * self.h.abs()

    def _doubt(self, part: Any) -> Tensor:
        return 8 * torch.stack([(part(m) - part(self.exact)).abs() for m in self.moved]).amax(0)

    def _check_borders(self, moved: list[Exact]) -> None:
        for i, distance in enumerate(self.exact.borders):
            away = torch.stack([torch.as_tensor(m.borders[i]) for m in moved])
            finite = torch.isfinite(distance)
            reach = 16 * (away - distance).abs().amax(0) + 64 * self.unit
            if (finite & ~(distance.abs() > reach)).any():
                raise NearBorder(f"{i}: {distance.tolist()}")

    def compare(self, compare: Comparison, out: fastrl.PolicyLoss) -> None:
        exact, unit = self.exact, 64 * self.unit
        allowed = self._doubt(lambda e: e.loss) + unit * exact.magnitudes["loss"] + 1e-37
        compare.close("loss", out.loss, exact.loss, allowed)
        compare.equal("metrics", sorted(out.metrics) == sorted(exact.metrics), True)
        for name, value in exact.metrics.items():
            found = out.metrics[name]
            if name in self.unknown:
                unknown = found.isnan() if self.tokens else (found == 0) | found.isnan()
                compare.equal(f"metrics[{name!r}], which is not known, is NaN", bool(unknown), True)
                continue
            allowed = self._doubt(lambda e, name=name: e.metrics[name]) + 64 * EPS * exact.magnitudes[name]
            compare.close(f"metrics[{name!r}]", found, value, allowed + 1e-37)


def needs_entropy(objective: Any, options: dict[str, Any]) -> bool:
    if isinstance(objective, Custom):
        return objective.function is with_entropy or "entropy_threshold" in options
    return objective.has_entropy_term or objective.top_entropy_fraction is not None or "entropy_threshold" in options


def draw_batch(
    draw: Draw, layout: Layout, mask: Tensor, logp: Tensor, entropy: Tensor, objective: Any, dtype: torch.dtype
) -> tuple[Batch, dict[str, Any]]:
    """What the objective reads beside log-probabilities, exact and as arguments."""
    n, shape = layout.tokens, layout.shape
    policy = objective if isinstance(objective, fastrl.Objective) else fastrl.Objective()
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    options = layout.options

    def per_token(name: str, value: Tensor) -> Tensor:
        value = value.to(kept)
        argument = value.view(shape)
        if draw.often(0.5):
            argument = garbage(draw, argument, mask)
        options[name] = lay(draw, argument)
        return value.double()

    def near(center: Tensor, sizes: tuple[float, ...]) -> Tensor:
        size = draw.choice(sizes)
        shift = draw.normal(n) * size
        if draw.often(0.2):
            shift = shift + draw.choice((-1.0, 1.0)) * size
        return (center + shift).clamp(max=0.0)

    token_level = policy.ratio == "token" and isinstance(objective, fastrl.Objective)
    wide = (15.0,) if token_level and dtype != torch.float16 and draw.often(0.1) else ()
    batch = Batch(layout.responses, mask, draw_advantages(draw, layout, objective, options, kept))
    if draw.often(0.8):
        batch.old = per_token("old_logprobs", near(logp, wide or (1e-3, 0.1, 0.1, 0.5, 1.5)))
    old = logp if batch.old is None else batch.old
    if (policy.kl is not None and policy.kl.needs_reference) or draw.often(0.1):
        far = (15.0,) if dtype != torch.float16 and draw.often(0.1) else ()
        batch.ref = per_token("ref_logprobs", near(logp, far or (1e-3, 0.1, 1.0, 3.0)))
    if policy.rollout_correction is not None or draw.often(0.5 if policy.gate.reads_rollout else 0.15):
        batch.rollout = per_token("rollout_logprobs", near(old, (1e-3, 0.05, 0.3)))
    if draw.often(0.15):
        batch.token_weights = per_token("token_weights", 2 * draw.floats(n))
    if draw.often(0.15):
        batch.entropy_weights = per_token("entropy_weights", draw.floats(n))
    if isinstance(objective, fastrl.Objective) and draw.often(0.4 if policy.top_entropy_fraction else 0.05):
        batch.threshold = float(torch.tensor(_between(entropy[mask]), dtype=kept))
        options["entropy_threshold"] = torch.tensor(batch.threshold, dtype=kept) if draw.often(0.3) else batch.threshold
    if isinstance(policy.covariance, fastrl.CovarianceClip):
        assert policy.covariance.generator is not None
        generator = torch.Generator().manual_seed(policy.covariance.generator.initial_seed())
        batch.draws = torch.rand(n, generator=generator, dtype=torch.float64)
    if draw.often(0.2):
        batch.denominator = float(torch.tensor(draw.uniform(0.5, 50)))
        options["denominator"] = torch.tensor(batch.denominator) if draw.often(0.3) else batch.denominator
    elif draw.often(0.1):
        options["denominator"] = (0.5 + 50 * draw.floats(len(layout.responses))).to(kept)
        batch.denominator = options["denominator"].tolist()
    if getattr(objective, "aggregate", None) == "prompt-mean" or draw.often(0.1):
        batch.groups = [draw.randint(-1, 3) for _ in layout.responses]
        options["group_ids"] = batch.groups if draw.often(0.3) else torch.tensor(batch.groups, dtype=torch.int64)
    return batch, options


def _between(values: Tensor) -> float:
    """A number in the widest gap, so that rounding moves nothing across it; below all where there is none."""
    ordered = values.sort().values
    if len(ordered) < 2:
        return float(ordered.sum()) - 0.1
    gap = int(ordered.diff().argmax())
    return float(ordered[gap : gap + 2].mean()) if ordered[gap + 1] - ordered[gap] > 1e-3 else float(ordered[0]) - 0.1


def draw_advantages(draw: Draw, layout: Layout, objective: Any, options: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """One per response or one per token; float64 (N,), one per token, is returned."""
    responses, n = len(layout.responses), layout.tokens
    size = draw.choice((0.01, 1.0, 1.0, 5.0))
    sparse = draw.often(0.3) and not isinstance(getattr(objective, "gate", None), fastrl.GeometricMean)
    per_response = draw.often(0.6) or responses == n
    count = responses if per_response else n
    value = draw.normal(count) * size
    if sparse:
        value[draw.floats(count) < 0.4] = 0.0
    value = value.to(dtype)
    options["advantages"] = lay(draw, value if per_response else value.view(layout.shape))
    if not per_response:
        return value.double()
    each = torch.zeros(n, dtype=torch.float64)
    for advantage, response in zip(value, layout.responses, strict=True):
        each[response] = advantage.double()
    return each
