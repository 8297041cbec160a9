"""`LigerFusedLinearGRPOLoss` on fastrl: the same losses, gradients and metrics as Liger's own, and as a float64 oracle.

Where the two differ (docs/integrations/liger.md lists it) the oracle decides, and the test holds that Liger differs.
"""

import pytest
import torch
from exact_policy import Batch as ExactBatch
from exact_policy import exact_policy
from liger_cases import LEVELS, B, Batch, Case, agree, cases_of, gradients, run

pytest.importorskip("liger_kernel", reason="the extra 'bench' is not installed")
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as TheirGRPO

from fastrl import KL, Clip, GammaWeight, Objective, SoftGate, StopGradientClip
from fastrl.integrations.grpo_options import grpo_objective
from fastrl.integrations.liger import LigerFusedLinearGRPOLoss

GATES = {"cispo": StopGradientClip(1.2), "sapo": SoftGate(1.0, 1.05), "vespo": GammaWeight()}
AGGREGATES = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}


def objective_of(case):
    """What Liger's options say, by the formulas of the papers."""
    kl = KL("k3-unbiased" if case.corrected else "k3", case.beta, "objective" if case.level == "sequence" else "token")
    return Objective(
        gate=GATES.get(case.loss_type, Clip(0.1, 0.15, delta=case.delta)),
        ratio=case.level,
        kl=kl,
        aggregate=AGGREGATES.get(case.loss_type, "token-mean"),
        max_length=9,
    )


def expected_of(case, batch, items=None):
    """Loss, gradients and metrics, computed in float64."""
    leaves = batch.leaves(case.bias, torch.float64)
    logp = torch.log_softmax(leaves["hidden"] @ leaves["weight"].T + leaves.get("bias", 0.0), -1)
    logp = logp.gather(-1, batch.ids[..., None])[..., 0]
    rho = torch.ones(B, 1) if case.ratio is None else batch.ratios[case.ratio]
    rho = rho[:, None] if case.ratio == "flat" else rho
    weights = {"token_weights": rho}
    if case.loss_type == "vespo":  # of the response's tokens: once where it is one per response
        lengths = batch.mask.sum(-1, keepdim=True).clamp(min=1)
        weights = {"rollout": batch.old.double() - rho.log() / (1 if case.ratio == "token" else lengths)}
    given = ExactBatch.padded(
        batch.mask,
        advantages=batch.advantages[:, None],
        old=batch.old,
        ref=batch.ref,
        denominator=items if case.loss_type in ("dapo", "cispo", "vespo") else None,
        **weights,
    )
    exact = exact_policy(objective_of(case), given, logp.flatten(), None)
    # Liger does not count what a delta holds, and of what CISPO holds only A > 0.
    clipped = exact_policy(objective_of(case._replace(delta=None)), given, logp.flatten(), None).metrics["clip_frac"]
    if case.loss_type == "cispo":
        over = ((logp - batch.old).exp() > 1.2) & (batch.advantages[:, None] > 0)
        clipped = (over * batch.mask).sum() / batch.mask.sum()
    metrics = [exact.metrics["kl"], clipped] if case.beta else [clipped]
    slopes = gradients((exact.c * logp.flatten()).sum(), leaves)
    return exact.loss.float(), slopes, [m.detach().float() for m in metrics]


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


@pytest.mark.parametrize("loss_type", ["vespo", "luspo"])
def test_token_ratios_are_ligers_where_padding_does_not_tell(loss_type):
    """VESPO where padding has ratio 1; LUSPO with full masks: Liger's (B, T) form is T_i / T times the sum."""
    batch = Batch()
    if loss_type == "vespo":
        batch.ratios["token"] = batch.ratios["token"].where(batch.mask > 0, 1.0)
    else:
        batch.mask = torch.ones_like(batch.mask)
    for beta in (0.0, 0.1):
        case = Case(loss_type, beta=beta, ratio="token")
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
    case = Case(loss_type, level, beta=0.0 if loss_type == "luspo" and level == "sequence" else 0.1, bias=True)
    reference = {"ref_input": batch.hidden.flip(0), "ref_weight": batch.weight.flip(1), "ref_bias": batch.bias.flip(0)}
    options = {"given": reference, "temperature": 0.7, "upstream": 3}
    if not case.differs():
        agree(run(LigerFusedLinearGRPOLoss, case, batch, **options), run(TheirGRPO, case, batch, **options))


def test_vespo_on_policy_with_engine_ratios():
    batch = Batch()
    now = torch.log_softmax(batch.hidden @ batch.weight.T, -1).gather(-1, batch.ids[..., None])[..., 0]
    for case in (Case("vespo", ratio="flat"), Case("vespo", ratio="column")):
        found = run(LigerFusedLinearGRPOLoss, case, batch, given={}, use_ref_model=False)
        agree(found[:2], run(TheirGRPO, case, batch, given={}, use_ref_model=False)[:2])
        batch.old = now.detach()
        agree(found[0], expected_of(case, batch)[0])


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
    batch.frozen = ("weight",)
    agree(run(LigerFusedLinearGRPOLoss, case, batch)[1], expected[1][:1])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_type": "ppo"}, "loss_type"),
        ({"loss_type": "ppo", "delta": 2.0}, "loss_type must be one of"),
        ({"loss_type": "cispo", "delta": 2.0}, "delta"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"loss_type": "grpo", "importance_sampling_level": "turn"}, "importance_sampling_level"),
        ({"loss_type": "dr_grpo"}, "max_completion_length"),
        ({"loss_type": "grpo", "delta": 0.5}, "delta"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "tau_neg"),
    ],
)
def test_what_cannot_be_done_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
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
