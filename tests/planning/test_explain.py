"""`explain`: the plan that the call then takes, without its products; and what costs something."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastrl
from fastrl.planning import announce, plans
from fastrl.planning.plans import Plan

T, H, V = 12, 16, 512


def call(
    dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A policy loss of three responses, with these options: function, arguments and keyword arguments."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=g).to(dtype).requires_grad_() for shape in ((3, T, H), (V, H)))
    targets, mask = torch.randint(V, (3, T), generator=g), torch.arange(T).expand(3, T) < 9
    options = {"objective": fastrl.GRPO(kl_coef=0.0), "advantages": torch.randn(3, generator=g), "mask": mask} | options
    return fastrl.linear_policy_loss, (hidden, weight, targets), options


CASES: dict[str, dict[str, Any]] = {
    "row-local": {},
    "whole responses": {"objective": fastrl.GSPO(), "old_logprobs": torch.full((3, T), -6.0)},
    "a small budget": {"memory_budget": "1300KiB", "objective": fastrl.GSPO(), "old_logprobs": torch.zeros(3, T)},
    "float16": {"dtype": torch.float16},
    "drawn at random": {"objective": fastrl.ClipCov()},
}


@pytest.mark.parametrize("case", CASES)
def test_it_tells_the_plan_that_the_call_takes_and_computes_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, args, options = call(**CASES[case])
    taken: list[Plan] = []
    own = plans.run
    monkeypatch.setattr(plans, "run", lambda plan: taken.append(plan) or own(plan))
    state = torch.get_rng_state()
    found = fastrl.explain(function, *args, **options)
    assert torch.equal(torch.get_rng_state(), state)
    taken.clear()
    result = function(*args, **options)
    assert found.plan == taken[0]
    assert found.plan.temporary_bytes <= found.allowed_bytes
    assert args[0].grad is None and result.loss.requires_grad
    assert found.plan.name in str(found) and f"{found.plan.units}U" in found.summary


def notes(**options: Any) -> str:
    function, args, options = call(**options)
    return "\n".join(fastrl.explain(function, *args, **options).notes)


def test_what_costs_something_is_noted() -> None:
    assert notes() == ""
    assert "its whole response" in notes(**CASES["whole responses"])
    assert "float16 gradients are scaled" in notes(dtype=torch.float16)
    least = fastrl.plan_memory(27, H, V, torch.bfloat16, gradients=("hidden", "weight"), device="cpu").smallest_budget
    small = notes(dtype=torch.bfloat16, memory_budget=least + 4096)
    assert "forward-gradient (3U) " in small
    args = call()[1]
    strided = fastrl.explain(fastrl.linear_token_logprobs, args[0].transpose(0, 1), args[1], args[2].t())
    assert [note.split(" of inputs")[1:] != [] for note in strided.notes] == [False, True], strided.notes
    assert "forms them again" in strided.notes[0]


def test_the_backend_and_why_not_the_others() -> None:
    function, args, options = call(logits_dtype=torch.float32, dtype=torch.bfloat16)
    with fastrl.use_backend("torch"):
        forced = fastrl.explain(function, *args, **options)
    assert forced.backend == "torch" and forced.logits_dtype == torch.float32
    assert forced.other_backends == {"triton": "use_backend('torch')", "cpp": "use_backend('torch')"}
    own = fastrl.explain(function, *args, **options)
    assert own.other_backends == {"triton": "not made for cpu", "torch": "slower on cpu"}


def test_a_function_that_calls_a_loss_is_explained_to_there() -> None:
    function, args, options = call()
    done: list[str] = []

    def step() -> None:
        done.append("model")
        try:
            function(*args, **options)
        except Exception:  # as trainers have
            done.append("caught")
        done.append("loss")

    assert fastrl.explain(step).plan.name == "forward-gradient" and done == ["model"]


def test_bad_input() -> None:
    function, args, options = call()
    with pytest.raises(ValueError, match="targets must have shape"):
        fastrl.explain(function, *args[:2], args[2][:2], **options)
    with pytest.raises(TypeError, match="function must be callable, got Tensor"):
        fastrl.explain(args[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="from hidden states, whose plan this tells"):
        fastrl.explain(fastrl.logits_policy_loss, torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="returned without"):
        fastrl.explain(lambda: None)
    assert plans.observer.get() is None


def test_an_adapter_says_its_plan_once_and_not_while_it_is_explained(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announce, "_announced", set())
    function, args, options = call()
    adapted = announce.announces_plan("somebody's loss")(function)
    with caplog.at_level(logging.INFO, "fastrl"):
        explained = fastrl.explain(adapted, *args, **options)
        with torch.no_grad():
            adapted(*args, **options)
        assert not caplog.messages
        adapted(*args, **options)
        adapted(*args, **options)
    assert caplog.messages == [f"fastrl computes somebody's loss: {explained.summary}"]


def test_an_objectives_own_generator_is_left_as_it_was():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    hidden, weight, targets = torch.randn(2, 3, 8), torch.randn(16, 8), torch.zeros(2, 3, dtype=torch.int64)
    objective = fastrl.ClipCov(generator=generator)
    arguments = {"objective": objective, "advantages": torch.ones(2), "old_logprobs": torch.full((2, 3), -2.0)}
    fastrl.explain(fastrl.linear_policy_loss, hidden, weight, targets, **arguments)
    assert torch.equal(generator.get_state(), before)
    fastrl.linear_policy_loss(hidden, weight, targets, **arguments)
    assert not torch.equal(generator.get_state(), before)
