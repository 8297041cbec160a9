"""A problem whose tokens lie over ranks: each rank's part of it, and the whole from what the ranks return."""

from __future__ import annotations

import copy
from typing import Any

import torch
from problem import Found, Problem
from torch import Tensor

import fastrl


def zigzag(shape: tuple[int, int], ranks: int) -> Tensor:
    """The rank of each token (B, T) in ring attention's order: rank r holds chunks r and 2 ranks - 1 - r of each."""
    chunk = torch.arange(shape[1]) * 2 * ranks // shape[1]
    return torch.minimum(chunk, 2 * ranks - 1 - chunk).expand(shape)


def contiguous(shape: tuple[int, int], ranks: int) -> Tensor:
    """The rank of each token (B, T): rank r holds the r-th part of each response."""
    return (torch.arange(shape[1]) * ranks // shape[1]).expand(shape)


def anywhere(shape: tuple[int, int], ranks: int) -> Tensor:
    """The rank of each token (B, T), by chance; the first response lies on rank 0 alone."""
    owners = torch.randint(ranks, shape, generator=torch.Generator().manual_seed(ranks))
    owners[0] = 0
    return owners


def without_the_last(shape: tuple[int, int], ranks: int) -> Tensor:
    """The rank of each token (B, T), by chance, but the last rank holds none."""
    return torch.randint(ranks - 1, shape, generator=torch.Generator().manual_seed(ranks))


CUTS = {f.__name__: f for f in (zigzag, contiguous, anywhere, without_the_last)}


def part(problem: Problem, owners: Tensor, rank: int, packed: bool, shuffled: bool = False) -> tuple[Problem, Tensor]:
    """The tokens of a rank as a problem of its own, and their places in the whole (-1 = padding), shaped like them.

    Args:
        owners: (B, T), the rank of each token.
        packed: with cu_seqlens, else padded to its own longest response.
        shuffled: each response's tokens are in any order.
    """
    g = torch.Generator().manual_seed(rank)
    places = torch.arange(owners.numel()).view(owners.shape)
    rows = [places[i][owners[i] == rank] for i in range(owners.shape[0])]
    if shuffled:
        rows = [x[torch.randperm(len(x), generator=g)] for x in rows]
    counts = torch.tensor([len(x) for x in rows])
    index = torch.cat(rows)
    if not packed:
        index = torch.full((len(rows), int(counts.max())), -1)
        for i, x in enumerate(rows):
            index[i, : len(x)] = x
    real, chosen = index >= 0, index.clamp_min(0)

    def own(x: Any) -> Any:
        if isinstance(x, fastrl.SamplingMask):
            return x.index(chosen.flatten())
        if not isinstance(x, Tensor) or x.shape[:2] != owners.shape:
            return x
        return x.flatten(0, 1)[chosen]

    result = copy.copy(problem)
    result.head = problem.head | {"hidden": own(problem.head["hidden"])}
    result.arguments = {name: own(x) for name, x in problem.arguments.items()}
    result.arguments["mask"] = result.arguments["mask"].bool() & real
    result.arguments["position_ids"] = index % owners.shape[1]
    result.targets = result.arguments["targets"]
    result.support = None
    if packed:
        result.arguments["cu_seqlens"] = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    return result, index


def whole(parts: list[tuple[Found, Tensor]], like: Tensor) -> Found:
    """What one process would return: hidden gradients and per-token values in their places, other gradients summed."""

    def placed(each: list[Tensor]) -> Tensor:
        out = torch.zeros(like.numel(), *each[0].shape[parts[0][1].dim() :])
        for x, (_, index) in zip(each, parts, strict=True):
            real = index.flatten() >= 0
            out[index.flatten()[real]] = x.flatten(0, index.dim() - 1)[real].float()
        return out.view(*like.shape, *out.shape[1:])

    first = parts[0][0][0]
    statistics = (placed([getattr(found[0], name) for found, _ in parts]) for name in ("logprobs", "entropy"))
    gradients = {
        name: placed(each) if name == "hidden" else torch.stack(each).sum(0)
        for name in parts[0][0][1]
        for each in [[found[1][name] for found, _ in parts]]
    }
    return fastrl.PolicyLoss(first.loss, first.metrics, *statistics), gradients
