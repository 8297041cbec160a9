"""`linear_token_logprobs(extras=...)` against float64: mean logits, top-1 and log sum p^2, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl
from fastrl.planning import tiling
from fastrl.planning.plans import use_plan

EXTRAS = ("mean_logits", "is_top1", "log_sum_sq_probs")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "temperature per token": {"temperature": torch.tensor([[0.5, 1.0, 1.7], [0.9, 2.0, 0.3]])},
    "softcap, scale": {"softcap": 4.0, "logit_scale": 0.8, "temperature": 1.3},
    "softcap, temperature per token": {"softcap": 3.0, "temperature": torch.tensor([[0.5, 1, 1.7], [0.9, 2, 0.3]])},
    "mask": {"mask": torch.tensor([[1, 0, 1], [0, 1, 1]])},
    "mask, softcap": {"mask": torch.tensor([[1, 0, 1], [0, 1, 1]]), "softcap": 5.0},
}
# Logits are rounded to the head's dtype (half a unit in the last place of numbers up to 8), then averaged or summed.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def truth(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> dict[str, Tensor]:
    """In float64, with the whole (..., V) tensor."""
    z = logits.double() * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / (temperature.double()[..., None] if isinstance(temperature, Tensor) else temperature)
    valid = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.bool()
    at_target = z.gather(-1, targets.where(valid, 0)[..., None])[..., 0]
    square = (2 * z.log_softmax(-1)).logsumexp(-1)
    return {
        "mean_logits": z.mean(-1).where(valid, 0.0),
        "is_top1": (at_target >= z.amax(-1)) & valid,
        "log_sum_sq_probs": square.where(valid, 0.0),
    }


def moved(options: dict[str, Any], device: str) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}


def problem(dtype: torch.dtype, biased: bool, vocab: int = 77) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states (2, 3, 16), a head, and targets of which every other one is the most likely."""
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 3, 16, generator=g).to(dtype)
    weight = (torch.randn(vocab, 16, generator=g) / 2 + 0.1).to(dtype)
    bias = torch.randn(vocab, generator=g).to(dtype) if biased else None
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    targets = torch.randint(vocab, (2, 3), generator=g)
    targets.view(-1)[::2] = logits.argmax(-1).view(-1)[::2]
    return hidden, weight, bias, targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_values(backend: str, backend_device: str, dtype: torch.dtype, option: str) -> None:
    biased = list(OPTIONS).index(option) % 2 == 1  # with a scalar temperature, softcaps of both kinds, and none
    hidden, weight, bias, targets = problem(dtype, biased)
    options = OPTIONS[option]
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    expected = truth(logits, targets, **options)
    if "mask" in options:  # masked rows are not read
        targets = targets.where(options["mask"].bool(), -100)
        hidden = hidden.masked_fill(~options["mask"].bool()[..., None], torch.nan)
    found = fastrl.linear_token_logprobs(
        hidden.to(backend_device).requires_grad_(),
        weight.to(backend_device).requires_grad_(),
        targets.to(backend_device),
        bias=None if bias is None else bias.to(backend_device),
        extras=EXTRAS,
        **moved(options, backend_device),
    )
    for name in EXTRAS:
        value = getattr(found, name)
        assert value.shape == targets.shape and not value.requires_grad, name
        assert value.dtype == (torch.bool if name == "is_top1" else torch.float32)
        value = value.cpu()
        if name == "is_top1":
            assert torch.equal(value, expected[name])
        else:
            torch.testing.assert_close(value.double(), expected[name], rtol=CLOSE[dtype], atol=CLOSE[dtype], msg=name)


def test_only_what_is_asked_for() -> None:
    hidden, weight, _, targets = problem(torch.float32, False)
    assert fastrl.linear_token_logprobs(hidden, weight, targets)[2:] == (None, None, None)
    for name in EXTRAS:
        found = fastrl.linear_token_logprobs(hidden, weight, targets, extras=(name,))
        assert [x for x in EXTRAS if getattr(found, x) is not None] == [name]


