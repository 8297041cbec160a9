"""On-policy distillation: the loss and its gradient are dense float64's, the policy moves towards the teacher."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from digit_models import TOKENIZER, assert_gradient, narrowed
from mistakes import error_of
from own_engine import generate
from places import EXAMPLES
from rollouts import LENGTHS, PROMPTS, dense, dense_log_p, gradients, make_rollout, own_logprobs, play
from run_files import checkpoints, records, repeatable, state
from teachers import exact_divergence, rename_token, save_teacher, with_tail
from transformers import set_seed

import fastrl
import fastrl.training.models.model as loading
import fastrl.training.rl.train as stepping
from fastrl.base.errors import UserError
from fastrl.training.batches.distillation import Distillation
from fastrl.training.config.sections import ModelConfig, TeacherConfig
from fastrl.training.config.settings import load_settings
from fastrl.training.config.train import Config
from fastrl.training.models.teacher import load_teacher
from fastrl.training.parallel.machine import cpu_threads
from fastrl.training.rl.evaluation import evaluate
from fastrl.training.rl.run import make_run
from fastrl.training.rl.train import train
from fastrl.training.run.checkpoint import TENSORS
from fastrl.training.stages import sft

TEMPERATURE, TOP_K = 0.7, 3
FORMS = {
    "forward": ("forward_kl", None, 0.0),
    "reverse": ("reverse_kl", None, 0.0),
    "jsd": ("jsd", None, 0.5),
    "top-k": ("forward_kl", TOP_K, 0.0),
    "top-k reverse": ("reverse_kl", TOP_K, 0.5),
    "top-k jsd": ("jsd", TOP_K, 0.0),
}
COUNTED = [True, True, False, True, True, True, False, True]


@pytest.fixture
def teacher(tmp_path):
    """A teacher's directory."""
    return save_teacher(tmp_path / "teacher")


@pytest.fixture
def distilling(policy, bare_run, teacher):
    """A run with a divergence in its loss; training is that table's fields."""

    def make(kind, top_k, policy_coef, policy=policy, teacher=teacher, **training):
        settings = TeacherConfig(teacher=teacher, kind=kind, beta=0.3, coef=2.0)
        run = bare_run(policy, fastrl.DAPO(), TEMPERATURE, **training)
        model = ModelConfig(path=teacher)
        frozen = load_teacher(settings, model, policy, run.config.training.packing)
        run.loss.distillation = Distillation(frozen, settings, TEMPERATURE, top_k, run.config.training.packing)
        run.loss.coef = policy_coef
        return run

    return make


def by_hand(run, rollout):
    """In float64 on whole logits: gradient, loss, mean divergence, and the teacher's mean log-probability."""
    (log_p, model), (log_q, _) = (
        dense_log_p(policy, rollout) for policy in (run.models.policy, run.loss.distillation.teacher)
    )
    logp = (log_p / TEMPERATURE).log_softmax(-1).gather(-1, rollout.targets[..., None])[..., 0]
    size = min(log_p.shape[-1], log_q.shape[-1])
    log_p, log_q = ((x[..., :size] / TEMPERATURE).log_softmax(-1) for x in (log_p, log_q))
    mask, both = rollout.mask, (log_p, log_q)
    if run.loss.distillation.top_k is not None:
        ids = log_q.topk(run.loss.distillation.top_k).indices
        both = [with_tail(x, ids) for x in both]
    settings = run.loss.distillation.settings
    divergence = exact_divergence(*both, settings.kind, settings.beta)[mask].mean()
    taught = log_q.gather(-1, rollout.targets[..., None])[..., 0][mask].mean()
    ratio, advantage = (logp - rollout.old_logprobs).exp(), rollout.response_advantages[:, None]
    gate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    loss = settings.coef * divergence + run.loss.coef * gate[mask].mean()
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in found]), loss.detach(), divergence.detach(), taught


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_gradient_is_dense_float64_autograds_however_it_is_cut_up(policy, distilling, form):
    rollout = replace(own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, COUNTED, sets=False)), groups=None)
    expected = None
    for packing, tokens in ((False, None), (False, 28), (True, None), (True, 1)):  # with 1 some count nothing
        run = distilling(*form, packing=packing, micro_batch_tokens=tokens)
        expected = expected or by_hand(run, rollout)
        gradient, metrics = gradients(run, rollout)
        assert_gradient(gradient, expected[0], 4e-6, rtol=1e-4)
        found = [metrics[name].double() for name in ("loss", "divergence", "teacher_logprob")]
        torch.testing.assert_close(torch.stack(found), torch.stack(expected[1:]), rtol=1e-5, atol=1e-6)
        assert metrics["tokens"] == sum(n for n, counts in zip(LENGTHS, COUNTED, strict=True) if counts)
        assert ("clip_frac" in metrics) == (run.loss.coef > 0)
    assert all(p.grad is None for p in run.loss.distillation.teacher.model.parameters())


