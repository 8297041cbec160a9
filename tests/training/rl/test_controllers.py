"""Coefficients that change while training: their rules, that the losses read them, and that a resumed run has them."""

import json
import math

import pytest
import torch
from rollouts import LENGTHS, PROMPTS, gradients, make_rollout, own_logprobs, play
from run_files import repeatable, state, strict_json

import fastrl
from fastrl.base.json_text import to_json
from fastrl.training.config.algorithm import EntropyConfig, KLConfig
from fastrl.training.rl.controllers import AdaptiveKL, LearnedEntropy
from fastrl.training.rl.train import train

CPU = torch.device("cpu")
SCHULMAN = KLConfig(adaptive="schulman", target=0.1, coef=0.2)
RLHF = KLConfig(adaptive="rlhf", target=6.0, horizon=10_000, coef=0.2)
GRPO = {"objective": {"name": "grpo", "presets": {}, "entropy_coef": 0.05}}
FAST = {"schedule": "constant", "warmup_updates": 0, "lr": 1e-2}


# --- the rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.066, 0.5), (0.067, 1), (0.1, 1), (0.149, 1), (0.151, 2), (-0.1, 0.5), (9.0, 2)]
)
def test_schulmans_rule_halves_and_doubles(kl, factor):
    controller = AdaptiveKL(SCHULMAN, CPU)
    controller.update(kl, tokens=100, responses=8)
    assert float(controller.coef) == pytest.approx(0.2 * factor)


@pytest.mark.parametrize(
    ("kl", "error"), [(0.6, 0.0), (0.66, 0.1), (0.57, -0.05), (6.0, 0.2), (0.1, -0.2), (-5.0, -0.2)]
)
def test_the_rlhf_rule_is_proportional_to_a_responses_kl(kl, error):
    """1000 tokens in 100 responses: the KL of a response is ten times that of a token, and the target is 6."""
    controller = AdaptiveKL(RLHF, CPU)
    controller.update(kl, tokens=1000, responses=100)
    assert float(controller.coef) == pytest.approx(0.2 * (1 + error * 100 / 10_000), rel=1e-6)


@pytest.mark.parametrize("config", [SCHULMAN, RLHF, KLConfig(coef=0.2)])
def test_nothing_to_learn_from_changes_nothing(config):
    controller = AdaptiveKL(config, CPU)
    tensor = controller.coef
    for kl, tokens, responses in ((5.0, 0, 0), (math.nan, 10, 2), (math.inf, 10, 2)):
        controller.update(kl, tokens, responses)
    assert controller.coef is tensor and float(tensor) == pytest.approx(0.2)


def test_alpha_moves_towards_the_target_entropy_and_stays_positive():
    """Adam's first step is its learning rate, whatever the gradient's size: a factor of exp(0.1)."""
    for entropy, direction in ((1.5, -1), (0.5, 1)):
        controller = LearnedEntropy(EntropyConfig(target=1.0, lr=0.1), 0.3, CPU)
        assert float(controller.coef) == pytest.approx(0.3)
        controller.update(entropy)
        assert float(controller.coef) == pytest.approx(0.3 * math.exp(0.1 * direction), rel=1e-4)
        for _ in range(200):
            controller.update(entropy)
        assert float(controller.coef) > 0 and (float(controller.coef) > 0.3) == (direction > 0)
    before = controller.coef.clone()
    controller.update(math.nan)
    assert torch.equal(controller.coef, before)


def test_the_gradient_of_alpha_is_autograds():
    """Of `log(alpha) (H - target)` in log alpha, by the moments that Adam keeps of it."""
    controller = LearnedEntropy(EntropyConfig(target=1.0, lr=0.1), 0.3, CPU)
    logarithm = torch.tensor(math.log(0.3), requires_grad=True)
    (expected,) = torch.autograd.grad(logarithm * (1.5 - 1.0), logarithm)
    controller.update(1.5)
    assert controller.state()["exp_avg"] == pytest.approx(0.1 * float(expected))


