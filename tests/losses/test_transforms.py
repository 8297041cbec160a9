"""torch.func and forward-mode differentiation: right, or an error; never a derivative of zero in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_child import functions
from objectives import OBJECTIVES
from problem import CLOSE, B, Problem, T
from torch import Tensor
from torch.autograd import forward_ad

import fastrl

PROBLEM = Problem("cpu")


def differentiable() -> dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]]:
    """Functions of logits, or of hidden states and a head, that return their loss or their log-probabilities."""
    found = {}
    for name, (function, given) in functions().items():
        inputs = {k: x.detach() for k, x in given.items() if k in ("logits", "hidden", "weight", "bias")}
        rest = {k: x for k, x in given.items() if k not in inputs}

        def first(function: Callable[..., Any] = function, rest: dict[str, Any] = rest, **inputs: Tensor) -> Tensor:
            value = function(**inputs, **rest)
            return value if isinstance(value, Tensor) else value[0]

        if inputs and not name.startswith("SamplingMask"):
            found[name] = first, inputs
    return found


FUNCTIONS = differentiable()


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
        return fastrl.policy_loss(logprobs, objective=objective, entropy=entropy, **PROBLEM.of_policy_loss()).loss

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
