"""What goes wrong in a run: losses and gradients that are not finite, rewards that are missing or that raise."""

import copy
import itertools
import json
import math
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

import fastrl.training.rl.experience as experience
import fastrl.training.rl.train as module
import fastrl.training.rl.update as updating
from fastrl.base.errors import UserError
from fastrl.training.common.checkpoint import NUMBERS
from fastrl.training.common.health import Watch, describe
from fastrl.training.common.rollout import Rollout
from fastrl.training.rl.train import train

BAD = {"nan": math.nan, "inf": math.inf}


@pytest.fixture
def poison(monkeypatch):
    """Make the first sequence's advantage of some rollouts (1, 2, ... over all runs of a test) not finite."""

    def poison(rollouts, value=math.nan, rows=slice(1)):
        count = iter(range(1, 100))
        advantages = experience.group_advantages

        def poisoned(*args, **kwargs):
            found = advantages(*args, **kwargs)
            if next(count) in rollouts:
                found[rows] = value
            return found

        monkeypatch.setattr(experience, "group_advantages", poisoned)

    return poison


@pytest.fixture
def snapshots(monkeypatch):
    """Parameters, optimizer and scheduler before the first update and after each rollout's."""
    seen = []
    update = module.update

    def snapshot(run):
        parameters = dict(run.policy.model.named_parameters())
        return copy.deepcopy((parameters, run.optimizer.state_dict(), run.scheduler.state_dict()))

    def spy(run, rollout):
        if not seen:
            seen.append(snapshot(run))
        numbers = update(run, rollout)
        assert all(p.grad is None for p in run.policy.model.parameters())
        seen.append(snapshot(run))
        return numbers

    monkeypatch.setattr(module, "update", spy)
    return seen


