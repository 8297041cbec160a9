"""`policy_loss` against the token-by-token oracle in float64: every preset, gate, ratio level, KL, weight, layout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import naive_losses as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives import OBJECTIVES

import fastrl
from fastrl.objectives.objective import AGGREGATIONS, Objective

# Two algorithms' float64 sums of some dozen terms: agreement to a few hundred roundings.
EXACT = {"rtol": 1e-12, "atol": 1e-13}


@dataclasses.dataclass
class Case:
    """A padded batch (B, T) of random numbers, float64."""

    mask: torch.Tensor
    logp: torch.Tensor
    advantages: torch.Tensor
    optional: dict[str, torch.Tensor]
    entropy: torch.Tensor

    @staticmethod
    def make(seed: int, on_policy: bool, per_token: bool, lengths: tuple[int, ...] = (4, 1, 0, 6, 3)) -> Case:
        g = torch.Generator().manual_seed(seed)
        shape = (len(lengths), max(lengths))

        def normal(scale: float, *size: int) -> torch.Tensor:
            return scale * torch.randn(*(size or shape), generator=g, dtype=torch.float64)

        # holes inside responses too, not only padding at their ends
        mask = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
        mask[3:4, 2:3] = False
        logp = -normal(1.0).abs()
        old = (logp + normal(0.3)).clamp(max=0.0)
        ref = (logp + normal(0.4)).clamp(max=0.0)
        optional = {"ref_logprobs": ref, "rollout_logprobs": (old + normal(0.15)).clamp(max=0.0)}
        optional["token_weights"] = normal(1.0).abs()
        if not on_policy:
            optional["old_logprobs"] = old
        advantages = normal(1.0) if per_token else normal(1.0, shape[0])
        return Case(mask, logp, advantages, optional, normal(1.0).abs())

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """What the loss reads beside the log-probabilities and the entropies."""
        return {"advantages": self.advantages, "mask": self.mask, "group_ids": self.prompts, **self.optional}

    @property
    def prompts(self) -> torch.Tensor:
        """Two, whose responses take turns."""
        return torch.arange(len(self.mask)) % 2

    def oracle(self, objective: Objective, threshold: float | None = None) -> tuple[torch.Tensor, ...]:
        logp, entropy = self.logp.clone().requires_grad_(), self.entropy.clone().requires_grad_()
        names = {"old_logprobs": "old", "ref_logprobs": "ref", "rollout_logprobs": "rollout"}
        rows = []
        for i, keep in enumerate(self.mask):
            advantages = self.advantages[i] if self.advantages.dim() > 1 else self.advantages[i].expand(len(keep))
            optional = {names.get(k, k): v[i][keep] for k, v in self.optional.items()}
            given = {"entropy": entropy[i][keep], "prompt": int(self.prompts[i]), **optional}
            rows.append(oracle.Response(logp[i][keep], advantages[keep], **given))
        loss = oracle.policy_loss(rows, objective, threshold)
        gradients = torch.autograd.grad(loss, (logp, entropy), allow_unused=True, materialize_grads=True)
        return loss, *gradients


@pytest.mark.parametrize("per_token", [False, True], ids=["A per response", "A per token"])
@pytest.mark.parametrize("on_policy", [False, True], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_match_the_oracle(name: str, on_policy: bool, per_token: bool) -> None:
    objective = OBJECTIVES[name].replace(entropy_coef=0.03)
    case = Case.make(sum(map(ord, name)), on_policy, per_token)
    expected, d_logp, d_entropy = case.oracle(objective)
    logp, entropy = case.logp.clone().requires_grad_(), case.entropy.clone().requires_grad_()
    out = fastrl.policy_loss(logp, objective=objective, entropy=entropy, **case.arguments)
    out.loss.backward()
    torch.testing.assert_close((out.loss, logp.grad, entropy.grad), (expected, d_logp, d_entropy), **EXACT)


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(OBJECTIVES)),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(sum),
    seed=st.integers(0, 1000),
    on_policy=st.booleans(),
)
def test_a_packed_batch_equals_the_padded_one(name: str, lengths: list[int], seed: int, on_policy: bool) -> None:
    """cu_seqlens changes the layout only: same loss, gradients and metrics, empty responses included."""
    case = Case.make(seed, on_policy, False, tuple(lengths))
    keep, objective = case.mask, OBJECTIVES[name]
    cu_seqlens = torch.tensor([0, *keep.sum(1)]).cumsum(0).int()
    packed = {"advantages": case.advantages, "group_ids": case.prompts.tolist()}
    packed |= {k: v[keep] for k, v in case.optional.items()}

    one, two = case.logp.clone().requires_grad_(), case.logp[keep].requires_grad_()
    a = fastrl.policy_loss(one, objective=objective, **case.arguments)
    b = fastrl.policy_loss(two, objective=objective, cu_seqlens=cu_seqlens, **packed)
    a.loss.backward()
    b.loss.backward()
    torch.testing.assert_close((b.loss, two.grad), (a.loss, one.grad[keep]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(b.metrics, a.metrics, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("aggregate", ["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_a_response_without_a_valid_token_is_one_of_the_responses(aggregate: str) -> None:
    """As in TRL: of three of which one has no token, the mean divides by three; `denominator` says otherwise."""
    mask = torch.tensor([[1, 1], [0, 0], [1, 0]])
    objective = fastrl.REINFORCE(aggregate=aggregate, max_length=1)
    given = {"objective": objective, "advantages": torch.tensor([1.0, 1.0, 1.0]), "mask": mask}
    logprobs = torch.full((3, 2), -1.0)
    tokens = {"seq-mean-token-mean": 2}.get(aggregate, 3)
    alone = fastrl.policy_loss(logprobs[[0, 2]], **given | {"mask": mask[[0, 2]], "advantages": torch.ones(2)}).loss
    assert alone.abs() == pytest.approx(tokens / 2)
    assert fastrl.policy_loss(logprobs, **given).loss == pytest.approx(float(alone) * 2 / 3)
    assert fastrl.policy_loss(logprobs, **given, denominator=2).loss == pytest.approx(float(alone))


def test_on_policy_all_gates_have_the_gradient_of_reinforce() -> None:
    """At r = 1 every gate's weight is 1, whatever its value."""
    case = Case.make(1, True, False)

    def gradient(name: str) -> torch.Tensor:
        logp, objective = case.logp.clone().requires_grad_(), OBJECTIVES[name].replace(aggregate="seq-mean-token-mean")
        loss = fastrl.policy_loss(logp, objective=objective, advantages=case.advantages, mask=case.mask).loss
        return torch.autograd.grad(loss, logp)[0]

    names = ("CPI", "PPO", "DAPO", "GSPO", "GSPOToken", "SAPO", "CISPO", "GMPO", "VESPO")
    expected = dict.fromkeys(names, gradient("REINFORCE"))
    torch.testing.assert_close({name: gradient(name) for name in names}, expected, **EXACT)


