"""`token_logprobs` and `linear_token_logprobs` against float64 torch, on every backend.

Sizes are small because Triton's interpreter takes milliseconds a row; large rows are the backends' own tests' matter.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from head_cases import OPTIONS, moved, random_head
from torch.nn.functional import cross_entropy, linear
from torch.utils.flop_counter import FlopCounterMode
from vocabulary import Truth, assert_as_good_as_torch, target_stats, token_stats

import fastrl
from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Transform
from fastrl.backend.torch import rows as reference_rows
from fastrl.passes.combined import Combined
from fastrl.planning import tiling
from fastrl.planning.plans import use_plan

# A float32 result is formed by a handful of roundings of numbers of the size of the logits' spread.
MARGIN = 2e-6
# A half-precision gradient is rounded once to its own dtype (relative 2^-9 or 2^-12), like torch's.
GRADIENT_MARGIN = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

#: Logits of up to 8 are rounded to 2^-9 of themselves at most and entries and results to 2^-11 each, with errors of
#: either sign: by root mean square a quarter of the largest.
FLOAT16_ERROR = 2.0**-8


def problem(vocab: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Logits, targets, and what the log-probabilities and the entropies are multiplied by in the loss."""
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 3, vocab, generator=g)).to(dtype)
    made = (logits, torch.randint(vocab, (2, 3), generator=g), *torch.randn(2, 2, 3, generator=g))
    return tuple(x.to(device) for x in made)


