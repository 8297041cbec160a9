"""c = dL/dlogp of every gate and every KL estimator, swept over log ratios and d in [-20, 20], by every entry point."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from coefficients import (
    ESTIMATORS,
    GATES,
    Sweep,
    assert_coefficients,
    edges,
    for_gate,
    of_kl,
    of_logprobs,
    of_policy,
    sweep,
)
from torch import Tensor

import fastrl
from fastrl.integrations.losses_from_logits import token_losses
from fastrl.objectives.gates import NoGate
from fastrl.objectives.objective import KL, Objective

SIZE = 20_000
#: logp = 0, so that old = -x and ref = d are exact whatever x and d are
FINE = sweep(SIZE, 2.0**-40)
FINE = Sweep(*(t.float().double() for t in FINE))
#: logp = -20, which log-softmax answers exactly for logits (-20, 0); old and ref are exact for multiples of this
COARSE = sweep(SIZE, 2.0**-18, seed=1)
LEVELS = ("token", "sequence", "sequence-token", "sequence-product")


def from_logprobs(objective: Objective, s: Sweep, length: int = 1) -> Tensor:
    """Of `policy_loss`, with weight 1 for every token of responses of this length."""
    logp = s.logp.float().view(-1, length).requires_grad_()
    tokens = {"advantages": s.a, "old_logprobs": s.logp - s.x, "ref_logprobs": s.logp + s.d}
    tokens = {k: x.float().view_as(logp) for k, x in tokens.items()}
    loss = fastrl.policy_loss(logp, objective=objective, denominator=1, **tokens).loss
    return torch.autograd.grad(loss, logp)[0].flatten()


def from_logits(objective: Objective, s: Sweep, device: str) -> tuple[Tensor, Sweep]:
    """Of `logits_policy_loss`: dL/dx at a target of probability p is c (1 - p); and the tokens that it had."""
    count = len(s.x)
    logits = torch.tensor([-20.0, 0.0], device=device).repeat(count, 1)
    if objective.gate.reads_logprob:
        s = s._replace(logp=s.logp.clamp(max=-(2.0**-30)))
        logits[:, 0] = s.logp - (-torch.expm1(s.logp)).log()
    else:
        s = s._replace(logp=torch.full_like(s.x, -20.0))
    logits.requires_grad_()
    tokens = {"advantages": s.a, "old_logprobs": s.logp - s.x, "ref_logprobs": s.logp + s.d}
    tokens = {k: x.float().to(device) for k, x in tokens.items()}
    tokens["targets"] = torch.zeros(count, dtype=torch.int64, device=device)
    tokens["cu_seqlens"] = torch.arange(count + 1, dtype=torch.int32, device=device)  # a response of one token each
    loss = fastrl.logits_policy_loss(logits, objective=objective, denominator=1, **tokens)
    logp = loss.logprobs.double().cpu()
    assert objective.gate.reads_logprob or (logp == -20).all()
    (gradient,) = torch.autograd.grad(loss.loss, logits)
    old = tokens["old_logprobs"].double().cpu()
    return gradient[:, 0].double().cpu() / -torch.expm1(logp), of_logprobs(s, logp, old)


def of_each_level(objective: Objective) -> list[Objective]:
    """The objective with its ratio at every level that its gate admits."""
    found = []
    for level in LEVELS:
        with suppress(ValueError):  # a gate with a level of its own
            found.append(objective.replace(ratio=level))
    assert len(found) == (
        len(LEVELS) if objective.gate.level is None else len({"token", objective.gate.level} & set(LEVELS))
    )
    return found


def kl_only(kind: str, of: Any = "token", **fields: Any) -> Objective:
    """For advantages of 0."""
    return Objective(gate=NoGate(), kl=KL(kind, 1.0, of), **fields)


@pytest.mark.parametrize("name", GATES)
def test_gates_from_logprobs(name: str) -> None:
    for objective in of_each_level(GATES[name]):
        what, s = f"{name} at the level {objective.ratio}", for_gate(objective, FINE)
        assert_coefficients(from_logprobs(objective, s), of_policy(objective, s), what, edges(objective, s))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_estimators_from_logprobs(kind: str) -> None:
    nothing = FINE._replace(a=torch.zeros_like(FINE.a))
    for bound in (20.0, 0.75):
        objective = kl_only(kind, max_log_ratio=bound)
        assert_coefficients(from_logprobs(objective, nothing), of_kl(objective, FINE), f"{kind}, clamped at {bound}")


@pytest.mark.parametrize("level", LEVELS)
def test_the_unbiased_estimator_with_the_objective_s_ratio(level: str) -> None:
    """Through a response's ratio a token's gradient has parts of every token, of the size e^d: they may cancel."""
    objective = kl_only("k3-unbiased", "objective", ratio=level)
    nothing = FINE._replace(a=torch.zeros_like(FINE.a))
    assert_coefficients(from_logprobs(objective, nothing), of_kl(objective, FINE), f"one token, {level}")
    if level != "sequence":
        return
    # Four tokens per response, their log ratios and their sum exact; d equal in half of the responses.
    x, d = (t.view(-1, 4).clamp(-19, 19) for t in (COARSE.x, COARSE.d))
    d[::2] = d[::2, :1]
    zeros = torch.zeros(x.numel(), dtype=torch.float64)
    s = Sweep(x.flatten(), d.flatten(), zeros, zeros)
    ratio, k3 = x.mean(1, keepdim=True).exp(), torch.expm1(d) - d
    expected = ratio * (k3.mean(1, keepdim=True) - torch.expm1(d))
    expected[::2] = (-ratio * d)[::2]
    assert_coefficients(from_logprobs(objective, s, 4), expected.flatten(), "four tokens")


def test_gates_at_the_level_of_longer_responses() -> None:
    """Four tokens, whose gradient is a quarter of what the response's is as one token."""
    x = COARSE.x.view(-1, 4)
    one = Sweep(x.mean(1), x[:, 0], COARSE.a[::4], COARSE.logp[::4])
    s = Sweep(x.flatten(), x.flatten(), one.a.repeat_interleave(4), COARSE.logp)
    for name in ("surrogate", "clip", "soft 1 and 1.05", "soft 10.0"):
        objective = GATES[name].replace(ratio="sequence")
        expected = of_policy(objective, one).repeat_interleave(4)
        assert_coefficients(from_logprobs(objective, s, 4), expected, name, edges(objective, one).repeat_interleave(4))


