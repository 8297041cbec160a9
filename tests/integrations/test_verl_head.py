"""verl's fused log-probabilities and entropies on fastrl against verl's own, and verl put back as it was."""

import logging
import re
import sys

import pytest
import torch
from peer_cases import load_file, stand_in
from places import ROOT
from verl_cases import CLOSE

import fastrl.integrations.verl as adapter
from fastrl.planning import announce


def head_inputs(shape):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(*shape, 8, generator=generator).requires_grad_()
    weight = torch.randn(23, 8, generator=generator).requires_grad_()
    upstream = [torch.randn(shape, generator=generator) for _ in range(2)]
    return hidden, weight, torch.randint(23, shape, generator=generator), upstream


def scored(module, shape, ids=torch.int64):
    hidden, weight, labels, upstream = head_inputs(shape)
    logprobs, entropy = module(hidden, weight, labels.to(ids), 0.7)
    gradients = torch.autograd.grad([logprobs, entropy], [hidden, weight], [u.view_as(logprobs) for u in upstream])
    return logprobs.detach(), entropy.detach(), *gradients


def test_logits_are_float32_where_verls_kernel_keeps_them():
    """linear_cross_entropy, whose kernel never rounds the products' sums; FusedLinearForPPO rounds them, as verl's."""
    hidden, weight, labels, _ = head_inputs((64,))
    hidden, weight = hidden.detach().bfloat16(), 4 * weight.detach().bfloat16()
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(-1, labels[:, None])[:, 0]
    unrounded, rounded = (
        (function(hidden, weight, labels)[0] - exact).abs().max()
        for function in (adapter.linear_cross_entropy, adapter.FusedLinearForPPO().forward)
    )
    assert unrounded < 1e-5 and rounded > 1e-3


@pytest.mark.parametrize("shape", [(7,), (2, 5)])
@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
def test_fused_linear_is_verls(core, shape, ids):
    theirs = sys.modules["verl.utils.experimental.torch_functional"].FusedLinearForPPO(chunk_size=3)
    ours = adapter.FusedLinearForPPO(chunk_size=3)
    expected = scored(theirs.forward, shape, ids)
    torch.testing.assert_close(scored(ours.forward, shape, ids), expected, **CLOSE)
    flat = scored(adapter.linear_cross_entropy, shape, ids)
    torch.testing.assert_close(flat[0], expected[0].flatten(), **CLOSE)
    torch.testing.assert_close(flat[1], expected[1].flatten(), **CLOSE)
    torch.testing.assert_close(flat[2:], expected[2:], **CLOSE)


def test_enable_puts_ours_in_says_so_and_disable_takes_it_out(core, monkeypatch, watch, caplog):
    monkeypatch.setattr(announce, "_announced", set())
    caplog.set_level(logging.INFO, "fastrl")
    functional = sys.modules["verl.utils.experimental.torch_functional"]
    kernel = sys.modules["verl.utils.kernel.linear_cross_entropy"]
    before = functional.FusedLinearForPPO, kernel.linear_cross_entropy
    name = "verl.models.mcore.model_forward_fused"  # imports the kernel by name
    importer = stand_in(monkeypatch, name, linear_cross_entropy=kernel.linear_cross_entropy)
    calls = watch(adapter, "linear_token_logprobs")
    adapter.enable(memory_budget="64MiB")
    adapter.enable(memory_budget="32MiB")
    try:
        assert functional.FusedLinearForPPO is adapter.FusedLinearForPPO
        assert kernel.linear_cross_entropy is importer.linear_cross_entropy is adapter.linear_cross_entropy
        scored(functional.FusedLinearForPPO(impl_backend="liger").forward, (4,))
        assert [given["memory_budget"] for given in calls] == [32 << 20]
        active, plan = caplog.messages
        assert active == "fastrl is active in verl" and "verl's fused log-probabilities: plan recompute, 4U" in plan
    finally:
        adapter.disable()
    adapter.disable()
    assert (functional.FusedLinearForPPO, kernel.linear_cross_entropy) == before
    assert importer.linear_cross_entropy is before[1]


def test_a_reduction_is_verls_own(core, monkeypatch, said):
    kernel = sys.modules["verl.utils.kernel.linear_cross_entropy"]
    calls = []
    monkeypatch.setattr(kernel, "linear_cross_entropy", lambda *args: calls.append(args) or (None, None))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    hidden, weight, labels, _ = head_inputs((5,))
    with pytest.raises(NotImplementedError, match="reduction 'mean'"):
        adapter.linear_cross_entropy(hidden, weight, labels, 1.0, "mean")
    with pytest.raises(ValueError, match="reduction must be one of none, sum, mean, got 'median'"):
        adapter.linear_cross_entropy(hidden, weight, labels, 1.0, "median")
    for kind in (adapter.FusedLinearForPPO, sys.modules["verl.utils.experimental.torch_functional"].FusedLinearForPPO):
        with pytest.raises(ValueError, match=r"backend.*trtion"):
            kind(impl_backend="trtion")
    adapter.enable()
    try:
        kernel.linear_cross_entropy(hidden, weight, labels, 1.0, "mean", None)
        assert len(calls) == 1 and len(said()) == 1
        assert kernel.linear_cross_entropy(hidden, weight, labels, 1.0, "none", "of one")[0].shape == (5,)
        assert len(calls) == 1
    finally:
        adapter.disable()


def test_what_bfloat16_logits_cost_is_what_the_page_says(monkeypatch):
    """The page's third line, from 256 tokens: 15 % are three standard deviations of each number."""
    script = load_file(monkeypatch, "bf16_logits", ROOT / "benchmarks/integrations/bf16_logits.py")
    torch.manual_seed(1)
    cost = script.measure(5.0, tokens=256)
    page = (ROOT / "docs/integrations/verl.md").read_text()
    line = re.search(r"^ +5 +[\d.]+ +-[\d.]+ +([\d.]+) +[\d.]+ +(\d+)% +\d+% +([\d.]+)$", page, re.MULTILINE)
    assert cost.rms == pytest.approx(float(line[1]), rel=0.15)
    assert 100 * cost.tokens_off == pytest.approx(float(line[2]), rel=0.15)
    assert cost.log_ratio == pytest.approx(float(line[3]), rel=0.15)


def test_an_unknown_version_changes_nothing(core, monkeypatch):
    functional = sys.modules["verl.utils.experimental.torch_functional"]
    before = functional.FusedLinearForPPO
    monkeypatch.setattr(sys.modules["verl"], "__version__", "0.10.0")
    with pytest.raises(RuntimeError, match=r"0\.9\.1.*0\.10\.0"):
        adapter.enable()
    assert functional.FusedLinearForPPO is before
