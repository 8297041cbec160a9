"""Forward-gradient with a row on chip: on a GPU that has clusters, and elsewhere its source on an emulated cluster."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import cluster_emulation
import kernel_cases as cases
import pytest
import torch
from kernel_cases import OBJECTIVE, OPTIONAL, PLAIN
from pairs import each, pairs
from torch import Tensor

import fastrl
from fastrl.backend.contract import LossTerms, Transform
from fastrl.backend.cpp import backend as cpp_backend
from fastrl.backend.cuda import nvrtc
from fastrl.backend.cuda import row_forward_gradient as kernel
from fastrl.backend.torch import rows as reference
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS
from fastrl.objectives.rows import TERMS, Numbers, RowInputs, RowObjective

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EMULATED = DEVICE == "cpu"
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(
        EMULATED and cpp_backend.why_unavailable() is not None, reason=f"no compiler: {cpp_backend.why_unavailable()}"
    ),
    pytest.mark.skipif(
        not EMULATED and torch.cuda.get_device_capability()[0] < 9, reason="needs a GPU with clusters, sm_90 or newer"
    ),
]
DTYPES = (torch.bfloat16, torch.float16)
REINFORCE = RowObjective("reinforce")
#: One vector; one piece but a vector; one and a vector; tails of one, two and four blocks; whole steps and no tail.
SIZES = (8, 4088, 4104, 24576, 40000, 70000, 98304)


@pytest.fixture(autouse=True)
def clusters() -> Iterator[None]:
    with fastrl.use_backend("triton"), kernel.use_clusters(True):
        yield


def run(logits: Tensor, *arguments: object, order: int = 0) -> LossTerms:
    out = arguments[5] if len(arguments) > 5 else None
    if EMULATED:
        return cluster_emulation.row_forward_gradient(logits, *arguments, order=order)
    assert kernel.fits(logits, out, arguments[2])  # type: ignore[arg-type]
    return cases.row_forward_gradient(logits, *arguments)


def check(
    x: Tensor, targets: Tensor, mask: Tensor | None, t: Transform, objective: RowObjective, inputs: RowInputs
) -> tuple[Tensor, LossTerms]:
    """The gradient and the rest, which are the oracle's; on a GPU the statistics are `row_statistics`' to the bit."""
    gradient = x.clone()
    found = run(gradient, targets, mask, t, objective, inputs)
    if not EMULATED:
        statistics = cases.row_statistics(x, targets, mask, t)
        for name in ("logprobs", "entropy"):
            ours, theirs = (getattr(y, name).nan_to_num(7.0) for y in (found, statistics))
            assert cases.same_bits(ours, theirs), f"{name} are not row_statistics': {ours} {theirs}"
    exact = reference.row_statistics(x.double(), targets, mask, t)
    float32 = reference.row_statistics(x.float(), targets, mask, t)
    for name in ("logprobs", "entropy"):
        results = (getattr(y, name) for y in (found, exact, float32))
        cases.assert_close(*results, cases.margin(t), name)
    cases.assert_forward_gradient(x, targets, mask, t, objective, inputs, gradient, found, interpreted=False)
    return gradient, found


def rows(vocab: int, dtype: torch.dtype, shape: tuple[int, int] = (2, 2), seed: int = 0) -> tuple[Tensor, ...]:
    """Logits, targets and log-probabilities."""
    logits, targets, *_ = cases.random_rows(vocab, dtype, DEVICE, shape, seed, 2.0)
    return logits, targets, reference.row_statistics(logits, targets, None, PLAIN).logprobs


@pytest.mark.parametrize(
    ("vocab", "dtype", "name"),
    [
        *pairs((8, 4104, 40000, 70000), DTYPES, ("identity", "scaled", "softcap", "temperatures, softcap")),
        *((vocab, torch.bfloat16, "saturated") for vocab in SIZES),
        *((vocab, dtype, "scaled") for vocab in (151936, 262144) for dtype in DTYPES),
    ],
    ids=str,
)
def test_transforms_and_sizes_against_float64(vocab: int, dtype: torch.dtype, name: str) -> None:
    logits, targets, logprobs = rows(vocab, dtype, seed=vocab)
    mask = torch.tensor([True, True, False, True], device=DEVICE)
    inputs = cases.random_inputs(logprobs)
    targets[0], targets[1], targets[2] = vocab - 1, 0, -100
    check(logits, targets, mask, cases.transform(name, DEVICE), OBJECTIVE, inputs)


# Emulated, each formula once: the pairs of them are the C++ backend's, which has the same source.
@pytest.mark.parametrize(
    ("gate", "kl"), each(GATE_FORMULAS, KL_FORMULAS) if EMULATED else pairs(list(GATE_FORMULAS), list(KL_FORMULAS))
)
def test_every_objective_against_float64(gate: str, kl: str) -> None:
    logits, targets, logprobs = rows(48, torch.bfloat16, (2, 10), len(kl))
    inputs = cases.random_inputs(logprobs)
    for rollout, bound in itertools.product(cases.CORRECTIONS.values(), (2.0, 20.0)):
        objective = RowObjective(gate, kl, Numbers(*cases.PARAMETERS[gate], *rollout, bound))
        check(logits, targets, None, PLAIN, objective, inputs)


def test_every_presence_of_inputs_against_float64() -> None:
    logits, targets, logprobs = rows(48, torch.bfloat16, (2, 5))
    for seed, present in enumerate(x for n in range(len(OPTIONAL) + 1) for x in itertools.combinations(OPTIONAL, n)):
        check(logits, targets, None, PLAIN, OBJECTIVE, cases.random_inputs(logprobs, present, seed))


@pytest.mark.parametrize("vocab", SIZES)
def test_the_target_at_the_ends_of_pieces_and_segments(vocab: int) -> None:
    segments = range(0, min(vocab, 5 * kernel._PIECE), kernel._PIECE)
    columns = {c + i for c in segments for i in (-1, 0)} | {vocab - 1, vocab - 8, 7}
    targets = torch.tensor(sorted(c for c in columns if 0 <= c < vocab), device=DEVICE)
    logits, _, logprobs = rows(vocab, torch.bfloat16, (1, len(targets)), vocab)
    check(logits, targets, None, PLAIN, OBJECTIVE, cases.random_inputs(logprobs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [4104, 70000])
@pytest.mark.parametrize("name", ["identity", "softcap"])
def test_masked_idle_invalid_nan_and_minus_infinity(vocab: int, dtype: torch.dtype, name: str) -> None:
    logits, targets, logprobs = rows(vocab, dtype, (1, 10))
    inputs = cases.random_inputs(logprobs, ("old", "ref", "rollout"))
    inputs.advantages[0] = 0.0  # idle
    inputs.advantages[1:], inputs.policy_weights[1:] = 1.5, 1.0
    logits[0, 1, vocab - 5] = torch.nan
    targets[2] = vocab
    logits[0, 3], targets[3] = torch.nan, -100  # masked
    logits[0, 5, targets[5]] = torch.nan
    logits[0, 6, torch.arange(vocab, device=DEVICE) != targets[6]] = -torch.inf
    logits[0, 7, targets[7]] = -torch.inf
    logits[0, 8, : vocab // 2] = -torch.inf
    logits[0, 9] = -torch.inf
    inputs.old[7] = -torch.inf
    mask = torch.ones(10, dtype=torch.bool, device=DEVICE)
    mask[3] = False
    gradient, found = check(logits, targets, mask, cases.transform(name, DEVICE), REINFORCE, inputs)
    nan = [False, True, True, False, False, True, False, False, False, True]
    assert gradient[0].isnan().any(-1).tolist() == gradient[0].isnan().all(-1).tolist() == nan
    assert found.logprobs.isnan().tolist() == nan
    assert found.logprobs[7] == -torch.inf and found.logprobs[6] == 0
    assert (gradient[0, [0, 3]] == 0).all() and (found.terms[:, 3] == 0).all()
    assert (gradient[0, 4] != 0).any()


def test_confident_tokens_keep_their_digits() -> None:
    logits = torch.full((1, 1, 151936), -13.0, dtype=torch.bfloat16, device=DEVICE)
    logits[0, 0, 77777] = 13.0
    ones = torch.ones(1, device=DEVICE)
    found = run(logits, torch.tensor([77777], device=DEVICE), None, PLAIN, REINFORCE, RowInputs(ones, ones))
    expected = -151935 * torch.tensor(-26.0, dtype=torch.float64).exp()
    torch.testing.assert_close(found.logprobs.double().cpu(), expected.view(1), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(logits[0, 0, 77777].double().cpu(), expected, rtol=2.0**-8, atol=0.0)


@pytest.mark.parametrize("vocab", [1000, 40000, 70000])
def test_beside_the_logits_from_strided_rows_and_nothing_beyond(vocab: int) -> None:
    whole, targets, logprobs = rows(vocab + 16, torch.bfloat16, (2, 3))
    logits, targets = whole[:, :2, 8:-8], targets.view(2, 3)[:, :2].reshape(-1) % vocab
    inputs, mask = cases.random_inputs(logprobs[:4]), torch.tensor([True, True, False, True], device=DEVICE)
    inputs.advantages[1], inputs.policy_weights[1] = 0.0, 0.0
    before = whole.clone()
    guarded = torch.full((logits.numel() + 16,), 7.0, dtype=torch.bfloat16, device=DEVICE)
    out = guarded[8:-8].view(logits.shape)
    beside = run(logits, targets, mask, PLAIN, OBJECTIVE, inputs, out)
    assert torch.equal(whole, before)
    assert (guarded[:8] == 7).all() and (guarded[-8:] == 7).all()
    inside = run(logits, targets, mask, PLAIN, OBJECTIVE, inputs)
    assert torch.equal(out, logits)
    assert all(map(torch.equal, beside, inside))
    logits.copy_(before[:, :2, 8:-8])
    assert torch.equal(whole, before)  # nothing else was written


@pytest.mark.skipif(not EMULATED, reason="a GPU takes turns as it likes")
@pytest.mark.parametrize("vocab", [4104, 40000, 70000, 262144])
def test_the_order_of_threads_changes_no_bit(vocab: int) -> None:
    """Nor does it whether a row is loaded early or late; a cluster's rows are ordinary, masked, idle, in any order."""
    logits, targets, logprobs = rows(vocab, torch.bfloat16, (1, 10))
    inputs, mask = cases.random_inputs(logprobs, ("old", "ref", "rollout")), torch.ones(10, dtype=torch.bool)
    inputs.advantages[:], inputs.policy_weights[:] = 1.5, 1.0
    inputs.advantages[[2, 4, 8]], mask[[0, 5, 6, 7]] = 0.0, False

    def results(order: int) -> list[Tensor]:
        x = logits.clone()
        return [x, *run(x, targets, mask, PLAIN, REINFORCE, inputs, order=order)]

    first = results(0)
    assert [bool((row == 0).all()) for row in first[0][0]] == [i in (0, 2, 4, 5, 6, 7, 8) for i in range(10)]
    for order in range(1, 4):
        assert all(map(torch.equal, results(order), first))


