"""The objectives' arithmetic as Triton runs it, a whole sweep in a few programs: c of every gate and estimator."""

from __future__ import annotations

import pytest
import torch
from coefficients import ESTIMATORS, GATES, Sweep, assert_coefficients, edges, for_gate, of_kl, of_policy, sweep
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from fastrl.backend.triton.formulas import device_terms  # noqa: E402
from fastrl.objectives.gates import NoGate  # noqa: E402
from fastrl.objectives.objective import KL, Objective  # noqa: E402
from fastrl.objectives.rows import Numbers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BLOCK = 4096
#: logp = 0, so that old = -x and ref = d are exact
TOKENS = Sweep(*(t[-4 * BLOCK :].float().double() for t in sweep(4 * BLOCK, 2.0**-40, seed=1)))


@triton.jit
def _terms(
    logp_ptr,
    old_ptr,
    ref_ptr,
    advantage_ptr,
    policy_weight,
    kl_weight,
    numbers,
    c_ptr,
    kl_ptr,
    OBJECTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old, ref, a = tl.load(old_ptr + offsets), tl.load(ref_ptr + offsets), tl.load(advantage_ptr + offsets)
    zero = 0.0 * old
    logp = tl.load(logp_ptr + offsets)
    inputs = (a, zero + policy_weight, old, ref, old, zero + kl_weight, zero, zero - 1e30)
    terms = OBJECTIVE(logp, zero, inputs, numbers)
    tl.store(c_ptr + offsets, terms[8])
    tl.store(kl_ptr + offsets, terms[2])


def _run(objective: Objective, device: str, policy_weight: float, s: Sweep = TOKENS) -> tuple[Tensor, Tensor]:
    """c and the KL, with a KL coefficient of 1."""
    kind = "none" if objective.kl is None else objective.kl.kind
    terms, numbers = device_terms(objective.gate.formula, kind), Numbers(*objective.gate.parameters())
    numbers = tuple(map(float, numbers._replace(max_log_ratio=objective.max_log_ratio)))
    logp, old, ref, a = (t.float().to(device) for t in (s.logp, s.logp - s.x, s.logp + s.d, s.a))
    c, kl = torch.empty_like(old), torch.empty_like(old)
    _terms[(len(old) // BLOCK,)](logp, old, ref, a, policy_weight, 1.0, numbers, c, kl, OBJECTIVE=terms, BLOCK=BLOCK)
    return c.cpu(), kl.cpu()


@pytest.mark.parametrize("name", [name for name in GATES if name != "geometric mean"])  # a surrogate to the kernels
def test_gates(name: str, device: str) -> None:
    s = for_gate(GATES[name], TOKENS)
    c, _ = _run(GATES[name], device, 1.0, s)
    assert_coefficients(c, of_policy(GATES[name], s), name, edges(GATES[name], s))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_estimators(kind: str, device: str) -> None:
    for bound in (20.0, 0.75):
        objective = Objective(gate=NoGate(), kl=KL(kind, 1.0), max_log_ratio=bound)
        c, kl = _run(objective, device, 0.0)
        assert_coefficients(c, of_kl(objective, TOKENS), f"{kind}, clamped at {bound}")
    assert kl.isfinite().all() and (kind in ("k1", "k1+") or (kl >= 0).all())