@pytest.mark.parametrize("updates", [0, 3])
def test_a_controllers_state_goes_through_json_bit_for_bit(updates):
    """It goes on as the one that was saved: Adam's moments are part of where it stands."""

    def entropy():
        return LearnedEntropy(EntropyConfig(target=1.0, lr=0.1), 0.3, CPU)

    for make, arguments in ((lambda: AdaptiveKL(RLHF, CPU), (0.7, 1000, 100)), (entropy, (1.7,))):
        old, new = make(), make()
        for _ in range(updates):
            old.update(*arguments)
        tensor = new.coef  # the objective's
        new.load(json.loads(json.dumps(old.state())))
        for _ in range(3):
            assert new.state() == old.state() and torch.equal(new.coef, old.coef) and new.coef is tensor
            old.update(*arguments), new.update(*arguments)


# --- in the loss ----------------------------------------------------------------------------------------------------


def test_the_loss_reads_the_tensors_as_they_are(policy, bare_run):
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS))
    kl, entropy = AdaptiveKL(SCHULMAN, CPU), LearnedEntropy(EntropyConfig(target=1.0), 0.3, CPU)
    run = bare_run(policy, fastrl.GRPO(kl=fastrl.KL("k3", kl.coef), entropy_coef=entropy.coef))
    for _ in range(2):
        fixed = fastrl.GRPO(kl_coef=float(kl.coef), entropy_coef=float(entropy.coef))
        found, expected = gradients(run, rollout), gradients(bare_run(policy, fixed), rollout)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-7)
        assert float(found[1]["loss"]) == pytest.approx(float(expected[1]["loss"]), rel=1e-5)
        kl.update(1.0, 10, 2), entropy.update(9.0)
    assert float(kl.coef) == pytest.approx(0.8)


@pytest.mark.parametrize(("target", "factor"), [(1e-12, 2), (1e3, 0.5)])
def test_a_run_adapts_to_the_kl_of_its_last_update(make_config, target, factor):
    """A target below any KL doubles the coefficient each step but the first, whose only update is at KL 0."""
    table = {"adaptive": "schulman", "target": target, "coef": 0.1}
    _, steps = play(make_config(**GRPO, kl=table, optimizer=FAST, training={"steps": 3, "minibatches": 1}))
    assert steps[0]["kl"] < 1e-13 < 1e-9 < steps[1]["kl"] < steps[2]["kl"]
    first = 0.05  # at KL 0 either target is above
    expected = [first, first * factor, first * factor**2]
    assert [numbers["kl_coef"] for numbers in steps] == pytest.approx(expected)


@pytest.mark.parametrize("adaptive", ["schulman", "rlhf"])
def test_which_kl_a_run_adapts_to(make_config, monkeypatch, adaptive):
    """In the loss: the last update's, not the step's mean. In the reward: that of the rollout. And all its tokens."""
    seen = []
    monkeypatch.setattr(AdaptiveKL, "update", lambda self, *arguments: seen.append(arguments))
    for place, kind in (("loss", "k3"), ("reward", "k1")):
        table = {"adaptive": adaptive, "target": 0.1, "place": place, "kind": kind}
        training = {"steps": 2, "minibatches": 1, "epochs": 2}
        _, steps = play(make_config(**GRPO, kl=table, optimizer=FAST, training=training))
        for numbers, (_, tokens, responses) in zip(steps, seen[-2:], strict=True):
            assert responses == 24 and tokens == pytest.approx(numbers["length"] * 24)
            assert "kl_last" not in numbers
        first, second = (kl for kl, *_ in seen[-2:])
        if place == "reward":
            assert [first, second] == [numbers["kl_reference"] for numbers in steps]
            assert first == pytest.approx(0, abs=1e-6) and second != 0
        else:  # of two updates of all tokens the first is at KL 0
            assert first == pytest.approx(2 * steps[0]["kl"]) and second != steps[1]["kl"]


def test_a_synced_reference_is_the_policy_of_that_step(make_config):
    tables = GRPO | {"optimizer": FAST, "training": {"steps": 5, "minibatches": 1}}
    _, steps = play(make_config(**tables, kl={"coef": 0.1, "sync_every": 2}))
    kls = [numbers["kl"] for numbers in steps]
    # One update per step: each step's KL is that of the policy before it.
    assert kls[0] < 1e-9 and kls[1] > 1e-6 and kls[2] < 1e-9 and kls[3] > 1e-6 and kls[4] < 1e-9