def test_no_rows() -> None:
    logits, none = torch.empty(2, 0, 32, device=DEVICE, dtype=torch.bfloat16), torch.empty(0, device=DEVICE)
    found = run(logits, none.long(), None, PLAIN, OBJECTIVE, RowInputs(none, none))
    assert found.terms.shape == (len(TERMS), 0)


def test_what_it_takes() -> None:
    h100 = 227 << 10

    def fits(vocab: int, limit: int = h100) -> bool:
        return kernel.takes(torch.empty(1, 1, vocab, dtype=torch.bfloat16), None, limit)

    assert fits(151936) and fits(28 * 16384 + 16376)
    assert not fits(29 * 16384)  # too long
    assert not fits(262144, 99 << 10)
    assert not fits(1004)  # no whole vectors
    assert not kernel.takes(torch.empty(1, 1, 1000), None, h100)
    rows = torch.empty(2, 3, 1008, dtype=torch.float16)
    assert kernel.takes(rows[:, :, :1000], None, h100)
    assert kernel.takes(rows, torch.empty(rows.shape, dtype=rows.dtype), h100)
    assert not kernel.takes(rows[:, :, 1:1001], None, h100)  # not at 16 bytes
    assert not kernel.takes(rows, torch.empty(2 * 3 * 1008 + 1, dtype=rows.dtype)[1:].view(rows.shape), h100)
    assert not kernel.takes(torch.empty(2, 3, 1004, dtype=torch.float16)[:, :, :1000], None, h100)  # strides


