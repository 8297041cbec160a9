"""`linear_token_logprobs(extras=...)` against float64: mean logits, top-1 and log sum p^2, on every backend."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import head_cases
import pytest
import torch
from allocated import allocations
from head_cases import MASK, moved, random_head
from refused import refused
from torch import Tensor
from vocabulary import transformed

import fastrl
from fastrl.planning import tiling
from fastrl.planning.plans import use_plan

EXTRAS = ("mean_logits", "is_top1", "log_sum_sq_probs")
OPTIONS: dict[str, dict[str, Any]] = {
    **head_cases.OPTIONS,
    "softcap, temperature per token": {"softcap": 3.0, **head_cases.OPTIONS["temperature per token"]},
    "mask, softcap": {"mask": MASK, "softcap": 5.0},
}
EVERY_TOKEN = fastrl.SamplingMask.from_lists([list(range(77))] * 6)
# Logits are rounded to the head's dtype (half a unit in the last place of numbers up to 8), then averaged or summed.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def truth(logits: Tensor, targets: Tensor, mask: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    """In float64, with the whole (..., V) tensor."""
    z = transformed(logits.double(), **options)
    valid = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.bool()
    at_target = z.gather(-1, targets.where(valid, 0)[..., None])[..., 0]
    square = (2 * z.log_softmax(-1)).logsumexp(-1)
    return {
        "mean_logits": z.mean(-1).where(valid, 0.0),
        "is_top1": (at_target >= z.amax(-1)) & valid,
        "log_sum_sq_probs": square.where(valid, 0.0),
    }


def problem(dtype: torch.dtype = torch.float32, biased: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """A head with targets, of which every other one is the most likely; and its logits in float64."""
    head = random_head(dtype, biased)
    logits = torch.nn.functional.linear(*(x.double() for x in head.values()))
    targets = torch.randint(logits.shape[-1], (2, 3), generator=torch.Generator().manual_seed(2))
    targets.view(-1)[::2] = logits.argmax(-1).view(-1)[::2]
    return {**head, "targets": targets}, logits


def of(found: fastrl.TokenStats, **types: Any) -> dict[str, Tensor]:
    """The extras that there are, on the CPU."""
    values = {name: getattr(found, name) for name in EXTRAS}
    return {name: x.to("cpu", **types) for name, x in values.items() if x is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_values(backend: str, backend_device: str, dtype: torch.dtype, option: str) -> None:
    call, logits = problem(dtype, biased=option in ("temperature", "softcap, scale", "mask"))
    expected = truth(logits, call["targets"], **OPTIONS[option])
    if "mask" in option:  # masked rows are not read
        call["targets"] = call["targets"].where(MASK.bool(), -100)
        call["hidden"] = call["hidden"].masked_fill(~MASK.bool()[..., None], torch.nan)
    given = moved(call | OPTIONS[option], backend_device)
    for name in ("hidden", "weight"):
        given[name].requires_grad_()
    found = fastrl.linear_token_logprobs(**given, extras=EXTRAS)
    for name in EXTRAS:
        value = getattr(found, name)
        assert value.shape == MASK.shape and not value.requires_grad, name
        assert value.dtype == (torch.bool if name == "is_top1" else torch.float32)
    torch.testing.assert_close(of(found), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype], check_dtype=False)


def test_only_what_is_asked_for() -> None:
    call, _ = problem()
    assert fastrl.linear_token_logprobs(**call)[2:] == (None, None, None)
    for name in EXTRAS:
        assert list(of(fastrl.linear_token_logprobs(**call, extras=(name,)))) == [name]


@pytest.mark.parametrize("plan", ["recompute", "two-pass", "frozen-head"])
def test_every_plan_and_the_gradient_is_what_it_was(plan: str) -> None:
    call, logits = problem()
    call["hidden"].requires_grad_()
    call["weight"].requires_grad_(plan != "frozen-head")
    gradients = []
    for extras in ((), EXTRAS):
        with use_plan(plan):
            found = fastrl.linear_token_logprobs(**call, extras=extras)
        gradients += torch.autograd.grad(found.logprobs.sum(), call["hidden"])
    assert torch.equal(*gradients)
    torch.testing.assert_close(of(found), truth(logits, call["targets"]), rtol=2e-5, atol=2e-5, check_dtype=False)


def test_every_argmax_is_found_over_tiles_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of slices are put together with roundings; the maximum's owner must survive them, its rival not."""
    monkeypatch.setitem(tiling.TILE_BYTES, "cpu", 64 * 256 * 4)
    g = torch.Generator().manual_seed(2)
    for scale in (0.01, 1.0, 30.0):
        hidden, weight = scale * torch.randn(500, 24, generator=g), torch.randn(3000, 24, generator=g)
        best = (hidden.double() @ weight.double().T).topk(2, -1)
        for rank in (0, 1):
            found = fastrl.linear_token_logprobs(hidden, weight, best.indices[:, rank].clone(), extras=("is_top1",))
            gap = best.values[:, 0] - best.values[:, 1]
            clear = gap > 1e-5 * best.values[:, 0].abs().clamp_min(1)
            assert torch.equal(found.is_top1[clear], torch.full_like(clear, rank == 0)[clear])
            assert clear.float().mean() > (0.9 if scale > 0.1 else 0.5)


