"""What is wrong on one rank of a vocabulary's group is an error on all of them, and the next call works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from objectives import OBJECTIVES
from ranks import Ranks
from shards import EVEN, Case, Shards

import fastrl
from fastrl.planning.plans import use_plan

#: The rank that is wrong.
WRONG = 2
Head = dict[str, torch.Tensor]


def posed(shards: Shards = EVEN) -> tuple[Head, dict[str, Any]]:
    """This rank's head and the arguments of `linear_policy_loss`."""
    problem, rank = Case(None).posed(), dist.get_rank()
    head = shards.leaves(problem.head, rank)
    return head, {**problem.arguments, "objective": OBJECTIVES["GRPO"], "tp_group": dist.group.WORLD}


def loss_of(given: dict[str, Any]) -> float:
    """The loss, after its backward."""
    loss = fastrl.linear_policy_loss(**given).loss
    loss.backward()
    return loss.item()


def described(function: Any, given: dict[str, Any], **settings: Any) -> str:
    """The error of the call; a call without one follows."""
    try:
        if "plan" in settings:
            with use_plan(settings["plan"]):
                function(**given)
        elif "backend" in settings:
            with fastrl.use_backend(settings["backend"]):
                function(**given)
        else:
            function(**given)
        found = "no error"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    head, arguments = posed()
    assert loss_of({**head, **arguments}) == pytest.approx(EXPECTED, rel=1e-5)
    return found


EXPECTED = Case(OBJECTIVES["GRPO"]).posed().by_logprobs(OBJECTIVES["GRPO"])[0].loss.item()

#: By name: what one rank passes, the type of its error and how it begins.
ON_ONE_RANK: dict[str, tuple[dict[str, Any], str]] = {
    "dtype of the bias": ({"bias": torch.zeros(9, dtype=torch.bfloat16)}, "TypeError: bias must be torch.float32"),
    "shape": ({"weight": torch.zeros(9, 7)}, "ValueError: hidden must have shape (..., H) and weight (V, H)"),
    "no tensor": ({"weight": None}, "TypeError: weight must be a tensor, got NoneType"),
    "targets": ({"targets": torch.zeros(3, 4)}, "TypeError: targets must be"),
    "temperature": ({"temperature": -1.0}, "ValueError: temperature must be"),
    "softcap": ({"softcap": 0.0}, "ValueError: softcap must be"),
    "budget": ({"memory_budget": "some"}, "ValueError: memory_budget must be"),
    "advantages": ({"advantages": torch.zeros(5)}, "ValueError: advantages must have shape"),
    "reference": ({"ref_logprobs": None}, "ValueError: "),
    "objective": ({"objective": "GRPO"}, "TypeError: objective must be"),
    "number of tokens": ({"num_tokens": 6}, "ValueError: num_tokens must be the number of unmasked tokens, 7, got 6"),
    "start": ({"vocab_start": 1.5}, "TypeError: vocab_start must be an int, got float"),
    "size": ({"vocab_size": 0}, "ValueError: vocab_size must be at least 1, got 0"),
    "reduction": ({"reduce_hidden_grad": 1}, "TypeError: reduce_hidden_grad must be a bool, got int"),
    "sampling mask": ({"sampling_mask": [[1]]}, "TypeError: sampling_mask must be a fastrl.SamplingMask, got list"),
}


def one_is_wrong(names: list[str]) -> list[str]:
    found = []
    for name in names:
        head, arguments = posed()
        wrong = ON_ONE_RANK[name][0] if dist.get_rank() == WRONG else {}
        found.append(described(fastrl.linear_policy_loss, {**head, **arguments, **wrong}))
    return found


def test_an_error_of_one_rank_reaches_all(ranks: Ranks) -> None:
    found = ranks.run(one_is_wrong, list(ON_ONE_RANK))
    for name, *by_rank in zip(ON_ONE_RANK, *found, strict=True):
        own = by_rank[WRONG]
        assert own.startswith(ON_ONE_RANK[name][1]), (name, own)
        told = f"RuntimeError: rank {WRONG} of tp_group raised {own}"
        assert all(x == told for rank, x in enumerate(by_rank) if rank != WRONG), (name, by_rank)


#: Functions, their arguments beside hidden, weight and targets, what one rank passes, and its error.
OF_FUNCTIONS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "extras": (fastrl.linear_token_logprobs, {}, {"extras": ("top",)}, "ValueError: extras must be some of"),
    "reduction": (fastrl.linear_cross_entropy, {}, {"reduction": "max"}, "ValueError: reduction must be one of"),
    "denominator": (fastrl.linear_cross_entropy, {}, {"denominator": -1.0}, "ValueError: denominator must be"),
    "beta": (fastrl.linear_dpo_loss, {"mask": True}, {"beta": 0.0}, "ValueError: beta must be"),
    "preference": (
        fastrl.linear_preference_loss,
        {"mask": True, "objective": fastrl.IPO()},
        {"objective": "IPO"},
        "TypeError: objective must be a Preference",
    ),
    "desirable": (
        fastrl.linear_kto_loss,
        {"mask": True, "desirable": torch.ones(2)},
        {"desirable": torch.ones(3)},
        "ValueError: desirable must have shape (2,)",
    ),
    "mask": (fastrl.linear_dpo_loss, {"mask": True}, {"mask": None}, "TypeError: mask must be"),
}


