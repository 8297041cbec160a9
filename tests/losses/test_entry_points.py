"""The three entry points give one loss, one gradient and one set of metrics, on every backend."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from objectives import OBJECTIVES
from problem import CLOSE, B, Problem, T, V, assert_same

import fastrl
from fastrl.objectives.batch import make_batch
from fastrl.objectives.row_local import Given, why_not_row_local
from fastrl.planning.plans import use_plan


def assert_entry_points_agree(device: str, name: str, entropy_coef: float, on_policy: bool) -> None:
    objective = OBJECTIVES[name].replace(entropy_coef=entropy_coef)
    problem = Problem(device, on_policy)
    expected = problem.by_logprobs(objective)
    case = f"entropy_coef={entropy_coef}, on_policy={on_policy}"
    for inplace in (False, True):
        assert_same(problem.by_logits(objective, inplace), expected, f"logits, inplace={inplace}, {case}")
    assert_same(problem.by_hidden(objective), expected, f"hidden, {case}")


# The interpreter takes about a second a case: a few objectives that differ in plan and kernel here, all of them among
# the slow tests (and every gate x KL x correction in the kernels' own tests).
FEW = ["GRPO", "SAPO", "CISPO", "GSPO", "VESPO", "DeepSeekV32", "kl forward", "TIS", "dual and delta"]
interpreted = pytest.param("triton", marks=() if torch.cuda.is_available() else pytest.mark.slow)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("backend", ["torch", "cpp", interpreted], indirect=True)
def test_entry_points_agree(backend: str, backend_device: str, name: str) -> None:
    """With and without a bonus for the entropy, off policy and on."""
    for entropy_coef, on_policy in itertools.product((0.0, 0.05), (False, True)):
        assert_entry_points_agree(backend_device, name, entropy_coef, on_policy)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_entry_points_agree_in_triton(backend: str, backend_device: str, name: str) -> None:
    assert_entry_points_agree(backend_device, name, 0.05, on_policy=name == "VESPO")


@pytest.mark.parametrize("on_policy", [True, False])
def test_a_weight_that_no_bound_holds(backend: str, backend_device: str, on_policy: bool) -> None:
    """Of e^75, with and without a correction: in a kernel too it is neither clipped nor dropped."""
    problem = Problem(backend_device, on_policy)
    logp = problem.by_logprobs(OBJECTIVES["PPO"])[0].logprobs
    problem.arguments["rollout_logprobs"] = logp - 75.0
    correction = fastrl.RolloutCorrection(high=float("inf"))
    for objective in (fastrl.PPO(rollout_correction=correction), fastrl.IcePop(high=1e34)):
        objective = objective.replace(max_log_ratio=80.0)
        expected = problem.by_logprobs(objective)
        assert expected[0].loss.abs() > 1e30
        for found, _ in (problem.by_logits(objective), problem.by_hidden(objective)):
            # Two routes to a log-probability, and to a difference of 75: a few units of 2^-18, which exp multiplies.
            assert found.loss.item() == pytest.approx(expected[0].loss.item(), rel=2e-5)


@pytest.mark.parametrize("name", ["GRPO", "GSPO", "SAPO"])
def test_any_upstream_scalar(backend: str, backend_device: str, name: str) -> None:
    """Accumulation's 1/n, a GradScaler's 2^16: read in the backward."""
    problem = Problem(backend_device)
    expected = problem.by_logprobs(OBJECTIVES[name])
    for upstream in (0.125, 65536.0):
        for inplace in (False, True):
            assert_same(problem.by_logits(OBJECTIVES[name], inplace, upstream), expected, f"x {upstream}")
        assert_same(problem.by_hidden(OBJECTIVES[name], upstream), expected, f"hidden x {upstream}")


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean"])
def test_per_token_advantages_and_weights(backend: str, backend_device: str, aggregate: Any) -> None:
    for on_policy in (False, True):
        problem = Problem(backend_device, on_policy, per_token=True)
        problem.arguments["token_weights"] = torch.rand(B, T, device=backend_device)
        problem.arguments["entropy_weights"] = torch.rand(B, T, device=backend_device)
        problem.arguments["entropy_threshold"] = 2.0
        for name in ("PPO", "GSPO", "GSPOToken", "GMPO"):
            objective = OBJECTIVES[name].replace(aggregate=aggregate, entropy_coef=0.1)
            expected = problem.by_logprobs(objective)
            assert_same(problem.by_logits(objective, True), expected, name)
            assert_same(problem.by_hidden(objective), expected, name)


@pytest.mark.parametrize("row_local", [False, True])
def test_callables(backend: str, backend_device: str, row_local: bool) -> None:
    def loss(log_ratio: torch.Tensor, advantages: torch.Tensor, context: fastrl.LossContext) -> torch.Tensor:
        assert context.entropy is not None and context.entropy.shape == log_ratio.shape
        r = log_ratio.exp()
        return -torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages) - 0.05 * context.entropy

    loss.row_local = row_local
    problem = Problem(backend_device)
    expected, expected_gradients = problem.by_logprobs(fastrl.PPO(entropy_coef=0.05))
    for out, gradients in (problem.by_logits(loss, True), problem.by_hidden(loss), problem.by_hidden(loss)):
        torch.testing.assert_close((out.loss, gradients), (expected.loss, expected_gradients), **CLOSE)


def test_a_packed_batch(backend: str, backend_device: str) -> None:
    problem = Problem(backend_device)
    keep = problem.arguments["mask"].bool()
    cu_seqlens = torch.tensor([0, 3, 7, 7], dtype=torch.int32, device=backend_device)
    names = ("GRPO", "GSPO", "SAPO", "GMPO", "LUSPO", "DeepSeekV32")
    padded = [problem.by_logprobs(OBJECTIVES[name]) for name in names]
    problem.head["hidden"] = problem.head["hidden"][keep]
    del problem.arguments["mask"]
    problem.arguments |= {k: v[keep] for k, v in problem.arguments.items() if v.dim() > 1}
    for name, (expected, expected_gradients) in zip(names, padded, strict=True):
        out, gradients = problem.by_hidden(OBJECTIVES[name], cu_seqlens=cu_seqlens)
        expected_gradients["hidden"] = expected_gradients["hidden"][keep]
        torch.testing.assert_close((out.loss, gradients), (expected.loss, expected_gradients), **CLOSE)


def test_num_tokens_is_taken_and_checked(backend: str, backend_device: str) -> None:
    problem = Problem(backend_device)
    for name in ("GRPO", "GSPO"):
        assert_same(problem.by_hidden(OBJECTIVES[name], num_tokens=7), problem.by_logprobs(OBJECTIVES[name]), name)
    if backend_device == "cpu":
        with pytest.raises(ValueError, match="num_tokens must be the number of unmasked tokens, 7, got 6"):
            problem.by_hidden(OBJECTIVES["GRPO"], num_tokens=6)


def test_a_second_backward(backend: str, backend_device: str) -> None:
    """It raises with inplace=True and if gradients were formed with the loss; otherwise it gives the same again."""
    problem = Problem(backend_device)
    for name in ("GRPO", "GSPO"):
        common = {"objective": OBJECTIVES[name], **problem.arguments}
        expected = problem.by_hidden(OBJECTIVES[name])[1]
        leaves = problem.leaves()
        loss = fastrl.linear_policy_loss(**leaves, **common).loss
        loss.backward(retain_graph=True)
        torch.testing.assert_close({k: x.grad for k, x in leaves.items()}, expected, **CLOSE)
        with pytest.raises(RuntimeError, match="compute the loss again"):
            loss.backward()
        leaves = problem.leaves()
        with use_plan("recompute"):
            loss = fastrl.linear_policy_loss(**leaves, **common).loss
        loss.backward(retain_graph=True)
        loss.backward()
        twice = {k: 2 * e for k, e in expected.items()}
        torch.testing.assert_close({k: x.grad for k, x in leaves.items()}, twice, **CLOSE)
        logits = torch.randn(B, T, V, device=backend_device, requires_grad=True) * 1
        loss = fastrl.logits_policy_loss(logits, inplace=True, **common).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="compute the loss again"):
            loss.backward()


def test_only_wanted_gradients_are_made(backend: str, backend_device: str) -> None:
    problem = Problem(backend_device)
    for name in ("GRPO", "GSPO"):
        expected = problem.by_hidden(OBJECTIVES[name])[1]
        common = {"objective": OBJECTIVES[name], **problem.arguments}
        for wanted in expected:
            leaves = {k: x.clone().requires_grad_(k == wanted) for k, x in problem.head.items()}
            fastrl.linear_policy_loss(**leaves, **common).loss.backward()
            torch.testing.assert_close(leaves[wanted].grad, expected[wanted], **CLOSE)
            assert all(x.grad is None for k, x in leaves.items() if k != wanted)
        with torch.no_grad():
            assert not fastrl.linear_policy_loss(**problem.leaves(), **common).loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["GRPO", "GSPO", "SAPO"])
def test_half_precision(backend: str, backend_device: str, name: str, dtype: torch.dtype) -> None:
    """Against float64 by autograd on the same half-precision inputs; a GradScaler's upstream for float16."""
    problem = Problem(backend_device, dtype=dtype)
    problem.arguments["old_logprobs"] = (problem.stats(problem.leaves(torch.float64))[0] + 0.1).detach().float()
    objective = OBJECTIVES[name].replace(entropy_coef=0.01)
    _, truth = problem.plain(objective, torch.float64)
    scale = 65536.0 if dtype == torch.float16 else 1.0
    # A scaled batch of one-in-a-million weights underflows float16 unless the loss scales inside.
    for denominator in (None, 1e6):
        factor = 1.0 if denominator is None else 3 / denominator
        for _, gradients in (
            problem.by_hidden(objective, scale, denominator=denominator),
            problem.by_logits(objective, True, scale, denominator=denominator),
        ):
            for key, exact in truth.items():
                error = (gradients[key].double() / factor - exact).norm() / exact.norm()
                # rounded logits (relative 2^-9 of numbers near 4), gradient entries and results; float16 is 8x finer
                # but its logits gradient of 1e-6 x 65536 x p also meets the subnormal spacing
                assert error < (0.04 if dtype == torch.bfloat16 else 0.01), error


