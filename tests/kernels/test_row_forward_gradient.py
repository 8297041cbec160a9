"""A row's statistics, objective and gradient in one call, on every backend."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DTYPES, OBJECTIVE, OPTIONAL, PLAIN
from pairs import each, pairs
from torch import Tensor

import fastrl
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS
from fastrl.objectives.rows import TERMS, Numbers, RowInputs, RowObjective

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
REINFORCE = RowObjective("reinforce")
#: All inputs, none, each alone, and all but each.
PRESENCES = [OPTIONAL, (), *((x,) for x in OPTIONAL), *(tuple(set(OPTIONAL) - {x}) for x in OPTIONAL)]


@pytest.fixture(params=["cpp", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each in turn, forced: torch's row functions are the oracle."""
    with fastrl.use_backend(request.param):
        yield request.param


@pytest.fixture
def device(backend_device: str) -> str:
    """Each backend in turn, and where its tensors live."""
    return backend_device


def _rows(vocab: int, dtype: torch.dtype, device: str, shape: tuple[int, int], seed: int = 0) -> tuple[Tensor, ...]:
    """Logits, targets and log-probabilities."""
    logits, targets, *_ = cases.random_rows(vocab, dtype, device, shape, seed, 2.0)
    return logits, targets, cases.row_statistics(logits, targets, None, PLAIN).logprobs


def test_every_formula_has_parameters_here() -> None:
    assert cases.PARAMETERS.keys() == GATE_FORMULAS.keys()


FORMULAS = pairs(list(GATE_FORMULAS), list(KL_FORMULAS), list(cases.CORRECTIONS))


# In the interpreter each formula once, which is quick; all pairs are slow.
@pytest.mark.parametrize(
    ("backend", "gate", "kl", "rollout"),
    [
        *(("cpp", *names) for names in FORMULAS),
        *(("triton", *names) for names in each(GATE_FORMULAS, KL_FORMULAS, cases.CORRECTIONS)),
        *(pytest.param("triton", *names, marks=pytest.mark.slow) for names in FORMULAS),
    ],
    indirect=["backend"],
)
def test_every_objective(backend: str, gate: str, kl: str, rollout: str, device: str) -> None:
    """In C++ with and without each input too, by one of the bounds."""
    cpp = backend == "cpp"
    logits, targets, logprobs = _rows(37, torch.float32, device, (2, 20 if cpp else 4), len(kl))
    bounds = (2.0, 20.0)
    for seed, present in enumerate(PRESENCES if cpp else PRESENCES[:1]):
        inputs = cases.random_inputs(logprobs, present, seed)
        for bound in bounds if seed == 0 else bounds[seed % 2 :][:1]:
            objective = RowObjective(gate, kl, Numbers(*cases.PARAMETERS[gate], *cases.CORRECTIONS[rollout], bound))
            cases.check_forward_gradient(logits, targets, None, PLAIN, objective, inputs)


def test_every_presence_of_inputs(backend: str, device: str) -> None:
    every = [tuple(itertools.compress(OPTIONAL, x)) for x in itertools.product([False, True], repeat=len(OPTIONAL))]
    logits, targets, logprobs = _rows(37, torch.float32, device, (2, 3 if backend == "triton" else 20), seed=1)
    objective = OBJECTIVE._replace(kl="k3-unbiased")
    for seed, present in enumerate(PRESENCES if backend == "triton" else every):
        inputs = cases.random_inputs(logprobs, present, seed)
        cases.check_forward_gradient(logits, targets, None, PLAIN, objective, inputs)


@pytest.mark.parametrize(
    ("vocab", "dtype", "name"), pairs((1, 31, 1000, 4097, 40001), DTYPES, ("identity", "scaled", "softcap")), ids=str
)
def test_transforms_and_sizes(vocab: int, dtype: torch.dtype, name: str, device: str) -> None:
    logits, targets, logprobs = _rows(vocab, dtype, device, (2, 2), seed=vocab)
    mask = torch.tensor([True, True, False, True], device=device)
    inputs = cases.random_inputs(logprobs)
    targets[2] = -100
    cases.check_forward_gradient(logits, targets, mask, cases.transform(name, device), OBJECTIVE, inputs)


