"""Bad input, case by case: a clear error before any work, and nothing lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import needs_gpu
from refused import refused

import fastrl
from fastrl.backend import choice as backends
from fastrl.backend.contract import Transform
from fastrl.base import checks

B, T, V, H = 2, 3, 7, 4
LEAF = torch.zeros(B, T, V, requires_grad=True)
DENSE = "inplace=True needs logits that are dense"
CORRECTED = fastrl.PPO(rollout_correction=fastrl.RolloutCorrection())
TARGETS = {"targets": torch.zeros(B, T, dtype=torch.int64)}
LOGITS = {"logits": torch.zeros(B, T, V), **TARGETS}
HEAD = {"hidden": torch.zeros(B, T, H), "weight": torch.zeros(V, H), **TARGETS}
LOSS: dict[str, Any] = {"objective": fastrl.PPO(), "advantages": torch.ones(B)}


def token_logprobs(**changes: Any) -> Any:
    return fastrl.token_logprobs(**(LOGITS | changes))


def logits_policy_loss(**changes: Any) -> Any:
    return fastrl.logits_policy_loss(**(LOGITS | LOSS | changes))


def linear_policy_loss(**changes: Any) -> Any:
    return fastrl.linear_policy_loss(**(HEAD | LOSS | changes))


@refused(
    ({"targets": torch.zeros(B, T)}, TypeError, "targets must be torch.int64, got torch.float32"),
    ({"targets": [[0]]}, TypeError, "targets must be a tensor, got list"),
    ({"targets": torch.zeros(B, T + 1, dtype=torch.int64)}, ValueError, r"targets must have shape \(2, 3\)"),
    ({"targets": torch.zeros(B, T, dtype=torch.int32)}, TypeError, r"int64, got torch.int32: pass targets.long\(\)$"),
    ({"targets": torch.eye(B, T).long() * V}, IndexError, r"^targets\[0, 0\] is 7, outside \[0, 7\) and not masked"),
    ({"targets": torch.eye(B, T).flip(0).long() * -100}, IndexError, r"^targets\[0, 1\] is -100, outside"),
    (
        {"targets": torch.eye(B, T).flip(1).long() * V, "mask": torch.eye(B, T)},
        IndexError,
        r"^targets\[1, 1\] is 7, outs",
    ),
    ({"mask": torch.ones(B)}, ValueError, r"mask must have shape \(2, 3\)"),
    ({"mask": torch.full((B, T), 0.5)}, ValueError, "mask must hold only 0 and 1, got 0.5"),
    ({"mask": [1, 1]}, TypeError, "mask must be a tensor, got list"),
    ({"temperature": 0.0}, ValueError, "temperature must be finite and > 0, got 0.0"),
    ({"temperature": float("nan")}, ValueError, "temperature must be finite"),
    ({"temperature": "1"}, TypeError, "temperature must be a number, got str"),
    ({"temperature": torch.zeros(B, T)}, ValueError, "temperature must be finite and > 0 everywhere"),
    ({"temperature": torch.ones(T)}, ValueError, r"temperature must have shape \(2, 3\)"),
    ({"softcap": -1.0}, ValueError, "softcap must be finite and > 0, got -1.0"),
    ({"logit_scale": float("inf")}, ValueError, "logit_scale must be finite and > 0, got inf"),
    ({"logit_scale": -1.0}, ValueError, "logit_scale must be finite and > 0, got -1.0"),
    ({"sampling_mask": object()}, TypeError, "sampling_mask must be a fastrl.SamplingMask, got object"),
)
@pytest.mark.parametrize("function", [token_logprobs, logits_policy_loss, linear_policy_loss])
def test_vocabulary_arguments(changes: dict[str, Any], function: Callable[..., Any]) -> None:
    """The same check, whichever entry point the argument reaches."""
    function(**changes)


@refused(
    ({"objective": "grpo"}, TypeError, "objective must be an Objective or a callable, got str"),
    ({"objective": fastrl.PPO}, TypeError, r"got PPO itself: call it, as in PPO\(\.\.\.\)"),
    ({"objective": fastrl.Objective}, TypeError, "got Objective itself: call it"),
    ({"objective": fastrl.SoftGate}, TypeError, "got SoftGate itself: call it"),
    ({"advantages": torch.ones(B, 1)}, ValueError, r"advantages must have shape \(2,\), one per response, or \(2, 3\)"),
    ({"advantages": torch.ones(B, dtype=torch.int64)}, TypeError, "advantages must be floating point"),
    ({"advantages": [1.0, 1.0]}, TypeError, "advantages must be a tensor, got list"),
    ({"old_logprobs": torch.zeros(B)}, ValueError, r"old_logprobs must have shape \(2, 3\)"),
    ({"old_logprobs": torch.eye(B, T)}, ValueError, r"old_logprobs\[0, 0\] is 1, but a log-probability is at most 0"),
    ({"ref_logprobs": torch.eye(B, T).flip(0)}, ValueError, r"ref_logprobs\[0, 1\] is 1, but a log-probability is"),
    ({"objective": fastrl.GRPO()}, ValueError, r"ref_logprobs is needed by the objective's KL term \(k3\), got None"),
    ({"objective": CORRECTED}, ValueError, "rollout_logprobs is needed"),
    ({"denominator": 0}, ValueError, "denominator must be finite and > 0, got 0"),
    (
        {"denominator": torch.ones(1)},
        ValueError,
        r"denominator must have shape \(2,\) \(one per response, or.*got \(1,\)",
    ),
    ({"denominator": torch.ones(B, dtype=torch.complex64)}, TypeError, "denominator must be real, got torch.complex64"),
    ({"denominator": torch.tensor([3.0, 0.0])}, ValueError, "denominator must be finite and > 0, got 0 for response 1"),
    ({"denominator": torch.tensor([-1.0, 2.0])}, ValueError, "denominator must be finite and > 0, got -1 for response"),
    ({"denominator": torch.full((2,), torch.nan)}, ValueError, "denominator must be finite and > 0, got nan for resp"),
    ({"objective": fastrl.PPO(aggregate="prompt-mean")}, ValueError, "group_ids is needed by the objective's agg"),
    ({"group_ids": torch.ones(B)}, TypeError, "group_ids must be one of torch.uint8"),
    ({"group_ids": [1]}, ValueError, "group_ids must hold 2 ids, one per response, got 1"),
    ({"entropy_threshold": torch.ones(2)}, ValueError, "entropy_threshold must be a number or a 0-dim tensor"),
    ({"token_weights": torch.ones(B)}, ValueError, r"token_weights must have shape \(2, 3\)"),
    ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, r"targets must have shape \(tokens,\) beside cu_seqlens"),
)
@pytest.mark.parametrize("function", [logits_policy_loss, linear_policy_loss])
def test_loss_arguments(changes: dict[str, Any], function: Callable[..., Any]) -> None:
    function(**changes)


@refused(
    ({"logits": torch.zeros(B, T, V, dtype=torch.float64)}, TypeError, "logits must be one of torch.float32"),
    ({"logits": torch.zeros(B, T, V, dtype=torch.int32)}, TypeError, "logits must be one of"),
    ({"logits": torch.zeros(B, T, 0)}, ValueError, r"logits must have shape \(..., V\) with V >= 1"),
    ({"inplace": 1}, TypeError, "inplace must be a bool, got int"),
    ({"logits": LEAF[:, :1].expand(B, T, V), "inplace": True}, ValueError, DENSE),
    ({"logits": LEAF.view(B, V, T).transpose(1, 2), "inplace": True}, ValueError, DENSE),
)
def test_logits(changes: dict[str, Any]) -> None:
    logits_policy_loss(**changes)


@refused(
    ({"weight": torch.zeros(V, H + 1)}, ValueError, r"hidden must have shape \(..., H\) and weight \(V, H\)"),
    ({"weight": torch.zeros(V, H, dtype=torch.bfloat16)}, TypeError, "weight must be torch.float32 like hidden"),
    ({"hidden": torch.zeros(B, T, H, dtype=torch.float64)}, TypeError, "hidden must be one of torch.float32"),
    ({"bias": torch.zeros(H)}, ValueError, r"bias must have shape \(7,\)"),
    ({"bias": torch.zeros(V, dtype=torch.float16)}, TypeError, "bias must be torch.float32 like hidden"),
    ({"memory_budget": "256 apples"}, ValueError, r"memory_budget must be .* such as '256MiB' .*got '256 apples'"),
    ({"memory_budget": ""}, ValueError, "such as '256MiB'"),
    ({"memory_budget": "1iB"}, ValueError, "such as '256MiB'"),
    ({"memory_budget": 0}, ValueError, "memory_budget must be greater than 0, got 0"),
    ({"memory_budget": "0.1B"}, ValueError, "memory_budget must be greater than 0, got '0.1B'"),
    ({"memory_budget": 1.5}, TypeError, "memory_budget must be a number of bytes or a string .* got float"),
    ({"memory_budget": True}, TypeError, "memory_budget must be a number of bytes or a string .* got bool"),
    ({"memory_budget": "1KiB"}, ValueError, r"memory_budget is too small for 6 tokens .* smallest possible is \d+"),
    ({"tp_group": object()}, TypeError, "tp_group must be a torch.distributed.ProcessGroup, got object"),
    ({"num_tokens": 5}, ValueError, "num_tokens must be the number of unmasked tokens, 6, got 5"),
    ({"num_tokens": 6.0}, TypeError, "num_tokens must be an int, got float"),
)
def test_heads(changes: dict[str, Any]) -> None:
    linear_policy_loss(**changes)


@refused(
    (torch.tensor([0, 4]), TypeError, "cu_seqlens must be torch.int32"),
    (torch.tensor([0, 3], dtype=torch.int32), ValueError, "must rise from 0 to the number of tokens, 4"),
    (torch.tensor([0, 3, 2, 4], dtype=torch.int32), ValueError, "must rise from 0"),
    (torch.tensor([1, 4], dtype=torch.int32), ValueError, "must rise from 0"),
    (torch.tensor([[0, 4]], dtype=torch.int32), ValueError, "cu_seqlens must have shape"),
)
def test_cu_seqlens(cu_seqlens: torch.Tensor) -> None:
    fastrl.policy_loss(torch.zeros(4), objective=fastrl.PPO(), advantages=torch.ones(4), cu_seqlens=cu_seqlens)


@refused(
    (lambda: fastrl.Clip(low=-0.1), ValueError, "Clip.low must be >= 0, got -0.1"),
    (lambda: fastrl.Clip(high="a"), TypeError, "Clip.high must be a number, got 'a'"),
    (lambda: fastrl.PPO(dual_clip=1.0), ValueError, "Clip.dual must be > 1, got 1.0"),
    (lambda: fastrl.SAPO(tau_pos=0.0), ValueError, "SoftGate.tau_pos must be > 0"),
    (lambda: fastrl.KL("k4"), ValueError, "KL.kind must be one of k1, k2, k3"),
    (lambda: fastrl.KL("k3", torch.ones(2)), ValueError, "KL.coef must be a number or a 0-dim tensor"),
    (lambda: fastrl.PPO(aggregate="mean"), ValueError, "Objective.aggregate must be one of token-mean"),
    (lambda: fastrl.PPO(ratio="word"), ValueError, "Objective.ratio must be one of token, sequence"),
    (lambda: fastrl.PPO(aggregate="seq-mean-token-sum-norm"), ValueError, "Objective.max_length is needed"),
    (lambda: fastrl.PPO(max_log_ratio=100.0), ValueError, "Objective.max_log_ratio must be > 0 and <= 80"),
    (lambda: fastrl.PPO(top_entropy_fraction=1.5), ValueError, "Objective.top_entropy_fraction must be > 0"),
    (lambda: fastrl.FIPO(half_life=0.0), ValueError, "FutureKL.half_life must be > 0"),
    (lambda: fastrl.FIPO(low=1.1), ValueError, "FutureKL.low must be >= 0 and <= 1, got 1.1"),
    (lambda: fastrl.FIPO(high=0.9), ValueError, "FutureKL.high must be >= 1, got 0.9"),
    (lambda: fastrl.FIPO(safe_ratio=1.0), ValueError, "FutureKL.safe_ratio must be > 1, got 1.0"),
    (lambda: fastrl.ClipCov(fraction=0.0), ValueError, "CovarianceClip.fraction must be > 0 and <= 1, got 0.0"),
    (lambda: fastrl.ClipCov(cov_low=2.0, cov_high=2.0), ValueError, "CovarianceClip.high must be > 2, got 2.0"),
    (lambda: fastrl.ClipCov(generator=7), TypeError, "CovarianceClip.generator must be a torch.Generator or None"),
    (lambda: fastrl.KLCov(fraction=2), ValueError, "CovarianceKL.fraction must be > 0 and <= 1, got 2"),
    (lambda: fastrl.KLCov(coef="1"), TypeError, "CovarianceKL.coef must be"),
    (lambda: fastrl.Objective(future_kl=0.5), TypeError, "Objective.future_kl must be a FutureKL or None, got 0.5"),
    (lambda: fastrl.Objective(covariance=0.5), TypeError, "Objective.covariance must be a CovarianceClip, a"),
    (lambda: fastrl.PPO(kl=0.1), TypeError, "Objective.kl must be a KL or None, got 0.1"),
    (lambda: fastrl.Objective(gate="clip"), TypeError, "Objective.gate must be one of NoGate, Clip"),
    (lambda: fastrl.RolloutCorrection(mode="drop"), ValueError, "RolloutCorrection.mode must be"),
    (lambda: fastrl.RolloutCorrection("mean"), ValueError, "level must be one of token, sequence, sequence-mean, got"),
    (lambda: fastrl.RolloutCorrection(low=2, high=0.5), ValueError, r"RolloutCorrection.low must be < high, got 2 and"),
    (lambda: fastrl.RolloutCorrection(high=float("nan")), ValueError, "RolloutCorrection.high must be >= 0, got nan"),
    (
        lambda: fastrl.RolloutCorrection(reject=3),
        TypeError,
        r"reject must be None or two numbers, \(low, high\), got 3",
    ),
    (lambda: fastrl.RolloutCorrection(reject=(0.1, "2")), TypeError, r"reject\[1\] must be a number, got '2'"),
    (lambda: fastrl.RolloutCorrection(reject=(-1, 2)), ValueError, r"reject\[0\] must be >= 0, got -1"),
    (lambda: fastrl.RolloutCorrection(reject=(2, 2)), ValueError, r"reject\[0\] must be < reject\[1\], got 2 and 2"),
    (lambda: fastrl.RolloutCorrection(reject=(2, 9)), ValueError, r"reject must overlap \[low, high\] = \[0, 2\], got"),
    (
        lambda: fastrl.GRPO(clip_hi=0.3),
        TypeError,
        r"^GRPO\(\) got an .*'clip_hi'; did you mean clip_high\? It takes clip",
    ),
    (
        lambda: fastrl.CPO(zeta=1),
        TypeError,
        r"^CPO\(\) .* It takes beta, label_smoothing, nll_coef, average, reference, g",
    ),
    (lambda: fastrl.CISPO(cap=1.0, low=2.0), ValueError, "StopGradientClip.low must be >= 0 and <= 1"),
)
def test_objectives(make: Callable[[], Any]) -> None:
    make()


def test_a_masked_target_is_not_read() -> None:
    targets = torch.tensor([[0, -100, 1 << 40]] * B)
    mask = torch.tensor([[1, 0, 0]] * B)
    out = fastrl.token_logprobs(torch.zeros(B, T, V), targets, mask=mask)
    assert torch.equal(out.logprobs[:, 1:], torch.zeros(B, 2))


def test_an_index_error_leaves_the_logits_alone() -> None:
    leaf = torch.randn(B, T, V, requires_grad=True)
    logits = leaf * 1
    before = logits.detach().clone()
    with pytest.raises(IndexError):
        logits_policy_loss(logits=logits, targets=torch.full((B, T), V), inplace=True)
    assert torch.equal(logits, before)


def test_kernels_answer_a_bad_target_with_nan(backend: str, backend_device: str) -> None:
    """What a GPU does without `check_inputs()`: that token's log-probability is NaN, the others are right."""
    logits = torch.randn(1, 3, V, device=backend_device)
    targets = torch.tensor([1, V, -1], device=backend_device)
    found = backends.row_functions(backends.forced(), logits).row_statistics(logits, targets, None, Transform())
    assert found.logprobs.isnan().tolist() == [False, True, True]


