"""Statistics, objective and gradient of rows of support entries in one call, on every backend."""

from __future__ import annotations

import kernel_cases as cases
import pytest
import support_cases
import torch
from kernel_cases import OBJECTIVE, OPTIONAL, PLAIN
from torch import Tensor

from fastrl.backend.choice import forced, row_functions
from fastrl.backend.contract import LossTerms, Statistics, Support, Transform
from fastrl.backend.torch import rows as reference
from fastrl.objectives.rows import TERMS, Numbers, RowInputs, RowObjective

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
REINFORCE = RowObjective("reinforce")
VOCAB = 1000
# A few entries, one, none, a block and one entry more, several blocks, one row that does not count, and two idle rows.
SIZES = (8, 1, 0, 257, 3, 700, 2, 5, 5)
VALID = torch.tensor([True, True, True, True, False, True, True, True, True])
TAKES_PART = VALID & (torch.tensor(SIZES) > 0)


@pytest.fixture
def device(backend_device: str) -> str:
    """Each backend in turn, and where its tensors live."""
    return backend_device


def _case(device: str) -> tuple[Tensor, Tensor, Support]:
    """Values, NaN where a row does not count, targets within the support, the support."""
    support = support_cases.random_support(SIZES, VOCAB, device, VALID)
    values = (torch.randn(support.token_ids.numel()) * 4).to(device)
    targets = torch.full((len(SIZES),), -100, device=device)
    for row, span in support_cases.row_ranges(support):
        targets[row] = support.token_ids[span][torch.randint(span.stop - span.start, ())]
    values[support.offsets[4] : support.offsets[5]] = torch.nan
    return values, targets, support


def _transform(name: str, device: str) -> Transform:
    if name == "identity":
        return PLAIN
    return Transform(1.0, (torch.rand(len(SIZES)) + 0.5).to(device), 0.7, 30.0 if name == "softcap" else 0.0)


def _apart(
    values: Tensor, targets: Tensor, support: Support, t: Transform, c: Tensor, h: Tensor | None
) -> tuple[Statistics, Tensor]:
    """Statistics and gradient by their own functions."""
    backend, out = row_functions(forced(), values), torch.full_like(values, 7.0)
    found = backend.support_statistics(values, targets, support, t)
    backend.support_gradient(values, targets, support, t, found, c, h, out)
    return found, out


def _run(
    values: Tensor, targets: Tensor, support: Support, t: Transform, objective: RowObjective, inputs: RowInputs
) -> tuple[LossTerms, Tensor]:
    """In place and beside the values, with the same bits."""
    backend, out, inside = row_functions(forced(), values), torch.full_like(values, 7.0), values.clone()
    found = backend.support_forward_gradient(values, targets, support, t, objective, inputs, out)
    again = backend.support_forward_gradient(inside, targets, support, t, objective, inputs, inside)
    assert all(map(cases.same_bits, (*found, out), (*again, inside)))
    return found, out


@pytest.mark.parametrize("name", ["identity", "scaled", "softcap"])
def test_a_forward_gradient_is_its_three_parts(name: str, device: str) -> None:
    case, t = _case(device), _transform(name, device)
    # Its c is exact, so that it can be given.
    c, h = (torch.randint(-3, 4, (len(SIZES),)).float().to(device) for _ in range(2))
    c[7:], h[7] = 0.0, 0.0  # idle: whole, and all but the entropy
    h[8] = 1.0
    for weights in ((c, h), (c, None)):
        statistics, gradient = _apart(*case, t, *weights)
        inputs = RowInputs(-c, torch.ones_like(c), entropy_weights=None if weights[1] is None else -h)
        found, out = _run(*case, t, REINFORCE, inputs)
        # A coefficient of 0 may have either sign.
        assert all(map(cases.same_bits, (*found[:2], out + 0.0), (*statistics[:2], gradient + 0.0)))
        assert not out[case[2].offsets[7] : case[2].offsets[8]].any()
        assert not found.terms[:, ~TAKES_PART].any()


@pytest.mark.parametrize("present", [OPTIONAL, (), ("old",), ("old", "ref", "kl_weights")], ids=str)
@pytest.mark.parametrize("gate", ["clip", "gamma"])
def test_terms_and_gradient_against_float64(gate: str, present: tuple[str, ...], device: str) -> None:
    case, mask = _case(device), TAKES_PART.to(device)
    objective = RowObjective(gate, OBJECTIVE.kl, Numbers(*cases.PARAMETERS[gate], *OBJECTIVE.numbers[4:]))
    statistics, _ = _apart(*case, PLAIN, torch.zeros(len(SIZES), device=device), None)
    inputs = cases.random_inputs(statistics.logprobs, present, len(present))
    found, gradient = _run(*case, PLAIN, objective, inputs)
    # The oracle's objective starts from our float32 statistics: a clip's edge may lie between those and exact ones.
    double = RowInputs(*(None if x is None else x.double() for x in inputs))
    statistics64 = Statistics(*(x.double() for x in statistics))
    terms64, c, h = reference.row_terms(*statistics64[:2], mask, objective, double)
    terms32, _, _ = reference.row_terms(*statistics[:2], mask, objective, inputs)
    loss, c_size, h_size = cases.sizes(statistics64[:2], mask, objective, double)
    for name, actual, truth, float32 in zip(TERMS, found.terms, terms64, terms32, strict=True):
        cases.assert_close(actual, truth, float32, 5e-6, name, loss if name == "loss" else None)
    _, expected = _apart(*case, PLAIN, c.float(), h.float() if inputs.entropy_weights is not None else None)
    rows = support_cases.entry_rows(case[2])
    size = (c_size + h_size * (1 + statistics64.entropy.abs()))[rows]
    error = (gradient.double() - expected.double()).abs()
    assert (error <= 1e-5 * size).all(), (error / size.clamp_min(1e-30)).max()


def test_invalid_and_nan_rows_are_nan_and_stay_alone(device: str) -> None:
    values, targets, support = _case(device)
    targets[0] = -1  # outside its set
    values[support.offsets[3] + 3] = torch.nan
    ones = torch.ones(len(SIZES), device=device)
    found, gradient = _run(values, targets, support, PLAIN, REINFORCE, RowInputs(ones, ones))
    expected = torch.zeros(len(SIZES), dtype=torch.bool)
    expected[[0, 3]] = True
    assert torch.equal(found.logprobs.isnan().cpu(), expected) and torch.equal(found.terms[0].isnan().cpu(), expected)
    assert torch.equal(gradient.isnan().cpu(), expected[support_cases.entry_rows(support).cpu()])


def test_no_rows(device: str) -> None:
    none = torch.empty(0, device=device)
    support = Support(none.int(), torch.zeros(1, dtype=torch.int64, device=device), none.bool())
    found, _ = _run(none, none.long(), support, PLAIN, OBJECTIVE, RowInputs(none, none))
    assert found.terms.shape == (len(TERMS), 0)