def test_unasked_it_takes_the_sizes_at_which_it_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = SimpleNamespace(major=9, shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h100)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(kernel, "_wanted", None)
    monkeypatch.setattr(kernel, "_has_nvrtc", lambda: True)

    def fits(vocab: int, t: Transform = PLAIN) -> bool:
        return kernel.fits(torch.empty(1, 1, vocab, dtype=torch.bfloat16), None, t)

    assert all(map(fits, (8192, 32000, 49152, 128256, 151936, 262144)))
    assert not any(map(fits, (4096, 151937, 262152)))
    assert not fits(151936, Transform(softcap=30.0))
    h100.major = 10
    assert not fits(151936)


def test_it_can_be_asked_for_and_turned_off() -> None:
    logits = torch.empty(1, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    assert kernel.fits(logits, None, PLAIN) is not EMULATED
    with kernel.use_clusters(False):
        assert not kernel.fits(logits, None, PLAIN)


def test_without_nvrtc_tritons_kernel_is_taken_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "why_unavailable", lambda: "no libnvrtc.so")
    kernel._has_nvrtc.cache_clear()
    with pytest.warns(UserWarning, match=r"slower.*no libnvrtc\.so"):
        assert not kernel._has_nvrtc()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernel._has_nvrtc()  # told once
    kernel._has_nvrtc.cache_clear()
