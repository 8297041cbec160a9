"""The functions for slime and NeMo-RL against their formulas in float64; neither package is on an index."""

import types

import pytest
import torch
from exact_policy import Batch, exact_loss
from peer_cases import stand_in

import fastrl
from fastrl import RolloutCorrection
from fastrl.integrations.losses_from_logits import NeMoPolicyLoss, slime_loss, token_losses

V = 13
CLOSE = {"rtol": 2e-5, "atol": 5e-6}


def assert_exact(loss, leaf, oracle):
    """The loss and its gradient are those of the oracle in float64."""
    wide = leaf.detach().double().requires_grad_()
    expected = oracle(wide)
    torch.testing.assert_close(loss.detach().double(), expected.detach(), **CLOSE)
    ours, theirs = torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(expected, wide)[0]
    torch.testing.assert_close(ours.double(), theirs, **CLOSE)


# --- per-token losses -------------------------------------------------------------------------------------------------

OBJECTIVES = {
    "GRPO": fastrl.GRPO(kl_coef=0.1),
    "GSPO": fastrl.GSPO(0.1, 0.1),
    "CISPO": fastrl.CISPO(1.2),
    "GMPO": fastrl.GMPO(),
    "entropy": fastrl.PPO(entropy_coef=0.05),
    "TIS": fastrl.PPO(rollout_correction=RolloutCorrection(high=1.2)),
    "VESPO": fastrl.VESPO(),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_token_losses_are_what_policy_loss_sums(objective):
    torch.manual_seed(0)
    logprobs = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    given = {name: logprobs.detach() + 0.3 * torch.randn_like(logprobs) for name in ("old", "ref", "rollout")}
    entropy = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
    inputs = {f"{name}_logprobs": value for name, value in given.items()}
    inputs |= {"advantages": torch.randn(3), "mask": torch.rand(3, 5) > 0.3, "entropy": entropy}
    each = token_losses(objective.replace(aggregate="token-mean"), logprobs, **inputs)
    whole = fastrl.policy_loss(logprobs, objective=objective.replace(aggregate="token-mean"), denominator=1.0, **inputs)
    torch.testing.assert_close(each.losses.sum(), whole.loss)
    ours, expected = (torch.autograd.grad(x, logprobs)[0] for x in (each.losses.sum(), whole.loss))
    torch.testing.assert_close(ours, expected)
    assert not each.losses[~inputs["mask"]].any() and not each.kl.requires_grad
    fraction = (each.side != 0).sum() / inputs["mask"].sum()
    torch.testing.assert_close(fraction.float(), whole.metrics["clip_frac"])


def test_token_losses_takes_what_policy_loss_takes():
    logprobs, advantages = torch.tensor([[-1.0, -2.0]]), torch.ones(1)
    for objective in (lambda log_ratio, a, context: -a * log_ratio.exp(), fastrl.CPI(aggregate="prompt-mean")):
        found = token_losses(objective, logprobs, advantages=advantages)
        torch.testing.assert_close(found.losses, torch.tensor([[-1.0, -1.0]]))
    with pytest.raises(TypeError, match="got GRPO itself: call it"):
        token_losses(fastrl.GRPO, logprobs, advantages=advantages)


def test_token_losses_refuses_what_it_does_not_have():
    with pytest.raises(TypeError, match="denominator"):
        token_losses(fastrl.PPO(), torch.zeros(2, 3), advantages=torch.zeros(2), denominator=1.0)


# --- slime ------------------------------------------------------------------------------------------------------------

TOTAL, RESPONSE = [6, 4, 5], [3, 2, 4]


def slime_batch(rows=17):
    """Three samples in 15 of the logits' rows, one token that does not count."""
    generator = torch.Generator().manual_seed(0)

    def lists(scale):
        return [scale * torch.randn(n, generator=generator) for n in RESPONSE]

    masks = [torch.ones(n, dtype=torch.int64) for n in RESPONSE]
    masks[2][1] = 0
    base = [x - 2.5 for x in lists(0.4)]
    batch = {
        "unconcat_tokens": [torch.randint(V, (n,), generator=generator) for n in TOTAL],
        "total_lengths": TOTAL,
        "response_lengths": RESPONSE,
        "loss_masks": masks,
        "advantages": [torch.full((n,), a) for n, a in zip(RESPONSE, (1.0, -1.0, 0.5), strict=True)],
        "log_probs": base,
        "ref_log_probs": [x + y for x, y in zip(base, lists(0.3), strict=True)],
        "rollout_log_probs": [x + y for x, y in zip(base, lists(0.3), strict=True)],
    }
    return batch, torch.randn(1, rows, V, generator=generator)


def sum_of_sample_mean(batch):
    """slime's reducer for samples that are whole rollouts."""

    def reduce(x):
        parts = zip(x.split(RESPONSE), batch["loss_masks"], strict=True)
        return sum((p * m).sum() / m.sum().clamp(min=1) for p, m in parts)

    return reduce


def slime_logprobs(batch, logits, temperature):
    """Per sample, in logits' dtype: log-probabilities and entropies of the response."""
    start = 0
    for tokens, total, response in zip(batch["unconcat_tokens"], TOTAL, RESPONSE, strict=True):
        rows = torch.log_softmax(logits[0, start + total - response - 1 : start + total - 1] / temperature, -1)
        yield rows.gather(-1, tokens[-response:, None])[:, 0], -(rows.exp() * rows).sum(-1)
        start += total


def slime_oracle(batch, logits, objective, temperature):
    logp, entropy = map(torch.cat, zip(*slime_logprobs(batch, logits, temperature), strict=True))
    names = ("advantages", "log_probs", "ref_log_probs", "rollout_log_probs")
    rows = [row.tolist() for row in torch.arange(sum(RESPONSE)).split(RESPONSE)]
    mask = torch.cat(batch["loss_masks"]).bool()
    given = Batch(rows, mask, *(torch.cat(batch[name]).double() for name in names), denominator=1.0)
    return exact_loss(objective.replace(aggregate="seq-mean-token-mean"), given, logp, entropy)


@pytest.mark.parametrize("kind", ["GRPO", "GSPO", "entropy", "TIS"])
@pytest.mark.parametrize("inplace", [False, True])
def test_slime_loss_is_the_formulas(kind, inplace):
    batch, logits = slime_batch()
    args = types.SimpleNamespace(rollout_temperature=0.8, use_rollout_logprobs=False, entropy_coef=0.0)
    leaf = logits.clone().requires_grad_()
    function = slime_loss(OBJECTIVES[kind], inplace=inplace)
    loss, log = function(args, batch, leaf * 1.0, sum_of_sample_mean(batch))
    assert_exact(2 * loss, leaf, lambda wide: 2 * slime_oracle(batch, wide, OBJECTIVES[kind], 0.8))
    assert set(log) == {"loss", "entropy_loss", "pg_clipfrac", "ppo_kl", *(["kl_loss"] if kind == "GRPO" else [])}
    assert all(value.dim() == 0 and not value.requires_grad for value in log.values())


def test_slime_metrics_and_old_logprobs():
    batch, logits = slime_batch()
    args = types.SimpleNamespace(rollout_temperature=1.0)
    found = list(slime_logprobs(batch, logits, 1.0))
    reduce = sum_of_sample_mean(batch)
    _, log = slime_loss(fastrl.PPO())(args, batch, logits, reduce)
    logp, old = torch.cat([f[0] for f in found]), torch.cat(batch["log_probs"])
    torch.testing.assert_close(log["ppo_kl"], reduce(old - logp), **CLOSE)
    torch.testing.assert_close(log["entropy_loss"], reduce(torch.cat([f[1] for f in found])), **CLOSE)
    r, a = (logp - old).exp(), torch.cat(batch["advantages"])
    out = ((r > 1.2) & (a > 0) | (r < 0.8) & (a < 0)).float()
    torch.testing.assert_close(log["pg_clipfrac"], reduce(out), **CLOSE)
    assert 0 < out.mean() < 1
    args.use_rollout_logprobs = True
    log = slime_loss(fastrl.PPO())(args, batch, logits, reduce)[1]
    torch.testing.assert_close(log["ppo_kl"], reduce(torch.cat(batch["rollout_log_probs"]) - logp), **CLOSE)
    args.use_rollout_logprobs, batch["log_probs"] = False, None  # on-policy
    assert slime_loss(fastrl.PPO())(args, batch, logits, reduce)[1]["ppo_kl"] == 0


@pytest.mark.parametrize("name", ["use_kl_loss", "use_tis", "use_opsm", "entropy_coef", "rollout_top_p"])
def test_slimes_own_options_are_refused(name):
    batch, logits = slime_batch()
    error = NotImplementedError if name == "rollout_top_p" else ValueError
    with pytest.raises(error, match=name):
        slime_loss(fastrl.PPO())(types.SimpleNamespace(**{name: 0.1}), batch, logits, sum_of_sample_mean(batch))


def test_what_slime_may_ask_for_and_is_not_there(monkeypatch):
    batch, logits = slime_batch()
    call = slime_loss(fastrl.PPO()), batch, logits, sum_of_sample_mean(batch)
    with pytest.raises(ValueError, match="logits"):
        call[0](types.SimpleNamespace(), batch, logits[0], call[3])
    mpu = types.SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: 1, get_context_parallel_world_size=lambda: 2
    )
    stand_in(monkeypatch, "megatron")
    stand_in(monkeypatch, "megatron.core", mpu=mpu)
    with pytest.raises(NotImplementedError, match="context_parallel"):
        call[0](types.SimpleNamespace(), *call[1:])