def one_is_wrong_in_functions() -> list[str]:
    found = []
    for function, needed, wrong, _ in OF_FUNCTIONS.values():
        head, _ = posed()
        given = {"hidden": head["hidden"].detach()[:2], "weight": head["weight"], "tp_group": dist.group.WORLD}
        given |= {"targets": torch.zeros(2, 4, dtype=torch.int64)}
        given |= needed | {"mask": torch.ones(2, 4), "ref_logprobs": torch.zeros(2)} if needed else {}
        found.append(described(function, given | (wrong if dist.get_rank() == WRONG else {})))
    return found


def test_an_error_of_one_rank_reaches_all_in_every_function(ranks: Ranks) -> None:
    found = ranks.run(one_is_wrong_in_functions)
    for (name, (*_, expected)), *by_rank in zip(OF_FUNCTIONS.items(), *found, strict=True):
        own = by_rank[WRONG]
        assert own.startswith(expected), (name, own)
        assert by_rank[0] == by_rank[1] == by_rank[3] == f"RuntimeError: rank 2 of tp_group raised {own}", name


SUPPORTS = [fastrl.SamplingMask.from_lists([[i % 3, 30]] * 12).with_targets(torch.zeros(12).long()) for i in range(2)]
#: By name: what one rank passes, or how it is set; and what the error of all says differs.
DIFFERING: dict[str, dict[str, Any]] = {
    "targets": {"targets": torch.ones(3, 4, dtype=torch.int64)},
    "mask": {"mask": torch.ones(3, 4), "targets": torch.zeros(3, 4, dtype=torch.int64)},
    "objective": {"objective": OBJECTIVES["SAPO"]},
    "number of responses": {"cu_seqlens": torch.tensor([0, 3, 12], dtype=torch.int32)},
    "advantages": {"advantages": torch.tensor([1.0, 2.0, 3.0])},
    "old_logprobs": {"old_logprobs": None},
    "temperature": {"temperature": 0.5},
    "logit_scale": {"logit_scale": 0.5},
    "softcap": {"softcap": 5.0},
    "sampling_mask": {"sampling_mask": SUPPORTS[1]},
    "bias": {"bias": None},
    "denominator": {"denominator": 9.0},
    "group_ids": {"group_ids": [0, 1, 1]},
    "requires_grad": {"requires_grad": False},
    "dtype": {"dtype": torch.bfloat16},
    "vocab_size": {"vocab_size": 36},
    "reduce_hidden_grad": {"reduce_hidden_grad": False},
    "plan": {"plan": "two-pass"},
    "backend": {"backend": "torch"},
}


def one_differs(names: list[str]) -> list[str]:
    found = []
    for name in names:
        head, given = posed()
        if name == "number of responses":  # rows of a packed batch
            head["hidden"] = head["hidden"].detach().view(12, -1)
            given = {k: x.view(12) if isinstance(x, torch.Tensor) and x.dim() == 2 else x for k, x in given.items()}
            given |= {"cu_seqlens": torch.tensor([0, 3, 7, 12], dtype=torch.int32), "advantages": torch.ones(12)}
            del given["group_ids"]
        if name == "sampling_mask":
            given |= {"sampling_mask": SUPPORTS[0], "targets": torch.zeros(3, 4, dtype=torch.int64)}
        if name == "mask":
            given |= {"targets": torch.zeros(3, 4, dtype=torch.int64)}
        changes = dict(DIFFERING[name]) if dist.get_rank() == WRONG else {}
        settings = {k: changes.pop(k) for k in ("plan", "backend") if k in changes}
        if "dtype" in changes:
            head = {k: x.detach().to(changes["dtype"]) for k, x in head.items()}
            head["weight"].requires_grad_()
            head["bias"].requires_grad_()
            head["hidden"].requires_grad_()
            del changes["dtype"]
        if "requires_grad" in changes:
            head["weight"] = head["weight"].detach()
            del changes["requires_grad"]
        found.append(described(fastrl.linear_policy_loss, {**head, **given, **changes}, **settings))
    return found


def test_what_differs_between_ranks_is_named_by_all(ranks: Ranks) -> None:
    found = ranks.run(one_differs, list(DIFFERING))
    for name, *by_rank in zip(DIFFERING, *found, strict=True):
        assert len(set(by_rank)) == 1, (name, by_rank)
        assert by_rank[0].startswith(f"ValueError: {name} must be the same on every rank of tp_group, got "), by_rank[0]
        assert by_rank[0].endswith(" on rank 2")


