"""`gathered_logprobs` and `linear_gathered_logprobs` against float64 torch, on every backend."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from head_cases import OPTIONS, moved, random_head
from torch import Tensor
from torch.nn.functional import linear
from vocabulary import assert_as_good_as_torch, transformed

import fastrl
from fastrl.backend.contract import Entries, Transform
from fastrl.losses import request as calls
from fastrl.passes.gathered import gathered_rows
from fastrl.passes.supports import RowOptions
from fastrl.planning import tiling
from fastrl.planning.plans import use_plan

MARGIN = 2e-6  # a handful of roundings of numbers of the size of the logits' spread
GRADIENT_MARGIN = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # one rounding, like torch's
K = 5
# In several tiles, what the interpreter takes its time for is the row functions', which other tests run as well.
TILED = ["torch", "cpp", pytest.param("triton", marks=() if torch.cuda.is_available() else pytest.mark.slow)]
CLOSE = {"rtol": 2e-5, "atol": 2e-5, "check_device": False, "check_dtype": False}


def random_ids(vocab: int, device: str = "cpu") -> Tensor:
    """(2, 3, K): with repeats, of an id and of nothing; one row of nothing at all."""
    ids = torch.randint(vocab, (2, 3, K), generator=torch.Generator().manual_seed(2))
    ids[0, 0, 3] = ids[0, 0, 1]
    ids[0, 1, :2], ids[1, 0, 4], ids[1, 1] = -1, -1, -1
    return ids.to(device)


def upstream(device: str = "cpu") -> Tensor:
    """What each number is multiplied by in the loss: the first row's sum to 0, although its gradient does not."""
    u = torch.randn(2, 3, K, generator=torch.Generator().manual_seed(3))
    u[0, 0, 0] -= u[0, 0].sum()
    return u.to(device)


def gathered(z: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The definition, from transformed logits (..., V)."""
    found = torch.log_softmax(z, -1).gather(-1, ids.clamp_min(0)).where(ids >= 0, 0.0)
    return found if mask is None else found.where(mask.bool()[..., None], 0.0)


def truth(
    logits: Tensor,
    ids: Tensor,
    u: Tensor,
    dtype: torch.dtype = torch.float64,
    mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Numbers and gradient by autograd in `dtype`, on the whole (..., V) tensor."""
    x = logits.detach().to(dtype).requires_grad_()
    found = gathered(transformed(x, **options), ids, mask)
    return found.detach(), torch.autograd.grad((found * u.to(dtype)).sum(), x)[0]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch, backend_device: str) -> None:
    """Tiles of 2 rows and 32 columns at least, and no larger ones: several of each in the smallest problem."""
    kind = torch.device(backend_device).type
    monkeypatch.setattr(tiling, "_LEAST_ROWS", 2)
    monkeypatch.setattr(tiling, "_LEAST_COLUMNS", 32)
    monkeypatch.setitem(tiling.TILE_BYTES, kind, 0)
    monkeypatch.setitem(tiling.SLICED_BYTES, kind, 0)


