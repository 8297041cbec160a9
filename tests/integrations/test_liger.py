"""Liger's names on fastrl: the same losses, gradients and metrics as Liger's own, and as a float64 oracle.

Where the two differ (docs/integrations/liger.md lists it) the oracle decides, and the test holds that Liger differs.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import logsigmoid

pytest.importorskip("liger_kernel", reason="the extra 'bench' is not installed")
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss as TheirDPO
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as TheirGRPO
from liger_kernel.transformers.grpo_loss import triton_grpo_loss as their_triton

from fastrl.integrations.grpo_options import CLIPPED, LOSS_TYPES, grpo_objective
from fastrl.integrations.liger import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss, triton_grpo_loss

B, T, H, V = 5, 6, 8, 19
LEVELS = [(name, "token") for name in LOSS_TYPES] + [(name, "sequence") for name in CLIPPED]
CLOSE = {"rtol": 2e-5, "atol": 2e-6}  # float32 sums of some thirty terms, in another order


class Case(NamedTuple):
    loss_type: str
    level: str = "token"
    beta: float = 0.0
    corrected: bool = False  # use_bias_correction_kl
    delta: float | None = None
    ratio: str | None = None  # vllm_is_ratio: None, "flat" (B,), "column" (B, 1), "token" (B, T)
    bias: bool = False

    def options(self):
        return {"loss_type": self.loss_type, "importance_sampling_level": self.level, "beta": self.beta,
                "use_bias_correction_kl": self.corrected, "delta": self.delta, "max_completion_length": 9,
                "epsilon_low": 0.1, "epsilon_high": 1.2 if self.loss_type == "cispo" else 0.15}  # fmt: skip

    def differs(self):
        """What the page lists: padding that Liger counts."""
        if self.loss_type == "luspo":  # its per-token loss, (B, 1) at best, is averaged over all positions
            return self.level == "token" or self.beta != 0 or self.ratio == "token"
        return self.loss_type == "vespo" and self.ratio == "token"


def cases_of(loss_type, level):
    kinds = [(0.0, False), (0.1, False), (0.1, True)]
    deltas = [None, 1.2] if loss_type in CLIPPED else [None]
    ratios = [None, "flat", "column", "token"]
    for (beta, corrected), delta, ratio, bias in itertools.product(kinds, deltas, ratios, [False, True]):
        yield Case(loss_type, level, beta, corrected, delta, ratio, bias)


class Batch:
    """Ragged responses (one with a hole), advantages of both signs and 0, ratios that clip on both sides."""

    def __init__(self, seed=0, empty=False):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.hidden, self.weight, self.bias = normal(B, T, H), 0.5 * normal(V, H), normal(V)
        self.ids = torch.randint(V, (B, T), generator=generator)
        self.mask = (torch.arange(T) < torch.tensor([6, 4, 5, 1, 3])[:, None]).float()
        self.mask[2, 1] = 0
        if empty:
            self.mask[3] = 0
        self.advantages = torch.tensor([1.0, -1.0, 0.7, -0.4, 0.0])
        now = torch.log_softmax(self.hidden @ self.weight.T, -1).gather(-1, self.ids[..., None])[..., 0]
        self.old, self.ref = now + 0.3 * normal(B, T), now + 0.5 * normal(B, T)
        self.ratios = {"token": normal(B, T).exp(), "column": (0.5 * normal(B, 1)).exp(), None: None}
        self.ratios["flat"] = self.ratios["column"][:, 0]

    def leaves(self, bias, dtype=torch.float32):
        names = ("hidden", "weight", "bias") if bias else ("hidden", "weight")
        return {name: getattr(self, name).to(dtype).requires_grad_() for name in names}


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
        if case.ratio is not None:  # of the response's tokens: once where it is one a response
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
        "grpo": (each.sum(-1) / lengths.clamp(min=1)).mean(), "sapo": (each.sum(-1) / lengths.clamp(min=1)).mean(),
        "bnpo": each.sum() / tokens, "dr_grpo": each.sum() / (B * 9), "luspo": each.sum(-1).mean(),
    }.get(case.loss_type, each.sum() / (tokens if items is None else items))  # fmt: skip
    metrics = [kl.sum() / tokens] if case.beta else []
    return loss, [*metrics, clipped.sum() / tokens]


def gradients(loss, leaves):
    return [g.double() for g in torch.autograd.grad(loss, list(leaves.values()))]


def run(kind, case, batch, items=None, **options):
    """Loss, gradients and metrics of a class with Liger's signature."""
    leaves = batch.leaves(case.bias)
    loss_of = kind(compiled=False, **case.options(), **options)
    loss, metrics = loss_of(
        leaves["hidden"], leaves["weight"], batch.ids, batch.mask, batch.advantages, bias=leaves.get("bias"),
        ref_per_token_logps=batch.ref, old_per_token_logps=batch.old, vllm_is_ratio=batch.ratios[case.ratio],
        num_items_in_batch=items,
    )  # fmt: skip
    return loss.detach().double(), gradients(loss, leaves), [m.double() for m in metrics]


