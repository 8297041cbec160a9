"""Every plan of the linear losses gives the oracle's numbers, and spares the work that it may spare."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from head_cases import moved
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import Problem, assert_loss_as_good_as_torch
from vocabulary import assert_as_good_as_torch

import fastrl
from fastrl.backend.torch import backend as torch_backend
from fastrl.passes import forward_gradient
from fastrl.passes import head as head_module
from fastrl.planning import tiling
from fastrl.planning.plans import use_plan

# Three chunks and three slices, the last of each ragged, of the smallest tile that is ever chosen (64 x 128).
RESPONSES, LENGTH, VOCAB, WIDTH = 5, 31, 300, 16
TEMPERATURES = torch.linspace(0.5, 2, RESPONSES * LENGTH).view(RESPONSES, LENGTH)
INTERPRETED = "Triton's interpreter is slow, and the loops around the kernels are the same for all backends"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def from_callable(log_ratio: torch.Tensor, advantages: torch.Tensor, context: fastrl.LossContext) -> torch.Tensor:
    """Reads the whole batch: the mean ratio of all tokens."""
    counts = context.mask.to(log_ratio.dtype)
    mean = (log_ratio.exp() * counts).sum() / counts.sum()
    return -(log_ratio.exp() * advantages) * mean.detach() - 0.1 * context.entropy * mean


TOKEN = {"GRPO": fastrl.GRPO(), "SAPO, entropy": fastrl.SAPO(entropy_coef=0.01), "PPO": fastrl.PPO()}
RESPONSE = {
    "GSPO": fastrl.GSPO(clip_low=0.3, clip_high=0.3),
    "GMPO, KL": fastrl.GMPO(kl=fastrl.KL("k3", 0.1)),
    "DeepSeekV32": fastrl.DeepSeekV32(kl_coef=0.1, off_policy_delta=0.05),
    "GSPO, entropy": fastrl.GSPO(entropy_coef=0.01),
    "FIPO": fastrl.FIPO(half_life=2.0, dual_clip=1.5),
}
BATCH = {
    "callable": from_callable,
    "top entropy": fastrl.DAPO(top_entropy_fraction=0.4),
    "KL-Cov": fastrl.KLCov(fraction=0.2),
    "Clip-Cov": fastrl.ClipCov(fraction=1.0, cov_low=0.86, cov_high=4.5),  # in wide gaps of the covariances
}
PLANS = [
    *((name, o, plan) for name, o in TOKEN.items() for plan in ("forward-gradient", "recompute", "two-pass")),
    *(
        (name, o, plan)
        for name, o in (RESPONSE | BATCH).items()
        for plan in ("whole-response", "recompute", "two-pass")
    ),
]


#: The log-ratios at which PPO's and GMPO's clips begin.
EDGES = (math.log(0.8), math.log(1.2), -0.4, 0.4)
MASK = torch.rand(RESPONSES, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.3
MASK[3] = False  # an empty response


def off_policy(device: str, dtype: torch.dtype, seed: int, masked: bool = True) -> Problem:
    """A problem in which a response has advantage 0."""
    size = (RESPONSES, LENGTH, WIDTH, VOCAB)
    problem = Problem(device, seed=seed, size=size, mask=MASK if masked else None, dtype=dtype)
    problem.arguments["advantages"] = torch.tensor([1.0, -0.7, 0.0, 0.4, -1.2]).to(device)
    return problem


def away_from_edges(problem: Problem) -> Problem:
    """The problem without a token whose gradient rounding decides: bfloat16 moves log-probabilities here by 0.02."""
    with torch.no_grad():
        logprobs = problem.stats(problem.leaves(torch.float64))[0]
    log_ratios = logprobs - problem.arguments["old_logprobs"]
    for edge in EDGES:
        log_ratios = log_ratios.where((log_ratios - edge).abs() > 0.04, edge + 0.05)
    problem.arguments["old_logprobs"] = (logprobs - log_ratios).float()
    return problem


def margins(dtype: torch.dtype, device: str) -> float:
    """Beside torch's own error: float32 sums over tiles in another order, some units in the last place; the cast of a
    sum, one rounding; and for bfloat16 on a CPU, whose library rounds a tile's product before it is added, another."""
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    return 2e-6 + rounding * (2 if device == "cpu" and dtype == torch.bfloat16 else 1)