def test_ppo_takes_the_smaller_of_the_clipped_and_the_unclipped() -> None:
    """With ratios (2, 0.4), A = 1 and eps = 0.2 the terms are 1.2 and 0.4: a clip without the min gives 0.8."""
    out = fastrl.policy_loss(
        torch.tensor([2.0, 0.4]).log(), objective=fastrl.PPO(), advantages=torch.ones(2), old_logprobs=torch.zeros(2)
    )
    torch.testing.assert_close(out.loss, torch.tensor(-(1.2 + 0.4) / 2))


def test_micro_batches_with_a_global_denominator_add_up() -> None:
    for name, count in (("DAPO", "tokens"), ("GRPO", "responses"), ("DrGRPO", "responses"), ("LUSPO", "responses")):
        case = Case.make(3, False, False)
        given = {"logprobs": case.logp, **case.arguments}
        whole = fastrl.policy_loss(objective=OBJECTIVES[name], **given).loss
        total = case.mask.sum() if count == "tokens" else torch.tensor(len(case.mask))
        batches = [{k: v[i : i + 2] for k, v in given.items()} for i in range(0, 5, 2)]
        parts = [fastrl.policy_loss(objective=OBJECTIVES[name], denominator=total, **b).loss for b in batches]
        torch.testing.assert_close(sum(parts), whole, **EXACT)


def test_float64_keeps_its_digits_beside_a_float32_denominator() -> None:
    """The product with L_max, in float32, was 4e-8 off."""
    denominator = torch.tensor(3.3)
    out = fastrl.policy_loss(
        torch.zeros(1, 1, dtype=torch.float64),
        objective=fastrl.DrGRPO(max_length=7),
        advantages=torch.ones(1),
        denominator=denominator,
    )
    torch.testing.assert_close(out.loss, -1 / (7 * denominator.double()), rtol=1e-15, atol=0)


