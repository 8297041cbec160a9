"""What is saved beside weights: as it was loaded, and found out before the first step if it cannot be."""

import json

import pytest
from digit_models import EXAMPLE, MODEL, TOKENIZER
from mistakes import error_of
from places import EXAMPLES
from run_files import config_of
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from fastrl.training.config.train import Config
from fastrl.training.rl import train as rl
from fastrl.training.stages import dpo, reward_model, sft

STAGES = {"sft": sft, "dpo": dpo, "reward_model": reward_model}
UNSAVABLE = [  # transformers takes it when it loads a model, and some of its releases do not save it
    {"eos_token_id": 0, "pad_token_id": 0, "temperature": 0.9, "top_p": 0.6},
    {"do_sample": False, "temperature": 1e-06},
    {"pad_token_id": -1, "early_stopping": True, "output_scores": True},
]


@pytest.fixture
def command(tmp_path):
    """A command's function, to be called without arguments, for a run of a step on a saved model."""
    path, output = tmp_path / "saved", tmp_path / "run"
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(path)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(path)
    shared = {"training": {"device": "cpu", "threads": 1}, "logging": {"output_dir": str(output), "tensorboard": False}}

    def command(name, generation=None, **model):
        if generation is not None:
            (path / "generation_config.json").write_text(json.dumps(generation))
        tables = shared | {"model": {"path": str(path), **model}}
        if name == "train":
            tables |= {
                "data": {"path": str(EXAMPLE / "train.jsonl")},
                "objective": {"name": "grpo"},
                "reward": {"function": "fastrl.rewards.exact"},
                "rollout": {"prompts_per_step": 1, "num_generations": 2, "max_new_tokens": 4},
                "training": shared["training"] | {"steps": 1},
            }
            return lambda: rl.train(Config.model_validate(tables))
        rows = tmp_path / "rows.jsonl"
        with (EXAMPLES / "stages" / f"{name}.jsonl").open() as file:
            rows.write_text("".join(next(file) for _ in range(2)))
        tables |= {"data": {"path": str(rows)}, "training": shared["training"] | {"epochs": 1}}
        return lambda: STAGES[name].train(config_of(STAGES[name]).model_validate(tables))

    return command


@pytest.mark.parametrize("generation", UNSAVABLE)
@pytest.mark.parametrize(("name", "lora"), [("train", None), ("sft", None), ("sft", 2), ("dpo", None)])
def test_a_generation_config_is_saved_as_it_was_loaded(command, tmp_path, generation, name, lora):
    if lora is not None:
        pytest.importorskip("peft")
    command(name, generation, **({} if lora is None else {"lora_rank": lora}))()
    saved = sorted((tmp_path / "run").rglob("generation_config.json"))
    assert len(saved) == (2 if lora is None and name != "train" else 1)  # checkpoint and model
    for file in saved:
        found = json.loads(file.read_text())
        assert {field: found[field] for field in generation} == generation
        assert found.keys() <= generation.keys() | {"transformers_version", "eos_token_id"}


@pytest.mark.parametrize("name", ["train", *STAGES])
@pytest.mark.parametrize("what", ["tokenizer", "config"])
def test_what_cannot_be_saved_is_said_before_the_first_step(command, tmp_path, monkeypatch, name, what):
    def fails(*args, **kwargs):
        raise TypeError("Object of type set\nis not JSON serializable")

    run = command(name)
    owner, method = {
        "tokenizer": (PreTrainedTokenizerBase, "save_pretrained"),
        "config": (LlamaConfig, "to_json_file"),
    }[what]
    monkeypatch.setattr(owner, method, fails)
    assert error_of(run) == (
        f"{tmp_path / 'saved'}: cannot be saved in {tmp_path / 'run'}, so what is trained would be lost: TypeError: "
        "Object of type set is not JSON serializable"
    )
    assert not (tmp_path / "run").exists()


def test_a_folder_that_nothing_can_be_written_to_is_said_too(command, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    run = command("sft")
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    assert error_of(run) == (
        f"{tmp_path / 'saved'}: cannot be saved in {tmp_path / 'run'}, so what is trained would be lost: OSError: "
        "[Errno 28] No space left on device"
    )
