"""`find_support` of every backend against a stable sort in float64, and against transformers' warpers.

A sampler keeps the last entries of that sort, so what a backend finds is right if it is such an end, and not longer or
shorter than the limits allow. Where masses are float32 exponentials the limits are those of top_p - 1e-6 and
top_p + 1e-6: an exponential e^(z - max) has the error of z - max, 2^-24 of its size, and with it a cumulative
probability up to half a millionth; elsewhere 1e-12.
"""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl.backend.choice import forced, row_functions

# The interpreter is numpy, which warns where a GPU's arithmetic silently gives infinities and NaN.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("backend")]
not_interpreted = pytest.mark.parametrize("backend", ["cpp", "torch"], indirect=True)
only_cpp = pytest.mark.parametrize("backend", ["cpp"], indirect=True)

MARGIN = {"cpp": 1e-6, "torch": 1e-12, "triton": 1e-6}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOP_PS = [1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0]


@pytest.fixture
def device(backend_device: str) -> str:
    """Each backend in turn, and where its tensors live."""
    return backend_device


def find_support(logits: Tensor, *arguments: float) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = row_functions(forced(), logits).find_support(logits, *arguments)
    return found


def stable_order(z: Tensor) -> Tensor:
    """The columns of z (V,) that are not -inf, in rising order of z, of equal ones the lowest first."""
    order = torch.sort(z.double() + 0.0, stable=True).indices
    return order[z[order] > -torch.inf]


def support_size(rising: Tensor, top_k: int, top_p: float, min_p: float) -> int:
    """How many of z sorted, float64, a sampler keeps."""
    if top_k > 0:
        rising = rising[rising >= rising[-min(top_k, len(rising))]]
    if top_p < 1:
        removed = torch.softmax(rising, -1).cumsum(-1) <= 1 - top_p
        removed[-1] = False
        rising = rising[~removed]
    if min_p > 0:
        rising = rising[rising - rising[-1] >= math.log(min_p)]
    return len(rising)


def check(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[Tensor]:
    """Call the backend and compare; returns the rows' token ids."""
    ids, offsets = find_support(logits, temperature, top_k, top_p, min_p)
    rows = logits.cpu().float().flatten(0, 1) / temperature
    assert ids.dtype == torch.int32 and ids.is_contiguous() and ids.device == logits.device
    assert offsets.dtype == torch.int64 and offsets.shape == (len(rows) + 1,) and offsets.device == logits.device
    assert offsets[0] == 0 and offsets[-1] == len(ids)
    found = list(ids.cpu().long().split(offsets.diff().tolist()))
    for row, (z, support) in enumerate(zip(rows, found, strict=True)):
        case = f"row {row} of {forced()}, V = {len(z)}: {temperature, top_k, top_p, min_p}"
        low, high = top_p, top_p
        if top_p < 1:
            low, high = max(top_p - MARGIN[forced()], 0.0), min(top_p + MARGIN[forced()], 1.0)
        order = stable_order(z)
        least, most = (support_size(z.double()[order], top_k, p, min_p) for p in (low, high))
        assert least <= len(support) <= most, f"{case}: {len(support)} support, not {least} to {most}"
        expected = order[-len(support) :].sort().values
        assert torch.equal(support, expected), f"{case}: {support.tolist()[:20]}, not {expected.tolist()[:20]}"
    return found


def random_logits(vocab: int, dtype: torch.dtype, device: str, spread: float = 3.0, seed: int = 0) -> Tensor:
    """(2, 2, V)"""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(2, 2, vocab, generator=generator) * spread).to(dtype).to(device)


