"""`logits_dtype=torch.float32` with a head in 16 bits: unrounded sums, by every function, plan and backend."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from problem import Found, Problem, assert_loss_as_good_as_torch
from torch import Tensor
from torch.nn.functional import linear
from vocabulary import assert_as_good_as_torch, target_stats

import fastrl
from fastrl.backend.torch import backend as torch_backend
from fastrl.losses import request as call
from fastrl.passes import head as head_module
from fastrl.planning.plans import use_plan

# Several chunks and slices, the last of each ragged, of the smallest tile that is ever chosen (64 x 128).
RESPONSES, LENGTH, VOCAB, WIDTH = 5, 31, 300, 16
MASK = torch.rand(RESPONSES, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.3
HALVES = [torch.bfloat16, torch.float16]
#: Some dozen float32 roundings of numbers of the size of the logits; a rounding of one to bfloat16 is 1000 times more.
MARGIN = 4e-6
#: A gradient: its tile, a product on a CPU and the result are each rounded to the head's dtype.
GRADIENT = {torch.bfloat16: 2 * 2**-8, torch.float16: 2 * 2**-11}
INTERPRETED = "Triton's interpreter is slow, and the loops around the kernels are the same for all backends"
GSPO = fastrl.GSPO(clip_low=0.3, clip_high=0.3, entropy_coef=0.01)


def from_callable(log_ratio: Tensor, advantages: Tensor, context: fastrl.LossContext) -> Tensor:
    """Reads each token alone, which only `row_local` says."""
    return -(log_ratio.exp() * advantages) - 0.1 * context.entropy


def row_local(log_ratio: Tensor, advantages: Tensor, context: fastrl.LossContext) -> Tensor:
    return from_callable(log_ratio, advantages, context)


row_local.row_local = True  # type: ignore[attr-defined]

#: objective, plan, frozen
PLANS: list[tuple[Any, str, bool]] = [
    (fastrl.GRPO(), "forward-gradient", False),
    (fastrl.SAPO(entropy_coef=0.01), "forward-gradient", True),
    (row_local, "forward-gradient", False),
    (GSPO, "whole-response", False),
    (from_callable, "whole-response", True),
    (GSPO, "frozen-head", True),
    (fastrl.GSPO(), "frozen-head", True),
    (GSPO, "recompute", False),
    (fastrl.GRPO(), "recompute", True),
    (fastrl.GRPO(), "two-pass", False),
]


def posed(device: str, dtype: torch.dtype, **more: Any) -> Problem:
    size = (RESPONSES, LENGTH, WIDTH, VOCAB)
    problem = Problem(device, seed=1, size=size, mask=MASK, dtype=dtype, **more)
    problem.arguments["advantages"] = torch.tensor([1.0, -0.7, 0.0, 0.4, -1.2]).to(device)
    return problem


def check(found: Found, truth: Found, same: Found, dtype: torch.dtype) -> None:
    """The loss and the tokens' statistics are as good as float32's, the gradients as good as their dtype's."""
    for name in ("loss", "logprobs", "entropy"):
        values = (getattr(x, name).detach().reshape(-1) for x, _ in (found, truth, same))
        assert_as_good_as_torch(*values, MARGIN, name)
    assert_loss_as_good_as_torch(found, truth, same, MARGIN + GRADIENT[dtype])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("objective", "plan", "frozen"), PLANS, ids=lambda x: x if isinstance(x, str) else "frozen" if x is True else ""
)
def test_policy_losses(
    backend: str, backend_device: str, tiles: str, objective: Any, plan: str, frozen: bool, dtype: torch.dtype
) -> None:
    if backend == "triton" and backend_device == "cpu" and (dtype, plan, tiles) != (HALVES[1], "two-pass", "tiles"):
        pytest.skip(INTERPRETED)
    if dtype == torch.float16 and plan in ("forward-gradient", "whole-response"):
        pytest.skip("float16 gradients want a scale that is known only after all statistics")
    problem = posed(backend_device, dtype)
    truth, same = (problem.plain(objective, x, frozen) for x in (torch.float64, torch.float32))
    with use_plan(plan):
        found = problem.by_hidden(objective, frozen=frozen, memory_budget="1GiB", logits_dtype=torch.float32)
    check(found, truth, same, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("plan", "frozen"), [("recompute", False), ("two-pass", False), ("frozen-head", True)])