def test_policy_and_kl_together() -> None:
    """Each keeps its own accuracy; what they cancel between each other is in the objective."""
    for gate, kind in (("clip", "k3"), ("soft 10.0", "k3-unbiased"), ("stop-gradient-clip", "forward")):
        objective = GATES[gate].replace(kl=KL(kind, 0.5))
        policy, kl = of_policy(objective, FINE), of_kl(objective, FINE)
        error = (from_logprobs(objective, FINE).double() - policy - kl).abs() / (policy.abs() + kl.abs() + 1e-30)
        assert error[~edges(objective, FINE)].max() <= 1e-5, (gate, kind)


def test_rows(backend: str, backend_device: str) -> None:
    """Forward-gradient where the objective is row-local, statistics and gradient where it is not."""
    # A tenth of a second per row: kernels/test_row_terms.py.
    interpreted = backend == "triton" and backend_device == "cpu"
    s = Sweep(*(t[-4:] if interpreted else t[-4000:] for t in COARSE))
    for name in ("soft 1 and 1.05",) if interpreted else GATES:
        c, had = from_logits(GATES[name], for_gate(GATES[name], s), backend_device)
        assert_coefficients(c, of_policy(GATES[name], had), name, edges(GATES[name], had))
    nothing = s._replace(a=torch.zeros_like(s.a))
    for kind in ("k3-unbiased",) if interpreted else ESTIMATORS:
        objective = kl_only(kind)
        assert_coefficients(from_logits(objective, nothing, backend_device)[0], of_kl(objective, s), kind)
    # DeepSeek-V3.2 reads whole responses, so that its KL always runs in torch.
    objective = fastrl.DeepSeekV32(kl_coef=1.0, off_policy_delta=100.0, aggregate="token-mean")
    assert_coefficients(from_logits(objective, nothing, backend_device)[0], of_kl(objective, s), "DeepSeekV32")


def test_a_clip_passes_its_whole_gradient_on_its_bound() -> None:
    """min(a, b) at a = b: half of each branch's gradient, if one of the two is a constant, would be half of c."""
    ratio = torch.tensor(3.0)
    logp = torch.tensor([-1.0], requires_grad=True)
    old = logp.detach() - ratio.log()
    assert (logp - old).exp() == 3
    for gate in (fastrl.Clip(0.2, 0.2, dual=3.0), fastrl.Clip(0.2, 2.0), fastrl.Clip(0.2, 0.2, delta=3.0)):
        given = {"advantages": -torch.ones(1), "old_logprobs": old}
        loss = fastrl.policy_loss(logp, objective=Objective(gate=gate), **given).loss
        torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], ratio[None])


@pytest.mark.parametrize("kind", ["k3", "k3-unbiased", "k3+", "forward", "old-new"])
def test_values_near_zero(kind: str) -> None:
    """e^d - 1 - d is d^2 / 2 there, though both are of the size of d."""
    x = torch.linspace(-12, -1, 200, dtype=torch.float64).exp2().float().double()
    x = torch.cat([x, -x])
    k3 = x**2 / 2 + x**3 / 6 + x**4 / 24 + x**5 / 120 + x**6 / 720 + x**7 / 5040 + x**8 / 40320
    others = {"k3-unbiased": x.exp() * k3, "forward": x.exp() * (k3 - x**3 / 3 - x**5 / 60 - x**7 / 2520)}
    zeros = torch.zeros(len(x))
    tokens = {"advantages": zeros, "old_logprobs": -x.float(), "ref_logprobs": x.float()}
    kl = token_losses(kl_only(kind), zeros, **tokens).kl
    torch.testing.assert_close(kl.double(), others.get(kind, k3), rtol=1e-6, atol=0)