def agree(found, expected):
    torch.testing.assert_close(found, expected, **CLOSE)


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
            leaves["hidden"], leaves["weight"], batch.ids, batch.mask, batch.advantages, bias=leaves["bias"],
            ref_input=batch.hidden.flip(0), ref_weight=batch.weight.flip(1), ref_bias=batch.bias.flip(0),
        )  # fmt: skip
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
                leaves["hidden"], leaves["weight"], batch.ids, batch.mask, batch.advantages,
                vllm_is_ratio=batch.ratios[ratio],
            )  # fmt: skip
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
        hidden, batch.weight, batch.ids, batch.mask, batch.advantages, ref_per_token_logps=batch.ref,
        old_per_token_logps=batch.old,
    )  # fmt: skip
    agree(torch.autograd.grad(loss, hidden)[0].double(), expected[1][0])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"loss_type": "ppo"}, ValueError, "loss_type"),
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
    with pytest.raises(ValueError, match="ref_logp"):
        triton_grpo_loss(torch.zeros(B, T + 1, V), None, None, batch.ids, batch.advantages)
    with pytest.raises(NotImplementedError, match="hinge"):
        LigerFusedLinearDPOLoss(loss_type="hinge")
    with pytest.raises(ValueError, match="ref_input"):
        LigerFusedLinearDPOLoss()(batch.weight, batch.hidden[:4], batch.ids[:4])
    with pytest.raises(ValueError, match="target"):
        LigerFusedLinearDPOLoss(use_ref_model=False)(batch.weight, batch.hidden, batch.ids)
    with pytest.raises(ValueError, match="use_bias_correction_kl"):
        grpo_objective("vespo", importance_sampling_level="sequence", beta=0.1, use_bias_correction_kl=True)


# --- from logits ------------------------------------------------------------------------------------------------------


def run_logits(function, case, batch, upstream=None, **options):
    """Loss (or per-token losses), gradient of the logits, metrics; upstream (B, T) weighs per-token losses."""
    o = case.options()
    logits = torch.cat([batch.hidden @ batch.weight.T, torch.ones(B, 1, V)], 1).requires_grad_()
    named = {name: o[name] for name in ("loss_type", "importance_sampling_level", "beta", "delta",
                                        "use_bias_correction_kl", "max_completion_length")}  # fmt: skip
    loss, *metrics = function(
        logits, batch.old, batch.ref, batch.ids, batch.advantages, batch.mask, temperature=1.0,
        eps_low=o["epsilon_low"], eps_high=o["epsilon_high"], inplace=False, vllm_is_ratio=batch.ratios[case.ratio],
        reduce=upstream is None, **named, **options,
    )  # fmt: skip
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
        hidden = (gradient[:, :-1] @ batch.weight).double()
        agree((loss.double(), hidden, [m.double() for m in metrics]), (linear[0], linear[1][0], linear[2]))
        assert isinstance(run_logits(triton_grpo_loss, case, batch)[2], list)
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
    agree(ours[0].double(), run(TheirGRPO, case, batch)[0])
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


# --- DPO --------------------------------------------------------------------------------------------------------------


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
        loss, log = kind(compiled=False, beta=0.3, alpha=0.6, compute_nll_loss=nll, use_ref_model=reference,
                         average_log_prob=average)(
            leaves["weight"], leaves["hidden"][:4], target, leaves.get("bias"), ref_input=batch.hidden[:4].flip(1),
            ref_weight=batch.weight.flip(0), ref_bias=batch.bias.flip(0) if bias else None,
        )  # fmt: skip
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
