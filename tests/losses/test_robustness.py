"""Legal but unusual inputs: infinities, strides, other defaults, second derivatives, wrong counts, empty batches."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from objectives import OBJECTIVES
from problem import CLOSE, B, Problem, T, V, assert_same

import fastrl
from fastrl.objectives.objective import Objective

_OTHER_DEFAULTS = """
import sys, torch, fastrl
torch.manual_seed(0)
logits, weight = torch.randn(3, 4, 9), torch.randn(9, 5)
hidden, targets = torch.randn(3, 4, 5), torch.randint(9, (3, 4))
old, advantages = torch.full((3, 4), -2.0), torch.tensor([1.0, -1.0, 0.5])
expected = []
for setting in (None, *sys.argv[1:]):
    if setting in ("float64", "bfloat16"):
        torch.set_default_dtype(getattr(torch, setting))
    elif setting:
        torch.set_default_device(setting)
    for name in ("torch", "cpp"):
        with fastrl.use_backend(name):
            common = dict(objective=fastrl.SAPO(entropy_coef=0.1), advantages=advantages, old_logprobs=old)
            x = logits.clone().requires_grad_()
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            a = fastrl.logits_policy_loss(x * 1, targets, inplace=True, **common)
            b = fastrl.linear_policy_loss(h, w, targets, **common)
            (a.loss + b.loss).backward()
            found = [a.loss, b.loss, x.grad, h.grad, w.grad, *a.metrics.values(), *b.metrics.values()]
            found = [y.detach() for y in found]
            assert all(y.dtype == torch.float32 and y.device.type == "cpu" for y in found), (setting, name)
            expected = expected or found
            for y, e in zip(found, expected):
                torch.testing.assert_close(y, e, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize("setting", ["float64", "bfloat16", "meta"])
def test_torch_s_defaults_change_nothing(setting: str) -> None:
    """Kernels write float32 where the data is, whatever torch's default dtype and device; a crash shows as a status."""
    done = subprocess.run([sys.executable, "-c", _OTHER_DEFAULTS, setting], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["GRPO", "SAPO", "CISPO", "GSPO", "REINFORCE", "TIS", "kl k2"])
def test_probability_zero_everywhere(backend: str, backend_device: str, name: str) -> None:
    """-inf as old, reference and rollout log-probability, and -inf logits: finite, and the same by every route."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, V, generator=g).to(backend_device)
    targets = torch.randint(V, (B, T), generator=g).to(backend_device)
    logits[1, 1, targets[1, 1]] = -torch.inf
    problem = Problem(backend_device, on_policy=False)
    arguments: dict[str, Any] = {**problem.arguments, "mask": None, "token_weights": torch.ones_like(logits[..., 0])}
    for i, key in enumerate(("old_logprobs", "ref_logprobs", "rollout_logprobs")):
        arguments[key] = arguments[key].clone()
        arguments[key][0, i] = -torch.inf
        arguments[key][1, 1] = -torch.inf  # all of them, and the current policy
    arguments["token_weights"][1, 1] = 0  # REINFORCE's own loss there is infinite
    found = []
    for inplace in (True, False):
        leaf = logits.clone().requires_grad_()
        out = fastrl.logits_policy_loss(leaf * 1, targets, objective=OBJECTIVES[name], inplace=inplace, **arguments)
        out.loss.backward()
        assert out.loss.isfinite() and leaf.grad is not None and leaf.grad.isfinite().all()
        found.append((out.loss, leaf.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_strided_per_token_inputs(backend: str, backend_device: str) -> None:
    """Columns of a larger tensor, as a packed batch may keep them."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(6, V, generator=g).to(backend_device)
    targets = torch.randint(V, (6,), generator=g).to(backend_device)
    wide = torch.randn(6, 4, generator=g).to(backend_device)
    columns = dict(zip(("advantages", "old_logprobs", "ref_logprobs", "token_weights"), wide.T, strict=True))
    found = []
    for change in (lambda x: x, torch.Tensor.contiguous):
        arguments = {k: change(v) for k, v in columns.items()}
        leaf = logits.clone().requires_grad_()
        out = fastrl.logits_policy_loss(leaf * 1, targets, objective=fastrl.GRPO(), inplace=True, **arguments)
        out.loss.backward()
        found.append((out.loss, leaf.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_second_derivatives_are_refused_not_dropped(backend: str, backend_device: str) -> None:
    problem = Problem(backend_device, on_policy=False)
    for objective in (fastrl.SAPO(), fastrl.GSPO()):
        hidden = problem.hidden.clone().requires_grad_()
        loss = fastrl.linear_policy_loss(
            hidden, problem.weight, problem.targets, objective=objective, **problem.arguments
        ).loss
        with pytest.raises(RuntimeError, match=r"differentiable once|differentiate twice|no autograd formula"):
            torch.autograd.grad(torch.autograd.grad(loss, hidden, create_graph=True)[0].sum(), hidden)


def test_a_callable_s_graph_is_freed_and_guarded_like_any_other(backend: str, backend_device: str) -> None:
    def loss(log_ratio: torch.Tensor, advantages: torch.Tensor, context: fastrl.LossContext) -> torch.Tensor:
        return -log_ratio.exp() * advantages

    loss.row_local = True
    problem = Problem(backend_device, on_policy=False)
    hidden, weight = problem.hidden.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    out = fastrl.linear_policy_loss(hidden, weight, problem.targets, objective=loss, **problem.arguments).loss
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()
    out = fastrl.linear_policy_loss(hidden, weight, problem.targets, objective=loss, **problem.arguments).loss
    with torch.no_grad():
        weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("row_local", [False, True])
def test_a_callable_may_return_a_constant(backend: str, backend_device: str, row_local: bool) -> None:
    def loss(log_ratio: torch.Tensor, advantages: torch.Tensor, context: fastrl.LossContext) -> torch.Tensor:
        return torch.ones_like(advantages)

    loss.row_local = row_local
    problem = Problem(backend_device, on_policy=False)
    out, gradients = problem.by_hidden(loss)
    assert out.loss == 1 and all(g.abs().sum() == 0 for g in gradients)
    assert out.metrics["clip_frac"].isnan() and out.metrics["gate_mean"].isnan()


def test_gates_with_a_ratio_of_their_own(backend: str, backend_device: str) -> None:
    assert Objective(gate=fastrl.GammaWeight()).ratio == "sequence-product"
    assert Objective(gate=fastrl.GeometricMean()).ratio == "sequence"
    for make in (
        lambda: fastrl.VESPO(ratio="sequence"),
        lambda: fastrl.GMPO(ratio="sequence-product"),
        lambda: Objective(gate=fastrl.GammaWeight(), ratio="sequence-token"),
    ):
        with pytest.raises(ValueError, match=r"Objective.ratio must be 'sequence"):
            make()
    problem = Problem(backend_device, on_policy=False)
    same = [problem.by_logprobs(o) for o in (fastrl.VESPO(), Objective(gate=fastrl.GammaWeight()))]
    assert_same(*same, "VESPO by its gate")


@pytest.mark.parametrize(
    "backend", ["cpp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "triton"))], indirect=True
)
def test_transposed_heads_compile(backend: str, backend_device: str) -> None:
    """A compiled graph trusts the strides that the operators' fakes announce."""
    torch.compiler.reset()
    problem = Problem(backend_device, on_policy=False)
    weight = problem.weight.T.contiguous().T.requires_grad_()
    hidden = problem.hidden.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for objective in (fastrl.SAPO(), fastrl.GSPO()):

        def loss(h: torch.Tensor, w: torch.Tensor, objective: Objective = objective) -> torch.Tensor:
            return fastrl.linear_policy_loss(h, w, problem.targets, objective=objective, **problem.arguments).loss

        expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
        actual = torch.autograd.grad(torch.compile(loss, fullgraph=True)(hidden, weight), (hidden, weight))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, **CLOSE)


def test_a_denominator_gets_no_gradient() -> None:
    denominator = torch.tensor(3.0, requires_grad=True)
    logp = torch.zeros(2, 3, requires_grad=True)
    fastrl.policy_loss(logp, objective=fastrl.PPO(), advantages=torch.ones(2), denominator=denominator).loss.backward()
    assert denominator.grad is None


def test_a_temperature_under_the_mask_is_not_read(backend: str, backend_device: str) -> None:
    logits = torch.randn(1, 2, V, device=backend_device, requires_grad=True)
    mask = torch.tensor([[True, False]], device=backend_device)
    temperature = torch.tensor([[2.0, 0.0]], device=backend_device)
    targets = torch.zeros(1, 2, dtype=torch.int64, device=backend_device)
    out = fastrl.token_logprobs(logits, targets, mask=mask, temperature=temperature, entropy=True)
    (out.logprobs + out.entropy).sum().backward()
    assert out.logprobs.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3)], ids=["no responses", "no tokens", "all masked"])