def weighted(out: fastrl.TokenStats, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The scalar whose gradient `token_stats` gives."""
    assert out.entropy is not None
    return (a.to(out.entropy.device) * out.logprobs + b.to(out.entropy.device) * out.entropy).sum()


def check(out: fastrl.TokenStats, gradient: torch.Tensor, truth: Truth, same: Truth, margin: float = MARGIN) -> None:
    """`margin`: of the gradient, which has been rounded to its dtype, as torch's is."""
    assert out.logprobs.dtype == torch.float32 and out.entropy is not None
    assert_as_good_as_torch(out.logprobs.cpu(), truth.logprobs.cpu(), same.logprobs.cpu(), MARGIN, "logprobs")
    assert_as_good_as_torch(out.entropy.cpu(), truth.entropy.cpu(), same.entropy.cpu(), MARGIN, "entropy")
    rounded = same.gradient.to(gradient.dtype)
    assert_as_good_as_torch(gradient.cpu(), truth.gradient.cpu(), rounded.cpu(), margin, "gradient")


@pytest.mark.parametrize("vocab", [1, 31, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("inplace", [False, True], ids=["fresh", "in place"])
def test_values_and_gradients(
    backend: str, backend_device: str, vocab: int, dtype: torch.dtype, option: str, inplace: bool
) -> None:
    logits, targets, a, b = problem(vocab, dtype, backend_device)
    options = moved(OPTIONS[option], backend_device)
    truth = token_stats(logits, targets, (a, b), **options)
    same = token_stats(logits, targets, (a, b), dtype=torch.float32, **options)
    if "mask" in options:
        targets = targets.where(options["mask"].bool(), -100)
    leaf = logits.clone().requires_grad_()
    out = fastrl.token_logprobs(leaf * 1, targets, entropy=True, inplace=inplace, **options)
    weighted(out, a, b).backward()
    # Triton's interpreter truncates where it should round to bfloat16: one more half unit in the last place.
    margin = GRADIENT_MARGIN[dtype] * (2 if backend == "triton" and dtype == torch.bfloat16 else 1)
    assert leaf.grad is not None and leaf.grad.dtype == dtype
    check(out, leaf.grad, truth, same, margin)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_linear_equals_float64(backend: str, backend_device: str, option: str, biased: bool) -> None:
    head = random_head(torch.float32, biased)
    _, targets, a, b = problem(77)
    wide = [x.double().requires_grad_() for x in head.values()]
    logits = linear(*wide)
    truth = token_stats(logits, targets, (a, b), **OPTIONS[option])
    expected = torch.autograd.grad(logits, wide, truth.gradient)

    leaves = {k: x.to(backend_device).requires_grad_() for k, x in head.items()}
    given = moved(OPTIONS[option] | {"targets": targets}, backend_device)
    out = fastrl.linear_token_logprobs(**leaves, entropy=True, **given)
    found = torch.autograd.grad(weighted(out, a, b), list(leaves.values()))
    # float32 products of 16 terms, then sums over 77 entries or 6 rows: tens of roundings of numbers up to about 10
    close = {"rtol": 2e-5, "atol": 2e-5, "check_device": False, "check_dtype": False}
    torch.testing.assert_close((out.logprobs, out.entropy, *found), (truth.logprobs, truth.entropy, *expected), **close)


def test_chunks_change_nothing(backend: str, backend_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks and one: the same rows, sums of the same products in another order. 64 rows are never cut."""
    g = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, 8, generator=g).to(backend_device) for n in (130, 33))
    targets = torch.randint(33, (130,), generator=g).to(backend_device)
    mask = (torch.rand(130, generator=g) > 0.3).to(backend_device)
    found = []
    for size in (128 << 20, 64 * 33 * 4):
        monkeypatch.setitem(tiling.TILE_BYTES, hidden.device.type, size)
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        out = fastrl.linear_token_logprobs(*leaves, targets, mask=mask, entropy=True)
        gradients = torch.autograd.grad((out.logprobs + 0.5 * out.entropy).sum(), leaves)
        found.append((out.logprobs, out.entropy, *gradients))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_heads(backend: str, backend_device: str, dtype: torch.dtype) -> None:
    """No worse than torch's own half-precision head with float32 statistics, with tiny upstream gradients too."""
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(12, 32, generator=g).to(dtype).to(backend_device)
    weight = (torch.randn(65, 32, generator=g) / 6).to(dtype).to(backend_device)
    targets = torch.randint(65, (12,), generator=g).to(backend_device)
    for upstream in (1.0, 1e-6):  # 1e-6 underflows float16 unless the backward scales it
        wide = [x.double().requires_grad_() for x in (hidden, weight)]
        truths = torch.autograd.grad(target_stats(linear(*wide), targets)[0].sum(), wide)
        mine = [x.clone().requires_grad_() for x in (hidden, weight)]
        found = torch.autograd.grad(fastrl.linear_token_logprobs(*mine, targets).logprobs.sum() * upstream, mine)
        for x, truth in zip(found, truths, strict=True):
            error = ((x.double() / upstream - truth).norm() / truth.norm()).item()
            # logits, gradient entries and the result are each rounded to the dtype once: 3 x 2^-9 (2^-12), and
            # float16's subnormal spacing of 6e-8 beside gradients of 1e-6
            assert error < (3 * 2**-8 if dtype == torch.bfloat16 else 3 * 2**-11 if upstream == 1 else 0.2), error


@pytest.mark.parametrize("plan", ["recompute", "two-pass", "frozen-head"])
@pytest.mark.parametrize("what", ["logprobs", "per token", "entropy", "gathered", "divergence"])
@pytest.mark.parametrize("temperature", [1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3])
def test_float16_at_any_temperature(temperature: float, what: str, plan: str) -> None:
    """Weights of 40 overflow in a product, and probabilities of 1 / 20,000 underflow, unless the scale knows T."""
    g = torch.Generator().manual_seed(8)
    n, vocab = 5, 20000
    hidden = (torch.randn(n, 4, generator=g) * temperature / 40).half()
    weight = (40 * torch.randn(vocab, 4, generator=g).sign()).half()
    targets, size = torch.randint(vocab, (n,), generator=g), 64 * temperature
    teacher = torch.randn(n, 4, generator=g).half() / 4, weight / 40

    def losses(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if what == "divergence":
            log_p, log_q = (
                (x.double() @ w.double().T).log_softmax(-1) for x, w in ((hidden / temperature, weight), teacher)
            )
            return (log_q.exp() * (log_q - log_p)).sum()
        return target_stats(linear(hidden, weight) / temperature, targets)[what == "entropy"].sum()

    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    truths = torch.autograd.grad(losses(*wide) * size, wide)
    mine = [x.clone().requires_grad_(plan != "frozen-head" or x is hidden) for x in (hidden, weight)]
    options = {"temperature": torch.full((n,), temperature) if what == "per token" else temperature}
    with use_plan("recompute" if plan == "frozen-head" and what == "divergence" else plan):
        if what == "divergence":
            heads = (*mine, *teacher)
            out = fastrl.linear_divergence(*heads, teacher_temperature=1.0, denominator=1.0, **options).loss
        elif what == "gathered":
            out = fastrl.linear_gathered_logprobs(*mine, targets[:, None], **options).sum()
        else:
            stats = fastrl.linear_token_logprobs(*mine, targets, entropy=what == "entropy", **options)
            out = stats[what == "entropy"].sum()
        found = torch.autograd.grad(out * size, [x for x in mine if x.requires_grad])
    others = torch.ones(vocab, dtype=torch.bool).index_fill(0, targets, False)
    pairs = list(zip(found, truths, strict=False))
    pairs += [(x[others], truth[others]) for x, truth in pairs[1:]]  # beside the targets' rows theirs are small
    for x, truth in pairs:
        rounding = 2.0**-25 * truth.numel() ** 0.5  # half the distance of subnormal results
        assert (x - truth).norm().item() < FLOAT16_ERROR * truth.norm().item() + rounding


def test_confident_tokens_stay_exact(backend: str, backend_device: str) -> None:
    """151,936 equal entries 26 below the target: -7.8e-7, not 0 (docs/precision.md)."""
    for margin in (10.0, 26.0, 40.0, 80.0):
        logits = torch.full((1, 151936), -margin)
        logits[0, 7] = 0
        leaf = logits.to(backend_device).requires_grad_()
        out = fastrl.token_logprobs(leaf, torch.tensor([7], device=backend_device), entropy=True)
        out.logprobs.sum().backward()
        # float64's log_softmax rounds these away too: the answers are known in closed form
        others = 151935 * math.exp(-margin)
        logp, not_p = -math.log1p(others), others / (1 + others)
        # a float32 sum of 151,936 equal terms, and exp at -80 (80 roundings of the exponent)
        for actual, expected in ((out.logprobs, logp), (out.entropy, -logp + margin * not_p), (leaf.grad[0, 7], not_p)):
            assert actual.item() == pytest.approx(expected, rel=2e-5, abs=0), margin


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7}, pytest.param({"softcap": 30.0}, marks=pytest.mark.slow)], ids=str
)
def test_no_entropy_is_below_0(backend: str, backend_device: str, options: dict[str, float]) -> None:
    """A sum of float32 exponentials may be just below 1, and its logarithm below 0; 3 entries, one all but certain."""
    g = torch.Generator().manual_seed(6)
    logits = -torch.empty(200, 3).uniform_(12, 22, generator=g)
    logits = logits.scatter(1, torch.randint(3, (200, 1), generator=g), 0.0) + 5 * torch.randn(200, 1, generator=g)
    targets = torch.randint(3, (200,), generator=g)
    ways = torch.zeros(200), torch.ones(200)
    truth = token_stats(logits, targets, ways, **options)
    same = token_stats(logits, targets, ways, dtype=torch.float32, **options)
    leaf, ids = logits.to(backend_device).requires_grad_(), targets.to(backend_device)
    mask = fastrl.SamplingMask.from_lists([[0, 1, 2]] * 200).to(leaf.device)
    weight = torch.eye(3, device=backend_device)
    for out in (
        fastrl.token_logprobs(leaf, ids, entropy=True, **options),
        fastrl.token_logprobs(leaf, ids, entropy=True, sampling_mask=mask, **options),
        fastrl.linear_token_logprobs(leaf, weight, ids, entropy=True, **options),
        fastrl.linear_token_logprobs(leaf, weight, ids, entropy=True, sampling_mask=mask, **options),
    ):
        assert out.entropy is not None and out.entropy.min() >= 0
        check(out, torch.autograd.grad(out.entropy.sum(), leaf)[0], truth, same)


def test_no_entropy_of_combined_slices_is_below_0(backend: str, backend_device: str) -> None:
    """Around 1000 the slices' statistics are rounded most; a row of -inf alone stays NaN."""
    g = torch.Generator().manual_seed(7)
    logits = 1000 + 20 * torch.randn(1, 500, 3, generator=g)
    logits[0, 0] = -torch.inf
    logits, targets = logits.to(backend_device), torch.zeros(500, dtype=torch.int64, device=backend_device)
    combined = Combined(targets)
    for part, first in zip(logits.split([1, 2], -1), (0, 1), strict=True):
        here = targets == first
        combined.add(row_functions(backend, part).row_statistics(part, targets - first, None, Transform()), here)
    entropy = combined.finish().entropy
    assert entropy[0].isnan() and entropy[1:].min() >= 0


def test_offsets_and_minus_infinity(backend: str, backend_device: str) -> None:
    logits, targets, a, b = problem(1000)
    logits[0, :, :600] = -torch.inf
    logits[1, 0] = -torch.inf
    logits[1, 0, targets[1, 0]] = 3.0
    targets[0] = torch.tensor([700, 800, 999])
    for offset in (0.0, 80.0, -80.0):
        truth = token_stats(logits + offset, targets, (a, b))
        same = token_stats(logits + offset, targets, (a, b), dtype=torch.float32)
        leaf = (logits + offset).to(backend_device).requires_grad_()
        out = fastrl.token_logprobs(leaf, targets.to(backend_device), entropy=True)
        weighted(out, a, b).backward()
        check(out, leaf.grad, truth, same)
    assert out.logprobs[1, 0] == 0 and out.entropy[1, 0] == 0


def test_a_target_of_probability_zero_is_minus_infinity_and_nan_stays_in_its_row(
    backend: str, backend_device: str
) -> None:
    logits, targets, *_ = problem(31, device=backend_device)
    logits[0, 0, targets[0, 0]] = -torch.inf
    logits[1, 2, 5] = torch.nan
    out = fastrl.token_logprobs(logits, targets, entropy=True)
    assert out.logprobs[0, 0] == -torch.inf
    bad = [[False] * 3, [False, False, True]]
    assert out.logprobs.isnan().tolist() == out.entropy.isnan().tolist() == bad


def test_leading_strides_need_no_copy(backend: str, backend_device: str) -> None:
    """The usual shifted view of a padded batch, and a transposed one, give the numbers of their contiguous copies."""
    whole = torch.randn(3, 4, 50, device=backend_device)
    targets = torch.randint(50, (3, 3), device=backend_device)
    for view, y in ((whole[:, :-1], targets), (whole.transpose(0, 1)[:-1], targets.T)):
        a = fastrl.token_logprobs(view, y, entropy=True)
        b = fastrl.token_logprobs(view.contiguous(), y.contiguous(), entropy=True)
        torch.testing.assert_close(a[:2], b[:2], rtol=0, atol=0)


def test_a_row_is_bitwise_the_same_in_any_batch(backend: str, backend_device: str) -> None:
    if backend == "torch":
        pytest.skip("torch's own reductions are free to depend on the shape")
    row = torch.randn(1, 999, device=backend_device)
    y = torch.tensor([5], device=backend_device)
    alone = fastrl.token_logprobs(row, y, entropy=True)
    batch = torch.randn(7, 999, device=backend_device)
    batch[4] = row[0]
    among = fastrl.token_logprobs(batch, y.expand(7), entropy=True)
    assert torch.equal(among.logprobs[4], alone.logprobs[0]) and torch.equal(among.entropy[4], alone.entropy[0])


@pytest.mark.parametrize("counted", [False, True], ids=["", "under a dispatch mode"])
def test_consumed_logits_hold_their_gradient(backend: str, backend_device: str, counted: bool) -> None:
    logits, targets, *_ = problem(31, device=backend_device)
    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(fastrl.token_logprobs(leaf, targets).logprobs.sum(), leaf)
    inner = leaf * 1
    out = fastrl.token_logprobs(inner, targets, inplace=True).logprobs.sum()
    with FlopCounterMode(display=False) if counted else nullcontext():
        out.backward(retain_graph=True)
    torch.testing.assert_close(leaf.grad, expected)
    torch.testing.assert_close(inner.detach(), expected)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        out.backward()


def test_logits_without_a_gradient_are_not_consumed(backend: str, backend_device: str) -> None:
    logits, targets, *_ = problem(31, device=backend_device)
    before = logits.clone()
    fastrl.token_logprobs(logits, targets, inplace=True)
    with torch.no_grad():
        fastrl.token_logprobs(logits.clone().requires_grad_(), targets, inplace=True)
    assert torch.equal(logits, before)


def test_retain_graph_works_without_inplace(backend: str, backend_device: str) -> None:
    logits, targets, *_ = problem(31, device=backend_device)
    out = fastrl.token_logprobs(logits.requires_grad_(), targets).logprobs.sum()
    out.backward(retain_graph=True)
    first = logits.grad.clone()
    out.backward()
    assert torch.equal(logits.grad, 2 * first)


def test_many_rows_of_a_small_vocabulary() -> None:
    """65,536 rows and more: one launch axis of a GPU holds 2^31, the other two 65,535 (Triton: its own launch test)."""
    for name in ("torch", "cpp"):
        with fastrl.use_backend(name):
            logits = torch.randn(70000, 5, requires_grad=True)
            targets = torch.randint(5, (70000,))
            out = fastrl.token_logprobs(logits, targets)
            out.logprobs.sum().backward()
            expected = torch.log_softmax(logits.detach(), -1)
            torch.testing.assert_close(out.logprobs, expected.gather(-1, targets[:, None])[:, 0])
            gradient = torch.nn.functional.one_hot(targets, 5) - expected.exp()
            torch.testing.assert_close(logits.grad, gradient, rtol=1e-5, atol=1e-6)


def test_no_rows_at_all(backend: str, backend_device: str) -> None:
    for shape in ((0, 3), (3, 0), (0,)):
        logits = torch.zeros(*shape, 7, device=backend_device, requires_grad=True)
        hidden = torch.zeros(*shape, 4, device=backend_device, requires_grad=True)
        weight = torch.zeros(7, 4, device=backend_device, requires_grad=True)
        targets = torch.zeros(shape, dtype=torch.int64, device=backend_device)
        fastrl.token_logprobs(logits, targets).logprobs.sum().backward()
        fastrl.linear_token_logprobs(hidden, weight, targets).logprobs.sum().backward()
        assert logits.grad.shape == logits.shape and weight.grad.abs().sum() == 0


def test_gradcheck_of_the_oracle() -> None:
    """The reference's own gradient formula against finite differences, float64."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 9, generator=g, dtype=torch.float64)
    targets = torch.randint(9, (4,), generator=g)
    mask = torch.tensor([True, True, False, True])
    transform = reference_rows.Transform(1.0, torch.rand(4, generator=g) + 0.5, 0.9, 3.0)

    class Stats(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            stats = reference_rows.row_statistics(x, targets, mask, transform)
            ctx.save_for_backward(x, *stats)
            return torch.stack(stats[:2])

        @staticmethod
        def backward(ctx: Any, d: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x, *stats = ctx.saved_tensors
            out = torch.empty_like(x)
            reference_rows.row_gradient(x, targets, mask, transform, reference_rows.Statistics(*stats), d[0], d[1], out)
            return out

    assert torch.autograd.gradcheck(Stats.apply, x.requires_grad_())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy(backend: str, backend_device: str, reduction: str) -> None:
    g = torch.Generator().manual_seed(6)
    hidden = torch.randn(2, 5, 8, generator=g).to(backend_device).requires_grad_()
    weight = torch.randn(21, 8, generator=g).to(backend_device).requires_grad_()
    targets = torch.randint(21, (2, 5), generator=g).to(backend_device)
    targets[0, 1:3] = -100
    logits = (hidden @ weight.T).flatten(0, 1)
    mine = fastrl.linear_cross_entropy(hidden, weight, targets, reduction=reduction).flatten()
    losses = (mine, cross_entropy(logits, targets.flatten(), reduction=reduction).flatten())
    found = [(loss, *torch.autograd.grad(loss.sum(), (hidden, weight))) for loss in losses]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy_of_one_token_without_dimensions(reduction: str) -> None:
    hidden, weight, target = torch.randn(4), torch.randn(7, 4), torch.tensor(3)
    temperature = torch.tensor(2.0)
    loss = fastrl.linear_cross_entropy(hidden, weight, target, reduction=reduction, temperature=temperature)
    expected = cross_entropy(weight @ hidden / 2, target, reduction=reduction)
    torch.testing.assert_close(loss, expected)