def check(problem: Problem, dtype: torch.dtype, objective: Any, plan: str, frozen: bool, **options: Any) -> None:
    truth, same = (problem.plain(objective, x, frozen, **options) for x in (torch.float64, dtype))
    with use_plan(plan):
        found = problem.by_hidden(objective, frozen=frozen, memory_budget="1GiB", **options)
    assert_loss_as_good_as_torch(found, truth, same, margins(dtype, problem.targets.device.type))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of at most 64 x 128 float32 entries (128 x 128 of 16 bits)."""
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(tiling.TILE_BYTES, device, 64 * 128 * 4)


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "whole"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("name", "objective", "plan"), PLANS, ids=lambda x: x if isinstance(x, str) else "")
def test_plans_agree_with_float64(
    backend: str,
    backend_device: str,
    small_tiles: None,
    name: str,
    objective: Any,
    plan: str,
    dtype: torch.dtype,
    masked: bool,
) -> None:
    if backend == "triton" and backend_device == "cpu" and (dtype != torch.float32 or not masked or name != "GSPO"):
        pytest.skip(INTERPRETED)
    problem = away_from_edges(off_policy(backend_device, dtype, len(name), masked))
    check(problem, dtype, objective, plan, frozen=False)


@pytest.mark.parametrize("plan", ["recompute", "two-pass"])
@pytest.mark.parametrize("objective", [fastrl.GRPO(), RESPONSE["GSPO"]], ids=["GRPO", "GSPO"])
def test_float16(backend: str, backend_device: str, small_tiles: None, objective: Any, plan: str) -> None:
    if backend == "triton" and backend_device == "cpu":
        pytest.skip(INTERPRETED)
    check(off_policy(backend_device, torch.float16, seed=3), torch.float16, objective, plan, frozen=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plan", ["frozen-head", "recompute", "whole-response"])
@pytest.mark.parametrize("name", ["GSPO", "GSPO, entropy", "callable"])
def test_frozen_head(
    backend: str, backend_device: str, small_tiles: None, name: str, plan: str, dtype: torch.dtype
) -> None:
    other = dtype != torch.float32 or plan != "frozen-head" or name == "GSPO"
    if backend == "triton" and backend_device == "cpu" and other:
        pytest.skip(INTERPRETED)
    if plan == "whole-response" and dtype == torch.float16:
        pytest.skip("float16 gradients want a scale that is known only after all statistics")
    check(off_policy(backend_device, dtype, seed=5), dtype, (RESPONSE | BATCH)[name], plan, frozen=True)


def test_float16_with_a_frozen_head(device: str, small_tiles: None) -> None:
    """A row-local objective too: the scale of its slopes needs no statistics."""
    check(off_policy(device, torch.float16, seed=6), torch.float16, fastrl.GRPO(), "frozen-head", frozen=True)


def test_float16_with_a_frozen_head_costs_two_products() -> None:
    plans = fastrl.plan_memory(999, 64, 999, torch.float16, "1GiB", gradients=("hidden",), device="cpu")
    assert (plans.chosen.name, plans.chosen.units) == ("frozen-head", 2)


@pytest.mark.parametrize("invalid", [False, True], ids=["NaN hidden state", "target outside the vocabulary"])
@pytest.mark.parametrize(("name", "objective", "plan"), [*PLANS[:3], *PLANS[9:12]], ids=lambda x: str(x)[:9])
def test_nan_is_not_lost(
    device: str, small_tiles: None, monkeypatch: pytest.MonkeyPatch, name: str, objective: Any, plan: str, invalid: bool
) -> None:
    """A clip takes a NaN ratio for one outside; loss and gradients are NaN all the same, as autograd's are."""
    problem = off_policy(device, torch.float32, seed=17, masked=False)
    if invalid:
        monkeypatch.setattr("fastrl.base.checks.values_are_checked", lambda tensor: False)  # as on a GPU
        problem.targets[1, 2] = VOCAB
    else:
        problem.head["hidden"][1, 2, 0] = torch.nan
    with use_plan(plan):
        out, gradients = problem.by_hidden(objective, memory_budget="1GiB")
    assert out.loss.isnan() and out.logprobs[1, 2].isnan() and out.logprobs.isnan().sum() == 1
    assert gradients["hidden"][1, 2].isnan().all() and gradients["weight"].isnan().any()
    if name in TOKEN:
        assert gradients["hidden"].isnan().any(-1).sum() == 1, "NaN in one token's own gradient"


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 200), (130, 1, 1), (3, 1, 129)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plan", ["recompute", "two-pass"])
def test_the_least_sizes(device: str, plan: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    n, width, vocab = shape
    hidden, weight = (torch.randn(m, width, device=device).to(dtype).requires_grad_() for m in (n, vocab))
    targets = torch.zeros(n, dtype=torch.int64, device=device)
    least = fastrl.plan_memory(n, width, vocab, dtype, "1GiB", objective=None, device=device).least[plan]
    expected = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, targets, reduction="sum")
    with use_plan(plan):
        for budget in (least, least + 100, 2 * least):
            loss = -fastrl.linear_token_logprobs(hidden, weight, targets, memory_budget=budget).logprobs.sum()
            torch.testing.assert_close(loss.double(), expected, rtol=0.02, atol=0.02 * n)
            assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("plan", ["forward-gradient", "recompute", "two-pass"])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 3.0}, {"logit_scale": 0.5}, {"temperature": 0.7}, {"temperature": TEMPERATURES}],
    ids=["softcap", "scale", "temperature", "temperatures"],
)
def test_options(backend: str, backend_device: str, small_tiles: None, plan: str, options: dict[str, Any]) -> None:
    if backend == "triton" and backend_device == "cpu":
        pytest.skip(INTERPRETED)
    problem, objective = off_policy(backend_device, torch.float32, seed=7), fastrl.SAPO(entropy_coef=0.01)
    check(problem, torch.float32, objective, plan, frozen=False, **moved(options, backend_device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "objective", "plan"), [PLANS[i] for i in (0, 1, 2, 9, 10, 11)], ids=lambda x: str(x)[:9]
)
def test_scaled_and_accumulated_losses(
    device: str, small_tiles: None, name: str, objective: Any, plan: str, dtype: torch.dtype
) -> None:
    """A GradScaler's factor, and two backwards into the same .grad: float16 keeps what it would lose unscaled."""
    if dtype == torch.float16 and plan in ("forward-gradient", "whole-response"):
        pytest.skip("float16 gradients want a scale that is known only after all statistics")
    problem = off_policy(device, dtype, seed=13)
    leaves = problem.leaves()
    tiny = 2.0**-18 if dtype == torch.float16 else 0.3  # the losses' own gradients would underflow float16
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    with use_plan(plan):
        for _ in range(2):
            out = fastrl.linear_policy_loss(**leaves, objective=objective, memory_budget="1GiB", **problem.arguments)
            scaler.scale(tiny * out.loss).backward()
    (_, truth), (_, same) = (problem.plain(objective, x) for x in (torch.float64, dtype))
    for key, leaf in leaves.items():
        e, t = truth[key], same[key]
        actual = leaf.grad.double() / (2 * tiny * 2.0**10)
        # An accumulated gradient and a scale of 0.3 are rounded once more each; float16 has a least unit.
        margin = 4 * margins(dtype, device) + (2.0**-24 / (tiny * 2.0**10) / e.abs().max().item())
        assert_as_good_as_torch(*(x / e.abs().max() for x in (actual, e, t)), margin, name)


