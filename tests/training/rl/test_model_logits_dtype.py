"""model.logits_dtype: float32 logits in every loss and log-probability of a run."""

from dataclasses import replace

import pytest
import torch
from digit_models import TOKENIZER
from rollouts import LENGTHS, PROMPTS, make_rollout
from teachers import save_teacher

from fastrl.planning import plans
from fastrl.training.batches.distillation import Distillation
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import hidden_states, rollout_logprobs
from fastrl.training.config.sections import TeacherConfig
from fastrl.training.models.policy import reference_of
from fastrl.training.rl.train import train
from fastrl.training.stages import sft

MODEL = {"dtype": "bfloat16", "logits_dtype": "float32"}


@pytest.mark.parametrize("form", ["full", "top-k"])
def test_it_reaches_every_call_of_a_run(make_config, tmp_path, spy, form):
    (tmp_path / "text.txt").write_text("0123456789=" * 200)
    tables = {
        "distillation": {"teacher": save_teacher(tmp_path / "teacher"), "form": form, "top_k": 3, "policy_coef": 0.5},
        "kl": {"kind": "k3", "coef": 0.1},
        "pretraining": {"path": str(tmp_path / "text.txt"), "length": 16, "batch_size": 2},
    }
    calls = spy(plans, "choose", lambda plan, call, *budget: call)
    assert train(make_config(model=MODEL, training={"steps": 1, "threads": 1}, **tables))["loss"] is not None
    calls = [call for call in calls if call.dtype != torch.float32]  # without those of the check before the run
    assert all(call.float32_logits for call in calls)
    assert all(call.teacher.float32_logits for call in calls if call.teacher.hidden)
    kinds = {(call.scope, call.needs.hidden, bool(call.teacher.hidden), bool(call.gathered)) for call in calls}
    assert len(kinds) >= 3  # of statistics, losses and the divergence


def test_it_reaches_the_losses_of_fine_tuning(example, tmp_path, spy):
    tables = {
        "model": {"config": str(example / "model.json"), "tokenizer": TOKENIZER, **MODEL},
        "data": {"path": str(example.parent / "stages" / "sft.jsonl")},
        "distillation": {"teacher": save_teacher(tmp_path / "teacher"), "coef": 0.5},
        "logging": {"output_dir": str(tmp_path / "run"), "tensorboard": False},
        "training": {"device": "cpu", "threads": 1, "batch_size": 200},
    }
    calls = spy(plans, "choose", lambda plan, call, *budget: call)
    assert sft.train(sft.SFTConfig.model_validate(tables))["loss"] > 0
    assert {bool(call.teacher.hidden) for call in calls} == {True, False}
    assert all(call.float32_logits for call in calls)


@torch.no_grad()
def test_a_teachers_likeliest_entries_have_unrounded_logits(make_policy):
    policy = make_policy(MODEL, initializer_range=0.5)
    states = torch.randn(7, policy.head.weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = states.double() @ policy.head.weight.bfloat16().double().t()
    exact = logits.log_softmax(-1).topk(3)

    def found(policy):
        distillation = Distillation(policy, TeacherConfig(teacher="its own"), 1.0, 3)
        return policy.apply_head(distillation._likeliest, states, 3)

    ids, logprobs = found(policy)
    assert ids.tolist() == exact.indices.tolist()
    assert float((logprobs - exact.values).abs().max()) < 1e-5
    _, rounded = found(replace(policy, logits_dtype=None))
    assert float((rounded - exact.values).abs().max()) > 1e-3


@torch.no_grad()
def test_log_probabilities_are_those_of_unrounded_logits(make_policy):
    rollout = make_rollout(PROMPTS, LENGTHS, sets=False)
    policy = make_policy(MODEL, initializer_range=0.5)
    states = hidden_states(policy, rollout, False).bfloat16().double()
    log_p = (states @ policy.head.weight.bfloat16().double().t()).log_softmax(-1)
    exact = log_p.gather(-1, rollout.targets[..., None])[..., 0].where(rollout.mask, 0.0)

    def error(policy):
        return float((rollout_logprobs(policy, rollout, 1.0, MicroBatches(None)) - exact).abs().max())

    assert error(policy) < 1e-5 > error(reference_of(policy))
    assert error(replace(policy, logits_dtype=None)) > 1e-3
