"""The answers that benchmarks hold every subject against are autograd's, through whole logits in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastrl.bench import step_work
from fastrl.bench.masks_work import masked_problem
from fastrl.bench.measure import default_device
from fastrl.bench.problems import Tokens, Truth, linear_problem, logits_problem
from fastrl.bench.step_problem import hidden_states, step_problem

DEVICE = default_device()


def clipped_loss(logp: Tensor, tokens: Tokens) -> Tensor:
    """PPO's, written out once more."""
    ratio = (logp - tokens.old.double()).exp()
    return -torch.minimum(ratio * tokens.advantages, ratio.clamp(0.8, 1.2) * tokens.advantages).mean()


def check_truth(truth: Truth, loss: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """The truth's loss, and its gradients at the rows that it names."""
    loss.backward()
    assert truth.loss is not None
    torch.testing.assert_close(truth.loss, loss.detach(), rtol=1e-9, atol=1e-12)
    for name, gradient in (("hidden", hidden.grad), ("weight", weight.grad)):
        rows, expected = truth.gradients[name]
        assert gradient is not None and expected.any()
        torch.testing.assert_close(expected, gradient[rows], rtol=1e-7, atol=1e-10)


def test_the_cross_entropys_truth_is_autograds() -> None:
    problem = linear_problem(24, 5, 31, torch.float32, DEVICE)
    hidden, weight = (x.double().requires_grad_() for x in (problem.hidden, problem.weight))
    loss = torch.nn.functional.cross_entropy(hidden @ weight.t(), problem.tokens.targets)
    check_truth(problem.cross_entropy_truth(), loss, hidden, weight)


def test_a_steps_truth_is_autograds_through_the_whole_model() -> None:
    problem = step_problem(2, 12, 2, 16, 61, torch.float32, DEVICE)
    model, tokens = problem.model.double(), problem.tokens
    hidden = hidden_states(model, problem.inputs).reshape(-1, 16)
    logp = torch.log_softmax(hidden @ model.lm_head.weight.t(), -1).gather(-1, tokens.targets[:, None])[:, 0]
    loss = clipped_loss(logp, tokens)
    loss.backward()
    assert problem.truth.loss is not None
    torch.testing.assert_close(problem.truth.loss, loss.detach(), rtol=1e-5, atol=1e-6)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, gradient in (("norm", model.model.norm.weight.grad), ("weight", model.lm_head.weight.grad)):
        rows, expected = problem.truth.gradients[name]
        assert float(expected.abs().max()) > 0
        # the body ran in float32 for the one, in float64 for the other
        scale = float(expected.abs().max())
        torch.testing.assert_close(expected / scale, gradient[rows] / scale, rtol=0, atol=1e-4)


def test_every_step_starts_from_the_same_weights_and_trains_them() -> None:
    problem = step_problem(2, 12, 1, 16, 61, torch.float32, DEVICE)
    before = {name: p.clone() for name, p in problem.model.named_parameters()}
    subjects = {s.name: s for s in step_work.work(problem).subjects}
    run = subjects["fastrl, linear_policy_loss"].prepare()
    first, second = run.call(), run.call()
    assert first.loss is not None and second.loss is not None
    assert first.loss != second.loss
    again = subjects["fastrl, logits in place"].prepare().call()
    assert again.loss is not None
    torch.testing.assert_close(again.loss, first.loss, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(p, before[name]) for name, p in problem.model.named_parameters())


def test_the_truths_gradients_are_autograds() -> None:
    problem = linear_problem(24, 5, 31, torch.float32, DEVICE)
    tokens = problem.tokens
    hidden, weight = (x.double().requires_grad_() for x in (problem.hidden, problem.weight))
    logits = hidden @ weight.t()
    logp = torch.log_softmax(logits, -1).gather(-1, tokens.targets[:, None])[:, 0]
    check_truth(problem.loss_truth(), clipped_loss(logp, tokens), hidden, weight)


def test_the_masked_truths_gradients_are_autograds() -> None:
    problem = masked_problem(24, 5, 31, 3, torch.float32, DEVICE)
    hidden, weight = (x.double().requires_grad_() for x in (problem.hidden, problem.weight))
    logits = (hidden @ weight.t()).masked_fill(~problem.sets.to_dense(31), -torch.inf)
    log_p = torch.log_softmax(logits, -1)
    logp = log_p.gather(-1, problem.tokens.targets[:, None])[:, 0]
    torch.testing.assert_close(problem.logprobs, logp.detach(), rtol=1e-9, atol=1e-12)
    entropy = -(log_p.exp() * log_p.where(log_p > -torch.inf, 0.0)).sum(-1)
    torch.testing.assert_close(problem.entropy, entropy.detach(), rtol=1e-9, atol=1e-12)
    check_truth(problem.loss_truth(), clipped_loss(logp, problem.tokens), hidden, weight)
    assert 2.0 < problem.sets.lengths.double().mean() < 4.0


def test_inputs_are_the_same_in_every_run_and_clear_of_the_clip() -> None:
    first, second = (logits_problem(400, 64, torch.float32, DEVICE) for _ in range(2))
    assert torch.equal(first.logits, second.logits)
    ratio = (first.logprobs - first.tokens.old).exp()
    for edge in (0.8, 1.2):
        assert (ratio - edge).abs().min() > 0.01
    clipped = (ratio - 1).abs() > 0.25
    assert 0 < clipped.float().mean() < 0.15
    assert math.isclose(first.tokens.advantages[0].item(), first.tokens.per_response[0].item())
