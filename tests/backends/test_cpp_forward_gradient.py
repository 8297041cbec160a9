"""The C++ backend's forward-gradient: the objective in C++ between a row's statistics and its gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from cpp_cases import (
    DTYPES,
    OBJECTIVE,
    OPTIONAL,
    PARAMETERS,
    VOCABULARIES,
    check_forward_gradient,
    generator,
    needs_cpp,
    random_inputs,
    random_rows,
)

from fastrl.backends.contract import Transform
from fastrl.backends.cpp import backend as cpp_backend
from fastrl.backends.torch import rows as reference
from fastrl.objectives.objective import GATE_FORMULAS, KL_FORMULAS, ROLLOUT_FORMULAS
from fastrl.objectives.rows import RowInputs, RowObjective

pytestmark = needs_cpp


def test_every_formula_has_parameters_here() -> None:
    assert PARAMETERS.keys() == GATE_FORMULAS.keys()


@pytest.mark.parametrize("gate", GATE_FORMULAS)
@pytest.mark.parametrize("kl", KL_FORMULAS)
@pytest.mark.parametrize("rollout", ROLLOUT_FORMULAS)
def test_every_objective_with_and_without_each_input(gate: str, kl: str, rollout: str) -> None:
    objective = RowObjective(gate, PARAMETERS[gate], kl, rollout, 0.6, 1.5, 2.0)
    logits, targets, _, _ = random_rows(40, 37, torch.float32, seed=len(kl), spread=1.0)
    logprobs = reference.row_statistics(logits, targets, None, Transform()).logprobs
    singles = [(name,) for name in OPTIONAL]
    all_but_one = [tuple(set(OPTIONAL) - {name}) for name in OPTIONAL]
    for seed, present in enumerate([(), *singles, *all_but_one, OPTIONAL]):
        check_forward_gradient(logits, targets, None, Transform(), objective, random_inputs(logprobs, present, seed))


def test_every_presence_of_inputs() -> None:
    logits, targets, _, _ = random_rows(40, 37, torch.float32, seed=1, spread=1.0)
    logprobs = reference.row_statistics(logits, targets, None, Transform()).logprobs
    for seed, bits in enumerate(itertools.product([False, True], repeat=len(OPTIONAL))):
        inputs = random_inputs(logprobs, tuple(itertools.compress(OPTIONAL, bits)), seed)
        check_forward_gradient(logits, targets, None, Transform(), OBJECTIVE, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_forward_gradient_of_ragged_rows(dtype: torch.dtype, vocab: int) -> None:
    logits, targets, _, _ = random_rows(5, vocab, dtype, seed=vocab)
    mask = torch.tensor([True, True, False, True, True])
    targets[2] = -100
    transform = Transform(temperature=0.8, softcap=40.0)
    logprobs = reference.row_statistics(logits, targets, mask, transform).logprobs
    check_forward_gradient(logits, targets, mask, transform, OBJECTIVE, random_inputs(logprobs, OPTIONAL, 0))
    check_forward_gradient(logits, targets, None, Transform(), OBJECTIVE, random_inputs(logprobs, ("old",), 0))


def test_forward_gradient_equals_statistics_then_gradient() -> None:
    logits, targets, _, _ = random_rows(7, 3001, torch.float32)
    statistics = cpp_backend.row_statistics(logits, targets, None, Transform())
    weights, advantages = torch.rand(7, generator=generator()), torch.randn(7, generator=generator())
    objective = RowObjective("reinforce", (0.0,) * 4, "none", "none", 0.0, 0.0, 20.0)
    inputs = RowInputs(advantages, weights, entropy_weights=torch.full((7,), 0.25))
    out = torch.empty_like(logits)
    c, h = (-advantages.double() * weights.double()).float(), torch.full((7,), -0.25)
    cpp_backend.row_gradient(logits, targets, None, Transform(), statistics, c, h, out)
    cpp_backend.row_forward_gradient(logits, targets, None, Transform(), objective, inputs)
    # It has e^z already where the gradient forms e^(log p); log p + H cancels in some entries.
    torch.testing.assert_close(logits, out, rtol=2e-6, atol=1e-8)


def test_forward_gradient_leaves_what_is_masked_and_isolates_nan() -> None:
    logits, targets, _, _ = random_rows(6, 70, torch.float32)
    logits[0, 1, 3] = torch.nan
    logits[0, 2] = torch.nan
    targets[4], targets[2] = 70, -100
    mask = torch.tensor([True, True, False, True, True, True])
    overwritten = logits.clone()
    inputs = RowInputs(torch.ones(6), torch.ones(6))
    found = cpp_backend.row_forward_gradient(overwritten, targets, mask, Transform(), OBJECTIVE, inputs)
    assert overwritten[0].isnan().all(-1).tolist() == [False, True, False, False, True, False]
    assert overwritten[0].isnan().any(-1).tolist() == [False, True, False, False, True, False]
    assert found.logprobs.isnan().tolist() == [False, True, False, False, True, False]
    assert found.terms[0].isnan().tolist() == [False, True, False, False, True, False]
    assert (found.terms[:, 2] == 0).all()
    assert (overwritten[0, 2] == 0).all()


def test_on_policy_ratio_is_exactly_one() -> None:
    logits, targets, _, _ = random_rows(50, 501, torch.float32)
    old = cpp_backend.row_statistics(logits, targets, None, Transform()).logprobs
    inputs = RowInputs(torch.randn(50, generator=generator()), torch.ones(50), old=old, ref=old)
    terms = cpp_backend.row_forward_gradient(logits, targets, None, Transform(), OBJECTIVE, inputs).terms
    assert (terms[3] == 1).all()  # ratio
    assert (terms[2] == 0).all()  # kl