@pytest.mark.parametrize("top_k", [None, TOP_K])
def test_each_side_has_its_own_softcap_and_scale(make_policy, distilling, tmp_path, top_k):
    capped = {"model_type": "gemma2", "final_logit_softcapping": 1.5, "initializer_range": 0.5}
    scaled = save_teacher(tmp_path / "scaled", model_type="cohere", logit_scale=0.25, pad_token_id=0)
    models = (
        (make_policy(**capped), scaled),
        (make_policy(initializer_range=0.5), save_teacher(tmp_path / "c", **capped)),
    )
    for policy, teacher in models:
        rollout = own_logprobs(policy, make_rollout([3] * 8, LENGTHS, sets=False))  # Gemma's padding is NaN in float64
        run = distilling("reverse_kl", top_k, 0.0, policy=policy, teacher=teacher)
        expected, found = by_hand(run, rollout), gradients(run, rollout)
        assert_gradient(found[0], expected[0], 4e-6, rtol=1e-4)
        assert float(found[1]["divergence"]) == pytest.approx(float(expected[2]), rel=1e-5)


@pytest.mark.parametrize("top_k", [None, TOP_K])
@pytest.mark.parametrize("padding", [(4, 0), (0, 4)], ids=["the policy", "the teacher"])
def test_one_head_may_have_padding_that_the_other_lacks(make_policy, distilling, tmp_path, top_k, padding):
    # Its head has a bias. A teacher surer of its entries leaves the others less than float32's 1 - sum resolves.
    values = {"model_type": "phi", "initializer_range": 0.2}
    policy = make_policy(vocab_size=12 + padding[0], **values)
    teacher = save_teacher(tmp_path / "padded", vocab_size=12 + padding[1], **values)
    torch.nn.init.normal_(policy.model.lm_head.bias)
    rollout = replace(own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, sets=False)), groups=None)
    run = distilling("reverse_kl", top_k, 0.5, policy=policy, teacher=teacher)
    expected, (gradient, metrics) = by_hand(run, rollout), gradients(run, rollout)
    assert_gradient(gradient, expected[0], 4e-6, rtol=1e-4)
    found = [metrics[name].double() for name in ("loss", "divergence", "teacher_logprob")]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected[1:]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [None, TOP_K])
@pytest.mark.parametrize("packing", [False, True])
def test_nothing_that_counts_is_a_zero_gradient(distilling, packing, top_k):
    rollout = make_rollout([2, 3], [4, 1], [False, False], sets=False)
    gradient, metrics = gradients(distilling("reverse_kl", top_k, 0.0, packing=packing), rollout)
    assert (gradient == 0).all()
    assert metrics == {"loss": 0, "tokens": 0, "divergence": 0, "teacher_logprob": 0}


def test_the_likeliest_entries_are_chosen_a_few_rows_at_a_time(policy, distilling, monkeypatch):
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, sets=False))
    whole = gradients(distilling("forward_kl", TOP_K, 0.0), rollout)
    tile = {"cpu": 5 * (12 * 12 + 96 * 4)}
    monkeypatch.setattr("fastrl.training.batches.distillation.TILE_BYTES", tile)
    in_parts = gradients(distilling("forward_kl", TOP_K, 0.0), rollout)
    # Products of other numbers of rows sum in another order.
    assert_gradient(in_parts[0], whole[0], 4e-6)


