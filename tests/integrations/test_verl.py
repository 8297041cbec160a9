"""verl's policy losses on fastrl against verl's own, for every preset, aggregation and global batch."""

import sys

import pytest
import torch
from verl_cases import CLOSE, ActorConfig, loaded

import fastrl.integrations.verl as adapter
from fastrl import PRESETS
from fastrl.integrations import patching

B, T = 4, 6
OFF_POLICY_DELTA = 0.02  # nats: drops the fourth response, keeps the second
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
GLOBAL = (
    {},
    {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 8, "loss_scale_factor": 11},
    {"batch_num_tokens": torch.tensor(40), "global_batch_size": torch.tensor(8)},
)
# preset -> verl's name for it; what has no dual clip is verl's with one that never binds
PAIRS = {
    "PPO": "vanilla",
    "GRPO": "vanilla",
    "BNPO": "vanilla",
    "DAPO": "vanilla",
    "CISPO": "cispo",
    "GSPOToken": "gspo",
    "SAPO": "sapo",
    "GPG": "gpg",
    "REINFORCE": "gpg",
}


@pytest.fixture(scope="module")
def core():
    """verl.trainer.ppo.core_algos."""
    with loaded() as module:
        yield module


@pytest.fixture
def registered(core):
    """The losses by name, ours among them."""
    before = dict(core.POLICY_LOSS_REGISTRY)
    names = adapter.register({"DeepSeekV32": {"off_policy_delta": OFF_POLICY_DELTA}, "GMPO": {"clip": 0.15}})
    assert names == [f"fastrl_{name}" for name in PRESETS]
    yield core.POLICY_LOSS_REGISTRY
    core.POLICY_LOSS_REGISTRY.clear()
    core.POLICY_LOSS_REGISTRY.update(before)


def make_batch(constant=True, empty=True):
    """Log-ratios that clip on both sides and pass the dual clip, ragged masks, one response without tokens."""
    generator = torch.Generator().manual_seed(0)
    log_prob = -torch.rand(B, T, generator=generator) - 0.5
    old = log_prob + 0.4 * torch.randn(B, T, generator=generator)
    mask = torch.arange(T) < torch.tensor([6, 3, 0 if empty else 2, 5])[:, None]
    mask[0, 2] = False
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.7])[:, None].expand(B, T).clone()
    if not constant:
        advantages = advantages + 0.5 * torch.randn(B, T, generator=generator)
    weights = torch.rand(B, T, generator=generator) + 0.5
    return {"old_log_prob": old, "log_prob": log_prob, "advantages": advantages, "response_mask": mask}, weights


def run(function, batch, mode, config, weights=None):
    """Loss, gradient of the log-probabilities, metrics."""
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss, metrics = function(
        **(batch | {"log_prob": log_prob}), loss_agg_mode=mode, config=config, rollout_is_weights=weights
    )
    loss = loss * 1.0  # verl's may be an in-place result
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0], metrics


@pytest.mark.parametrize("preset", PAIRS)
def test_presets_are_verls_own_losses(core, registered, preset):
    ours, theirs = registered[f"fastrl_{preset}"], core.get_policy_loss_fn(PAIRS[preset])
    batch, weights = make_batch(constant=False)
    for mode in MODES:
        for info in GLOBAL:
            config = ActorConfig(global_batch_info=info)
            if preset not in ("PPO", "CISPO"):
                config.clip_ratio_c = 1e9
            for given in (None, weights):
                found, expected = run(ours, batch, mode, config, given), run(theirs, batch, mode, config, given)
                torch.testing.assert_close(found[:2], expected[:2], **CLOSE)
                if expected[2]:
                    torch.testing.assert_close(found[2], expected[2], **CLOSE)
                assert set(found[2]) == {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}
                assert all(isinstance(value, float) for value in found[2].values())


def test_the_clips_bind(core):
    """Otherwise the test above could not tell one clip from another."""
    batch, _ = make_batch(constant=False)
    metrics = run(core.compute_policy_loss_vanilla, batch, "token-mean", ActorConfig())[2]
    assert metrics["actor/pg_clipfrac"] > 0.1 and metrics["actor/pg_clipfrac_lower"] > 0