@pytest.mark.parametrize("plan", ["recompute", "two-pass", "frozen-head"])
def test_every_plan_and_the_gradient_is_what_it_was(plan: str) -> None:
    hidden, weight, _, targets = problem(torch.float32, False)
    logits = hidden.double() @ weight.double().T
    gradients = []
    for extras in ((), EXTRAS):
        leaf = hidden.clone().requires_grad_()
        with use_plan(plan):
            found = fastrl.linear_token_logprobs(
                leaf, weight.clone().requires_grad_(plan != "frozen-head"), targets, extras=extras
            )
        found.logprobs.sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    for name, expected in truth(logits, targets).items():
        torch.testing.assert_close(getattr(found, name).to(expected.dtype), expected, rtol=2e-5, atol=2e-5)


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
    found = fastrl.linear_token_logprobs(hidden, weight, wanted.to(backend_device), extras=EXTRAS)
    expected = truth(logits, wanted)
    # sums of 1000 exponentials of float32 differences: roundings of numbers of the offset's size
    torch.testing.assert_close(
        found.log_sum_sq_probs.cpu().double(), expected["log_sum_sq_probs"], rtol=1e-6, atol=2e-6
    )
    torch.testing.assert_close(found.mean_logits.cpu().double(), expected["mean_logits"], rtol=1e-6, atol=1e-6)
    assert torch.equal(found.is_top1.cpu(), expected["is_top1"])
    confident = (expected["log_sum_sq_probs"].abs() < 1e-9) & expected["is_top1"]
    assert confident.any() and (found.log_sum_sq_probs.cpu()[confident].abs() < 1e-9).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_budget_is_kept(softcap: float | None, dtype: torch.dtype) -> None:
    """The most that is allocated at once, outputs and gradients included, which are 1.2 MB here."""
    n, width, vocab = 1024, 64, 8192
    hidden, weight = torch.randn(n, width).to(dtype), torch.randn(vocab, width).to(dtype)
    targets = torch.randint(vocab, (n,))
    wide = fastrl.linear_token_logprobs(hidden, weight, targets, softcap=softcap, extras=EXTRAS)
    for budget in (2 << 20, 6 << 20):  # float32 logits take 32 MiB

        def call(budget: int = budget) -> fastrl.TokenStats:
            with torch.no_grad():
                return fastrl.linear_token_logprobs(
                    hidden, weight, targets, softcap=softcap, extras=EXTRAS, memory_budget=budget
                )

        assert _peak(call) < budget
        for narrow, expected in zip(call(), wide, strict=True):
            if expected is not None and expected.is_floating_point():
                torch.testing.assert_close(narrow, expected, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="smallest possible"):
        fastrl.linear_token_logprobs(hidden, weight, targets, extras=EXTRAS, memory_budget=1000)


def _peak(call: Any) -> int:
    """The largest sum of allocations minus frees while the call runs, in bytes."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler saw no allocation"
    held, most = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_no_rows_and_all_masked() -> None:
    weight = torch.randn(7, 4)
    for softcap in (None, 2.0):
        found = fastrl.linear_token_logprobs(
            torch.zeros(0, 4), weight, torch.zeros(0, dtype=torch.int64), softcap=softcap, extras=EXTRAS
        )
        assert all(getattr(found, name).shape == (0,) for name in EXTRAS)
        found = fastrl.linear_token_logprobs(
            torch.randn(2, 4), weight, torch.full((2,), -100), mask=torch.zeros(2), softcap=softcap, extras=EXTRAS
        )
        assert all(not getattr(found, name).any() for name in EXTRAS)


def test_under_autocast_as_the_head() -> None:
    hidden, weight, _, targets = problem(torch.float32, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fastrl.linear_token_logprobs(hidden, weight, targets, extras=EXTRAS)
    same = fastrl.linear_token_logprobs(hidden.bfloat16(), weight.bfloat16(), targets, extras=EXTRAS)
    for name in EXTRAS:
        assert torch.equal(getattr(found, name), getattr(same, name))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_under_torch_compile(softcap: float | None) -> None:
    """In one graph, but for the tiles that a softcap's mean needs."""
    hidden, weight, _, targets = problem(torch.float32, False)

    def call() -> list[Tensor]:
        found = fastrl.linear_token_logprobs(hidden, weight, targets, softcap=softcap, extras=EXTRAS)
        return [getattr(found, name) for name in EXTRAS]

    compiled = torch.compile(call, backend="aot_eager", fullgraph=softcap is None)()
    for a, b in zip(compiled, call(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_refused() -> None:
    hidden, weight, _, targets = problem(torch.float32, False)
    with pytest.raises(ValueError, match=r"extras must be some of mean_logits, is_top1, log_sum_sq_probs, got 'top1'"):
        fastrl.linear_token_logprobs(hidden, weight, targets, extras=("top1",))
    with pytest.raises(TypeError, match="extras must be a tuple of names"):
        fastrl.linear_token_logprobs(hidden, weight, targets, extras="is_top1")  # type: ignore[arg-type]
    sets = fastrl.SamplingMask.from_lists([[0]] * 6).with_targets(targets)
    with pytest.raises(NotImplementedError, match="sampling_mask"):
        fastrl.linear_token_logprobs(hidden, weight, targets, extras=("is_top1",), sampling_mask=sets)
