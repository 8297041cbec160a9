from __future__ import annotations

import itertools

import kernel_cases as cases
import pytest
import torch
from torch import Tensor

from fastrl.backends.contract import LossTerms, Transform
from fastrl.backends.torch import rows as reference
from fastrl.objectives.objective import GATE_FORMULAS, KL_FORMULAS, ROLLOUT_FORMULAS
from fastrl.objectives.rows import TERMS, RowInputs, RowObjective

backend = pytest.importorskip("fastrl.backends.triton.backend")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
IDENTITY = Transform()
NUMBERS = {
    "surrogate": (0.0, 0.0, 0.0, 0.0),
    "reinforce": (0.0, 0.0, 0.0, 0.0),
    "clip": (0.2, 0.28, 3.0, 4.0),
    "soft": (1.0, 1.05, 0.0, 0.0),
    "stop-gradient-clip": (1.5, 0.6, 0.0, 0.0),
    "gamma": (2.0, 3.0, 3.0, 2.0),
}
# Logs of ratios: inside every clip, outside on both sides, beyond dual and delta, and beyond the clamp at 20.
GAPS = torch.tensor([0.03, -0.05, 0.6, -0.7, 1.3, -1.4, 1.9, 24.0, -24.0, 0.3])


def _objective(gate: str, kl: str = "none", rollout: str = "none") -> RowObjective:
    return RowObjective(gate, NUMBERS[gate], kl, rollout, 0.5, 2.0, 20.0)


def _inputs(logits: Tensor, targets: Tensor, transform: Transform) -> RowInputs:
    """Every optional input present, log-ratios from GAPS in random order."""
    logp = reference.row_statistics(logits.double(), targets, None, transform).logprobs.float()
    rows = logp.numel()
    device = logits.device

    def gaps() -> Tensor:
        return GAPS[torch.randint(0, len(GAPS), (rows,))].to(device)

    old = logp - gaps()
    advantages, weights, kl_weights, entropy_weights = (torch.randn(4, rows)).to(device).unbind()
    return RowInputs(
        advantages,
        weights.abs(),
        old,
        logp + gaps(),
        old - gaps(),
        kl_weights.abs(),
        entropy_weights,
        torch.tensor(1.0, device=device),
    )


def _assert_result(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
) -> tuple[Tensor, LossTerms]:
    """Compare the gradient and terms of a copy of the logits with the oracle, and return both."""
    gradient = logits.clone()
    result = backend.row_forward_gradient(gradient, targets, mask, transform, objective, inputs)
    x = logits.double()
    exact = cases.to_double(inputs)
    truth = reference.row_forward_gradient(x, targets, mask, transform, objective, exact)
    x32 = logits.float().clone()
    float32 = reference.row_forward_gradient(x32, targets, mask, transform, objective, inputs)
    loss_size, gradient_size, kl_size = _sizes(logits, targets, mask, transform, objective, exact)
    # Ratios amplify the error of a log-probability, relative to themselves.
    allowed = 5 * cases.margin(transform)
    cases.assert_close(result.logprobs, truth.logprobs, float32.logprobs, allowed, "logprobs")
    cases.assert_close(result.entropy, truth.entropy, float32.entropy, allowed, "entropy")
    for name, *values in zip(TERMS, result.terms, truth.terms, float32.terms, strict=True):
        cases.assert_close(*values, allowed, name, {"loss": loss_size, "kl": kl_size}.get(name))
    error = cases.gradient_error(gradient, x, gradient_size)
    bound = cases.gradient_error(x32, x, gradient_size) + allowed
    assert error <= bound, f"gradient: error {error:.3e}, allowed {bound:.3e}"
    return gradient, result


