"""The products with kept entries, forward and backward. Hidden sizes are small: the interpreter takes ms a position."""

from __future__ import annotations

from typing import Any

import kept_cases
import kernel_cases as cases
import pytest
import torch
from torch import Tensor

from fastrl.ops.backend import forced, kernels
from fastrl.ops.contract import ByToken, Kept

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def device(backend_device: str) -> str:
    """Each backend in turn, and where its tensors live."""
    return backend_device


def kept_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, *kept: Tensor) -> Tensor:
    return kernels(forced(), hidden).kept_products(hidden, weight, bias, Kept(*kept))


def kept_hidden(gradient: Tensor, weight: Tensor, *rest: Tensor) -> None:
    kernels(forced(), weight).kept_hidden(gradient, weight, Kept(*rest[:3]), rest[3])


def kept_weight(gradient: Tensor, hidden: Tensor, *rest: Any) -> None:
    kernels(forced(), hidden).kept_weight(gradient, hidden, ByToken(*rest[:3]), *rest[3:])


VOCAB = 100
# A few entries, one, none, more than a block of them, and rows that do not count between others.
SIZES = (5, 1, 0, 40, 3, 7, 0, 2)
COUNTS = torch.tensor([True, True, True, True, False, True, False, True])
HIDDEN = (24, 33, 1100)  # whole vectors; none whole; two chunks