def test_the_vocabularys_losses_take_the_budget(policy, distilling):
    """A budget that is too small is refused, so all calls get it."""
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, sets=False))
    for top_k in (None, TOP_K):
        run = distilling("forward_kl", top_k, 0.0)
        run.loss.distillation = replace(run.loss.distillation, memory_budget="1000")
        with pytest.raises(ValueError, match="memory_budget is too small"):
            gradients(run, rollout)


# --- runs -------------------------------------------------------------------------------------------------------------

#: Nothing but a teacher: no reward, no objective.
ALONE = {
    "rollout": {"prompts_per_step": 64, "num_generations": 1, "max_new_tokens": 4},
    "training": {"steps": 24, "device": "cpu", "threads": 1},
    "optimizer": {"lr": 1e-2},
}


@pytest.fixture
def config(tmp_path, example, teacher):
    """A config of distillation alone; keyword arguments are tables that override it."""

    def make(folder="run", without=(), **tables):
        found = {
            "model": {"config": str(narrowed(tmp_path)), "tokenizer": TOKENIZER},
            "data": {"path": str(example / "train.jsonl")},
            "distillation": {"teacher": teacher},
            "logging": {"output_dir": str(tmp_path / folder), "tensorboard": False},
            **ALONE,
        }
        for table, fields in tables.items():
            found[table] = fields if fields is None else found.get(table, {}) | fields
        return Config.model_validate(found)

    return make


LEARNING = {
    "full": {},
    "jsd": {"kind": "jsd"},
    "top-k": {"form": "top-k", "top_k": 4, "kind": "forward_kl"},
    "sampled": {"form": "sampled"},
}


@pytest.mark.parametrize("distillation", LEARNING.values(), ids=LEARNING)
def test_the_policy_moves_towards_the_teacher(config, tmp_path, distillation):
    """It ends at 0.24 (top-k) to 0.39 (sampled, an estimate) of the divergence that it begins with."""
    teacher = save_teacher(tmp_path / "soft", initializer_range=0.3)
    tables = {"objective": {"name": "reinforce"}} if distillation.get("form") == "sampled" else {}
    with cpu_threads(1):  # more would wait for one another
        run, found = play(config(distillation={"teacher": teacher} | distillation, **tables))
    divergences = [numbers["divergence"] for numbers in found]
    assert divergences[0] > 0.1 and sum(divergences[-3:]) / 3 < 0.6 * divergences[0]
    assert found[-1]["teacher_logprob"] > found[0]["teacher_logprob"]
    assert not [name for name in found[0] if name.startswith(("reward", "without", "eval"))]
    assert not any(
        parameter.requires_grad for parameter in (run.teacher or run.loss.distillation.teacher).model.parameters()
    )


@pytest.mark.parametrize("policy_coef", [0.0, 2.0])
def test_the_sampled_form_is_an_advantage_beside_those_of_rewards(make_config, teacher, spy, policy_coef):
    distillation = {"teacher": teacher, "form": "sampled", "coef": 0.5, "policy_coef": policy_coef}
    rollouts = spy(stepping, "update", lambda _, run, rollout: (run, rollout))
    run, found = play(make_config(distillation=distillation, rollout={"top_p": 0.8}, training={"steps": 1}))
    ((_, rollout),) = rollouts
    set_seed(run.config.training.seed)
    run = make_run(run.config)  # as it was before the update
    with torch.no_grad():
        (own, *_), (taught, *_) = (dense(model, rollout) for model in (run.models.policy, run.teacher))
    expected = 0.5 * (taught - own)
    if policy_coef:
        expected = expected + 2 * fastrl.group_advantages(rollout.rewards, rollout.groups)[:, None]
    torch.testing.assert_close(
        rollout.token_advantages.double() * rollout.mask, expected * rollout.mask, atol=1e-4, rtol=0
    )
    assert (expected * rollout.mask).abs().max() > 0.1
    mean = (own - taught)[rollout.mask].mean()
    assert found[0]["divergence"] == pytest.approx(float(mean), abs=1e-5)
    assert found[0]["teacher_logprob"] == pytest.approx(float(taught[rollout.mask].mean()), abs=1e-5)


