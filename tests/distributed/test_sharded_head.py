"""Policy losses from hidden states and shards of the output head, against one process that holds the whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from objectives import OBJECTIVES
from pairs import each, turned
from problem import B, H, T
from ranks import Ranks
from shards import EVEN, LAYOUTS, Case, Shards, check_over_ranks, slow

import fastrl
from fastrl.objectives.batch import make_batch
from fastrl.objectives.row_local import TOKEN, Given, scope

#: What `Problem` takes for 507 entries over 4 ranks, and some hundred rows: tiles and their chunks differ.
LARGE: dict[str, Any] = {"size": (3, 70, 4, 507), "mask": (torch.arange(210).view(3, 70) % 7 > 0).long()}
#: Within a budget, which whole responses need: without one there is no tile above the usual.
BUDGET = {"memory_budget": "8MiB"}
LARGE_LAYOUTS = (Shards((127, 127, 127, 126)), Shards((300, 0, 7, 200)))
#: 64 rows of 128 entries.
SMALL_TILE = 64 * 128 * 4


#: The inputs of a batch that some problems lack, and those that every one has.
OPTIONAL = ("mask", "rollout_logprobs", "token_weights", "entropy_weights", "entropy_threshold", "cu_seqlens")
ALWAYS = ("advantages", "old_logprobs", "ref_logprobs")


def plans(case: Case) -> tuple[str, ...]:
    """Those that a float32 loss with all gradients can follow."""
    problem = case.posed()
    inputs = dict.fromkeys(OPTIONAL)
    inputs |= {k: x for k, x in problem.of_policy_loss().items() if k in (*OPTIONAL, *ALWAYS)}
    batch = make_batch(problem.targets, "targets", **inputs)
    row_local = scope(case.objective, Given.of(batch)) == TOKEN
    return "forward-gradient" if row_local else "whole-response", "recompute", "two-pass"


def meetings(plans: Iterable[str], layouts: Iterable[Shards]) -> list[dict[str, Any]]:
    """Variants of a case in which each plan and each layout is met. test_sharded_digits.py has all of their pairs."""
    return [{"plan": plan, "shards": shards} for plan, shards in each(plans, layouts)]


@pytest.mark.parametrize("on_policy", [False, slow(True)], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("name", fastrl.PRESETS)
def test_every_preset_by_every_plan_over_any_shards(ranks: Ranks, name: str, on_policy: bool) -> None:
    """For all presets together, each plan over each layout."""
    objective = OBJECTIVES[name].replace(entropy_coef=0.05)
    case = Case(objective, problem={"on_policy": on_policy})
    layouts = turned(LAYOUTS.values(), list(fastrl.PRESETS).index(name))
    check_over_ranks(ranks, case, meetings(plans(case), layouts[: len(plans(case))]))


@pytest.mark.parametrize("name", ["GRPO", "SAPO", "GSPO", "GMPO", "DeepSeekV32"])
def test_several_chunks_and_slices(ranks: Ranks, name: str) -> None:
    """Shards that need tiles of different shapes, and one without entries."""
    case = Case(OBJECTIVES[name].replace(entropy_coef=0.05), problem=LARGE, arguments=BUDGET, tile_bytes=SMALL_TILE)
    check_over_ranks(ranks, case, [{"plan": plan, "shards": x} for plan in plans(case) for x in LARGE_LAYOUTS])


MASKS: dict[str, dict[str, Any]] = {
    "none": {"mask": None},
    "all valid": {"mask": torch.ones(B, T)},
    "nothing valid": {"mask": torch.zeros(B, T)},
    "one token": {"mask": torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])},
    "first response empty": {"mask": torch.tensor([[0, 0, 0, 0], [1, 0, 1, 1], [1, 1, 0, 0]])},
}


@pytest.mark.parametrize("name", ["GRPO", slow("GSPO"), "DeepSeekV32"])
@pytest.mark.parametrize("masked", MASKS)
def test_masks(ranks: Ranks, masked: str, name: str) -> None:
    case = Case(OBJECTIVES[name].replace(entropy_coef=0.05), problem=MASKS[masked])
    layouts = (EVEN, LAYOUTS["empty in the middle"])
    check_over_ranks(ranks, case, meetings(plans(case), layouts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["SAPO", "GSPO"])
def test_half_precision(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    """In several chunks too; a GradScaler's upstream for float16, whose gradients are scaled inside."""
    objective = OBJECTIVES[name].replace(entropy_coef=0.05)
    half = dtype == torch.float16
    case = Case(objective, problem={"dtype": dtype}, upstream=65536.0 if half else 0.375)
    chosen = plans(case)[half:]
    check_over_ranks(ranks, case, meetings(chosen, LAYOUTS.values()))
    case = replace(case, problem={**LARGE, "dtype": dtype}, arguments=BUDGET, tile_bytes=SMALL_TILE // 2)
    check_over_ranks(ranks, case, [{"plan": plan, "shards": x} for plan in chosen for x in LARGE_LAYOUTS])


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)], ids=str)
def test_float32_logits(ranks: Ranks, dtype: torch.dtype) -> None:
    """Statistics as good as float32's, in several chunks; two tiles are on their way in forward-gradient."""
    arguments = {"memory_budget": "16MiB", "logits_dtype": torch.float32}
    for name in ("SAPO", "GSPO"):
        objective = OBJECTIVES[name].replace(entropy_coef=0.05)
        case = Case(objective, problem={**LARGE, "dtype": dtype}, arguments=arguments, tile_bytes=64 * 128 * 6)
        chosen = plans(case)[dtype == torch.float16 :]
        check_over_ranks(ranks, case, [{"plan": plan, "shards": x} for plan in chosen for x in LARGE_LAYOUTS])
        frozen = {"plan": "frozen-head", "shards": LARGE_LAYOUTS[1]}
        case = replace(case, objective=OBJECTIVES[name], needs=("hidden",), shards=LARGE_LAYOUTS[1])
        check_over_ranks(ranks, case, [frozen])