def _matrix(rows: int, hidden: int, dtype: torch.dtype, device: str, gap: int = 0) -> Tensor:
    """Rows of whole vectors, or with gaps between them at addresses of no vector."""
    full = torch.randn(rows, hidden + gap).to(dtype).to(device)
    return full[:, gap // 3 : gap // 3 + hidden]


def _close(actual: Tensor, truth: Tensor, float32: Tensor, size: Tensor, dtype: torch.dtype, what: str) -> None:
    """Float32 torch's worst error, 1e-6 and the output's rounding, relative to the sum of absolute values."""
    allowed = 1e-6 + (0.0 if dtype is torch.float32 else cases.rounding(dtype, actual.device.type == "cpu"))
    assert actual.dtype == dtype
    cases.assert_close(actual, truth, float32, allowed, what, size)


def _sums(ids: Tensor, scaled: Tensor, segments: int) -> Tensor:
    """Rows of `scaled` added up by segment; those beyond are left out."""
    out = scaled.new_zeros(segments + 1, *scaled.shape[1:])
    return out.index_add_(0, ids.clamp_max(segments), scaled)[:segments]


def _check_sums(
    actual: Tensor, ids: Tensor, gradient: Tensor, source: Tensor, segments: int, before: Tensor, what: str
) -> None:
    """Segments against float64; those without a position are as they were before."""
    truth, float32, size = (
        before.to(d) * old + _sums(ids, g.to(d)[:, None] * s.to(d), segments)
        for d, g, s, old in (
            (torch.float64, gradient, source, 1),
            (torch.float32, gradient, source, 1),
            (torch.float64, gradient.abs(), source.abs(), 0),
        )
    )
    _close(actual, truth, float32, size + before.double().abs(), actual.dtype, what)
    absent = torch.ones(segments, dtype=torch.bool, device=ids.device).scatter(0, ids[ids < segments], False)
    assert torch.equal(actual[absent], before[absent])


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("hidden_size", HIDDEN)
def test_products_against_float64(hidden_size: int, dtype: torch.dtype, gap: int, bias: bool, device: str) -> None:
    kept = kept_cases.kept_sets(SIZES, VOCAB, device, COUNTS)
    hidden = _matrix(len(SIZES), hidden_size, dtype, device, gap)
    weight = _matrix(VOCAB, hidden_size, dtype, device, gap)
    b = torch.randn(VOCAB).to(dtype).to(device) if bias else None
    hidden[4] = torch.nan  # not read: the row does not count
    actual = kept_products(hidden, weight, b, *kept)
    rows, tokens = kept_cases.entry_rows(kept), kept.token_ids.long()
    part = kept.counts[rows]

    def oracle(d: torch.dtype, absolute: bool = False) -> Tensor:
        terms = hidden[rows].to(d) * weight[tokens].to(d)
        offset = torch.zeros_like(terms[:, 0]) if b is None else b[tokens].to(d)
        return ((terms.abs() if absolute else terms).sum(-1) + offset).where(part, 0.0)

    size = oracle(torch.float64, True)
    _close(actual, oracle(torch.float64), oracle(torch.float32), size, torch.float32, "values")


def test_a_product_is_bitwise_the_same_anywhere(device: str) -> None:
    kept = kept_cases.kept_sets(SIZES, VOCAB, device)
    hidden, weight = (_matrix(n, 1100, torch.float32, device) for n in (len(SIZES), VOCAB))
    actual = kept_products(hidden, weight, None, *kept)
    assert torch.equal(kept_products(hidden, weight, None, *kept), actual)
    for row, span in kept_cases.row_ranges(kept):
        # Every second of the row's entries, alone.
        ids = kept.token_ids[span][::2].contiguous()
        offsets = torch.tensor([0, ids.numel()], device=device)
        alone = kept_products(hidden[row : row + 1], weight, None, ids, offsets, kept.counts[:1])
        assert torch.equal(alone, actual[span][::2])


def test_a_nan_stays_in_its_row(device: str) -> None:
    kept = kept_cases.kept_sets(SIZES, VOCAB, device)
    hidden, weight = (_matrix(n, 24, torch.float32, device) for n in (len(SIZES), VOCAB))
    hidden[3, 5] = torch.nan
    actual = kept_products(hidden, weight, None, *kept)
    assert torch.equal(actual.isnan(), kept_cases.entry_rows(kept) == 3)


# --- sums -------------------------------------------------------------------------------------------------------------


def _gradient(kept: Kept) -> Tensor:
    """Random; 0 in rows that do not count."""
    rows = kept_cases.entry_rows(kept)
    return torch.randn(rows.numel()).to(rows.device).where(kept.counts[rows], 0.0)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("hidden_size", HIDDEN)
def test_hidden_against_float64(hidden_size: int, dtype: torch.dtype, gap: int, device: str) -> None:
    kept = kept_cases.kept_sets(SIZES, VOCAB, device, COUNTS)
    weight = _matrix(VOCAB, hidden_size, dtype, device, gap)
    rows, tokens, gradient = kept_cases.entry_rows(kept), kept.token_ids.long(), _gradient(kept)
    gradient[~kept.counts[rows]] = torch.nan  # not read
    out = _matrix(len(SIZES), hidden_size, dtype, device, gap)
    before = out.clone()
    before[[0, 1, 3, 5, 7]] = 0.0  # rows that take part are written over
    kept_hidden(gradient, weight, *kept, out)
    ids = rows.where(kept.counts[rows], len(SIZES))
    _check_sums(out, ids, gradient.nan_to_num(), weight[tokens], len(SIZES), before, "hidden")


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("hidden_size", HIDDEN)
def test_weight_against_float64(hidden_size: int, dtype: torch.dtype, gap: int, add: bool, device: str) -> None:
    kept = kept_cases.kept_sets(SIZES, VOCAB, device, COUNTS)
    hidden = _matrix(len(SIZES), hidden_size, dtype, device, gap)
    hidden[4] = torch.nan  # not read: the row does not count
    gradient, by_token = _gradient(kept), kept_cases.by_token(kept, VOCAB)
    outs = _matrix(VOCAB, hidden_size, dtype, device, gap), torch.randn(VOCAB).to(dtype).to(device)
    befores = [out.clone() for out in outs]
    kept_weight(gradient, hidden, *by_token, *outs, add)
    ids = by_token.token_ids.long()
    for out, before, source, what in zip(
        outs,
        befores,
        (hidden[by_token.rows.long()].nan_to_num(), torch.ones(ids.numel(), 1, device=device)),
        ("weight", "bias"),
        strict=True,
    ):
        if not add:
            before[ids[ids < VOCAB]] = 0.0
        shape = VOCAB, -1
        _check_sums(
            out.view(shape) if out.dim() == 1 else out,
            ids,
            gradient[by_token.entries],
            source,
            VOCAB,
            before.view(shape) if before.dim() == 1 else before,
            what,
        )


def test_either_alone_is_bitwise_the_same(device: str) -> None:
    kept = kept_cases.kept_sets(SIZES, VOCAB, device, COUNTS)
    hidden = _matrix(len(SIZES), 24, torch.float32, device)
    arguments = _gradient(kept), hidden, *kept_cases.by_token(kept, VOCAB)
    both, alone = ((torch.zeros(VOCAB, 24, device=device), torch.zeros(VOCAB, device=device)) for _ in range(2))
    kept_weight(*arguments, *both, False)
    kept_weight(*arguments, alone[0], None, False)
    kept_weight(*arguments, None, alone[1], False)
    kept_weight(*arguments, None, None, False)
    assert all(torch.equal(a, b) for a, b in zip(both, alone, strict=True))


def _segments(lengths: list[int], rows: int, absent: int, device: str) -> tuple[Tensor, ByToken]:
    """A gradient and segments of such lengths, every third token having none, `absent` entries of no token last."""
    ids = torch.arange(len(lengths)) * 3 // 2
    ids = torch.cat([ids.repeat_interleave(torch.tensor(lengths)), torch.full((absent,), 2 * len(lengths))])
    entries = torch.randperm(ids.numel())
    source = torch.randint(rows, ids.shape, dtype=torch.int32)
    found = ByToken(ids.int().to(device), entries.to(device), source.to(device))
    return torch.randn(ids.numel()).to(device), found


def _weight(gradient: Tensor, hidden: Tensor, by_token: ByToken, vocab: int) -> tuple[Tensor, Tensor]:
    out, out_bias = (torch.full((vocab, *shape), 7.0, device=hidden.device) for shape in (hidden.shape[1:], ()))
    kept_weight(gradient, hidden, *by_token, out, out_bias, False)
    return out, out_bias


def _check_segments(gradient: Tensor, hidden: Tensor, by_token: ByToken, vocab: int) -> None:
    out, out_bias = _weight(gradient, hidden, by_token, vocab)
    ids = by_token.token_ids.long()
    before = torch.full((vocab, 1), 7.0, device=hidden.device)
    before[ids[ids < vocab]] = 0.0
    scale, source = gradient[by_token.entries], hidden[by_token.rows.long()]
    _check_sums(out, ids, scale, source, vocab, before.expand(out.shape), "weight")
    _check_sums(out_bias[:, None], ids, scale, torch.ones_like(source[:, :1]), vocab, before, "bias")


def test_long_segments(device: str) -> None:
    # One piece; two, the second of 1 entry.
    lengths = [300, 1, 513]
    gradient, by_token = _segments(lengths, 10, 5, device)
    _check_segments(gradient, _matrix(10, 8, torch.float32, device), by_token, 2 * len(lengths))


def test_a_wide_row(device: str) -> None:
    kept = kept_cases.kept_sets((3, 600, 2), 1200, device)
    weight, gradient = _matrix(1200, 8, torch.float32, device), _gradient(kept)
    out = torch.full((3, 8), 7.0, device=device)
    kept_hidden(gradient, weight, *kept, out)
    rows = kept_cases.entry_rows(kept)
    _check_sums(out, rows, gradient, weight[kept.token_ids.long()], 3, torch.zeros_like(out), "hidden")
    # A row's pieces are its own: alone, it has the same bits.
    alone = torch.full((1, 8), 7.0, device=device)
    one = kept.token_ids[3:603], torch.tensor([0, 600], device=device), kept.counts[:1]
    kept_hidden(gradient[3:603], weight, *one, alone)
    assert torch.equal(alone[0], out[1])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_segments_of_all_lengths_at_all_places(seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_kernels = pytest.importorskip("fastrl.kernels.kept_weight")
    # Pieces of 16 and groups of 8: a few hundred positions meet every case that thousands would.
    monkeypatch.setattr(weight_kernels, "PIECE", 16)
    monkeypatch.setattr(weight_kernels, "GROUP", 8)
    torch.manual_seed(seed)
    lengths = torch.randint(1, 5, (6,)).tolist() + torch.randint(1, 80, (3,)).tolist() + [32, 33, 49]
    lengths = [lengths[i] for i in torch.randperm(len(lengths)).tolist()]
    gradient, by_token = _segments(lengths, 10, seed % 3 * 7, device)
    hidden, vocab = _matrix(10, 8, torch.float32, device), 2 * len(lengths)
    _check_segments(gradient, hidden, by_token, vocab)
    # A token's sum depends on its own entries alone: without the first segments it has the same bits.
    out = _weight(gradient, hidden, by_token, vocab)[0]
    first = lengths[0] + lengths[1]
    rest = ByToken(*(x[first:].contiguous() for x in by_token))
    assert torch.equal(_weight(gradient, hidden, rest, vocab)[0][3:], out[3:])
    assert torch.equal(_weight(gradient, hidden, by_token, vocab)[0], out)


def test_no_entries(device: str) -> None:
    for rows in (0, 2):
        kept = Kept(
            torch.empty(0, dtype=torch.int32, device=device),
            torch.zeros(rows + 1, dtype=torch.int64, device=device),
            torch.ones(rows, dtype=torch.bool, device=device),
        )
        hidden, weight = _matrix(rows, 8, torch.float32, device), _matrix(VOCAB, 8, torch.float32, device)
        values = kept_products(hidden, weight, None, *kept)
        assert values.shape == (0,)
        before = hidden.clone(), weight.clone()
        kept_hidden(values, weight, *kept, hidden)
        kept_weight(values, hidden, *kept_cases.by_token(kept, VOCAB), weight, None, True)
        assert torch.equal(hidden, before[0]) and torch.equal(weight, before[1])
    # Entries, but none that takes part.
    kept = kept_cases.kept_sets((3, 2), VOCAB, device, torch.zeros(2, dtype=torch.bool))
    hidden, gradient = _matrix(2, 8, torch.float32, device), torch.ones(5, device=device)
    assert not kept_products(hidden, weight, None, *kept).any()
    before = hidden.clone(), weight.clone()
    kept_hidden(gradient, weight, *kept, hidden)
    kept_weight(gradient, hidden, *kept_cases.by_token(kept, VOCAB), weight, None, True)
    assert torch.equal(hidden, before[0]) and torch.equal(weight, before[1])