@pytest.mark.parametrize("vocab", [1, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_values_and_gradients(backend: str, backend_device: str, vocab: int, dtype: torch.dtype, option: str) -> None:
    logits = (3 * torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(0))).to(dtype).to(backend_device)
    ids, u, options = (
        random_ids(vocab, backend_device),
        upstream(backend_device),
        moved(OPTIONS[option], backend_device),
    )
    exact, exact_gradient = truth(logits, ids, u, **options)
    same, same_gradient = truth(logits, ids, u, torch.float32, **options)
    if "mask" in options:
        ids = ids.where(options["mask"].bool()[..., None], -7)  # which is not read
    margin = GRADIENT_MARGIN[dtype] * (2 if backend == "triton" and dtype == torch.bfloat16 else 1)
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        out = fastrl.gathered_logprobs(leaf * 1, ids, inplace=inplace, **options)
        out.backward(u)
        assert out.dtype == torch.float32 and out.shape == ids.shape
        assert leaf.grad is not None and leaf.grad.dtype == dtype
        assert_as_good_as_torch(out.cpu(), exact.cpu(), same.cpu(), MARGIN, "log-probabilities")
        rounded = same_gradient.to(dtype).cpu()
        assert_as_good_as_torch(leaf.grad.cpu(), exact_gradient.cpu(), rounded, margin, "gradient")


PLANS = {"recompute": "hwb", "two-pass": "hwb", "frozen-head": "h", "forward": "", "weight alone": "w"}


@pytest.mark.parametrize("backend", TILED, indirect=True)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("option", ["temperature per token", "softcap, scale", "mask"])
def test_every_plan_equals_float64(
    backend: str, backend_device: str, plan: str, option: str, small_tiles: None
) -> None:
    """In slices of the vocabulary, where the best entry may be in any of them, and chunks of rows."""
    head, ids, u = random_head(torch.float32, True), random_ids(77), upstream()
    wide = [x.double().requires_grad_() for x in head.values()]
    logits = linear(*wide)
    exact, gradient = truth(logits, ids, u, **OPTIONS[option])
    expected = torch.autograd.grad(logits, wide, gradient.double())
    given = {k: x.to(backend_device).requires_grad_(k[0] in PLANS[plan]) for k, x in head.items()}
    options = moved(OPTIONS[option], backend_device)
    with use_plan(plan) if plan in ("recompute", "two-pass", "frozen-head", "forward") else nullcontext():
        out = fastrl.linear_gathered_logprobs(**given, ids=ids.to(backend_device), **options)
    torch.testing.assert_close(out, exact, **CLOSE)
    leaves = {k: x for k, x in given.items() if x.requires_grad}
    if not leaves:
        assert not out.requires_grad
        return
    total = (out * u.to(backend_device)).sum()
    for _ in range(2):  # the second backward computes from the same saved numbers
        found = torch.autograd.grad(total, list(leaves.values()), retain_graph=True)
        for name, x in zip(leaves, found, strict=True):
            torch.testing.assert_close(x, expected[list(head).index(name)], **CLOSE)


@pytest.mark.parametrize("backend", TILED, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plan", ["recompute", "two-pass", "frozen-head"])
def test_half_precision_heads(
    backend: str, backend_device: str, dtype: torch.dtype, plan: str, small_tiles: None
) -> None:
    """As exact as the roundings to the dtype allow, with tiny upstream gradients too, which a scale must carry."""
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(12, 32, generator=g).to(dtype).to(backend_device)
    weight = (torch.randn(65, 32, generator=g) / 6).to(dtype).to(backend_device)
    ids = torch.randint(65, (12, 4), generator=g).to(backend_device)
    leaves = 1 if plan == "frozen-head" else 2
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    truths = torch.autograd.grad(gathered(linear(*wide), ids).sum(), wide)
    for size in (1.0, 1e-6):  # 1e-6 underflows float16 unless the backward scales it
        mine = [x.clone().requires_grad_(i < leaves) for i, x in enumerate((hidden, weight))]
        with use_plan(plan):
            out = fastrl.linear_gathered_logprobs(*mine, ids).sum() * size
        for x, exact in zip(torch.autograd.grad(out, mine[:leaves]), truths, strict=False):
            error = ((x.double() / size - exact).norm() / exact.norm()).item()
            # logits, gradient entries (or slopes and products with entries), their sum: each rounded once
            assert error < (3 * 2**-8 if dtype == torch.bfloat16 else 3 * 2**-11 if size == 1 else 0.2), error


def test_one_entry_is_a_target_to_the_bit(backend: str, backend_device: str, small_tiles: None) -> None:
    """Values; and gradients, whose entry torch's own backend rounds in float32 and this function in float64."""
    head = {k: x.to(backend_device) for k, x in random_head(torch.float32, True).items()}
    ids, u = random_ids(77, backend_device).clamp_min(0)[..., :1], upstream(backend_device)[..., 0]
    temperature = OPTIONS["temperature per token"]["temperature"].to(backend_device)
    mask = OPTIONS["mask"]["mask"].to(backend_device)
    found = []
    for call in (
        lambda **x: fastrl.linear_token_logprobs(**x, targets=ids[..., 0]).logprobs,
        lambda **x: fastrl.linear_gathered_logprobs(**x, ids=ids)[..., 0],
    ):
        leaves = {k: x.clone().requires_grad_() for k, x in head.items()}
        out = call(**leaves, temperature=temperature, mask=mask)
        found.append((out, *torch.autograd.grad(out, list(leaves.values()), u)))
    assert torch.equal(found[0][0], found[1][0])
    for a, b in zip(*found, strict=True):
        if backend == "cpp":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_confident_tokens_stay_exact(backend: str, backend_device: str) -> None:
    """151,934 equal entries far below the best one, and one as far below as those: the digits of 1 - p are kept."""
    for gap in (10.0, 26.0, 40.0, 80.0):
        logits = torch.full((1, 151936), -gap)
        logits[0, 7] = 0
        leaf = logits.to(backend_device).requires_grad_()
        out = fastrl.gathered_logprobs(leaf, torch.tensor([[9, 7]], device=backend_device))
        others = 151935 * math.exp(-gap)
        for k, u in (((0, 1), (0.0, 1.0)), ((0, 1), (1.0, 0.0))):
            leaf.grad = None
            out.backward(torch.tensor([u], device=backend_device), retain_graph=True)
            not_p, other = others / (1 + others), math.exp(-gap) / (1 + others)
            # d g_7 / d x_7 = 1 - p_7, d g_9 / d x_9 = 1 - p_9, d g_9 / d x_7 = -p_7
            expected = (-other, not_p) if u[1] else (1 - other, -1 / (1 + others))
            for entry, value in zip((9, 7), expected, strict=True):
                assert leaf.grad is not None and leaf.grad[0, entry].item() == pytest.approx(value, rel=2e-5, abs=0)
            del k
        logp = -math.log1p(others)
        assert out[0].tolist() == pytest.approx([logp - gap, logp], rel=2e-5, abs=0)


def test_confident_tokens_of_a_head_stay_exact(backend: str, backend_device: str, small_tiles: None) -> None:
    """In any slice, and with the slope of a frozen head: dL/dhidden keeps its digits where 1 - p is 1e-11."""
    weight = torch.zeros(77, 2)
    weight[40, 0], weight[41, 0], weight[70, 1] = 1.0, -0.5, 1.0
    ids = torch.tensor([[3, 70, 40]])
    hidden = torch.tensor([[26.0, 1.0]])
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    z = linear(*wide)
    others = (z[0] - z[0, 40])[torch.arange(77) != 40].exp().sum()
    g = -torch.log1p(others)  # of entry 40
    exact = torch.stack([z[0, 3] - z[0, 40] + g, z[0, 70] - z[0, 40] + g, g])
    (expected,) = torch.autograd.grad(g, wide[0], retain_graph=True)
    for plan in ("recompute", "two-pass", "frozen-head"):
        leaf = hidden.to(backend_device).requires_grad_()
        head = weight.to(backend_device).requires_grad_(plan != "frozen-head")
        with use_plan(plan):
            out = fastrl.linear_gathered_logprobs(leaf, head, ids.to(backend_device))[0]
        torch.testing.assert_close(out, exact, rtol=2e-5, atol=0, check_dtype=False, check_device=False)
        (found,) = torch.autograd.grad(out[2], leaf)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=0, check_dtype=False, check_device=False)


# --- layouts ----------------------------------------------------------------------------------------------------------


def lists_of(ids: Tensor) -> list[list[int]]:
    return [sorted({x for x in row if x >= 0}) for row in ids.flatten(0, -2).tolist()]


def test_a_ragged_layout_is_that_of_its_rows(backend: str, backend_device: str, small_tiles: None) -> None:
    """A SamplingMask of ids: the numbers of each id, in its order; rows without any cost nothing and give nothing."""
    ids, u = random_ids(77), upstream()
    mask = OPTIONS["mask"]["mask"].to(backend_device)
    ragged = fastrl.SamplingMask.from_lists(lists_of(ids), backend_device)
    padded = torch.full((2, 3, K), -1)
    for row, ids_of_row in zip(padded.flatten(0, 1), lists_of(ids), strict=True):
        row[: len(ids_of_row)] = torch.tensor(ids_of_row, dtype=torch.int64)
    there = padded.flatten() >= 0
    found = []
    for given in (padded.to(backend_device), ragged):
        head = {k: x.to(backend_device).requires_grad_() for k, x in random_head(torch.float32, True).items()}
        logits = torch.randn(2, 3, 77, generator=torch.Generator().manual_seed(1)).to(backend_device).requires_grad_()
        outs = (
            fastrl.linear_gathered_logprobs(**head, ids=given, mask=mask),
            fastrl.gathered_logprobs(logits, given, mask=mask, temperature=0.7),
        )
        outs = tuple(x if x.dim() == 1 else x.flatten()[there.to(x.device)] for x in outs)
        total = sum((x * u.flatten()[there].to(x.device)).sum() for x in outs)
        found.append((*outs, *torch.autograd.grad(total, [*head.values(), logits])))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert found[1][0].shape == ragged.token_ids.shape


def test_the_order_of_ids_changes_nothing(backend: str, backend_device: str) -> None:
    head = {k: x.to(backend_device).requires_grad_() for k, x in random_head(torch.float32).items()}
    ids, u = random_ids(77, backend_device), upstream(backend_device)
    order = torch.tensor([3, 1, 4, 0, 2], device=backend_device)
    plain, mixed = (fastrl.linear_gathered_logprobs(**head, ids=x) for x in (ids, ids[..., order]))
    assert torch.equal(plain[..., order], mixed)
    found = [torch.autograd.grad(x, list(head.values()), y) for x, y in ((plain, u), (mixed, u[..., order]))]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_leading_dimensions_and_strides(backend: str, backend_device: str) -> None:
    """One row without leading dimensions, and the shifted view of a padded batch, which is not copied."""
    whole = torch.randn(3, 4, 50, device=backend_device)
    ids = torch.randint(50, (3, 3, K), device=backend_device)
    found = fastrl.gathered_logprobs(whole[:, :-1], ids)
    assert torch.equal(found, fastrl.gathered_logprobs(whole[:, :-1].contiguous(), ids))
    assert torch.equal(found[0, 1], fastrl.gathered_logprobs(whole[0, 1], ids[0, 1]))
    turned = fastrl.gathered_logprobs(whole[:, :-1], ids.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    assert torch.equal(found, turned)
    leaf, head = torch.randn(7, device=backend_device).requires_grad_(), torch.randn(7, 50, device=backend_device).t()
    slopes = [
        torch.autograd.grad(fastrl.linear_gathered_logprobs(leaf, x, ids[0, 0]).sum(), leaf)
        for x in (head, head.contiguous())  # frozen, whose rows the backward gathers
    ]
    torch.testing.assert_close(*slopes)
    hidden, weight = torch.randn(7, device=backend_device), torch.randn(50, 7, device=backend_device)
    one = fastrl.linear_gathered_logprobs(hidden, weight, ids[0, 0])
    torch.testing.assert_close(one, fastrl.linear_gathered_logprobs(hidden[None], weight, ids[0, :1])[0])


# --- supports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", TILED, indirect=True)
@pytest.mark.parametrize("plan", ["recompute", "two-pass"])
@pytest.mark.parametrize("wide", [(), (3,)], ids=["narrow", "a wide one"])
@pytest.mark.parametrize("whole", [(), (5,)], ids=["all recorded", "one not recorded"])
def test_within_a_sampling_mask(
    backend: str,
    backend_device: str,
    plan: str,
    wide: tuple[int, ...],
    whole: tuple[int, ...],
    small_tiles: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "gathers", lambda *_: False)  # wide sets take dense products, few as they are
    ids, u, mask = random_ids(77), upstream(), OPTIONS["mask"]["mask"]
    ids[..., 0] = ids[..., 0].clamp_min(0)
    g = torch.Generator().manual_seed(7)
    kept = [
        [] if i in whole else row + torch.randint(77, (300 if i in wide else 9,), generator=g).tolist()
        for i, row in enumerate(lists_of(ids))
    ]
    sets = fastrl.SamplingMask.from_lists(kept)
    head = random_head(torch.float32, True)
    wider = [x.double().requires_grad_() for x in head.values()]
    logits = linear(*wider)
    dense = logits.masked_fill(~sets.to_dense(77).view(2, 3, 77), -torch.inf)
    exact = gathered(dense / 0.7, ids, mask)
    expected = torch.autograd.grad((exact * u).sum(), [*wider, logits])
    leaves = {k: x.to(backend_device).requires_grad_() for k, x in head.items()}
    given = moved({"ids": ids, "mask": mask}, backend_device) | {"temperature": 0.7}
    given["sampling_mask"] = sets.to(backend_device)
    u = u.to(backend_device)
    with use_plan(plan) if wide or whole else nullcontext():
        out = fastrl.linear_gathered_logprobs(**leaves, **given)
    found = torch.autograd.grad(out, list(leaves.values()), u)
    torch.testing.assert_close((out, *found), (exact, *expected[:3]), **CLOSE)
    for inplace in (False, True):
        leaf = logits.detach().float().to(backend_device).requires_grad_()
        out = fastrl.gathered_logprobs(leaf * 1, **given, inplace=inplace)
        torch.testing.assert_close((out, *torch.autograd.grad(out, leaf, u)), (exact, expected[3]), **CLOSE)


def test_an_id_outside_its_set(backend: str, backend_device: str) -> None:
    logits = torch.randn(2, 9, device=backend_device)
    sets = fastrl.SamplingMask.from_lists([[], [1, 2]], backend_device)
    ids = torch.tensor([[3, 4], [2, 5]], device=backend_device)
    hidden, weight = torch.randn(2, 4, device=backend_device), torch.randn(9, 4, device=backend_device)
    for call in (
        lambda: fastrl.gathered_logprobs(logits, ids, sampling_mask=sets),
        lambda: fastrl.linear_gathered_logprobs(hidden, weight, ids, sampling_mask=sets),
    ):
        with fastrl.check_inputs(), pytest.raises(ValueError, match="ids row 1 has at place 1 an id that is not in"):
            call()


@pytest.mark.parametrize("sets", [None, [[0, 1, 2, 3], [0, 1, 2, 3], []]], ids=["whole", "a set"])
def test_unchecked_ids_are_nan(
    backend: str, backend_device: str, sets: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where no value is read: that number is NaN, and so is its row's gradient."""
    monkeypatch.setattr(fastrl.base.checks, "values_are_checked", lambda x: False)
    given = {} if sets is None else {"sampling_mask": fastrl.SamplingMask.from_lists(sets, backend_device)}
    far = 8 if sets is None else 5
    ids = torch.tensor([[1, far], [1, 2], [-2, 2**40]], device=backend_device)
    leaves = [torch.randn(n, 4, device=backend_device, requires_grad=True) for n in (3, 8)]
    logits = linear(*leaves).detach().requires_grad_()
    outs = fastrl.gathered_logprobs(logits, ids, **given), fastrl.linear_gathered_logprobs(*leaves, ids, **given)
    for out, leaf in zip(outs, (logits, leaves[0]), strict=True):
        assert out.isnan().tolist() == [[False, True], [False, False], [True, True]]
        (gradient,) = torch.autograd.grad(out.nan_to_num()[:, 0].sum(), leaf)
        nans = gradient.isnan()
        assert nans[0].any() and nans[2].any() and not nans[1].any()
        assert nans[:, :4].all(-1).tolist() == [True, False, True]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_ids_have_named_errors(backend: str, backend_device: str) -> None:
    logits = torch.randn(2, 3, 8, device=backend_device)
    hidden, weight = torch.randn(2, 3, 4, device=backend_device), torch.randn(8, 4, device=backend_device)
    ids = torch.zeros(2, 3, 2, dtype=torch.int64, device=backend_device)

    def bad(row: int, value: int) -> Tensor:
        out = ids.clone()
        out.view(6, 2)[row, 1] = value
        return out

    cases: list[tuple[Any, type[Exception], str]] = [
        (ids.int(), TypeError, "ids must be torch.int64, got torch.int32"),
        (ids.float(), TypeError, "ids must be torch.int64, got torch.float32"),
        ([[0]], TypeError, "ids must be a tensor, got list"),
        (
            ids[0],
            ValueError,
            r"ids must have shape \(..., K\) with the leading dimensions of (logits|hidden), \(2, 3\)",
        ),
        (ids[0, 0, 0], ValueError, r"ids must have shape .*; got \(\)"),
        (fastrl.SamplingMask.from_lists([[1]] * 5), ValueError, "ids must have one row per row of .*, 6, got 5"),
        (bad(4, 8), IndexError, r"ids row 4 has at place 1 the id 8 outside \[0, 8\)"),
        (bad(4, -2), IndexError, r"ids row 4 has at place 1 an id outside \[0, 8\)"),
        (bad(0, 2**40), IndexError, r"ids row 0 has at place 1 an id outside \[0, 8\)"),
        (fastrl.SamplingMask.from_lists([[1, 9]] * 6), IndexError, "ids row 0 has at place 1 the id 9"),
    ]
    for given, error, words in cases:
        if isinstance(given, fastrl.SamplingMask):
            given = given.to(backend_device)
        for call in (
            lambda x: fastrl.gathered_logprobs(logits, x),
            lambda x: fastrl.linear_gathered_logprobs(hidden, weight, x),
        ):
            with fastrl.check_inputs(), pytest.raises(error, match=words):
                call(given)
    mask = torch.ones(2, 3, dtype=torch.bool, device=backend_device)
    mask.view(-1)[4] = False
    assert (fastrl.gathered_logprobs(logits, bad(4, 8), mask=mask)[1, 1] == 0).all()


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)], ids=str)
def test_no_ids_or_no_rows(backend: str, backend_device: str, shape: tuple[int, int]) -> None:
    """An empty result, whose gradients are zeros that reach the inputs."""
    n, k = shape
    ids = torch.zeros(n, k, dtype=torch.int64, device=backend_device)
    for plan in ("recompute", "two-pass", "frozen-head"):
        leaves = [torch.randn(m, 4, device=backend_device, requires_grad=True) for m in (n, 9)]
        leaves[1].requires_grad_(plan != "frozen-head")
        logits = torch.randn(n, 9, device=backend_device, requires_grad=True)
        with use_plan(plan):
            outs = (fastrl.gathered_logprobs(logits, ids), fastrl.linear_gathered_logprobs(*leaves, ids))
        assert all(x.shape == ids.shape for x in outs)
        sum(x.sum() for x in outs).backward()
        for leaf in (*(x for x in leaves if x.requires_grad), logits):
            assert leaf.grad is not None and not leaf.grad.any()
    nothing = fastrl.SamplingMask.from_lists([[]] * n, backend_device)
    assert fastrl.linear_gathered_logprobs(leaves[0], leaves[1], nothing).shape == (0,)