@pytest.mark.parametrize(
    ("vocab", "dtype", "name"),
    # One block, a tail that no vector divides, several segments.
    pairs((1000, 4097, 40000), DTYPES, ("identity", "softcap")),
    ids=str,
)
def test_beside_the_logits_the_gradient_is_bitwise_the_same(
    vocab: int, dtype: torch.dtype, name: str, device: str
) -> None:
    logits, targets, *_ = cases.random_rows(vocab + 8, dtype, device)
    logits, targets = logits[:, :, :vocab], targets % vocab  # strided rows, a contiguous gradient
    t, mask = cases.transform(name, device), torch.tensor([True, True, False, True], device=device)
    inputs = cases.random_inputs(cases.row_statistics(logits, targets, mask, t).logprobs, ("old",))
    inputs = inputs._replace(advantages=torch.tensor([0.7, 0.0, 1.0, -0.4], device=device))
    before = logits.clone()
    out = torch.full(logits.shape, 7.0, dtype=dtype, device=device)
    beside = cases.row_forward_gradient(logits, targets, mask, t, OBJECTIVE, inputs, out)
    assert torch.equal(logits, before)
    inside = cases.row_forward_gradient(before, targets, mask, t, OBJECTIVE, inputs)
    assert torch.equal(out, before)
    assert (out.flatten(0, 1)[[1, 2]] == 0).all()  # idle, and masked
    assert all(map(torch.equal, beside, inside))


