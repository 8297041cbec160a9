"""DPO: the first loss is log 2, the gradient is a float64 oracle's, and accuracy rises."""

import copy
import math

import pytest
import torch
from digit_models import add_noise, assert_gradient, gradient_of
from run_files import records

import fastrl
from fastrl.training.common.policy import load_policy
from fastrl.training.common.sections import ModelConfig
from fastrl.training.stages.config import TokenTrainingConfig
from fastrl.training.stages.dpo import Config, Pair, PreferenceStage, train
from fastrl.training.stages.loop import measure
from fastrl.training.stages.rows import Tokens

PROMPTS = [[2, 3, 1], [4, 1], [5, 6, 7, 8, 1]]
PAIRS = [
    Pair(Tokens(prompt, chosen), Tokens(prompt, rejected))
    for prompt, chosen, rejected in zip(
        PROMPTS, [[3, 2, 0], [4, 0], [8, 0]], [[0], [4, 4, 4, 0], [8, 7, 6, 5, 9, 10, 0]], strict=True
    )
]
BETA = 0.7


def stage(policy, packing=False, objective=None):
    return PreferenceStage(policy, TokenTrainingConfig(packing=packing), objective or fastrl.DPO(BETA))


def logprob(model, tokens):
    """The completion's log-probability from whole logits, in the model's precision."""
    logits = model(torch.tensor([tokens.all])).logits[0, len(tokens.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens.completion)[:, None]).sum()


def oracle(before, after):
    """Loss and gradient in float64 of a policy that has moved from `before` to `after`."""
    before, after = copy.deepcopy(before).double(), copy.deepcopy(after).double()
    after.zero_grad()
    losses = []
    for pair in PAIRS:
        with torch.no_grad():
            reference = logprob(before, pair.chosen) - logprob(before, pair.rejected)
        margin = BETA * (logprob(after, pair.chosen) - logprob(after, pair.rejected) - reference)
        losses.append(torch.log1p(torch.exp(-margin)) / len(PAIRS))
    loss = sum(losses)
    loss.backward()
    return loss.item(), gradient_of(after)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_first_loss_is_log_2_and_the_gradient_is_the_oracles(policy, packing, size):
    trained = stage(policy, packing)
    pairs = trained.attach(PAIRS, trained.before(PAIRS, size))
    first = measure(trained, pairs, 3, backward=False)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["tokens"] == sum(len(p.chosen.completion) + len(p.rejected.completion) for p in PAIRS)
    before = copy.deepcopy(policy.model)
    torch.manual_seed(1)
    add_noise(0.05, policy.model)
    loss, expected = oracle(before, policy.model)
    assert abs(loss - math.log(2)) > 0.01  # it has moved far enough to tell a wrong reference
    policy.model.zero_grad()
    numbers = measure(trained, pairs, size, backward=True)
    assert numbers["loss"] == pytest.approx(loss, rel=1e-5)
    assert numbers["margin"] == pytest.approx(numbers["chosen_reward"] - numbers["rejected_reward"], abs=1e-5)
    # Log-probabilities of about -20, in float32, are what the pairs' weights come from.
    assert_gradient(gradient_of(policy.model), expected, 1e-5)


def test_the_reference_of_adapters_is_the_model_without_them(policy, policy_path):
    pytest.importorskip("peft")
    expected = stage(policy).before(PAIRS, 3)
    config = ModelConfig(path=policy_path, lora_rank=2, lora_targets=["q_proj", "gate_proj"])
    adapted = load_policy(config, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter)
    torch.testing.assert_close(stage(adapted).before(PAIRS, 3), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4}], ids=["weights", "adapters"])
def test_accuracy_rises(settings, write_rows, tmp_path, policy_path, lora):
    if lora:
        pytest.importorskip("peft")
    rows = [{"prompt": f"{n:02d}=", "chosen": f"{n:02d}"[::-1], "rejected": f"{(n + 7) % 100:02d}"} for n in range(64)]
    path = write_rows(rows[:48])
    tables = settings(
        path,
        model={"path": policy_path, **lora},
        data={"eval_path": str(write_rows(rows[48:], "eval.jsonl"))},
        optimizer={"lr": 3e-3},
        training={"epochs": 6, "batch_size": 12, "micro_batch_size": 5},
    )
    summary = train(Config.model_validate(tables))
    first, *_ = records(tmp_path / "run")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5) and first["margin"] == pytest.approx(0, abs=1e-5)
    assert summary["accuracy"] > 0.85 and summary["margin"] > 0.1 and summary["loss"] < 0.65
    assert summary["eval/accuracy"] > 0.5 and "eval/loss" in summary
