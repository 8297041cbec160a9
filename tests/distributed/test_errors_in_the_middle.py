"""An error of one rank after the ranks have agreed: the others get an error or NaN, and nobody waits for ever."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from objectives import OBJECTIVES
from ranks import Ranks
from shards import EVEN, Case

import fastrl
from fastrl.base import checks
from fastrl.passes.backward import Backward
from fastrl.passes.head import HeadSums, Workspace
from fastrl.planning.plans import use_plan

WRONG = 1


def failing(original: Any, at: int) -> Any:
    """The function, which raises at its call number `at` on one rank."""
    calls = []

    def call(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if dist.get_rank() == WRONG and len(calls) == at:
            raise torch.OutOfMemoryError("of this rank")
        return original(*arguments, **more)

    return call


def in_forward(owner: Any, name: str, at: int, plan: str, chunks: int, readable: bool) -> str:
    """What the call says, or which results are NaN; a call without an error follows."""
    problem = Case(None).posed()
    head = EVEN.leaves(problem.head, dist.get_rank())
    given = {**problem.arguments, "objective": OBJECTIVES["GRPO"], "tp_group": dist.group.WORLD}
    with pytest.MonkeyPatch.context() as patch, use_plan(plan):
        if chunks > 1:
            patch.setattr("fastrl.passes.forward_gradient.row_chunks", in_chunks(chunks))
        patch.setattr(owner, name, failing(getattr(owner, name), at))
        if not readable:  # as on a GPU: what the others sent is not looked at
            patch.setattr(checks, "values_are_checked", lambda tensor: False)
        try:
            out = fastrl.linear_policy_loss(**head, **given)
            out.loss.backward()
            found = "NaN" if head["hidden"].grad.isnan().all() else "numbers"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
    assert fastrl.linear_policy_loss(**head, **given).loss.isfinite()
    return found


def in_chunks(number: int) -> Any:
    from fastrl.passes.forward_gradient import Chunk

    def chunks(count: int, active: int, size: int) -> list[Any]:
        ends = [count * i // number for i in range(number + 1)]
        return [Chunk(a, b, min(max(active - a, 0), b - a)) for a, b in itertools.pairwise(ends)]

    return chunks


TOLD = f"RankFailed: rank {WRONG} of tp_group raised an error while it computed its part"


def is_own(error: str, plan: str) -> bool:
    """Whether it is the error of this rank, with what its plan takes."""
    return error.startswith(f"OutOfMemoryError: of this rank\nout of memory in the plan {plan}, which takes")


@pytest.mark.parametrize(("chunks", "at"), [(1, 1), (2, 1), (2, 2), (5, 1), (5, 2), (5, 5)])
@pytest.mark.parametrize("readable", [True, False])
def test_a_product_of_a_chunk_that_fails(ranks: Ranks, chunks: int, at: int, readable: bool) -> None:
    found = ranks.run(in_forward, Workspace, "logits", at, "forward-gradient", chunks, readable)
    assert is_own(found.pop(WRONG), "forward-gradient")
    assert found == [TOLD if readable else "NaN"] * 3


@pytest.mark.parametrize(("chunks", "at"), [(1, 1), (5, 1), (5, 4), (5, 5)])
def test_a_gradient_of_a_chunk_that_fails(ranks: Ranks, chunks: int, at: int) -> None:
    """After the last gather there is only the sum of dH, which says nothing of errors."""
    found = ranks.run(in_forward, HeadSums, "add", at, "forward-gradient", chunks, True)
    assert is_own(found.pop(WRONG), "forward-gradient")
    # The sum of dH is under way when the last chunk's dW fails.
    assert found == ["numbers" if at == chunks else "NaN" if at + 1 >= chunks else TOLD] * 3


@pytest.mark.parametrize("plan", ["recompute", "two-pass"])
@pytest.mark.parametrize("name", ["_gradient", "_outer"])
def test_a_backward_that_fails(ranks: Ranks, plan: str, name: str) -> None:
    found = ranks.run(in_forward, Backward, name, 1, plan, 1, True)
    assert is_own(found.pop(WRONG), plan)
    assert found == ["numbers" if plan == "two-pass" and name == "_outer" else "NaN"] * 3


def test_statistics_that_fail(ranks: Ranks) -> None:
    found = ranks.run(in_forward, Workspace, "logits", 1, "recompute", 1, True)
    assert is_own(found.pop(WRONG), "recompute")
    assert found == [TOLD] * 3
