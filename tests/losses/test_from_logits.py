"""What `logits_policy_loss` holds and leaves alone when the gradient has a buffer of its own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy
import pytest
import torch
from objectives import OBJECTIVES
from problem import MASK, B, Problem, T, V

import fastrl
from fastrl.backend.cpp import backend as cpp_backend


class _FromArray(torch.autograd.Function):
    """Hands out an array's memory as a tensor with a graph, so that one can watch when it is let go."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, array: Any) -> torch.Tensor:
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream.sum(), None


@pytest.mark.parametrize("name", ["GRPO", "GSPO"])  # gradients in the forward, and in the backward
@pytest.mark.parametrize("inplace", [False, True])
def test_a_loss_that_is_kept_for_the_log_keeps_no_logits(name: str, inplace: bool) -> None:
    problem = Problem("cpu")
    array = numpy.random.default_rng(0).normal(size=(B, T, V)).astype(numpy.float32)
    alive = weakref.ref(array)
    logits = _FromArray.apply(torch.zeros((), requires_grad=True), array)
    out = fastrl.logits_policy_loss(logits, objective=OBJECTIVES[name], inplace=inplace, **problem.arguments)
    del logits, array
    out.loss.backward()
    gc.collect()
    assert alive() is None
    assert out.loss.isfinite()


def test_logits_stay_as_they_are_and_may_change_later(backend: str, backend_device: str) -> None:
    problem = Problem(backend_device)
    logits = torch.randn(B, T, V, device=backend_device).requires_grad_()
    before, found = logits.detach().clone(), []
    for change in (0.0, 1.0):
        out = fastrl.logits_policy_loss(logits, objective=OBJECTIVES["GRPO"], **problem.arguments)
        assert torch.equal(logits, before)
        with torch.no_grad():
            logits.add_(change)
        found += torch.autograd.grad(out.loss, logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["old_logprobs", "targets"])
@pytest.mark.parametrize("by_hidden", [False, True])
@pytest.mark.parametrize("objective", ["GRPO", "GSPO"])
def test_a_second_backward_is_never_one_of_changed_inputs(objective: str, by_hidden: bool, name: str) -> None:
    """It raises where the first backward's gradients were ready with the loss; others are formed again."""
    for masked in (True, False):  # a masked input is a copy, one that is not may be the caller's own memory
        problem = Problem("cpu", mask=MASK if masked else None)
        inputs = problem.leaves() if by_hidden else {"logits": torch.randn(B, T, V, requires_grad=True)}
        function = fastrl.linear_policy_loss if by_hidden else fastrl.logits_policy_loss
        loss = function(**inputs, objective=OBJECTIVES[objective], **problem.arguments).loss
        leaves = list(inputs.values())
        again = first = torch.autograd.grad(loss, leaves, retain_graph=True)
        problem.arguments[name].zero_()
        message = None
        try:
            again = torch.autograd.grad(loss, leaves)
        except RuntimeError as error:
            message = str(error)
        torch.testing.assert_close(again, first)
        if by_hidden or objective == "GRPO":
            assert message is not None and "compute the loss again" in message
        else:
            assert message is None or "modified by an inplace operation" in message
            assert name != "targets" or message is not None


def test_without_a_graph_no_gradient_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def overwritten(*args: Any) -> Any:
        pytest.fail("the gradient was written")

    monkeypatch.setattr(cpp_backend, "row_forward_gradient", overwritten)
    problem = Problem("cpu")
    logits = torch.randn(B, T, V, requires_grad=True)
    with torch.no_grad(), fastrl.use_backend("cpp"):
        out = fastrl.logits_policy_loss(logits, objective=OBJECTIVES["GRPO"], **problem.arguments)
    assert not out.loss.requires_grad


def test_rows_that_lie_apart(backend: str, backend_device: str) -> None:
    """Logits shifted by a slice, and transposed ones, which are copied."""
    problem = Problem(backend_device)
    full = torch.randn(B, T + 1, V, device=backend_device)
    for logits in (full[:, :-1], full[:, :-1].transpose(0, 1).contiguous().transpose(0, 1)):
        found = []
        for given in (logits, logits.contiguous()):
            leaf = given.detach().requires_grad_()
            out = fastrl.logits_policy_loss(leaf, objective=OBJECTIVES["GRPO"], **problem.arguments)
            found.append((out.loss, torch.autograd.grad(out.loss, leaf)[0]))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
