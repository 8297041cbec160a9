"""Losses over recorded support: those of dense logits that are -inf outside it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from allocated import allocations
from objectives import OBJECTIVES
from problem import Problem, assert_loss_as_good_as_torch
from vocabulary import assert_as_good_as_torch, target_stats

import fastrl
from fastrl.base import checks
from fastrl.losses import request as call
from fastrl.planning import tiling
from fastrl.planning.plans import use_plan

# Two responses: the smallest padded batch in which they differ. 300 entries: three slices of the smallest tile, and
# sets of 30 are the widest that are gathered (64 from logits, 12 in 16 bits): every way to treat a row is in one call.
B, T, VOCAB, WIDTH = 2, 12, 300, 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("narrow", "mixed", "targets alone", "wide", "full")


@pytest.fixture(autouse=True)
def few_wide_rows_are_dense_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In problems as small as these it would be cheaper to gather them."""
    monkeypatch.setattr(call, "gathers", lambda *_: False)


#: The second response has tokens at its beginning alone.
MASK = (torch.rand(B, T, generator=torch.Generator().manual_seed(0)) > 0.2) & torch.tensor([[12], [5]]).gt(
    torch.arange(T)
)


def random_sets(kind: str, targets: torch.Tensor, g: torch.Generator) -> fastrl.SamplingMask:
    rows = []
    for i, y in enumerate(targets.flatten().tolist()):
        size = {"narrow": 1 + i % 7, "targets alone": 1, "wide": 100, "full": VOCAB}.get(kind)
        if size is None:
            size = (0, 1, 5, 60, VOCAB)[i % 5]
        others = torch.randperm(VOCAB, generator=g)[: max(size - 1, 0)].tolist()
        rows.append([] if size == 0 else [y, *others])  # unsorted, the target at times twice
    return fastrl.SamplingMask.from_lists(rows)


def recorded(device: str, kind: str, dtype: torch.dtype = torch.float32) -> Problem:
    """Hidden states, a head, and a recorded support for each token."""
    size, sets = (B, T, WIDTH, VOCAB), partial(random_sets, kind)
    return Problem(device, seed=KINDS.index(kind), size=size, mask=MASK, dtype=dtype, sets=sets)


def stats_of(problem: Problem, leaves: dict[str, torch.Tensor], **changes: Any) -> fastrl.TokenStats:
    """Log-probabilities and entropies from the head."""
    given = {k: problem.arguments[k] for k in ("targets", "mask", "sampling_mask")} | changes
    return fastrl.linear_token_logprobs(**leaves, entropy=True, **given)