def same(a, b):
    """Equality bit by bit of what snapshot returns."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def records(config):
    lines = (config.logging.output_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def skipped(config):
    return [record["skipped_updates"] for record in records(config)]


def saved(config):
    return sorted(path.name for path in (config.logging.output_dir / "skipped").iterdir())


# --- skipped updates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
def test_a_bad_update_leaves_everything_as_it_was(make_config, poison, snapshots, value):
    poison([2], value)
    config = make_config(training={"steps": 3, "minibatches": 1})
    train(config)
    assert skipped(config) == [0, 1, 0]
    assert [same(a, b) for a, b in itertools.pairwise(snapshots)] == [False, True, False]
    first, second, third = records(config)
    assert "loss" not in second and {"reward", "eval/reward", "length"} <= set(second)
    assert first["eval/reward"] == second["eval/reward"]
    for record in (first, third):
        assert math.isfinite(record["loss"]) and record["grad_norm"] > 0


def test_only_the_bad_minibatch_is_skipped_and_no_number_comes_from_it(make_config, poison, snapshots):
    poison([1])
    config = make_config(training={"steps": 1, "minibatches": 4, "micro_batch_size": 3})
    train(config)
    (record,) = records(config)
    assert record["skipped_updates"] == 1
    assert None not in record.values()
    assert 18 <= record["tokens"] <= 18 * 4
    (name,) = saved(config)
    assert len((config.logging.output_dir / "skipped" / name / "texts.jsonl").read_text().splitlines()) == 24 / 4
    assert snapshots[1][2]["last_epoch"] == 3
    assert {int(moments["step"]) for moments in snapshots[1][1]["state"].values()} == {3}


def test_a_bad_gradient_of_a_good_loss_and_a_bad_loss_with_a_good_gradient(make_config, monkeypatch, snapshots):
    loss = updating.linear_policy_loss
    calls = []

    def troubled(hidden, weight, *args, **kwargs):
        calls.append(None)
        if len(calls) == 1:
            hidden.register_hook(lambda gradient: gradient * math.inf)
        result = loss(hidden, weight, *args, **kwargs)
        return result._replace(loss=result.loss + math.inf) if len(calls) == 2 else result

    monkeypatch.setattr(updating, "linear_policy_loss", troubled)
    config = make_config(training={"steps": 3, "minibatches": 1})
    train(config)
    assert skipped(config) == [1, 1, 0]
    assert same(snapshots[0], snapshots[2]) and not same(snapshots[2], snapshots[3])


def test_the_batch_is_kept_to_be_looked_at_and_only_the_last_few(make_config, poison):
    poison(range(1, 6), math.inf, slice(None))
    config = make_config(
        training={"steps": 5, "minibatches": 1, "epochs": 2}, rollout={"top_p": 0.9}, evaluation={"every": None}
    )
    with pytest.raises(UserError) as error:
        train(config)
    assert len(records(config)) == 4 and skipped(config) == [2] * 4
    last = config.logging.output_dir / "skipped" / "step-000005-update-0002"
    assert str(error.value) == (
        "step 5: the loss or its gradient was not finite in 10 updates in a row (training.max_skipped_updates); the "
        f"last one's batch is in {last}"
    )
    assert saved(config) == ["step-000004-update-0002", "step-000005-update-0001", "step-000005-update-0002"]
    with safe_open(last / "rollout.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        prompt_length = int(file.metadata()["prompt_length"])
    assert set(tensors) == {
        "input_ids",
        "attention_mask",
        "response_advantages",
        "old_logprobs",
        "rewards",
        "groups",
        "rollout_logprobs",
        "sampling_mask.token_ids",
        "sampling_mask.offsets",
    }
    assert len(tensors["input_ids"]) == 24 and (tensors["response_advantages"] == math.inf).all() and prompt_length == 4
    texts = [json.loads(line) for line in (last / "texts.jsonl").read_text().splitlines()]
    assert len(texts) == 24
    vocabulary = ["<eos>", "=", *"0123456789"]
    for text, tokens, used in zip(texts, tensors["input_ids"], tensors["attention_mask"], strict=True):
        assert text["prompt"] == "".join(vocabulary[token] for token in tokens[:4])
        assert text["completion"] == "".join(vocabulary[token] for token in tokens[4:][used[4:]])


def test_only_updates_in_a_row_stop_the_run(make_config, poison):
    poison([1, 2, 4, 5])
    config = make_config(training={"steps": 6, "minibatches": 1, "max_skipped_updates": 3})
    train(config)
    assert skipped(config) == [1, 1, 0, 1, 1, 0]
    again = make_config(
        training={"steps": 6, "minibatches": 1, "max_skipped_updates": 2},
        logging={"output_dir": str(config.logging.output_dir.with_name("again"))},
    )
    poison([4, 5])
    with pytest.raises(UserError, match=r"step 5: .* in 2 updates in a row .*again/skipped/step-000005-update-0001"):
        train(again)


def test_resuming_does_not_forget_the_updates_skipped_before(make_config, poison, monkeypatch):
    poison([2, 3, 4])
    config = make_config(
        training={"steps": 6, "minibatches": 1, "max_skipped_updates": 3}, logging={"checkpoint_every": 3}
    )
    evaluate = module.evaluate
    count = iter(range(1, 100))

    def stopping(*args):
        if next(count) == 3:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(*args)

    monkeypatch.setattr(module, "evaluate", stopping)
    assert train(config)["interrupted"] == "SIGTERM"
    assert json.loads((config.logging.output_dir / "checkpoints" / "step-000003" / NUMBERS).read_text())["skipped"] == 2
    with pytest.raises(UserError, match=r"step 4: .* in 3 updates in a row"):
        train(config, resume=True)


# --- rewards --------------------------------------------------------------------------------------------------------


@pytest.fixture
def rewarded(make_config, tmp_path):
    """A config whose reward function has this body."""

    def rewarded(body, **tables):
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        (tmp_path / "mine.py").write_text(f"def reward(prompts, completions, answer):\n{lines}")
        return make_config(
            reward={"function": f"{tmp_path / 'mine.py'}:reward"}, **{"evaluation": {"every": None}} | tables
        )

    return rewarded


def test_none_is_left_out_of_its_group_where_nan_is_a_mistake(rewarded, monkeypatch):
    seen = []
    update = module.update
    monkeypatch.setattr(
        module, "update", lambda run, rollout: (seen.append(rollout.response_advantages), update(run, rollout))[1]
    )
    body = "values = [float(i % 4) for i in range(len(prompts))]\nvalues[1] = {}\nreturn values"
    train(rewarded(body.format("None"), training={"steps": 1}))
    whole = torch.tensor([-1.5, -0.5, 0.5, 1.5]) / math.sqrt(1.25)
    (advantages,) = seen
    torch.testing.assert_close(advantages[3:7], whole, rtol=1e-5, atol=0)
    # Of 0, None, 2 and 3 the mean is 5/3, and the standard deviation that of three.
    part = torch.tensor([-5.0, 1.0, 4.0]) / math.sqrt(14)
    torch.testing.assert_close(advantages[:3], part, rtol=1e-5, atol=0)
    with pytest.raises(UserError, match=r"mine\.py:reward: reward 1 must be a finite number or None, got nan"):
        train(rewarded(body.format("float('nan')"), logging={"overwrite": True}))


def test_a_reward_that_raises_names_the_sample(rewarded, example):
    body = "return [int(prompt[0]) / (prompt != '621=') for prompt in prompts]"
    config = rewarded(body, rollout={"prompts_per_step": 800, "num_generations": 2}, training={"steps": 1})
    with pytest.raises(UserError) as error:
        train(config)
    message = str(error.value)
    assert "mine.py:reward: raised ZeroDivisionError: " in message and "mine.py:2) on sample " in message
    assert f"prompt '621=' ({example / 'train.jsonl'}:2), completion '" in message
    assert isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("end", ["sys.exit(5)", "sys.exit()", "raise BaseException('odd')"])
def test_a_reward_that_ends_the_process_is_one_that_raises(rewarded, end):
    body = f"import sys\nif '621=' in prompts:\n    {end}\nreturn [0.0] * len(prompts)"
    config = rewarded(body, rollout={"prompts_per_step": 800, "num_generations": 2}, training={"steps": 1})
    told = (
        r"mine\.py:reward: raised (SystemExit(: 5)?|BaseException: odd) \(.*mine\.py:4\) on sample \d+: prompt '621='"
    )
    with pytest.raises(UserError, match=told):
        train(config)
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C, which is the user's
        train(rewarded("raise KeyboardInterrupt", logging={"overwrite": True}))


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("len(prompts) > 20", "on samples 0 to 23 together, on neither half of them alone"),
        ("len(prompts) > 6", "on samples 0 to 11 together, on neither half of them alone"),
        ("completions", "on sample 0: prompt "),
    ],
)
def test_a_reward_that_raises_for_samples_together_says_so(rewarded, condition, expected):
    config = rewarded(f"if {condition}:\n    raise OSError('the judge is away')\nreturn [0.0] * len(prompts)")
    with pytest.raises(UserError, match=r"raised OSError: the judge is away \(.*mine\.py:3\) " + expected):
        train(config)


# --- nothing to learn -----------------------------------------------------------------------------------------------

PATCHES = {"kl_coef": 0.0, "entropy_coef": 0.0}


def warnings(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "warning: step" in line]


@pytest.mark.parametrize(
    ("body", "tables", "share", "step", "expected"),
    [
        ("return [None] * len(prompts)", {}, 1, 1, "every reward is None: the reward function gives no"),
        ("return [0.5] * len(prompts)", {}, 1, 5, "in the last 5 steps every completion got the reward 0.5"),
        ("return [0.5] * len(prompts)", {"rollout": {"max_new_tokens": 1}}, 1, 5, "no advantage tells them apart"),
        ("return [float(prompt[0]) for prompt in prompts]", {}, 1, 5, "all completions of a prompt got the same"),
        (
            "return [float(i % 2) for i in range(len(prompts))]",
            {"optimizer": {"max_grad_norm": 1.0}, "rollout_correction": {"mode": "mask", "low": 5.0, "high": 6.0}},
            0,
            5,
            "the gradient was exactly 0 in the last 5 steps: every token's weight is 0",
        ),
        ("return [float(i % 2) for i in range(len(prompts))]", {}, 0, None, None),
    ],
)
def test_a_run_that_learns_nothing_says_so_once(rewarded, capsys, body, tables, share, step, expected):
    config = rewarded(body, objective={"name": "grpo"} | PATCHES, training={"steps": 7, "minibatches": 1}, **tables)
    train(config)
    said = warnings(capsys)
    assert {record["without_variance"] for record in records(config)} == {share}
    if expected is None:
        assert not said
    else:
        (line,) = said
        assert line.startswith(f"fastrl: warning: step {step}: ") and expected in line


def test_a_short_run_need_not_be_five_steps_long_to_be_warned_of(rewarded, capsys):
    train(rewarded("return [1.0] * len(prompts)", training={"steps": 2, "minibatches": 1}))
    (line,) = warnings(capsys)
    assert "step 2: in the last 2 steps every completion got the reward 1" in line


def test_which_groups_have_no_variance():
    mask = torch.ones(8, 3, dtype=torch.bool)
    rollout = Rollout(torch.zeros(8, 3, dtype=torch.long), mask, 0)
    groups = [0, 0, 1, 1, 2, 2, 3, 3]

    def share(rewards, groups=groups, steps=None):
        return describe(rollout, mask[:, 0], rewards, {}, groups, steps).get("without_variance")

    assert share([1.0, 2.0, 1.0, 1.0, None, None, None, 3.0]) == 3 / 4
    assert share([1.0, 2.0] * 4) == 0
    assert share([1.0, 2.0] * 4, list(range(8))) is None  # one completion a prompt: nothing to compare
    # Of process rewards it is the steps' that differ, within a completion too.
    steps = [[(1, 0.0), (2, 1.0)], [], [(1, 1.0)], [(1, 1.0)], [], [], [(1, 0.0)], [(1, 1.0)]]
    assert share([1.0, 2.0] * 4, steps=steps) == 2 / 4
    assert share([1.0, 2.0] * 3 + [1.0, None], steps=steps) == 3 / 4


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"loss": 0.0, "grad_norm": 0.0}, "exactly 0 in the last 5 steps: the loss is 0 too"),
        ({"loss": 1.0, "grad_norm": 0.0}, "no weight that is trained reaches the loss"),
        ({"loss": 1.0, "grad_norm": 1e-30}, None),
        ({"loss": 1.0}, None),
    ],
)
def test_a_stage_without_a_gradient_is_warned_of(numbers, expected):
    watch = Watch(SimpleNamespace(), 100)
    said = [watch.look(numbers) for _ in range(12)]
    assert [bool(lines) for lines in said] == [expected is not None and step == 5 for step in range(1, 13)]
    assert expected is None or expected in said[4][0]
    watch = Watch(SimpleNamespace(), 100)  # a step with a gradient begins the count again
    assert not any(watch.look(numbers if step % 5 else {"grad_norm": 1.0}) for step in range(12))


def test_why_no_token_counts():
    watch = Watch(SimpleNamespace(advantages=SimpleNamespace(estimator="gae")), 1)
    numbers = {"reward": 1.0, "reward_std": 1.0, "truncated": 1.0, "tokens": 0, "grad_norm": 0.0}
    assert "cut off at rollout.max_new_tokens (reward.overlong_filter)" in watch.look(numbers)[0]
