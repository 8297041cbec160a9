"""What ranks exchange before a call's work, and sums over a group: the same on every rank, errors too."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, group_of

from fastrl.distributed.groups import agree, checked_group, gather, reporting
from fastrl.distributed.shards import shard_of
from fastrl.distributed.sums import group_sum, whole_sum


def facts_of_all() -> list[dict[str, int]]:
    world = dist.group.WORLD
    with reporting(tp_group=world):
        return agree("tp_group", world, {"targets": "shape (3,)"}, {"vocab": 10 + dist.get_rank()})


def differing(size: int) -> str:
    world = dist.group.WORLD
    with pytest.raises(ValueError, match="targets must be") as error:
        agree("tp_group", world, {"targets": f"{size} tokens" if dist.get_rank() == 2 else "3 tokens"}, {})
    return str(error.value)


def failing_before() -> str:
    """Rank 1 finds a wrong argument; inside another call, which would have exchanged."""
    tp, cp = (group_of(0, 1), group_of(2, 3)), (group_of(0, 2), group_of(1, 3))
    rank = dist.get_rank()
    groups = {"tp_group": tp[rank // 2], "cp_group": cp[rank % 2]}
    try:
        with reporting(**groups):
            if rank == 1:
                raise TypeError("weight must be a tensor")
            for name, group in groups.items():
                agree(name, group, {}, {})
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def sums() -> tuple[torch.Tensor, ...]:
    world, rank = dist.group.WORLD, dist.get_rank()
    x = torch.tensor([1.0 + rank, 1e8 if rank == 0 else -1e8 if rank == 3 else 1.0], requires_grad=True)
    total = group_sum(x, world)
    (total * (rank + 1)).sum().backward()
    y = torch.tensor([2.0 * rank], requires_grad=True)
    whole, largest = whole_sum(y, torch.tensor([3.0, rank, torch.nan if rank == 1 else 0.0]), world)
    (3 * whole).backward()
    return total.detach(), x.grad, whole.detach(), largest, y.grad, gather(x.detach(), world)


def test_every_rank_gets_the_facts_of_all(ranks: Ranks) -> None:
    for facts in ranks.run(facts_of_all):
        assert [x["vocab"] for x in facts] == [10, 11, 12, 13]


def through_gpus_alone() -> tuple[list[str], list[dict[str, int]]]:
    """A group without a backend for a CPU, as NCCL's are; ranks 2 and 3 make no call."""
    group = dist.new_group([0, 1], backend="cuda:gloo")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return [], []
    with mock.patch.object(dist, "new_group", side_effect=dist.new_group) as made:
        facts = [agree("tp_group", group, {}, {"vocab": dist.get_rank()}) for _ in range(2)][-1]
    return [call.kwargs["backend"] for call in made.call_args_list], facts


def test_hosts_of_a_group_of_gpus_talk_in_one_of_their_own(ranks: Ranks) -> None:
    expected = (["gloo"], [{"vocab": 0}, {"vocab": 1}])
    assert ranks.run(through_gpus_alone) == [expected, expected, ([], []), ([], [])]


def test_what_differs_is_named_on_every_rank(ranks: Ranks) -> None:
    expected = "targets must be the same on every rank of tp_group, got 3 tokens on rank 0 and 5 tokens on rank 2"
    assert ranks.run(differing, 5) == [expected] * 4


def test_an_error_reaches_all_ranks_of_both_groups(ranks: Ranks) -> None:
    first, own, third, fourth = ranks.run(failing_before)
    assert own == "TypeError: weight must be a tensor"
    assert first == "RuntimeError: rank 1 of tp_group raised TypeError: weight must be a tensor"
    assert fourth == "RuntimeError: rank 0 of cp_group raised TypeError: weight must be a tensor"
    assert third.startswith("RuntimeError: rank 0 of cp_group raised RuntimeError: rank 1 of tp_group raised TypeError")


def test_sums_and_their_gradients(ranks: Ranks) -> None:
    results = ranks.run(sums)
    for rank, (total, gradient, whole, maxima, own, parts) in enumerate(results):
        assert total.tolist() == [10.0, 2.0], "1e8 + 1 + 1 - 1e8, added in float64"
        assert gradient.tolist() == [10.0, 10.0], "1 + 2 + 3 + 4: the losses of all ranks depend on the sum"
        assert whole.item() == 12.0 and own.item() == 3.0, rank
        assert maxima[:2].tolist() == [3.0, 3.0] and maxima[2].isnan()
        assert parts.shape == (4, 2)


def test_a_group_must_be_one_of_this_process() -> None:
    assert checked_group("tp_group", None) is None
    with pytest.raises(TypeError, match=r"tp_group must be a torch.distributed.ProcessGroup, got object"):
        checked_group("tp_group", object())
    with pytest.raises(ValueError, match="cp_group must be a group that this process is a rank of"):
        checked_group("cp_group", dist.GroupMember.NON_GROUP_MEMBER)


class _FakeGroup:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


def test_shards_leave_out_padding_and_may_be_uneven_or_empty() -> None:
    group = _FakeGroup(2)
    shard = shard_of(group, [4, 0, 3, 5], [None] * 4, 8, True)  # type: ignore[arg-type]
    assert (shard.starts, shard.sizes) == ((0, 4, 4, 7), (4, 0, 3, 1))
    assert (shard.start, shard.size, shard.total, shard.largest) == (4, 3, 8, 4)
    shard = shard_of(group, [4, 4, 4], [0, 4, None], 5, True)  # type: ignore[arg-type]
    assert shard.sizes == (4, 1, 0)
    for wrong in (5, 0):
        with pytest.raises(ValueError, match=rf"vocab_start must be 4 on rank 1, .* got {wrong}"):
            shard_of(group, [4, 4], [0, wrong], None, True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vocab_size must be from 1 to 8, the rows of all ranks, got 9"):
        shard_of(group, [4, 4], [None, None], 9, True)  # type: ignore[arg-type]