def test_several_entries_per_row(device: str, plan: str, frozen: bool, dtype: torch.dtype) -> None:
    """Values have float32's error, and a gradient is rounded to the head's dtype."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 96, generator=g).to(dtype).to(device) for n in (150, VOCAB))
    ids, upstream = torch.randint(VOCAB, (150, 5), generator=g).to(device), torch.randn(150, 5, generator=g).to(device)
    truth, same = [], []
    for found, wide in ((truth, torch.float64), (same, torch.float32)):
        leaves = [x.to(wide).requires_grad_() for x in (hidden, weight)]
        logprobs = linear(*leaves).log_softmax(-1).gather(-1, ids)
        found += [logprobs.detach(), *torch.autograd.grad((upstream * logprobs).sum(), leaves)]
    leaves = [hidden.requires_grad_(), weight.requires_grad_(not frozen)]
    with use_plan(plan):
        logprobs = fastrl.linear_gathered_logprobs(*leaves, ids, logits_dtype=torch.float32)
        gradients = torch.autograd.grad((upstream * logprobs).sum(), leaves[: 1 if frozen else 2])
    assert_as_good_as_torch(logprobs, truth[0], same[0], MARGIN, "logprobs")
    for x, expected in zip(gradients, truth[1:], strict=False):
        assert (x.double() - expected).norm() <= GRADIENT[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("plan", "needs"),
    [("forward", ""), ("recompute", "hwb"), ("recompute", "b"), ("two-pass", "hw"), ("frozen-head", "h")],
)
def test_logprobs(backend: str, backend_device: str, tiles: str, plan: str, needs: str, dtype: torch.dtype) -> None:
    """With extras; rounded logits are 100 times further from the truth than these may be."""
    if backend == "triton" and backend_device == "cpu":
        pytest.skip(INTERPRETED)
    g = torch.Generator().manual_seed(2)
    shapes = {"hidden": (150, 96), "weight": (VOCAB, 96), **({"bias": (VOCAB,)} if needs != "hw" else {})}
    head = {k: torch.randn(shape, generator=g) * (0.4 if k == "weight" else 1) for k, shape in shapes.items()}
    head = {k: x.to(dtype).to(backend_device) for k, x in head.items()}
    targets = linear(*(x.float() for x in head.values())).argmax(-1)  # confident ones
    targets[::2] = torch.randint(VOCAB, (75,), generator=g).to(backend_device)
    mask = (torch.rand(150, generator=g) > 0.2).to(backend_device)
    upstream = torch.randn(2, 150, generator=g).to(backend_device)

    def leaves(dtype: torch.dtype) -> dict[str, Tensor]:
        return {k: x.to(dtype, copy=True).requires_grad_(k[0] in needs) for k, x in head.items()}

    def plain(dtype: torch.dtype) -> list[Tensor]:
        given = leaves(dtype)
        z = linear(*given.values())
        logp, entropy = (x.where(mask, 0.0) for x in target_stats(z, targets))
        return [logp, entropy, z.mean(-1).where(mask, 0.0), *gradients(logp, entropy, given)]

    def gradients(logp: Tensor, entropy: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
        wanted = [x for x in given.values() if x.requires_grad]
        total = (upstream[0] * logp).sum() + (upstream[1] * entropy).sum()
        return list(torch.autograd.grad(total, wanted)) if wanted else []

    def found(logits_dtype: torch.dtype | None) -> list[Tensor]:
        given = leaves(dtype)
        options: dict[str, Any] = {"mask": mask, "entropy": True, "extras": ("mean_logits", "is_top1")}
        with use_plan(plan), torch.no_grad() if not needs else nullcontext():
            out = fastrl.linear_token_logprobs(
                **given, targets=targets, memory_budget="1GiB", logits_dtype=logits_dtype, **options
            )
        assert torch.equal(out.is_top1 & mask, (target_rank(given) == 0) & mask)
        return [out.logprobs, out.entropy, out.mean_logits, *gradients(out.logprobs, out.entropy, given)]

    def target_rank(given: dict[str, Tensor]) -> Tensor:
        z = linear(*(x.detach().double() for x in given.values()))
        return (z > z.gather(-1, targets[:, None])).sum(-1)

    truth, same, ours = plain(torch.float64), plain(torch.float32), found(torch.float32)
    for exact, of_torch, x in list(zip(truth, same, ours, strict=True))[:3]:
        assert_as_good_as_torch(x.detach(), exact.detach(), of_torch.detach(), MARGIN, "statistics")
    for exact, of_torch, x in list(zip(truth, same, ours, strict=True))[3:]:
        values = (v / exact.abs().max() for v in (x, exact, of_torch))
        assert_as_good_as_torch(*values, MARGIN + GRADIENT[dtype], "gradients")
    with torch.no_grad():
        rounded = fastrl.linear_token_logprobs(**head, targets=targets, mask=mask).logprobs
    error, theirs = ((x.double() - truth[0]).abs().max().item() for x in (ours[0], rounded))
    assert theirs > 100 * error


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("widest", [0, 40], ids=["dense", "gathered and dense"])
def test_sampling_masks(
    backend: str, backend_device: str, monkeypatch: pytest.MonkeyPatch, tiles: str, widest: int, dtype: torch.dtype
) -> None:
    """Rows whose entries are gathered, wide ones that the dense kernels restrict, and unrecorded ones."""
    if backend == "triton" and backend_device == "cpu":
        pytest.skip(INTERPRETED)
    monkeypatch.setattr(call, "widest_support", lambda vocab, device, itemsize: widest)
    monkeypatch.setattr(call, "gathers", lambda *_: False)

    def sets(targets: Tensor, g: torch.Generator) -> fastrl.SamplingMask:
        n = targets.numel()
        sizes = torch.tensor([0, 1, 20, 100]).repeat(n)[:n]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        ids = torch.cat([torch.randperm(VOCAB, generator=g)[:size] for size in sizes.tolist()])
        return fastrl.SamplingMask(ids, offsets).with_targets(targets)

    problem = posed(backend_device, dtype, sets=sets)
    truth, same = (problem.plain(GSPO, x) for x in (torch.float64, torch.float32))
    found = problem.by_hidden(GSPO, memory_budget="1GiB", logits_dtype=torch.float32)
    check(found, truth, same, dtype)


def test_cross_entropy_and_dpo(backend: str, backend_device: str) -> None:
    g = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(*n, 64, generator=g).bfloat16().to(backend_device) for n in ((2, 5), (77,)))
    targets = torch.randint(77, (2, 5), generator=g).to(backend_device)
    ones, ref = torch.ones_like(targets), torch.zeros(2, device=backend_device)

    def cross_entropies(x: Tensor, w: Tensor, **options: Any) -> list[Tensor]:
        means = fastrl.linear_cross_entropy(x, w, targets, **options)[None]
        return [means, fastrl.linear_cross_entropy(x, w, targets, reduction="none", **options).view(-1)]

    def all_of(x: Tensor, w: Tensor, **options: Any) -> Tensor:
        dpo = fastrl.linear_dpo_loss(x, w, targets, ones, ref, beta=1.0, **options)
        return torch.cat([*cross_entropies(x, w, **options), dpo.loss[None], dpo.chosen_rewards])

    logp = torch.log_softmax(linear(hidden.double(), weight.double()), -1).gather(-1, targets[..., None])[..., 0]
    rewards = logp.sum(-1)
    dpo = -torch.nn.functional.logsigmoid(rewards[:1] - rewards[1:])
    truth = torch.cat([-logp.mean()[None], -logp.view(-1), dpo, rewards[:1]])
    same = all_of(hidden.float(), weight.float())
    assert_as_good_as_torch(all_of(hidden, weight, logits_dtype=torch.float32), truth, same, MARGIN, "losses")
    assert (all_of(hidden, weight).double() - truth).abs().max() > 1e-3


@pytest.mark.parametrize("backend", ["torch", "cpp"], indirect=True)
@pytest.mark.parametrize("piece", [0, 7 * 4 * 96])
def test_any_piece_of_the_weight_gives_the_same(monkeypatch: pytest.MonkeyPatch, backend: str, piece: int) -> None:
    """A piece of one row, of some rows with a ragged end, or all of it, as far as the library adds up alike."""
    g = torch.Generator().manual_seed(4)
    hidden, weight, bias = (torch.randn(*n, generator=g).bfloat16() for n in ((70, 96), (50, 96), (50,)))
    targets = torch.randint(50, (70,), generator=g)
    mask = torch.rand(70, generator=g) > 0.5

    def run() -> Tensor:
        given = {"bias": bias, "mask": mask, "logits_dtype": torch.float32}
        return fastrl.linear_token_logprobs(hidden, weight, targets, **given).logprobs

    whole = run()
    monkeypatch.setattr(head_module, "PIECE_BYTES", piece)
    torch.testing.assert_close(run(), whole, rtol=1e-6, atol=1e-6)


def test_a_float32_head_is_not_affected(backend: str, backend_device: str) -> None:
    g = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, 8, generator=g).to(backend_device) for n in (6, 33))
    targets = torch.zeros(6, dtype=torch.int64, device=backend_device)
    one, other = (
        fastrl.linear_token_logprobs(hidden, weight, targets, logits_dtype=x).logprobs for x in (None, torch.float32)
    )
    assert torch.equal(one, other)
    plans = [fastrl.plan_memory(99, 64, 999, torch.float32, "1GiB", logits_dtype=x) for x in (None, torch.float32)]
    assert plans[0] == plans[1]


def test_autocast_rounds_the_head_and_not_the_logits() -> None:
    g = torch.Generator().manual_seed(6)
    hidden, weight = (torch.randn(n, 64, generator=g) for n in (9, 33))
    targets = torch.randint(33, (9,), generator=g)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    with torch.autocast("cpu", torch.bfloat16):
        found = fastrl.linear_token_logprobs(*leaves, targets, logits_dtype=torch.float32).logprobs
        gradients = torch.autograd.grad(found.sum(), leaves)
    same = fastrl.linear_token_logprobs(hidden.bfloat16(), weight.bfloat16(), targets, logits_dtype=torch.float32)
    assert torch.equal(found, same.logprobs)
    assert all(x.dtype == torch.float32 and x.abs().sum() > 0 for x in gradients)


def test_compiled_whole(device: str) -> None:
    torch.compiler.reset()
    g = torch.Generator().manual_seed(7)
    hidden, weight = (torch.randn(*n, 8, generator=g).bfloat16().to(device) for n in ((2, 3), (33,)))
    targets, signs = torch.randint(33, (2, 3), generator=g).to(device), torch.tensor([1.0, -1.0], device=device)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        stats = fastrl.linear_token_logprobs(hidden, weight, targets, logits_dtype=torch.float32)
        given: dict[str, Any] = {"objective": fastrl.DAPO(), "advantages": signs, "logits_dtype": torch.float32}
        return fastrl.linear_policy_loss(hidden, weight, targets, **given).loss + stats.logprobs.sum()

    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    eager = loss(*leaves)
    value = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(value, eager)
    for a, e in zip(torch.autograd.grad(value, leaves), torch.autograd.grad(eager, leaves), strict=True):
        torch.testing.assert_close(a, e)


def test_the_products_of_the_backward_stay_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the kernels get float32 logits, with a gradient beside them in the head's dtype."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    original = torch_backend.row_gradient

    def spy(logits: Tensor, *arguments: Any) -> None:
        seen.append((logits.dtype, arguments[-1].dtype))
        original(logits, *arguments)

    monkeypatch.setattr(torch_backend, "row_gradient", spy)
    hidden, weight = (torch.randn(n, 8).bfloat16().requires_grad_() for n in (70, 33))
    with fastrl.use_backend("torch"), use_plan("recompute"):
        fastrl.linear_token_logprobs(
            hidden, weight, torch.zeros(70, dtype=torch.int64), logits_dtype=torch.float32
        ).logprobs.sum().backward()
    assert seen == [(torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(
    ("logits_dtype", "error", "text"),
    [
        ("float32", TypeError, "logits_dtype must be None or torch.float32, got str"),
        (torch.bfloat16, ValueError, r"logits_dtype must be None.* or torch\.float32, got torch\.bfloat16"),
        (torch.float64, ValueError, r"logits_dtype must be None.* or torch\.float32, got torch\.float64"),
    ],
)
def test_bad_input(logits_dtype: Any, error: type[Exception], text: str) -> None:
    hidden, weight, targets = torch.zeros(2, 3, 4), torch.zeros(7, 4), torch.zeros(2, 3, dtype=torch.int64)
    loss: dict[str, Any] = {"objective": fastrl.PPO(), "advantages": torch.ones(2)}
    given: dict[str, Any] = {"logits_dtype": logits_dtype}
    for function, more in (
        (fastrl.linear_token_logprobs, {}),
        (fastrl.linear_cross_entropy, {}),
        (fastrl.linear_policy_loss, loss),
        (fastrl.linear_dpo_loss, {"mask": torch.ones(2, 3), "ref_logprobs": torch.zeros(2)}),
    ):
        with pytest.raises(error, match=text):
            function(hidden, weight, targets=targets, **more, **given)
    with pytest.raises(error, match=text):
        fastrl.plan_memory(9, 9, 9, **given)
