"""Liger's cross-entropies on fastrl: per token, as verl calls them, against Liger's own; and the loss of SFT."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
from liger_cases import CLOSE
from torch import Tensor

pytest.importorskip("liger_kernel", reason="the extra 'bench' is not installed")
from liger_kernel import ops
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss as TheirLoss

from fastrl.integrations import liger
from fastrl.planning import announce

N, H, V = 13, 8, 37
PER_TOKEN, OVER_RANKS = "LigerFusedLinearScaledCrossEntropyFunction", "LigerFusedLinearScaledCrossEntropyTPFunction"


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=g).to(dtype).requires_grad_() for n in (N, V))
    labels = torch.randint(V, (N,), generator=g)
    labels[::4] = -1
    return hidden, weight, labels


def run(function: Any, *args: Any, **options: Any) -> list[Tensor]:
    """The results, and the gradients of both inputs."""
    hidden, weight, labels = inputs()
    found = function(hidden, weight, labels, *args, **options)
    found = found if isinstance(found, tuple) else (found,)
    upstream = [torch.linspace(-1, 1 + i, N) for i in range(len(found))]
    return [*(x.detach() for x in found), *torch.autograd.grad(found, (hidden, weight), upstream)]


@pytest.mark.parametrize("entropy", [False, True])
def test_each_tokens_loss_is_ligers(entropy: bool) -> None:
    given = (0.7, -1, 1, entropy)
    found = run(getattr(liger, PER_TOKEN).apply, *given)
    torch.testing.assert_close(found, run(getattr(ops, PER_TOKEN).apply, *given), **CLOSE)
    # as verl calls it over a group, and by the names of the convention
    options = {"temperature": 0.7, "ignore_index": -1, "return_entropy": entropy}
    assert all(map(torch.equal, found, run(getattr(liger, OVER_RANKS).apply, None, **options)))
    assert all(map(torch.equal, found, run(liger.linear_scaled_cross_entropy, None, *options.values())))
    assert (found[0][::4] == 0).all() and (found[0] != 0).sum() == (N * 3) // 4


@pytest.mark.parametrize("name", [PER_TOKEN, OVER_RANKS])
def test_arguments_are_ligers(name: str) -> None:
    def of(owner: Any) -> list[tuple[str, Any]]:
        return [(p.name, p.default) for p in inspect.signature(getattr(owner, name).apply).parameters.values()]

    ours, theirs = of(liger), of(ops)
    assert ours == [x for x in theirs if x[0] != "selected_token_ids"]  # linear_gathered_logprobs, says the page


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_of_sft_takes_the_weight_first(
    reduction: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announce, "_announced", set())
    hidden, weight, labels = inputs()
    bias = torch.linspace(-1, 1, V)
    with caplog.at_level(logging.INFO, "fastrl"):
        loss = liger.LigerFusedLinearCrossEntropyLoss(ignore_index=-1, reduction=reduction, softcap=3.0)
        found = loss(weight, hidden, labels, bias)
    assert caplog.messages[0].startswith("fastrl computes Liger's cross-entropy: plan "), caplog.messages
    logits = 3.0 * torch.tanh((hidden @ weight.T + bias) / 3.0)
    expected = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction=reduction)
    torch.testing.assert_close(found, expected, **CLOSE)
    pairs = [torch.autograd.grad(x.sum(), (hidden, weight), retain_graph=True) for x in (found, expected)]
    torch.testing.assert_close(*pairs, **CLOSE)


def test_options_that_are_not_built_are_refused() -> None:
    ours, theirs = (inspect.signature(x).parameters for x in (liger.LigerFusedLinearCrossEntropyLoss, TheirLoss))
    assert [*ours][:-1] == [*theirs] and all(ours[x].default == theirs[x].default for x in theirs)
    for option in (
        *({"ce_weight": torch.ones(V)}, {"lse_square_scale": 1e-4}, {"label_smoothing": 0.1}),
        *({"return_z_loss": True}, {"use_token_scaling": True}),
    ):
        with pytest.raises(NotImplementedError, match=f"{next(iter(option))} is not built"):
            liger.LigerFusedLinearCrossEntropyLoss(**option)
