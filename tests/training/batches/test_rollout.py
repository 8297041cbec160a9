"""Rollouts: selecting and joining, masks, left padding, and log-probabilities that are the model's own."""

import dataclasses
import math
import pickle

import pytest
import torch
from digit_models import add_noise
from hypothesis import given
from hypothesis import strategies as st
from own_engine import generate
from rollouts import make_rollout
from two_devices import Device, placed_at, set_apart

import fastrl.training.rl.run as running
from fastrl.base.errors import UserError
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import AXES, Rollout, hidden_states, join, rollout_logprobs
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.transformers import completion_mask
from fastrl.training.rl.experience import collect
from fastrl.training.rl.train import take_step

MODELS = {
    "qwen3, tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "gemma2: softcap": {"model_type": "gemma2", "final_logit_softcapping": 0.5},
    "granite: logits_scaling": {"model_type": "granite", "logits_scaling": 4.0},
    "cohere: logit_scale": {"model_type": "cohere", "logit_scale": 0.25},
    "gpt2: learned positions": {"model_type": "gpt2"},
    "phi: bias": {"model_type": "phi"},
}
PROMPTS = [Example("1=", {}, [3, 1]), Example("2345=", {}, [4, 5, 6, 7, 1]), Example("9=", {}, [11, 1])]


def test_the_mask_counts_up_to_and_including_the_first_eos():
    completions = torch.tensor([[5, 0, 0, 7], [0, 5, 5, 5], [5, 6, 7, 5], [5, 9, 0, 5]])
    expected = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert completion_mask(completions, [0, 9]).long().tolist() == expected


@pytest.mark.parametrize("values", MODELS.values(), ids=MODELS.keys())
@torch.no_grad()
def test_logprobs_are_the_models_own_without_padding(make_policy, values):
    policy = make_policy(**values)
    add_noise(0.3, policy.model)  # biases start at 0, and small weights hide a missing softcap
    rollout = generate(policy, PROMPTS, RolloutConfig(max_new_tokens=5, temperature=0.8))
    logprobs = rollout_logprobs(policy, rollout, 0.8, MicroBatches(28))
    for row, example in enumerate(PROMPTS):
        length = int(rollout.mask[row].sum())
        completion = rollout.targets[row, :length]
        tokens = torch.cat([torch.tensor(example.token_ids), completion])
        logits = policy.model(input_ids=tokens[None]).logits[0, len(example.token_ids) - 1 : -1]
        expected = torch.log_softmax(logits.double() / 0.8, -1).gather(1, completion[:, None])[:, 0]
        torch.testing.assert_close(logprobs[row, :length].double(), expected, rtol=0, atol=2e-6)
        assert (logprobs[row, length:] == 0).all()


def test_a_head_that_the_losses_do_not_know_is_refused(make_policy, monkeypatch):
    from transformers import Qwen3ForCausalLM

    original = Qwen3ForCausalLM.forward

    def forward(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        output.logits = output.logits.clamp(max=0.0)
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", forward)
    with pytest.raises(UserError, match="Qwen3ForCausalLM computes its logits in a way the fused losses do not know"):
        make_policy(model_type="qwen3")


def test_a_tokenizer_larger_than_the_model_is_refused(make_policy):
    with pytest.raises(UserError, match="token id 11, but the model's vocabulary ends at 10"):
        make_policy(model_type="qwen3", vocab_size=11)


def test_an_unknown_model_type_is_refused(make_policy):
    with pytest.raises(UserError, match=r"policy\.json: cannot load the model.*mystery"):
        make_policy(model_type="mystery")


def test_sampling_follows_the_whole_distribution_at_the_temperature(make_policy):
    """A shipped top_k and repetition penalty would sample from another distribution than the one that is trained."""
    policy = make_policy(model_type="qwen3", initializer_range=1.0)
    policy.model.generation_config.update(top_k=2, top_p=0.5, repetition_penalty=5.0, do_sample=True)
    count = 20000
    rollout = generate(policy, [PROMPTS[0]] * count, RolloutConfig(max_new_tokens=1, temperature=2.0))
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([PROMPTS[0].token_ids])).logits[0, -1]
    expected = torch.softmax(logits / 2.0, -1)
    found = torch.bincount(rollout.targets[:, 0], minlength=12) / count
    # Five standard deviations of a binomial share.
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()
    assert policy.model.generation_config.top_k == 2


def test_greedy_decoding_takes_the_likeliest_token_and_batches_do_not_matter(make_policy):
    policy = make_policy(model_type="qwen3", initializer_range=1.0)
    whole = generate(policy, PROMPTS, RolloutConfig(max_new_tokens=4), greedy=True)
    parts = generate(policy, PROMPTS, RolloutConfig(max_new_tokens=4, batch_size=2), greedy=True)
    assert torch.equal(whole.input_ids, parts.input_ids)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([PROMPTS[1].token_ids])).logits
    assert int(whole.targets[1, 0]) == int(logits[0, -1].argmax())


# --- selecting and joining ------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4)


