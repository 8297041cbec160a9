"""Legal but unusual inputs: infinities, strides, other defaults, second derivatives, wrong counts, empty batches."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gpu import host_synchronisation, needs_gpu
from objectives import OBJECTIVES
from problem import CLOSE, B, H, Problem, T, V, assert_same
from python import python
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fastrl
from fastrl.base import checks
from fastrl.losses.low_rank import low_rank_token_logprobs
from fastrl.objectives.objective import Objective
from fastrl.passes import forward_gradient
from fastrl.planning.plans import use_plan

DAPO = fastrl.DAPO()
_OTHER_DEFAULTS = """
import sys, torch, fastrl
torch.manual_seed(0)
logits, weight = torch.randn(3, 4, 9), torch.randn(9, 5)
hidden, targets = torch.randn(3, 4, 5), torch.randint(9, (3, 4))
old, advantages = torch.full((3, 4), -2.0), torch.tensor([1.0, -1.0, 0.5])
expected = []
for setting in (None, *sys.argv[1:]):
    print(setting, flush=True)
    torch.set_default_dtype(getattr(torch, setting) if setting in ("float64", "bfloat16") else torch.float32)
    torch.set_default_device(setting if setting == "meta" else "cpu")
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
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
"""


def test_torch_s_defaults_change_nothing() -> None:
    """Kernels write float32 where the data is, whatever torch's default dtype and device; a crash shows as a status."""
    python("-c", _OTHER_DEFAULTS, "float64", "bfloat16", "meta")