@pytest.mark.parametrize("name", ["identity", "softcap"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1000, 4100])  # of whole vectors; of float32 whole ones, of 16 bits not
def test_a_narrower_gradient_is_that_of_float32_rounded_once(
    vocab: int, dtype: torch.dtype, name: str, backend: str, device: str
) -> None:
    logits, targets, *_ = cases.random_rows(vocab, torch.float32, device)
    t, mask = cases.transform(name, device), torch.tensor([True, True, False, True], device=device)
    inputs = cases.random_inputs(cases.row_statistics(logits, targets, mask, t).logprobs, ("old",))
    inputs = inputs._replace(advantages=torch.tensor([700.0, 0.0, 1.0, 1.0], device=device))
    targets[3] = vocab
    wide, before = torch.empty_like(logits), logits.clone()
    narrow = torch.full(logits.shape, 7.0, dtype=dtype, device=device)
    found = [cases.row_forward_gradient(logits, targets, mask, t, OBJECTIVE, inputs, out) for out in (wide, narrow)]
    assert torch.equal(logits, before)
    for one, other in zip(*found, strict=True):
        assert cases.same_bits(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if backend == "triton" and device == "cpu" and dtype == torch.bfloat16:  # where the interpreter truncates
        torch.testing.assert_close(narrow.float(), wide, rtol=2**-7, atol=1e-37, equal_nan=True)
    else:
        assert cases.same_bits(narrow.nan_to_num(7.0), wide.to(dtype).nan_to_num(7.0))
    assert narrow.isnan().any() and (narrow.flatten(0, 1)[[1, 2]] == 0).all()  # NaN; idle, and masked


def test_on_policy_is_exactly_the_ratio_1_with_log_probabilities_of_row_statistics(device: str) -> None:
    # Triton's two kernels cut a long row differently, but fold it exactly: the same bits.
    logits, targets, old = _rows(40000, torch.float32, device, (2, 4))
    ones = torch.ones_like(old)
    result = cases.row_forward_gradient(logits, targets, None, PLAIN, OBJECTIVE, RowInputs(ones, ones, old, old))
    assert (result.terms[TERMS.index("ratio")] == 1).all()
    assert (result.terms[TERMS.index("kl")] == 0).all()


@pytest.mark.parametrize(
    ("vocab", "name", "dtype"),
    pairs((1000, 40001, 70000), ("identity", "scaled", "softcap"), DTYPES),  # 1, 2 and 4 segments
    ids=str,
)
def test_a_forward_gradient_is_its_three_parts(
    vocab: int, name: str, dtype: torch.dtype, backend: str, device: str
) -> None:
    logits, targets, *_ = cases.random_rows(vocab, dtype, device)
    t = cases.transform(name, device)
    # Its c is exact, so that it can be given.
    c, h = torch.tensor([-1.0, 2.0, -0.5, -4.0], device=device), torch.tensor([-0.5, 0.0, -1.0, 2.0], device=device)
    inputs = RowInputs(-c, torch.ones_like(c), entropy_weights=-h)
    statistics = cases.row_statistics(logits, targets, None, t)
    parts = cases.gradient(logits, targets, c, h, None, t)
    result = cases.row_forward_gradient(logits, targets, None, t, REINFORCE, inputs)
    assert torch.equal(result.logprobs, statistics.logprobs)
    assert torch.equal(result.entropy, statistics.entropy)
    if backend == "cpp" and dtype is torch.float32:
        # It has e^z already where the gradient forms e^(log p); log p + H cancels in some entries.
        torch.testing.assert_close(logits, parts, rtol=2e-6, atol=1e-8)
    elif backend != "cpp":
        assert torch.equal(logits, parts)


def test_masked_idle_invalid_and_nan_rows(device: str) -> None:
    logits, targets, logprobs = _rows(5000, torch.float32, device, (1, 5))
    inputs = cases.random_inputs(logprobs, ("old", "ref", "rollout"))
    inputs.advantages[0] = 0.0  # idle
    inputs.advantages[1:], inputs.policy_weights[1:] = 1.5, 1.0
    logits[0, 1, 4321] = torch.nan
    targets[2] = 5000
    logits[0, 3], targets[3] = torch.nan, -100  # masked
    mask = torch.tensor([True, True, True, False, True], device=device)
    gradient, found = cases.check_forward_gradient(logits, targets, mask, PLAIN, REINFORCE, inputs)
    for reduced in (
        gradient[0].isnan().any(-1),
        gradient[0].isnan().all(-1),
        found.logprobs.isnan(),
        found.terms[0].isnan(),
    ):
        assert reduced.tolist() == [False, True, True, False, False]
    assert (gradient[0, [0, 3]] == 0).all()
    assert (found.terms[:, 3] == 0).all()
    assert (gradient[0, 4] != 0).any()


def test_no_rows(device: str) -> None:
    logits, none = torch.empty(2, 0, 30, device=device), torch.empty(0, device=device)
    found = cases.row_forward_gradient(logits, none.long(), None, PLAIN, OBJECTIVE, RowInputs(none, none))
    assert found.terms.shape == (len(TERMS), 0)


# 24: aligned by nature; 5003: never aligned; 1, 1 and several segments
ROWS = pairs((24, 1000, 5003, 40000), DTYPES, (0.0, 15.0))
INTERPRETED = list(zip([24, 1000, 40000], DTYPES, [0.0] * 3, strict=True))  # the interpreter is slow


@pytest.mark.parametrize(
    ("backend", "vocab", "dtype", "softcap"),
    [
        *(("cpp", *x) for x in ROWS),
        *(("triton", *x) for x in INTERPRETED),
        *(pytest.param("triton", *x, marks=pytest.mark.slow) for x in ROWS if x not in INTERPRETED),
    ],
    indirect=["backend"],
    ids=str,
)
def test_a_rows_bits_depend_on_the_row_alone(
    backend: str, vocab: int, dtype: torch.dtype, softcap: float, device: str
) -> None:
    """Statistics, gradient and forward-gradient in any batch, by any number of threads, at any address."""
    cpp = backend == "cpp"
    logits, targets, c, h = cases.random_rows(vocab, dtype, device, (1, 9 if cpp else 3))
    t = PLAIN._replace(softcap=softcap, temperature=0.9)
    n = logits.shape[1]

    def run(x: Tensor, rows: Tensor) -> list[Tensor]:
        found = cases.row_statistics(x, targets[rows], None, t)
        out = cases.gradient(x, targets[rows], c[rows], h[rows], None, t)
        inputs = RowInputs(c[rows], torch.full_like(c[rows], 0.3), entropy_weights=h[rows])
        result = cases.row_forward_gradient(x, targets[rows], None, t, OBJECTIVE, inputs)  # the last: it overwrites x
        return [*found, *result[:2], result.terms.T, *(y.reshape(len(rows), -1) for y in (out, x))]

    def assert_same(x: Tensor, rows: list[int]) -> None:
        at = torch.tensor(rows, device=device)
        for found, expected in zip(run(x, at), together, strict=True):
            assert cases.same_bits(found, expected[at])

    together = run(logits.clone(), torch.arange(n, device=device))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5) if cpp else ():
            torch.set_num_threads(count)
            assert_same(logits.clone(), list(range(n)))
    finally:
        torch.set_num_threads(threads)
    order = [n - 1, 2, 2, 0]
    assert_same(logits[:, order].clone(), order)
    gapped = torch.empty(2, 2, vocab + 3, dtype=dtype, device=device)[:, :, 1:-2]  # each row aligned otherwise
    assert_same(gapped.copy_(logits[0, 1]), [1] * 4)
    for shift in range(1, 20) if cpp else (1,):  # every alignment
        shifted = torch.empty(vocab + shift, dtype=dtype, device=device)[shift:].view(1, 1, -1)
        assert_same(shifted.copy_(logits[0, 1]), [1])
