"""Logits whose gradient took their place are not read again; written anew, they are logits again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl

B, T, V = 3, 4, 7
TARGETS = torch.randint(0, V, (B, T))
SETS = fastrl.SamplingMask.from_dense(torch.ones(B * T, V, dtype=torch.bool))
PPO: dict[str, Any] = {"objective": fastrl.PPO(), "advantages": torch.randn(B) + 2, "inplace": True}
GSPO = {**PPO, "objective": fastrl.GSPO(), "old_logprobs": torch.randn(B, T)}


def fresh() -> Tensor:
    return torch.randn(B, T, V).requires_grad_()


def loss(logits: Tensor, targets: Tensor = TARGETS, **arguments: Any) -> Tensor:
    return fastrl.logits_policy_loss(logits, targets, **{**PPO, **arguments}).loss


def assert_consumed(logits: Tensor, targets: Tensor = TARGETS) -> None:
    for read in (
        lambda: loss(logits, targets),
        lambda: fastrl.logits_policy_loss(logits, targets, **{**GSPO, "inplace": False, "old_logprobs": None}),
        lambda: fastrl.token_logprobs(logits, targets),
        lambda: fastrl.token_logprobs(logits.detach()[0], targets[0]),
        lambda: fastrl.SamplingMask.from_logits(logits.detach(), top_p=0.9),
    ):
        with pytest.raises(RuntimeError, match="consumed by an earlier call"):
            read()


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("leaf", [True, False])
def test_a_second_call_on_consumed_logits(leaf: bool, factor: float) -> None:
    logits = fresh() if leaf else fresh() * 1
    first = loss(logits)
    assert_consumed(logits)
    (first * factor).backward()
    assert_consumed(logits)


@pytest.mark.parametrize("arguments", [GSPO, {**PPO, "sampling_mask": SETS}, {**GSPO, "sampling_mask": SETS}])
def test_logits_that_the_backward_consumes(arguments: dict[str, Any]) -> None:
    logits = fresh() * 1
    first = fastrl.logits_policy_loss(logits, TARGETS, **arguments).loss
    fastrl.token_logprobs(logits, TARGETS)  # they are still logits
    first.backward()
    assert_consumed(logits)


def test_logits_written_anew_are_logits() -> None:
    logits, new = fresh(), torch.randn(B, T, V)
    for _ in range(3):
        loss(logits).backward()
        with torch.no_grad():
            logits.copy_(new)
        torch.testing.assert_close(fastrl.token_logprobs(logits, TARGETS), fastrl.token_logprobs(new, TARGETS))


def test_other_parts_of_the_same_memory_are_logits() -> None:
    """Slices of the time dimension interleave in memory, and none of their rows meet."""
    logits = fresh() * 1
    parts = [(logits[:, i : i + 2], TARGETS[:, i : i + 2]) for i in (0, 2)]
    sum(loss(*part) for part in parts).backward()
    for part in parts:
        assert_consumed(*part)
    assert_consumed(logits[:, 1:3], TARGETS[:, 1:3])


def test_logits_that_were_not_consumed() -> None:
    for logits, inplace in ((fresh(), False), (torch.randn(B, T, V), True)):
        for _ in range(2):
            assert torch.isfinite(loss(logits, inplace=inplace))


@pytest.mark.parametrize(
    "write", [lambda x: x.copy_(torch.ones(V)), lambda x: x.detach().zero_(), lambda x: x[0].mul_(2)]
)
def test_logits_that_are_written_to_before_the_backward(write: Callable[[torch.Tensor], Any]) -> None:
    logits = fresh() * 1
    value = loss(logits)
    with torch.no_grad():
        write(logits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation before the backward"):
        value.backward()


def test_logits_that_are_new_in_the_same_memory_before_the_backward() -> None:
    logits = fresh() * 1
    first = loss(logits)
    with torch.no_grad():
        logits.copy_(torch.randn(B, T, V))
    second = loss(logits.detach().requires_grad_())
    with pytest.raises(RuntimeError, match="modified by an inplace operation before the backward"):
        first.backward()
    second.backward()