def test_top_entropy_tokens_are_a_fraction_or_a_threshold() -> None:
    case = Case.make(5, False, False)
    values = case.entropy[case.mask]
    fraction = fastrl.DAPO(top_entropy_fraction=0.25)
    threshold = torch.quantile(values, 0.75)
    common = {"entropy": case.entropy, **case.arguments}
    logp = case.logp.clone().requires_grad_()
    by_fraction = fastrl.policy_loss(logp, objective=fraction, **common)
    by_fraction.loss.backward()
    explicit = fastrl.policy_loss(case.logp, objective=fastrl.DAPO(), entropy_threshold=threshold, **common)
    torch.testing.assert_close(by_fraction.loss, explicit.loss, **EXACT)
    trained = int((logp.grad[case.mask] != 0).sum())
    assert 0 < trained <= -(-len(values) // 4)
    expected, *_ = case.oracle(fastrl.DAPO(), float(threshold))
    torch.testing.assert_close(explicit.loss, expected, **EXACT)


def test_coefficients_may_be_tensors() -> None:
    case = Case.make(6, False, False)
    common = {"entropy": case.entropy, **case.arguments}
    numbers = fastrl.GRPO(kl_coef=0.3, entropy_coef=0.2)
    tensors = fastrl.GRPO(kl_coef=torch.tensor(0.3, dtype=torch.float64), entropy_coef=torch.tensor(0.2).double())
    a = fastrl.policy_loss(case.logp, objective=numbers, **common).loss
    b = fastrl.policy_loss(case.logp, objective=tensors, **common).loss
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)  # 0.2 went through float32


def test_entropy_weights_replace_w_on_the_entropy_term_only() -> None:
    case = Case.make(7, False, False)
    own = torch.rand(case.mask.shape, dtype=torch.float64)
    without = fastrl.policy_loss(case.logp, objective=fastrl.GRPO(), **case.arguments).loss
    entropy = {"objective": fastrl.GRPO(entropy_coef=0.5), "entropy": case.entropy, "entropy_weights": own}
    both = fastrl.policy_loss(case.logp, **entropy, **case.arguments).loss
    torch.testing.assert_close(both, without - 0.5 * (own * case.entropy)[case.mask].sum(), **EXACT)


def test_gradcheck() -> None:
    """Reverse and forward mode, batched, and the second derivatives: each formula's first derivative is by hand."""
    case = Case.make(8, False, False)
    for name in ("GRPO", "GSPO", "SAPO", "GMPO", "kl forward", "kl k3-unbiased", "objective's own ratio in the KL"):
        objective = OBJECTIVES[name].replace(entropy_coef=0.1)

        def loss(logp: torch.Tensor, entropy: torch.Tensor, objective: Objective = objective) -> torch.Tensor:
            return fastrl.policy_loss(logp, objective=objective, entropy=entropy, **case.arguments).loss

        inputs = (case.logp.clone().requires_grad_(), case.entropy.clone().requires_grad_())
        assert torch.autograd.gradcheck(loss, inputs, check_forward_ad=True, check_batched_grad=True), name
        assert torch.autograd.gradgradcheck(loss, inputs), name


def test_metrics_say_what_happened() -> None:
    old = torch.zeros(1, 4)
    logp = torch.tensor([[2.0, 0.5, 1.0, 1.0]]).log()
    out = fastrl.policy_loss(
        logp,
        objective=fastrl.PPO(),
        advantages=torch.tensor([[1.0, -1.0, 1.0, 1.0]]),
        old_logprobs=old,
        mask=torch.tensor([[1, 1, 1, 0]]),
        entropy=torch.tensor([[1.0, 2.0, 3.0, 100.0]]),
    )
    expected = {
        "policy_loss": -(1.2 - 0.8 + 1.0) / 3,
        "kl": 0.0,
        "entropy": 2.0,
        "ratio_mean": 3.5 / 3,
        "ratio_max": 2.0,
        "clip_frac": 2 / 3,
        "clip_frac_low": 1 / 3,
        "clip_frac_high": 1 / 3,
        "gate_mean": 1 / 3,
        "approx_kl": sum(r - 1 - torch.tensor(r).log().item() for r in (2.0, 0.5, 1.0)) / 3,
        "ratio_clamped": 0.0,
        "masked_off_policy": 0.0,
        "tokens": 3.0,
    }
    assert {key: value.item() for key, value in out.metrics.items()} == pytest.approx(expected, abs=1e-6)
    assert all(value.dtype == torch.float32 and value.dim() == 0 for value in out.metrics.values())


