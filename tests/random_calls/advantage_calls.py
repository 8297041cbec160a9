"""Random calls of advantages, rewards, the value loss, preference losses and `SamplingMask.from_logits`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import exact_advantages as exact
import torch
from comparing import Comparison, NearBorder
from drawing import Draw, draw_layout, draw_mask, garbage, give, lay
from exact_vocabulary import EPS, UNIT
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence

import fastrl

SLACK = 64 * EPS


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _rewards(draw: Draw, n: int) -> Tensor:
    """Verifiable rewards, scores, or scores far from 0; now and then NaN."""
    kind = draw.choice(("binary", "normal", "offset", "coarse"))
    value = {
        "binary": lambda: draw.integers(2, n).double(),
        "normal": lambda: draw.normal(n),
        "offset": lambda: 100 + draw.normal(n),
        "coarse": lambda: draw.integers(3, n).double() / 2,
    }[kind]()
    if draw.often(0.2):
        value[draw.floats(n) < 0.2] = math.nan
    draw.tell(rewards=kind)
    return value.float().double()


def _groups(draw: Draw, n: int) -> tuple[list[Any], Any]:
    """Group ids, and the argument: a tensor of integers or a list."""
    ids = draw.integers(max(1, n // draw.randint(1, 4)), n).tolist()
    if draw.often(0.5):
        return ids, torch.tensor(ids, dtype=torch.int64)
    names = [f"prompt {i}" for i in ids]
    return names, names


def _normalisation(draw: Draw) -> dict[str, Any]:
    options = {"scale": draw.choice(("group", "batch", "none")), "ddof": draw.choice((0, 1))}
    options["eps"] = draw.choice((1e-6, 1e-4, 0.0, 0.1))
    draw.tell(**options)
    return options


def group_call(draw: Draw, compare: Comparison) -> None:
    n = draw.randint(0, 16)
    rewards, (ids, argument) = _rewards(draw, n), _groups(draw, n)
    given = lay(draw, rewards.float())
    if draw.often(0.3):
        found = fastrl.rloo_advantages(given, argument)
        value = exact.leave_one_out(rewards.tolist(), ids)
        largest = rewards.nan_to_num(0).abs().amax() if n else 0.0
        compare.close("rloo_advantages", found, torch.tensor(value).double(), SLACK * largest)
        return
    options = _normalisation(draw)
    value, size = exact.normalised(rewards.tolist(), ids, **options)
    compare.close(
        "group_advantages", fastrl.group_advantages(given, argument, **options), _tensor(value), SLACK * _tensor(size)
    )


def relative_call(draw: Draw, compare: Comparison) -> None:
    """`maxrl_advantages`, `opo_advantages` and `pass_at_k_advantages`."""
    n = draw.randint(0, 16)
    rewards, (ids, argument) = _rewards(draw, n), _groups(draw, n)
    given = lay(draw, rewards.float())
    largest = rewards.nan_to_num(0).abs().amax() if n else 0.0
    kind = draw.choice(("maxrl", "opo", "pass@k"))
    draw.tell(kind=kind)
    if kind == "maxrl":
        value, size = exact.maximum_likelihood(rewards.abs().tolist(), ids)
        compare.close(kind, fastrl.maxrl_advantages(given.abs(), argument), _tensor(value), SLACK * _tensor(size))
    elif kind == "opo":
        lengths = draw.integers(draw.choice((1, 2, 50)), n)
        value = exact.length_weighted(rewards.tolist(), ids, lengths.tolist())
        compare.close(kind, fastrl.opo_advantages(given, argument, lengths), _tensor(value), SLACK * largest)
    else:
        k = draw.choice((None, 2, 3, 5))
        draw.tell(k=k)
        value = exact.best_of(rewards.tolist(), ids, k)
        found = fastrl.pass_at_k_advantages(given, argument, k=k)
        compare.close(kind, found, _tensor(value), SLACK * largest)


def decoupled_call(draw: Draw, compare: Comparison) -> None:
    n, columns = draw.randint(0, 16), draw.randint(1, 4)
    rewards = [_rewards(draw, n) for _ in range(columns)]
    ids, argument = _groups(draw, n)
    options = _normalisation(draw)
    weights = [float(torch.tensor(draw.uniform(-1.0, 3.0))) for _ in range(columns)] if draw.often(0.7) else None
    draw.tell(weights=weights)
    value, size = exact.decoupled([r.tolist() for r in rewards], ids, weights or [1.0] * columns, **options)
    passed = torch.tensor(weights) if weights is not None and draw.often(0.5) else weights
    found = fastrl.decoupled_group_advantages(
        lay(draw, torch.stack(rewards, 1).float()), argument, weights=passed, **options
    )
    compare.close("decoupled_group_advantages", found, _tensor(value), SLACK * _tensor(size))


def token_baseline_call(draw: Draw, compare: Comparison) -> None:
    layout = draw_layout(draw, 40)
    mask, _ = draw_mask(draw, layout.shape)
    rewards = draw.normal(layout.tokens)
    if draw.often(0.2):
        rewards[draw.floats(layout.tokens) < 0.1] = math.nan
    logp = (-draw.normal(layout.tokens).exp() * draw.choice((1e-3, 1.0, 10.0))).float().double()
    p = logp.exp()
    squares = (p.square() + draw.floats(layout.tokens) * (1 - p).square()).log().float().double()
    ids, argument = _groups(draw, len(layout.responses))
    tail = draw.often(0.3)
    draw.tell(zero_tail=tail, shape=layout.shape)
    columns = [[t[response].tolist() for response in layout.responses] for t in (rewards, logp, squares, mask)]
    value = torch.zeros(layout.tokens, dtype=torch.float64)
    for response, row in zip(layout.responses, exact.token_baseline(*columns, ids, tail), strict=True):
        value[response] = _tensor(row)
    given = [garbage(draw, t.view(layout.shape).float(), mask) for t in (rewards, logp, squares)]
    found = fastrl.optimal_token_baseline_advantages(
        *given, mask.view(layout.shape), argument, zero_tail=tail, **layout.options
    )
    size = rewards.nan_to_num(0).abs().sum()
    compare.close("optimal_token_baseline_advantages", found, value.view(layout.shape), SLACK * size)


def process_call(draw: Draw, compare: Comparison) -> None:
    n, steps = draw.randint(1, 6), draw.randint(1, 4)
    lengths = [draw.randint(1, 7) for _ in range(n)]
    ends = [[draw.randrange(-1, length) for _ in range(steps)] for length in lengths]
    rewards = _rewards(draw, n * steps).view(n, steps)
    ids, argument = _groups(draw, n)
    options = _normalisation(draw)
    value, size = exact.process(rewards.tolist(), ends, ids, lengths, *options.values())
    packed = {}
    if draw.often(0.5):
        packed["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).int()
        join = torch.cat
    else:
        join = partial(pad_sequence, batch_first=True)
    exactly, size = (join([_tensor(row) for row in rows]) for rows in (value, size))
    found = fastrl.process_advantages(
        rewards.float(), torch.tensor(ends), argument, torch.tensor(lengths), **options, **packed
    )
    compare.close("process_advantages", found, exactly, SLACK * size)


def gae_call(draw: Draw, compare: Comparison) -> None:
    layout = draw_layout(draw, 40)
    mask, _ = draw_mask(draw, layout.shape)
    rewards, values = draw.normal(layout.tokens), draw.normal(layout.tokens) * draw.choice((0.1, 10.0))
    gamma, lam = draw.choice((1.0, 0.99, 0.0)), draw.choice((1.0, 0.95, 0.0))
    bootstrap = draw.normal(len(layout.responses)) if draw.often(0.4) else None
    lams = [lam] * len(layout.responses)
    adaptive = draw.often(0.4)
    if adaptive:
        lams = [draw.choice((lam, 1.0, 0.5, 0.0)) for _ in lams]
    draw.tell(gamma=gamma, lam=lams if adaptive else lam, bootstrap=bootstrap, shape=layout.shape)
    expected = torch.zeros(2, layout.tokens, dtype=torch.float64)
    size = torch.zeros(layout.tokens, dtype=torch.float64)
    for i, response in enumerate(layout.responses):
        end = 0.0 if bootstrap is None else float(bootstrap[i])
        numbers = [t[response].tolist() for t in (rewards, values, mask)]
        expected[:, response] = _tensor(exact.gae(*numbers, gamma, lams[i], end))
        size[response] = rewards[response].abs().sum() + 2 * values[response].abs().sum() + abs(end)
    given = [garbage(draw, t.view(layout.shape).float(), mask) for t in (rewards, values)]
    advantages, returns = fastrl.gae(
        *given,
        mask.view(layout.shape),
        gamma=gamma,
        lam=_tensor(lams) if adaptive else lam,
        bootstrap=None if bootstrap is None else bootstrap.float(),
        **layout.options,
    )
    for name, found, value in (("advantages", advantages, expected[0]), ("returns", returns, expected[1])):
        compare.close(name, found, value.view(layout.shape), SLACK * size.view(layout.shape))


def value_call(draw: Draw, compare: Comparison) -> None:
    layout = draw_layout(draw, 40)
    dtype = draw.choice((torch.float32, torch.float64, torch.bfloat16))
    mask, _ = draw_mask(draw, layout.shape)
    values, returns = draw.normal(layout.tokens).to(dtype).double(), draw.normal(layout.tokens)
    old = (values + draw.normal(layout.tokens) * 0.3).float().double()
    clip = draw.choice((None, 0.1, 0.5))
    denominator = float(torch.tensor(draw.uniform(0.5, 40.0))) if draw.often(0.3) else None
    draw.tell(dtype=dtype, clip=clip, denominator=denominator, shape=layout.shape)
    leaf = values.clone().requires_grad_()
    terms = 0.5 * (leaf - returns) ** 2
    if clip is not None:
        held = 0.5 * (old + (leaf - old).clamp(-clip, clip) - returns) ** 2
        outside, ahead = ((leaf - old).abs() - clip).detach(), (held - terms).detach()
        # Inside, both branches are the same number; where they merely cross, the slope jumps.
        unsure = (outside.abs() < 1e-5) | ((outside > 0) & (ahead.abs() < 1e-5))
        if (unsure & mask).any():
            raise NearBorder("clipped value")
        terms = torch.where((outside > 0) & (ahead > 0), held, terms)
    of = max(int(mask.sum()), 1) if denominator is None else denominator
    loss = torch.where(mask, terms, 0.0).sum() / of
    loss.backward()
    given = give(draw, garbage(draw, values.view(layout.shape), mask), dtype, True)
    options: dict[str, Any] = {}
    if denominator is not None:
        options["denominator"] = torch.tensor(denominator) if draw.often(0.5) else denominator
    if clip is not None:
        options |= {"clip": clip, "old_values": garbage(draw, old.view(layout.shape).float(), mask)}
    others = garbage(draw, returns.view(layout.shape).float(), mask)
    found = fastrl.value_loss(given.argument, others, mask.view(layout.shape), **options, **layout.options)
    compare.close("value_loss", found, loss, SLACK * loss.detach().abs() + 1e-37)
    found.backward()
    slope = leaf.grad
    allowed = SLACK * (slope.abs() + (mask * (values.abs() + returns.abs())) / of) + 4 * UNIT[dtype] * slope.abs()
    value, allowed = given.pulled(slope.view(layout.shape), allowed.view(layout.shape))
    compare.close("values.grad", given.leaf.grad, value, allowed + 1e-37)


def penalty_call(draw: Draw, compare: Comparison) -> None:
    """`kl_penalized_rewards` and `overlong_penalty`."""
    if draw.often(0.3):
        limit = draw.randint(1, 60)
        cache = draw.randint(0, limit)
        lengths = draw.integers(80, draw.randint(0, 20))
        draw.tell(max_length=limit, cache=cache, lengths=lengths)
        value = [exact.overlong(int(n), limit, cache) for n in lengths]
        found = fastrl.overlong_penalty(lengths, max_length=limit, cache=cache)
        compare.close("overlong_penalty", found, _tensor(value), 8 * EPS)
        return
    layout = draw_layout(draw, 40)
    mask, argument = draw_mask(draw, layout.shape)
    logp = -draw.normal(layout.tokens).exp()
    ref = (logp + draw.normal(layout.tokens) * draw.choice((0.1, 2.0, 12.0))).clamp(max=0.0).float().double()
    logp = logp.float().double()
    scores, beta = draw.normal(len(layout.responses)), float(torch.tensor(draw.choice((0.05, 1.0))))
    kind = draw.choice(("k1", "k2", "k3"))
    draw.tell(kind=kind, beta=beta, shape=layout.shape)
    value, size = expected = torch.zeros(2, layout.tokens, dtype=torch.float64)
    for score, response in zip(scores.tolist(), layout.responses, strict=True):
        columns = (x[response].tolist() for x in (logp, ref, mask))
        expected[:, response] = torch.tensor(exact.penalised(score, *columns, beta, kind), dtype=torch.float64)
    given = [garbage(draw, t.view(layout.shape).float(), mask) for t in (logp, ref)]
    argument = mask.view(layout.shape) if argument is None else argument
    weight = torch.tensor(beta) if draw.often(0.3) else beta
    rewards = fastrl.kl_penalized_rewards(scores.float(), *given, argument, beta=weight, kind=kind, **layout.options)
    compare.close("kl_penalized_rewards", rewards, value.view(layout.shape), SLACK * size.view(layout.shape))


def preference_call(draw: Draw, compare: Comparison) -> None:
    """`dpo_loss` and `reward_model_loss`, with their gradients."""
    dtype = draw.choice((torch.float32, torch.float64))
    unit, n = 32 * UNIT[dtype], draw.randint(0, 8)
    draw.tell(dtype=dtype, responses=n)
    if draw.often(0.5):
        sums = [(draw.normal(n) * 10 - 30) for _ in range(4)]
        beta = draw.choice((0.1, 1.0))
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in sums[:2]]
        wide = [t.clone().requires_grad_() for t in sums[:2]]
        value = -logsigmoid(beta * ((wide[0] - sums[2]) - (wide[1] - sums[3]))).sum() / max(n, 1)
        value.backward()
        loss = fastrl.dpo_loss(*leaves, sums[2].to(dtype), sums[3].to(dtype), beta=beta)
        doubt = unit * (1 + beta * sum(t.abs() for t in sums))
        compare.close("dpo_loss", loss, value, doubt.sum() / max(n, 1) + 1e-37)
        loss.backward()
        for name, leaf, exactly in zip(("chosen", "rejected"), leaves, wide, strict=True):
            compare.close(f"{name}.grad", leaf.grad, exactly.grad, doubt * exactly.grad.abs() + 1e-37)
        return
    scores, ranks, prompts = draw.normal(n) * 3, draw.integers(3, n), draw.integers(max(1, n // 3), n)
    leaf, wide_scores = scores.to(dtype, copy=True).requires_grad_(), scores.clone().requires_grad_()
    better = ranks[:, None] < ranks
    pairs = [better & (prompts[:, None] == p) & (prompts == p) for p in prompts.unique()]
    losses = -logsigmoid(wide_scores[:, None] - wide_scores)
    means = [losses[of_prompt].mean() for of_prompt in pairs if of_prompt.any()]
    value = sum(means, 0.0 * wide_scores.sum()) / max(len(means), 1)
    value.backward()
    loss = fastrl.reward_model_loss(leaf, ranks.to(draw.choice((torch.int64, torch.float32))), prompts)
    compare.close("reward_model_loss", loss, value, unit * 8)
    loss.backward()
    compare.close("scores.grad", leaf.grad, wide_scores.grad, unit * 8)


def sampling_mask_call(draw: Draw, compare: Comparison) -> None:
    """`SamplingMask.from_logits`: the same entries as a sort keeps."""
    n, vocab = draw.randint(0, 6), draw.choice((1, 2, 7, 33, 100, 1000))
    x = (draw.normal(n, vocab) * draw.choice((0.5, 3.0))).to(draw.dtype())
    if draw.often(0.2):
        x = x.round()  # ties
    if vocab > 2 and draw.often(0.2):
        banned = draw.floats(n, vocab) < 0.3
        banned[:, draw.randrange(vocab)] = False
        x = x.masked_fill(banned, -math.inf)
    options = {
        "temperature": draw.choice((1.0, 0.5, 1.7)),
        "top_k": draw.choice((0, 0, 1, 5, 50)),
        "top_p": draw.choice((1.0, 0.9, 0.5, 0.05)),
        "min_p": draw.choice((0.0, 0.0, 0.05, 0.5)),
    }
    draw.tell(dtype=x.dtype, vocab=vocab, rows=n, **options)
    mask = fastrl.SamplingMask.from_logits(x, **options)
    if not 0 < options["top_k"] < vocab and options["top_p"] == 1 and options["min_p"] == 0:
        compare.equal("recorded sets", mask.token_ids.numel(), 0)
        return
    found = mask.to_dense(vocab)
    for i, row in enumerate(x.double().tolist()):
        kept, nearest = exact.kept(row, **options)
        if nearest < 1e-5:
            raise NearBorder("a threshold")
        compare.equal(f"row {i}: how many are kept", int(found[i].sum()), sum(kept))
        compare.equal(f"row {i}", found[i].tolist(), kept)
