"""A memory budget that is too small is said before the model is loaded, and the one that is named is enough."""

import re
from types import SimpleNamespace

import pytest
from mistakes import error_of
from run_files import config_of

import fastrl.training.batches.loss_calls as loss_calls
import fastrl.training.models.policy as loading
from fastrl.cli import main
from fastrl.training.rl.train import train
from fastrl.training.stages import dpo, sft

CASES = {
    "padded": {},
    "packed": {"training": {"packing": True, "micro_batch_tokens": 70}},
    "one update": {"training": {"minibatches": 1}},
    "a head with autocast": {"model": {"dtype": "bfloat16"}},
    "float32 logits": {"model": {"dtype": "bfloat16", "logits_dtype": "float32"}},
    "a response at a time": {"objective": {"name": "gspo"}},
    "a KL and top-k": {"kl": {"kind": "k3", "coef": 0.1}, "rollout": {"top_k": 5, "top_p": 0.9}},
    "score norms, on-policy": {
        "advantages": {"estimator": "optimal_token_baseline"},
        "training": {"minibatches": 1, "micro_batch_tokens": 70},
    },
    "text": {"pretraining": {"length": 64, "batch_size": 32}},
}


def smallest(call, *arguments, expected=r"training\.memory_budget: too small for "):
    """The budget that the error names, of a call that asks for too small a one."""
    error = error_of(call, *arguments)
    assert re.match(expected, error), error
    return int(re.search(r"the smallest possible is (\d+) ", error)[1])


@pytest.mark.parametrize("tables", CASES.values(), ids=CASES)
def test_the_smallest_that_is_named_is_enough_for_the_run(make_config, tmp_path, monkeypatch, tables):
    (tmp_path / "text.txt").write_text("0123456789=" * 200)
    if "pretraining" in tables:
        tables = tables | {"pretraining": tables["pretraining"] | {"path": str(tmp_path / "text.txt")}}

    def config(budget):
        training = {"steps": 1, "minibatches": 2, "device": "cpu", "threads": 1, **tables.get("training", {})}
        return make_config(**tables | {"training": training | {"memory_budget": budget}, "evaluation": {"every": None}})

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_weights", None)
        named = smallest(train, config("1000"), expected=r"training\.memory_budget: too small for .*: got 1000 bytes")
        assert smallest(train, config(str(named - 1))) == named
    assert not (tmp_path / "run").exists()
    assert train(config(str(named)))["loss"] is not None


def test_what_the_models_config_does_not_say_is_asked_of_the_model(make_config, monkeypatch):
    loaded, load = [], loading.load_weights

    def spy(*args, **kwargs):
        loaded.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr(loading, "load_weights", spy)
    said = error_of(train, make_config(training={"memory_budget": "1000"}))
    assert said.startswith("training.memory_budget: too small") and not loaded
    monkeypatch.setattr(loss_calls, "load_config", lambda config: SimpleNamespace(get_text_config=SimpleNamespace))
    assert error_of(train, make_config(training={"memory_budget": "1000"})) == said
    assert len(loaded) == 1


@pytest.mark.parametrize("stage", [sft, dpo])
@pytest.mark.parametrize("packing", [False, True])
def test_the_stages_say_it_before_the_model_and_for_their_rows(example, tmp_path, monkeypatch, stage, packing):
    name = stage.__name__.rpartition(".")[2]
    settings = {
        "model": {"config": str(example / "model.json"), "tokenizer": str(example / "tokenizer")},
        "data": {"path": str(example.parent / "stages" / f"{name}.jsonl")},
        "logging": {"output_dir": str(tmp_path / "run"), "tensorboard": False},
    }

    def run(budget):
        training = {"device": "cpu", "threads": 1, "batch_size": 100, "packing": packing, "memory_budget": str(budget)}
        return stage.train(config_of(stage).model_validate(settings | {"training": training}))

    told = r"training\.memory_budget: too small for the loss, "
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_weights", None)
        enough_to_load = smallest(run, 1000, expected=told)
    enough = smallest(run, enough_to_load, expected=told)
    assert not (tmp_path / "run").exists()
    assert run(enough)["loss"] > 0


def test_what_no_config_says_is_one_line_too(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loss_calls, "parse_budget", lambda budget: None)
    arguments = ["train", str(example / "config.toml"), "--training.memory_budget", "1000", "--training.device", "cpu"]
    assert main([*arguments, "--logging.output_dir", str(tmp_path), "--logging.tensorboard", "false"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("fastrl: training.memory_budget: memory_budget is too small for ")