def test_gspo_with_one_advantage_a_response_is_verls(core, registered):
    batch, _ = make_batch()
    for mode in MODES:
        found = run(registered["fastrl_GSPO"], batch, mode, ActorConfig())
        expected = run(core.compute_policy_loss_gspo, batch, mode, ActorConfig())
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("weighted", [False, True])
def test_gmpo_is_verls(core, registered, weighted):
    """verl's ignores the aggregation and averages over all responses, those without tokens too."""
    batch, weights = make_batch(constant=False, empty=False)
    weights = weights if weighted else None
    config = ActorConfig(clip_ratio_low=0.15, clip_ratio_high=0.15)
    found = run(registered["fastrl_GMPO"], batch, "token-mean", config, weights)
    expected = run(core.compute_policy_loss_geo_mean, batch, "token-mean", config, weights)
    torch.testing.assert_close(found[:2], expected[:2], **CLOSE)
    # verl's clip fractions count log-ratios out of the range on either side, whatever the gate makes of them
    assert found[2]["actor/pg_clipfrac"] <= expected[2]["actor/pg_clipfrac"]
    assert found[2]["actor/ppo_kl"] == pytest.approx(expected[2]["actor/ppo_kl"], rel=1e-5)


def per_token(preset, batch, config):
    """The per-token losses of presets that verl does not have, written out."""
    logp, old, a, mask = (batch[n] for n in ("log_prob", "old_log_prob", "advantages", "response_mask"))
    d = logp - old
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    sequence = ((d * mask).sum(-1, keepdim=True) / lengths).exp()

    def clip(r):
        return -torch.minimum(r * a, r.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high) * a)

    if preset == "CPI":
        return -d.exp() * a
    if preset == "PPOKL":
        return -d.exp() * a + 0.3 * (d.exp() - 1 - d)
    if preset == "VESPO":
        w = (d * mask).sum(-1, keepdim=True).clamp(-18.420680743952367, 20)
        k, lam = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
        return -(lam + k * w - lam * w.exp()).exp().detach() * a * logp
    if preset == "LUSPO":
        return clip(sequence.expand_as(a))
    if preset == "DeepSeekV32":
        drifted = ((old - logp.detach()) * mask).sum(-1, keepdim=True) / lengths > OFF_POLICY_DELTA
        return clip(d.exp()) * ~(drifted & (a < 0))
    assert preset == "DrGRPO"
    return clip(d.exp())


@pytest.mark.parametrize("preset", ["CPI", "PPOKL", "VESPO", "LUSPO", "DeepSeekV32", "DrGRPO"])
def test_other_presets_under_verls_aggregation(core, registered, preset):
    assert set(PRESETS) == {*PAIRS, "GSPO", "GMPO", "CPI", "PPOKL", "VESPO", "LUSPO", "DeepSeekV32", "DrGRPO"}
    batch, _ = make_batch(constant=preset == "LUSPO")
    only = {"LUSPO": "seq-mean-token-sum", "DrGRPO": "seq-mean-token-sum-norm"}.get(preset)
    for mode in MODES:
        for info in GLOBAL:
            config = ActorConfig(global_batch_info=info)
            if only not in (None, mode):
                with pytest.raises(ValueError, match="loss_agg_mode"):
                    run(registered[f"fastrl_{preset}"], batch, mode, config)
                continue
            found = run(registered[f"fastrl_{preset}"], batch, mode, config)
            leaf = batch["log_prob"].clone().requires_grad_()
            each = per_token(preset, batch | {"log_prob": leaf}, config)
            expected = core.agg_loss(each, batch["response_mask"], mode, **info) * 1.0
            torch.testing.assert_close(found[0], expected.detach(), **CLOSE)
            torch.testing.assert_close(found[1], torch.autograd.grad(expected, leaf)[0], **CLOSE)


def test_off_policy_masking_is_reached(registered):
    """The DeepSeek comparison above drops some tokens and keeps others."""
    batch, _ = make_batch()
    gradient = run(registered["fastrl_DeepSeekV32"], batch, "token-sum", ActorConfig())[1]
    dropped = ((gradient == 0) | ~batch["response_mask"]).all(-1)
    assert dropped.tolist() == [False, False, True, True]  # the third has no tokens