def test_with_a_weight_the_policys_loss_and_its_rewards_are_kept(make_config, teacher):
    run, found = play(make_config(distillation={"teacher": teacher, "policy_coef": 1.0}, training={"steps": 1}))
    assert {"reward", "divergence", "policy_loss", "mismatch/k3", "without_variance"} <= set(found[0])
    run, alone = play(make_config(distillation={"teacher": teacher}, training={"steps": 1}))
    assert {"reward", "divergence"} <= set(alone[0]) and "policy_loss" not in alone[0]  # it is still reported
    assert run.config.name == "distillation"


def test_a_completion_without_a_reward_still_has_a_teacher(make_config, teacher, write_reward):
    reward = {"function": write_reward("return [None for _ in completions]")}
    _, found = play(make_config(reward=reward, distillation={"teacher": teacher}, training={"steps": 1}))
    assert found[0]["without_reward"] == 1 and found[0]["tokens"] > 0 and found[0]["grad_norm"] > 0


@pytest.mark.parametrize("form", ["full", "sampled"])
def test_a_resumed_run_is_the_one_that_did_not_stop(make_config, teacher, tmp_path, fail_in_step, form):
    tables = {"distillation": {"teacher": teacher, "form": form}, "training": {"steps": 4, "minibatches": 2}}
    whole, half = (make_config(name, **tables, logging={"checkpoint_every": 2}) for name in ("whole", "half"))
    train(whole)
    fail_in_step(half, 4)
    train(half, resume=True)
    assert repeatable(half) == repeatable(whole)
    assert checkpoints(half) == ["step-000002", "step-000003", "step-000004"] and state(half, 4) == state(whole, 4)
    files = {path.name for path in (tmp_path / "whole" / "checkpoints" / "step-000004").iterdir()}
    assert {name for name in files if name.endswith(".safetensors")} == {"model.safetensors", TENSORS}
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["distillation"]["teacher"] == teacher
    other = save_teacher(tmp_path / "other", seed=8)
    changed = make_config("half", **tables | {"distillation": {"teacher": other, "form": form}})
    with pytest.raises(UserError, match=rf"distillation\.teacher was '{teacher}' and is now '{other}'"):
        train(changed, resume=True)


def test_adapters_learn_from_a_teacher(make_config, teacher):
    pytest.importorskip("peft")
    settings = {"distillation": {"teacher": teacher}, "model": {"lora_rank": 2}, "optimizer": {"lr": 1e-2}}
    run, found = play(make_config(**settings, training={"steps": 3, "minibatches": 1}))
    assert not run.models.policy.head.weight.requires_grad and all(numbers["grad_norm"] > 0 for numbers in found)
    assert found[-1]["divergence"] != found[0]["divergence"]


@pytest.mark.parametrize("form", ["full", "sampled"])
def test_a_mixture_of_experts_replays_its_own_routing_and_not_the_teachers(make_config, teacher, tmp_path, form):
    (tmp_path / "experts").mkdir()
    model = {"config": str(narrowed(tmp_path / "experts", EXAMPLES / "recipes" / "model_moe.json"))}
    tables = {"distillation": {"teacher": teacher, "form": form}, "rollout": {"keep_routing": True}}
    _, found = play(make_config(model=model, **tables, training={"steps": 1}))
    assert found[0]["divergence"] > 0 and found[0]["grad_norm"] > 0


