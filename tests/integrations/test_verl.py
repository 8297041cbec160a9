"""verl's policy losses on fastrl against verl's own, for every preset, aggregation and global batch."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from exact_policy import Batch, token_losses
from peer_cases import policy_batch
from verl_cases import CLOSE, ActorConfig

import fastrl.integrations.verl as adapter
from fastrl import KL, PRESETS, Clip, FutureKL, GammaWeight, NoGate, Objective, RatioMask, Tapered

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
    "GSPO": "gspo",  # with one advantage per response and no weights
    "GSPOToken": "gspo",
    "SAPO": "sapo",
    "GPG": "gpg",
    "REINFORCE": "gpg",
    "DPPO": "dppo_tv",
    "DRO": "dro",
}


def aggregations():
    """verl's modes and configurations of global batches."""
    for mode, info in itertools.product(MODES, GLOBAL):
        yield mode, ActorConfig(global_batch_info=info)


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
    """verl's arguments, and weights of its rollout."""
    log_prob, old, rollout, mask, advantages = policy_batch(0.0 if constant else 0.5, empty)
    batch = {"old_log_prob": old, "log_prob": log_prob, "advantages": advantages, "response_mask": mask}
    return batch, (old - rollout).exp()


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
    batch, weights = make_batch(constant=preset == "GSPO")
    for mode, config in aggregations():
        if preset not in ("PPO", "CISPO", "DPPO"):
            config.clip_ratio_c = 1e9
        for given in (None,) if preset == "GSPO" else (None, weights):
            found, expected = run(ours, batch, mode, config, given), run(theirs, batch, mode, config, given)
            torch.testing.assert_close(found[:2], expected[:2], **CLOSE)
            if len(expected[2]) == 3:
                torch.testing.assert_close(found[2], expected[2], **CLOSE)
            assert set(found[2]) == {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}
            assert all(isinstance(value, float) for value in found[2].values())


@pytest.mark.parametrize("weighted", [False, True])
def test_clip_cov_is_verls(core, registered, monkeypatch, weighted):
    """With equal draws: verl's permutation of the candidates is the order of our random numbers."""
    batch, weights = make_batch(constant=False)
    mask, logp, a = batch["response_mask"], batch["log_prob"], batch["advantages"]
    product = (a - a[mask].mean()) * (logp - logp[mask].mean())
    numbers = ActorConfig().policy_loss
    clipped = -a * (logp - batch["old_log_prob"]).exp().clamp(0.9, 1.15) > -a * (logp - batch["old_log_prob"]).exp()
    free = mask & ~clipped & (product > numbers.clip_cov_lb) & (product < numbers.clip_cov_ub)
    number = int(numbers.clip_cov_ratio * mask.sum())
    assert 0 < number < free.sum()
    for mode, config in aggregations():
        torch.manual_seed(11)
        draws = torch.rand(mask.numel(), dtype=torch.float64).view_as(mask.double())
        monkeypatch.setattr(torch, "randperm", lambda n, draws=draws: draws[free].argsort())
        expected = run(core.compute_policy_loss_clip_cov, batch, mode, config, weights if weighted else None)
        torch.manual_seed(11)
        found = run(registered["fastrl_ClipCov"], batch, mode, config, weights if weighted else None)
        torch.testing.assert_close(found[:2], expected[:2], **CLOSE)
        for name, value in expected[2].items():
            assert found[2][name] == pytest.approx(value, rel=2e-5, abs=5e-6)
        assert found[2]["actor/pg_clipfrac"] == pytest.approx(number / int(mask.sum()))


@pytest.mark.parametrize("weighted", [False, True])
def test_kl_cov_is_verls(core, registered, weighted):
    batch, weights = make_batch(constant=False)
    for mode, config in aggregations():
        both = (registered["fastrl_KLCov"], core.compute_policy_loss_kl_cov)
        found, expected = (run(f, batch, mode, config, weights if weighted else None) for f in both)
        torch.testing.assert_close(found[:2], expected[:2], **CLOSE)
        assert found[2]["actor/ppo_kl"] == pytest.approx(expected[2]["actor/ppo_kl"], rel=2e-5)
    config.policy_loss.ppo_kl_coef = 0.0
    assert not torch.allclose(found[1], run(registered["fastrl_KLCov"], batch, mode, config)[1]), "the term is there"


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_is_verls(core, registered, kind):
    """At thresholds and a cap that bind, on either side."""
    adapter.register({"DPPO": {"kind": kind}})
    batch, weights = make_batch(constant=False)
    names = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")
    for low, high in ((0.02, 0.2), (0.2, 0.02)):
        config = ActorConfig(clip_ratio_low=low, clip_ratio_high=high)
        found, expected = (
            run(loss, batch, "token-mean", config, weights)
            for loss in (core.POLICY_LOSS_REGISTRY["fastrl_DPPO"], core.get_policy_loss_fn(f"dppo_{kind}"))
        )
        torch.testing.assert_close(found, expected, **CLOSE)
        assert all(0 < expected[2][name] < 0.9 for name in names)


def test_the_clips_bind(core):
    """Otherwise the test above could not tell one clip from another."""
    batch, _ = make_batch(constant=False)
    metrics = run(core.compute_policy_loss_vanilla, batch, "token-mean", ActorConfig())[2]
    assert metrics["actor/pg_clipfrac"] > 0.1 and metrics["actor/pg_clipfrac_lower"] > 0


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


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs(registered, preset):
    mode = {"LUSPO": "seq-mean-token-sum", "DrGRPO": "seq-mean-token-sum-norm"}.get(preset, "token-mean")
    loss, gradient, _ = run(registered[f"fastrl_{preset}"], make_batch()[0], mode, ActorConfig())
    assert loss.isfinite() and gradient.isfinite().all() and gradient.any()


