"""Advantages, rewards and samplers' sets in float64, mostly in plain loops over numbers, from their formulas."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Sequence

Numbers = Sequence[float]


def normalised(
    values: Numbers, groups: Sequence[Hashable], scale: str, ddof: int, eps: float
) -> tuple[list[float], list[float]]:
    """`(R - mean) / (std + eps)` in each group, NaN left out; and what an error is relative to."""
    known = [v for v in values if not math.isnan(v)]
    found, sizes = [], []
    for value, group in zip(values, groups, strict=True):
        members = [v for v, g in zip(values, groups, strict=True) if g == group and not math.isnan(v)]
        if math.isnan(value) or min(members) == max(members):
            found.append(0.0)
            sizes.append(0.0)
            continue
        divisor = 1.0
        if scale != "none":
            sample = members if scale == "group" else known
            deviation = statistics.stdev if ddof else statistics.pstdev
            divisor = (deviation(sample) if len(sample) > ddof else 0.0) + eps
        found.append((value - statistics.fmean(members)) / divisor)
        sizes.append(max(abs(v) for v in known) / divisor)
    return found, sizes


def leave_one_out(values: Numbers, groups: Sequence[Hashable]) -> list[float]:
    found = []
    for i, (value, group) in enumerate(zip(values, groups, strict=True)):
        others = [v for j, (v, g) in enumerate(zip(values, groups, strict=True)) if j != i and g == group and v == v]
        alone = math.isnan(value) or not others or all(v == value for v in others)
        found.append(0.0 if alone else value - statistics.fmean(others))
    return found


def maximum_likelihood(values: Numbers, groups: Sequence[Hashable]) -> tuple[list[float], list[float]]:
    """MaxRL's `(R - mean) / mean`, 0 where the mean is 0; and what an error is relative to."""
    found, sizes = [], []
    for value, group in zip(values, groups, strict=True):
        members = [v for v, g in zip(values, groups, strict=True) if g == group and not math.isnan(v)]
        mean = math.fsum(members) / max(len(members), 1)
        absent = math.isnan(value) or mean == 0
        found.append(0.0 if absent or min(members) == max(members) else (value - mean) / mean)
        sizes.append(0.0 if absent else (max(map(abs, members)) / abs(mean)) ** 2)
    return found, sizes


def length_weighted(values: Numbers, groups: Sequence[Hashable], lengths: Numbers) -> list[float]:
    """OPO's `R - sum(length R) / sum(length)`."""
    found = []
    for value, group in zip(values, groups, strict=True):
        members = [(v, n) for v, g, n in zip(values, groups, lengths, strict=True) if g == group and not math.isnan(v)]
        if math.isnan(value) or len({v for v, _ in members}) == 1:
            found.append(0.0)
            continue
        if not any(n for _, n in members):
            members = [(v, 1.0) for v, _ in members]
        found.append(value - math.fsum(v * n for v, n in members) / math.fsum(n for _, n in members))
    return found


def best_of(values: Numbers, groups: Sequence[Hashable], k: int | None) -> list[float]:
    """The mean of (best - best of the others) over all k-subsets of the group that hold the response."""
    found = []
    for i, (value, group) in enumerate(zip(values, groups, strict=True)):
        others = [v for j, (v, g) in enumerate(zip(values, groups, strict=True)) if j != i and g == group and v == v]
        size = len(others) + 1 if k is None else min(k, len(others) + 1)
        if math.isnan(value) or size == 1:
            found.append(0.0)
            continue
        subsets = list(itertools.combinations(others, size - 1))
        found.append(math.fsum(max(value - max(subset), 0.0) for subset in subsets) / len(subsets))
    return found


def decoupled(
    columns: Sequence[Numbers], groups: Sequence[Hashable], weights: Numbers, scale: str, ddof: int, eps: float
) -> tuple[list[float], list[float]]:
    """GDPO: each reward normalised by itself, their weighted sum over its standard deviation in the batch."""
    total, size = [0.0] * len(groups), [0.0] * len(groups)
    for weight, column in zip(weights, columns, strict=True):
        for i, (one, scaled) in enumerate(zip(*normalised(column, groups, scale, ddof, eps), strict=True)):
            total[i] += weight * one
            size[i] += abs(weight) * scaled
    counted = [t for t, row in zip(total, zip(*columns, strict=True), strict=True) if any(v == v for v in row)]
    deviation = math.sqrt(math.fsum(t * t for t in counted) / max(len(counted) - ddof, 1)) + eps
    if deviation == 0:
        return total, size
    return [t / deviation for t in total], [s / deviation for s in size]


