"""A run that goes on with other numbers of processes ends as the run of one that never stopped."""

from __future__ import annotations

import copy

import pytest
import rank_runs
from same_runs import assert_same_files, assert_same_run


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("dpo", {"packing": True}),
        pytest.param("sft", {"tied": True}, marks=pytest.mark.slow),
        pytest.param("dpo", {"lora_rank": 4}, marks=pytest.mark.slow),
        pytest.param("reward-model", {}, marks=pytest.mark.slow),
    ],
    ids=["dpo", "sft", "adapters", "reward-model"],
)
def test_two_then_four_then_one(run_on, tables, command, options):
    """A signal to the last rank ends the first two: in the middle of the first epoch, and of the second."""
    one, resumed = tables(command, "one", **options), tables(command, "resumed", **options)
    rank_runs.train(command, one)
    first = run_on(2, rank_runs.train, command, resumed, False, (1, 3))
    assert (first["steps"], first["interrupted"]) == (3, "SIGTERM"), first
    second = run_on(
        4, rank_runs.train, command, resumed | {"training": resumed["training"] | {"shard": 2}}, True, (3, 7)
    )
    assert (second["resumed"], second["steps"], second["interrupted"]) == (3, 7, "SIGTERM"), second
    last = rank_runs.train(command, resumed, True)
    assert (last["resumed"], last["steps"]) == (7, 10)
    assert_same_run(resumed, one)


@pytest.mark.parametrize(
    "command", ["sft", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dpo", "reward-model"))]
)
def test_one_then_two(run_on, tables, command):
    """More epochs of a complete run; its checkpoint has the files of one process's."""
    one, resumed = tables(command, "one"), tables(command, "resumed")
    rank_runs.train(command, one)
    shorter = copy.deepcopy(resumed)
    shorter["training"]["epochs"] = 1
    assert rank_runs.train(command, shorter)["steps"] == 5
    summary = run_on(2, rank_runs.train, command, resumed, True)
    assert (summary["resumed"], summary["steps"]) == (5, 10), summary
    assert_same_run(resumed, one)
    assert_same_files(resumed, one)
