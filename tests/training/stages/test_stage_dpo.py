"""Preferences: DPO's first loss is log 2, every gradient is a float64 oracle's, and accuracy rises."""

import copy
import json
import math
import shutil

import pytest
import torch
from digit_models import add_noise, assert_gradient, gradient_of
from exact_preferences import exact_preference
from mistakes import error_of
from preferences import PREFERENCES
from run_files import records

import fastrl
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.config.sections import ModelConfig
from fastrl.training.config.stages import DPOConfig, TokenTrainingConfig
from fastrl.training.models.policy import load_policy
from fastrl.training.run.checksums import CHECKSUMS, write_checksums
from fastrl.training.stages.dpo import Pair, PreferenceStage, train
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
SLOW = pytest.mark.slow


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
@pytest.mark.parametrize("tokens", [1, 28, 99])
def test_the_first_loss_is_log_2_and_the_gradient_is_the_oracles(policy, packing, tokens):
    trained = stage(policy, packing)
    pairs = trained.attach(PAIRS, trained.before(PAIRS, MicroBatches(tokens, packing)))
    first = measure(trained, pairs, MicroBatches(42, packing), backward=False)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["tokens"] == sum(len(p.chosen.completion) + len(p.rejected.completion) for p in PAIRS)
    before = copy.deepcopy(policy.model)
    torch.manual_seed(1)
    add_noise(0.05, policy.model)
    loss, expected = oracle(before, policy.model)
    assert abs(loss - math.log(2)) > 0.01  # it has moved far enough to tell a wrong reference
    policy.model.zero_grad()
    numbers = measure(trained, pairs, MicroBatches(tokens, packing), backward=True)
    assert numbers["loss"] == pytest.approx(loss, rel=1e-5)
    assert numbers["margin"] == pytest.approx(numbers["chosen_reward"] - numbers["rejected_reward"], abs=1e-5)
    # Log-probabilities of about -20, in float32, are what the pairs' weights come from.
    assert_gradient(gradient_of(policy.model), expected, 1e-5)


def test_the_reference_of_adapters_is_the_model_without_them(policy, policy_path):
    pytest.importorskip("peft")
    expected = stage(policy).before(PAIRS, MicroBatches(None))
    config = ModelConfig(path=policy_path, lora_rank=2, lora_targets=["q_proj", "gate_proj"])
    adapted = load_policy(config, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter)
    torch.testing.assert_close(stage(adapted).before(PAIRS, MicroBatches(None)), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "name", [n if n in ("IPO", "CPO", "ORPO") else pytest.param(n, marks=SLOW) for n in PREFERENCES]
)
def test_any_preference_in_any_micro_batches(policy, name, packing):
    """Loss and gradient of an update, its likelihood term averaged over all of its tokens, whatever it is cut into."""
    objective = PREFERENCES[name]
    trained = stage(policy, packing, objective)
    before = trained.before(PAIRS, MicroBatches(28, packing))
    assert (before is None) == (not objective.reference)
    pairs = PAIRS if before is None else trained.attach(PAIRS, before)
    lengths = torch.tensor([[len(p.chosen.completion), len(p.rejected.completion)] for p in PAIRS]).T
    torch.manual_seed(1)
    add_noise(0.05, policy.model)
    moved = copy.deepcopy(policy.model).double()
    sums = torch.stack([torch.stack([logprob(moved, t) for t in (p.chosen, p.rejected)]) for p in PAIRS], 1)
    ref = torch.zeros(2, 3) if before is None else before.T
    loss, _, rewards = exact_preference(objective, *sums, *ref.double(), lengths)
    moved.zero_grad()
    loss.backward()
    policy.model.zero_grad()
    numbers = measure(trained, pairs, MicroBatches(28, packing), backward=True)
    assert numbers["loss"] == pytest.approx(loss.item(), rel=2e-5)
    assert numbers["margin"] == pytest.approx((rewards[0] - rewards[1]).mean().item(), rel=1e-4, abs=1e-5)
    assert ("nll" in numbers) == (objective.nll_coef > 0)
    # SPPO's slopes are differences of the size of 1 / beta.
    assert_gradient(gradient_of(policy.model), gradient_of(moved), 5e-5)


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
        training={"epochs": 6, "batch_size": 12, "micro_batch_tokens": 70},
    )
    summary = train(DPOConfig.model_validate(tables))
    first, *_ = records(tmp_path / "run")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5) and first["margin"] == pytest.approx(0, abs=1e-5)
    assert summary["accuracy"] > 0.85 and summary["margin"] > 0.1 and summary["loss"] < 0.65
    assert summary["eval/accuracy"] > 0.5 and "eval/loss" in summary


