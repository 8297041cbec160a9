"""Losses over recorded support: those of dense logits that are -inf outside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from objectives import OBJECTIVES
from vocabulary import assert_as_good_as_torch

import fastrl
from fastrl.base import checks
from fastrl.losses import supports
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
    monkeypatch.setattr(supports, "gathers", lambda rows, ids, sizes: False)


class Problem:
    """Hidden states, a head, and a recorded support for each token."""

    def __init__(self, device: str, kind: str, dtype: torch.dtype = torch.float32, on_policy: bool = False) -> None:
        g = torch.Generator().manual_seed(KINDS.index(kind))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g)

        self.hidden = normal(B, T, WIDTH).to(dtype).to(device)
        self.weight, self.bias = (x.to(dtype).to(device) for x in (normal(VOCAB, WIDTH) / 2, normal(VOCAB)))
        targets = torch.randint(VOCAB, (B, T), generator=g)
        self.sets = fastrl.SamplingMask.from_lists(self._sets(kind, targets.flatten().tolist(), g)).to(device)
        self.support = self.sets.to_dense(VOCAB).view(B, T, VOCAB)
        mask = torch.rand(B, T, generator=g) > 0.2
        mask[1, 5:] = False
        self.targets = targets.where(mask, -100).to(device)
        logp = self.logprobs(torch.float64, False)[0].cpu().float()
        self.arguments: dict[str, Any] = {
            "advantages": normal(B).to(device),
            "mask": mask.to(device),
            "old_logprobs": None if on_policy else (logp + 0.3 * normal(B, T)).to(device),
            "ref_logprobs": (logp + 0.3 * normal(B, T)).to(device),
            "rollout_logprobs": (logp + 0.3 * normal(B, T)).to(device),
        }

    @staticmethod
    def _sets(kind: str, targets: list[int], g: torch.Generator) -> list[list[int]]:
        rows = []
        for i, y in enumerate(targets):
            size = {"narrow": 1 + i % 7, "targets alone": 1, "wide": 100, "full": VOCAB}.get(kind)
            if size is None:
                size = (0, 1, 5, 60, VOCAB)[i % 5]
            others = torch.randperm(VOCAB, generator=g)[: max(size - 1, 0)].tolist()
            rows.append([] if size == 0 else [y, *others])  # unsorted, the target at times twice
        return rows

    def leaves(self, dtype: torch.dtype) -> list[torch.Tensor]:
        return [x.to(dtype, copy=True).requires_grad_() for x in (self.hidden, self.weight, self.bias)]

    def logprobs(self, dtype: torch.dtype, grad: bool = True, **options: Any) -> tuple[torch.Tensor, ...]:
        """Log-probabilities and entropies of whole logits in `dtype`, and their leaves."""
        leaves = self.leaves(dtype)
        x = torch.nn.functional.linear(*leaves)
        x = x.double() if dtype == torch.float64 else x.float()
        z = options.get("logit_scale", 1.0) * x
        if options.get("softcap"):
            z = options["softcap"] * torch.tanh(z / options["softcap"])
        z = z / options.get("temperature", 1.0)
        log_p = torch.log_softmax(z.masked_fill(~self.support, -torch.inf), -1)
        entropy = -(log_p.exp() * log_p.masked_fill(~self.support, 0.0)).sum(-1)
        logp = log_p.gather(-1, self.targets.clamp_min(0)[..., None])[..., 0]
        return logp.masked_fill(logp == -torch.inf, 0.0), entropy, *leaves

    def plain(self, objective: Any, dtype: torch.dtype, **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logp, entropy, *leaves = self.logprobs(dtype, **options)
        given = {
            k: v.to(logp.dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in self.arguments.items()
        }
        loss = fastrl.policy_loss(logp, objective=objective, entropy=entropy, **given).loss
        return loss.detach(), list(torch.autograd.grad(loss, leaves))

    def by_hidden(self, objective: Any, dtype: torch.dtype, **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = self.leaves(dtype)
        out = fastrl.linear_policy_loss(
            leaves[0],
            leaves[1],
            self.targets,
            bias=leaves[2],
            objective=objective,
            sampling_mask=self.sets,
            **self.arguments,
            **options,
        )
        return out.loss.detach(), list(torch.autograd.grad(out.loss, leaves))

    def by_logits(self, objective: Any, inplace: bool, **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = self.leaves(torch.float32)
        out = fastrl.logits_policy_loss(
            torch.nn.functional.linear(*leaves),
            self.targets,
            objective=objective,
            sampling_mask=self.sets,
            inplace=inplace,
            **self.arguments,
            **options,
        )
        return out.loss.detach(), list(torch.autograd.grad(out.loss, leaves))


def check(found: Any, truth: Any, same_dtype: Any, margin: float) -> None:
    (loss, gradients), (true_loss, true_gradients), (torch_loss, torch_gradients) = found, truth, same_dtype
    assert_as_good_as_torch(loss[None], true_loss[None], torch_loss[None], margin, "loss")
    for name, a, e, t in zip(("hidden", "weight", "bias"), gradients, true_gradients, torch_gradients, strict=True):
        scale = e.abs().max().clamp_min(1e-3)
        assert_as_good_as_torch(a / scale, e / scale, t / scale, margin, f"d_{name}")


# Sums of some hundred float32 terms in another order than torch's.
MARGIN = 2e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_all_objectives_agree_with_dense_float64(backend: str, backend_device: str, name: str, kind: str) -> None:
    if backend == "triton" and backend_device == "cpu" and (kind != "mixed" or name not in ("GSPO", "PPO")):
        pytest.skip("Triton's interpreter is slow, and objectives run in torch here")
    objective = OBJECTIVES[name]
    problem = Problem(backend_device, kind)
    truth, plain = problem.plain(objective, torch.float64), problem.plain(objective, torch.float32)
    check(problem.by_hidden(objective, torch.float32), truth, plain, MARGIN)
    for inplace in (False, True):
        check(problem.by_logits(objective, inplace), truth, plain, MARGIN)


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "by width"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_transforms(
    backend: str, backend_device: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, gathers: bool
) -> None:
    if backend == "triton" and backend_device == "cpu" and (dtype != torch.float32 or kind not in ("narrow", "mixed")):
        pytest.skip("Triton's interpreter is slow, and rounds 16-bit casts otherwise than a GPU")
    if gathers:  # however wide
        monkeypatch.setattr(supports, "widest_support", lambda vocab, device, itemsize: vocab)
    objective = fastrl.GRPO(entropy_coef=0.01)
    options = {"temperature": 0.7, "logit_scale": 1.5, "softcap": 8.0}
    problem = Problem(backend_device, kind, dtype)
    truth, plain = problem.plain(objective, torch.float64, **options), problem.plain(objective, dtype, **options)
    # Beside torch's own error: the sums' order, and the cast of a gradient or of an added one (half a unit each).
    margin = MARGIN + {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    check(problem.by_hidden(objective, dtype, **options), truth, plain, margin)


@pytest.mark.parametrize("plan", ["recompute", "two-pass"])
def test_plans_of_the_dense_rows_agree(plan: str) -> None:
    """Rows without a set and with wide ones, by either plan, in chunks and slices of the smallest tile."""
    objective = fastrl.GSPO(entropy_coef=0.01)
    problem = Problem("cpu", "mixed")
    truth, plain = problem.plain(objective, torch.float64), problem.plain(objective, torch.float32)
    with use_plan(plan), pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiling.TILE_BYTES, "cpu", 64 * 128 * 4)
        check(problem.by_hidden(objective, torch.float32), truth, plain, MARGIN)


def test_sets_of_thousands(backend: str, backend_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """5000 ids a row, gathered and dense: 20000 entries make either worth its while; 3 rows, for it is dense memory."""
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
        log_p = torch.log_softmax((h @ w.T).masked_fill(~sets.to_dense(vocab), -torch.inf), -1)
        logp = log_p.gather(-1, targets[:, None])[:, 0]
        truths.append((logp.detach(), *torch.autograd.grad(logp.sum(), (h, w))))
    for widest in (20_000, 200):
        monkeypatch.setattr(supports, "widest_support", lambda vocab, device, itemsize, most=widest: most)
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
    problem = Problem(backend_device, kind)
    hidden, weight, bias = problem.leaves(torch.float32)
    options = {"mask": problem.arguments["mask"], "sampling_mask": problem.sets, "entropy": True}
    plain = fastrl.linear_token_logprobs(hidden, weight, problem.targets, bias=bias, **options)
    expected = torch.autograd.grad(plain.logprobs.sum() + plain.entropy.sum(), (hidden, weight, bias))
    strided = (
        torch.stack([hidden, hidden], -1).flatten(-2)[..., ::2],
        weight.t().contiguous().t(),
        torch.stack([bias, bias], -1).flatten()[::2],
    )
    h, w, b = (x.detach().requires_grad_() for x in strided)
    assert h.stride(-1) == 2 and w.stride(-1) == VOCAB and b.stride(0) == 2
    stats = fastrl.linear_token_logprobs(h, w, problem.targets, bias=b, **options)
    found = torch.autograd.grad(stats.logprobs.sum() + stats.entropy.sum(), (h, w, b))
    for actual, truth in zip((stats.logprobs, *found), (plain.logprobs, *expected), strict=True):
        torch.testing.assert_close(actual, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["narrow", "wide"])
def test_a_target_outside_its_set_is_nan_where_values_are_not_looked_at(
    backend: str, backend_device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: never a silent number. Its row's gradient is NaN too, and no other's."""
    if backend == "triton" and backend_device == "cpu" and kind == "wide":
        pytest.skip("Triton's interpreter is slow; that the row is found is torch's work on every backend")
    monkeypatch.setattr(checks, "values_are_checked", lambda tensor: False)
    problem = Problem(backend_device, kind)
    targets = problem.targets.clone()
    targets[0, 0] = int((~problem.support[0, 0]).nonzero()[0])
    hidden, weight, bias = problem.leaves(torch.float32)
    mask = torch.ones_like(targets, dtype=torch.bool)
    mask[problem.targets < 0] = False
    assert mask[0, 0]
    logits = torch.nn.functional.linear(hidden, weight, bias).detach().requires_grad_()
    options = {"mask": mask, "sampling_mask": problem.sets}
    for leaf, stats in (
        (hidden, fastrl.linear_token_logprobs(hidden, weight, targets, bias=bias, **options)),
        (logits, fastrl.token_logprobs(logits, targets, **options)),
    ):
        assert stats.logprobs.isnan().flatten().nonzero().tolist() == [[0]]
        (gradient,) = torch.autograd.grad(stats.logprobs.sum(), leaf)
        assert gradient.isnan().any(-1).flatten().nonzero().tolist() == [[0]]


