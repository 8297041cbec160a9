"""The losses captured in a CUDA graph: replayed on new numbers, they give what eager calls give on them.

Nothing in forward or backward waits for the host, given the number of tokens and the denominator.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import needs_gpu
from objectives import OBJECTIVES
from problem import CLOSE, B, Problem, T, V
from torch import Tensor

import fastrl

TOKENS = 7  # of Problem's mask


def _captured(run: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of one run, after three on a stream of their own, as torch.cuda.graph wants it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def _losses(name: str, arguments: dict[str, Any], head: dict[str, Tensor], logits: Tensor) -> list[Tensor]:
    """One loss from hidden states and one from logits, with all their gradients."""
    common = {"objective": OBJECTIVES[name], "denominator": 3.0, **arguments}
    # A budget: without one the GPU is asked how much memory is free.
    out = fastrl.linear_policy_loss(**head, num_tokens=TOKENS, memory_budget="64MiB", **common)
    gradients = torch.autograd.grad(out.loss, list(head.values()))
    found = [out.loss.detach(), out.logprobs, *gradients, *out.metrics.values()]
    for inplace in (False, True):
        second = fastrl.logits_policy_loss(logits * 1, inplace=inplace, **common)
        found += [second.loss.detach(), *torch.autograd.grad(second.loss, logits)]
    return found


@needs_gpu
@pytest.mark.parametrize("name", ["GRPO", "DAPO", "GSPO", "SAPO", "GMPO", "CISPO"])
def test_replays_give_what_eager_calls_give(name: str) -> None:
    problem, other = (Problem("cuda", seed=seed) for seed in (0, 1))
    head = problem.leaves()
    logits = torch.randn(B, T, V, device="cuda", requires_grad=True)
    graph, results = _captured(lambda: _losses(name, problem.arguments, head, logits))
    others = other.head | other.arguments
    with torch.no_grad():  # the captured inputs' places, with other numbers
        logits.copy_(torch.randn_like(logits))
        for key, value in (head | problem.arguments).items():
            value.copy_(others[key])
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(results, _losses(name, problem.arguments, head, logits), equal_nan=True, **CLOSE)


def _linear_loss(head: dict[str, Tensor], arguments: dict[str, Any]) -> Tensor:
    return fastrl.linear_policy_loss(**head, objective=OBJECTIVES["GRPO"], **arguments).loss


def _with_gradients(function: Any, problem: Problem) -> list[Tensor]:
    head = problem.leaves()
    loss = function(head, problem.arguments)
    return [loss.detach().clone(), *torch.autograd.grad(loss, list(head.values()))]


@needs_gpu
def test_compiled_with_cuda_graphs_without_the_number_of_tokens() -> None:
    """Calls on new numbers, of which the later ones replay graphs around what waits for the host."""
    compiled = torch.compile(_linear_loss, mode="reduce-overhead")
    for seed in range(5):
        problem = Problem("cuda", seed=seed)
        found, expected = (_with_gradients(function, problem) for function in (compiled, _linear_loss))
        torch.testing.assert_close(found, expected, **CLOSE)
