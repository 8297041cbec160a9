"""A run on several processes is the run of one: its losses, norms and evaluations, and the model that it leaves."""

from __future__ import annotations

import itertools

import pytest
import rank_runs
from same_runs import assert_same_run

#: Processes, and over how many of them weights lie.
WORLDS = [(2, 1), (2, "all"), (4, 1), (4, 2), (4, "all")]
#: Command, tied head, packed rows. A reward model has no head over the vocabulary, and packs nothing.
KINDS = [*itertools.product(("sft", "dpo"), (False, True), (False, True)), ("reward-model", False, False)]
#: Each value of each of these is in one; the rest of the product is slow.
FAST = [((2, "all"), ("sft", True, True)), ((4, 2), ("dpo", False, False)), ((2, 1), ("reward-model", False, False))]


def case(world, kind):
    command, tied, packed = kind
    name = f"{command}-{'tied' if tied else 'untied'}-{'packed' if packed else 'padded'}-{world[0]}-{world[1]}"
    return pytest.param(*kind, *world, id=name, marks=() if (world, kind) in FAST else pytest.mark.slow)


@pytest.mark.parametrize(
    ("command", "tied", "packed", "size", "shard"), [case(*x) for x in itertools.product(WORLDS, KINDS)]
)
def test_a_run_is_that_of_one_process(run_on, tables, command, tied, packed, size, shard):
    """In the last update of an epoch all ranks but one are without rows; packed, there are several micro-batches."""
    options = {"tied": tied}
    if command != "reward-model":
        options |= {"packing": packed, "micro_batch_tokens": 30 if packed else None}
    one, several = tables(command, "one", **options), tables(command, "several", shard=shard, **options)
    assert rank_runs.train(command, one)["steps"] == 10
    assert run_on(size, rank_runs.train, command, several)["steps"] == 10
    assert_same_run(several, one)