def corrected(level: str, **options: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """The weights of tokens with rho 2, 1/4, 4, masked, and of a second response with 1, 1, masked, masked; metrics."""
    rho = torch.tensor([[2.0, 0.25, 4.0, 9.0], [1.0, 1.0, 9.0, 9.0]])
    logp = torch.zeros(2, 4, requires_grad=True)
    out = fastrl.policy_loss(
        logp,
        objective=fastrl.REINFORCE(rollout_correction=fastrl.RolloutCorrection(level, **options)),
        advantages=torch.ones(2),
        old_logprobs=torch.zeros(2, 4),
        rollout_logprobs=-rho.log(),
        mask=torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
        denominator=1,
    )
    out.loss.backward()
    return -logp.grad, {k.removeprefix("rollout_"): v.item() for k, v in out.metrics.items() if "rollout" in k}


def test_levels_of_a_rollout_correction() -> None:
    ones = torch.ones(2, 1)
    for level, rho in (("token", [2.0, 0.25, 4.0]), ("sequence", [2.0] * 3), ("sequence-mean", [2 ** (1 / 3)] * 3)):
        weights, metrics = corrected(level, high=100.0)
        torch.testing.assert_close(weights[0], torch.tensor([*rho, 0.0]))
        torch.testing.assert_close(weights[1:, :2], ones.T)
        every = torch.tensor([*rho, 1.0, 1.0])
        expected = {"weight_mean": every.mean(), "ess": every.sum() ** 2 / (5 * every.square().sum())}
        expected |= {"frac_low": 0.0, "frac_high": 0.0, "frac_rejected": 0.0}
        expected |= {"log_weight_mean": math.log(2) / 5 * (1 if level != "sequence" else 3)}
        expected |= {"abs_log_weight_max": every.log().abs().max()}
        assert metrics == pytest.approx({k: float(x) for k, x in expected.items()}), level


def test_truncation_and_rejection_combine() -> None:
    rows = [  # the weights of the tokens with rho 2, 1/4, 4, 1, 1; the shares below low, above high, of weight 0
        (("truncate", 0.5, 1.5, None), (1.5, 0.5, 1.5, 1, 1), (0.2, 0.4, 0.0)),
        (("mask", 0.5, 2.5, None), (2, 0, 0, 1, 1), (0.2, 0.2, 0.4)),
        (("truncate", 0.5, 1.5, (0.1, 3.0)), (1.5, 0.5, 0, 1, 1), (0.2, 0.4, 0.2)),
        (("truncate", 0.0, 1.5, [0.2, 2.5]), (1.5, 0.25, 0, 1, 1), (0.0, 0.4, 0.2)),
        (("mask", 0.2, 3.0, (0.9, 9.0)), (2, 0, 0, 1, 1), (0.0, 0.2, 0.4)),
    ]
    for (mode, low, high, reject), weights, shares in rows:
        found, metrics = corrected("token", mode=mode, low=low, high=high, reject=reject)
        assert [*found[0, :3], *found[1, :2]] == pytest.approx(weights), mode
        assert [metrics[f"frac_{x}"] for x in ("low", "high", "rejected")] == pytest.approx(shares), mode


def test_a_rejected_response_stays_in_the_denominator_and_in_the_kl() -> None:
    ratios = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    correction = fastrl.RolloutCorrection("sequence-mean", reject=(0.5, 2.0))
    logp = torch.full((2, 2), -1.0, requires_grad=True)
    given = {"old_logprobs": logp.detach(), "rollout_logprobs": -1 - ratios, "ref_logprobs": torch.zeros(2, 2)}
    out = fastrl.policy_loss(
        logp, objective=fastrl.GRPO(kl_coef=1.0, rollout_correction=correction), advantages=torch.ones(2), **given
    )
    out.loss.backward()
    assert out.metrics["policy_loss"] == -0.5 and out.metrics["rollout_frac_rejected"] == 0.5
    assert (logp.grad[1] != 0).all()
    torch.testing.assert_close(logp.grad[0] - logp.grad[1], torch.full((2,), -0.25))


def test_weights_beyond_the_clamp() -> None:
    """The loss's exponents end at max_log_ratio, those of the metrics at 30: float32 holds the sum of their squares."""
    correction = fastrl.RolloutCorrection(high=math.inf, reject=(0.1, 1e9))
    many = [31.0] * 8000
    for log_rho in ([25.0, 0.0], [90.0, 20.0], many):
        raw = torch.tensor(log_rho, dtype=torch.float64).clamp_max(30).exp()
        ess = raw.sum() ** 2 / (len(raw) * raw.square().sum())
        given = {"old_logprobs": torch.zeros(1, len(log_rho)), "rollout_logprobs": -torch.tensor([log_rho])}
        logp, a = torch.zeros(1, len(log_rho)), torch.ones(1)
        for bound, weight in ((20.0, math.exp(20)), (80.0, 0.0)):  # at most e^20, or rejected
            objective = fastrl.PPO(rollout_correction=correction, max_log_ratio=bound)
            out = fastrl.policy_loss(logp, objective=objective, advantages=a, **given)
            kept = [weight if x > 20 else math.exp(x) for x in log_rho]
            assert out.loss.item() == pytest.approx(-sum(kept) / len(kept), rel=1e-5)
            assert out.metrics["rollout_frac_rejected"].item() == kept.count(0.0) / len(kept)
            assert out.metrics["rollout_weight_mean"].item() == pytest.approx(raw.mean().item(), rel=1e-5)
            assert out.metrics["rollout_ess"].item() == pytest.approx(ess.item(), rel=1e-5)
            assert out.metrics["rollout_abs_log_weight_max"] == log_rho[0]


def test_prompts_of_a_mean_over_prompts() -> None:
    """Prompt 5 has 5 valid tokens in two responses, prompt -1 has 2; a prompt without valid tokens counts as one."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0], [0, 0, 0]])
    each = torch.tensor([5, 5, 2, 1])
    for ids in (torch.tensor([5, -1, 5, 9])[[0, 2, 1, 3]], [(5,), (5,), None, "x"], torch.tensor([5, 5, 0, 1]).byte()):
        logp = torch.zeros(4, 3, requires_grad=True)
        given = {"objective": fastrl.PPO(aggregate="prompt-mean"), "advantages": -torch.ones(4), "mask": mask}
        fastrl.policy_loss(logp, group_ids=ids, **given).loss.backward()
        torch.testing.assert_close(logp.grad, mask / (3.0 * each[:, None]))
        logp.grad = None
        fastrl.policy_loss(logp, group_ids=ids, denominator=torch.tensor(7), **given).loss.backward()
        torch.testing.assert_close(logp.grad, mask / (7.0 * each[:, None]))


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_a_denominator_for_each_response(aggregate: str) -> None:
    """Each takes the place of the whole batch's: of one response, a tensor (1,) is what a number is."""
    mask, each = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0]]), torch.tensor([4, 10, 0])
    given = {"objective": fastrl.PPO(aggregate=aggregate, max_length=9), "group_ids": [1, 1, 1]}
    logp = torch.zeros(3, 3, requires_grad=True)  # a response without a token may have 0
    fastrl.policy_loss(logp, advantages=-torch.ones(3), mask=mask, denominator=each, **given).loss.backward()
    for row in range(2):
        alone = torch.zeros(3, 3, requires_grad=True)
        fastrl.policy_loss(
            alone, advantages=-torch.ones(3), mask=mask, denominator=float(each[row]), **given
        ).loss.backward()
        torch.testing.assert_close(logp.grad[row], alone.grad[row])
    assert not logp.grad[2].any()