#: Tables [loss] of other kinds: with a bound on the margin, of means, without a reference, with a likelihood.
LEARNING = [
    {"name": "ipo", "beta": 0.2},
    {"name": "SimPO", "gamma": 0.5},
    {"name": "orpo", "beta": 1.0},
    {"name": "apozero", "beta": 1.0},
    {"name": "cpo", "nll_coef": 0.3},
]


@pytest.mark.parametrize("loss", [LEARNING[0], *(pytest.param(x, marks=SLOW) for x in LEARNING[1:])], ids=str)
def test_accuracy_rises_with_other_preferences(settings, write_rows, tmp_path, policy_path, loss):
    rows = [{"prompt": f"{n:02d}=", "chosen": f"{n:02d}"[::-1], "rejected": f"{(n + 7) % 100:02d}"} for n in range(48)]
    tables = settings(
        write_rows(rows),
        model={"path": policy_path},
        optimizer={"lr": 3e-3},
        training={"epochs": 6, "batch_size": 12, "micro_batch_tokens": 70},
        loss=loss,
    )
    summary = train(DPOConfig.model_validate(tables))
    first, *_ = records(tmp_path / "run")
    assert summary["accuracy"] > 0.85 > first["accuracy"] and summary["loss"] < first["loss"]
    assert ("nll" in summary) == (loss["name"] in ("orpo", "cpo"))


def test_a_run_without_a_reference_keeps_none(settings, write_rows, policy_path, tmp_path, monkeypatch):
    """Nor does it compute one, and it resumes without."""
    monkeypatch.setattr("fastrl.training.stages.dpo.rollout_logprobs", None)
    rows = [{"prompt": f"{n}=", "chosen": "21", "rejected": "22"} for n in range(4)]
    tables = settings(
        write_rows(rows), model={"path": policy_path}, loss={"name": "simpo"}, training={"epochs": 2, "batch_size": 4}
    )
    tables["logging"] |= {"checkpoint_every": 1}
    assert train(DPOConfig.model_validate(tables))["steps"] == 2
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    assert train(DPOConfig.model_validate(tables), resume=True)["steps"] == 2


def test_the_table_names_a_preset_and_its_options(settings, tmp_path):
    def built(**loss):
        return DPOConfig.model_validate(settings(tmp_path / "rows.jsonl", loss=loss)).loss.build()

    assert built() == fastrl.DPO() and built(beta=0.5) == fastrl.DPO(beta=0.5)
    assert built(name="SIMPO", presets={"simpo": {"beta": 3.0}}) == fastrl.SimPO(beta=3.0)
    assert built(name="ipo", average=False) == fastrl.IPO(average=False)
    assert all(built(name=name) == make() for name, make in fastrl.PREFERENCES.items())
    for loss, message in (
        ({"name": "dppo"}, "name: expected one of dpo, ipo, hinge"),
        ({"formula": "sppo"}, "formula"),
        ({"presets": {"ipo": {"alpha": 1}}}, "presets.ipo.alpha: ipo has no such option; it has"),
        ({"gamma": 0.5}, r"gamma: dpo has no such option; it has .*; it is one of simpo "),
        ({"name": "ipo", "label_smoothing": 0.1}, "label_smoothing is not read by formula='ipo'"),
        ({"beta": -1}, "Preference.beta must be finite and > 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            built(**loss)


def test_the_table_of_a_checkpoint_from_before_is_the_same(settings, write_rows, policy_path, tmp_path):
    """It held a beta alone, given or not; another one is still another run."""
    path = write_rows([{"prompt": f"{n}=", "chosen": "21", "rejected": "22"} for n in range(4)])
    tables = settings(path, model={"path": policy_path}, training={"epochs": 2, "batch_size": 4})
    tables["logging"] |= {"checkpoint_every": 1}
    train(DPOConfig.model_validate(tables))
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-000002")
    state = checkpoints / "step-000001" / "training_state.json"
    numbers = json.loads(state.read_text())
    assert numbers["config"]["loss"]["beta"] == 0.1
    numbers["config"]["loss"] = {"beta": 0.1}
    state.write_text(json.dumps(numbers))
    (state.parent / CHECKSUMS).unlink()
    write_checksums(state.parent)
    for loss, changed in (
        ({"beta": 0.2}, "loss.beta was 0.1 and is now 0.2"),
        ({"name": "ipo"}, "loss.name was 'dpo'"),
    ):
        config = DPOConfig.model_validate(tables | {"loss": loss})
        assert changed in error_of(train, config, True)
    assert train(DPOConfig.model_validate(tables), resume=True)["steps"] == 2