@settings(max_examples=25)
@given(data=st.data())
def test_plans_agree_for_any_batch(data: st.DataObject) -> None:
    """Packed and padded, any mask, any lengths, empty responses: all plans of GSPO give the same loss and gradients."""
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    n = sum(lengths)
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    hidden, weight = torch.randn(n, 4, generator=g), torch.randn(150, 4, generator=g)
    targets = torch.randint(150, (n,), generator=g)
    arguments: dict[str, Any] = {
        "advantages": torch.tensor([data.draw(st.sampled_from([0.0, 1.0, -2.0])) for _ in lengths]),
        "old_logprobs": torch.randn(n, generator=g) - 5,
        "mask": torch.rand(n, generator=g) > data.draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
    }
    found = []
    for plan in ("whole-response", "recompute", "two-pass"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with use_plan(plan):
            out = fastrl.linear_policy_loss(
                h, w, targets, objective=fastrl.GSPO(clip_low=3.0, clip_high=3.0), memory_budget="64MiB", **arguments
            )
        out.loss.backward()
        found.append((out.loss.detach(), h.grad, w.grad, out.logprobs, *out.metrics.values()))
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("plan", ["frozen-head", "recompute", "two-pass", "forward"])
def test_logprobs_by_every_plan(
    backend: str, backend_device: str, small_tiles: None, plan: str, frozen: bool, entropy: bool
) -> None:
    """Arbitrary upstream gradients per token, twice through a retained graph."""
    if backend == "triton" and backend_device == "cpu":
        pytest.skip(INTERPRETED)
    problem = off_policy(backend_device, torch.float32, seed=11)
    mask = problem.arguments["mask"]
    leaves = problem.leaves(frozen=frozen)
    call = partial(fastrl.linear_token_logprobs, **leaves, targets=problem.targets, mask=mask, entropy=entropy)
    with use_plan(plan), torch.no_grad() if plan == "forward" else nullcontext():
        if (plan == "frozen-head" and not frozen) or (plan == "two-pass" and frozen):
            with pytest.raises(ValueError, match="cannot be followed here, only"):
                call()
            return
        out = call()
    u, v = torch.randn(2, RESPONSES, LENGTH, generator=torch.Generator().manual_seed(1)).to(backend_device)
    wide = problem.leaves(torch.float64, frozen)
    logp, h = (x.where(mask, 0.0) for x in problem.stats(wide))
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-5}
    torch.testing.assert_close(out.logprobs.double(), logp, **close)
    assert (out.entropy is not None) == entropy
    if plan == "forward":
        assert not out.logprobs.requires_grad
        return
    value, truth = (u * out.logprobs).sum(), (u * logp).sum()
    if out.entropy is not None:
        torch.testing.assert_close(out.entropy.double(), h, **close)
        value, truth = value + (v * out.entropy).sum(), truth + (v * h).sum()
    expected = torch.autograd.grad(truth, [x for x in wide.values() if x.requires_grad])
    for _ in range(2):
        actual = torch.autograd.grad(value, [x for x in leaves.values() if x.requires_grad], retain_graph=True)
        torch.testing.assert_close(actual, expected, check_dtype=False, **close)


