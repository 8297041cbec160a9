"""A memory budget that is too small is said before the model is loaded, and the one that is named is enough."""

import re
from types import SimpleNamespace

import pytest
import torch
from mistakes import error_of
from run_files import config_of
from teachers import save_teacher

import fastrl.training.batches.loss_calls as module
import fastrl.training.models.model as loading
from fastrl.cli import main
from fastrl.planning.plans import applicable, least_budget, observer
from fastrl.training.batches.loss_calls import loss_plans
from fastrl.training.rl.forecast import loss_calls
from fastrl.training.rl.run import make_run
from fastrl.training.rl.train import take_step, train
from fastrl.training.stages import dpo, loop, sft

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


#: Of the losses over the vocabulary: what each one's plan depends on, beside sizes.
CALLS = CASES | {
    "a divergence": {"distillation": {"form": "full", "policy_coef": 0.5}},
    "a divergence alone": {"distillation": {"form": "full"}, "training": {"minibatches": 1}},
    "a teacher's entries": {"distillation": {"form": "top-k", "top_k": 3}},
    "a teacher of samples": {"distillation": {"form": "sampled"}, "rollout": {"top_k": 5}},
    "a KL in the reward": {"kl": {"place": "reward", "kind": "k1"}, "training": {"minibatches": 1}},
    "a KL without weight": {"kl": {"coef": 0.0}, "training": {"minibatches": 1}},
}


def smallest(call, *arguments, expected=r"training\.memory_budget: too small for "):
    """The budget that the error names, of a call that asks for too small a one."""
    error = error_of(call, *arguments)
    assert re.match(expected, error), error
    return int(re.search(r"the smallest possible is (\d+) ", error)[1])


@pytest.fixture
def make_tables(make_config, tmp_path):
    """A config from some of its tables, which may lack the paths of a text and of a teacher."""
    (tmp_path / "text.txt").write_text("0123456789=" * 200)
    teacher = save_teacher(tmp_path / "teacher")
    paths = {"pretraining": {"path": str(tmp_path / "text.txt")}, "distillation": {"teacher": teacher}}

    def make(tables, **training):
        training = {"steps": 1, "minibatches": 2, "device": "cpu", "threads": 1} | tables.get("training", {}) | training
        tables = {name: fields | paths.get(name, {}) for name, fields in tables.items()}
        return make_config(**tables | {"training": training, "evaluation": {"every": None}})

    return make


@pytest.fixture
def make_stage(example, tmp_path):
    """A stage's config, with fields of its training and further tables."""

    def make(stage, distillation=None, **training):
        name = stage.__name__.rpartition(".")[2]
        tables = {
            "model": {"config": str(example / "model.json"), "tokenizer": str(example / "tokenizer")},
            "data": {"path": str(example.parent / "stages" / f"{name}.jsonl")},
            "logging": {"output_dir": str(tmp_path / "run"), "tensorboard": False},
            "training": {"device": "cpu", "threads": 1} | training,
        }
        return config_of(stage).model_validate(tables | ({"distillation": distillation} if distillation else {}))

    return make


@pytest.mark.parametrize("tables", CASES.values(), ids=CASES)
def test_the_smallest_that_is_named_is_enough_for_the_run(make_tables, tmp_path, monkeypatch, tables):
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_weights", None)
        told = r"training\.memory_budget: too small for .*: got 1000 bytes"
        named = smallest(train, make_tables(tables, memory_budget="1000"), expected=told)
        assert smallest(train, make_tables(tables, memory_budget=str(named - 1))) == named
    assert not (tmp_path / "run").exists()
    assert train(make_tables(tables, memory_budget=str(named)))["loss"] is not None


def calls_of(function, *arguments):
    """What plans were chosen for, of the losses that the function calls."""
    calls = []
    before = observer.set(lambda plan: calls.append(plan.call))
    try:
        function(*arguments)
    finally:
        observer.reset(before)
    return calls


def largest(calls):
    """The smallest budget of the largest call of each kind."""
    found = {}
    for call in calls:
        recorded = call.support_entries > 0  # no plan keeps slopes there
        slopes = 0 if recorded else call.slopes
        kind = (call.needs, call.scope, slopes, call.hidden, call.teacher, call.gathered > 0, recorded)
        least = min(least_budget(call, name) for name in applicable(call))
        found[kind] = max(found.get(kind, 0), least)
    return found


@pytest.mark.parametrize("tables", CALLS.values(), ids=CALLS)
def test_the_calls_that_a_config_tells_are_those_of_the_run(make_tables, tables):
    """In a step; and they take no more than was told."""
    run = make_run(make_tables(tables))
    run.step, config = 1, run.config
    forecast = loss_calls(config, run.loss.objective, config.training.micro_batch_tokens or 10**9)
    plans = loss_plans(config.training, config.model, torch.device("cpu"), forecast)
    told, made = largest(plan.call for plan in plans), largest(calls_of(take_step, run))
    assert told.keys() == made.keys()
    assert all(told[kind] >= made[kind] for kind in told)


@pytest.mark.parametrize("coef", [None, 0.5, 1.0], ids=["no teacher", "both losses", "a teacher alone"])
def test_the_calls_that_the_rows_tell_are_those_of_fine_tuning(make_stage, tmp_path, monkeypatch, coef):
    """Of those with gradients: before the first update the model is checked."""
    plans, forecast = [], loop.loss_plans
    monkeypatch.setattr(loop, "loss_plans", lambda *args: plans.extend(found := forecast(*args)) or found)
    tables = {} if coef is None else {"distillation": {"teacher": save_teacher(tmp_path / "teacher"), "coef": coef}}
    calls = [call for call in calls_of(sft.train, make_stage(sft, batch_size=100, **tables)) if any(call.needs)]
    told, made = largest(plan.call for plan in plans), largest(calls)
    assert told.keys() == made.keys()
    assert all(told[kind] >= made[kind] for kind in told)


def test_what_the_models_config_does_not_say_is_asked_of_the_model(make_config, monkeypatch):
    loaded, load = [], loading.load_weights

    def spy(*args, **kwargs):
        loaded.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr(loading, "load_weights", spy)
    said = error_of(train, make_config(training={"memory_budget": "1000"}))
    assert said.startswith("training.memory_budget: too small") and not loaded
    monkeypatch.setattr(module, "load_config", lambda config: SimpleNamespace(get_text_config=SimpleNamespace))
    assert error_of(train, make_config(training={"memory_budget": "1000"})) == said
    assert len(loaded) == 1


@pytest.mark.parametrize("stage", [sft, dpo])
@pytest.mark.parametrize("packing", [False, True])
def test_the_stages_say_it_before_the_model_and_for_their_rows(make_stage, tmp_path, monkeypatch, stage, packing):
    def run(budget):
        return stage.train(make_stage(stage, batch_size=100, packing=packing, memory_budget=str(budget)))

    told = r"training\.memory_budget: too small for the loss, "
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_weights", None)
        enough_to_load = smallest(run, 1000, expected=told)
    enough = smallest(run, enough_to_load, expected=told)
    assert not (tmp_path / "run").exists()
    assert run(enough)["loss"] > 0


def test_what_no_config_says_is_one_line_too(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "parse_budget", lambda budget: None)
    arguments = ["train", str(example / "config.toml"), "--training.memory_budget", "1000", "--training.device", "cpu"]
    assert main([*arguments, "--logging.output_dir", str(tmp_path), "--logging.tensorboard", "false"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("fastrl: training.memory_budget: memory_budget is too small for ")
