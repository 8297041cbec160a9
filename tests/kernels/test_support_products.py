"""The products with support entries, forward and backward. Hidden sizes are small: the interpreter is slow."""

from __future__ import annotations

from typing import Any

import kernel_cases as cases
import pytest
import support_cases
import torch
from pairs import pairs
from torch import Tensor

from fastrl.backend.choice import forced, row_functions
from fastrl.backend.contract import ByToken, Support

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def device(backend_device: str) -> str:
    """Each backend in turn, and where its tensors live."""
    return backend_device


def support_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, *support: Tensor) -> Tensor:
    return row_functions(forced(), hidden).support_products(hidden, weight, bias, Support(*support))


def support_hidden(gradient: Tensor, weight: Tensor, *rest: Any) -> None:
    row_functions(forced(), weight).support_hidden(gradient, weight, Support(*rest[:3]), *rest[3:])


def support_weight(gradient: Tensor, hidden: Tensor, *rest: Any) -> None:
    row_functions(forced(), hidden).support_weight(gradient, hidden, ByToken(*rest[:4]), *rest[4:])


def _blank(*tensors: Tensor) -> None:
    """Make these what `blank` might give: its zeros, or anything where the functions write zeros."""
    for x in tensors:
        x.fill_(7.0 if forced() == "triton" else 0.0)


VOCAB = 100
# A few entries, one, none, more than a block of them, and rows that do not count between others.
SIZES = (5, 1, 0, 40, 3, 7, 0, 2)
VALID = torch.tensor([True, True, True, True, False, True, False, True])
HIDDEN = (24, 33, 1100)  # whole vectors; none whole; two chunks
#: Of them, types, gaps between rows and a test's own switch.
VARIANTS = pairs(HIDDEN, cases.DTYPES, (0, 3), (False, True))


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


@pytest.mark.parametrize(("hidden_size", "dtype", "gap", "bias"), VARIANTS, ids=str)
def test_products_against_float64(hidden_size: int, dtype: torch.dtype, gap: int, bias: bool, device: str) -> None:
    support = support_cases.random_support(SIZES, VOCAB, device, VALID)
    hidden = _matrix(len(SIZES), hidden_size, dtype, device, gap)
    weight = _matrix(VOCAB, hidden_size, dtype, device, gap)
    b = torch.randn(VOCAB).to(dtype).to(device) if bias else None
    hidden[4] = torch.nan  # not read: the row does not count
    actual = support_products(hidden, weight, b, *support)
    rows, tokens = support_cases.entry_rows(support), support.token_ids.long()
    part = support.valid[rows]

    def oracle(d: torch.dtype, absolute: bool = False) -> Tensor:
        terms = hidden[rows].to(d) * weight[tokens].to(d)
        offset = torch.zeros_like(terms[:, 0]) if b is None else b[tokens].to(d)
        return ((terms.abs() if absolute else terms).sum(-1) + offset).where(part, 0.0)

    size = oracle(torch.float64, True)
    _close(actual, oracle(torch.float64), oracle(torch.float32), size, torch.float32, "values")


def test_a_product_is_bitwise_the_same_anywhere(device: str) -> None:
    if forced() == "torch" and device != "cpu":
        pytest.skip("torch groups a GPU's sums by the shape")
    support = support_cases.random_support(SIZES, VOCAB, device)
    hidden, weight = (_matrix(n, 1100, torch.float32, device) for n in (len(SIZES), VOCAB))
    actual = support_products(hidden, weight, None, *support)
    assert torch.equal(support_products(hidden, weight, None, *support), actual)
    for row, span in support_cases.row_ranges(support):
        # Every second of the row's entries, alone.
        ids = support.token_ids[span][::2].contiguous()
        offsets = torch.tensor([0, ids.numel()], device=device)
        alone = support_products(hidden[row : row + 1], weight, None, ids, offsets, support.valid[:1])
        assert torch.equal(alone, actual[span][::2])


def test_a_nan_stays_in_its_row(device: str) -> None:
    support = support_cases.random_support(SIZES, VOCAB, device)
    hidden, weight = (_matrix(n, 24, torch.float32, device) for n in (len(SIZES), VOCAB))
    hidden[3, 5] = torch.nan
    actual = support_products(hidden, weight, None, *support)
    assert torch.equal(actual.isnan(), support_cases.entry_rows(support) == 3)


