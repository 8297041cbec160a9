"""`batch_invariant=True` over groups: the same bits whatever the batch, and on any number of ranks of a cp_group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, group_of
from torch import Tensor

import fastrl

N, H, V = 300, 512, 2048
OBJECTIVE = fastrl.GRPO(kl_coef=0.0, aggregate="token-mean")


def loss(rows: Tensor, dtype: torch.dtype, part: slice = slice(None), **options: Any) -> list[Tensor]:
    """Log-probabilities, entropies and the gradient of the hidden states of some of N tokens; options of the call."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, H, generator=generator).to(dtype) for n in (N, V))
    targets = torch.randint(V, (N,), generator=generator)[rows]
    advantages, old = (torch.randn(N, generator=generator)[rows] for _ in range(2))
    states, head = hidden[rows].clone().requires_grad_(), (weight[part] * 0.1).requires_grad_()
    of_tokens = {"advantages": advantages[None], "old_logprobs": 0.1 * old[None] - 8}
    options |= {"objective": OBJECTIVE, "denominator": 7.0, "batch_invariant": True}
    found = fastrl.linear_policy_loss(states[None], head, targets[None], **of_tokens, **options)
    found.loss.backward()
    assert states.grad is not None and found.entropy is not None
    return [found.logprobs[0], found.entropy[0].detach(), states.grad]


def over_vocabulary(count: int, dtype: torch.dtype) -> list[list[Tensor]] | None:
    """The results of three batches over shards of the vocabulary."""
    group, rank = group_of(*range(count)), dist.get_rank()
    if rank >= count:
        return None
    cut = [0, V // 3, V] if count == 2 else [0, 100, V // 3, V // 2, V]
    generator = torch.Generator().manual_seed(6)
    batches = [torch.arange(N), *(torch.randperm(N, generator=generator)[:size] for size in (7, 111))]
    return [loss(rows, dtype, slice(cut[rank], cut[rank + 1]), tp_group=group) for rows in batches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [2, 4])
def test_of_a_vocabulary_over_ranks(ranks: Ranks, count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    chosen = [torch.randperm(N, generator=generator)[:size] for size in (7, 111)]
    for whole, *parts in ranks.run(over_vocabulary, count, dtype)[:count]:
        for rows, results in zip(chosen, parts, strict=True):
            assert all(torch.equal(mine[rows], other) for mine, other in zip(whole, results, strict=True))


def over_tokens(count: int, dtype: torch.dtype) -> list[Tensor] | None:
    """The results of this rank's tokens, every count-th."""
    group, rank = group_of(*range(count)), dist.get_rank()
    return loss(torch.arange(rank, N, count), dtype, cp_group=group) if rank < count else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_of_tokens_over_ranks(ranks: Ranks, count: int, dtype: torch.dtype) -> None:
    whole = loss(torch.arange(N), dtype)
    for rank, results in enumerate(ranks.run(over_tokens, count, dtype)[:count]):
        assert all(torch.equal(mine[rank::count], other) for mine, other in zip(whole, results, strict=True))