def test_prompts_that_micro_batches_cut() -> None:
    """What the docs say: token-mean, with P T_p as the denominator of each response."""
    torch.manual_seed(0)
    mask, prompts = torch.rand(6, 4) > 0.3, torch.tensor([0, 0, 0, 1, 1, 2])
    logp, advantages = torch.randn(6, 4).log_softmax(-1), torch.randn(6)
    whole, parts = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    objective = fastrl.GRPO(kl_coef=0, entropy_coef=0.3, aggregate="prompt-mean")
    given = {"advantages": advantages, "mask": mask, "entropy": torch.rand(6, 4)}
    fastrl.policy_loss(whole, objective=objective, group_ids=prompts, **given).loss.backward()
    tokens = mask.sum(1)
    denominator = len(prompts.unique()) * torch.stack([tokens[prompts == p].sum() for p in prompts])
    for rows in torch.arange(6).split(2):
        own = {name: x[rows] for name, x in given.items()}
        by_tokens = objective.replace(aggregate="token-mean")
        fastrl.policy_loss(parts[rows], objective=by_tokens, denominator=denominator[rows], **own).loss.backward()
    torch.testing.assert_close(parts.grad, whole.grad)


def test_a_token_that_gmpo_clips_has_no_weight() -> None:
    """Ratios (2, 1, 0.5), A = (1, 1, -1), clip 0.4: c is 0 for the first and the last token, whatever their mean is."""
    logp = torch.tensor([[2.0, 1.0, 0.5]]).log().requires_grad_()
    out = fastrl.policy_loss(
        logp, objective=fastrl.GMPO(), advantages=torch.tensor([[1.0, 1.0, -1.0]]), old_logprobs=torch.zeros(1, 3)
    )
    out.loss.backward()
    assert logp.grad[0, 0] == logp.grad[0, 2] == 0
    assert out.metrics["ratio_mean"].item() == pytest.approx(1.0)
    assert out.metrics["gate_mean"].item() == pytest.approx(1 / 3)