@pytest.mark.parametrize("name", ["GRPO", "SAPO", "CISPO", "GSPO", "REINFORCE", "TIS", "kl k2"])
def test_probability_zero_everywhere(backend: str, backend_device: str, name: str) -> None:
    """-inf as old, reference and rollout log-probability, and -inf logits: finite, and the same by every route."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, V, generator=g).to(backend_device)
    targets = torch.randint(V, (B, T), generator=g).to(backend_device)
    logits[1, 1, targets[1, 1]] = -torch.inf
    problem = Problem(backend_device)
    arguments: dict[str, Any] = {**problem.arguments, "mask": None, "token_weights": torch.ones_like(logits[..., 0])}
    arguments["targets"] = targets
    for i, key in enumerate(("old_logprobs", "ref_logprobs", "rollout_logprobs")):
        arguments[key] = arguments[key].clone()
        arguments[key][0, i] = -torch.inf
        arguments[key][1, 1] = -torch.inf  # all of them, and the current policy
    arguments["token_weights"][1, 1] = 0  # REINFORCE's own loss there is infinite
    found = []
    for inplace in (True, False):
        leaf = logits.clone().requires_grad_()
        out = fastrl.logits_policy_loss(leaf * 1, objective=OBJECTIVES[name], inplace=inplace, **arguments)
        out.loss.backward()
        assert out.loss.isfinite() and leaf.grad is not None and leaf.grad.isfinite().all()
        found.append((out.loss, leaf.grad))
    torch.testing.assert_close(*found, **CLOSE)


@pytest.mark.parametrize("name", ["REINFORCE", "CISPO", "VESPO", "IcePop", "TOPR", "DPPO tv", "DPPO kl"])
def test_probability_zero_without_a_weight(backend: str, backend_device: str, name: str) -> None:
    """A token of probability 0 loses nothing where its advantage is 0, or where IcePop drops it."""
    gates = {"REINFORCE": fastrl.REINFORCE(), "CISPO": fastrl.CISPO(), "VESPO": fastrl.VESPO(), "TOPR": fastrl.TOPR()}
    gates |= {"IcePop": fastrl.IcePop(), "DPPO tv": fastrl.DPPO("tv"), "DPPO kl": fastrl.DPPO("kl")}
    logits = torch.zeros(2, 3, 5, device=backend_device)
    logits[:, 1, 4] = -torch.inf
    targets = torch.full((2, 3), 4, device=backend_device)
    rollout = torch.full((2, 3), -1.6, device=backend_device)
    rollout[0, 1] = -torch.inf  # beside a finite old one
    advantages = torch.tensor([[1.0, 0.0, -1.0], [-2.0, -1.0 if name == "IcePop" else 0.0, 0.5]], device=backend_device)
    old = torch.full_like(rollout, -1.5)
    for inplace in (True, False):
        leaf = logits.clone().requires_grad_()
        loss = fastrl.logits_policy_loss(
            leaf * 1,
            targets,
            objective=gates[name],
            advantages=advantages,
            old_logprobs=old,
            rollout_logprobs=rollout,
            inplace=inplace,
        ).loss
        loss.backward()
        assert loss.isfinite() and leaf.grad is not None and leaf.grad.isfinite().all()
        assert not leaf.grad[:, 1].any() and leaf.grad[0, 0].any()


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
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_second_derivatives_are_refused_not_dropped(backend: str, backend_device: str) -> None:
    problem = Problem(backend_device)
    logits = torch.randn(B, T, V, device=backend_device, requires_grad=True)
    for objective in (fastrl.GRPO(), fastrl.SAPO(), fastrl.GSPO()):
        leaves = problem.leaves()
        common = {"objective": objective, **problem.arguments}
        for loss, leaf in (
            (fastrl.linear_policy_loss(**leaves, **common).loss, leaves["hidden"]),
            (fastrl.logits_policy_loss(logits, **common).loss, logits),
        ):
            with pytest.raises(RuntimeError, match=r"differentiable once|differentiate twice|no autograd formula"):
                torch.autograd.grad(torch.autograd.grad(loss, leaf, create_graph=True)[0].square().sum(), leaf)


def test_a_callable_s_graph_is_freed_and_its_gradients_are_ready(backend: str, backend_device: str) -> None:
    def loss(log_ratio: torch.Tensor, advantages: torch.Tensor, context: fastrl.LossContext) -> torch.Tensor:
        return -log_ratio.exp() * advantages

    loss.row_local = True
    problem = Problem(backend_device)
    leaves = problem.leaves()
    out = fastrl.linear_policy_loss(**leaves, objective=loss, **problem.arguments).loss
    first = torch.autograd.grad(out, list(leaves.values()))
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()
    out = fastrl.linear_policy_loss(**leaves, objective=loss, **problem.arguments).loss
    with torch.no_grad():
        leaves["weight"] += 1
    assert all(map(torch.equal, torch.autograd.grad(out, list(leaves.values())), first))


@pytest.mark.parametrize("row_local", [False, True])
def test_a_callable_may_return_a_constant(backend: str, backend_device: str, row_local: bool) -> None:
    def loss(log_ratio: torch.Tensor, advantages: torch.Tensor, context: fastrl.LossContext) -> torch.Tensor:
        return torch.ones_like(advantages)

    loss.row_local = row_local
    problem = Problem(backend_device)
    out, gradients = problem.by_hidden(loss)
    assert out.loss == 1 and all(g.abs().sum() == 0 for g in gradients.values())
    assert out.metrics["clip_frac"].isnan() and out.metrics["gate_mean"].isnan()


def test_nan_reaches_the_gradients_of_a_head_where_the_loss_stops_its_row(backend: str, backend_device: str) -> None:
    """As from 0 * NaN in torch: a step with such a gradient is known to be wrong."""
    head = Problem(backend_device).head
    hidden, weight = head["hidden"].detach()[0].clone(), head["weight"].detach().requires_grad_()
    hidden[1, 0] = torch.nan
    hidden.requires_grad_()
    logprobs = fastrl.linear_token_logprobs(hidden, weight, torch.zeros(T, dtype=torch.int64, device=weight.device))
    stopped = torch.arange(T, device=weight.device) == 1
    torch.where(stopped, 0.0, logprobs.logprobs).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.isnan().all(1).tolist() == stopped.tolist() and weight.grad.isnan().any()


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
    problem = Problem(backend_device)
    same = [problem.by_logprobs(o) for o in (fastrl.VESPO(), Objective(gate=fastrl.GammaWeight()))]
    assert_same(*same, "VESPO by its gate")


def test_prompts_and_corrections_compile() -> None:
    torch.compiler.reset()
    problem = Problem("cpu")
    logp = problem.by_logprobs(fastrl.PPO())[0].logprobs.requires_grad_()
    given = problem.of_policy_loss()
    for level in ("token", "sequence-mean"):
        correction = fastrl.RolloutCorrection(level, high=1.1, reject=(0.5, 3.0))
        objective = fastrl.PPO(aggregate="prompt-mean", rollout_correction=correction)

        def outcome(x: torch.Tensor, objective: Objective = objective) -> tuple[torch.Tensor, torch.Tensor]:
            out = fastrl.policy_loss(x, objective=objective, **given)
            return out.loss, out.metrics["rollout_ess"]

        compiled = torch.compile(outcome, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(logp), outcome(logp))


@pytest.mark.slow  # tests/operators compiles a head by inductor too
@pytest.mark.parametrize("backend", ["cpp"], indirect=True)
def test_transposed_heads_compile(backend: str, backend_device: str) -> None:
    """A compiled graph trusts the strides that the operators' fakes announce, which are the same for all backends."""
    torch.compiler.reset()
    problem = Problem(backend_device)
    weight = problem.head["weight"].T.contiguous().T.requires_grad_()
    hidden = problem.head["hidden"].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for objective in (fastrl.SAPO(), fastrl.GSPO()):

        def loss(h: torch.Tensor, w: torch.Tensor, objective: Objective = objective) -> torch.Tensor:
            return fastrl.linear_policy_loss(h, w, objective=objective, **problem.arguments).loss

        expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
        actual = torch.autograd.grad(torch.compile(loss, fullgraph=True)(hidden, weight), (hidden, weight))
        torch.testing.assert_close(actual, expected, **CLOSE)


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
    problem, objective = Problem(backend_device, size=(*shape, H, V), mask=torch.zeros(shape)), OBJECTIVES[name]
    for out, gradients in (
        problem.by_hidden(objective),
        problem.by_logits(objective),
        problem.by_logits(objective, inplace=True),
    ):
        assert out.loss == 0
        for key, gradient in gradients.items():
            assert gradient.shape == problem.head[key].shape and gradient.abs().sum() == 0