def test_infinities_and_nan_stay_in_their_rows(backend: str, backend_device: str) -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)).to(backend_device)
    ids = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1], [3, 3]], device=backend_device)
    logits[0, 0] = -torch.inf
    logits[1, :2] = -torch.inf  # both: neither is better
    logits[2, 5] = torch.nan
    logits[3, :] = -torch.inf
    leaf = logits.clone().requires_grad_()
    out = fastrl.gathered_logprobs(leaf, ids)
    assert out[0].isneginf().tolist() == [True, False] and out[1].isneginf().all()
    assert out[2:4].isnan().all() and out[4].isfinite().all() and out[4, 0] == out[4, 1]
    out[[0, 1, 4]].sum().backward()
    exact = logits[[0, 1, 4]].double().requires_grad_()
    p = torch.softmax(exact, -1).detach()
    one = torch.zeros_like(p).scatter_add_(1, ids[[0, 1, 4]], torch.ones(3, 2, device=p.device).double())
    torch.testing.assert_close(leaf.grad[[0, 1, 4]], one - 2 * p, **CLOSE)


def test_consumed_logits_hold_their_gradient(backend: str, backend_device: str) -> None:
    logits = torch.randn(2, 9, device=backend_device)
    ids = torch.tensor([[0, 1], [5, 5]], device=backend_device)
    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(fastrl.gathered_logprobs(leaf, ids).sum(), leaf)
    inner = leaf * 1
    out = fastrl.gathered_logprobs(inner, ids, inplace=True).sum()
    out.backward(retain_graph=True)
    torch.testing.assert_close((leaf.grad, inner.detach()), (expected, expected))
    with pytest.raises(RuntimeError, match="compute the loss again"):
        out.backward()
    with pytest.raises(RuntimeError, match="consumed by an earlier call"):
        fastrl.gathered_logprobs(inner, ids)


def test_gradcheck_of_the_oracle() -> None:
    """The gradient's formula against finite differences, float64: repeats are the entry point's matter."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 4, 9, generator=g, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([3, 1, -1, 8, 0, -1, 2, 4, 5, 6], dtype=torch.int32)
    entries = Entries(ids, torch.tensor([0, 3, 5, 5, 10]))
    mask = torch.tensor([True, True, True, False])
    for over in (Transform(1.0, torch.rand(4, generator=g) + 0.5, 0.9, 3.0), Transform(0.7)):

        def run(x: Tensor, over: Transform = over) -> Tensor:
            return gathered_rows(x, entries, RowOptions(mask, over), x.shape[-1], "torch", False).logprobs

        assert torch.autograd.gradcheck(run, logits)