def test_a_clamped_exponent_is_counted_and_passes_no_gradient() -> None:
    logp = torch.tensor([[0.0, -1.0]], requires_grad=True)
    out = fastrl.policy_loss(
        logp, objective=fastrl.CPI(), advantages=torch.ones(1), old_logprobs=torch.tensor([[-30.0, -1.0]])
    )
    out.loss.backward()
    assert out.metrics["ratio_clamped"] == 1
    torch.testing.assert_close(out.metrics["ratio_max"], torch.tensor(20.0).exp())
    torch.testing.assert_close(logp.grad, torch.tensor([[0.0, -0.5]]))


@pytest.mark.parametrize(
    ("shape", "mask"), [((0, 4), None), ((3, 0), None), ((2, 3), torch.zeros(2, 3)), ((0,), None)], ids=str
)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_divides_by_zero(name: str, shape: tuple[int, ...], mask: torch.Tensor | None) -> None:
    logp = torch.full(shape, 0.0 if mask is None else torch.nan, requires_grad=True)
    numbers = {k: torch.full(shape, torch.nan) for k in ("old_logprobs", "ref_logprobs", "rollout_logprobs")}
    count = shape[0] if len(shape) > 1 else 1
    numbers |= {"advantages": torch.ones(count), "group_ids": torch.zeros(count, dtype=torch.int64)}
    out = fastrl.policy_loss(logp, objective=OBJECTIVES[name], mask=mask, **numbers)
    out.loss.backward()
    assert out.loss == 0
    torch.testing.assert_close(logp.grad, torch.zeros(shape))
    assert all(v.isfinite() for k, v in out.metrics.items() if k not in ("entropy", "gate_mean"))


def clip(log_ratio: torch.Tensor, advantages: torch.Tensor, context: fastrl.LossContext) -> torch.Tensor:
    """PPO's, as a callable."""
    r = log_ratio.exp()
    return -torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages)


@pytest.mark.parametrize("aggregate", [None, "seq-mean-token-mean"])
def test_a_callable_is_aggregated_like_the_preset_that_it_spells_out(
    monkeypatch: pytest.MonkeyPatch, aggregate: str | None
) -> None:
    if aggregate:  # it may name its aggregation
        monkeypatch.setattr(clip, "aggregate", aggregate, raising=False)
    case, preset = Case.make(9, False, False), fastrl.GRPO(kl_coef=0) if aggregate else fastrl.PPO()
    expected = fastrl.policy_loss(case.logp, objective=preset, **case.arguments).loss
    actual = fastrl.policy_loss(case.logp, objective=clip, **case.arguments).loss
    torch.testing.assert_close(actual, expected, **EXACT)


def test_a_callable_s_wrong_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"objective must return a per-token loss of shape \(2, 3\), got \(\)"):
        fastrl.policy_loss(torch.zeros(2, 3), objective=lambda r, a, c: (r * a).sum(), advantages=torch.ones(2, 3))
