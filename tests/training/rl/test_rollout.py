"""Rollouts: masks, left padding, and that the fused log-probabilities are the model's own, for heads of every shape."""

import pytest
import torch
from digit_models import add_noise
from own_engine import generate

from fastrl.base.errors import UserError
from fastrl.training.common.data import Example
from fastrl.training.common.micro_batch import MicroBatches
from fastrl.training.common.rollout import completion_texts, rollout_logprobs
from fastrl.training.common.sections import RolloutConfig
from fastrl.training.engines.transformers import completion_mask

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


def test_selecting_rows_drops_only_padding(make_policy):
    policy = make_policy(model_type="qwen3")
    rollout = generate(policy, PROMPTS, RolloutConfig(max_new_tokens=6))
    rows = torch.tensor([2, 0])
    part = rollout.select(rows)
    assert part.prompt_length == 2
    assert part.mask.any(0).all()
    for new, old in enumerate(rows.tolist()):
        assert torch.equal(part.targets[new][part.mask[new]], rollout.targets[old][rollout.mask[old]])
    assert completion_texts(policy, part) == [completion_texts(policy, rollout)[row] for row in rows]
    assert rollout.select(torch.tensor([], dtype=torch.long)).targets.shape == (0, 0)
