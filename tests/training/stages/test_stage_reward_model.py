"""Reward models: they rank, their scores have mean 0 over the reference, and depend on nothing but the text."""

import json
import random

import pytest
import torch
from digit_models import MODEL, assert_gradient, gradient_of
from transformers import AutoModelForSequenceClassification

from fastrl.base.errors import UserError
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.config.sections import ModelConfig
from fastrl.training.config.stages import RewardModelConfig
from fastrl.training.data.examples import Example
from fastrl.training.data.prompts import PromptFormat
from fastrl.training.models.loading import load_tokenizer
from fastrl.training.models.model import load_model
from fastrl.training.rewards.model import MEAN, RewardModel, score_sequences
from fastrl.training.stages.loop import measure, save_model
from fastrl.training.stages.reward_model import Ranked, RewardModelStage, train

CPU = torch.device("cpu")


def ranked_rows(count):
    """Responses of three digits, ranked by how many of them are 7: equal ranks occur, and all equal too."""
    generator = random.Random(0)
    rows = []
    for _ in range(count):
        responses = ["".join(generator.choice("789") for _ in range(3)) for _ in range(4)]
        rows.append({"prompt": "12=", "responses": responses, "ranks": [4 - text.count("7") for text in responses]})
    return rows


def scored(model, *texts):
    """The scores of these completions of one prompt."""
    return model([Example("12=", {}, [])] * len(texts), texts)


@pytest.fixture
def trained(settings, write_rows, tmp_path, policy_path):
    """A reward model trained from a language model, with the rows it was trained on and its summary."""
    rows = ranked_rows(80)
    path = write_rows(rows)
    tables = settings(
        path,
        model={"path": policy_path},
        data={"eval_path": str(write_rows(ranked_rows(120)[80:], "eval.jsonl"))},
        training={"epochs": 4, "batch_size": 16, "micro_batch_tokens": 84},
    )
    summary = train(RewardModelConfig.model_validate(tables))
    return str(tmp_path / "run" / "model"), rows, summary


def test_it_ranks_held_out_responses_and_its_mean_is_0(trained):
    path, rows, summary = trained
    assert summary["eval/accuracy"] > 0.9 and summary["eval/margin"] > 0.5 and summary["eval/loss"] < 0.5
    model = RewardModel.load(path, CPU)
    scores = scored(model, *(text for row in rows for text in row["responses"]))
    assert sum(scores) / len(scores) == pytest.approx(0, abs=1e-4)
    assert abs(model.mean) > 1e-3  # otherwise nothing has been shifted
    good, bad = scored(model, "777", "898")
    assert good > bad


def test_a_score_is_the_last_tokens_whatever_stands_beside_it(trained):
    path, *_ = trained
    model, small = RewardModel.load(path, CPU), RewardModel.load(path, CPU)
    small.batch_size = 3
    texts = ["7", "789789", "", "77"]
    alone = [score for text in texts for score in scored(model, text)]
    assert scored(model, *texts) == pytest.approx(alone, abs=1e-5)
    assert scored(small, *texts) == pytest.approx(alone, abs=1e-5)
    for text, score in zip(texts, alone, strict=True):
        prompt, completion = PromptFormat(model.tokenizer).pair("12=", text, "")
        assert completion[-1] == model.tokenizer.eos_token_id
        # Without padding or positions, and by the head's own product.
        states = model.model.base_model(torch.tensor([prompt + completion])).last_hidden_state[0, -1]
        assert float(states @ model.model.score.weight[0]) - model.mean == pytest.approx(score, abs=1e-5)


@pytest.fixture
def stage(policy_path):
    """A reward model with a random head, to train."""
    config = ModelConfig(path=policy_path)
    model = load_model(config, CPU, AutoModelForSequenceClassification, new_head=True, num_labels=1)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.score.weight)
    return RewardModelStage(model, load_tokenizer(config), torch.float32, [[2, 1, 0], [3, 3, 1, 4, 0]])


def test_saving_and_loading_changes_no_score(stage, tmp_path):
    save_model(stage, tmp_path / "copy")
    model = RewardModel(stage.model, stage.tokenizer)
    again = RewardModel.load(str(tmp_path / "copy"), CPU)
    assert scored(again, "7", "89", "") == scored(model, "7", "89", "") and again.mean == model.mean != 0
    assert sum(again.score(stage.reference)) == pytest.approx(0, abs=1e-5)


