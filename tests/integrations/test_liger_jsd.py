"""`LigerFusedLinearJSDLoss` on fastrl: the same losses and gradients as Liger's own, and as a float64 oracle's."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from liger_cases import CLOSE, agree, gradients
from torch import Tensor

pytest.importorskip("liger_kernel", reason="the extra 'bench' is not installed")
from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss as TheirJSD

from fastrl.integrations import liger_jsd
from fastrl.integrations.liger import LigerFusedLinearJSDLoss

N, H, H_T, V = 11, 8, 12, 37


class Batch:
    """Tokens of which two are ignored, hidden states of two widths, and two heads."""

    def __init__(self, padding: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.hidden, self.weight, self.bias = normal(N, H), 0.5 * normal(V, H), normal(V)
        self.teacher, self.teacher_weight = normal(N, H_T), 0.5 * normal(V + padding, H_T)
        self.teacher_bias = normal(V + padding)
        self.labels = torch.randint(V, (N,), generator=generator)
        self.labels[[0, 6]] = -100

    def leaves(self, bias: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        names = ("hidden", "weight", "bias") if bias else ("hidden", "weight")
        return {name: getattr(self, name).to(dtype, copy=True).requires_grad_() for name in names}


class Case(NamedTuple):
    """Losses, each a number, and the gradients of the first."""

    losses: tuple[Tensor, ...]
    gradients: list[Tensor]


def run(kind: type, batch: Batch, bias: bool, dtype: torch.dtype = torch.float32, **options: Any) -> Case:
    leaves = batch.leaves(bias, dtype)
    found = kind(compiled=False, chunk_size=4, **options)(
        leaves["hidden"],
        leaves["weight"],
        batch.teacher.to(dtype),
        batch.teacher_weight.to(dtype),
        batch.labels,
        leaves.get("bias"),
        batch.teacher_bias.to(dtype) if bias else None,
    )
    losses = found if isinstance(found, tuple) else (found,)
    return Case(tuple(x.detach().float() for x in losses), gradients(3 * losses[0], leaves))


def exact(
    batch: Batch,
    bias: bool,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    temperature: float = 1.0,
    **unused: Any,
) -> Case:
    """The formulas, in float64: the loss, its soft and its hard part."""
    leaves = batch.leaves(bias, torch.float64)
    logits = leaves["hidden"] @ leaves["weight"].T + leaves.get("bias", 0.0)
    teacher = batch.teacher.double() @ batch.teacher_weight.double().T + (batch.teacher_bias.double() if bias else 0.0)
    valid = batch.labels != -100
    hard = torch.nn.functional.cross_entropy(logits, batch.labels)
    wide = torch.cat([logits, logits.new_zeros(N, teacher.shape[1] - V)], 1)  # the logits of padding are 0
    p, q = ((z / temperature)[valid].softmax(-1) for z in (wide, teacher))
    if beta in (0, 1):
        a, b = (p, q) if beta else (q, p)
        each = (a * (a.log() - b.log())).sum(-1)
    else:
        m = beta * q + (1 - beta) * p
        each = (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1)
    soft = each.mean()
    loss = weight_hard_loss * hard + weight_soft_loss * soft
    return Case(tuple(x.detach().float() for x in (loss, soft, hard)), gradients(3 * loss, leaves))


@pytest.mark.parametrize("beta", [0, 0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_ligers_and_the_oracles(beta: float, bias: bool) -> None:
    batch = Batch()
    for weights, temperature in itertools.product([(0.5, 0.5), (0.2, 1.7), (0.0, 1.0), (1.0, 0.0)], [1.0, 0.7, 2.5]):
        options = {
            "beta": beta,
            "temperature": temperature,
            "weight_hard_loss": weights[0],
            "weight_soft_loss": weights[1],
        }
        expected = exact(batch, bias, **options)
        ours = run(LigerFusedLinearJSDLoss, batch, bias, return_soft_hard_loss=True, **options)
        agree(ours, expected)
        agree(ours, run(TheirJSD, batch, bias, return_soft_hard_loss=True, **options))
        agree(run(LigerFusedLinearJSDLoss, batch, bias, **options), Case(expected.losses[:1], expected.gradients))


def test_the_hard_loss_is_left_out_where_nobody_reads_it(watch: Callable[..., list[Any]]) -> None:
    calls = watch(liger_jsd, "linear_cross_entropy")
    run(LigerFusedLinearJSDLoss, Batch(), False, weight_hard_loss=0.0)
    assert not calls
    run(LigerFusedLinearJSDLoss, Batch(), False, weight_hard_loss=0.0, return_soft_hard_loss=True)
    assert len(calls) == 1


@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_a_teachers_padding_are_0(bias: bool) -> None:
    batch = Batch(padding=3)
    for beta in (0.0, 0.5, 1.0):
        options = {"beta": beta, "return_soft_hard_loss": True}
        ours = run(LigerFusedLinearJSDLoss, batch, bias, **options)
        agree(ours, exact(batch, bias, **options))
        agree(ours, run(TheirJSD, batch, bias, **options))


def test_no_tokens_and_what_is_at_ignored_ones() -> None:
    batch = Batch()
    expected = run(LigerFusedLinearJSDLoss, batch, True)
    batch.hidden[0] = batch.teacher[6] = torch.nan
    agree(run(LigerFusedLinearJSDLoss, batch, True), expected)
    batch.labels[:] = -100
    empty = run(LigerFusedLinearJSDLoss, batch, True, return_soft_hard_loss=True)
    assert all(float(x) == 0 for x in empty.losses)
    assert len(empty.gradients) == 3 and not any(g.any() for g in empty.gradients)


def test_labels_ignored_by_another_index() -> None:
    batch = Batch()
    expected = exact(batch, False)
    batch.labels[batch.labels == -100] = -1
    agree(run(LigerFusedLinearJSDLoss, batch, False, ignore_index=-1), Case(expected.losses[:1], expected.gradients))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_bfloat16_is_nearer_to_the_truth_than_ligers(beta: float) -> None:
    """Liger takes the divergence's log-softmax in bfloat16, fastrl in float32 of the same logits."""
    batch = Batch()
    for name in ("hidden", "weight", "bias", "teacher", "teacher_weight", "teacher_bias"):
        setattr(batch, name, getattr(batch, name).bfloat16().float())
    expected = exact(batch, True, beta=beta).losses[0]
    errors = [
        float((run(kind, batch, True, torch.bfloat16, beta=beta).losses[0] - expected).abs())
        for kind in (LigerFusedLinearJSDLoss, TheirJSD)
    ]
    assert errors[0] <= max(errors[1], 2**-9 * float(expected))


