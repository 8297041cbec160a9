"""`LigerFusedLinearDPOLoss` on fastrl: the same losses, gradients and metrics as Liger's own, and an oracle's."""

import pytest
import torch
from liger_cases import Batch, agree, gradients
from torch.nn.functional import logsigmoid

pytest.importorskip("liger_kernel", reason="the extra 'bench' is not installed")
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss as TheirDPO

from fastrl.integrations.liger import LigerFusedLinearDPOLoss


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("nll", [False, True])
def test_dpo_is_ligers_and_the_oracles(bias, reference, average, nll):
    batch = Batch()
    target = batch.ids[:4].masked_fill(batch.mask[:4] == 0, -100)
    found = []
    for kind in (LigerFusedLinearDPOLoss, TheirDPO):
        leaves = batch.leaves(bias)
        loss, log = kind(
            compiled=False, beta=0.3, alpha=0.6, compute_nll_loss=nll, use_ref_model=reference, average_log_prob=average
        )(
            leaves["weight"],
            leaves["hidden"][:4],
            target,
            leaves.get("bias"),
            ref_input=batch.hidden[:4].flip(1),
            ref_weight=batch.weight.flip(0),
            ref_bias=batch.bias.flip(0) if bias else None,
        )
        found.append((loss.detach(), gradients(loss, leaves), [x.detach().float() for x in log]))
    agree(*found)
    assert len(log) == 7

    leaves = batch.leaves(bias, torch.float64)

    def summed(hidden, weight, add):
        logp = torch.log_softmax(hidden.double() @ weight.double().T + add, -1)
        logp = logp.gather(-1, batch.ids[:4, :, None])[..., 0] * batch.mask[:4]
        return logp, logp.sum(-1) / (batch.mask[:4].sum(-1) if average else 1)

    each, logps = summed(leaves["hidden"][:4], leaves["weight"], leaves.get("bias", 0.0))
    ref = torch.zeros(4)
    if reference:
        add = batch.bias.flip(0).double() if bias else 0.0
        ref = summed(batch.hidden[:4].flip(1), batch.weight.flip(0), add)[1]
    delta = (logps - ref)[:2] - (logps - ref)[2:]
    loss = -logsigmoid(0.3 * delta).mean() + (0.6 * -each[:2].sum() / batch.mask[:2].sum() if nll else 0)
    agree((found[0][0].double(), found[0][1]), (loss.detach(), gradients(loss, leaves)))


def test_dpo_of_an_empty_response():
    """Averaged log-probabilities of a response without tokens are 0, where Liger's are NaN."""
    batch = Batch()
    target = batch.ids[:4].clone()
    target[0] = -100
    for kind, finite in ((LigerFusedLinearDPOLoss, True), (TheirDPO, False)):
        loss, _ = kind(compiled=False, use_ref_model=False, average_log_prob=True)(
            batch.weight, batch.hidden[:4].requires_grad_(), target
        )
        assert bool(loss.isfinite()) == finite


def test_wrong_calls_are_refused():
    batch = Batch()
    # Those of Liger's class and of the function behind it exist and are not built; any other name is wrong.
    for name in sorted({*TheirDPO._SUPPORTED_LOSS_TYPES, "ipo"} - {"sigmoid"}):
        with pytest.raises(NotImplementedError, match=f"'sigmoid', which fastrl has, got '{name}'"):
            LigerFusedLinearDPOLoss(loss_type=name)
    for name in ("sigmiod", "Sigmoid", "", None):
        with pytest.raises(ValueError, match=f"loss_type must be one of sigmoid, hinge, .*, got {name!r}"):
            LigerFusedLinearDPOLoss(loss_type=name)
    with pytest.raises(ValueError, match="ref_input"):
        LigerFusedLinearDPOLoss()(batch.weight, batch.hidden[:4], batch.ids[:4])
    with pytest.raises(ValueError, match="target"):
        LigerFusedLinearDPOLoss(use_ref_model=False)(batch.weight, batch.hidden, batch.ids)
