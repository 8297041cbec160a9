"""All ranks of a vocabulary's group choose one plan with one set of tiles, whatever differs between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from objectives import OBJECTIVES
from problem import H
from ranks import Ranks
from shards import EVEN, LAYOUTS, Case

import fastrl
from fastrl.losses import spread
from fastrl.planning import plans

PADDED = LAYOUTS["padding alone last"]
UNEVEN = LAYOUTS["empty in the middle"]
SETS = fastrl.SamplingMask.from_lists([[0, 30] if i % 3 else [] for i in range(12)]).with_targets(
    torch.zeros(12).long()
)


def choices(which: str, given: dict[str, Any]) -> list[str]:
    """What the plan is chosen for, and the choice."""
    shards = {"padding": PADDED, "strides": UNEVEN}.get(which, EVEN)
    problem, rank = Case(None, problem={"mask": None}).posed(), dist.get_rank()
    head = shards.leaves(problem.head, rank)
    threads = torch.get_num_threads()
    if which == "strides":  # as a tied or transposed weight may have
        head["weight"] = head["weight"].detach().t().contiguous().t().requires_grad_()
    if which == "hidden" and rank == 2:
        head["hidden"] = torch.zeros(3, 8, H).copy_(head["hidden"].detach().repeat(1, 2, 1))[:, :4].requires_grad_()
    if which == "threads":
        torch.set_num_threads(1 + rank)
    found, choose = [], plans.choose
    with pytest.MonkeyPatch.context() as patch:

        def spy(*arguments: Any) -> plans.Plan:
            plan = choose(*arguments)
            found.append(f"{arguments} {plan}")
            return plan

        patch.setattr(plans, "choose", spy)
        if which == "memory":  # devices of different sizes
            patch.setattr(spread, "default_budget", lambda *_: (3 - rank) << 20)
        try:
            problem.arguments["targets"] = torch.zeros(3, 4, dtype=torch.int64)
            arguments = {**problem.arguments, **given, **shards.options(rank), "tp_group": dist.group.WORLD}
            fastrl.linear_policy_loss(**head, objective=OBJECTIVES["SAPO"], **arguments).loss.backward()
        finally:
            torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("budget", [None, "4MiB"])
@pytest.mark.parametrize("which", ["padding", "strides", "hidden", "threads", "memory"])
def test_all_ranks_choose_alike(ranks: Ranks, which: str, budget: str | None) -> None:
    given: dict[str, Any] = {"memory_budget": budget} | ({"sampling_mask": SETS} if which == "strides" else {})
    first, *others = ranks.run(choices, which, given)
    assert len(first) == 1
    for rank, other in enumerate(others, 1):
        assert other == first, f"rank {rank}"