def test_a_teacher_gets_no_gradient() -> None:
    batch = Batch()
    teacher, weight = batch.teacher.requires_grad_(), batch.teacher_weight.requires_grad_()
    hidden = batch.hidden.requires_grad_()
    loss, soft, hard = LigerFusedLinearJSDLoss(return_soft_hard_loss=True)(
        hidden, batch.weight, teacher, weight, batch.labels
    )
    loss.backward()
    assert teacher.grad is None and weight.grad is None and hidden.grad is not None
    assert not soft.requires_grad and not hard.requires_grad
    torch.testing.assert_close(0.5 * soft + 0.5 * hard, loss.detach(), **CLOSE)


def test_the_signature_is_ligers() -> None:
    for name in ("__init__", "forward"):
        ours, theirs = (
            {k: p.default for k, p in inspect.signature(getattr(kind, name)).parameters.items()}
            for kind in (LigerFusedLinearJSDLoss, TheirJSD)
        )
        ours.pop("memory_budget", None)
        assert list(ours.items()) == list(theirs.items())


def test_wrong_calls_are_refused() -> None:
    for beta in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="beta must be"):
            LigerFusedLinearJSDLoss(beta=beta)
    with pytest.raises(TypeError, match="beta must be a number, got str"):
        LigerFusedLinearJSDLoss(beta="jsd")
    for temperature in (0.0, -1.0):
        with pytest.raises(ValueError, match="temperature must be finite and > 0"):
            LigerFusedLinearJSDLoss(temperature=temperature)
    with pytest.raises(ValueError, match="memory_budget"):
        LigerFusedLinearJSDLoss(memory_budget="lots")
    batch = Batch()
    with pytest.raises(ValueError, match="teacher_weight"):
        LigerFusedLinearJSDLoss()(batch.hidden, batch.weight, batch.teacher, batch.teacher_weight[1:], batch.labels)