def test_plans_follow_the_objective() -> None:
    """Which objectives need no other token: docs/design.md, plans."""

    def reason(objective: Any, on_policy: bool, **more: Any) -> str | None:
        zeros = torch.zeros(2, 3)
        absent = "mask ref_logprobs rollout_logprobs token_weights entropy_weights entropy_threshold cu_seqlens"
        inputs: dict[str, Any] = dict.fromkeys(absent.split())
        inputs |= {"advantages": torch.ones(2), "old_logprobs": None if on_policy else zeros} | more
        return why_not_row_local(objective, Given.of(make_batch(zeros.long(), "targets", **inputs)))

    zeros = torch.zeros(2, 3)
    for name in ("REINFORCE", "GPG", "CPI", "PPO", "PPOKL", "GRPO", "DrGRPO", "BNPO", "DAPO", "SAPO", "CISPO"):
        assert reason(OBJECTIVES[name], False) is None and reason(OBJECTIVES[name], True) is None
    for name in ("GSPO", "GSPOToken", "GMPO", "LUSPO", "VESPO"):
        assert reason(OBJECTIVES[name], False) is not None and reason(OBJECTIVES[name], True) is None
    for name in ("GSPO", "GMPO"):  # tokens that share a ratio share their weights' sum
        assert reason(OBJECTIVES[name], True, token_weights=zeros) is not None
        assert reason(OBJECTIVES[name], True, advantages=zeros) is not None
    assert reason(OBJECTIVES["VESPO"], True, rollout_logprobs=zeros) is not None
    assert reason(OBJECTIVES["DeepSeekV32"], True) is not None
    assert reason(OBJECTIVES["ratio sequence-product"], True) is not None
    assert reason(OBJECTIVES["objective's own ratio in the KL"], True) is not None
    assert reason(fastrl.PPO(top_entropy_fraction=0.2), True) is not None
    assert reason(fastrl.PPO(top_entropy_fraction=0.2), True, entropy_threshold=1.0) is None
    assert reason(fastrl.FIPO(), False) is not None and reason(fastrl.FIPO(), True) is None
    assert reason(fastrl.ClipCov(), True) is not None and reason(fastrl.KLCov(), True) is not None
    assert reason(OBJECTIVES["sequence TIS"], True) is not None and reason(OBJECTIVES["sequence TIS"], False) is None
    assert reason(lambda r, a, c: r, True) is not None


def test_in_place_on_a_view_keeps_the_view_s_own_backward(backend: str, backend_device: str) -> None:
    """Overwriting a view makes autograd rebuild its edge as as_strided, whose backward copies the whole tensor."""
    problem = Problem(backend_device)
    leaf = torch.randn(B, T + 1, V, device=backend_device, requires_grad=True)
    for name in ("GRPO", "GSPO"):
        common = {"objective": OBJECTIVES[name], **problem.arguments}
        logits = (leaf * 1)[:, :-1]
        loss = fastrl.logits_policy_loss(logits, inplace=True, **common).loss
        (actual,) = torch.autograd.grad(loss, leaf)
        names, todo = set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            names.add(type(node).__name__)
            todo += [following for following, _ in node.next_functions if following is not None]
        assert "SliceBackward0" in names and "AsStridedBackward0" not in names
        loss = fastrl.logits_policy_loss((leaf * 1)[:, :-1], **common).loss
        torch.testing.assert_close(actual, torch.autograd.grad(loss, leaf)[0], **CLOSE)
