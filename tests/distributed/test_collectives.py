"""Collectives that a call over shards of the vocabulary makes: few, and the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from objectives import OBJECTIVES
from ranks import Ranks, group_of
from shards import EVEN, LAYOUTS, Case, Shards

import fastrl
from fastrl.distributed import groups
from fastrl.passes import shards as sharded
from fastrl.passes.backward import Backward
from fastrl.planning.plans import use_plan

#: 210 rows, of which 180 count, in chunks of some dozen; two of the shards have other tiles than the largest.
LARGE: dict[str, Any] = {"size": (3, 70, 4, 507), "mask": (torch.arange(210).view(3, 70) % 7 > 0).long()}
SHARDS = (Shards((127, 127, 127, 126)), Shards((300, 0, 7, 200)))
EMPTY = {"mask": torch.zeros(3, 4)}
#: Whole responses need a budget.
SEVERAL: dict[str, Any] = {"problem": LARGE, "tile_bytes": 40 * 127 * 4, "arguments": {"memory_budget": "8MiB"}}

Events = list[str]


def counting(patch: pytest.MonkeyPatch) -> Events:
    """Names of what follows: "exchange" between the hosts, "gather", "reduce", and "chunk" of a plan that has some."""
    events: Events = []
    all_gather, all_reduce, form = groups._all_gather, dist.all_reduce, sharded.forward_gradient
    chunks_of = Backward._chunks

    def gathered(out: torch.Tensor, x: torch.Tensor, **more: Any) -> Any:
        events.append("exchange" if x.dtype == torch.uint8 else "gather")
        return all_gather(out, x, **more)

    def reduced(x: torch.Tensor, **more: Any) -> Any:
        events.append("reduce")
        assert x.dtype == torch.float32
        return all_reduce(x, **more)

    def formed(*arguments: Any) -> Any:
        events.extend("chunk" for _ in arguments[4])
        return form(*arguments)

    def chunks(backward: Backward, *arguments: Any) -> Any:
        for chunk in chunks_of(backward, *arguments):
            events.append("chunk of a pass")
            yield chunk

    patch.setattr(groups, "_all_gather", gathered)
    patch.setattr(dist, "all_reduce", reduced)
    patch.setattr(sharded, "forward_gradient", formed)
    patch.setattr(Backward, "_chunks", chunks)
    for name in ("broadcast", "reduce_scatter", "all_to_all", "barrier", "all_gather", "all_gather_object"):
        patch.setattr(dist, name, None)
    return events


def of_cases(cases: list[Case]) -> list[tuple[Events, Events]]:
    """What each call and its backward do."""
    return [_of_case(case) for case in cases]


def _of_case(case: Case) -> tuple[Events, Events]:
    group = group_of(*case.shards.members)
    rank, problem = dist.get_rank(group), case.posed()
    leaves = case.shards.leaves(problem.head, rank, case.needs)
    with case.forced(), pytest.MonkeyPatch.context() as patch:
        events = counting(patch)
        given = {**problem.arguments, **case.shards.options(rank), "tp_group": group}
        loss = fastrl.linear_policy_loss(**leaves, objective=case.objective, **given).loss
        forward = list(events)
        if loss.requires_grad:
            loss.backward()
    return forward, events[len(forward) :]


def counted(ranks: Ranks, case: Case, shards: Any = SHARDS) -> list[tuple[Events, Events]]:
    """By shards, after all ranks did the same collectives; but their passes have chunks of different tiles."""
    found = ranks.run(of_cases, [replace(case, shards=x) for x in shards])
    for of_rank in found:
        for x, first in zip(of_rank, found[0], strict=True):
            assert [[e for e in events if "chunk" not in e] for events in x] == [
                [e for e in events if "chunk" not in e] for events in first
            ]
    return found[0]


def test_the_forward_makes_one(ranks: Ranks) -> None:
    for name in ("GRPO", "GSPO"):
        for problem in (LARGE, EMPTY):
            case = Case(OBJECTIVES[name], problem=problem, needs=(), tile_bytes=SEVERAL["tile_bytes"])
            layouts = SHARDS if problem is LARGE else (EVEN, LAYOUTS["empty in the middle"])
            assert counted(ranks, case, layouts) == [(["exchange", "gather"], [])] * 2


@pytest.mark.parametrize("plan", ["recompute", "two-pass"])
def test_recompute_and_two_pass_make_two(ranks: Ranks, plan: str) -> None:
    for name in ("GRPO", "GSPO"):
        objective = OBJECTIVES[name].replace(entropy_coef=0.05)  # GSPO clips whole responses
        for forward, backward in counted(ranks, Case(objective, plan=plan, **SEVERAL)):
            assert forward == ["exchange", "gather"]
            assert [x for x in backward if "chunk" not in x] == ["reduce"]
            assert backward.count("chunk of a pass") > 2


def test_two_pass_in_16_bits_makes_one_for_each_chunk(ranks: Ranks) -> None:
    problem = {**LARGE, "dtype": torch.bfloat16}
    case = Case(
        OBJECTIVES["GSPO"].replace(entropy_coef=0.05),
        plan="two-pass",
        needs=("hidden", "bias"),
        **{**SEVERAL, "problem": problem},
    )
    for forward, backward in counted(ranks, case):
        assert forward == ["exchange", "gather"]
        hidden_pass = backward[: len(backward) - backward[::-1].index("reduce")]
        chunks = hidden_pass.count("reduce")
        assert chunks > 2 and hidden_pass == ["chunk of a pass", "reduce"] * chunks


@pytest.mark.parametrize("name", ["GRPO", "SAPO", "GSPO", "DeepSeekV32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_gradient_makes_one_for_each_chunk_and_one(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    plan = "forward-gradient" if name in ("GRPO", "SAPO") else "whole-response"
    case = Case(OBJECTIVES[name], plan=plan, **{**SEVERAL, "problem": {**LARGE, "dtype": dtype}})
    for forward, backward in counted(ranks, case):
        assert forward[0] == "exchange" and not backward
        chunks = forward.count("chunk")
        assert chunks >= 3
        assert forward.count("gather") == chunks and forward.count("reduce") == 1 and len(forward) == 2 * chunks + 2


@pytest.mark.parametrize(("entropy_coef", "slopes"), [(0.0, 1), (0.05, 2)])
def test_a_frozen_head_makes_none_in_the_backward(ranks: Ranks, entropy_coef: float, slopes: int) -> None:
    objective = OBJECTIVES["GSPO"].replace(entropy_coef=entropy_coef)
    for forward, backward in counted(ranks, Case(objective, plan="frozen-head", needs=("hidden",), **SEVERAL)):
        assert forward[0] == "exchange" and not backward
        assert forward.count("gather") > 2 and forward.count("reduce") == slopes


@pytest.mark.parametrize("plan", ["forward-gradient", "recompute", "two-pass"])
def test_a_gradient_of_hidden_that_is_not_needed_or_not_reduced_makes_none(ranks: Ranks, plan: str) -> None:
    case = Case(OBJECTIVES["SAPO"], plan=plan)
    changes: list[dict[str, Any]] = [{"arguments": {"reduce_hidden_grad": False}}]
    changes += [] if plan == "two-pass" else [{"needs": ("weight",)}]
    for change in changes:
        for forward, backward in counted(ranks, replace(case, **change), (EVEN, LAYOUTS["empty in the middle"])):
            assert [x for x in (*forward, *backward) if "chunk" not in x] == ["exchange", "gather"]


@pytest.mark.parametrize("plan", ["forward-gradient", "whole-response", "recompute", "two-pass", "frozen-head"])
@pytest.mark.parametrize("rows", [12, 0])
def test_without_a_valid_token_all_ranks_make_the_same(ranks: Ranks, plan: str, rows: int) -> None:
    needs = ("hidden",) if plan == "frozen-head" else ("hidden", "weight", "bias")
    name = "GSPO" if plan == "whole-response" else "SAPO"
    problem = EMPTY if rows else {"mask": None, "size": (0, 4, 8, 37)}
    for found in counted(ranks, Case(OBJECTIVES[name], plan=plan, needs=needs, problem=problem), LAYOUTS_OF_FOUR):
        assert sum(events.count("exchange") for events in found) == 1
        assert sum(events.count("gather") + events.count("reduce") for events in found) <= 2


LAYOUTS_OF_FOUR = tuple(x for x in LAYOUTS.values() if x.members == EVEN.members)


def of_log_probabilities(call: Callable[..., Any], plan: str, needs: tuple[str, ...]) -> list[tuple[Events, Events]]:
    found = []
    for shards in LAYOUTS_OF_FOUR:
        problem, rank = Case(None).posed(), dist.get_rank()
        leaves = shards.leaves(problem.head, rank, needs)
        with use_plan(plan), pytest.MonkeyPatch.context() as patch:
            events = counting(patch)
            out = call(
                **leaves, targets=problem.targets.clamp_min(0), tp_group=dist.group.WORLD, **shards.options(rank)
            )
            forward = list(events)
            if needs:
                getattr(out, "logprobs", out).sum().backward()
        found.append((forward, [x for x in events[len(forward) :] if "chunk" not in x]))
    return found


@pytest.mark.parametrize(
    ("plan", "needs", "backward"),
    [
        ("forward", (), []),
        ("recompute", ("hidden", "weight"), ["reduce"]),
        ("two-pass", ("hidden", "bias"), ["reduce"]),
    ],
)
def test_log_probabilities_make_one_and_one(ranks: Ranks, plan: str, needs: tuple[str, ...], backward: Events) -> None:
    for found in ranks.run(of_log_probabilities, fastrl.linear_token_logprobs, plan, needs):
        assert found == [(["exchange", "gather"], backward)] * len(LAYOUTS_OF_FOUR)