# --- sums -------------------------------------------------------------------------------------------------------------


def _gradient(support: Support) -> Tensor:
    """Random; 0 in rows that do not count."""
    rows = support_cases.entry_rows(support)
    return torch.randn(rows.numel()).to(rows.device).where(support.valid[rows], 0.0)


@pytest.mark.parametrize(("hidden_size", "dtype", "gap", "keep"), VARIANTS, ids=str)
def test_hidden_against_float64(hidden_size: int, dtype: torch.dtype, gap: int, keep: bool, device: str) -> None:
    support = support_cases.random_support(SIZES, VOCAB, device, VALID)
    weight = _matrix(VOCAB, hidden_size, dtype, device, gap)
    rows, tokens, gradient = support_cases.entry_rows(support), support.token_ids.long(), _gradient(support)
    gradient[~support.valid[rows]] = torch.nan  # not read
    out = _matrix(len(SIZES), hidden_size, dtype, device, gap)
    before = out.clone() if keep else torch.zeros_like(out)
    before[[0, 1, 3, 5, 7]] = 0.0  # rows that take part are written over
    if not keep:
        _blank(out)
    support_hidden(gradient, weight, *support, out, keep)
    ids = rows.where(support.valid[rows], len(SIZES))
    _check_sums(out, ids, gradient.nan_to_num(), weight[tokens], len(SIZES), before, "hidden")


@pytest.mark.parametrize(("hidden_size", "dtype", "gap", "add"), VARIANTS, ids=str)
def test_weight_against_float64(hidden_size: int, dtype: torch.dtype, gap: int, add: bool, device: str) -> None:
    support = support_cases.random_support(SIZES, VOCAB, device, VALID)
    hidden = _matrix(len(SIZES), hidden_size, dtype, device, gap)
    hidden[4] = torch.nan  # not read: the row does not count
    gradient, by_token = _gradient(support), support_cases.by_token(support, VOCAB)
    outs = _matrix(VOCAB, hidden_size, dtype, device, gap), torch.randn(VOCAB).to(dtype).to(device)
    befores = [out.clone() if add else torch.zeros_like(out) for out in outs]
    if not add:
        _blank(*outs)
    support_weight(gradient, hidden, *by_token, *outs, add)
    ids = by_token.token_ids.long()
    for out, before, source, what in zip(
        outs,
        befores,
        (hidden[by_token.rows.long()].nan_to_num(), torch.ones(ids.numel(), 1, device=device)),
        ("weight", "bias"),
        strict=True,
    ):
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
    support = support_cases.random_support(SIZES, VOCAB, device, VALID)
    hidden = _matrix(len(SIZES), 24, torch.float32, device)
    arguments = _gradient(support), hidden, *support_cases.by_token(support, VOCAB)
    both, alone = ((torch.zeros(VOCAB, 24, device=device), torch.zeros(VOCAB, device=device)) for _ in range(2))
    support_weight(*arguments, *both, False)
    support_weight(*arguments, alone[0], None, False)
    support_weight(*arguments, None, alone[1], False)
    support_weight(*arguments, None, None, False)
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
    out, out_bias = (torch.empty((vocab, *shape), device=hidden.device) for shape in (hidden.shape[1:], ()))
    _blank(out, out_bias)
    support_weight(gradient, hidden, *by_token, out, out_bias, False)
    return out, out_bias


def _check_segments(gradient: Tensor, hidden: Tensor, by_token: ByToken, vocab: int) -> None:
    out, out_bias = _weight(gradient, hidden, by_token, vocab)
    ids = by_token.token_ids.long()
    before = torch.zeros((vocab, 1), device=hidden.device)
    scale, source = gradient[by_token.entries], hidden[by_token.rows.long()]
    _check_sums(out, ids, scale, source, vocab, before.expand(out.shape), "weight")
    _check_sums(out_bias[:, None], ids, scale, torch.ones_like(source[:, :1]), vocab, before, "bias")


def test_long_segments(device: str) -> None:
    # One piece; two, the second of 1 entry.
    lengths = [300, 1, 513]
    gradient, by_token = _segments(lengths, 10, 5, device)
    _check_segments(gradient, _matrix(10, 8, torch.float32, device), by_token, 2 * len(lengths))