#: What verl does not have, with the numbers of `ActorConfig` and of `registered`.
OTHERS = {
    "CPI": Objective(gate=NoGate()),
    "PPOKL": Objective(gate=NoGate(), kl=KL("old-new", 0.3)),
    "VESPO": Objective(gate=GammaWeight(2.0, 3.0, 3.0, 2.0)),
    "LUSPO": Objective(gate=Clip(0.1, 0.15), ratio="sequence"),
    "DeepSeekV32": Objective(gate=Clip(0.1, 0.15), off_policy_delta=OFF_POLICY_DELTA),
    "DrGRPO": Objective(gate=Clip(0.1, 0.15)),
    "FIPO": Objective(gate=Clip(0.1, 0.15, dual=1.4), future_kl=FutureKL(32.0, 1.0, 1.2, 1.4, 10.0)),
    "IcePop": Objective(gate=RatioMask()),
    "TOPR": Objective(gate=Tapered(), ratio="sequence-product"),
}


@pytest.mark.parametrize("preset", OTHERS)
def test_other_presets_under_verls_aggregation(core, registered, preset):
    batch, _ = make_batch(constant=preset == "LUSPO")
    only = {"LUSPO": "seq-mean-token-sum", "DrGRPO": "seq-mean-token-sum-norm"}.get(preset)
    leaf = batch["log_prob"].clone().requires_grad_()
    mask = batch["response_mask"]
    given = Batch.padded(mask, advantages=batch["advantages"], old=batch["old_log_prob"])
    each = token_losses(OTHERS[preset], given, leaf.double()).float()
    for mode, config in aggregations():
        if only not in (None, mode):
            with pytest.raises(ValueError, match="loss_agg_mode"):
                run(registered[f"fastrl_{preset}"], batch, mode, config)
            continue
        found = run(registered[f"fastrl_{preset}"], batch, mode, config)
        expected = core.agg_loss(each, mask, mode, **config.global_batch_info) * 1.0
        torch.testing.assert_close(found[0], expected.detach(), **CLOSE)
        slope = torch.autograd.grad(expected, leaf, retain_graph=True)[0]
        torch.testing.assert_close(found[1], slope, **CLOSE)


def test_a_preset_s_own_argument_replaces_the_config_s(core, registered):
    """verl's dro_beta is None unless it is set, and DrGRPO's one clip stands for both of the config's."""
    batch, _ = make_batch(constant=False)
    adapter.register({"DRO": {"beta": 0.2}, "DrGRPO": {"clip": 0.3}})
    for preset, config, same in (
        ("DRO", ActorConfig(policy_loss=SimpleNamespace(dro_beta=None)), SimpleNamespace(dro_beta=0.2)),
        ("DrGRPO", ActorConfig(), ActorConfig(clip_ratio_low=0.3, clip_ratio_high=0.3)),
    ):
        found = run(core.POLICY_LOSS_REGISTRY[f"fastrl_{preset}"], batch, "seq-mean-token-sum-norm", config)
        like = same if preset == "DrGRPO" else ActorConfig(policy_loss=same)
        own = core.get_policy_loss_fn({"DRO": "dro", "DrGRPO": "vanilla"}[preset])
        like.clip_ratio_c = 1e9
        expected = run(own, batch, "seq-mean-token-sum-norm", like)
        torch.testing.assert_close(found[:2], expected[:2], **CLOSE)


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
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    for mode in MODES:
        loss, gradient, _ = run(registered["fastrl_PPO"], batch, mode, config)
        assert loss == 0 and not gradient.any()


def test_what_cannot_be_done_is_refused(core, registered, monkeypatch):
    batch, _ = make_batch()
    own, partial = ActorConfig(), ActorConfig(global_batch_info={"dp_size": 2})

    def refused(words, preset, config=own, mode="token-mean"):
        with pytest.raises(ValueError, match=words):
            run(registered[f"fastrl_{preset}"], batch, mode, config)

    refused("config", "PPO", config=None)
    refused("batch_num_tokens", "PPO", config=partial)
    for preset in ("PPO", "SAPO", "GMPO"):  # the last two take one aggregation, whatever it says
        for config in (own, partial):
            refused(r"loss_agg_mode must be one of token-mean, .*, got 'median'", preset, config, mode="median")
    adapter.register()
    refused("off_policy_delta", "DeepSeekV32")
    refused("clip_ratio_low", "GMPO")
    for beta in (None, 0.0):
        refused("dro_beta", "DRO", config=ActorConfig(policy_loss=SimpleNamespace(dro_beta=beta)))
    adapter.register({"GRPO": {"kl_coef": 0.1}, "PPO": {"entropy_coef": 0.1}})
    refused("ref_logprobs", "GRPO")  # verl gives a policy loss none
    refused("entropy", "PPO")
    for fields, words in (
        ({"PPO": {"clpi": 0.1}}, r"fields\['PPO'\] must hold some of clip, clip_high, .*, got 'clpi'"),
        ({"NoSuch": {}}, "NoSuch"),
        ({"PPO": {"aggregate": "token-mean"}}, "loss_agg_mode"),
    ):
        with pytest.raises(ValueError, match=words):
            adapter.register(fields)
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


def test_use_kl_loss_with_deepseek_is_said(registered, said):
    batch, _ = make_batch()
    for _ in range(2):
        run(registered["fastrl_DeepSeekV32"], batch, "token-mean", ActorConfig(use_kl_loss=True))
    assert len(said()) == 1 and "use_kl_loss" in said()[0]


def test_without_verl_the_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name == "verl" or name.startswith("verl.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verl", None)
    for call in (adapter.register, adapter.enable):
        with pytest.raises(ImportError, match=r"pip install verl==0\.9\.1$"):
            call()