def token_baseline(
    rewards: Sequence[Numbers],
    logp: Sequence[Numbers],
    log_squares: Sequence[Numbers],
    masks: Sequence[Sequence[bool]],
    groups: Sequence[Hashable],
    zero_tail: bool,
) -> list[list[float]]:
    """The optimal token baseline, a response and a token at a time; responses are lists of tokens."""
    to_go, energy, places = [], [], []
    for reward, lp, square, mask in zip(rewards, logp, log_squares, masks, strict=True):
        kept = [t for t in range(len(mask)) if mask[t]]
        norms = [(1 - math.exp(lp[t])) ** 2 + max(math.exp(square[t]) - math.exp(2 * lp[t]), 0.0) for t in kept]
        to_go.append([sum(reward[t] for t in kept[i:]) for i in range(len(kept))])
        energy.append([math.fsum(norms[: i + 1]) for i in range(len(kept))])
        places.append(kept)
    found = [[0.0] * len(mask) for mask in masks]
    for i, group in enumerate(groups):
        for step, place in enumerate(places[i]):
            rivals = [
                (to_go[j][step], energy[j][step])
                for j, other in enumerate(groups)
                if other == group and step < len(places[j]) and not math.isnan(to_go[j][step])
            ]
            own = to_go[i][step]
            if math.isnan(own) or len(rivals) == 1 or len({g for g, _ in rivals}) == 1:
                found[i][place] = own if zero_tail and len(rivals) == 1 and not math.isnan(own) else 0.0
                continue
            if not any(w for _, w in rivals):
                rivals = [(g, 1.0) for g, _ in rivals]
            found[i][place] = own - math.fsum(g * w for g, w in rivals) / math.fsum(w for _, w in rivals)
    return found


def gae(
    rewards: Numbers, values: Numbers, mask: Sequence[bool], gamma: float, lam: float, bootstrap: float
) -> tuple[list[float], list[float]]:
    """One response, from its last token to its first."""
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    following, advantage = bootstrap, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            delta = rewards[t] + gamma * following - values[t]
            advantage = delta + gamma * lam * advantage
            following = values[t]
            advantages[t], returns[t] = advantage, advantage + values[t]
    return advantages, returns


def penalised(
    score: float, logp: Numbers, ref: Numbers, mask: Sequence[bool], beta: float, kind: str
) -> tuple[list[float], list[float]]:
    """One response's token rewards, and what their errors are relative to."""
    found, sizes = [0.0] * len(logp), [0.0] * len(logp)
    last = max((t for t in range(len(logp)) if mask[t]), default=None)
    for t in range(len(logp)):
        if not mask[t]:
            continue
        d = ref[t] - logp[t]
        x = max(-20.0, min(20.0, d))
        kl = {"k1": -d, "k2": d * d / 2, "k3": math.expm1(x) - x}[kind]
        slope = {"k1": 1.0, "k2": abs(d), "k3": abs(math.expm1(x))}[kind]
        bonus = score if t == last else 0.0
        found[t] = bonus - beta * kl
        parts = abs(math.expm1(x)) + abs(x) if kind == "k3" else abs(kl)
        sizes[t] = abs(bonus) + abs(beta) * (parts + slope * (abs(ref[t]) + abs(logp[t])))
    return found, sizes


def overlong(length: int, max_length: int, cache: int) -> float:
    if length <= max_length - cache:
        return 0.0
    if length > max_length:
        return -1.0
    return ((max_length - cache) - length) / cache


def process(
    rewards: Sequence[Numbers],
    ends: Sequence[Sequence[int]],
    groups: Sequence[Hashable],
    lengths: Sequence[int],
    scale: str,
    ddof: int,
    eps: float,
) -> tuple[list[list[float]], list[list[float]]]:
    """Each response's advantages, one per token, and what their errors are relative to."""
    present = [(i, s) for i in range(len(rewards)) for s in range(len(rewards[i])) if ends[i][s] >= 0]
    flat, sizes = normalised([rewards[i][s] for i, s in present], [groups[i] for i, _ in present], scale, ddof, eps)
    found = [[0.0] * length for length in lengths]
    scales = [[0.0] * length for length in lengths]
    for (i, s), value, size in zip(present, flat, sizes, strict=True):
        for t in range(lengths[i]):
            if ends[i][s] >= t:
                found[i][t] += value
                scales[i][t] += size
    return found, scales


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > -30 else x - math.log1p(math.exp(x))


def kept(logits: Numbers, top_k: int, top_p: float, min_p: float, temperature: float) -> tuple[list[bool], float]:
    """Which entries a sampler keeps, and how near (in probability, relative) the nearest decision was to its border."""
    z = [x / temperature for x in logits]
    stay = [x > -math.inf for x in z]
    nearest = math.inf
    if 0 < top_k < len(z):
        border = sorted(z, reverse=True)[top_k - 1]
        stay = [s and x >= border for s, x in zip(stay, z, strict=True)]
    top = max(z)
    weight = [math.exp(x - top) if s else 0.0 for x, s in zip(z, stay, strict=True)]
    if top_p < 1:
        total, below = math.fsum(weight), 0.0
        # From the least likely on, the lowest index first among equals, while what falls is at most 1 - top_p.
        order = sorted((i for i in range(len(z)) if stay[i]), key=lambda i: (z[i], i))
        for i in order[:-1]:
            below += weight[i] / total
            nearest = min(nearest, abs(below - (1 - top_p)))
            if below <= 1 - top_p:
                stay[i] = False
    if min_p > 0:
        for i in range(len(z)):
            if stay[i]:
                nearest = min(nearest, abs(weight[i] - min_p) / min_p)
                stay[i] = weight[i] >= min_p
    return stay, nearest