def full(lengths, seed=0):
    """A rollout of prompts and completions of these lengths with every field, so also with one that is added later."""
    made = make_rollout(*zip(*lengths, strict=True), seed=seed)
    count, positions = made.input_ids.shape
    sizes = {"row": (count,), "token": made.targets.shape, "position": (count, positions, 2, 3)}
    values = {"messages": [[{"role": "user", "content": str(row)}] for row in range(count)]}
    for name, per in AXES.items():
        if name not in values and getattr(made, name) is None:
            values[name] = torch.randn(sizes[per.axis])
    return dataclasses.replace(made, **values | {"drawn": made.completion_mask & (values["drawn"] > 0)})


def assert_same(ours, theirs):
    for field in dataclasses.fields(Rollout):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert same and type(one) is type(other), field.name


def test_every_field_says_what_it_has_a_value_for():
    assert {field.name for field in dataclasses.fields(Rollout)} == {*AXES, "prompt_length"}


@given(st.lists(LENGTHS, min_size=1, max_size=3))
def test_a_join_holds_its_parts(groups):
    parts = [full(lengths, seed) for seed, lengths in enumerate(groups)]
    whole, rows = join(parts), torch.arange(sum(map(len, groups)))
    for part, own in zip(parts, rows.split([*map(len, groups)]), strict=True):
        assert_same(whole.select(own), part)
    assert_same(pickle.loads(pickle.dumps(whole)), whole)  # as it is sent to other processes


def test_a_join_of_rollouts_of_which_some_have_tools_knows_whose_tokens_they_are():
    tools, plain = full([(2, 5), (1, 3)]), dataclasses.replace(full([(3, 2)]), drawn=None)
    both = join([plain, tools])
    assert both.drawn_mask.sum(1).tolist() == [2, *tools.drawn_mask.sum(1).tolist()]


@given(LENGTHS, st.data())
def test_selecting_rows_drops_only_padding(lengths, data):
    whole = full(lengths)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=4))
    part = whole.select(torch.tensor(rows))
    assert part.attention_mask[:, [0, -1]].any(0).all()
    masks = {"position": "attention_mask", "token": "completion_mask"}
    for name, per in AXES.items():
        ours, theirs = getattr(part, name), getattr(whole, name)
        for new, old in enumerate(rows):
            if per.axis == "row":
                assert ours[new] == theirs[old], name
            else:
                mask = masks[per.axis]
                assert torch.equal(ours[new][getattr(part, mask)[new]], theirs[old][getattr(whole, mask)[old]]), name


def test_no_rows_are_a_rollout_too():
    part = full([(2, 3)]).select(torch.tensor([], dtype=torch.long))
    assert part.targets.shape == (0, 0) and part.supports == []


# --- where it lies --------------------------------------------------------------------------------------------------


GRPO_OFF_POLICY = {"objective": {"name": "grpo"}, "kl": {"coef": 0.04}, "training": {"minibatches": 2}}


def test_a_step_holds_its_rollout_on_the_cpu_in_few_bytes(make_config):
    """Between steps a GPU holds none of it."""
    run = running.make_run(make_config(**GRPO_OFF_POLICY))
    rollout, _ = collect(run, {})
    assert rollout.old_logprobs is not None and rollout.ref_logprobs is not None
    tensors = {name: x for name in AXES if isinstance(x := getattr(rollout, name), torch.Tensor)}
    assert {x.device.type for x in tensors.values()} == {"cpu"}
    tokens, positions = rollout.targets.numel(), rollout.input_ids.numel()
    # Ids and mask of every position; old, the reference's and the sampler's log-probabilities of every token.
    held = {name: x.untyped_storage().nbytes() for name, x in tensors.items()}
    assert sum(held[name] for name in held if AXES[name].axis != "row") == 5 * positions + 3 * 4 * tokens
    assert sum(held[name] for name in held if AXES[name].axis == "row") <= 50 * len(rollout.input_ids)


@pytest.mark.parametrize(
    "tables",
    [
        GRPO_OFF_POLICY | {"rollout": {"top_p": 0.8}},
        {
            "objective": {"name": "grpo", "aggregate": "prompt-mean"},
            "kl": {"place": "reward", "kind": "k1", "coef": 0.1},
            "training": {"minibatches": 2, "micro_batch_tokens": 24, "packing": True},
            "rollout": {"top_p": 0.8},
        },
        {"objective": {"name": "ppo"}, "advantages": {"estimator": "gae"}, "critic": {}, "kl": {"coef": 0.1}},
        {"advantages": {"estimator": "optimal_token_baseline"}, "training": {"micro_batch_tokens": 40}},
    ],
    ids=["padded", "packed", "critic", "token baseline"],
)
def test_a_step_mixes_no_tensors_of_host_and_device(make_config, monkeypatch, tables):
    set_apart(monkeypatch)
    run = running.make_run(make_config(**tables))
    run.step = 1
    if run.loss.kl is not None:
        run.loss.kl.coef = placed_at(Device, run.loss.kl.coef)
    numbers, _ = take_step(run)
    assert math.isfinite(numbers["loss"]) and numbers["skipped_updates"] == 0
    with pytest.raises(AssertionError, match="of the host and of the device meet in embedding"):
        hidden_states(run.models.policy, collect(run, {})[0], False)
