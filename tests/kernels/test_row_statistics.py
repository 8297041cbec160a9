"""Statistics and gradient of rows of logits, on every backend: sizes, types, transforms, layouts, difficult rows."""

from __future__ import annotations

from collections.abc import Iterator

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DTYPES, PLAIN
from pairs import each, pairs
from torch import Tensor

import fastrl
from fastrl.backend.contract import Statistics, Transform
from fastrl.backend.torch import rows as reference

# Triton's interpreter is numpy, which warns where a GPU's arithmetic silently gives infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# How Triton loads other types is tested against float64: its interpreter is slow.
TYPES = [("triton", torch.float32), *(("cpp", dtype) for dtype in DTYPES)]


@pytest.fixture(params=["cpp", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each in turn, forced: torch's row functions are the oracle."""
    with fastrl.use_backend(request.param):
        yield request.param


@pytest.fixture
def device(backend_device: str) -> str:
    """Each backend in turn, and where its tensors live."""
    return backend_device


# --- sizes, types, transforms -----------------------------------------------------------------------------------------

# 1 and 31: less than a vector, and a row of odd length; 1000: one block (C++: less than a segment), not full; 4097: one
# block and one entry more; 40001: several blocks a segment, four segments in float32 and two in bfloat16, odd (C++:
# ragged in segment, pair and vector); 151936: a real vocabulary.
VOCABULARIES = (1, 31, 1000, 4097, 40001, 151936)


@pytest.mark.parametrize(
    ("vocab", "dtype", "name"), pairs(VOCABULARIES, DTYPES, ("identity", "scaled", "softcap")), ids=str
)
def test_against_float64(vocab: int, dtype: torch.dtype, name: str, backend: str, device: str) -> None:
    if vocab == 151936 and backend == "triton" and device == "cpu":
        pytest.skip("the interpreter is slow")
    logits, targets, c, h = cases.random_rows(vocab, dtype, device, seed=vocab)
    t = cases.transform(name, device)
    cases.check(logits, targets, c, None, None, t)
    cases.check(logits, targets, c, h, None, t, out=logits)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["identity", "softcap"])
@pytest.mark.parametrize("vocab", [1000, 4100])  # of whole vectors; of float32 whole ones, of 16 bits not
def test_a_narrower_gradient_against_float64(vocab: int, dtype: torch.dtype, name: str, device: str) -> None:
    logits, targets, c, h = cases.random_rows(vocab, torch.float32, device, seed=vocab)
    for slope in (None, h):
        out = torch.full_like(logits, torch.nan, dtype=dtype)
        cases.check(logits, targets, c, slope, None, cases.transform(name, device), out)


@pytest.mark.parametrize("backend", ["cpp"], indirect=True)
def test_a_wider_gradient_is_refused(device: str) -> None:
    logits, targets, c, h = cases.random_rows(64, torch.bfloat16, device)
    found = cases.row_statistics(logits, targets, None, PLAIN)
    with pytest.raises(ValueError, match=r"out must be torch.bfloat16 .*, got torch.float32"):
        cases.row_gradient(logits, targets, None, PLAIN, found, c, h, out=torch.empty_like(logits, dtype=torch.float32))


# A transform is of numbers that are float32 by then: what their type was, it does not see.
@pytest.mark.parametrize(("name", "dtype"), each(cases.TRANSFORMS, DTYPES), ids=str)
def test_transforms(name: str, dtype: torch.dtype, device: str) -> None:
    logits, targets, c, h = cases.random_rows(4099, dtype, device)
    logits[..., 5:50] = -torch.inf  # stays -inf under a softcap
    targets, t = targets.clamp_min(50), cases.transform(name, device)
    cases.check(logits, targets, c, h, None, t)
    cases.check(logits, targets, c, None, None, t, out=logits)


@pytest.mark.parametrize("position", [0, 15, 16, 1023, 1024, 2047, 2048, 3006])
def test_target_anywhere_in_the_segments(position: int, device: str) -> None:
    # 3007 columns: two whole segments of 1024 and a ragged one; the target at the edges of vectors and segments
    logits, targets, c, h = cases.random_rows(3007, torch.float32, device, (1, 2), seed=position)
    cases.check(logits, torch.full_like(targets, position), c, h)


def test_a_long_row_is_split(device: str) -> None:
    # Triton: its gradient into spans of 65536 columns; where rows are few its statistics, too, into segments, which
    # another kernel combines.
    logits, targets, c, h = cases.random_rows(65536 + 4099, torch.float32, device, (1, 3))
    targets[:2] = torch.tensor([65536 + 7, 7])
    mask = torch.tensor([True, True, False], device=device)
    found = cases.check(logits, targets, c, h, mask)
    assert not any(values[2] for values in found)


# --- hard rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "vocab", "dtype"),
    [
        ("triton", 1000, torch.float32),
        ("triton", 40000, torch.float32),  # several segments, the target's not the first
        *(("cpp", 151936, dtype) for dtype in DTYPES),
    ],
    indirect=["backend"],
)
@pytest.mark.parametrize("gap", [10.0, 17.0, 26.0, 40.0, 60.0, 80.0])
def test_confident_tokens_keep_their_relative_accuracy(
    gap: float, dtype: torch.dtype, vocab: int, backend: str, device: str
) -> None:
    logits = torch.zeros(1, 3, vocab, device=device, dtype=dtype)
    logits[0, 2] = torch.randn(vocab, generator=cases.generator()).to(device)
    targets = torch.tensor([7, vocab - 3, vocab // 2], device=device)
    logits[0, torch.arange(3), targets] = gap
    found = cases.row_statistics(logits, targets, None, PLAIN)
    truth = cases.assert_statistics(found, logits, targets, None, PLAIN)
    ones, cpp = torch.ones(3, device=device), backend == "cpp"
    rounding = 0.0 if dtype is torch.float32 else cases.rounding(dtype, interpreted=False)
    tiny = 2.0**-25 if dtype is torch.float16 else 1e-37  # below its last place nothing is left
    for h in (None, ones):
        if cpp:  # it holds every entry to its own size; below are those that others hold
            cases.check(logits, targets, ones, h)
        out = cases.gradient(logits, targets, ones, h)
        (exact,) = cases.gradients(logits, targets, None, PLAIN, ((ones.double(), None if h is None else h.double()),))
        # Every entry of the equal rows; of all rows the target's 1 - p, unless the entropy's part cancels in it.
        torch.testing.assert_close(out[0, :2].double(), exact[0, :2], rtol=2e-5 + rounding, atol=tiny)
        if h is None:
            mine, theirs = (x[0].gather(-1, targets[:, None]) for x in (out.double(), exact))
            torch.testing.assert_close(mine, theirs, rtol=(2e-6 if cpp else 2e-5) + rounding, atol=tiny)
    assert (found.logprobs < 0).all()  # never rounded to 0
    # e**-80 is 2**-115.4, whose exponent float32 rounds by 4e-6: that is the relative error allowed, but C++'s is less.
    for field in ("logprobs", "entropy", "log_sum"):
        rtol = 2e-6 if cpp and field == "logprobs" else 1e-5
        torch.testing.assert_close(getattr(found, field).double(), getattr(truth, field), rtol=rtol, atol=0)


def test_an_example_by_hand(device: str) -> None:
    # docs/design.md: 151,936 equal entries 26 below the target give -7.8e-7, not 0. Here 1,000 of them.
    logits = torch.zeros(1, 1, 1001, device=device)
    logits[0, 0, 7] = 26.0
    actual = cases.row_statistics(logits, torch.tensor([7], device=device), None, PLAIN)
    assert actual.logprobs.item() == pytest.approx(-1000 * 5.109089028e-12, rel=1e-5)


@pytest.mark.parametrize("offset", [-80.0, 80.0, 4096.0])
def test_an_offset_changes_nothing(offset: float, device: str) -> None:
    logits, targets, c, h = cases.random_rows(5001, torch.float32, device)
    logits = (logits * 64).round() / 64  # so that the sum with the offset is exact
    moved = cases.check(logits + offset, targets, c, h)
    still = cases.row_statistics(logits, targets, None, PLAIN)
    assert torch.equal(moved.entropy, still.entropy)
    assert torch.equal(moved.logprobs, still.logprobs)
    for dtype in DTYPES:
        cases.check((logits + offset).to(dtype), targets, c, h, None, Transform(0.7))


def test_the_rounding_of_the_maximum_is_in_no_probability(device: str) -> None:
    """Of z = 143.3 half a unit in the last place is 7.6e-6, which all p_j would be off by together.

    It shows where an fma rounds once: on a GPU, and in the interpreter since Triton 3.9.
    """
    logits = torch.tensor([10.1, 33.7, 100.3, 999.9], device=device).view(2, 2, 1).repeat(1, 1, 1000)
    targets = torch.tensor([0, 17, 500, 999], device=device)
    logits.view(4, 1000)[torch.arange(4), targets] -= 3.0
    ones = torch.ones(4, device=device)
    for h in (None, ones):
        out = cases.gradient(logits, targets, ones, h, None, Transform(0.7))
        weights = ((x, None if h is None else x) for x in (ones.double(), ones))
        truth, float32 = cases.gradients(logits, targets, None, Transform(0.7), tuple(weights))
        # The others' entries alone: the target's is another formula's.
        others = torch.ones_like(logits, dtype=torch.bool).view(4, 1000)
        others[torch.arange(4), targets] = False
        out, truth, float32 = (x.view(4, 1000)[others].view(1, 4, 999) for x in (out, truth, float32))
        assert cases.gradient_error(out, truth) <= cases.gradient_error(float32, truth) + 1e-6


EXTREME = 20000  # several segments


def _extreme_rows(vocab: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, int]]:
    """Rows and their targets."""
    random = torch.randn(vocab, generator=cases.generator()) * 3
    column, lowest = torch.arange(vocab), torch.finfo(dtype).min
    last = vocab - 1
    return {
        "first block -inf": (random.where(column >= vocab // 2, -torch.inf), last),
        "all but the last -inf": (random.where(column >= last, -torch.inf), last),
        "a block in the middle -inf": (random.where((column < 1024) | (column >= 2048), -torch.inf), vocab // 2 + 7),
        "the ragged end -inf": (random.where(column < vocab - 1000, -torch.inf), 5),
        "all but the target -inf": (random.where(column == 1234, -torch.inf), 1234),
        "all but another -inf": (random.where(column == 0, -torch.inf), last),
        "target -inf": (random.where(column != 77, -torch.inf), 77),
        "all the lowest": (torch.full((vocab,), lowest), 3),
        "all the lowest but the target": (torch.full((vocab,), lowest).where(column != 3, 0.0), 3),
        "all the lowest but another": (torch.full((vocab,), lowest).where(column != 3, 1.0), 5),
        "the highest and the lowest": (torch.full((vocab,), lowest).where(column != last, -lowest), last),
        "far below": (random.where(column % 2 == 1, -3e4), 1),
        "target far below": (random.where(column % 2 == 1, -1000.0), 2098),
    }


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize(("backend", "dtype"), TYPES, indirect=["backend"], ids=str)
def test_extreme_rows(dtype: torch.dtype, softcap: float, device: str) -> None:
    rows, t = _extreme_rows(EXTREME, dtype), Transform(softcap=softcap)
    logits = torch.stack([row for row, _ in rows.values()]).to(dtype).to(device)[None]
    targets = torch.tensor([target for _, target in rows.values()], device=device)
    c, h = torch.randn(2, len(rows), generator=cases.generator()).to(device)
    cases.check(logits, targets, c, None, None, t)
    found = cases.check(logits, targets, c, h, None, t)
    z, _ = reference.transformed(logits[0].double(), t)
    logprobs = torch.log_softmax(z, -1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=1e-6, atol=1e-6)
    place = {kind: i for i, kind in enumerate(rows)}
    for kind in ("target far below", "all the lowest but another"):
        torch.testing.assert_close(found.logprobs[place[kind]].double(), logprobs[place[kind]], rtol=1e-6, atol=0)
    torch.testing.assert_close(found.entropy[place["all the lowest"]].cpu(), torch.tensor(float(EXTREME)).log())
    certain = ["all but the target -inf"]
    if not softcap:
        certain += ["all the lowest but the target", "the highest and the lowest"]
        assert found.entropy[place["all the lowest but another"]] == 0
    for kind in certain:
        assert found.logprobs[place[kind]] == 0 and found.entropy[place[kind]] == 0, kind
    for kind in ("all but another -inf", "target -inf"):
        assert found.logprobs[place[kind]] == -torch.inf, kind
    assert not found.entropy.isnan().any()
    banned = (logits == -torch.inf).scatter(-1, targets.view(1, -1, 1), False)
    for weights in ((c, None), (c, h)):
        gradient = cases.gradient(logits, targets, *weights, None, t)
        assert gradient.isfinite().all()
        assert (gradient[banned] == 0).all()


@pytest.mark.parametrize(("backend", "dtype"), TYPES, indirect=["backend"], ids=str)
@pytest.mark.parametrize(("bad", "softcap"), [(torch.nan, 0.0), (torch.nan, 25.0), (torch.inf, 0.0), (-torch.inf, 0.0)])
def test_only_the_row_with_the_nan_is_nan(bad: float, softcap: float, dtype: torch.dtype, device: str) -> None:
    # The target's column (40), its segment, a whole one, the ragged one. -inf: the whole row.
    columns = [slice(None)] if bad == -torch.inf else [0, 40, 1023, 1030, 2050, 5000, 5001]
    logits, targets, c, h = cases.random_rows(5002, dtype, device, (1, 3 * len(columns)))
    targets[:] = 40
    t = Transform(softcap=softcap)
    sane = *cases.row_statistics(logits, targets, None, t), cases.gradient(logits, targets, c, h, None, t)[0]
    logits[0, 2::3, 40] = -torch.inf  # beside a target of probability 0
    for i, column in enumerate(columns):
        logits[0, 3 * i + 1 : 3 * i + 3, column] = bad
    expected = [False, True, True] * len(columns)
    found = cases.row_statistics(logits, targets, None, t)
    for field in Statistics._fields if bad != bad else ("logprobs", "entropy", "log_sum"):
        assert getattr(found, field).isnan().tolist() == expected, field
    for weights in ((0 * c, 0 * h), (c, None), (c, h)):  # an idle row is NaN too
        out = cases.gradient(logits, targets, *weights, None, t)
        assert out[0].isnan().all(-1).tolist() == expected
        assert out[0].isnan().any(-1).tolist() == expected
    assert all(cases.same_bits(a[::3], b[::3]) for a, b in zip((*found, out[0]), sane, strict=True))


@pytest.mark.parametrize("softcap", [0.0, 25.0])
def test_a_nan_among_minus_infinities_is_not_an_empty_row(softcap: float, device: str) -> None:
    # The maximum of an empty slice of a vocabulary is -inf, and such a slice is left out.
    logits = torch.full((1, 4, 1031), -torch.inf, device=device)
    logits[0, torch.arange(3), torch.tensor([0, 700, 1030])] = torch.nan
    targets = torch.tensor([0, 5, 5, 5], device=device)
    found = cases.row_statistics(logits, targets, None, Transform(softcap=softcap))
    assert all(statistic[:3].isnan().all() for statistic in found)
    assert found.maximum[3] == -torch.inf


def test_nan_of_any_payload(device: str) -> None:
    bits = torch.tensor([0x7F800001, 0x7FC00001, 0x7FFFFFFF, -1, -0x400000, -0x7FFFFF], dtype=torch.int32)
    logits = torch.zeros(1, len(bits), 64, device=device)
    logits[0, :, 33] = bits.view(torch.float32).to(device)
    targets = torch.zeros(len(bits), dtype=torch.int64, device=device)
    for t in (PLAIN, Transform(softcap=3.0)):
        found = cases.row_statistics(logits, targets, None, t)
        assert all(statistic.isnan().all() for statistic in found)


def test_a_target_outside_the_vocabulary(device: str) -> None:
    logits, _, c, h = cases.random_rows(1000, torch.float32, device, (2, 3))
    targets = torch.tensor([-1, 1000, -100, 2**40, -(2**63), 5], device=device)
    found = cases.check(logits, targets, c, h)  # the other statistics are as ever, the gradient is NaN
    assert found.logprobs.isnan().tolist() == [True] * 5 + [False]


@pytest.mark.parametrize(("backend", "dtype"), TYPES, indirect=["backend"], ids=str)
def test_masked_and_idle_rows(dtype: torch.dtype, device: str) -> None:
    logits, targets, c, h = cases.random_rows(1031, dtype, device, (2, 4))
    sane = cases.row_statistics(logits, targets, None, PLAIN)
    mask = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0], device=device).bool()
    targets[~mask] = -100
    logits[0, 1], logits[1, 1] = torch.nan, torch.inf  # not read
    c[5] = h[5] = torch.nan
    c[3] = h[3] = 0.0
    cases.check(logits, targets, c, None, mask)
    found = cases.check(logits, targets, c, h, mask)
    for a, b in zip(found, sane, strict=True):
        assert torch.equal(a, b.where(mask, 0.0))
    out = cases.gradient(logits, targets, c, h, mask).flatten(0, 1)
    assert (out.abs().amax(-1) == 0).tolist() == [False, True, True, True, False, True, False, True]
    nothing = torch.zeros_like(mask)
    assert not any(s.any() for s in cases.row_statistics(logits, targets, nothing, PLAIN))


def test_no_rows(device: str) -> None:
    logits, none = torch.empty(0, 3, 8, device=device), torch.empty(0, device=device)
    found = cases.row_statistics(logits, none.long(), None, PLAIN)
    assert all(x.shape == (0,) for x in found)
    cases.row_gradient(logits, none.long(), None, PLAIN, found, none, None, out=logits)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [97, 1000])
def test_strided_views(vocab: int, device: str) -> None:
    whole = torch.randn(2, 3, vocab + 3, generator=cases.generator()).to(device)
    _, targets, c, h = cases.random_rows(vocab - 7, torch.float32, device, (1, 6))
    views = whole[:, :-1], whole[:, 1:, 5:-2], whole.transpose(0, 1)[:2], whole[:, ::2][:, :, 1:-5]
    for view in (*views, whole[:, :1].expand(2, 2, vocab + 3)):
        rows = [x[: view.shape[0] * view.shape[1]] for x in (targets, c, h)]
        found = cases.check(view, *rows)
        dense = view.contiguous()
        assert all(map(torch.equal, found, cases.row_statistics(dense, rows[0], None, PLAIN)))
        fresh = cases.gradient(dense, *rows)
        assert torch.equal(cases.gradient(dense, *rows, out=dense), fresh)
        if 0 in view.stride():
            continue  # rows that share their memory
        copy = whole.clone()
        inside = copy.as_strided(view.shape, view.stride(), view.storage_offset())
        assert torch.equal(cases.gradient(inside, *rows, out=inside), fresh)
        inside.copy_(view)
        assert torch.equal(copy, whole)  # nothing outside the view was written
        wide = torch.full((*view.shape[:1], view.shape[1] + 1, view.shape[2] + 3), 7.0, device=device)
        part = wide[:, :-1, 1:-2]
        assert torch.equal(cases.gradient(view, *rows, out=part), fresh)
        part.fill_(7.0)
        assert (wide == 7.0).all()


@pytest.mark.parametrize("cut", [8, 640, 1000])  # within a vector's reach of the start, in the middle, at a ragged end
def test_slices_of_a_vocabulary_have_the_gradient_of_the_whole(cut: int, device: str) -> None:
    """Two slices with the whole row's statistics: the target is in one, and no column takes its place in the other."""
    logits, targets, c, h = cases.random_rows(1001, torch.float32, device)
    statistics = cases.row_statistics(logits, targets, None, PLAIN)
    whole = cases.gradient(logits, targets, c, h)
    parts = [
        cases.row_gradient(x, targets - first, None, PLAIN, statistics, c, h, out=torch.empty_like(x))
        for x, first in ((logits[..., :cut].contiguous(), 0), (logits[..., cut:].contiguous(), cut))
    ]
    assert torch.equal(torch.cat(parts, -1), whole)
