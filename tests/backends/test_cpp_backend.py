"""The C++ row functions against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from cpp_cases import (
    DTYPES,
    OBJECTIVE,
    OPTIONAL,
    ROUNDING,
    VOCABULARIES,
    check,
    check_forward_gradient,
    generator,
    needs_cpp,
    random_inputs,
    random_rows,
    same_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastrl.backends.contract import Statistics, Transform
from fastrl.backends.cpp import backend as cpp_backend
from fastrl.backends.cpp import build as cpp_build
from fastrl.backends.cpp import library as cpp_library
from fastrl.backends.torch import rows as reference
from fastrl.objectives.rows import RowInputs

pytestmark = needs_cpp


# --- sizes, types, transforms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_ragged_vocabularies(vocab: int, dtype: torch.dtype, in_place: bool) -> None:
    logits, targets, c, h = random_rows(5, vocab, dtype, seed=vocab)
    check(logits, targets, c, h, in_place=in_place)
    check(*random_rows(3, vocab, dtype, seed=vocab + 1)[:3], None, in_place=in_place)


@pytest.mark.parametrize("position", [0, 15, 16, 1023, 1024, 2047, 2048, 3006])
def test_target_anywhere_in_the_segments(position: int) -> None:
    # 3007 columns: two whole segments of 1024 and a ragged one; the target at the edges of vectors and segments
    logits, _, c, h = random_rows(2, 3007, torch.float32, seed=position)
    check(logits, torch.full((2,), position), c, h)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "transform",
    [
        Transform(temperature=0.7),
        Transform(logit_scale=0.1),
        Transform(softcap=30.0),
        Transform(softcap=30.0, logit_scale=1.7, temperature=1.3),
        Transform(softcap=0.5, temperature=0.05),  # most entries saturated
        Transform(softcap=1000.0),  # all entries in tanh's small branch, where 1 - tanh^2 is nearly 1
    ],
)
def test_transforms(dtype: torch.dtype, transform: Transform) -> None:
    logits, targets, c, h = random_rows(6, 4099, dtype)
    check(logits, targets, c, h, transform=transform)
    logits[0, :, 5:50] = -torch.inf  # stays -inf under a softcap
    check(logits, targets.clamp_min(50), c, h, transform=transform)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_temperature_per_row(softcap: float) -> None:
    logits, targets, c, h = random_rows(6, 777, torch.float32)
    temperatures = torch.tensor([0.2, 0.5, 1.0, 1.5, 3.0, 10.0])
    check(logits, targets, c, h, transform=Transform(temperature=9.0, temperatures=temperatures, softcap=softcap))


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap_keeps_relative_accuracy_of_small_logits(softcap: float) -> None:
    # z is read off the maximum of rows with a single entry
    x = torch.logspace(-30, 2, 4001).view(1, -1, 1) * torch.tensor([1.0, -1.0]).repeat(2001)[:4001].view(1, -1, 1)
    z = cpp_backend.row_statistics(x, torch.zeros(4001, dtype=torch.int64), None, Transform(softcap=softcap)).maximum
    exact = softcap * torch.tanh(x.double().flatten() / softcap)
    assert ((z.double() - exact) / exact).abs().max() < 4e-7


def test_softcap_keeps_relative_accuracy_of_the_slope() -> None:
    # at 8 times the softcap 1 - tanh^2 is 4.5e-7: formed as a difference it would have lost three digits of seven
    logits = torch.linspace(-8, 8, 4001).view(1, 1, -1)
    targets, c, transform = torch.tensor([2000]), torch.ones(1), Transform(softcap=1.0)
    found = cpp_backend.row_statistics(logits, targets, None, transform)
    out = torch.empty_like(logits)
    cpp_backend.row_gradient(logits, targets, None, transform, found, c, None, out)
    x = logits.double()
    p = torch.softmax(torch.tanh(x), -1)
    exact = -p / torch.cosh(x) ** 2
    exact[..., 2000] += 1
    assert ((out.double() - exact) / exact).abs().max() < 1.5e-6


# --- hard rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("margin", [10.0, 17.0, 26.0, 40.0, 60.0, 80.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_confident_tokens(margin: float, dtype: torch.dtype) -> None:
    vocab = 151936
    logits = torch.zeros(1, 3, vocab, dtype=dtype)
    logits[0, 0, 7] = margin
    logits[0, 1, vocab - 1] = margin
    logits[0, 2] = torch.randn(vocab, generator=generator()).to(dtype)
    logits[0, 2, 70_000] = margin
    targets = torch.tensor([7, vocab - 1, 70_000])
    check(logits.clone(), targets, torch.ones(3), None)
    check(logits, targets, torch.ones(3), torch.tensor([0.5, -0.5, 0.0]))
    exact = reference.row_statistics(logits.double(), targets, None, Transform()).logprobs
    found = cpp_backend.row_statistics(logits, targets, None, Transform()).logprobs
    assert (found < 0).all()  # never rounded to 0
    assert ((found.double() - exact) / exact).abs().max() < 2e-6  # the relative error of float32's 1e-5 at z = 80
    c, out = torch.ones(3), torch.empty_like(logits)
    statistics = cpp_backend.row_statistics(logits, targets, None, Transform())
    cpp_backend.row_gradient(logits, targets, None, Transform(), statistics, c, None, out)
    at_target = out[0, torch.arange(3), targets].double()
    bound = 2e-6 + ROUNDING[dtype]
    if dtype == torch.float16:  # its last place
        assert (at_target + torch.expm1(exact)).abs().max() <= bound * torch.expm1(exact).abs().max() + 2.0**-25
    else:
        assert ((at_target / -torch.expm1(exact)) - 1).abs().max() < bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [-80.0, 80.0])
def test_offsets(dtype: torch.dtype, offset: float) -> None:
    logits, targets, c, h = random_rows(4, 5001, dtype)
    check(logits + offset, targets, c, h)
    check(logits + offset, targets, c, h, transform=Transform(temperature=0.7))


def test_large_negative_logits_and_targets_on_them() -> None:
    # entries far below the maximum have probability 0; the target's log-probability is exact however low
    logits, targets, c, h = random_rows(4, 2100, torch.float32)
    logits[0, :, ::2] = torch.tensor([-88.0, -1000.0, -3e4, torch.finfo(torch.float32).min])[:, None]
    check(logits, targets | 1, c, h)
    even = torch.tensor([0, 2, 1024, 2098])
    found = cpp_backend.row_statistics(logits, even, None, Transform()).logprobs
    exact = torch.log_softmax(logits[0].double(), -1).gather(-1, even[:, None])[:, 0]
    assert ((found.double() - exact) / exact).abs().max() < 3e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.0, 25.0])
def test_minus_infinity(dtype: torch.dtype, softcap: float) -> None:
    vocab = 3000
    logits, targets, c, h = random_rows(6, vocab, dtype)
    logits[0, 0, :1024] = -torch.inf  # the whole first segment
    logits[0, 1, 1024:2048] = -torch.inf  # one in the middle
    logits[0, 2, torch.arange(vocab) != 1234] = -torch.inf  # all but the target
    logits[0, 3, torch.arange(vocab) != 1234] = -torch.inf  # all but one that is not the target
    logits[0, 4, 2000:] = -torch.inf  # the ragged end
    logits[0, 5, 77] = -torch.inf  # the target alone
    targets = torch.tensor([2000, 2500, 1234, 0, 5, 77])
    transform = Transform(softcap=softcap)
    check(logits, targets, c, h, transform=transform)
    found = cpp_backend.row_statistics(logits, targets, None, transform)
    assert found.logprobs[2] == 0
    assert found.entropy[2] == 0
    assert found.logprobs[3] == -torch.inf
    assert found.logprobs[5] == -torch.inf
    out = torch.empty_like(logits)
    cpp_backend.row_gradient(logits, targets, None, transform, found, c, h, out)
    off_target = torch.ones_like(out).scatter(-1, targets.view(1, -1, 1), 0).bool()
    assert (out[(logits == -torch.inf) & off_target] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_the_smallest_number(dtype: torch.dtype) -> None:
    logits = torch.full((1, 3, 1500), torch.finfo(dtype).min, dtype=dtype)
    targets = torch.tensor([0, 1499, 3])
    logits[0, 2, 3] = 0.0
    check(logits, targets, torch.ones(3), torch.ones(3))
    found = cpp_backend.row_statistics(logits, targets, None, Transform())
    torch.testing.assert_close(found.entropy[0], torch.tensor(1500.0).log())
    assert found.logprobs[2] == 0


def test_all_minus_infinity_is_nan() -> None:
    logits = torch.zeros(1, 3, 40)
    logits[0, 1] = -torch.inf
    targets = torch.tensor([0, 1, 2])
    found = cpp_backend.row_statistics(logits, targets, None, Transform())
    for statistic in (found.logprobs, found.entropy, found.log_sum):
        assert statistic.isnan().tolist() == [False, True, False]
    out = torch.empty_like(logits)
    cpp_backend.row_gradient(logits, targets, None, Transform(), found, torch.ones(3), torch.ones(3), out)
    assert out.isnan().all(-1).tolist() == [[False, True, False]]
    assert out.isnan().any(-1).tolist() == [[False, True, False]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 40, 1023, 1030, 2050, 2051])
@pytest.mark.parametrize("softcap", [0.0, 25.0])
def test_nan_stays_in_its_row(dtype: torch.dtype, bad: float, column: int, softcap: float) -> None:
    if softcap and bad == torch.inf:
        pytest.skip("tanh(inf) is 1")
    # the column: in the target's segment, a whole one, the ragged one, the target itself (40)
    logits, _, c, h = random_rows(5, 2052, dtype)
    targets = torch.full((5,), 40)
    logits[0, 2, column] = bad
    logits[0, 3, 40] = -torch.inf
    logits[0, 3, column] = bad  # beside a target of probability 0
    expected = [False, False, True, True, False]
    transform = Transform(softcap=softcap)
    found = cpp_backend.row_statistics(logits, targets, None, transform)
    for statistic in found if bad != torch.inf else (found.logprobs, found.entropy, found.log_sum):
        assert statistic.isnan().tolist() == expected
    for coefficients in ((c, h), (c, None), (torch.zeros(5), torch.zeros(5))):
        out = torch.empty_like(logits)
        cpp_backend.row_gradient(logits, targets, None, transform, found, *coefficients, out)
        assert out[0].isnan().all(-1).tolist() == expected
        assert out[0].isnan().any(-1).tolist() == expected


def test_nan_of_any_payload() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC00001, 0x7FFFFFFF, -1, -0x400000, -0x7FFFFF], dtype=torch.int32)
    logits = torch.zeros(1, len(bits), 64)
    logits[0, :, 33] = bits.view(torch.float32)
    targets = torch.zeros(len(bits), dtype=torch.int64)
    for transform in (Transform(), Transform(softcap=3.0)):
        found = cpp_backend.row_statistics(logits, targets, None, transform)
        assert all(statistic.isnan().all() for statistic in found)


@pytest.mark.parametrize("target", [-1, -100, 31, 2**40, -(2**63)])
def test_unmasked_target_out_of_range(target: int) -> None:
    logits, targets, c, h = random_rows(3, 31, torch.float32)
    targets[1] = target
    found = cpp_backend.row_statistics(logits, targets, None, Transform())
    assert found.logprobs.isnan().tolist() == [False, True, False]
    check(logits, targets, c, h)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask(dtype: torch.dtype) -> None:
    logits, targets, c, h = random_rows(8, 1031, dtype)
    mask = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0]).bool()
    targets[~mask] = -100
    logits[0, 1], logits[0, 5] = torch.nan, torch.inf  # not read
    c[5] = h[5] = torch.nan
    check(logits.clone(), targets, c, h, mask)
    found = cpp_backend.row_statistics(logits, targets, mask, Transform())
    assert all((statistic[~mask] == 0).all() for statistic in found)
    cpp_backend.row_gradient(logits, targets, mask, Transform(), found, c, h, logits)
    assert (logits[0, ~mask] == 0).all()
    everything = torch.zeros(8, dtype=torch.bool)
    assert all((s == 0).all() for s in cpp_backend.row_statistics(logits, targets, everything, Transform()))


def test_no_rows() -> None:
    logits, targets = torch.empty(2, 0, 30), torch.empty(0, dtype=torch.int64)
    found = cpp_backend.row_statistics(logits, targets, None, Transform())
    assert all(statistic.shape == (0,) for statistic in found)
    cpp_backend.row_gradient(logits, targets, None, Transform(), found, torch.empty(0), None, logits)
    empty = RowInputs(torch.empty(0), torch.empty(0))
    assert cpp_backend.row_forward_gradient(logits, targets, None, Transform(), OBJECTIVE, empty).terms.shape == (8, 0)


def test_zero_coefficients_give_zero() -> None:
    logits, targets, c, h = random_rows(3, 100, torch.float32)
    c[1] = h[1] = 0.0
    out = torch.full_like(logits, 7.0)
    found = cpp_backend.row_statistics(logits, targets, None, Transform())
    cpp_backend.row_gradient(logits, targets, None, Transform(), found, c, h, out)
    assert (out[0, 1] == 0).all()
    assert (out[0, [0, 2]] != 0).all()


def test_error_at_the_size_of_the_benchmark() -> None:
    logits, targets, c, h = random_rows(256, 32768, torch.float32)  # rows are alike: 256 of the 2048
    exact = reference.row_statistics(logits.double(), targets, None, Transform())
    found = cpp_backend.row_statistics(logits, targets, None, Transform())
    for ours, oracle in zip(found, exact, strict=True):
        assert (ours.double() - oracle).abs().max() <= 2e-6  # the last place of 20 is 1.9e-6
    gradient64 = torch.empty(logits.shape, dtype=torch.float64)
    reference.row_gradient(logits.double(), targets, None, Transform(), exact, c.double(), h.double(), gradient64)
    out = torch.empty_like(logits)
    cpp_backend.row_gradient(logits, targets, None, Transform(), found, c, h, out)
    assert (out.double() - gradient64).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_the_16_bit_types(dtype: torch.dtype) -> None:
    """Widening is exact, as a maximum shows; narrowing rounds to nearest even, as a gradient of any magnitude shows."""
    if dtype == torch.float32:
        pytest.skip("nothing to convert")
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    targets = torch.zeros(len(x), dtype=torch.int64)
    found = cpp_backend.row_statistics(x.view(1, -1, 1), targets, None, Transform()).maximum
    assert torch.equal(found, x.float())
    vectors = x.view(1, 2, -1)  # all entries but the first go through the vector path
    copied = cpp_backend.row_statistics(vectors, torch.zeros(2, dtype=torch.int64), None, Transform())
    assert torch.equal(copied.maximum, vectors.float().amax(-1)[0])
    c = torch.randn(40_000, generator=generator()) * 2.0 ** torch.randint(-30, 14, (40_000,), generator=generator())
    zeros = torch.zeros(1, 40_000, 2, dtype=dtype)
    targets = torch.zeros(40_000, dtype=torch.int64)
    statistics = Statistics(*torch.zeros(4, 40_000))  # they say p_j = 1
    cpp_backend.row_gradient(zeros, targets, None, Transform(), statistics, c, None, zeros)
    assert torch.equal(zeros[0, :, 1], (-c).to(dtype))


# --- layouts, threads, positions --------------------------------------------------------------------------------------


def test_strided_views() -> None:
    whole = torch.randn(3, 6, 97, generator=generator())
    targets = torch.randint(0, 90, (15,), generator=generator())
    c = torch.randn(15, generator=generator())
    for view in (whole[:, :-1], whole[:, 1:, 5:95], whole.transpose(0, 1)[:5], whole[:, ::2][:, :, 1:92]):
        n = view.shape[0] * view.shape[1]
        check(view.clone(), targets[:n], c[:n], c[:n])
        copy = whole.clone()
        inside = copy.as_strided(view.shape, view.stride(), view.storage_offset())
        dense = view.contiguous()
        found = cpp_backend.row_statistics(inside, targets[:n], None, Transform())
        expected = cpp_backend.row_statistics(dense, targets[:n], None, Transform())
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
        cpp_backend.row_gradient(dense, targets[:n], None, Transform(), expected, c[:n], c[:n], dense)
        cpp_backend.row_gradient(inside, targets[:n], None, Transform(), found, c[:n], c[:n], inside)
        assert same_bits(inside, dense)
        inside.copy_(view)
        assert torch.equal(copy, whole)  # nothing outside the view was written


def test_gradient_into_a_strided_buffer() -> None:
    logits, targets, c, h = random_rows(6, 50, torch.float32)
    logits = logits.view(2, 3, 50)
    found = cpp_backend.row_statistics(logits, targets, None, Transform())
    dense, wide = torch.empty(2, 3, 50), torch.zeros(2, 4, 60)
    cpp_backend.row_gradient(logits, targets, None, Transform(), found, c, h, dense)
    cpp_backend.row_gradient(logits, targets, None, Transform(), found, c, h, wide[:, :3, 5:55])
    assert same_bits(wide[:, :3, 5:55], dense)
    wide[:, :3, 5:55] = 0
    assert (wide == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [17, 1000, 5003])
@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_a_rows_bits_depend_on_the_row_alone(dtype: torch.dtype, vocab: int, softcap: float) -> None:
    logits, targets, c, h = random_rows(9, vocab, dtype)
    transform = Transform(softcap=softcap, temperature=0.9)

    def run(x: Tensor, rows: Tensor) -> list[Tensor]:
        n = rows.numel()
        found = cpp_backend.row_statistics(x, targets[rows], None, transform)
        out = torch.empty(x.shape, dtype=dtype)
        cpp_backend.row_gradient(x, targets[rows], None, transform, found, c[rows], h[rows], out)
        inputs = RowInputs(c[rows], torch.full((n,), 0.3), entropy_weights=h[rows])
        overwritten = x.clone(memory_format=torch.contiguous_format)
        result = cpp_backend.row_forward_gradient(overwritten, targets[rows], None, transform, OBJECTIVE, inputs)
        return [*found, out.view(n, -1), *result[:2], result.terms.T, overwritten.view(n, -1)]

    together = run(logits, torch.arange(9))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for found, expected in zip(run(logits, torch.arange(9)), together, strict=True):
                assert same_bits(found, expected)
    finally:
        torch.set_num_threads(threads)
    order = torch.tensor([8, 3, 3, 0])
    for found, expected in zip(run(logits[:, order], order), together, strict=True):
        assert same_bits(found, expected[order])
    for shift in range(1, 20):  # every alignment
        buffer = torch.empty(vocab + shift, dtype=dtype)
        buffer[shift:] = logits[0, 4]
        for found, expected in zip(run(buffer[shift:].view(1, 1, -1), torch.tensor([4])), together, strict=True):
            assert same_bits(found, expected[4:5])


@pytest.mark.parametrize("vocab", [2, 5])
def test_many_rows_of_a_tiny_vocabulary(vocab: int) -> None:
    logits, targets, c, h = random_rows(70_000, vocab, torch.float32)
    check(logits, targets, c, h, in_place=True)


def test_large_fresh_buffer() -> None:
    """Above the size from which huge pages are asked for, dense and not."""
    logits, targets, c, h = random_rows(9, 300_007, torch.float32)
    check(logits, targets, c, h)
    check(logits.view(3, 3, -1)[:, :2], targets[:6], c[:6], h[:6])


def test_wrong_arguments_are_refused() -> None:
    logits, targets, c, h = random_rows(4, 10, torch.float32)
    found = cpp_backend.row_statistics(logits, targets, None, Transform())
    with pytest.raises(ValueError, match="targets"):
        cpp_backend.row_statistics(logits, targets.int(), None, Transform())
    with pytest.raises(ValueError, match="mask"):
        cpp_backend.row_statistics(logits, targets, torch.ones(3, dtype=torch.bool), Transform())
    with pytest.raises(ValueError, match="logits"):
        cpp_backend.row_statistics(logits.double(), targets, None, Transform())
    with pytest.raises(ValueError, match="stride 1"):
        cpp_backend.row_statistics(logits.transpose(1, 2), torch.zeros(10, dtype=torch.int64), None, Transform())
    with pytest.raises(ValueError, match="temperatures"):
        cpp_backend.row_statistics(logits, targets, None, Transform(temperatures=torch.ones(8)[::2]))
    with pytest.raises(ValueError, match="out"):
        cpp_backend.row_gradient(logits, targets, None, Transform(), found, c, h, logits.half())
    with pytest.raises(ValueError, match="at least one"):
        cpp_backend.row_statistics(torch.empty(1, 4, 0), targets, None, Transform())


@settings(max_examples=60)
@given(
    vocab=st.integers(1, 2300),
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 0.01, 1.0, 10.0, 100.0]),
    offset=st.floats(-80, 80, width=32),
    holes=st.sampled_from([0.0, 0.3, 0.95]),
    dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from([0.0, 0.0, 7.0, 50.0]),
    temperature=st.sampled_from([1.0, 0.25, 3.3]),
)
def test_properties(
    vocab: int,
    seed: int,
    spread: float,
    offset: float,
    holes: float,
    dtype: torch.dtype,
    softcap: float,
    temperature: float,
) -> None:
    logits, targets, c, h = random_rows(3, vocab, dtype, seed, spread)
    logits = (logits + offset).to(dtype)
    empty = torch.rand(logits.shape, generator=generator(seed)) < holes
    logits = logits.masked_fill(empty.scatter(-1, targets.view(1, -1, 1), False), -torch.inf)
    check(logits, targets, c, h, transform=Transform(temperature=temperature, softcap=softcap))
    found = cpp_backend.row_statistics(logits, targets, None, Transform(temperature=temperature, softcap=softcap))
    assert (found.logprobs <= 0).all()
    assert (found.entropy >= -1e-5).all()
    assert (found.entropy <= torch.tensor(float(vocab)).log() + 1e-5).all()


# --- scale_, and the narrower machines --------------------------------------------------------------------------------


def test_scale() -> None:
    x = torch.randn(5, 7, generator=generator())
    scaled, version = x.clone(), None
    cpp_backend.scale_(scaled, torch.tensor(0.5))
    assert torch.equal(scaled, x * 0.5)
    version = scaled._version
    cpp_backend.scale_(scaled, torch.tensor(1.0))
    assert scaled._version == version  # not touched


@pytest.mark.parametrize("flags", [(), ("-march=x86-64-v3",)], ids=["no flags: 4 lanes", "AVX2: 8 lanes"])
def test_narrower_vectors(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sources without this processor's own instructions."""
    monkeypatch.setattr(cpp_build, "_PROCESSOR_FLAGS", (flags,))
    cpp_library._load.cache_clear()
    try:
        if cpp_backend.why_unavailable() is not None:
            pytest.skip("not an x86-64 compiler")
        for dtype in DTYPES:
            logits, targets, c, h = random_rows(4, 5003, dtype)
            logits[0, 1, 70:2000] = -torch.inf
            targets[1] = 3000
            check(logits, targets, c, h, transform=Transform(temperature=0.7))
            check(logits, targets, c, h, transform=Transform(softcap=20.0))
            logits[0, 2, 2222] = torch.nan
            found = cpp_backend.row_statistics(logits, targets, None, Transform())
            assert found.entropy.isnan().tolist() == [False, False, True, False]
            if dtype != torch.float32:
                test_every_number_of_the_16_bit_types(dtype)
            logits[0, 2, 2222] = 0.0
            logprobs = cpp_backend.row_statistics(logits, targets, None, Transform()).logprobs
            inputs = random_inputs(logprobs, OPTIONAL, 0)
            check_forward_gradient(logits, targets, None, Transform(), OBJECTIVE, inputs)
    finally:
        monkeypatch.undo()
        cpp_library._load.cache_clear()