@pytest.mark.parametrize("name", ["GRPO", "SAPO", "GSPO", "VESPO", "DeepSeekV32"])
def test_empty_batches_reach_every_input(backend: str, backend_device: str, name: str, shape: tuple[int, int]) -> None:
    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(*size, device=backend_device, requires_grad=True)

    targets = torch.full(shape, -100, device=backend_device)
    numbers = torch.zeros(shape, device=backend_device)
    common: dict[str, Any] = {
        "objective": OBJECTIVES[name],
        "advantages": torch.ones(shape[0], device=backend_device),
        "mask": torch.zeros(shape, device=backend_device),
        "old_logprobs": numbers,
        "ref_logprobs": numbers,
    }
    for inplace in (False, True):
        logits = zeros(*shape, V)
        out = fastrl.logits_policy_loss(logits * 1, targets, inplace=inplace, **common)
        out.loss.backward()
        assert out.loss == 0 and logits.grad is not None and logits.grad.abs().sum() == 0
    hidden, weight = zeros(*shape, 4), zeros(V, 4)
    out = fastrl.linear_policy_loss(hidden, weight, targets, **common)
    out.loss.backward()
    assert out.loss == 0
    for x in (hidden, weight):
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.abs().sum() == 0


def test_no_tokens_are_not_broadcast() -> None:
    """Strides of 0 write nothing twice where there is nothing."""
    logits = torch.zeros(5, 0, V).as_strided((5, 0, V), (0, V, 1)).requires_grad_()
    arguments: dict[str, Any] = {"objective": fastrl.PPO(), "advantages": torch.ones(5), "inplace": True}
    assert fastrl.logits_policy_loss(logits, torch.zeros(5, 0, dtype=torch.int64), **arguments).loss == 0