def test_the_recipes_name_what_other_examples_write():
    runs = EXAMPLES.parent / "runs"
    config = load_settings(Config, EXAMPLES / "recipes" / "on_policy_distillation.toml")
    assert config.distillation.teacher == str(runs / "reverse_digits" / "checkpoints" / "step-000120")
    base = load_settings(Config, EXAMPLES / "reverse_digits" / "config.toml")
    assert (base.training.steps, base.logging.output_dir) == (120, runs / "reverse_digits")
    stage = load_settings(sft.SFTConfig, EXAMPLES / "stages" / "gkd.toml")
    before = load_settings(sft.SFTConfig, EXAMPLES / "stages" / "sft.toml")
    assert stage.distillation.teacher == str(before.logging.output_dir / "model")


@pytest.mark.parametrize("form", ["full", "top-k", "sampled"])
def test_a_run_with_a_teacher_of_another_padding(make_config, tmp_path, form):
    teacher = save_teacher(tmp_path / "larger", vocab_size=16)
    distillation = {"teacher": teacher, "form": form, "top_k": 4}
    _, found = play(make_config(distillation=distillation, training={"steps": 1}))
    assert found[0]["divergence"] > 0 and found[0]["grad_norm"] > 0
    assert "got 12; the form full" in error_of(
        make_run, make_config(distillation={"teacher": teacher, "form": "top-k", "top_k": 12})
    )


def test_a_sample_that_the_teacher_has_no_entry_for_is_an_error(make_config, teacher, tmp_path):
    """A random policy samples its padding, a trained one hardly."""
    (tmp_path / "padded").mkdir()
    model = {"config": str(narrowed(tmp_path / "padded", vocab_size=64))}
    told = error_of(play, make_config(model=model, distillation={"teacher": teacher}, training={"steps": 1}))
    assert told.startswith("distillation.teacher: the policy sampled the id ")
    assert told.endswith(", which its tokenizer lacks, and the teacher's vocabulary ends at 11")


@pytest.mark.parametrize("form", ["full", "top-k", "sampled"])
@pytest.mark.parametrize(("packing", "size"), [(False, None), (True, 28)])
def test_an_evaluation_without_a_reward_compares_greedy_completions(config, teacher, example, form, packing, size):
    distillation = {"form": form, "kind": "reverse_kl", "top_k": TOP_K}
    tables = {"rollout": {"temperature": TEMPERATURE, "prompts_per_step": 24}, "objective": {"name": "reinforce"}}
    training = {"packing": packing, "micro_batch_tokens": size}
    data = {"eval_path": str(example / "eval.jsonl")}
    run = make_run(config(distillation=distillation, data=data, training=training, **tables))
    run.data.held_out = run.data.held_out[:10]
    numbers = evaluate(run)
    rollout = generate(run.models.policy, run.data.held_out, run.config.rollout, greedy=True)
    models = (run.models.policy, run.loss.distillation.teacher if run.loss.distillation else run.teacher)
    _, log_q = both = [(dense_log_p(x, rollout)[0] / TEMPERATURE).log_softmax(-1) for x in models]
    if form == "top-k":
        both = [with_tail(x, log_q.topk(TOP_K).indices) for x in both]
    taught = log_q.gather(-1, rollout.targets[..., None])[..., 0]
    expected = {"eval/teacher_logprob": float(taught[rollout.mask].mean())}
    if form != "sampled":
        expected["eval/divergence"] = float(exact_divergence(*both, "reverse_kl")[rollout.mask].mean().detach())
    assert numbers == pytest.approx(expected, rel=1e-4)


