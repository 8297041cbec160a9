"""PPO's critic: its values, the returns it should give, its learning rate; and the text of PPO-ptx."""

import copy
from dataclasses import replace

import pytest
import torch
from digit_models import assert_gradient, gradient_of
from own_engine import generate
from rollouts import LENGTHS, PROMPTS, gradients, make_rollout, naive_gae, own_logprobs, play, with_critic

import fastrl
import fastrl.training.rl.run as running
import fastrl.training.rl.train as module
import fastrl.training.rl.update as updating
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.config.algorithm import AdvantagesConfig, KLConfig, PretrainingConfig
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.data.examples import Example, TextStream
from fastrl.training.rl.advantages import add_advantages, whitened
from fastrl.training.rl.controllers import AdaptiveKL
from fastrl.training.rl.critic import Critic

PPO = {"advantages": {"estimator": "gae"}, "objective": {"name": "ppo", "entropy_coef": 0.0}}
COUNTED = [True] * 6 + [False, True]


@pytest.fixture
def rollout(policy):
    return own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, COUNTED, sets=False))


@pytest.fixture
def critic_run(policy, bare_run):
    def run(kind, kl=None, packing=False, micro_batch_tokens=None, clip=0.2, **advantages):
        made = bare_run(policy, fastrl.PPO(), packing=packing, micro_batch_tokens=micro_batch_tokens)
        with_critic(made, kind, clip=clip)
        made.config.advantages = AdvantagesConfig(estimator="gae", **advantages)
        made.config.kl = kl
        made.loss.kl = None if kl is None else AdaptiveKL(kl, policy.device)
        return made

    return run


# --- values and returns ---------------------------------------------------------------------------------------------


def test_a_new_critic_says_0_and_an_own_one_leaves_the_policy_alone(policy, rollout):
    for shared in (True, False):
        critic = Critic(policy, shared)
        assert (critic.rollout_values(policy, rollout, MicroBatches(None)) == 0).all()
        names = {name.split(".")[0] for name, _ in critic.named_parameters()}
        assert names == ({"head"} if shared else {"head", "decoder"})
    pointers = {p.data_ptr() for p in policy.model.parameters()}
    assert not pointers & {p.data_ptr() for p in critic.parameters()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["own", "shared"])
def test_values_are_the_heads_on_the_state_before_each_token(policy, critic_run, rollout, kind, packed):
    critic = critic_run(kind).models.critic
    if kind == "own":  # its decoder has moved on from the policy's
        with torch.no_grad():
            critic.decoder.embed_tokens.weight.mul_(1.5)
    decoder = critic.decoder if kind == "own" else policy.decoder
    found = critic.rollout_values(policy, rollout, MicroBatches(42, packed))
    for row, (tokens, there) in enumerate(zip(rollout.input_ids, rollout.attention_mask, strict=True)):
        states = decoder(input_ids=tokens[there][None]).last_hidden_state[0]
        expected = critic.head(states)[PROMPTS[row] - 1 : -1, 0] * COUNTED[row]
        torch.testing.assert_close(found[row, : LENGTHS[row]], expected, rtol=0, atol=1e-5)
        assert (found[row, LENGTHS[row] :] == 0).all()


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_without_discount_or_decay_every_return_is_the_reward(critic_run, rollout, kind):
    run = critic_run(kind, gamma=1.0, lam=1.0, whiten=False)
    values = run.models.critic.rollout_values(run.models.policy, rollout, MicroBatches(None)).detach()
    found = add_advantages(run, replace(rollout, old_values=values), [])
    expected = rollout.rewards[:, None].expand_as(values).where(rollout.mask, 0)
    torch.testing.assert_close(found.returns, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.token_advantages, (expected - values).where(rollout.mask, 0), rtol=0, atol=1e-5)