@pytest.mark.parametrize(
    ("objective", "plan"),
    [(fastrl.GRPO(), "forward-gradient"), (RESPONSE["GSPO"], "whole-response"), (from_callable, "whole-response")],
    ids=["GRPO", "GSPO", "callable"],
)
def test_one_chunk_gives_the_weights_gradient_one_rounding(
    backend: str, backend_device: str, monkeypatch: pytest.MonkeyPatch, objective: Any, plan: str
) -> None:
    """No worse than the product of the whole bfloat16 gradient of the logits, and with no float32 buffer beside it."""
    if backend == "triton" and backend_device == "cpu":
        pytest.skip(INTERPRETED)
    dtypes: list[torch.dtype] = []
    empty = head_module.empty
    for module in (head_module, forward_gradient):
        monkeypatch.setattr(
            module, "empty", lambda shape, dtype, *rest: [dtypes.append(dtype), empty(shape, dtype, *rest)][1]
        )
    check(off_policy(backend_device, torch.bfloat16, seed=8), torch.bfloat16, objective, plan, frozen=False)
    assert torch.bfloat16 in dtypes and torch.float32 not in dtypes


def test_a_frozen_head_reads_its_logits_once_per_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    visits: list[str] = []
    for name in ("row_statistics", "row_gradient", "row_forward_gradient"):
        function = getattr(torch_backend, name)
        monkeypatch.setattr(torch_backend, name, lambda *a, n=name, f=function, **k: [visits.append(n), f(*a, **k)][1])
    with fastrl.use_backend("torch"):
        for objective, count in ((RESPONSE["GSPO"], 1), (RESPONSE["GSPO, entropy"], 2)):
            visits.clear()
            check(off_policy("cpu", torch.float32, seed=9), torch.float32, objective, "frozen-head", frozen=True)
            assert visits == ["row_forward_gradient"] * count
