"""`triton_grpo_loss` on fastrl: the linear loss of its logits, and Liger's own kernels in Triton's interpreter."""

import pytest
import torch
from liger_cases import LEVELS, B, Batch, Case, T, V, agree, cases_of, run

pytest.importorskip("liger_kernel", reason="the extra 'bench' is not installed")
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as TheirGRPO
from liger_kernel.transformers.grpo_loss import triton_grpo_loss as their_triton

from fastrl.integrations.grpo_options import CLIPPED
from fastrl.integrations.liger import LigerFusedLinearGRPOLoss, triton_grpo_loss


def run_logits(function, case, batch, upstream=None):
    """Loss (or per-token losses), gradient of the logits, metrics; upstream (B, T) weighs per-token losses."""
    o = case.options()
    logits = torch.cat([batch.hidden @ batch.weight.T, torch.ones(B, 1, V)], 1).requires_grad_()
    low, high = o.pop("epsilon_low"), o.pop("epsilon_high")
    loss, *metrics = function(
        logits,
        batch.old,
        batch.ref,
        batch.ids,
        batch.advantages,
        batch.mask,
        temperature=1.0,
        eps_low=low,
        eps_high=high,
        inplace=False,
        vllm_is_ratio=batch.ratios[case.ratio],
        reduce=upstream is None,
        **o,
    )
    metrics = metrics[0] if upstream is None else metrics
    (gradient,) = torch.autograd.grad(loss if upstream is None else (loss * upstream).sum(), logits)
    return loss.detach(), gradient, [m.detach() if m is not None else None for m in metrics]


def few_cases(loss_type, level):
    yield Case(loss_type, level)
    yield Case(loss_type, level, beta=0.1, corrected=True, ratio="column")
    yield Case(loss_type, level, beta=0.1, ratio="token", delta=1.2 if loss_type in CLIPPED else None)


@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
def test_logits_losses_are_the_linear_ones(loss_type, level):
    batch = Batch()
    for case in cases_of(loss_type, level):
        if case.bias:
            continue
        loss, gradient, metrics = run_logits(triton_grpo_loss, case, batch)
        linear = run(LigerFusedLinearGRPOLoss, case, batch)
        agree((loss, (gradient[:, :-1] @ batch.weight).double(), metrics), (linear[0], linear[1][0], linear[2]))
        assert gradient[:, -1].abs().max() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="its kernels run in Triton's interpreter on the CPU")
@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
def test_logits_losses_are_ligers_kernels(loss_type, level):
    batch = Batch()
    upstream = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) * batch.mask
    for case in few_cases(loss_type, level):
        if case.loss_type == "vespo" and case.ratio == "token":
            continue  # its ratios over padding, above
        agree(run_logits(triton_grpo_loss, case, batch, upstream), run_logits(their_triton, case, batch, upstream))
        if loss_type != "luspo":  # T_i / T times ours, below
            agree(run_logits(triton_grpo_loss, case, batch), run_logits(their_triton, case, batch))


@pytest.mark.skipif(torch.cuda.is_available(), reason="its kernels run in Triton's interpreter on the CPU")
def test_ligers_two_luspo_losses_differ_from_each_other():
    """At the sequence level without a KL Liger's linear loss is the documented one, its kernels' is not."""
    batch, case = Batch(), Case("luspo", "sequence")
    ours, theirs = run_logits(triton_grpo_loss, case, batch), run_logits(their_triton, case, batch)
    agree(ours[0], run(TheirGRPO, case, batch)[0])
    assert not torch.allclose(ours[0], theirs[0], rtol=1e-3)


def test_logits_defaults_and_inplace():
    """Per-token losses, temperature 0.9 and eps_high 0.4 by default; the gradient in the logits' place."""
    batch = Batch()
    base = torch.cat([batch.hidden @ batch.weight.T, torch.ones(B, 1, V)], 1)
    logits = base.clone().requires_grad_()
    each, kl, clipped = triton_grpo_loss(logits * 1.0, batch.old, batch.ref, batch.ids, batch.advantages)
    assert each.shape == kl.shape == clipped.shape == (B, T)
    assert not kl.requires_grad and not clipped.requires_grad
    logp = torch.log_softmax(base[:, :-1] / 0.9, -1).gather(-1, batch.ids[..., None])[..., 0]
    r, a = (logp - batch.old).exp(), batch.advantages[:, None]
    agree(clipped, ((r < 0.8) & (a < 0) | (r > 1.4) & (a > 0)).float())
    expected = triton_grpo_loss(
        logits, batch.old, batch.ref, batch.ids, batch.advantages, inplace=False, temperature=0.9, eps_high=0.4
    )[0]
    agree(each, expected)
    agree(torch.autograd.grad(each.sum(), logits), torch.autograd.grad(expected.sum(), logits))
    assert triton_grpo_loss(base, batch.old, None, batch.ids, batch.advantages, beta=0.0)[1] is None
    again = base.clone().requires_grad_()
    held = again * 1.0
    loss, _ = triton_grpo_loss(held, batch.old, None, batch.ids, batch.advantages, beta=0.0, reduce=True)
    before = held.detach().clone()
    loss.backward()
    assert torch.equal(before, base) and not torch.equal(held.detach(), base)


def test_a_kl_without_a_reference_is_refused():
    batch = Batch()
    with pytest.raises(ValueError, match="ref_logp"):
        triton_grpo_loss(torch.zeros(B, T + 1, V), None, None, batch.ids, batch.advantages)
