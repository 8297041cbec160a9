"""Distillation on the data: the loss and its gradient are dense float64's, and the model moves towards the teacher."""

import copy

import pytest
import torch
from digit_models import TOKENIZER, assert_gradient, gradient_of, narrowed
from mistakes import error_of
from run_files import records
from teachers import exact_divergence, rename_token, save_teacher

import fastrl.training.models.model as loading
from fastrl.base.errors import UserError
from fastrl.training.batches.distillation import Distillation
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.config.sections import ModelConfig
from fastrl.training.config.stages import DistillationConfig, SFTConfig, TokenTrainingConfig
from fastrl.training.models.policy import load_policy
from fastrl.training.models.teacher import load_teacher
from fastrl.training.parallel.machine import cpu_threads
from fastrl.training.stages.loop import measure
from fastrl.training.stages.rows import Tokens
from fastrl.training.stages.sft import SFT, train

ROWS = [
    Tokens([2, 3, 1], [3, 2, 0]),
    Tokens([4, 1], [0]),
    Tokens([5, 6, 7, 8, 1], [8, 7, 6, 5, 0]),
    Tokens([9, 10, 1], [10, 9, 11, 3, 2, 0]),
]


@pytest.fixture
def teacher(tmp_path):
    """A teacher's directory."""
    return save_teacher(tmp_path / "teacher")


def by_hand(policy, teacher, settings):
    """Gradient, loss, cross-entropy and divergence in float64 on whole logits, a row at a time."""
    student, frozen = (copy.deepcopy(model.model).double().requires_grad_(True) for model in (policy, teacher))
    entropies, divergences = [], []
    for row in ROWS:
        both = [model(torch.tensor([row.all])).logits[0, len(row.prompt) - 1 : -1] for model in (student, frozen)]
        entropies.append(-both[0].log_softmax(-1).gather(-1, torch.tensor(row.completion)[:, None])[:, 0])
        size = min(logits.shape[-1] for logits in both)
        log_p, log_q = (logits[:, :size].log_softmax(-1) for logits in both)
        divergences.append(exact_divergence(log_p, log_q.detach(), settings.kind, settings.beta))
    entropy, divergence = torch.cat(entropies).mean(), torch.cat(divergences).mean()
    loss = settings.coef * divergence + (1 - settings.coef) * entropy
    found = torch.autograd.grad(loss, list(student.parameters()))
    return torch.cat([g.flatten() for g in found]), *(float(x.detach()) for x in (loss, entropy, divergence))


@pytest.mark.parametrize(
    ("kind", "coef", "padding"),
    [("forward_kl", 1.0, (0, 0)), ("reverse_kl", 0.4, (0, 0)), ("jsd", 0.4, (4, 0)), ("jsd", 0.4, (0, 4))],
)
def test_the_gradient_is_dense_float64_autograds_however_it_is_cut_up(tmp_path, kind, coef, padding):
    torch.manual_seed(0)
    student = ModelConfig(
        config=narrowed(tmp_path, initializer_range=0.2, vocab_size=12 + padding[0]), tokenizer=TOKENIZER
    )
    policy = load_policy(student, torch.device("cpu"))
    teacher = save_teacher(tmp_path / "teacher", vocab_size=12 + padding[1])
    settings = DistillationConfig(teacher=teacher, kind=kind, beta=0.3, coef=coef)
    frozen = load_teacher(settings, ModelConfig(path=teacher), policy, packing=True)
    expected, loss, entropy, divergence = by_hand(policy, frozen, settings)
    for packing, tokens in ((False, 99), (False, 1), (True, 20), (True, 99)):
        policy.model.zero_grad()
        distillation = Distillation(frozen, settings, packing=packing)
        stage = SFT(policy, TokenTrainingConfig(packing=packing), distillation)
        numbers = measure(stage, ROWS, MicroBatches(tokens, packing), backward=True)
        names = {"loss": loss, "tokens": 15, "divergence": divergence}
        names |= {} if coef == 1 else {"cross_entropy": entropy}
        assert numbers == pytest.approx(names, rel=1e-5)
        assert_gradient(gradient_of(policy.model).double(), expected, 4e-6, rtol=1e-4)


