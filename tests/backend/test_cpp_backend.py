"""What only the C++ row functions are held to: the accuracy of a softcap, numbers of 16 bits, sizes and machines."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import kernel_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, PLAIN, generator
from torch import Tensor

import fastrl
from fastrl.backend.contract import Statistics, Transform
from fastrl.backend.cpp import backend as cpp_backend
from fastrl.backend.cpp import build as cpp_build
from fastrl.backend.cpp import library as cpp_library
from fastrl.backend.torch import rows as reference

pytestmark = pytest.mark.skipif(
    cpp_backend.why_unavailable() is not None, reason=f"no C++ backend: {cpp_backend.why_unavailable()}"
)


@pytest.fixture(autouse=True, scope="module")
def cpp() -> Iterator[None]:
    with fastrl.use_backend("cpp"):
        yield


def random_rows(n: int, vocab: int, dtype: torch.dtype, seed: int = 0, spread: float = 3.0) -> tuple[Tensor, ...]:
    return cases.random_rows(vocab, dtype, "cpu", (1, n), seed, spread)


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
    out = cases.gradient(logits, targets, c, None, None, transform)
    x = logits.double()
    p = torch.softmax(torch.tanh(x), -1)
    exact = -p / torch.cosh(x) ** 2
    exact[..., 2000] += 1
    assert ((out.double() - exact) / exact).abs().max() < 1.5e-6


def test_error_at_the_size_of_the_benchmark() -> None:
    logits, targets, c, h = random_rows(256, 32768, torch.float32)  # rows are alike: 256 of the 2048
    exact = reference.row_statistics(logits.double(), targets, None, PLAIN)
    for ours, oracle in zip(cpp_backend.row_statistics(logits, targets, None, PLAIN), exact, strict=True):
        assert (ours.double() - oracle).abs().max() <= 2e-6  # the last place of 20 is 1.9e-6
    (gradient,) = cases.gradients(logits, targets, None, PLAIN, ((c.double(), h.double()),))
    assert (cases.gradient(logits, targets, c, h).double() - gradient).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_number_of_the_16_bit_types(dtype: torch.dtype) -> None:
    """Widening is exact, as a maximum shows; narrowing rounds to nearest even, as a gradient of any magnitude shows."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    targets = torch.zeros(len(x), dtype=torch.int64)
    found = cpp_backend.row_statistics(x.view(1, -1, 1), targets, None, PLAIN).maximum
    assert torch.equal(found, x.float())
    vectors = x.view(1, 2, -1)  # all entries but the first go through the vector path
    copied = cpp_backend.row_statistics(vectors, torch.zeros(2, dtype=torch.int64), None, PLAIN)
    assert torch.equal(copied.maximum, vectors.float().amax(-1)[0])
    c = torch.randn(40_000, generator=generator()) * 2.0 ** torch.randint(-30, 14, (40_000,), generator=generator())
    zeros = torch.zeros(1, 40_000, 2, dtype=dtype)
    targets = torch.zeros(40_000, dtype=torch.int64)
    statistics = Statistics(*torch.zeros(4, 40_000))  # they say p_j = 1
    cpp_backend.row_gradient(zeros, targets, None, PLAIN, statistics, c, None, zeros)
    assert torch.equal(zeros[0, :, 1], (-c).to(dtype))


@pytest.mark.parametrize("vocab", [2, 5])
def test_many_rows_of_a_tiny_vocabulary(vocab: int) -> None:
    logits, targets, c, h = random_rows(70_000, vocab, torch.float32)
    cases.check(logits, targets, c, h, out=logits)


def test_large_fresh_buffer() -> None:
    """Above the size from which huge pages are asked for, dense and not."""
    logits, targets, c, h = random_rows(9, 300_007, torch.float32)
    cases.check(logits, targets, c, h)
    cases.check(logits.view(3, 3, -1)[:, :2], targets[:6], c[:6], h[:6])


def test_wrong_arguments_are_refused() -> None:
    logits, targets, c, h = random_rows(4, 10, torch.float32)
    found = cpp_backend.row_statistics(logits, targets, None, PLAIN)
    with pytest.raises(ValueError, match="targets"):
        cpp_backend.row_statistics(logits, targets.int(), None, PLAIN)
    with pytest.raises(ValueError, match="mask"):
        cpp_backend.row_statistics(logits, targets, torch.ones(3, dtype=torch.bool), PLAIN)
    with pytest.raises(ValueError, match="logits"):
        cpp_backend.row_statistics(logits.double(), targets, None, PLAIN)
    with pytest.raises(ValueError, match="stride 1"):
        cpp_backend.row_statistics(logits.transpose(1, 2), torch.zeros(10, dtype=torch.int64), None, PLAIN)
    with pytest.raises(ValueError, match="temperatures"):
        cpp_backend.row_statistics(logits, targets, None, Transform(temperatures=torch.ones(8)[::2]))
    with pytest.raises(ValueError, match="out"):
        cpp_backend.row_gradient(logits.half(), targets, None, PLAIN, found, c, h, logits)  # only narrower is taken
    with pytest.raises(ValueError, match="at least one"):
        cpp_backend.row_statistics(torch.empty(1, 4, 0), targets, None, PLAIN)


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
    found = cases.check(logits, targets, c, h, None, Transform(temperature, softcap=softcap))
    assert (found.logprobs <= 0).all()
    assert (found.entropy >= -1e-5).all()
    assert (found.entropy <= torch.tensor(float(vocab)).log() + 1e-5).all()


def test_threads_are_torchs_own() -> None:
    """The library links no thread library of its own."""
    needed = subprocess.run(["ldd", cpp_library._load()._name], capture_output=True, text=True, check=False)
    if needed.returncode != 0:
        pytest.skip("no ldd")
    assert "libc" in needed.stdout
    assert not any(name in needed.stdout for name in ("gomp", "libomp", "iomp", "torch"))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="no flags: 4 lanes"),
        pytest.param(("-march=x86-64-v3",), id="AVX2: 8 lanes", marks=pytest.mark.slow),
    ],
)
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
            cases.check(logits, targets, c, h, None, Transform(temperature=0.7))
            cases.check(logits, targets, c, h, None, Transform(softcap=20.0))
            logits[0, 2, 2222] = torch.nan
            found = cpp_backend.row_statistics(logits, targets, None, PLAIN)
            assert found.entropy.isnan().tolist() == [False, False, True, False]
            if dtype != torch.float32:
                test_every_number_of_the_16_bit_types(dtype)
            logits[0, 2, 2222] = 0.0
            logprobs = cpp_backend.row_statistics(logits, targets, None, PLAIN).logprobs
            inputs = cases.random_inputs(logprobs)
            cases.check_forward_gradient(logits, targets, None, PLAIN, cases.OBJECTIVE, inputs)
    finally:
        monkeypatch.undo()
        cpp_library._load.cache_clear()