def test_float16_with_large_ratios(backend: str, backend_device: str) -> None:
    """A coefficient of w A r with r = e^10 fits float16 once it is scaled by what it is, not by w A."""
    problem = Problem(backend_device, on_policy=False)
    hidden, weight = (x.half().requires_grad_() for x in (problem.hidden, problem.weight / 3))
    arguments = problem.arguments | {"old_logprobs": torch.full((B, T), -14.0, device=backend_device)}
    arguments["advantages"] = -torch.ones(B, device=backend_device)
    fastrl.linear_policy_loss(
        hidden, weight, problem.targets, objective=fastrl.PPO(), denominator=1e6, **arguments
    ).loss.backward()
    for x in (hidden, weight):
        assert x.grad is not None and x.grad.isfinite().all() and x.grad.abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["GRPO", "DAPO", "GSPO", "SAPO", "GMPO", "DrGRPO", "LUSPO"])
def test_no_host_sync_on_a_gpu(name: str) -> None:
    problem = Problem("cuda", on_policy=False)
    leaves = problem.leaves()
    logits = torch.randn(B, T, V, device="cuda", requires_grad=True)
    common = {"objective": OBJECTIVES[name], "denominator": 3.0, "entropy_threshold": 0.1, **problem.arguments}

    def run() -> None:
        out = fastrl.linear_policy_loss(*leaves[:2], problem.targets, bias=leaves[2], num_tokens=7, **common)
        out.loss.backward()
        for inplace in (False, True):
            fastrl.logits_policy_loss(logits * 1, problem.targets, inplace=inplace, **common).loss.backward()

    run()  # compilation may synchronise
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["GRPO", "GSPO", "DeepSeekV32"])
def test_one_host_sync_without_the_number_of_tokens(name: str) -> None:
    """One for all counts in the forward, at most one in the backward."""
    problem = Problem("cuda", on_policy=False)
    leaves = problem.leaves()
    common = {"objective": OBJECTIVES[name], "denominator": 3.0, **problem.arguments}
    fastrl.linear_policy_loss(*leaves[:2], problem.targets, **common).loss.backward()  # compilation may synchronise
    counts = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = fastrl.linear_policy_loss(*leaves[:2], problem.targets, **common).loss
            counts.append(sum("synchronizing" in str(w.message) for w in caught))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss.backward()
            counts.append(sum("synchronizing" in str(w.message) for w in caught))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert max(counts) <= 1, counts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_wrong_num_tokens_gives_nan_on_a_gpu() -> None:
    problem = Problem("cuda", on_policy=False)
    for wrong in (6, 8):
        assert problem.by_hidden(OBJECTIVES["GRPO"], num_tokens=wrong)[0].loss.isnan()
