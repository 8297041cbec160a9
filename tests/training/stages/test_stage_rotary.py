"""Rotary embeddings that choose their frequencies by the longest row of a forward, in the stages."""

import json

import pytest
from digit_models import LONGROPE, TOKENIZER
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import fastrl.training.stages.sample as sampling
from fastrl.base.errors import UserError
from fastrl.training.config.stages import SFTConfig
from fastrl.training.data.examples import Example
from fastrl.training.models.rotary import constant_length
from fastrl.training.rewards.model import RewardModel
from fastrl.training.stages import reward_model
from fastrl.training.stages.sft import train

ROWS = [{"prompt": "1=", "completion": "23"}, {"prompt": "12345678=", "completion": "9"}]  # of 5 and of 11 tokens


@pytest.fixture
def longrope(model_config):
    """The small model's config.json with such embeddings."""
    values = json.loads(model_config.read_text()) | {"rope_parameters": LONGROPE, "head_dim": 8}
    model_config.write_text(json.dumps(values))
    return model_config


def test_the_loss_of_a_row_does_not_depend_on_the_rows_beside_it(settings, write_rows, longrope, tmp_path):
    losses = []
    for tokens in (1, 99):
        training = {"batch_size": 2, "micro_batch_tokens": tokens}
        tables = settings(write_rows(ROWS), training=training, logging={"output_dir": str(tmp_path / str(tokens))})
        losses.append(train(SFTConfig.model_validate(tables))["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_samples_are_drawn_with_the_frequencies_of_the_longest_prompt(
    settings, write_rows, longrope, tmp_path, monkeypatch
):
    changes = {"reward": {"function": "fastrl.rewards.format"}, "rollout": {"max_new_tokens": 4}}
    seen = []

    def stop(policy, *arguments):
        seen.append(constant_length(policy.model))
        raise UserError("enough")

    monkeypatch.setattr(sampling, "make_sampler", stop)
    tables = (
        settings(write_rows([{"prompt": row["prompt"]} for row in ROWS]))
        | changes
        | {"output": {"path": str(tmp_path / "out.jsonl")}}
    )
    del tables["optimizer"], tables["logging"]
    with pytest.raises(UserError, match="enough"):
        sampling.sample(sampling.SampleConfig.model_validate(tables))
    assert seen == [None]


def test_a_reward_model_scores_up_to_the_length_at_which_they_change(settings, write_rows, longrope):
    """Its later inputs are not known, so nothing can choose for all of them."""
    config = AutoConfig.from_pretrained(longrope, num_labels=1)
    model = RewardModel(
        AutoModelForSequenceClassification.from_config(config), AutoTokenizer.from_pretrained(TOKENIZER)
    )
    assert len(model([Example("1234=", {}, [], "here")], ["12"])) == 1
    with pytest.raises(UserError, match=r"here: the prompt and its completion have 9 tokens, .* ends at 8"):
        model([Example("12345=", {}, [], "here")], ["12"])
    rows = write_rows([{"prompt": "12345=", "chosen": "1", "rejected": "12"}])
    with pytest.raises(UserError, match=r"rejected and EOS has 9 tokens, expected at most 8"):
        reward_model.train(reward_model.RewardModelConfig.model_validate(settings(rows)))