def test_the_decay_may_depend_on_the_length_and_be_another_for_the_critic(critic_run, rollout):
    """VAPO: each response's lambda is 1 - 1 / (alpha T), of the tokens that count; the targets have their own."""
    run = critic_run("own", lam_alpha=0.6, lam_critic=0.25, gamma=0.9, whiten=False)
    found = add_advantages(run, rollout, [])
    zeros = torch.zeros_like(rollout.old_values)
    columns = (rollout.rewards, zeros, zeros, rollout.old_values, rollout.mask)
    lengths = rollout.mask.sum(1).tolist()
    assert min(lengths) <= 1 and max(lengths) >= 4  # of the first's, 1 / (0.6 T) is more than 1
    for row, length in enumerate(lengths):
        lam = max(0.0, 1 - 1 / (0.6 * length)) if length else 0.0
        expected = naive_gae(*columns, 0.0, "k1", 0.9, lam)[0][row]
        torch.testing.assert_close(found.token_advantages[row].double(), expected, rtol=0, atol=1e-5)
    _, returns = naive_gae(*columns, 0.0, "k1", 0.9, 0.25)
    torch.testing.assert_close(found.returns.double(), returns, rtol=0, atol=1e-5)
    same = add_advantages(critic_run("own", lam_alpha=0.6, gamma=0.9, whiten=False), rollout, [])
    torch.testing.assert_close(same.returns, (found.token_advantages + rollout.old_values).where(rollout.mask, 0))