@pytest.mark.drawn
def test_the_report_shows_it(config, tmp_path, capsys):
    training = ALONE["training"] | {"steps": 2}
    run = config(training=training, evaluation={"metrics": []})
    train(run)
    assert [record["step"] for record in records(run)] == [1, 2]
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(f'aria-label="{name}, by step"' in page for name in ("divergence", "teacher_logprob"))
    assert page.count("nats per token") >= 2 and "<h1>distillation" in page
    assert "divergence " in capsys.readouterr().out


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"distillation": {"form": "topk"}}, r"distillation\.form.*'full', 'top-k' or 'sampled', got 'topk'"),
        ({"distillation": {"kind": "kl"}}, r"distillation\.kind.*'forward_kl', 'reverse_kl' or 'jsd', got 'kl'"),
        ({"distillation": {"beta": 1.0}}, r"distillation\.beta.*less than 1, got 1\.0"),
        ({"distillation": {"beta": 0.0}}, r"distillation\.beta.*greater than 0, got 0\.0"),
        ({"distillation": {"coef": 0.0}}, r"distillation\.coef.*greater than 0, got 0\.0"),
        ({"distillation": {"top_k": 0}}, r"distillation\.top_k.*greater than or equal to 1, got 0"),
        ({"distillation": {"policy_coef": -1.0}}, r"distillation\.policy_coef.*greater than or equal to 0, got -1\.0"),
        ({"distillation": {"teacher": None}}, r"distillation\.teacher.*string, got None"),
        (
            {"distillation": {"form": "sampled", "kind": "jsd"}},
            r"distillation: kind: form = \"sampled\" estimates reverse_kl, got 'jsd'",
        ),
        (
            {"advantages": {"estimator": "gae"}, "critic": {}},
            r"advantages\.estimator: means nothing where distillation\.policy_coef is 0; leave it out",
        ),
        ({"rollout": {"dynamic_sampling": True}}, r"rollout\.dynamic_sampling: means nothing where"),
        ({"kl": {"place": "reward", "kind": "k1"}}, r"kl\.place: means nothing where"),
        ({"kl": {}}, "kl: means nothing where"),
        ({"rollout_correction": {}}, "rollout_correction: means nothing where"),
        ({"entropy": {"target": 1.0}}, "entropy: means nothing where"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(make_config, tables, expected):
    with pytest.raises(UserError, match=expected):
        make_config(**tables | {"distillation": {"teacher": "somewhere"} | tables.get("distillation", {})})


def test_drawing_ahead_needs_a_correction_where_the_objective_learns(make_config):
    """A divergence alone compares two policies at tokens of any sampler, and takes no [rollout_correction]."""
    ahead = {"engine": "vllm", "url": "http://127.0.0.1:1", "ahead": 1}
    assert make_config(rollout=ahead, distillation={"teacher": "somewhere"}).rollout.ahead
    for tables in ({}, {"distillation": {"teacher": "somewhere", "form": "sampled"}}):
        with pytest.raises(UserError, match=r"rollout\.ahead: .* add a table \[rollout_correction\]"):
            make_config(rollout=ahead, **tables)


@pytest.mark.parametrize("form", ["full", "sampled"])
def test_what_is_not_needed_may_be_left_out_and_what_is_may_not(config, teacher, form):
    distillation = {"teacher": teacher, "form": form}
    needed = {"objective": {"name": "reinforce"}}
    assert config(distillation=distillation, **needed).name == "distillation"
    if form == "sampled":
        with pytest.raises(ValueError, match="objective: required, but not given"):
            config(distillation=distillation)
    else:
        assert config(distillation=distillation).name == "distillation"
    kept = distillation | {"policy_coef": 0.5}
    with pytest.raises(ValueError, match="reward: required, but not given"):
        config(distillation=kept, **needed)
    reward = {"reward": {"function": "reward.py:reward"}}
    with pytest.raises(ValueError, match="objective: required, but not given"):
        config(distillation=kept, **reward)
    with pytest.raises(ValueError, match=r"rollout\.num_generations: expected at least 2"):
        config(distillation=kept, **needed, **reward)
    with pytest.raises(ValueError, match="reward: required, but not given"):
        config(distillation=None, **needed)
    kl = {"kl": {"place": "loss"}, **needed}
    if form == "sampled":
        assert config(distillation=distillation, **kl).kl is not None


def test_a_teacher_in_the_folder_of_the_run_is_refused(make_config, tmp_path):
    with pytest.raises(UserError, match=r"distillation\.teacher: .* lies in logging\.output_dir"):
        make_config(distillation={"teacher": str(tmp_path / "run" / "checkpoints" / "step-000001")})


def test_a_teacher_that_is_no_teacher_is_refused_before_any_weights_are_read(
    make_config, teacher, tmp_path, monkeypatch
):
    monkeypatch.setattr(loading, "load_weights", None)

    def error(path, **distillation):
        return error_of(make_run, make_config(distillation={"teacher": str(path)} | distillation))

    assert error(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such directory"
    assert error(tmp_path).startswith(f"{tmp_path}: holds no tokenizer, only ")
    renamed = Path(save_teacher(tmp_path / "renamed"))
    rename_token(renamed, "9", "nine")
    assert error(renamed) == (
        f"distillation.teacher: {renamed}: expected the tokenizer of {tmp_path / 'model.json'}, got another one: '9' "
        "has none, expected the id 11 (2 tokens differ)"
    )
    swapped = Path(save_teacher(tmp_path / "swapped"))
    for old, new in (("1", "x"), ("2", "1"), ("x", "2")):
        rename_token(swapped, old, new)
    assert "'1' has the id 4, expected the id 3 (2 tokens differ)" in error(swapped)
    smaller = save_teacher(tmp_path / "smaller", vocab_size=11)
    assert error(smaller) == (
        f"distillation.teacher: {smaller}: the tokenizer has a token id 11, but the model's vocabulary ends at 10"
    )


def test_a_teacher_that_cannot_be_used_is_refused_before_the_first_step(make_config, teacher, tmp_path):
    def error(path=teacher, training=None, **fields):
        tables = {"distillation": {"teacher": path, **fields}, "training": training or {}}
        return error_of(make_run, make_config(**tables))

    assert error(form="top-k", top_k=12) == (
        "distillation.top_k: expected less than the vocabulary's 12, got 12; the form full takes them all"
    )
    short = save_teacher(tmp_path / "short", max_position_embeddings=6)
    assert "the prompt has 4 tokens, but data.max_prompt_tokens, or the context of the model or its teacher" in error(
        short
    )
    crossing = {"model_type": "lfm2", "layer_types": ["conv"], "initializer_range": 0.1, "pad_token_id": 0}
    convolution = save_teacher(tmp_path / "convolution", **crossing)
    assert "training.packing: in Lfm2Model a packed sequence sees" in error(convolution, training={"packing": True})
    (Path(teacher) / "model.safetensors").unlink()
    assert error().startswith(f"{teacher}: cannot load the model: ")


@pytest.mark.parametrize("form", ["full", "top-k", "sampled"])
@pytest.mark.parametrize(
    ("packing", "model"),
    [
        (False, {}),
        (True, {}),
        (False, {"dtype": "bfloat16"}),
        (False, {"dtype": "bfloat16", "logits_dtype": "float32"}),
    ],
)
def test_the_smallest_budget_that_is_named_is_enough_for_the_run(
    make_config, teacher, tmp_path, monkeypatch, form, packing, model
):
    wide = save_teacher(tmp_path / "wide", hidden_size=240)
    distillation = {"form": form, "top_k": 4}

    def config(budget, teacher):
        training = {"steps": 1, "threads": 1, "packing": packing, "memory_budget": str(budget)}
        return make_config(
            model=model, distillation=distillation | {"teacher": teacher}, training=training, evaluation={"every": None}
        )

    def smallest(budget, teacher):
        with monkeypatch.context() as patch:
            patch.setattr(loading, "load_weights", None)
            error = error_of(train, config(budget, teacher))
        assert error.startswith("training.memory_budget: too small for ")
        return int(re.search(r"the smallest possible is (\d+) ", error)[1])

    named = smallest(1000, wide)
    assert smallest(named - 1, wide) == named
    # The teacher's width counts, but for top-k less than what is kept for each entry of the policy's, and for sampled
    # in 16 bits less than the policy's loss.
    assert (named > smallest(1000, teacher)) == (form == "full" or (form == "sampled" and not model))
    assert train(config(named, wide))["loss"] is not None
