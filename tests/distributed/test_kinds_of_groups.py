"""Groups that a call may be given: of one rank, of a mesh with DTensors, the same twice, one that ends."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from objectives import OBJECTIVES
from problem import CLOSE
from ranks import Ranks, group_of
from shards import Case
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fastrl
from fastrl.base import checks
from fastrl.distributed import groups
from fastrl.integrations import nemo_rl

GRPO = OBJECTIVES["GRPO"]


def said(function: Any, *arguments: Any, **more: Any) -> str:
    try:
        function(*arguments, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def alone() -> None:
    """With padding too; the other ranks have groups of their own."""
    group = [group_of(rank) for rank in range(4)][dist.get_rank()]
    problem = Case(None).posed()
    vocab = problem.head["weight"].shape[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_all_gather", None)  # nobody is there to exchange anything with
        for padding in (0, 3):
            leaves = {k: x.detach().requires_grad_() for k, x in problem.head.items()}
            rows = {
                k: torch.nn.functional.pad(leaves[k], (0, 0) * (leaves[k].dim() - 1) + (0, padding))
                for k in ("weight", "bias")
            }
            given = {**problem.arguments, "objective": GRPO, "tp_group": group, "vocab_size": vocab}
            out = fastrl.linear_policy_loss(leaves["hidden"], **rows, **given)
            found = dict(zip(leaves, torch.autograd.grad(out.loss, list(leaves.values())), strict=True))
            expected, gradients = problem.by_hidden(GRPO)
            torch.testing.assert_close(out.loss, expected.loss, **CLOSE)
            torch.testing.assert_close(found, gradients, **CLOSE)
            logits = torch.nn.functional.linear(problem.head["hidden"], *(x.detach() for x in rows.values()))
            out = fastrl.logits_policy_loss(logits, **given)
            torch.testing.assert_close(out.loss, expected.loss.detach(), **CLOSE)


def with_dtensors() -> str:
    mesh = init_device_mesh("cpu", (4,))
    problem = Case(None).posed()
    head = {k: distribute_tensor(problem.head[k].clone(), mesh, [Shard(0)]) for k in ("weight", "bias")}
    leaves = {"hidden": problem.head["hidden"].clone(), **head}
    leaves = {k: x.detach().requires_grad_() for k, x in leaves.items()}
    given = {**problem.arguments, "objective": GRPO, "tp_group": mesh.get_group()}
    fastrl.linear_policy_loss(**leaves, **given).loss.backward()
    found = {k: x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad for k, x in leaves.items()}
    torch.testing.assert_close(found, problem.by_hidden(GRPO)[1], **CLOSE)
    whole = distribute_tensor(problem.head["weight"].clone(), mesh, [Replicate()])
    return said(fastrl.linear_policy_loss, **{**leaves, "weight": whole}, **given)


def entropy_on_one_rank() -> str:
    entropy = torch.ones(3) if dist.get_rank() == 1 else None
    given = {"objective": fastrl.SAPO(), "advantages": torch.ones(1), "cp_group": dist.group.WORLD}
    return said(fastrl.policy_loss, -torch.ones(3), entropy=entropy, **given)


def other_denominators() -> str:
    problem, rank = Case(None).posed(), dist.get_rank()
    logits = torch.zeros(*problem.targets.shape, 10)
    given = {**problem.arguments, "objective": GRPO, "tp_group": dist.group.WORLD}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "values_are_checked", lambda tensor: False)  # as on a GPU
        return said(fastrl.logits_policy_loss, logits, **given, denominator=16.0 if rank == 2 else 8.0)


def half_a_token() -> bool:
    """On one rank alone."""
    given = {"objective": fastrl.DrGRPO(4), "advantages": torch.ones(1), "cp_group": dist.group.WORLD}
    mask = torch.tensor([1.0, 0.5 if dist.get_rank() == 1 else 0.0, 1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "values_are_checked", lambda tensor: False)  # as on a GPU
        return bool(fastrl.policy_loss(-torch.ones(3), mask=mask, **given).loss.isnan())


def another_end() -> str:
    group = group_of(0, 1)
    if group is None:
        return ""
    rank, logits = dist.get_rank(), torch.zeros(1, 3, 5)
    end = 5 * (rank + 1) + rank
    return said(nemo_rl.DistributedLogprob.apply, logits, torch.zeros(1, 3).long(), 5 * rank, end, group)


def ended() -> bool:
    group = dist.new_group([0, 1, 2, 3])
    fastrl.token_logprobs(torch.zeros(2, 3), torch.zeros(2).long(), tp_group=group)
    reference = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return reference() is None


def test_a_group_of_one_rank_is_none(ranks: Ranks) -> None:
    ranks.run(alone)


def test_dtensors_over_the_group(ranks: Ranks) -> None:
    for words in ranks.run(with_dtensors):
        assert words.startswith("TypeError: weight must be a tensor, or a DTensor with placements (Shard(0),)")


def test_an_entropy_on_some_ranks_alone(ranks: Ranks) -> None:
    for words in ranks.run(entropy_on_one_rank):
        assert words.startswith("ValueError: entropy must be the same on every rank of cp_group, got None on rank 0")


def test_other_denominators_are_found_where_no_value_may_be_read(ranks: Ranks) -> None:
    for words in ranks.run(other_denominators):
        assert words == (
            "ValueError: denominator must be the same on every rank of tp_group, got 8.0 on rank 0 and 16.0 on rank 2"
        )


def test_a_wrong_mask_on_one_rank_makes_the_loss_of_all_nan(ranks: Ranks) -> None:
    assert ranks.run(half_a_token) == [True] * 4


def test_nemo_rls_wrong_end_stops_nobody_else(ranks: Ranks) -> None:
    right, wrong, *_ = ranks.run(another_end)
    assert right == "nothing" and wrong.startswith("ValueError: vocab_start_index and vocab_end_index must be 5 apart")


def test_a_group_that_ended_is_let_go(ranks: Ranks) -> None:
    assert ranks.run(ended) == [True] * 4


def the_same_twice() -> str:
    given = {**Case(None).posed().arguments, "objective": GRPO}
    world = dist.group.WORLD
    return said(fastrl.logits_policy_loss, torch.zeros(3, 4, 10), **given, tp_group=world, cp_group=world)


def test_one_group_cannot_be_both(ranks: Ranks) -> None:
    assert (
        ranks.run(the_same_twice)
        == ["ValueError: cp_group must be another group than tp_group: tokens lie over it, not the vocabulary"] * 4
    )