def test_the_model_moves_towards_the_teacher(settings, write_rows, tmp_path):
    """It ends at 0.1 of the divergence that it begins with, and on held-out rows at 0.3."""
    teacher = save_teacher(tmp_path / "soft", initializer_range=0.3)
    numbers = [f"{n:02d}" for n in range(100)]
    rows, held_out = (
        [{"prompt": f"{n}=", "completion": n[::-1]} for n in part] for part in (numbers[::2], numbers[1::2])
    )
    data = {"eval_path": str(write_rows(held_out, "eval.jsonl"))}
    distillation, training = {"teacher": teacher}, {"epochs": 8, "batch_size": 10, "packing": True}
    tables = settings(write_rows(rows), data=data, distillation=distillation, training=training)
    with cpu_threads(1):
        summary = train(SFTConfig.model_validate(tables))
    first = records(tmp_path / "run")[0]
    assert first["divergence"] > 0.1
    assert summary["divergence"] < 0.3 * first["divergence"] and summary["eval/divergence"] < 0.5 * first["divergence"]
    assert summary["loss"] == pytest.approx(summary["divergence"], rel=1e-5) and "cross_entropy" not in summary
    saved = {path.name for path in (tmp_path / "run" / "checkpoints" / "step-000040").iterdir()}
    assert {name for name in saved if name.endswith(".safetensors")} == {
        "model.safetensors",
        "training_state.safetensors",
    }


def test_mistakes(settings, write_rows, teacher, tmp_path, monkeypatch):
    path = write_rows([{"prompt": "12=", "completion": "21"}])

    def config(**fields):
        return SFTConfig.model_validate(settings(path, distillation={"teacher": teacher} | fields))

    for fields, message in (
        ({"coef": 1.5}, "distillation.coef\n.*less than or equal to 1"),
        ({"coef": 0.0}, "distillation.coef\n.*greater than 0"),
        ({"beta": 1.0}, "distillation.beta\n.*less than 1"),
        ({"form": "sampled"}, "distillation.form\n.*Extra inputs are not permitted"),
        ({"teacher": str(tmp_path / "run" / "model")}, r"distillation\.teacher: .* lies in logging\.output_dir"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**fields)
    short = save_teacher(tmp_path / "short", max_position_embeddings=4)
    told = error_of(train, config(teacher=short))
    assert "has 6 tokens, expected at most 4 (training.max_length and the context of the model or its teacher)" in told
    monkeypatch.setattr(loading, "load_weights", None)
    renamed = tmp_path / "renamed"
    save_teacher(renamed)
    rename_token(renamed, "9", "nine")
    with pytest.raises(
        UserError,
        match=r"distillation\.teacher: .*renamed: expected the tokenizer of .* '9' has none, expected the id 11",
    ):
        train(config(teacher=str(renamed)))
    smaller = save_teacher(tmp_path / "smaller", vocab_size=11)
    assert error_of(train, config(teacher=smaller)) == (
        f"distillation.teacher: {smaller}: the tokenizer has a token id 11, but the model's vocabulary ends at 10"
    )


def test_the_smallest_budget_that_is_named_is_enough_for_the_run(example, tmp_path, monkeypatch):
    teachers = [save_teacher(tmp_path / str(size), hidden_size=size) for size in (24, 240)]

    def config(budget, teacher, coef=1.0):
        tables = {
            "model": {"config": str(example / "model.json"), "tokenizer": TOKENIZER},
            "data": {"path": str(example.parent / "stages" / "sft.jsonl")},
            "distillation": {"teacher": teacher, "coef": coef},
            "logging": {"output_dir": str(tmp_path / "run"), "tensorboard": False},
            "training": {"device": "cpu", "threads": 1, "batch_size": 100, "memory_budget": str(budget)},
        }
        return SFTConfig.model_validate(tables)

    def smallest(*arguments):
        error = error_of(train, config(*arguments))
        assert error.startswith("training.memory_budget: too small for the divergence, ")
        return int(error.split("the smallest possible is ")[1].split()[0])

    needed = smallest(1000, teachers[1])
    enough = smallest(needed, teachers[1])  # for the rows, which are read after the model
    assert enough > needed > smallest(1000, teachers[0])
    assert train(config(enough, teachers[1], 0.5))["loss"] > 0
