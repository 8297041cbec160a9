"""Decoder and head are used only while their model is called, and read then: FSDP2 gathers parameters for that time."""

import pytest
import torch
from rollouts import LENGTHS, PROMPTS, dense, make_rollout
from teachers import save_teacher
from transformers import set_seed

import fastrl
from fastrl.models.patching import replaced
from fastrl.training.batches.distillation import Distillation
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import rollout_logprobs
from fastrl.training.config.sections import ModelConfig, TeacherConfig
from fastrl.training.config.stages import TokenTrainingConfig
from fastrl.training.models.policy import Policy
from fastrl.training.models.teacher import load_teacher
from fastrl.training.rl.evaluation import evaluate
from fastrl.training.rl.run import make_run
from fastrl.training.rl.train import take_step
from fastrl.training.stages.dpo import Pair, PreferenceStage
from fastrl.training.stages.loop import measure
from fastrl.training.stages.rows import Tokens
from fastrl.training.stages.sft import SFT

ROWS = [Tokens([2, 3], [4, 5, 0]), Tokens([4], [6, 0]), Tokens([5, 6, 7], [8, 9, 10, 0])]


@pytest.fixture
def guard(monkeypatch):
    """Let a model's head have its numbers, and its decoder run, in calls of the model alone; and no backward there."""

    def guard(model, decoder, head):
        weight, calls = head.weight, []

        def enter(*_):
            calls.append(model)
            head.weight = weight

        def leave(*_):
            calls.pop()
            if not calls:
                head.weight = torch.nn.Parameter(torch.full_like(weight, torch.nan), requires_grad=False)

        def inside(*_):
            assert calls, f"the decoder of {type(model).__name__} runs outside of its model's calls"

        def outside(*_):
            assert not calls, f"a backward runs in a call of {type(model).__name__}"

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave, always_call=True)
        if decoder is not None:
            decoder.register_forward_pre_hook(inside)
        if weight.requires_grad:
            weight.register_hook(outside)
        enter(), leave()
        return calls

    compute = Policy.compute

    def as_call(policy, function, *states):
        def call(*states):
            with replaced(policy.model, "forward", function):
                return policy.model(*states)

        return compute(policy, call, *states)

    monkeypatch.setattr(Policy, "compute", as_call)
    return guard


def guard_policies(guard, *policies):
    for policy in policies:
        guard(policy.model, policy.decoder, policy.model.get_output_embeddings())


@pytest.mark.parametrize("shared", [False, True], ids=["own critic", "shared critic"])
def test_a_step_and_an_evaluation(make_config, guard, tmp_path, shared):
    text = tmp_path / "text.txt"
    text.write_text("1234567890" * 4)
    config = make_config(
        model={"dtype": "bfloat16"},
        advantages={"estimator": "gae"},
        critic={"shared": shared},
        kl={"coef": 0.1},
        distillation={"teacher": save_teacher(tmp_path / "teacher"), "policy_coef": 1.0, "form": "top-k", "top_k": 3},
        pretraining={"path": str(text), "coef": 0.5, "batch_size": 2, "length": 8},
        rollout={"prompts_per_step": 2, "max_new_tokens": 4},
        training={"micro_batch_tokens": 24},
    )
    found = []
    for guarded in (False, True):
        set_seed(0)
        run = make_run(config)
        if guarded:
            guard_policies(guard, run.models.policy, run.models.reference, run.loss.distillation.teacher)
            guard(run.models.critic, run.models.critic.decoder, run.models.critic.head)
        run.step, run.data.held_out = 1, run.data.held_out[:4]
        found.append(evaluate(run) | take_step(run)[0])
    first, second = ({k: x for k, x in numbers.items() if not k.startswith(("time/", "memory/"))} for numbers in found)
    assert {"kl", "divergence", "value_loss", "pretraining_loss", "eval/divergence"} <= first.keys()
    assert second == pytest.approx(first, rel=1e-6, nan_ok=True)


def test_fine_tuning_and_preferences(policy, guard, tmp_path):
    settings = TeacherConfig(teacher=save_teacher(tmp_path / "teacher"), coef=0.5)
    teacher = load_teacher(settings, ModelConfig(path=settings.teacher), policy, False)
    training = TokenTrainingConfig()
    found = []
    for guarded in (False, True):
        if guarded:
            guard_policies(guard, policy, teacher)
        numbers = measure(SFT(policy, training, Distillation(teacher, settings)), ROWS, MicroBatches(24), backward=True)
        stage = PreferenceStage(policy, training, fastrl.PREFERENCES["DPO"]())
        pairs = [Pair(row, Tokens(row.prompt, [3, 0])) for row in ROWS]
        pairs = stage.attach(pairs, stage.before(pairs, MicroBatches(48)))
        found.append([*numbers.values(), *measure(stage, pairs, MicroBatches(48), backward=True).values()])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@torch.no_grad()
def test_new_parameters_are_the_ones_that_count(policy):
    rollout = make_rollout(PROMPTS, LENGTHS, sets=False)
    before = rollout_logprobs(policy, rollout, 1.0, MicroBatches(None))
    policy.model.load_state_dict({k: 1.5 * x for k, x in policy.model.state_dict().items()}, assign=True)
    after = rollout_logprobs(policy, rollout, 1.0, MicroBatches(None))
    torch.testing.assert_close(after.double(), dense(policy, rollout)[0], rtol=0, atol=1e-4)
    assert float((after - before).abs().max()) > 0.1