def test_a_kl_in_the_reward_is_paid_at_each_token_and_the_score_at_the_last(critic_run, rollout):
    """A naive loop, discounted so that each token's own reward shows; truncated rows end where they were cut off."""
    kl = KLConfig(place="reward", kind="k1", coef=0.3)
    found = add_advantages(critic_run("own", kl, gamma=0.9, lam=0.7, whiten=False), rollout, [])
    columns = (rollout.rewards, rollout.old_logprobs, rollout.ref_logprobs, rollout.old_values, rollout.mask)
    advantages, returns = naive_gae(*columns, 0.3, "k1", 0.9, 0.7)
    torch.testing.assert_close(found.token_advantages.double(), advantages, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.returns.double(), returns, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_shared_critic_takes_the_rollouts_experts_before_the_update_too(make_policy):
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    policy = make_policy(model_type="qwen3_moe", num_hidden_layers=2, initializer_range=0.5, **experts)
    examples = [Example("", {}, list(range(2, 4 + row))) for row in range(3)]
    rollout = generate(policy, examples, RolloutConfig(max_new_tokens=4, keep_routing=True))
    critic = Critic(policy, shared=True)
    critic.head.weight.normal_()
    first = critic.rollout_values(policy, rollout, MicroBatches(None))
    others = ((rollout.routing + 1) % 4).where(rollout.routing >= 0, rollout.routing)
    second = critic.rollout_values(policy, replace(rollout, routing=others), MicroBatches(None))
    assert (first - second).abs().max() > 1e-3


def test_whitening_sees_counted_tokens_only(critic_run, rollout):
    run = critic_run("own")
    plain = add_advantages(critic_run("own", whiten=False), rollout, [])
    found = add_advantages(run, rollout, [])
    counted = found.token_advantages[rollout.mask].double()
    assert float(counted.mean()) == pytest.approx(0, abs=1e-6)
    assert float(counted.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert (found.token_advantages[~rollout.mask] == 0).all()
    assert torch.equal(found.returns, plain.returns)  # what the critic learns is not whitened
    order = plain.token_advantages[rollout.mask].argsort()
    assert torch.equal(counted.argsort(), order)
    other = replace(rollout, old_values=rollout.old_values.where(rollout.mask, 1e6))
    assert torch.equal(add_advantages(run, other, []).token_advantages, found.token_advantages)


def test_whitening_one_token_or_none_gives_0():
    values = torch.tensor([[3.0, 7.0]])
    assert whitened(values, torch.tensor([[True, False]])).tolist() == [[0, 0]]
    assert whitened(values[:0], torch.zeros(0, 2, dtype=torch.bool)).shape == (0, 2)


# --- its loss -------------------------------------------------------------------------------------------------------


def test_values_are_float32_where_products_are_narrow(critic_run, rollout, spy):
    """In the update as before it: rounded to bfloat16, values would differ from the old ones by up to 1 in 256."""
    run = critic_run("shared")
    run.models.policy = replace(run.models.policy, dtype=torch.bfloat16)
    seen = spy(updating, "value_loss", lambda _, values, *rest: values.detach())
    before = run.models.critic.rollout_values(run.models.policy, rollout, MicroBatches(None))
    gradients(run, rollout)
    assert seen[0].dtype == torch.float32
    (rows,) = run.micro_batches.cut(rollout.shapes())
    torch.testing.assert_close(seen[0].where(rollout.mask[rows], 0), before[rows], rtol=0, atol=1e-6)


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_it_learns_a_constant_reward(make_config, write_reward, shared):
    """Its returns are 0.5 at every token; five steps of eight updates at Adam's 0.02 come most of the way from 0."""
    config = make_config(
        **PPO,
        critic={"shared": shared, "lr": 0.02, "clip": None},
        reward={"function": write_reward("return [0.5] * len(prompts)")},
        optimizer={"lr": 1e-6, "schedule": "constant", "warmup_updates": 0},
        training={"steps": 5, "minibatches": 2, "epochs": 4},
    )
    _, steps = play(config)
    start = 0.5 * 0.5 * 0.5**2
    assert start > steps[0]["value_loss"] > steps[1]["value_loss"]
    assert steps[-1]["value_loss"] < 0.05 * start
    assert all(numbers["critic_grad_norm"] > 0 for numbers in steps)


def test_its_learning_rate_is_its_own(make_config, spy):
    """The policy's schedule, from another peak; without one, the policy's rate."""
    rates = spy(module, "update", lambda _, run, rollout: [group["lr"] for group in run.optimizer.param_groups])
    optimizer = {"lr": 1e-3, "schedule": "linear", "warmup_updates": 0}
    tables = PPO | {"optimizer": optimizer, "training": {"steps": 4, "minibatches": 1}}
    _, (first, *_) = play(make_config(**tables, critic={"lr": 4e-3}))
    assert rates == [pytest.approx([share * 1e-3, share * 4e-3]) for share in (0.75, 0.5, 0.25, 0)]
    assert first["lr"] == pytest.approx(1e-3)
    rates.clear()
    play(make_config(**tables, critic={}))
    assert all(policy == critic for policy, critic in rates)


def test_its_weights_are_in_a_group_of_their_own(make_config):
    for shared in (False, True):
        run = running.make_run(make_config(**PPO, critic={"shared": shared}))
        policy, critic = ({id(p) for p in group["params"]} for group in run.optimizer.param_groups)
        assert critic == {id(p) for p in run.models.critic.parameters()} and not policy & critic
        assert policy == {id(p) for p in run.models.policy.model.parameters()}


def test_gae_without_a_kl_reads_no_reference(critic_run, rollout):
    run = critic_run("own", whiten=False)
    without = add_advantages(run, replace(rollout, old_logprobs=None, ref_logprobs=None), [])
    assert torch.equal(without.token_advantages, add_advantages(run, rollout, []).token_advantages)


# --- PPO-ptx --------------------------------------------------------------------------------------------------------


def test_pretraining_text_adds_its_cross_entropy_and_begins_again(policy, bare_run, tmp_path):
    """In float64 by torch's own cross-entropy; 10 tokens hold one and a quarter of two sequences of 4."""
    (tmp_path / "text.txt").write_text("0123456789")
    run, before = bare_run(policy, fastrl.PPO()), torch.tensor(0.25)
    run.data.text = TextStream(tmp_path / "text.txt", policy.tokenizer, 4)
    run.config.pretraining = PretrainingConfig(path=tmp_path / "text.txt", coef=0.7, batch_size=2, length=4)
    assert run.data.text.tokens.tolist() == list(range(2, 12))
    for ids, position in (([[2, 3, 4, 5], [6, 7, 8, 9]], 8), ([[10, 11, 2, 3], [4, 5, 6, 7]], 6)):
        policy.model.zero_grad()
        metrics = updating.pretrain(run, run.data.text, before)
        assert run.data.text.position == position
        model = copy.deepcopy(policy.model).double()
        logits = model(input_ids=torch.tensor(ids)).logits.double()[:, :-1]
        loss = 0.7 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(ids)[:, 1:].flatten())
        assert float(metrics["pretraining_loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
        assert float(metrics["loss"]) == pytest.approx(float(before + loss.detach()), rel=1e-5)
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        assert_gradient(gradient_of(policy.model), expected, 3e-6, rtol=1e-4)