def same_number_of_responses(cu_seqlens: list[list[int]]) -> str:
    head, given = posed()
    given = {k: x.view(12) if isinstance(x, torch.Tensor) and x.dim() == 2 else x for k, x in given.items()}
    offsets = cu_seqlens[dist.get_rank() == WRONG]
    given |= {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32), "objective": OBJECTIVES["GSPO"]}
    return described(fastrl.linear_policy_loss, {**head, **given, "hidden": head["hidden"].detach().view(12, -1)})


def test_responses_of_other_lengths_differ(ranks: Ranks) -> None:
    found = ranks.run(same_number_of_responses, [[0, 4, 8, 12], [0, 1, 2, 12]])
    assert len(set(found)) == 1 and found[0].startswith("ValueError: cu_seqlens must be the same on every rank"), found


#: What all ranks find wrong with the whole vocabulary, and the beginning of their error.
OF_THE_WHOLE: dict[str, tuple[dict[str, Any], str]] = {
    "target": ({"targets": torch.full((3, 4), 37)}, "IndexError: "),
    "negative target": ({"targets": torch.full((3, 4), -1)}, "IndexError: "),
    "target in the padding": ({"targets": torch.full((3, 4), 34), "vocab_size": 34}, "IndexError: "),
    "size": ({"vocab_size": 38}, "ValueError: vocab_size must be from 1 to 37, the rows of all ranks, got 38"),
    "start": (
        {"vocab_start": 3},
        "ValueError: vocab_start must be 0 on rank 0, where the rows of the earlier ranks end",
    ),
    "id": ({"sampling_mask": fastrl.SamplingMask.from_lists([[37]] * 12)}, "ValueError: "),
    "forced target": ({"sampling_mask": fastrl.SamplingMask.from_lists([[36]] * 12)}, "ValueError: targets row"),
    "budget": ({"memory_budget": 1000}, "BudgetTooSmall: memory_budget is too small for"),
    "plan": ({"plan": "frozen-head"}, "ValueError: the plan 'frozen-head' cannot be followed here"),
}


def all_are_wrong(names: list[str]) -> list[str]:
    found = []
    for name in names:
        head, given = posed()
        given |= OF_THE_WHOLE[name][0]
        settings = {"plan": given.pop("plan")} if "plan" in given else {}
        found.append(described(fastrl.linear_policy_loss, {**head, **given}, **settings))
    return found


def test_what_is_wrong_with_the_whole_is_found_by_all(ranks: Ranks) -> None:
    found = ranks.run(all_are_wrong, list(OF_THE_WHOLE))
    for (name, (_, expected)), *by_rank in zip(OF_THE_WHOLE.items(), *found, strict=True):
        assert len(set(by_rank)) == 1 and by_rank[0].startswith(expected), (name, by_rank)


def starts_of(starts: list[int | None]) -> str:
    head, given = posed()
    return described(fastrl.linear_policy_loss, {**head, **given, "vocab_start": starts[dist.get_rank()]})


def test_a_start_on_some_ranks_alone(ranks: Ranks) -> None:
    assert ranks.run(starts_of, [None, 10, None, 28]) == ["no error"] * 4
    expected = "ValueError: vocab_start must be 19 on rank 2, where the rows of the earlier ranks end, got 20"
    assert ranks.run(starts_of, [None, 10, 20, 28]) == [expected] * 4


def budgets_of(budgets: list[Any]) -> str:
    head, given = posed()
    return described(fastrl.linear_policy_loss, {**head, **given, "memory_budget": budgets[dist.get_rank()]})


def test_the_smallest_budget_counts(ranks: Ranks) -> None:
    found = ranks.run(budgets_of, [None, "1GiB", 1000, None])
    assert len(set(found)) == 1 and found[0].startswith("BudgetTooSmall: memory_budget is too small for")
    assert "got 1000 bytes" in found[0]
    assert ranks.run(budgets_of, [None, "1GiB", "8MiB", None]) == ["no error"] * 4


def test_the_start_of_a_shard_needs_a_group() -> None:
    problem = Case(None).posed()
    leaves = problem.leaves()
    with pytest.raises(ValueError, match="vocab_start goes with tp_group, got 0 without one"):
        fastrl.linear_policy_loss(**leaves, **problem.arguments, objective=OBJECTIVES["GRPO"], vocab_start=0)
    with pytest.raises(ValueError, match="vocab_start goes with tp_group"):
        fastrl.linear_token_logprobs(**leaves, targets=problem.targets.clamp_min(0), vocab_start=0)
    with pytest.raises(ValueError, match="vocab_start goes with tp_group"):
        fastrl.linear_cross_entropy(**leaves, targets=problem.targets, vocab_start=0)


def test_a_group_must_be_one() -> None:
    problem = Case(None).posed()
    for group, error in ((object(), TypeError), ("world", TypeError), (dist.GroupMember.NON_GROUP_MEMBER, ValueError)):
        with pytest.raises(error, match="tp_group must be a"):
            fastrl.linear_policy_loss(
                **problem.leaves(), **problem.arguments, objective=OBJECTIVES["GRPO"], tp_group=group
            )
        with pytest.raises(error, match="tp_group must be a"):
            fastrl.linear_cross_entropy(**problem.leaves(), targets=problem.targets, tp_group=group)