def _sizes(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What loss (N,), gradient (A, B, V) and KL (N,) sum up, each part's absolute value: they may cancel.

    The gradient also has the size of what a fifth of log p changes in it, at its slope in log p: a ratio's relative
    error is the absolute one of log p, a few units in the last place, and k3-unbiased's c, r (logp - ref), can be small
    where its slope is not. The 5e-6 allowed of it is 1e-6 of log p.
    """
    losses, gradients, kl = torch.zeros(()), torch.zeros(()), None
    zeros = torch.zeros_like(inputs.policy_weights)
    step = 1e-5  # far from every clip
    shifted = {name: getattr(inputs, name) for name in ("old", "ref", "rollout")}
    shifted = {name: value - step for name, value in shifted.items() if value is not None}  # log p alone is higher
    for part in ("policy_weights", "kl_weights", "entropy_weights"):
        without = {"policy_weights": zeros, "kl_weights": None, "entropy_weights": None}
        without[part] = getattr(inputs, part)
        x = logits.double()
        terms = reference.row_forward_gradient(x, targets, mask, transform, objective, inputs._replace(**without)).terms
        moved = logits.double()
        reference.row_forward_gradient(
            moved, targets, mask, transform, objective, inputs._replace(**without, **shifted)
        )
        change = ((moved - x).abs() / step).flatten(0, 1)
        # A difference of logarithms can be small and its error not: a term also has the size of its slope times a
        # tenth of log p (k3 near the reference, times a ratio of e^20). The 5e-6 allowed of it is 5e-7 of log p, four
        # to eight units in the last place. The slope is read off the target's gradient.
        logp = reference.row_statistics(logits.double(), targets, mask, transform).logprobs
        amplified = (change * logp.abs()[:, None] / 5).nan_to_num(posinf=0.0)
        losses, gradients = losses + terms[0].abs(), gradients + x.abs() + amplified.view_as(x)
        valid = targets.clamp(0, logits.shape[-1] - 1)
        slope = x.flatten(0, 1).gather(1, valid[:, None])[:, 0].abs() / (-torch.expm1(logp)).clamp_min(1e-30)
        sensitivity = (slope * logp.abs() / 10).nan_to_num(posinf=0.0)
        losses = losses + sensitivity
        if part == "kl_weights" and inputs.kl_weights is not None:
            kl = terms[TERMS.index("kl")].abs() + sensitivity / inputs.kl_weights.abs().clamp_min(1e-30)
    return losses, gradients, kl


def _pairs() -> set[tuple[str, str, str]]:
    """Every gate with every KL and every gate with every rollout correction."""
    gates, kls, rollouts = (list(table) for table in (GATE_FORMULAS, KL_FORMULAS, ROLLOUT_FORMULAS))
    return {(g, k, rollouts[(i + j) % len(rollouts)]) for i, g in enumerate(gates) for j, k in enumerate(kls)}


@pytest.mark.parametrize(
    ("gate", "kl", "rollout"),
    [
        pytest.param(*names, marks=() if names in _pairs() else pytest.mark.slow)
        for names in itertools.product(GATE_FORMULAS, KL_FORMULAS, ROLLOUT_FORMULAS)
    ],
)
def test_every_objective(gate: str, kl: str, rollout: str, device: str) -> None:
    logits = torch.randn(2, 3, 37, device=device) * 2
    targets = torch.randint(0, 37, (6,), device=device)
    _assert_result(logits, targets, None, IDENTITY, _objective(gate, kl, rollout), _inputs(logits, targets, IDENTITY))


@pytest.mark.parametrize("name", ["identity", "scaled", "softcap"])
@pytest.mark.parametrize("vocab", [1000, 4097, 40001])
def test_transforms_and_sizes(vocab: int, name: str, device: str) -> None:
    logits, targets = cases.random_rows(vocab, torch.float32, device)
    transform = cases.transform(name, device)
    _assert_result(logits, targets, None, transform, _objective("clip", "k3"), _inputs(logits, targets, transform))


@pytest.mark.parametrize(
    "absent", ["old", "ref", "rollout", "kl_weights", "entropy_weights", "entropy_threshold", "all"]
)
def test_absent_inputs(absent: str, device: str) -> None:
    logits, targets = cases.random_rows(1000, torch.float32, device)
    inputs = _inputs(logits, targets, IDENTITY)
    names = RowInputs._fields[2:] if absent == "all" else (absent,)
    _assert_result(
        logits,
        targets,
        None,
        IDENTITY,
        _objective("clip", "k3-unbiased", "truncate"),
        inputs._replace(**dict.fromkeys(names)),
    )


@pytest.mark.parametrize("name", ["identity", "softcap"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1000, 4097, 40000])  # one block, a tail that no vector divides, several segments
def test_beside_the_logits_the_gradient_is_bitwise_the_same(
    vocab: int, dtype: torch.dtype, name: str, device: str
) -> None:
    logits, targets = cases.random_rows(vocab + 8, dtype, device)
    logits, targets = logits[:, :, :vocab], targets % vocab  # strided rows, a contiguous gradient
    transform, mask = cases.transform(name, device), torch.tensor([True, True, False, True], device=device)
    inputs = _inputs(logits, targets, transform)
    inputs = inputs._replace(
        advantages=torch.tensor([0.7, 0.0, 1.0, -0.4], device=device), kl_weights=None, entropy_weights=None
    )
    before = logits.clone()
    out = torch.full(logits.shape, 7.0, dtype=dtype, device=device)
    beside = backend.row_forward_gradient(logits, targets, mask, transform, _objective("clip"), inputs, out)
    assert torch.equal(logits, before)
    inside = backend.row_forward_gradient(before, targets, mask, transform, _objective("clip"), inputs)
    assert torch.equal(out, before)
    assert (out.flatten(0, 1)[[1, 2]] == 0).all()  # idle, and masked
    for a, b in zip(beside, inside, strict=True):
        assert torch.equal(a, b)


def test_on_policy_is_exactly_the_ratio_1_with_log_probabilities_of_row_statistics(device: str) -> None:
    # The two kernels cut a long row differently, but fold it exactly: the same bits.
    logits, targets = cases.random_rows(40000, torch.float32, device)
    old = backend.row_statistics(logits, targets, None, IDENTITY).logprobs
    ones = torch.ones(cases.N, device=device)
    result = backend.row_forward_gradient(
        logits, targets, None, IDENTITY, _objective("clip"), RowInputs(ones, ones, old)
    )
    assert (result.terms[TERMS.index("ratio")] == 1).all()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("name", ["identity", "scaled", "softcap"])
@pytest.mark.parametrize("vocab", [1000, pytest.param(40001, marks=pytest.mark.slow), 70000])  # 1, 2 and 4 segments
def test_a_forward_gradient_is_bitwise_its_three_parts(vocab: int, name: str, dtype: torch.dtype, device: str) -> None:
    logits, targets = cases.random_rows(vocab, dtype, device)
    transform = cases.transform(name, device)
    # Its c is exact, so that torch can form it too.
    inputs = RowInputs(torch.tensor([1.0, -2.0, 0.5, 4.0], device=device), torch.ones(cases.N, device=device))
    inputs = inputs._replace(entropy_weights=torch.tensor([0.5, 0.0, 1.0, -2.0], device=device))
    statistics = backend.row_statistics(logits, targets, None, transform)
    _, c, h = reference.row_terms(statistics.logprobs, statistics.entropy, None, _objective("reinforce"), inputs)
    parts = torch.empty_like(logits)
    backend.row_gradient(logits, targets, None, transform, statistics, c, h, parts)
    result = backend.row_forward_gradient(logits, targets, None, transform, _objective("reinforce"), inputs)
    assert torch.equal(result.logprobs, statistics.logprobs)
    assert torch.equal(result.entropy, statistics.entropy)
    assert torch.equal(logits, parts)


@pytest.mark.parametrize("vocab", [1000, 40000])
def test_a_row_is_bitwise_the_same_at_any_address(vocab: int, device: str) -> None:
    logits, targets = cases.random_rows(vocab, torch.float32, device)
    inputs = _inputs(logits, targets, IDENTITY)
    shifted = torch.empty(2, 2, vocab + 1, device=device)[:, :, 1:]
    shifted.copy_(logits)
    a = backend.row_forward_gradient(logits, targets, None, IDENTITY, _objective("soft", "k3"), inputs)
    b = backend.row_forward_gradient(shifted, targets, None, IDENTITY, _objective("soft", "k3"), inputs)
    assert torch.equal(logits, shifted)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_masked_idle_invalid_and_nan_rows(device: str) -> None:
    logits, targets = torch.randn(1, 5, 5000, device=device), torch.randint(0, 5000, (5,), device=device)
    inputs = _inputs(logits, targets, IDENTITY)._replace(kl_weights=None, entropy_weights=None)
    inputs.advantages[0] = 0.0  # idle
    logits[0, 1, 4321] = torch.nan
    targets[2] = -7
    logits[0, 3], targets[3] = torch.nan, -100  # masked
    mask = torch.tensor([True, True, True, False, True], device=device)
    gradient, result = _assert_result(logits, targets, mask, IDENTITY, _objective("reinforce"), inputs)
    assert (gradient[0, 0] == 0).all()
    assert gradient[0, 1].isnan().all()
    assert gradient[0, 2].isnan().all()
    assert (gradient[0, 3] == 0).all()
    assert (result.terms[:, 3] == 0).all()
    assert (gradient[0, 4] != 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_logits(dtype: torch.dtype, device: str) -> None:
    logits, targets = cases.random_rows(4104, dtype, device)
    inputs = _inputs(logits, targets, IDENTITY)
    truth = logits.double()
    reference.row_forward_gradient(truth, targets, None, IDENTITY, _objective("soft", "k2"), cases.to_double(inputs))
    backend.row_forward_gradient(logits, targets, None, IDENTITY, _objective("soft", "k2"), inputs)
    allowed = cases.rounding(dtype, device == "cpu") * truth.abs() + 1e-5 * truth.abs().amax(-1, keepdim=True) + 2**-24
    assert ((logits.double() - truth).abs() <= allowed).all()