def test_a_learned_entropy_moves_alpha_by_the_steps_entropy(make_config):
    for target, sign in ((0.0, -1), (5.0, 1)):  # a vocabulary of 12 has at most ln 12 = 2.5 nats
        table = {"target": target, "lr": 0.1}
        _, steps = play(make_config(**GRPO, entropy=table, training={"steps": 3}))
        alphas = [numbers["entropy_coef"] for numbers in steps]
        assert alphas == pytest.approx([0.05 * math.exp(0.1 * sign * n) for n in (1, 2, 3)], rel=0.05)


@pytest.mark.parametrize("value", [0.3, math.inf, math.nan])
def test_a_coefficient_of_any_size_comes_back_from_a_checkpoint(value):
    for make in (lambda: AdaptiveKL(SCHULMAN, CPU), lambda: LearnedEntropy(EntropyConfig(target=1.0), 0.3, CPU)):
        controller, resumed = make(), make()
        state = controller.state() | {next(iter(controller.state())): value}
        resumed.load(strict_json(to_json(state, constant=str).encode()))
        assert resumed.state() == pytest.approx(state, nan_ok=True)


# --- resuming -------------------------------------------------------------------------------------------------------

PPO = {
    "objective": {"name": "ppo", "entropy_coef": 0.02},
    "advantages": {"estimator": "gae"},
    "critic": {"lr": 3e-3},
    "kl": {"place": "reward", "kind": "k1", "adaptive": "rlhf", "target": 0.05, "horizon": 50, "sync_every": 2},
    "entropy": {"target": 2.0, "lr": 0.05},
    "training": {"steps": 5, "epochs": 2, "minibatches": 2, "micro_batch_tokens": 70, "packing": True},
    "rollout": {"top_p": 0.95, "dynamic_sampling": True, "max_refills": 1},
    "optimizer": {"schedule": "cosine", "lr": 3e-3},
}
LORA = {
    "model": {"lora_rank": 2, "gradient_checkpointing": True},
    "objective": {"name": "grpo", "presets": {}, "entropy_coef": 0.02},
    "kl": {"adaptive": "schulman", "target": 0.01},
    "entropy": {"target": 2.0, "lr": 0.05},
    "training": {"steps": 5, "minibatches": 2},
}


@pytest.mark.parametrize("tables", [PPO, LORA], ids=["ppo", "lora"])
def test_an_adaptive_run_resumes_bit_for_bit(make_config, tmp_path, example, fail_in_step, tables):
    """Interrupted after step 3, between two syncs of the reference and in the middle of the text."""
    (tmp_path / "text.txt").write_text("0123456789=" * 3)
    (tmp_path / "eval.jsonl").write_text("".join((example / "eval.jsonl").open().readlines()[:3]))
    extra = {"data": {"eval_path": str(tmp_path / "eval.jsonl")}, "evaluation": {"every": 2, "samples": 2, "k": [1, 2]}}
    if tables is PPO:
        extra["pretraining"] = {"path": str(tmp_path / "text.txt"), "batch_size": 2, "length": 5}
    whole = make_config("whole", **tables, **extra)
    cut = make_config("cut", **tables, **extra)
    train(whole)
    fail_in_step(make_config("cut", **tables, **extra, logging={"checkpoint_every": 3}), 4)
    train(cut, resume=True)

    steps, (tensors, _) = repeatable(whole), state(whole, 5)
    assert steps == repeatable(cut) and len(steps) == 5
    assert state(whole, 5) == state(cut, 5)
    names = {"kl_coef", "entropy_coef"} | ({"pretraining_loss", "value_loss"} if tables is PPO else set())
    for name in names:  # and none of them stands still
        assert len({record[name] for record in steps}) == 5, name
    parts = ("model", "critic", "reference") if tables is PPO else ("adapter_model",)
    assert set(tensors) == {f"{part}.safetensors" for part in (*parts, "training_state")}