def test_a_tie_for_the_maximum_counts_and_nan_does_not(backend: str, backend_device: str) -> None:
    weight = torch.tensor([[1.0], [3.0], [3.0], [2.0]], device=backend_device)
    hidden = torch.tensor([[1.0]] * 4 + [[torch.nan]], device=backend_device)
    targets = torch.tensor([0, 1, 2, 3, 1], device=backend_device)
    found = fastrl.linear_token_logprobs(hidden, weight, targets, extras=EXTRAS)
    assert found.is_top1.tolist() == [False, True, True, False, False]
    for name in ("mean_logits", "log_sum_sq_probs"):
        assert getattr(found, name).isnan().tolist() == [False] * 4 + [True], name


def test_extreme_rows_keep_their_digits(backend: str, backend_device: str) -> None:
    """Confident rows whose target is the maximum or next to impossible, far from 0, and flat ones: relative to 1e-6."""
    g = torch.Generator().manual_seed(3)
    rows, targets = [], []
    for offset in (0.0, 300.0, -300.0):
        for margin in (0.0, 5.0, 25.0, 80.0):
            row = torch.randn(1000, generator=g) * 0.1 + offset
            row[7] += margin
            rows += [row, row]
            targets += [7, 8]
    logits = torch.stack(rows)  # the identity as hidden states: logits are the weight's columns, not rounded
    hidden, weight = torch.eye(len(rows), device=backend_device), logits.T.contiguous().to(backend_device)
    wanted = torch.tensor(targets)
    found = of(fastrl.linear_token_logprobs(hidden, weight, wanted.to(backend_device), extras=EXTRAS))
    expected = truth(logits, wanted)
    # sums of 1000 exponentials of float32 differences: roundings of numbers of the offset's size
    for name, atol in {"log_sum_sq_probs": 2e-6, "mean_logits": 1e-6, "is_top1": 0.0}.items():
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=atol, check_dtype=False)
    confident = (expected["log_sum_sq_probs"].abs() < 1e-9) & expected["is_top1"]
    assert confident.any() and (found["log_sum_sq_probs"][confident].abs() < 1e-9).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_budget_is_kept(softcap: float | None, dtype: torch.dtype) -> None:
    """The most that is allocated at once, outputs and gradients included, which are 1.2 MB here."""
    n, width, vocab = 1024, 64, 8192
    hidden, weight = torch.randn(n, width).to(dtype), torch.randn(vocab, width).to(dtype)
    targets = torch.randint(vocab, (n,))
    call = partial(fastrl.linear_token_logprobs, hidden, weight, targets, softcap=softcap, extras=EXTRAS)
    wide = call()
    for budget in (2 << 20, 6 << 20):  # float32 logits take 32 MiB
        with torch.no_grad():
            sizes = allocations(partial(call, memory_budget=budget))
        assert max(accumulate(sizes)) < budget  # frees are negative
        for narrow, expected in zip(call(memory_budget=budget), wide, strict=True):
            if expected is not None and expected.is_floating_point():
                torch.testing.assert_close(narrow, expected, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="smallest possible"):
        call(memory_budget=1000)


def test_no_rows_and_all_masked() -> None:
    weight = torch.randn(7, 4)
    for softcap in (None, 2.0):
        call = partial(fastrl.linear_token_logprobs, weight=weight, softcap=softcap, extras=EXTRAS)
        found = of(call(torch.zeros(0, 4), targets=torch.zeros(0, dtype=torch.int64)))
        assert all(found[name].shape == (0,) for name in EXTRAS)
        found = of(call(torch.randn(2, 4), targets=torch.full((2,), -100), mask=torch.zeros(2)))
        assert all(not found[name].any() for name in EXTRAS)


def test_under_autocast_as_the_head() -> None:
    call, _ = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fastrl.linear_token_logprobs(**call, extras=EXTRAS)
    same = fastrl.linear_token_logprobs(**(call | random_head(torch.bfloat16)), extras=EXTRAS)
    torch.testing.assert_close(of(found), of(same), rtol=0, atol=0)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_under_torch_compile(softcap: float | None) -> None:
    """In one graph, but for the tiles that a softcap's mean needs."""
    given, _ = problem()

    def call() -> dict[str, Tensor]:
        return of(fastrl.linear_token_logprobs(**given, softcap=softcap, extras=EXTRAS))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=softcap is None)()
    torch.testing.assert_close(compiled, call(), rtol=1e-5, atol=1e-6)


@refused(
    ({"extras": ("top1",)}, ValueError, "extras must be some of mean_logits, is_top1, log_sum_sq_probs, got 'top1'"),
    ({"extras": "is_top1"}, TypeError, "extras must be a tuple of names"),
    ({"extras": ("is_top1",), "sampling_mask": EVERY_TOKEN}, NotImplementedError, "sampling_mask"),
)
def test_what_is_refused(changes: dict[str, Any]) -> None:
    fastrl.linear_token_logprobs(**problem()[0], **changes)