def test_clip_ratio_is_the_fallback_and_no_tokens_give_zero(core, registered):
    batch, _ = make_batch()
    config = ActorConfig(clip_ratio_low=None, clip_ratio_high=None)
    expected = run(core.compute_policy_loss_vanilla, batch, "token-mean", config)
    torch.testing.assert_close(run(registered["fastrl_PPO"], batch, "token-mean", config), expected, **CLOSE)
    batch["response_mask"] = torch.zeros(B, T, dtype=torch.bool)
    for mode in MODES:
        loss, gradient, _ = run(registered["fastrl_PPO"], batch, mode, config)
        assert loss == 0 and not gradient.any()


def test_what_cannot_be_done_is_refused(core, registered, monkeypatch):
    batch, _ = make_batch()
    with pytest.raises(ValueError, match="config"):
        run(registered["fastrl_PPO"], batch, "token-mean", None)
    with pytest.raises(ValueError, match="batch_num_tokens"):
        run(registered["fastrl_PPO"], batch, "token-mean", ActorConfig(global_batch_info={"dp_size": 2}))
    for preset in ("PPO", "SAPO", "GMPO"):  # the last two take one aggregation, whatever it says
        for config in (ActorConfig(), ActorConfig(global_batch_info={"dp_size": 2})):
            with pytest.raises(ValueError, match=r"loss_agg_mode must be one of token-mean, .*, got 'median'"):
                run(registered[f"fastrl_{preset}"], batch, "median", config)
    adapter.register()
    with pytest.raises(ValueError, match="off_policy_delta"):
        run(registered["fastrl_DeepSeekV32"], batch, "token-mean", ActorConfig())
    with pytest.raises(ValueError, match="clip_ratio_low"):
        run(registered["fastrl_GMPO"], batch, "token-mean", ActorConfig())
    adapter.register({"GRPO": {"kl_coef": 0.1}, "PPO": {"entropy_coef": 0.1}})
    with pytest.raises(ValueError, match="ref_logprobs"):  # verl gives a policy loss none
        run(registered["fastrl_GRPO"], batch, "token-mean", ActorConfig())
    with pytest.raises(ValueError, match="entropy"):
        run(registered["fastrl_PPO"], batch, "token-mean", ActorConfig())
    with pytest.raises(ValueError, match=r"fields\['PPO'\] must hold some of clip, clip_high, .*, got 'clpi'"):
        adapter.register({"PPO": {"clpi": 0.1}})
    with pytest.raises(ValueError, match="NoSuch"):
        adapter.register({"NoSuch": {}})
    with pytest.raises(ValueError, match="loss_agg_mode"):
        adapter.register({"PPO": {"aggregate": "token-mean"}})
    monkeypatch.setitem(core.POLICY_LOSS_REGISTRY, "vanilla", lambda old_log_prob, log_prob: None)
    with pytest.raises(RuntimeError, match=r"0\.9\.1"):
        adapter.register()


def test_verl_may_add_its_terms_in_place(registered):
    """Its `ppo_loss` subtracts the entropy term from the very tensor that the policy loss returned."""
    batch, _ = make_batch()
    expected = run(registered["fastrl_PPO"], batch, "token-mean", ActorConfig())[1]
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss, _ = registered["fastrl_PPO"](**(batch | {"log_prob": log_prob}), config=ActorConfig())
    loss -= 0.5 * log_prob.sum()
    torch.testing.assert_close(torch.autograd.grad(loss, log_prob)[0], expected - 0.5)


def test_use_kl_loss_with_deepseek_is_said(registered, caplog):
    batch, _ = make_batch()
    patching._said.clear()
    run(registered["fastrl_DeepSeekV32"], batch, "token-mean", ActorConfig(use_kl_loss=True))
    run(registered["fastrl_DeepSeekV32"], batch, "token-mean", ActorConfig(use_kl_loss=True))
    assert len(caplog.records) == 1 and "use_kl_loss" in caplog.text


def test_without_verl_the_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name == "verl" or name.startswith("verl.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verl", None)
    for call in (adapter.register, adapter.enable):
        with pytest.raises(ImportError, match=r"pip install verl==0\.9\.1$"):
            call()