def test_a_wide_row(device: str) -> None:
    support = support_cases.random_support((3, 600, 2), 1200, device)
    weight, gradient = _matrix(1200, 8, torch.float32, device), _gradient(support)
    out = torch.full((3, 8), 7.0, device=device)
    support_hidden(gradient, weight, *support, out, False)
    rows = support_cases.entry_rows(support)
    _check_sums(out, rows, gradient, weight[support.token_ids.long()], 3, torch.zeros_like(out), "hidden")
    # A row's pieces are its own: alone, it has the same bits.
    alone = torch.full((1, 8), 7.0, device=device)
    one = support.token_ids[3:603], torch.tensor([0, 600], device=device), support.valid[:1]
    support_hidden(gradient[3:603], weight, *one, alone, False)
    assert torch.equal(alone[0], out[1])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_segments_of_all_lengths_at_all_places(seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_kernels = pytest.importorskip("fastrl.kernels.support_weight")
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
    rest = ByToken(*(x[first:].contiguous() for x in by_token[:3]))
    assert torch.equal(_weight(gradient, hidden, rest, vocab)[0][3:], out[3:])
    assert torch.equal(_weight(gradient, hidden, by_token, vocab)[0], out)


def test_no_entries(device: str) -> None:
    for rows in (0, 2):
        support = Support(
            torch.empty(0, dtype=torch.int32, device=device),
            torch.zeros(rows + 1, dtype=torch.int64, device=device),
            torch.ones(rows, dtype=torch.bool, device=device),
        )
        hidden, weight = _matrix(rows, 8, torch.float32, device), _matrix(VOCAB, 8, torch.float32, device)
        values = support_products(hidden, weight, None, *support)
        assert values.shape == (0,)
        before = hidden.clone(), weight.clone()
        support_hidden(values, weight, *support, hidden, True)
        support_weight(values, hidden, *support_cases.by_token(support, VOCAB), weight, None, True)
        assert torch.equal(hidden, before[0]) and torch.equal(weight, before[1])
    # Entries, but none that takes part.
    support = support_cases.random_support((3, 2), VOCAB, device, torch.zeros(2, dtype=torch.bool))
    hidden, gradient = _matrix(2, 8, torch.float32, device), torch.ones(5, device=device)
    assert not support_products(hidden, weight, None, *support).any()
    before = hidden.clone(), weight.clone()
    support_hidden(gradient, weight, *support, hidden, True)
    support_weight(gradient, hidden, *support_cases.by_token(support, VOCAB), weight, None, True)
    assert torch.equal(hidden, before[0]) and torch.equal(weight, before[1])


@pytest.mark.parametrize("sizes", [(0, 0), (3, 2)])
def test_gradients_without_an_entry_are_zero(sizes: tuple[int, ...], device: str) -> None:
    support = support_cases.random_support(sizes, VOCAB, device, torch.zeros(2, dtype=torch.bool))
    hidden, weight = _matrix(2, 8, torch.float32, device), _matrix(VOCAB, 8, torch.float32, device)
    outs = torch.empty_like(hidden), torch.empty_like(weight), torch.empty_like(weight[:, 0])
    _blank(*outs)
    gradient = torch.ones(sum(sizes), device=device)
    support_hidden(gradient, weight, *support, outs[0], False)
    support_weight(gradient, hidden, *support_cases.by_token(support, VOCAB), *outs[1:], False)
    assert not any(out.any() for out in outs)


@pytest.mark.parametrize("sizes", [SIZES, (0, 0), (300, 1, 520)])
def test_entries_sorted_by_token(sizes: tuple[int, ...], device: str) -> None:
    valid = torch.rand(len(sizes)) < 0.7
    support = support_cases.random_support(sizes, 600, device, valid)
    found, expected = (
        row_functions(forced(), support.token_ids).by_token(support, 600),
        support_cases.by_token(support, 600),
    )
    taking_part = expected.token_ids < 600
    assert torch.equal(found.token_ids, expected.token_ids) and torch.equal(found.entries, expected.entries)
    assert torch.equal(found.rows[taking_part], expected.rows[taking_part])
    assert found.token_ids.dtype == found.rows.dtype == torch.int32
    if found.heads is not None and sum(sizes):
        present = expected.token_ids[taking_part].unique().long()
        assert torch.equal(found.heads[present], torch.searchsorted(expected.token_ids.long(), present))