def gradients(out: fastrl.TokenStats, leaves: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Of all log-probabilities and entropies."""
    assert out.entropy is not None
    return torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), list(leaves.values()))


# Where a set is its target alone, gradients are 0.
check = partial(assert_loss_as_good_as_torch, smallest=1e-3)
# Sums of some hundred float32 terms in another order than torch's.
MARGIN = 2e-6


#: Every objective over every way to treat a row; every kind of support under a token's objective and a response's. An
#: objective does not see how a row's statistics came about.
PAIRS = [(name, kind) for name in sorted(OBJECTIVES) for kind in KINDS if kind == "mixed" or name in ("GSPO", "PPO")]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_all_objectives_agree_with_dense_float64(backend: str, backend_device: str, name: str, kind: str) -> None:
    if backend == "triton" and backend_device == "cpu" and (kind != "mixed" or name not in ("GSPO", "PPO")):
        pytest.skip("Triton's interpreter is slow, and objectives run in torch here")
    objective = OBJECTIVES[name]
    problem = recorded(backend_device, kind)
    truth, plain = problem.plain(objective, torch.float64), problem.plain(objective, torch.float32)
    check(problem.by_hidden(objective), truth, plain, MARGIN)
    for inplace in (False, True):
        check(problem.by_logits(objective, inplace), truth, plain, MARGIN)


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "by width"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_transforms(
    backend: str, backend_device: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, gathers: bool
) -> None:
    few = (torch.float32, "narrow", True), (torch.float32, "mixed", False)
    if backend == "triton" and backend_device == "cpu" and (dtype, kind, gathers) not in few:
        pytest.skip("Triton's interpreter is slow, and rounds 16-bit casts otherwise than a GPU")
    if gathers:  # however wide
        monkeypatch.setattr(call, "widest_support", lambda vocab, device, itemsize: vocab)
    objective = fastrl.GRPO(entropy_coef=0.01)
    options = {"temperature": 0.7, "logit_scale": 1.5, "softcap": 8.0}
    problem = recorded(backend_device, kind, dtype)
    truth, plain = problem.plain(objective, torch.float64, **options), problem.plain(objective, dtype, **options)
    # Beside torch's own error: the sums' order, and the cast of a gradient or of an added one (half a unit each).
    margin = MARGIN + {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    check(problem.by_hidden(objective, **options), truth, plain, margin)


@pytest.mark.parametrize("plan", ["recompute", "two-pass"])
def test_plans_of_the_dense_rows_agree(plan: str) -> None:
    """Rows without a set and with wide ones, by either plan, in chunks and slices of the smallest tile."""
    objective = fastrl.GSPO(entropy_coef=0.01)
    problem = recorded("cpu", "mixed")
    truth, plain = problem.plain(objective, torch.float64), problem.plain(objective, torch.float32)
    with use_plan(plan), pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiling.TILE_BYTES, "cpu", 64 * 128 * 4)
        check(problem.by_hidden(objective), truth, plain, MARGIN)


def test_sets_of_thousands(backend: str, backend_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """5000 ids per row, gathered and dense: either is worth it at 20,000 entries; 3 rows, as dense ones take memory."""
    if backend == "triton" and backend_device == "cpu":
        pytest.skip("minutes in Triton's interpreter; tests/kernels has wide rows and long sums of its own")
    g = torch.Generator().manual_seed(0)
    n, vocab = 3, 20_000
    hidden = torch.randn(n, 8, generator=g).to(backend_device)
    weight = torch.randn(vocab, 8, generator=g).to(backend_device)
    targets = torch.randint(vocab, (n,), generator=g)
    lists = [[int(y), *torch.randperm(vocab, generator=g)[:4999].tolist()] for y in targets]
    sets, targets = fastrl.SamplingMask.from_lists(lists).to(backend_device), targets.to(backend_device)
    truths = []
    for dtype in (torch.float64, torch.float32):
        h, w = (x.to(dtype).requires_grad_() for x in (hidden, weight))
        logp, _ = target_stats((h @ w.T).masked_fill(~sets.to_dense(vocab), -torch.inf), targets)
        truths.append((logp.detach(), *torch.autograd.grad(logp.sum(), (h, w))))
    for widest in (20_000, 200):
        monkeypatch.setattr(call, "widest_support", lambda vocab, device, itemsize, most=widest: most)
        h, w = (x.clone().requires_grad_() for x in (hidden, weight))
        logp = fastrl.linear_token_logprobs(h, w, targets, sampling_mask=sets).logprobs
        found = (logp.detach(), *torch.autograd.grad(logp.sum(), (h, w)))
        for what, a, e, t in zip(("logprobs", "d_hidden", "d_weight"), found, *truths, strict=True):
            scale = e.abs().max().clamp_min(1)
            # 5000 terms are added one after the other, half a unit in the last place each, where torch adds in a tree
            assert_as_good_as_torch(a / scale, e / scale, t / scale, 5000**0.5 * 2**-24, what)


@pytest.mark.parametrize("kind", ["narrow", "mixed"])
def test_operands_of_any_strides(backend: str, backend_device: str, kind: str) -> None:
    """A transposed head, hidden states with gaps, every second entry of a bias: as the same numbers lying together."""
    problem = recorded(backend_device, kind)

    def apart(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]

    plain, strided = problem.leaves(), {k: x.detach() for k, x in problem.head.items()}
    strided = {k: x.t().contiguous().t() if k == "weight" else apart(x) for k, x in strided.items()}
    assert [x.stride(-1) for x in strided.values()] == [2, VOCAB, 2]
    found = []
    for leaves in (plain, {k: x.requires_grad_() for k, x in strided.items()}):
        stats = stats_of(problem, leaves)
        found.append((stats.logprobs, *gradients(stats, leaves)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["narrow", "wide"])
def test_a_target_outside_its_set_is_nan_where_values_are_not_looked_at(
    backend: str, backend_device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: never a silent number. Its row's gradient is NaN too, and no other's."""
    if backend == "triton" and backend_device == "cpu" and kind == "wide":
        pytest.skip("Triton's interpreter is slow; that the row is found is torch's work on every backend")
    monkeypatch.setattr(checks, "values_are_checked", lambda tensor: False)
    problem = recorded(backend_device, kind)
    targets = problem.targets.clone()
    assert MASK[0, 0]
    targets[0, 0] = int((~problem.support[0, 0]).nonzero()[0])
    leaves = problem.leaves()
    logits = torch.nn.functional.linear(*leaves.values()).detach().requires_grad_()
    options = {"mask": problem.arguments["mask"], "sampling_mask": problem.arguments["sampling_mask"]}
    for leaf, stats in (
        (leaves["hidden"], stats_of(problem, leaves, targets=targets)),
        (logits, fastrl.token_logprobs(logits, targets, **options)),
    ):
        assert stats.logprobs.isnan().flatten().nonzero().tolist() == [[0]]
        (gradient,) = torch.autograd.grad(stats.logprobs.sum(), leaf)
        assert gradient.isnan().any(-1).flatten().nonzero().tolist() == [[0]]


def test_one_member_is_certain(backend: str, backend_device: str) -> None:
    """logp = 0 exactly, and no gradient."""
    problem = recorded(backend_device, "targets alone")
    leaves = problem.leaves()
    stats = stats_of(problem, leaves)
    assert not stats.logprobs.any() and not stats.entropy.any()
    assert not any(gradient.any() for gradient in gradients(stats, leaves))


def test_gradients_outside_the_sets_are_zero(backend: str, backend_device: str) -> None:
    problem = recorded(backend_device, "narrow")
    logits = torch.randn(B, T, VOCAB, device=backend_device, requires_grad=True)
    given = {k: problem.arguments[k] for k in ("targets", "mask", "sampling_mask")}
    (gradient,) = gradients(fastrl.token_logprobs(logits, entropy=True, **given), {"logits": logits})
    assert gradient.any() and not gradient[~problem.support].any()
    assert not gradient[~problem.arguments["mask"]].any()


def test_the_same_bits_in_any_order(backend: str, backend_device: str) -> None:
    """No atomics: a token that many rows keep is summed in their order, whatever the threads do."""
    if backend == "triton" and backend_device == "cpu":
        pytest.skip("minutes in Triton's interpreter; tests/kernels has wide rows and long sums of its own")
    g = torch.Generator().manual_seed(1)
    n = 700  # entries of one token enough for a sum in several parts
    hidden, weight = torch.randn(n, 8, generator=g), torch.randn(50, 8, generator=g)
    sets = fastrl.SamplingMask.from_lists([[3, 7, 11 + i % 30] for i in range(n)]).to(backend_device)
    targets = torch.full((n,), 7, device=backend_device)
    runs = []
    for _ in range(2):
        h, w = (x.to(backend_device, copy=True).requires_grad_() for x in (hidden, weight))
        logp = fastrl.linear_token_logprobs(h, w, targets, sampling_mask=sets).logprobs
        runs.append((logp.detach(), *torch.autograd.grad((logp * logp).sum(), (h, w))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("dense", [0, 3])
def test_memory_follows_the_recorded_ids(backend: str, dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of tokens x vocabulary, not even of a byte an entry: 5 MB here, where all else is below 1 MB."""
    n, vocab = 256, 20_000
    monkeypatch.setitem(tiling.TILE_BYTES, "cpu", 1 << 18)
    sets = fastrl.SamplingMask.from_lists([[i, i + 1, i + 70] if i >= dense else [] for i in range(n)])
    hidden, weight = torch.randn(n, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    targets = torch.arange(n)

    def linear() -> None:
        fastrl.linear_policy_loss(
            hidden, weight, targets, objective=fastrl.GRPO(kl_coef=0), advantages=torch.ones(1), sampling_mask=sets
        ).loss.backward()

    logits = torch.randn(n, vocab, requires_grad=True)

    def from_logits() -> None:  # the gradient takes the logits' own memory
        x = logits * 1
        watched.append(x.untyped_storage().nbytes())
        fastrl.token_logprobs(x, targets, sampling_mask=sets, inplace=True, entropy=True)

    watched: list[int] = []
    with fastrl.use_backend(backend):
        assert max(allocations(linear)) < n * vocab // 4
        assert max(allocations(from_logits)) == watched[0]
        with torch.no_grad():
            assert max(allocations(lambda: fastrl.token_logprobs(logits, targets, sampling_mask=sets))) < n * vocab


def _row_local_loss(problem: Problem, leaves: dict[str, torch.Tensor], **changes: Any) -> torch.Tensor:
    given = {k: problem.arguments[k] for k in ("targets", "mask", "sampling_mask")} | changes
    advantages = torch.tensor([1.0, -0.5], device=problem.targets.device)
    return fastrl.linear_policy_loss(**leaves, objective=fastrl.GRPO(kl_coef=0), advantages=advantages, **given).loss


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_upstream_scalar_is_applied_before_rounding(
    backend: str, backend_device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss scale reaches float16 before anything underflows; a second backward gives the same bits."""
    monkeypatch.setattr(call, "widest_support", lambda vocab, device, itemsize: vocab)  # every row is gathered
    problem = recorded(backend_device, "narrow", dtype)
    leaves = problem.leaves()
    loss = _row_local_loss(problem, leaves)
    small = loss * 2.0**-30
    once, again, of_small, restored = (
        torch.autograd.grad(x, list(leaves.values()), retain_graph=True) for x in (loss, loss, small, small * 2.0**30)
    )
    assert all(map(torch.equal, once, again)) and all(map(torch.equal, once, restored))
    assert all(x.any() for x in once)
    assert any(x.any() for x in of_small) == (dtype is not torch.float16)  # there it underflows
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(loss, list(leaves.values()), create_graph=True)


def test_a_loss_with_a_target_outside_its_set_is_nan(
    backend: str, backend_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = recorded(backend_device, "narrow")
    targets = problem.targets.clone()
    targets[0, 0] = int((~problem.support[0, 0]).nonzero()[0])
    leaves = problem.leaves()
    with fastrl.check_inputs(), pytest.raises(ValueError, match="targets row 0"):
        _row_local_loss(problem, leaves, targets=targets)
    monkeypatch.setattr(checks, "values_are_checked", lambda tensor: False)
    loss = _row_local_loss(problem, leaves, targets=targets)
    (gradient,) = torch.autograd.grad(loss, leaves["hidden"])
    assert loss.isnan() and gradient.isnan().any(-1).flatten().nonzero().tolist() == [[0]]