def test_micro_batches_add_up_and_agree_with_pairs_in_a_loop(stage):
    rows = [
        Ranked([[2, 1, 3, 0], [2, 1, 4, 4, 0], [2, 1, 0]], [1, 2, 2]),
        Ranked([[5, 1, 0], [5, 1, 6, 0]], [3, 1]),
        Ranked([[7, 8, 1, 7, 0], [7, 8, 1, 8, 0], [7, 8, 1, 0]], [2, 3, 1]),
    ]
    losses, right, margins = [], [], []
    for row in rows:
        scores = torch.cat([score_sequences(stage.model, [tokens]) for tokens in row.sequences])
        size = range(len(row.ranks))
        pairs = [(i, j) for i in size for j in size if row.ranks[i] < row.ranks[j]]
        found = torch.stack([scores[i] - scores[j] for i, j in pairs])
        losses.append(torch.log1p(torch.exp(-found)).mean())
        right.append((found > 0).float().mean())
        margins.append(found.mean())
    expected = torch.stack(losses).mean()
    expected.backward()
    gradient = gradient_of(stage.model)
    for tokens in (1, 28, 99):
        stage.model.zero_grad()
        numbers = measure(stage, rows, MicroBatches(tokens), backward=True)
        assert numbers["loss"] == pytest.approx(expected.item(), rel=1e-5)
        assert numbers["accuracy"] == pytest.approx(torch.stack(right).mean().item())
        assert numbers["margin"] == pytest.approx(torch.stack(margins).mean().item(), rel=1e-4)
        assert_gradient(gradient_of(stage.model), gradient, 1e-5)


def test_pairs_and_a_reference_of_its_own(settings, write_rows, tmp_path):
    path = write_rows([{"prompt": "12=", "chosen": "77", "rejected": text} for text in ("8", "9", "89", "98")])
    reference = write_rows([{"prompt": "12=", "completion": text} for text in ("77", "7")], "reference.jsonl")
    data = {"reference_path": str(reference)}
    summary = train(RewardModelConfig.model_validate(settings(path, data=data, training={"epochs": 10})))
    assert summary["accuracy"] == 1
    model = RewardModel.load(str(tmp_path / "run" / "model"), CPU)
    scores = scored(model, "77", "7")
    assert sum(scores) == pytest.approx(0, abs=1e-4) and scores[0] != scores[1]
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())[MEAN] == model.mean


def test_other_models_are_refused(policy_path, tmp_path, settings, write_rows):
    with pytest.raises(UserError, match="expected a sequence classifier, got Qwen3ForCausalLM"):
        RewardModel.load(policy_path, CPU)
    config = ModelConfig(path=policy_path)
    two = load_model(config, CPU, AutoModelForSequenceClassification, new_head=True, num_labels=2)
    two.save_pretrained(tmp_path / "two")
    load_tokenizer(config).save_pretrained(tmp_path / "two")
    with pytest.raises(UserError, match=r"expected one score \(num_labels = 1\), got 2"):
        RewardModel.load(str(tmp_path / "two"), CPU)
    rows, bert = write_rows(ranked_rows(2)), write_rows([MODEL | {"model_type": "bert"}], "bert.json")
    model = {"config": str(bert), "tokenizer": policy_path}
    with pytest.raises(UserError, match='expected a linear head called "score", which BertForSequenceClassification'):
        train(RewardModelConfig.model_validate(settings(rows, model=model)))
    with pytest.raises(ValueError, match=r"model\.lora_rank: a reward model trains all its weights"):
        RewardModelConfig.model_validate(settings(rows, model={"path": policy_path, "lora_rank": 2}))
    with pytest.raises(ValueError, match=r"model\.logits_dtype: a reward model has no logits over a vocabulary"):
        RewardModelConfig.model_validate(settings(rows, model={"path": policy_path, "logits_dtype": "float32"}))


def test_a_completion_beyond_the_context_is_an_error(stage):
    model = RewardModel(stage.model, stage.tokenizer)
    with pytest.raises(UserError, match=r"data:3: the prompt and its completion have 44 tokens, but .* ends at 32"):
        model([Example("12=", {}, [], "data:3")], ["7" * 40])