# --- NeMo-RL ----------------------------------------------------------------------------------------------------------


def nemo_data():
    """Four sequences of which one does not count; entry t is token t's."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4, 7, generator=generator) * 0.4 - 2.5
    data = {
        "input_ids": torch.randint(V, (4, 7), generator=generator),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "token_mask": (torch.rand(4, 7, generator=generator) > 0.3).float(),
        "prev_logprobs": base,
        "advantages": torch.tensor([1.0, -1.0, 0.5, 0.7])[:, None].expand(4, 7).clone(),
    }
    data["token_mask"][:, 0] = 1.0  # nothing predicts the first token
    for name in ("generation_logprobs", "reference_policy_logprobs"):
        data[name] = base + 0.3 * torch.randn(4, 7, generator=generator)
    return data, torch.randn(4, 7, V, generator=generator)


def nemo_oracle(data, logits, objective, denominator):
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    logp = torch.log_softmax(logits[:, :-1], -1).gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    names = ("advantages", "prev_logprobs", "reference_policy_logprobs", "generation_logprobs")
    a, old, ref, engine = (data[name][:, 1:] for name in names)
    given = Batch.padded(mask, advantages=a, old=old, ref=ref, rollout=engine, denominator=denominator)
    return exact_loss(objective, given, logp)


@pytest.mark.parametrize("kind", ["GRPO", "GSPO", "TIS"])
@pytest.mark.parametrize("inplace", [False, True])
def test_nemo_loss_is_the_formulas(kind, inplace):
    data, logits = nemo_data()
    sequences, tokens = torch.tensor(6.0), torch.tensor(30.0)
    leaf = logits.clone().requires_grad_()
    loss, log = NeMoPolicyLoss(OBJECTIVES[kind], inplace=inplace)(data, sequences, tokens, logits=leaf * 1.0)
    assert_exact(loss, leaf, lambda wide: nemo_oracle(data, wide, OBJECTIVES[kind], 30.0 if kind == "TIS" else 6.0))
    assert log["loss"] == pytest.approx(float(loss.detach()), abs=1e-5) and log["num_valid_samples"] == 3
    assert all(isinstance(value, float) for value in log.values())


def test_nemo_metrics_add_up_over_micro_batches():
    data, logits = nemo_data()
    counts = torch.tensor(3.0), (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
    loss_fn = NeMoPolicyLoss(fastrl.GRPO(kl_coef=0.1))
    _, whole = loss_fn(data, *counts, logits=logits)
    parts = [
        loss_fn({name: value[rows] for name, value in data.items()}, *counts, logits=logits[rows])[1]
        for rows in (slice(2), slice(2, None))
    ]
    for name in set(whole) - {"probs_ratio_max"}:
        assert sum(part[name] for part in parts) == pytest.approx(whole[name], rel=1e-4), name
    mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]) > 0
    error = (data["generation_logprobs"] - data["prev_logprobs"])[:, 1:].abs().exp()[mask].mean()
    assert whole["token_mult_prob_error"] == pytest.approx(float(error), rel=1e-5)


def test_nemo_refuses_shards_and_says_what_its_types_need():
    data, logits = nemo_data()
    with pytest.raises(NotImplementedError, match="logits"):
        NeMoPolicyLoss(fastrl.PPO())(data, torch.tensor(3), torch.tensor(9), logits=logits[:, :4])
    with pytest.raises(ImportError, match="nemo_rl"):
        _ = NeMoPolicyLoss(fastrl.PPO()).loss_type
    with pytest.raises(ValueError, match=r"objective.aggregate must be over tokens or responses for NeMo-RL"):
        NeMoPolicyLoss(fastrl.PPO(aggregate="prompt-mean"))


def test_nemo_types_follow_the_aggregation(monkeypatch):
    for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss"):
        stand_in(monkeypatch, name)
    stand_in(
        monkeypatch,
        "nemo_rl.algorithms.loss.interfaces",
        LossType=types.SimpleNamespace(TOKEN_LEVEL="token", SEQUENCE_LEVEL="sequence"),
        LossInputType=types.SimpleNamespace(LOGIT="logit"),
    )
    assert NeMoPolicyLoss(fastrl.DAPO()).loss_type == "token" and NeMoPolicyLoss(fastrl.GSPO()).loss_type == "sequence"
    assert NeMoPolicyLoss(fastrl.DAPO()).input_type == "logit"
