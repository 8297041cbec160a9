"""What ranks tell each other, and how work is dealt to them."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from fastrl.base.errors import UserError
from fastrl.training.batches.micro_batches import MicroBatches, Shape
from fastrl.training.config.sections import MachineConfig
from fastrl.training.parallel.shard import spread_state
from fastrl.training.parallel.world import ALONE, _device_of, joined


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [0, 1, 5, 12])
@pytest.mark.parametrize("limit", [40, 10**6])
def test_every_row_counts_once_and_all_ranks_have_as_many_micro_batches(size, rows, limit):
    worlds = [replace(ALONE, rank=rank, size=size) for rank in range(size)]
    shapes = [Shape(1, 3 + 7 * row % 11, 3 + 7 * row % 11) for row in range(rows)]
    dealt = [world.deal(MicroBatches(limit, world=world).cut(shapes)) for world in worlds]
    assert len({len(parts) for parts in dealt}) == 1
    counted = [row for parts in dealt for part, weight in parts for row in part if weight]
    assert sorted(counted) == list(range(rows))
    if rows >= size and limit == 10**6:  # one each, of about as many tokens
        assert [len(parts) for parts in dealt] == [1] * size
        tokens = [sum(shapes[row].tokens for row in parts[0][0]) for parts in dealt]
        assert max(tokens) <= sum(tokens) / size + 2 * 13
    unused = [part for parts in dealt for part, weight in parts if not weight]
    assert all(part for part in unused) and (unused == []) == (rows >= size or rows == 0)


def alike(world_name):
    """What each call of a world returns, or raises, on this rank."""
    with joined(MachineConfig(device="cpu"), 1) as world:
        found = [world.first(lambda: f"rank {world.rank}"), world.gathered(world.rank)]
        found.append(world.total(torch.tensor([1.0, world.rank])).tolist())
        world.check_alike({world_name: 1})

        def fail():
            raise UserError("mine")

        for call in (lambda: world.first(fail), lambda: world.check_alike({"seed": min(world.rank, 1)})):
            try:
                call()
            except UserError as error:
                found.append(str(error))
        return found


def test_all_ranks_hear_the_same(ranks):
    results = ranks.run(alike, "field")
    assert all(result == results[0] for result in results)
    size = len(results)
    assert results[0] == [
        "rank 0",
        list(range(size)),
        [size, sum(range(size))],
        "mine",
        "seed: expected the same on all processes, got 0 on rank 0 and 1 on rank 1",
    ]


def shared(count):
    """What ranks compute of so many items together; which of them a rank is given, and how it waits for a late one."""
    with joined(MachineConfig(device="cpu"), 1) as world:
        given, numbers = [], dict[str, float]()

        def squares(items, first):
            given.append((first, [*items]))
            return [item * item for item in items]

        found = world.share(range(10, 10 + count), squares)

        def fail_on_the_last():
            if world.rank == world.size - 1:
                raise UserError("mine")
            return world.rank

        with pytest.raises(UserError, match="mine"):
            world.together(fail_on_the_last)
        with world.working("phase", numbers):
            if world.rank == 0:
                time.sleep(0.5)
            world.gathered(None)
        return found, given, world.together(lambda: world.rank), numbers["phase"]


@pytest.mark.parametrize("count", [0, 1, 11])
def test_every_rank_computes_a_share(ranks, count):
    results = ranks.run(shared, count)
    found, given, numbers, seconds = zip(*results, strict=True)
    assert [*found] == [[item * item for item in range(10, 10 + count)]] * ranks.size
    assert [item for calls in given for _, items in calls for item in items] == [*range(10, 10 + count)]
    assert all(first == items[0] - 10 for calls in given for first, items in calls)  # and nobody is given nothing
    sizes = [len(items) for calls in given for _, items in calls]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert [*numbers] == [[*range(ranks.size)]] * ranks.size
    # Rank 0 works while the others wait, which counts as neither's work.
    assert min(seconds) >= 0 and all(each < 0.5 <= seconds[0] for each in seconds[1:])


def test_one_process_hears_itself():
    with joined(MachineConfig(device="cpu"), "all") as world:
        assert (world.rank, world.size, world.main) == (0, 1, True)
        assert world.first(lambda: 3) == 3 and world.gathered(4) == world.together(lambda: 4) == [4]
        assert world.share([5, 6], lambda items, first: [item + first for item in items]) == [5, 6]
        assert world.total(torch.ones(1)).tolist() == [1.0] and world.deal([[5]]) == [([5], 1)]


def refusal(device, shard):
    try:
        with joined(MachineConfig(device=device), shard):
            return "none"
    except UserError as error:
        return str(error)


def test_what_cannot_be_used(ranks):
    assert refusal("cpu", 2) == "training.shard: expected a divisor of the number of processes, 1, got 2"
    message = f"training.shard: expected a divisor of the number of processes, {ranks.size}, got 3"
    assert ranks.run(refusal, "cpu", 3) == [message] * ranks.size
    message = "training.device: expected cpu, cuda or auto on several processes, got 'cuda:7'"
    assert ranks.run(refusal, "cuda:7", 1) == [message] * ranks.size


def test_a_state_that_is_laid_out_is_not_held_whole():
    model = torch.nn.Linear(2, 3)
    state = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    spread_state(model, state, ALONE)
    assert state == {} and model.weight.eq(1).all()


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_rank_touches_no_gpu_but_its_own(monkeypatch, name):
    """A context on another takes hundreds of megabytes there."""
    asked = []

    def find(wanted):
        asked.append(wanted)
        return torch.device("cuda" if wanted == "auto" else wanted)

    monkeypatch.setattr("fastrl.training.parallel.world.find_device", find)
    assert _device_of(name, 3) == torch.device("cuda:3")
    assert set(asked) - {"auto"} == {"cuda:3"}