def combinations(vocab: int) -> list[tuple[float, int, float, float]]:
    """Temperature, top_k, top_p, min_p."""
    found = [(1.0, 0, top_p, 0.0) for top_p in TOP_PS]
    found += [(1.0, top_k, 1.0, 0.0) for top_k in (1, 5, vocab, 2 * vocab)]
    found += [(1.0, 0, 1.0, min_p) for min_p in (0.05, 1.0)]
    return [*found, (0.7, 50, 0.95, 0.0), (1.3, 5, 0.5, 0.05), (3.0, 0, 0.9, 0.05), (0.05, vocab // 2, 0.999999, 1e-9)]


# --- random rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 127, 1000, 4099])
def test_random_rows(backend: str, vocab: int, dtype: torch.dtype, device: str) -> None:
    arguments = combinations(vocab)
    if backend == "triton":  # the interpreter takes a tenth of a second per row
        arguments = (
            arguments[DTYPES.index(dtype) :: 3] if vocab in (127, 1000) else arguments[-3 + DTYPES.index(dtype) :][:1]
        )
    logits = random_logits(vocab, dtype, device)
    for chosen in arguments:
        check(logits[:, :1] if backend == "triton" else logits, *chosen)


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
@not_interpreted
def test_a_real_vocabulary(spread: float) -> None:
    logits = random_logits(151936, torch.float32, "cpu", spread)[:1, :1]
    for arguments in [(1.0, 0, 0.9, 0.0), (0.7, 70000, 0.999, 0.01)]:
        check(logits, *arguments)


def test_views(device: str) -> None:
    wide = torch.randn(2, 3, 160, generator=torch.Generator().manual_seed(1)).to(device)
    for view in (wide[:, 1:, 3:130], wide.transpose(0, 1)[1:, :, :127], wide[:1, :1].expand(2, 1, 160), wide[:, ::2]):
        check(view, 1.0, 0, 0.9, 0.0)


def test_no_rows(device: str) -> None:
    ids, offsets = find_support(torch.zeros(0, 3, 5, device=device), 1.0, 0, 0.9, 0.0)
    assert ids.shape == (0,) and offsets.tolist() == [0]


@only_cpp
def test_any_number_of_threads() -> None:
    logits = random_logits(4099, torch.bfloat16, "cpu")
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(find_support(logits, 1.0, 0, 0.9, 0.0))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


# --- rows made to be difficult ----------------------------------------------------------------------------------------


def adversarial_rows(vocab: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(2)
    random = torch.randn(vocab, generator=g)
    column = torch.arange(vocab)
    two = torch.where(random > 0, 1.0, -1.0)
    holes = torch.where((column // 7) % 2 == 0, random * 3, -torch.inf)
    rows = {
        "all equal": torch.full((vocab,), 2.5),
        "all zeros of both signs": torch.where(random > 0, 0.0, -0.0),
        "zeros of both signs at the top": torch.where(random > 1, 0.0, torch.where(random > 0, -0.0, -random.abs())),
        "zeros of both signs below": torch.where(random > 1, 1e-3, torch.where(random > 0, 0.0, -0.0)),
        "two values": two,
        "two values, a level apart": two * 4 + 3,
        "a spike": torch.where(column == vocab // 2, 30.0, 0.0),
        "a low spike": torch.where(column == vocab // 3, 8.0, random),
        "blocks of -inf": holes,
        "one that is not -inf": torch.where(column == vocab - 1, -5.0, -torch.inf),
        "subnormal": column.flip(0) * 2.0**-149,
        "of all sizes": torch.sign(random) * 10.0 ** (torch.arange(vocab) * 83.0 / vocab - 45),
        "many ties": (random * 4).round() / 4,
        "far away": random * 0.01 + 4096,
        "a mask of finfo.min": torch.where(random > 1, random, torch.finfo(torch.float32).min),
        "a staircase": -column.float() / 8,
    }
    return {key: row.float() for key, row in rows.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adversarial_rows(backend: str, dtype: torch.dtype, device: str) -> None:
    vocab = 130 if backend == "triton" else 1000
    logits = torch.stack(list(adversarial_rows(vocab).values())).to(dtype).to(device)
    limit = torch.finfo(dtype)  # what a narrower type makes infinite is another test's
    logits = torch.where(logits == -torch.inf, logits, logits.clamp(limit.min, limit.max))[None]
    arguments = [chosen for chosen in combinations(vocab) if chosen[0] >= 1]  # below, finfo.max would be +inf
    if backend == "triton":
        arguments = arguments[1 + DTYPES.index(dtype) :: 5]
    for chosen in arguments:
        check(logits, *chosen)


@pytest.mark.parametrize("depth", [1.0, 3.5, 12.0, 40.0])
def test_limits_at_a_step_of_two_values(depth: float, device: str) -> None:
    """1 - top_p is the lower value's probability, or is an entry less: what is decided within rounding."""
    vocab = 200
    row = torch.full((vocab,), -depth)
    row[::10] = 0.0
    e = math.exp(-depth)
    for entries in (1, 90, 180):
        share = entries * e / (180 * e + 20)
        for top_p in {1 - share, 1 - share - 2e-6, min(1 - share + 2e-6, 1.0)}:
            check(row[None, None].to(device), 1.0, 0, top_p, 0.0)


def test_of_equal_entries_the_last_stay(device: str) -> None:
    logits = torch.tensor([[[1.0, 1.0, 0.0, 1.0, 1.0]]], device=device)
    found = check(logits, 1.0, 0, 0.4, 0.0)  # 2 of 4 + 1/e have 0.458, 1 has 0.229
    assert found[0].tolist() == [3, 4]
    assert check(logits, 1.0, 0, 1e-17, 0.0)[0].tolist() == [4]  # 1 - top_p is 1: all would be dropped
    # What top-k cuts off it cuts off with all ties, and what is left has all the probability.
    assert [row.tolist() for row in check(logits, 1.0, 2, 0.6, 0.0)] == [[1, 3, 4]]


def test_of_equal_entries_in_several_blocks_the_last_stay(device: str) -> None:
    """A row is written in blocks, of 1,024 entries in Triton's kernel; all of the first is dropped here."""
    found = check(torch.zeros(1, 1, 1500, device=device), 1.0, 0, 0.2, 0.0)
    assert found[0][-1] == 1499


def test_ties_are_those_after_the_division(device: str) -> None:
    pair = torch.tensor([2.0 - 2.0**-23, 2.0 - 2.0**-22])
    assert pair[0] > pair[1] and pair[0] / 1.9 == pair[1] / 1.9
    logits = torch.cat([pair, torch.tensor([1.0])])[None, None].to(device)
    assert check(logits, 1.0, 1, 1.0, 0.0)[0].tolist() == [0]
    assert check(logits, 1.9, 1, 1.0, 0.0)[0].tolist() == [0, 1]


def test_min_p_is_relative_to_the_largest(device: str) -> None:
    bound = math.log(0.5)  # it lies between two float32 numbers: the smaller is dropped
    above = torch.tensor(bound)
    if above.item() < bound:
        above = torch.nextafter(above, torch.tensor(0.0))
    values = torch.stack([torch.tensor(0.0), above, torch.nextafter(above, torch.tensor(-1.0))])
    assert values[2].item() < bound <= values[1].item()
    found = check(values[None, None].to(device), 1.0, 0, 1.0, 0.5)
    assert found[0].tolist() == [0, 1]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@not_interpreted
def test_any_row(data: st.DataObject) -> None:
    value = st.one_of(
        st.floats(-(2.0**100), 2.0**100, width=32),
        st.integers(-6, 6).map(lambda n: n / 2),
        st.just(-math.inf),
        st.just(-0.0),
    )
    values = data.draw(st.lists(value, min_size=1, max_size=70).filter(lambda row: max(row) > -math.inf))
    top_p = data.draw(st.one_of(st.just(1.0), st.floats(1e-9, 1.0)))
    min_p = data.draw(st.sampled_from([0.0, 0.0, 1e-5, 0.2, 1.0]))
    arguments = data.draw(st.sampled_from([1.0, 0.3, 7.0])), data.draw(st.integers(0, 80)), top_p, min_p
    check(torch.tensor(values)[None, None], *arguments)


# --- the sampler that it stands for -----------------------------------------------------------------------------------


def warped_count(z: Tensor, top_k: int, top_p: float, min_p: float) -> int:
    """How many entries transformers' warpers leave of float64 z (V,)."""
    from transformers.generation import logits_process

    warpers: list[Any] = []
    if top_k > 0:
        warpers.append(logits_process.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(logits_process.TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(logits_process.MinPLogitsWarper(min_p))
    scores = z.double()[None]
    for warper in warpers:
        scores = warper(None, scores)
    return int((scores > -torch.inf).sum())


def test_as_many_as_transformers(backend: str, device: str) -> None:
    pytest.importorskip("transformers")
    vocab = 500
    rows = adversarial_rows(vocab)
    chosen = [rows[key] for key in ("many ties", "blocks of -inf", "two values", "a staircase")]
    logits = torch.stack(chosen)[None].to(device)
    # MinP compares with a rounded product: 1.0 would drop a maximum that rounds below itself.
    arguments = [(1.0, 20, 0.9, 0.0), (0.7, 0, 0.95, 0.05), (2.0, 100, 0.6, 0.3), (1.0, 7, 1.0, 0.0)]
    for temperature, top_k, top_p, min_p in arguments[: 2 if backend == "triton" else None]:
        _, offsets = find_support(logits, temperature, top_k, top_p, min_p)
        low, high = (top_p, top_p) if top_p == 1 else (top_p - MARGIN[forced()], top_p + MARGIN[forced()])
        for z, count in zip(torch.stack(chosen) / temperature, offsets.diff().tolist(), strict=True):
            least, most = (warped_count(z, top_k, p, min_p) for p in (low, high))
            assert least <= count <= most, (temperature, top_k, top_p, min_p)


# --- rows without a distribution --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_without_a_distribution_is_named(backend: str, dtype: torch.dtype, device: str) -> None:
    good = torch.randn(3, 4, 41, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    cuts = (0, 1.0, 0.0) if backend == "triton" else (5, 0.9, 0.0)  # the interpreter is slow, and this comes first
    for value, what in ((math.nan, "a NaN"), (math.inf, r"a \+inf"), (-math.inf, "nothing but -inf")):
        for column in (0, 40):
            logits = good.clone()
            logits[1, 2, slice(None) if value == -math.inf else column] = value
            logits[2, 0, 1] = math.nan  # a later row
            with pytest.raises(ValueError, match=f"^logits row 6 has {what}$"):
                find_support(logits, 1.0, *cuts)


def test_nan_beside_infinity_and_overflow(device: str) -> None:
    logits = torch.zeros(1, 1, 5, device=device)
    logits[0, 0, 3] = 1e38
    with pytest.raises(ValueError, match=r"logits row 0 has a \+inf"):
        find_support(logits, 1e-3, 0, 0.9, 0.0)
    logits[0, 0, 1:3] = torch.tensor([math.inf, math.nan])
    with pytest.raises(ValueError, match="logits row 0 has a NaN"):
        find_support(logits, 1.0, 0, 0.9, 0.0)


@only_cpp
def test_the_cpp_backend_checks_layouts() -> None:
    with pytest.raises(ValueError, match="stride 1"):
        find_support(torch.zeros(2, 3, 10)[:, :, ::2], 1.0, 0, 0.9, 0.0)
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        find_support(torch.zeros(2, 3, 10, dtype=torch.float64), 1.0, 0, 0.9, 0.0)


# --- memory -----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation returns, views of `given` left out."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given, self.bytes = given.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() != self.given:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@not_interpreted
def test_no_tensor_of_rows_by_vocabulary() -> None:
    n, vocab = 24, 1 << 16
    logits = torch.randn(1, 1, vocab, generator=torch.Generator().manual_seed(4)).bfloat16().expand(1, n, vocab)
    with Largest(logits) as largest:
        ids, _ = find_support(logits, 1.0, 0, 0.1, 0.0)
    assert 0 < len(ids) < n * vocab / 50
    assert 0 < largest.bytes <= 8 << 17  # a block of int64 at most; an (N, V) tensor of bytes has 1.6 million


SCRIPT = """
from pathlib import Path
import torch
from fastrl.backend.cpp.backend import find_support

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

row = torch.randn(1, 1, 1 << 17)
find_support(row[:, :, :100], 1.0, 0, 0.9, 0.0)  # the library is loaded and the threads are started
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
ids, offsets = find_support(row.expand(1, 1024, 1 << 17), 1.0, 0, 0.1, 0.0)
print(((kilobytes("VmHWM") - before) << 10) - 4 * len(ids))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads and resets a process' peak in /proc")
@only_cpp
def test_the_cpp_library_allocates_little() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32 << 20  # an (N, V) tensor of bytes has 128 MiB
