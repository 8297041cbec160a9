"""torch.func and forward-mode differentiation: right, or an error; never a derivative of zero in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from objectives import OBJECTIVES
from problem import CLOSE, B, Problem, T, V
from torch import Tensor
from torch.autograd import forward_ad

import fastrl

PROBLEM = Problem("cpu", on_policy=False)
LOSS: dict[str, Any] = {"targets": PROBLEM.targets, **PROBLEM.arguments}
STATS = {"targets": PROBLEM.targets, "mask": PROBLEM.arguments.get("mask")}
LOGITS = torch.randn(B, T, V)
KEPT = fastrl.SamplingMask.from_dense(torch.ones(B * T, V, dtype=torch.bool))
HEAD = {"hidden": PROBLEM.hidden, "weight": PROBLEM.weight, "bias": PROBLEM.bias}

FUNCTIONS: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
    "token_logprobs": (lambda logits: fastrl.token_logprobs(logits, **STATS).logprobs, {"logits": LOGITS}),
    "token_logprobs recorded": (
        lambda logits: fastrl.token_logprobs(logits, sampling_mask=KEPT, **STATS).logprobs,
        {"logits": LOGITS},
    ),
    "linear_token_logprobs": (lambda **head: fastrl.linear_token_logprobs(**head, **STATS).logprobs, HEAD),
    "linear_cross_entropy": (
        lambda **head: fastrl.linear_cross_entropy(targets=PROBLEM.targets.clamp_min(0), **head),
        HEAD,
    ),
    "linear_dpo_loss": (
        lambda **head: (
            fastrl.linear_dpo_loss(
                targets=PROBLEM.targets[:2].clamp_min(0), mask=torch.ones(2, T), ref_logprobs=torch.zeros(2), **head
            ).loss
        ),
        {**HEAD, "hidden": PROBLEM.hidden[:2]},
    ),
    **{
        f"logits_policy_loss {name}": (
            lambda logits, name=name: fastrl.logits_policy_loss(logits, objective=OBJECTIVES[name], **LOSS).loss,
            {"logits": LOGITS},
        )
        for name in ("GRPO", "GSPO")
    },
    **{
        f"linear_policy_loss {name}": (
            lambda name=name, **head: fastrl.linear_policy_loss(objective=OBJECTIVES[name], **head, **LOSS).loss,
            HEAD,
        )
        for name in ("GRPO", "GSPO")
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_raises(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    assert torch.isfinite(function(**inputs)).all()
    for argument, value in inputs.items():
        rest = {k: x for k, x in inputs.items() if k != argument}

        def one(x: Tensor, argument: str = argument, rest: dict[str, Tensor] = rest) -> Tensor:
            return function(**{argument: x}, **rest)

        message = f"{argument} has a forward-mode tangent"
        with pytest.raises(RuntimeError, match=message):
            torch.func.jvp(one, (value,), (torch.ones_like(value),))
        with pytest.raises(RuntimeError, match=message):
            torch.func.jacfwd(one)(value)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
            one(forward_ad.make_dual(value.clone().requires_grad_(), torch.ones_like(value)))


@pytest.mark.parametrize("name", ["SAPO", "GSPO", "DeepSeekV32"])
def test_the_loss_of_logprobs_in_forward_mode(name: str) -> None:
    """It is plain torch: the directional derivative is the gradient's."""
    objective = OBJECTIVES[name]
    logprobs = -torch.rand(B, T)

    def loss(logprobs: Tensor) -> Tensor:
        entropy = logprobs.detach() * 0 + 1
        return fastrl.policy_loss(logprobs, objective=objective, entropy=entropy, **PROBLEM.arguments).loss

    leaf, direction = logprobs.clone().requires_grad_(), torch.randn(B, T)
    loss(leaf).backward()
    assert leaf.grad is not None
    _, found = torch.func.jvp(loss, (logprobs,), (direction,))
    torch.testing.assert_close(found, (leaf.grad * direction).sum())


@pytest.mark.parametrize("name", ["token_logprobs", "linear_token_logprobs"])
def test_vmap_of_the_forward(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    argument = next(iter(inputs))
    batch = torch.stack([inputs[argument], inputs[argument] + 1.0, inputs[argument] * 2.0])
    rest = {k: x for k, x in inputs.items() if k != argument}
    found = torch.vmap(lambda x: function(**{argument: x}, **rest))(batch)
    expected = torch.stack([function(**{argument: x}, **rest) for x in batch])
    torch.testing.assert_close(found, expected, **CLOSE)
