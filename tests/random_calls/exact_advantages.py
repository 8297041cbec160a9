"""Advantages, rewards and samplers' sets in float64, mostly in plain loops over numbers, from their formulas."""

from __future__ import annotations

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