def test_no_tokens_are_not_broadcast() -> None:
    """Strides of 0 write nothing twice where there is nothing."""
    logits = torch.zeros(5, 0, V).as_strided((5, 0, V), (0, V, 1)).requires_grad_()
    arguments: dict[str, Any] = {"objective": fastrl.PPO(), "advantages": torch.ones(5), "inplace": True}
    assert fastrl.logits_policy_loss(logits, torch.zeros(5, 0, dtype=torch.int64), **arguments).loss == 0


def test_float16_with_large_ratios(backend: str, backend_device: str) -> None:
    """A coefficient of w A r with r = e^10 fits float16 once it is scaled by what it is, not by w A."""
    problem = Problem(backend_device, dtype=torch.float16)
    problem.arguments["old_logprobs"] = torch.full((B, T), -14.0, device=backend_device)
    problem.arguments["advantages"] = -torch.ones(B, device=backend_device)
    for gradient in problem.by_hidden(fastrl.PPO(), denominator=1e6)[1].values():
        assert gradient.isfinite().all() and gradient.abs().sum() > 0


@needs_gpu
@pytest.mark.parametrize("name", ["GRPO", "DAPO", "GSPO", "SAPO", "GMPO", "DrGRPO", "LUSPO"])
def test_no_host_sync_on_a_gpu(name: str) -> None:
    problem = Problem("cuda")
    leaves = problem.leaves()
    logits = torch.randn(B, T, V, device="cuda", requires_grad=True)
    common = {"objective": OBJECTIVES[name], "denominator": 3.0, "entropy_threshold": 0.1, **problem.arguments}

    def run() -> None:
        fastrl.linear_policy_loss(**leaves, num_tokens=7, **common).loss.backward()
        for inplace in (False, True):
            fastrl.logits_policy_loss(logits * 1, inplace=inplace, **common).loss.backward()

    run()  # compilation may synchronise
    with host_synchronisation("error"):
        run()


