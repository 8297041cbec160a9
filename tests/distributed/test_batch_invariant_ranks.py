"""`batch_invariant=True` over groups: the same bits whatever the batch, and on any number of ranks of a cp_group."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, group_of
from torch import Tensor

import fastrl
from fastrl.distributed.sums import PIECE_BYTES
from fastrl.passes import head
from fastrl.planning.tiling import elementwise_bytes

N, H, V = 600, 256, 4500
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
    rank = dist.get_rank()
    # torch names a group that its ranks make among themselves by the number of their groups: each rank gets one here.
    group = group_of(*range(count)) if count > 1 else [group_of(other) for other in range(dist.get_world_size())][rank]
    return loss(torch.arange(rank, N, count), dtype, cp_group=group) if rank < count else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_of_tokens_over_ranks(ranks: Ranks, count: int, dtype: torch.dtype) -> None:
    whole = loss(torch.arange(N), dtype)
    for rank, results in enumerate(ranks.run(over_tokens, count, dtype)[:count]):
        assert all(torch.equal(mine[rank::count], other) for mine, other in zip(whole, results, strict=True))


def test_a_sum_in_order_holds_no_more_than_is_planned() -> None:
    assert all(size <= elementwise_bytes(device) for device, size in PIECE_BYTES.items())


def refused(dtype: torch.dtype, needs: str) -> str:
    """What a rank is told where the products of rank 1 depend on their rows."""

    def check(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("batch_invariant=True cannot be kept")

    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, H, generator=generator).to(dtype) for n in (N, V // 2))
    hidden.requires_grad_("h" in needs), weight.requires_grad_("w" in needs)
    of_tokens = {"advantages": torch.ones(1), "old_logprobs": torch.full((1, N), -8.0)}
    given: dict[str, Any] = {"batch_invariant": True, "tp_group": group_of(*range(dist.get_world_size()))}
    targets = torch.zeros(N, dtype=torch.int64)
    with mock.patch.object(head, "check_products", check):
        try:
            if needs == "h":
                fastrl.linear_token_logprobs(hidden, weight, targets, **given)
            else:
                fastrl.linear_policy_loss(
                    hidden[None], weight, targets[None], objective=OBJECTIVE, **of_tokens, **given
                )
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("needs", ["", "h", "hw"])
def test_all_ranks_hear_of_products_that_depend_on_their_rows(ranks: Ranks, needs: str) -> None:
    told = ranks.run(refused, torch.float32, needs)
    assert told[1] == "RuntimeError: batch_invariant=True cannot be kept"
    others = "RankFailed: rank 1 of tp_group raised an error while it computed its part"
    assert [told[rank] for rank in (0, 2, 3)] == [others] * 3