@needs_gpu
def test_check_inputs_raises_on_a_gpu() -> None:
    logits, targets = torch.zeros(1, V, device="cuda"), torch.tensor([V], device="cuda")
    assert fastrl.token_logprobs(logits, targets).logprobs.isnan().all()
    with fastrl.check_inputs(), pytest.raises(IndexError):
        fastrl.token_logprobs(logits, targets)


def test_backends() -> None:
    assert set(fastrl.backends()) == {"triton", "cpp", "torch"} and fastrl.backends()["torch"] == "available"
    words = "backend must be one of triton, cpp, torch, got 'cuda'"
    with pytest.raises(ValueError, match=words), fastrl.use_backend("cuda"):
        pass


def test_a_missing_backend_says_why_and_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    module = backends._module("cpp")
    monkeypatch.setattr(module, "why_unavailable", lambda: "no compiler in this test")
    for cached in (backends._why_unavailable, backends._default, backends._chosen):
        cached.cache_clear()
    try:
        assert fastrl.backends()["cpp"] == "no compiler in this test"
        with pytest.raises(RuntimeError, match="cpp backend is not available: no compiler"), fastrl.use_backend("cpp"):
            pass
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                out = fastrl.token_logprobs(torch.zeros(1, V), torch.zeros(1, dtype=torch.int64))
        words = "fastrl falls back to plain torch on cpu, which is slower: no compiler in this test"
        assert [str(w.message) for w in caught] == [words]
        torch.testing.assert_close(out.logprobs, -torch.tensor([float(V)]).log())
    finally:
        for cached in (backends._why_unavailable, backends._default, backends._chosen):
            cached.cache_clear()


def test_tensors_on_two_devices() -> None:
    with pytest.raises(ValueError, match="mask must be on cpu like targets, got meta"):
        checks.same_device("mask", torch.ones(1, device="meta"), torch.ones(1), "targets")