@needs_gpu
@pytest.mark.parametrize("name", ["GRPO", "GSPO", "DeepSeekV32"])
def test_one_host_sync_without_the_number_of_tokens(name: str) -> None:
    """One for all counts in the forward, at most one in the backward."""
    problem = Problem("cuda")
    common = {"objective": OBJECTIVES[name], "denominator": 3.0, **problem.leaves(), **problem.arguments}
    fastrl.linear_policy_loss(**common).loss.backward()  # compilation may synchronise

    def waits(call: Callable[[], Any]) -> tuple[Any, int]:
        with host_synchronisation("warn"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = call()
        return result, sum("synchronizing" in str(w.message) for w in caught)

    for _ in range(2):
        out, in_forward = waits(lambda: fastrl.linear_policy_loss(**common))
        _, in_backward = waits(out.loss.backward)
        assert max(in_forward, in_backward) <= 1, (in_forward, in_backward)


@needs_gpu
def test_a_wrong_num_tokens_gives_nan_on_a_gpu() -> None:
    problem = Problem("cuda")
    for wrong in (6, 8):
        assert problem.by_hidden(OBJECTIVES["GRPO"], num_tokens=wrong)[0].loss.isnan()


@pytest.mark.parametrize("name", ["GRPO", "GSPO", "DAPO"])
@pytest.mark.parametrize("ends", [(0, 3, 6), (1, 3, 8), (0, 3, 9), (0, 3, 100_000), (0, 9, 2, 8), (-1, 3, 8)], ids=str)
def test_cu_seqlens_that_do_not_cover_the_tokens_give_nan_where_they_are_not_read(
    name: str, ends: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, where an index out of range would end all of the process's work, and a read would wait."""
    monkeypatch.setattr(checks, "values_are_checked", lambda tensor: checks.always)  # on a CPU as on a GPU
    logits, tokens = torch.randn(8, 50, device=device, requires_grad=True), torch.zeros(8, device=device)
    given = {"old_logprobs": tokens - 4, "ref_logprobs": tokens - 4.5}
    given |= {"targets": tokens.long(), "objective": OBJECTIVES[name]}

    def gradient(*ends: int) -> Tensor:
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
        given["advantages"] = torch.ones(len(ends) - 1, device=device)
        loss = fastrl.logits_policy_loss(logits, **given, cu_seqlens=cu_seqlens).loss
        assert loss.isnan() == (ends != (0, 3, 8))
        found: Tensor = torch.autograd.grad(loss, logits)[0]
        return found

    wrong = gradient(*ends)
    assert (wrong.isnan() | (wrong == 0)).all()  # a NaN ratio is outside every clip: 0
    assert gradient(0, 3, 8).isfinite().all()
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    given |= {"cu_seqlens": cu_seqlens, "advantages": torch.ones(len(ends) - 1, device=device)}
    hidden, weight = (torch.randn(n, 4, device=device, requires_grad=True) for n in (8, 50))
    if name == "GSPO":  # its plan waits for the host anyway, which then can say what is wrong
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of tokens, 8, or to less"):
            fastrl.linear_policy_loss(hidden, weight, **given)
    else:
        assert fastrl.linear_policy_loss(hidden, weight, **given).loss.isnan()


def test_checkpointing_around_a_loss_drops_its_gradients_and_forms_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Non-reentrant: no gradient is alive between forward and backward, which run the kernel once each."""
    formed: list[Any] = []
    real = forward_gradient.forward_gradient

    def noted(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        formed.append([weakref.ref(gradient) for gradient in found[1] if gradient is not None])
        return found

    monkeypatch.setattr(forward_gradient, "forward_gradient", noted)
    problem = Problem("cpu")
    expected = problem.by_hidden(fastrl.DAPO())[1]
    formed.clear()
    leaves = problem.leaves()

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        given = dict(zip(leaves, inputs, strict=True))
        return fastrl.linear_policy_loss(**given, objective=fastrl.DAPO(), **problem.arguments).loss

    value = checkpoint(loss, *leaves.values(), use_reentrant=False)
    assert len(formed) == 1 and formed[0] and all(gradient() is None for gradient in formed[0])
    value.backward()
    assert len(formed) == 2
    assert all(torch.equal(leaves[name].grad, gradient) for name, gradient in expected.items())


def test_every_function_refuses_a_graph_of_its_backward(backend: str, backend_device: str) -> None:
    """Also where nothing asks for the second derivative: a graph that stops here would stop in silence."""
    problem = Problem(backend_device)
    leaves, targets = problem.leaves(), problem.arguments["targets"].clamp_min(0)
    logits = torch.randn(B, T, V, device=backend_device, requires_grad=True)
    ids = targets[..., None]
    down, up = (torch.randn(*shape, 2, device=backend_device, requires_grad=True) for shape in ((B, T), (V,)))
    head = (leaves["hidden"], leaves["weight"])
    calls = [
        (fastrl.token_logprobs(logits, targets).logprobs, logits),
        (fastrl.linear_token_logprobs(*head, targets).logprobs, head[0]),
        (fastrl.gathered_logprobs(logits, ids), logits),
        (fastrl.linear_gathered_logprobs(*head, ids), head[0]),
        (low_rank_token_logprobs(*head, targets, down=down, up=up).logprobs, down),
        (fastrl.logits_policy_loss(logits, objective=DAPO, **problem.arguments).loss, logits),
        (fastrl.linear_policy_loss(**leaves, objective=DAPO, **problem.arguments).loss, head[0]),
    ]
    for result, leaf in calls:
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(result.sum(), leaf, create_graph=True)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("inplace", [False, True])
def test_an_upstream_gradient_that_there_is_not(inplace: bool) -> None:
    problem = Problem("cpu")
    leaves, leaf = problem.leaves(), torch.randn(B, T, V, requires_grad=True)
    losses = [
        fastrl.logits_policy_loss(leaf * 1, objective=DAPO, inplace=inplace, **problem.arguments).loss,
        fastrl.linear_policy_loss(**leaves, objective=DAPO, **problem.arguments).loss,
        fastrl.linear_policy_loss(**leaves, objective=fastrl.GSPO(), **problem.arguments).loss,
    ]
    for loss in losses:
        NoGradient.apply(loss).backward()
    assert all(x.grad is None for x in (leaf, *leaves.values()))


@pytest.mark.parametrize("plan", ["forward-gradient", "recompute", "two-pass"])
def test_selective_checkpointing_that_saves_every_operator(plan: str) -> None:
    hidden, weight = torch.randn(6, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    given = {"targets": torch.arange(6), "advantages": torch.randn(6), "old_logprobs": torch.randn(6) - 3}

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with use_plan(plan):
            return fastrl.linear_policy_loss(hidden, weight, objective=DAPO, **given).loss

    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    value = checkpoint(loss, hidden, weight, use_reentrant=False, context_fn=contexts)
    expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    assert all(map(torch.equal, torch.autograd.grad(value, (hidden, weight)), expected))