def test_one_member_is_certain(backend: str, backend_device: str) -> None:
    """logp = 0 exactly, and no gradient."""
    problem = Problem(backend_device, "targets alone")
    hidden, weight, bias = leaves = problem.leaves(torch.float32)
    stats = fastrl.linear_token_logprobs(
        hidden,
        weight,
        problem.targets,
        bias=bias,
        mask=problem.arguments["mask"],
        sampling_mask=problem.sets,
        entropy=True,
    )
    assert not stats.logprobs.any() and not stats.entropy.any()
    for gradient in torch.autograd.grad(stats.logprobs.sum() + stats.entropy.sum(), leaves):
        assert not gradient.any()


def test_gradients_outside_the_sets_are_zero(backend: str, backend_device: str) -> None:
    problem = Problem(backend_device, "narrow")
    logits = torch.randn(B, T, VOCAB, device=backend_device, requires_grad=True)
    stats = fastrl.token_logprobs(
        logits, problem.targets, mask=problem.arguments["mask"], sampling_mask=problem.sets, entropy=True
    )
    (gradient,) = torch.autograd.grad(stats.logprobs.sum() + stats.entropy.sum(), logits)
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


def _largest_allocation(call: Any) -> int:
    """Bytes of the largest tensor that is allocated, on whatever device."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert sizes, "the profiler saw no allocation"
    return max(sizes)


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
        assert _largest_allocation(linear) < n * vocab // 4
        assert _largest_allocation(from_logits) == watched[0]
        with torch.no_grad():
            assert _largest_allocation(lambda: fastrl.token_logprobs(logits, targets, sampling_mask=sets)) < n * vocab