#: The inputs with gradients, and the plans that only they can follow.
NEEDS = [
    (("hidden",), ("frozen-head",)),
    (("weight",), ()),
    (("bias",), ()),
    (("weight", "bias"), ()),
    (("hidden", "bias"), ("two-pass",)),
]


@pytest.mark.parametrize(("needs", "more"), NEEDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", ["SAPO", "GSPO"])
def test_only_some_gradients(
    ranks: Ranks, name: str, dtype: torch.dtype, needs: tuple[str, ...], more: tuple[str, ...]
) -> None:
    for entropy_coef in (0.0, 0.05):  # a frozen head's second slope
        objective = OBJECTIVES[name].replace(entropy_coef=entropy_coef)
        case = Case(objective, problem={"dtype": dtype}, needs=needs)
        chosen = (*plans(case)[:2], *more)
        layouts = (EVEN, LAYOUTS["empty in the middle"])
        check_over_ranks(ranks, case, meetings(chosen, layouts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_frozen_head_in_several_chunks(ranks: Ranks, dtype: torch.dtype) -> None:
    for name in ("SAPO", "GSPO"):
        objective = OBJECTIVES[name].replace(entropy_coef=0.05)
        case = Case(
            objective, problem={**LARGE, "dtype": dtype}, arguments=BUDGET, needs=("hidden",), tile_bytes=SMALL_TILE
        )
        check_over_ranks(
            ranks, case, [{"plan": plan, "shards": x} for plan in ("frozen-head", "recompute") for x in LARGE_LAYOUTS]
        )


def test_no_gradient(ranks: Ranks) -> None:
    for name in ("SAPO", "GSPO"):
        case = Case(OBJECTIVES[name], needs=())
        check_over_ranks(ranks, case, [{"plan": "forward", "shards": x} for x in LAYOUTS.values()])


#: Arguments of a call, with the objectives that read them.
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "temperature per token": {"temperature": 0.5 + torch.arange(B * T).view(B, T) / 8},
    "softcap and scale": {"softcap": 6.0, "logit_scale": 1.5, "temperature": 1.2},
    "denominator": {"denominator": 17.0},
    "number of tokens": {"num_tokens": 7},
    "budget": {"memory_budget": "8MiB"},
    "weights": {"token_weights": torch.arange(1.0, 13).view(B, T), "entropy_weights": torch.arange(12.0).view(B, T)},
    "threshold": {"entropy_threshold": 2.0},
}


@pytest.mark.parametrize("name", ["SAPO", slow("GSPO")])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(ranks: Ranks, option: str, name: str) -> None:
    objective = OBJECTIVES[name].replace(entropy_coef=0.05)
    case = Case(objective, arguments=OPTIONS[option], upstream=0.125)
    layouts = (EVEN, LAYOUTS["empty in the middle"])
    check_over_ranks(ranks, case, meetings(plans(case), layouts))


@pytest.mark.parametrize("name", ["SAPO", "GSPO"])
def test_without_a_bias_and_with_a_second_backward(ranks: Ranks, name: str) -> None:
    case = Case(OBJECTIVES[name].replace(entropy_coef=0.05), biased=False, upstream=3.0)
    # Gradients that the forward formed are handed over once.
    forms, again = plans(case)[:1], replace(case, backwards=2)
    check_over_ranks(ranks, case, meetings(forms, LAYOUTS.values()))
    check_over_ranks(ranks, again, meetings(plans(case)[1:], LAYOUTS.values()))
    frozen = replace(again, needs=("hidden",))
    check_over_ranks(ranks, frozen, [{"plan": "frozen-head", "shards": x} for x in LAYOUTS.values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["SAPO", "GSPO"])
def test_parts_of_the_gradient_of_hidden_sum_up_to_the_whole(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    case = Case(OBJECTIVES[name], problem={"dtype": dtype}, arguments={"reduce_hidden_grad": False})
    layouts = [x for x in LAYOUTS.values() if x.members == EVEN.members]
    check_over_ranks(ranks, case, meetings(plans(case), layouts))
    frozen = replace(case, needs=("hidden",))
    check_over_ranks(
        ranks, frozen, [{"plan": plan, "shards": x} for plan in ("frozen-head", "recompute") for x in layouts]
    )


@pytest.mark.parametrize("name", ["SAPO", "GSPO", "GMPO", "DeepSeekV32"])
def test_a_packed_batch(ranks: Ranks, name: str) -> None:
    """Two responses, and a third without tokens."""
    case = Case(
        OBJECTIVES[name].replace(entropy_coef=0.05),
        problem={"size": (7, H, 37), "mask": None},
        arguments={
            "cu_seqlens": torch.tensor([0, 3, 7, 7], dtype=torch.int32),
            "advantages": torch.tensor([1.0, -2, 1]),
            "group_ids": torch.tensor([0, 1, 0]),
        },
    )
    check_over_ranks(ranks, case, meetings(plans(case), LAYOUTS.values()))


class Clipped:
    """An objective of our own, which every process can import."""

    def __init__(self, row_local: bool) -> None:
        self.row_local = row_local

    def __call__(self, log_ratio: torch.Tensor, advantages: torch.Tensor, context: fastrl.LossContext) -> torch.Tensor:
        assert context.entropy is not None
        r = log_ratio.exp()
        return -torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages) - 0.05 * context.entropy


@pytest.mark.parametrize("row_local", [True, False])
def test_callables(ranks: Ranks, row_local: bool) -> None:
    case = Case(Clipped(row_local))
    chosen = ("forward-gradient" if row_local else "whole-response", "recompute", "two-pass")
    check_over_ranks(ranks, case, meetings(chosen, LAYOUTS.values()))
    large = replace(case, problem=LARGE, arguments=BUDGET, tile_bytes=SMALL_TILE)
    check_over_ranks(ranks, large, [{"plan": plan, "shards": x} for plan in chosen for x in LARGE_LAYOUTS])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["SAPO", slow("GSPO")])
def test_other_backends(ranks: Ranks, name: str, backend: str) -> None:
    """The others are by the C++ one."""
    case = Case(OBJECTIVES[name].replace(entropy_coef=0.05), backend=backend)
    layouts = LAYOUTS.values() if backend == "torch" else (LAYOUTS["empty in the middle"],)
    check_over_ranks(ranks, case, [{"plan": plan, "shards": x} for plan in plans(case)[:2] for x in layouts])
