"""`LigerFusedLinearGRPOLoss` on fastrl: the same losses, gradients and metrics as Liger's own, and as a float64 oracle.

Where the two differ (docs/integrations/liger.md lists it) the oracle decides, and the test holds that Liger differs.
"""

import pytest
import torch
from liger_cases import LEVELS, B, Batch, Case, agree, cases_of, gradients, run

pytest.importorskip("liger_kernel", reason="the extra 'bench' is not installed")
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as TheirGRPO

from fastrl.integrations.grpo_options import grpo_objective
from fastrl.integrations.liger import LigerFusedLinearGRPOLoss


def oracle_each(case, logp, batch):
    """Per-token losses (B, T), their KL and clipped tokens, by the formulas of the papers, in logp's dtype."""
    mask, a = batch.mask.to(logp.dtype), batch.advantages.to(logp.dtype)[:, None]
    o, old = case.options(), batch.old.to(logp.dtype)
    token = logp - old
    level = token
    if case.level == "sequence":
        level = (token * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    r = level.exp().expand_as(logp)
    rho = 1.0 if case.ratio is None else batch.ratios[case.ratio].to(logp.dtype)
    rho = rho[:, None] if case.ratio == "flat" else rho
    clipped = (r < 0.9) & (a < 0) | (r > 1.15) & (a > 0)
    if case.loss_type == "cispo":
        clipped = (r > 1.2) & (a > 0)
        each = -r.clamp(max=1.2).detach() * a * logp * rho
    elif case.loss_type == "sapo":
        tau = torch.where(a > 0, 1.0, 1.05)
        each, clipped = -4 / tau * torch.sigmoid(tau * (r - 1)) * a * rho, torch.zeros_like(clipped)
    elif case.loss_type == "vespo":
        log_w = (token * mask).sum(-1, keepdim=True)
        if case.ratio is not None:  # of the response's tokens: once where it is one per response
            log_w = log_w + (rho.log() * mask).sum(-1, keepdim=True) if case.ratio == "token" else log_w + rho.log()
        log_w = log_w.clamp(-18.420680743952367, 20)
        k, lam = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
        phi = (lam + k * log_w - lam * log_w.exp()).exp().detach()
        each, clipped = -phi * a * logp, torch.zeros_like(clipped)
    else:
        bounded = r if case.delta is None else r.clamp(max=case.delta)
        each = -torch.minimum(bounded * a, r.clamp(0.9, 1.15) * a) * rho
    d = batch.ref.to(logp.dtype) - logp
    kl = (d.exp() - d - 1) * (r if case.corrected else 1)
    return (each + o["beta"] * kl) * mask, kl * mask, clipped * mask


def oracle(case, leaves, batch, items=None, temperature=1.0):
    """Loss and metrics in float64."""
    logits = (leaves["hidden"] @ leaves["weight"].T + leaves.get("bias", 0.0)) / temperature
    logp = torch.log_softmax(logits, -1).gather(-1, batch.ids[..., None])[..., 0]
    each, kl, clipped = oracle_each(case, logp, batch)
    lengths, tokens = batch.mask.sum(-1), batch.mask.sum()
    loss = {
        "grpo": (each.sum(-1) / lengths.clamp(min=1)).mean(),
        "sapo": (each.sum(-1) / lengths.clamp(min=1)).mean(),
        "bnpo": each.sum() / tokens,
        "dr_grpo": each.sum() / (B * 9),
        "luspo": each.sum(-1).mean(),
    }.get(case.loss_type, each.sum() / (tokens if items is None else items))
    metrics = [kl.sum() / tokens] if case.beta else []
    return loss, [*metrics, clipped.sum() / tokens]


def expected_of(case, batch, **options):
    leaves = batch.leaves(case.bias, torch.float64)
    loss, metrics = oracle(case, leaves, batch, **options)
    return loss.detach(), gradients(loss, leaves), [m.detach() for m in metrics]


@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
def test_grpo_is_the_oracles_and_ligers(loss_type, level):
    batch = Batch()
    for case in cases_of(loss_type, level):
        ours, theirs = run(LigerFusedLinearGRPOLoss, case, batch), run(TheirGRPO, case, batch)
        agree(ours, expected_of(case, batch))
        if case.differs():
            assert not torch.allclose(ours[0], theirs[0], rtol=1e-3), case
            agree(ours[2], theirs[2])
        else:
            agree(ours, theirs)


def test_vespo_is_ligers_where_padding_has_ratio_one():
    batch = Batch()
    batch.ratios["token"] = batch.ratios["token"].where(batch.mask > 0, 1.0)
    for beta in (0.0, 0.1):
        case = Case("vespo", beta=beta, ratio="token")
        agree(run(LigerFusedLinearGRPOLoss, case, batch), run(TheirGRPO, case, batch))


def test_luspo_is_ligers_without_padding_times_nothing():
    """With full masks Liger's (B, T) form is T_i / T times the sum: the same number."""
    batch = Batch()
    batch.mask = torch.ones_like(batch.mask)
    case = Case("luspo", beta=0.1, ratio="token")
    agree(run(LigerFusedLinearGRPOLoss, case, batch), run(TheirGRPO, case, batch))


@pytest.mark.parametrize("items", [40, torch.tensor(40)])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo", "bnpo", "grpo"])
def test_the_tokens_of_the_whole_step_divide_where_the_type_wants_them(loss_type, items):
    batch, case = Batch(), Case(loss_type, beta=0.1)
    ours = run(LigerFusedLinearGRPOLoss, case, batch, items=items)
    agree(ours, run(TheirGRPO, case, batch, items=items))
    agree(ours, expected_of(case, batch, items=40))


@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
def test_on_policy_and_temperature(loss_type, level):
    """Without old log-probabilities, with a reference of its own, and gradients of an upstream other than 1."""
    batch = Batch()
    found = []
    for kind in (LigerFusedLinearGRPOLoss, TheirGRPO):
        leaves = batch.leaves(True)
        case = Case(loss_type, level, beta=0.0 if loss_type == "luspo" and level == "sequence" else 0.1)
        if case.differs():
            continue
        loss, metrics = kind(compiled=False, temperature=0.7, **case.options())(
            leaves["hidden"],
            leaves["weight"],
            batch.ids,
            batch.mask,
            batch.advantages,
            bias=leaves["bias"],
            ref_input=batch.hidden.flip(0),
            ref_weight=batch.weight.flip(1),
            ref_bias=batch.bias.flip(0),
        )
        found.append((loss.detach(), gradients(3 * loss, leaves), metrics))
    if found:
        agree(*found)


def test_vespo_on_policy_with_engine_ratios():
    batch = Batch()
    now = torch.log_softmax(batch.hidden @ batch.weight.T, -1).gather(-1, batch.ids[..., None])[..., 0]
    for ratio in ("flat", "column"):
        found = []
        for kind in (LigerFusedLinearGRPOLoss, TheirGRPO):
            leaves = batch.leaves(False)
            loss, _ = kind(compiled=False, loss_type="vespo", beta=0.0, use_ref_model=False)(
                leaves["hidden"],
                leaves["weight"],
                batch.ids,
                batch.mask,
                batch.advantages,
                vllm_is_ratio=batch.ratios[ratio],
            )
            found.append((loss.detach(), gradients(loss, leaves)))
        agree(*found)
        batch.old = now
        agree(found[0][0].double(), expected_of(Case("vespo", ratio=ratio), batch)[0])


def test_without_a_reference_model_the_kl_is_zero():
    batch, case = Batch(), Case("grpo", beta=0.1)
    ours = run(LigerFusedLinearGRPOLoss, case, batch, use_ref_model=False)
    agree(ours, run(TheirGRPO, case, batch, use_ref_model=False))
    assert len(ours[2]) == 2 and ours[2][0] == 0


def test_an_empty_response_and_what_is_under_the_mask():
    """Liger too gives an empty response 0; NaN under the mask, which it would spread, is not read."""
    batch, case = Batch(empty=True), Case("grpo", beta=0.1)
    ours = run(LigerFusedLinearGRPOLoss, case, batch)
    agree(ours, run(TheirGRPO, case, batch))
    under = batch.mask == 0
    batch.old[under] = batch.ref[under] = torch.nan
    batch.ids[under] = -100
    agree(run(LigerFusedLinearGRPOLoss, case, batch), ours)


def test_a_clamped_exponent_has_a_finite_loss_and_no_gradient():
    """log r = 100: Liger's ratio is inf and its loss not finite; ours is exp(20), where the gradient ends."""
    batch, case = Batch(), Case("grpo")
    batch.old[1] = -100.0
    ours, theirs = run(LigerFusedLinearGRPOLoss, case, batch), run(TheirGRPO, case, batch)
    assert not theirs[0].isfinite() and ours[0].isfinite()
    assert all(g.isfinite().all() for g in ours[1])
    assert ours[1][0][1].abs().max() == 0


def test_masks_and_frozen_heads():
    batch, case = Batch(), Case("dapo", beta=0.1)
    expected = run(LigerFusedLinearGRPOLoss, case, batch)
    for dtype in (torch.bool, torch.int64):
        batch.mask = batch.mask.to(dtype)
        batch.advantages = batch.advantages.clone()
        found = run(LigerFusedLinearGRPOLoss, case, batch, memory_budget="64MiB")
        agree(found, expected)
    hidden = batch.hidden.clone().requires_grad_()
    loss, _ = LigerFusedLinearGRPOLoss(**case.options())(
        hidden,
        batch.weight,
        batch.ids,
        batch.mask,
        batch.advantages,
        ref_per_token_logps=batch.ref,
        old_per_token_logps=batch.old,
    )
    agree(torch.autograd.grad(loss, hidden)[0].double(), expected[1][0])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"loss_type": "ppo"}, ValueError, "loss_type"),
        ({"loss_type": "ppo", "delta": 2.0}, ValueError, "loss_type must be one of"),
        ({"loss_type": "cispo", "delta": 2.0}, ValueError, "delta"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, ValueError, "importance_sampling_level"),
        ({"loss_type": "grpo", "importance_sampling_level": "turn"}, ValueError, "importance_sampling_level"),
        ({"loss_type": "dr_grpo"}, ValueError, "max_completion_length"),
        ({"loss_type": "grpo", "delta": 0.5}, ValueError, "delta"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, ValueError, "tau_neg"),
    ],
)
def test_what_cannot_be_done_is_refused(options, error, text):
    with pytest.raises(error, match=text):
        LigerFusedLinearGRPOLoss(**options)


def test_wrong_calls_are_refused():
    batch = Batch()
    given = (batch.hidden, batch.weight, batch.ids, batch.mask, batch.advantages)
    with pytest.raises(ValueError, match="ref_per_token_logps"):
        LigerFusedLinearGRPOLoss()(*given)
    with pytest.raises(ValueError, match="vllm_is_ratio"):
        LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)(*given, vllm_is_ratio=torch.ones(B, 2))
    with pytest.raises(ValueError, match="use_bias_correction_kl"):
        grpo_objective("vespo", importance_sampling_level="sequence", beta=0.1, use_bias_correction_kl=True)
