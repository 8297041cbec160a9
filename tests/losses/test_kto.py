"""KTO by both entry points, against the paper's formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_preferences import kto_term
from problem import Problem
from torch import Tensor

import fastrl

COUNT, TIME = 4, 5
PLACE, ENDS = torch.arange(TIME), torch.tensor([4, 2, 5, 3])
MASK = (PLACE >= 1) & (ENDS[:, None] > PLACE)
DESIRABLE = torch.tensor([True, False, False, True])
MISMATCHED = torch.tensor([0.5, -0.2, 1.1])
EXACT = {"rtol": 1e-12, "atol": 1e-13}
# float32 sums of a dozen terms
CLOSE = {"rtol": 2e-5, "atol": 2e-6, "check_dtype": False, "check_device": False}


def naive(
    logp: Tensor, ref: Tensor, desirable: Tensor, z: float, beta: float = 0.1, weights: tuple[float, float] = (1, 1)
) -> Tensor:
    """(B,), a response at a time."""
    numbers = zip(logp, ref, desirable.tolist(), strict=True)
    return torch.stack([kto_term(x - y, bool(d), z, beta, weights) for x, y, d in numbers])


def numbers(count: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    logp, ref = 3 * torch.randn(2, count, dtype=torch.float64, generator=g)
    return logp.requires_grad_(), ref.requires_grad_(), torch.arange(count) % 3 == 0


@pytest.mark.parametrize(
    ("kl", "z"),
    [
        (None, 0.0),
        (0.7, 0.7),
        (torch.tensor(-0.4), -0.4),  # what is given as z is taken as it is
        (torch.tensor([0.5, -0.25, 1.25], dtype=torch.float64), 0.5),
        (torch.tensor([-3.0, 1.0]), 0.0),  # an estimate is not negative
        (torch.zeros(0), 0.0),
    ],
)
def test_kto_is_the_mean_over_responses(kl: Any, z: float) -> None:
    logp, ref, desirable = numbers()
    if isinstance(kl, Tensor) and kl.numel():
        kl = kl.clone().requires_grad_()
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
    out = fastrl.kto_loss(logp, ref, desirable, kl=kl, beta=0.3, **weights)
    # float32 numbers, but for those that float64 was given for
    losses = naive(logp, ref, desirable, float(torch.tensor(z)) if kl is not None else 0.0, 0.3, (1.5, 0.75))
    close = EXACT if z != 0.7 else {"rtol": 1e-7, "atol": 1e-8}
    torch.testing.assert_close(out.losses, losses.detach(), **close)
    torch.testing.assert_close(out.loss, losses.mean(), **close)
    torch.testing.assert_close(out.rewards, 0.3 * (logp - ref).detach(), **EXACT)
    assert out.kl.item() == pytest.approx(z) and not out.kl.requires_grad
    (slope,) = torch.autograd.grad(out.loss, logp, retain_graph=True)
    torch.testing.assert_close(slope, torch.autograd.grad(losses.mean(), logp)[0], **close)
    out.loss.backward()
    assert ref.grad is None and (not isinstance(kl, Tensor) or kl.grad is None)


def test_without_a_kl_it_is_the_unpaired_apo_zero() -> None:
    """Of as many desirable as undesirable responses, half of the pairs' loss."""
    logp, ref, _ = numbers(6)
    labels = torch.arange(6) < 3
    pairs = fastrl.preference_loss(logp[:3], logp[3:], ref[:3], ref[3:], objective=fastrl.APOZero())
    torch.testing.assert_close(2 * fastrl.kto_loss(logp, ref, labels).loss, pairs.loss, **EXACT)


def test_micro_batches_add_up_and_labels_may_be_numbers() -> None:
    logp, ref, desirable = numbers()
    whole = fastrl.kto_loss(logp, ref, desirable, kl=0.2)
    for labels, denominator in ((desirable.int(), 7), (desirable.float(), torch.tensor(7.0))):
        parts = [
            fastrl.kto_loss(logp[i], ref[i], labels[i], kl=0.2, denominator=denominator)
            for i in (slice(0, 3), slice(3, 3), slice(3, 7))
        ]
        torch.testing.assert_close(sum(x.loss for x in parts), whole.loss, **EXACT)
        assert torch.cat([x.losses for x in parts]).equal(whole.losses)


def test_a_nan_stays_in_its_response() -> None:
    logp, ref, desirable = numbers(3)
    spoilt = logp.detach() * torch.tensor([1.0, torch.nan, 1.0])
    out = fastrl.kto_loss(spoilt, ref, desirable)
    assert out.losses.isnan().tolist() == out.rewards.isnan().tolist() == [False, True, False] and out.loss.isnan()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_linear_kto_equals_whole_logits(backend: str, backend_device: str, packed: bool) -> None:
    problem = Problem(backend_device, size=(COUNT, TIME, 8, 40), mask=MASK.int())
    ref = torch.randn(COUNT, generator=torch.Generator().manual_seed(1)) - 5
    options: dict[str, Any] = {"beta": 0.2, "desirable_weight": 1.25, "denominator": 3.0}

    wide = problem.leaves(torch.float64)
    logp, _ = problem.stats(wide, temperature=0.9)
    sums = (logp.cpu() * MASK).sum(1)
    z = MISMATCHED.double().mean()
    losses = naive(sums, ref.double(), DESIRABLE, float(z), 0.2, (1.25, 1.0))
    truth = losses.sum() / 3
    expected = dict(zip(wide, torch.autograd.grad(truth, list(wide.values())), strict=True))

    head, tokens = problem.head, {k: problem.arguments[k] for k in ("targets", "mask")}
    if packed:  # the same without the padding behind each response
        kept = (ENDS[:, None] > PLACE).to(backend_device)
        tokens = {k: x[kept] for k, x in tokens.items()}
        options["cu_seqlens"] = torch.tensor([0, *ENDS]).cumsum(0).int().to(backend_device)
        head, expected = ({**x, "hidden": x["hidden"][kept]} for x in (head, expected))
    leaves = {k: x.clone().requires_grad_() for k, x in head.items()}
    labels, kl = DESIRABLE.to(backend_device), MISMATCHED.to(backend_device)
    given = {"ref_logprobs": ref.to(backend_device), "desirable": labels, "kl": kl, "temperature": 0.9}
    out = fastrl.linear_kto_loss(**leaves, **tokens, **given, memory_budget="2MiB", **options)
    found = dict(zip(leaves, torch.autograd.grad(out.loss, list(leaves.values())), strict=True))
    torch.testing.assert_close((out.loss, found), (truth.detach(), expected), **CLOSE)
    torch.testing.assert_close((out.losses, out.logprobs), (losses.detach(), sums.detach()), **CLOSE)
    torch.testing.assert_close(out.rewards, 0.2 * (sums.detach() - ref), **CLOSE)


def test_nothing_to_learn_from() -> None:
    weight = torch.randn(7, 4).requires_grad_()
    for count, length in ((0, 3), (2, 3), (2, 0)):
        hidden = torch.randn(count, length, 4).requires_grad_()
        targets, mask = torch.full((count, length), -100), torch.zeros(count, length)
        out = fastrl.linear_kto_loss(hidden, weight, targets, mask, torch.zeros(count), torch.ones(count))
        assert out.loss.item() == pytest.approx(0.5 if count else 0.0)
        assert all((x == 0).all() for x in torch.autograd.grad(out.loss, (hidden, weight)))
    nothing = torch.zeros(0)
    assert fastrl.kto_loss(nothing, nothing, nothing, denominator=torch.tensor(0)).loss == 0
