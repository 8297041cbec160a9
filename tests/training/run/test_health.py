"""What goes wrong in a run: losses and gradients that are not finite, rewards that are missing or that raise."""

import copy
import itertools
import math
import signal
from types import SimpleNamespace

import pytest
import torch
from mistakes import error_of
from run_files import checkpoints, json_lines, records, state
from safetensors import safe_open

import fastrl.training.rl.advantages as module_of_advantages
import fastrl.training.rl.train as module
import fastrl.training.rl.update as updating
from fastrl.base.errors import UserError
from fastrl.training.rl.metrics import reward_metrics
from fastrl.training.rl.train import train
from fastrl.training.run.health import Watch

BAD = {"nan": math.nan, "inf": math.inf}


@pytest.fixture
def poison(monkeypatch):
    """Make the advantage of the first sequence of some rollouts (1, 2, ... over all runs of a test) not finite."""

    def poison(rollouts, value=math.nan, rows=slice(1)):
        count = iter(range(1, 100))
        advantages = module_of_advantages.group_advantages

        def poisoned(*args, **kwargs):
            found = advantages(*args, **kwargs)
            if next(count) in rollouts:
                found[rows] = value
            return found

        monkeypatch.setattr(module_of_advantages, "group_advantages", poisoned)

    return poison


@pytest.fixture
def snapshots(monkeypatch):
    """Parameters, optimizer and scheduler before the first update and after each rollout's."""
    seen, update = [], module.update

    def snapshot(run):
        parameters = dict(run.models.policy.model.named_parameters())
        return copy.deepcopy((parameters, run.optimizer.state_dict(), run.scheduler.state_dict()))

    def spy(run, rollout):
        if not seen:
            seen.append(snapshot(run))
        numbers = update(run, rollout)
        assert all(p.grad is None for p in run.models.policy.model.parameters())
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


def skipped(config):
    return [record["skipped_updates"] for record in records(config)]


def saved(config):
    return sorted(path.name for path in (config.logging.output_dir / "skipped").iterdir())


# --- skipped updates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
def test_a_bad_update_leaves_everything_as_it_was(trained, poison, snapshots, value):
    poison([2], value)
    config = trained(training={"steps": 3, "minibatches": 1})
    assert skipped(config) == [0, 1, 0]
    assert [same(a, b) for a, b in itertools.pairwise(snapshots)] == [False, True, False]
    first, second, third = records(config)
    assert "loss" not in second and {"reward", "eval/reward", "length"} <= set(second)
    assert first["eval/reward"] == second["eval/reward"]
    for record in (first, third):
        assert math.isfinite(record["loss"]) and record["grad_norm"] > 0


def test_only_the_bad_minibatch_is_skipped_and_no_number_comes_from_it(trained, poison, snapshots):
    poison([1])
    config = trained(training={"steps": 1, "minibatches": 4, "micro_batch_tokens": 42})
    (record,) = records(config)
    assert record["skipped_updates"] == 1
    assert None not in record.values()
    assert 18 <= record["tokens"] <= 18 * 4
    (name,) = saved(config)
    assert len(json_lines(config.logging.output_dir / "skipped" / name / "texts.jsonl")) == 24 / 4
    assert snapshots[1][2]["last_epoch"] == 3
    assert {int(moments["step"]) for moments in snapshots[1][1]["state"].values()} == {3}


def test_a_bad_gradient_of_a_good_loss_and_a_bad_loss_with_a_good_gradient(trained, monkeypatch, snapshots):
    loss = updating.linear_policy_loss
    calls = []

    def troubled(hidden, weight, *args, **kwargs):
        calls.append(None)
        if len(calls) == 1:
            hidden.register_hook(lambda gradient: gradient * math.inf)
        result = loss(hidden, weight, *args, **kwargs)
        return result._replace(loss=result.loss + math.inf) if len(calls) == 2 else result

    monkeypatch.setattr(updating, "linear_policy_loss", troubled)
    config = trained(training={"steps": 3, "minibatches": 1})
    assert skipped(config) == [1, 1, 0]
    assert same(snapshots[0], snapshots[2]) and not same(snapshots[2], snapshots[3])


def test_the_batch_is_kept_to_be_looked_at_and_only_the_last_few(make_config, poison):
    poison(range(1, 6), math.inf, slice(None))
    training = {"steps": 5, "minibatches": 1, "epochs": 2}
    config = make_config(training=training, rollout={"top_p": 0.9}, evaluation={"every": None})
    error = error_of(train, config)
    assert skipped(config) == [2] * 4
    last = config.logging.output_dir / "skipped" / "step-000005-update-0002"
    assert error == (
        "step 5: the loss or its gradient was not finite in 10 updates in a row (training.max_skipped_updates); the "
        f"last one's batch is in {last}; if the policy diverged, lower optimizer.lr (0.002) or "
        "optimizer.max_grad_norm, or raise optimizer.warmup_updates; saved in "
        f"{config.logging.output_dir}/checkpoints/step-000004; the same command with --resume goes on from there"
    )
    assert saved(config) == ["step-000004-update-0002", "step-000005-update-0001", "step-000005-update-0002"]
    with safe_open(last / "rollout.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        prompt_length = int(file.metadata()["prompt_length"])
    names = {"input_ids", "attention_mask", "response_advantages", "old_logprobs", "rewards", "groups"}
    assert set(tensors) == names | {
        "serial",
        "weights_step",
        "ended",
        "rollout_logprobs",
        "sampling_mask.token_ids",
        "sampling_mask.offsets",
    }
    assert len(tensors["input_ids"]) == 24 and (tensors["response_advantages"] == math.inf).all() and prompt_length == 4
    texts = json_lines(last / "texts.jsonl")
    assert len(texts) == 24
    vocabulary = ["<eos>", "=", *"0123456789"]
    for text, tokens, used in zip(texts, tensors["input_ids"], tensors["attention_mask"], strict=True):
        assert text["prompt"] == "".join(vocabulary[token] for token in tokens[:4])
        assert text["completion"] == "".join(vocabulary[token] for token in tokens[4:][used[4:]])


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_policy_that_diverged_is_told_with_what_to_change_and_takes_no_checkpoints_place(
    make_config, monkeypatch, evaluated
):
    """Sampled in the next step, or evaluated greedily after this one."""
    update = module.update

    def diverging(run, rollout):
        numbers = update(run, rollout)
        if run.step == 2:
            run.models.policy.head.weight.data.mul_(math.nan)
        return numbers

    monkeypatch.setattr(module, "update", diverging)
    logging, every = {"checkpoint_every": 1}, 1 if evaluated else None
    config = make_config(training={"steps": 4}, logging=logging, evaluation={"every": every})
    assert error_of(train, config) == (
        f"the policy diverged at step {2 if evaluated else 3}: its logits are not finite; lower optimizer.lr (0.002) "
        "or optimizer.max_grad_norm, or raise optimizer.warmup_updates; an earlier checkpoint can start a new run, as "
        "model.path"
    )
    assert len(records(config)) == 2
    assert checkpoints(config) == ["step-000001", "step-000002"][: 1 if evaluated else 2]


def test_only_updates_in_a_row_stop_the_run(make_config, trained, poison):
    poison([1, 2, 4, 5])
    config = trained(training={"steps": 6, "minibatches": 1, "max_skipped_updates": 3})
    assert skipped(config) == [1, 1, 0, 1, 1, 0]
    again = make_config("again", training={"steps": 6, "minibatches": 1, "max_skipped_updates": 2})
    poison([4, 5])
    with pytest.raises(UserError, match=r"step 5: .* in 2 updates in a row .*again/skipped/step-000005-update-0001"):
        train(again)


def test_resuming_does_not_forget_the_updates_skipped_before(make_config, poison, spy):
    poison([2, 3, 4])
    config = make_config(training={"steps": 6, "minibatches": 1, "max_skipped_updates": 3})
    spy(module, "evaluate", lambda _, run: signal.raise_signal(signal.SIGTERM) if run.step == 3 else None)
    assert train(config)["interrupted"] == "SIGTERM"
    assert state(config, 3)[1]["skipped"] == 2
    with pytest.raises(UserError, match=r"step 4: .* in 3 updates in a row"):
        train(config, resume=True)


# --- rewards --------------------------------------------------------------------------------------------------------


@pytest.fixture
def rewarded(make_config, write_reward):
    """A config whose reward function has this body."""

    def rewarded(body, **tables):
        return make_config(reward={"function": write_reward(body)}, **{"evaluation": {"every": None}} | tables)

    return rewarded


def test_none_is_left_out_of_its_group_where_nan_is_a_mistake(rewarded, spy):
    seen = spy(module, "update", lambda _, run, rollout: rollout.response_advantages)
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


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("sys.exit(5)", "SystemExit: 5"),
        ("sys.exit()", "SystemExit"),
        ("raise BaseException('odd')", "BaseException: odd"),
    ],
)
def test_a_reward_that_raises_or_ends_the_process_names_the_sample(rewarded, example, tmp_path, end, told):
    path = tmp_path / "six.jsonl"
    path.write_text("".join((example / "train.jsonl").open().readlines()[:6]))
    config = rewarded(f"import sys\nif '621=' in prompts:\n    {end}\nreturn [0.0] * len(prompts)", data={"path": path})
    sample = rf"mine\.py:4\) on sample \d+: prompt '621=' \({path}:2\), completion '"
    with pytest.raises(UserError, match=rf"mine\.py:reward: raised {told} \(.*{sample}") as error:
        train(config)
    assert type(error.value.__cause__).__name__ == told.partition(":")[0]


def test_ctrl_c_in_a_reward_is_the_users(rewarded):
    with pytest.raises(KeyboardInterrupt):
        train(rewarded("raise KeyboardInterrupt"))


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("20 < len(prompts) < 100", "on samples 0 to 23 together, on none of them alone"),
        ("completions", "on sample 0: prompt "),
    ],
)
def test_a_reward_that_raises_for_samples_together_says_so(rewarded, condition, expected):
    config = rewarded(f"if {condition}:\n    raise OSError('the judge is away')\nreturn [0.0] * len(prompts)")
    with pytest.raises(UserError, match=r"raised OSError: the judge is away \(.*mine\.py:3\) " + expected):
        train(config)


# --- nothing to learn -----------------------------------------------------------------------------------------------


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
            "return [float(prompt[0]) for prompt in prompts]",
            {"advantages": {"estimator": "opo"}},
            1,
            5,
            "all completions of a prompt got the same",
        ),
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
    objective = {"name": "grpo", "kl_coef": 0.0, "entropy_coef": 0.0}
    config = rewarded(body, objective=objective, training={"steps": 7, "minibatches": 1}, **tables)
    train(config)
    said = warnings(capsys)
    assert {record["without_variance"] for record in records(config)} == {share}
    if "None" in body:
        assert all(record["reward"] is None and "policy_loss" not in record for record in records(config))
    if expected is None:
        assert not said
    else:
        (line,) = said
        assert line.startswith(f"fastrl: warning: step {step}: ") and expected in line


def test_a_short_run_need_not_be_five_steps_long_to_be_warned_of(rewarded, capsys):
    train(rewarded("return [1.0] * len(prompts)", training={"steps": 2, "minibatches": 1}))
    (line,) = warnings(capsys)
    assert "step 2: in the last 2 steps every completion got the reward 1" in line


def test_calls_of_reward_functions_that_all_fail_are_named_as_the_cause():
    config = SimpleNamespace(advantages=SimpleNamespace(estimator="group", grouped=True))
    numbers = {"reward": 0.0, "reward_std": 0.0, "reward/timeouts": 12.0, "reward/crashes": 0.0}
    (line,) = Watch(config, 1).look(numbers)
    assert line.startswith("in the last step every completion got the reward 0")
    assert "calls of reward functions failed (reward/timeouts 12 in this step)" in line


def test_tokens_of_another_policy_are_told_at_once_and_once():
    watch = Watch(SimpleNamespace(), 100)
    said = [watch.look({"mismatch/abs_log_ratio": mismatch}) for mismatch in (0.02, math.nan, 0.3, 0.4)]
    assert [len(lines) for lines in said] == [0, 0, 1, 0]
    assert said[2][0].startswith(
        "mismatch/abs_log_ratio is 0.3: the engine's log-probabilities are not those of the policy"
    )


def test_which_groups_have_no_variance():
    groups = [0, 0, 1, 1, 2, 2, 3, 3]

    def share(rewards, groups=groups, told_apart=None):
        return reward_metrics(rewards, groups, told_apart or [[x] for x in rewards]).get("without_variance")

    assert share([1.0, 2.0, 1.0, 1.0, None, None, None, 3.0]) == 3 / 4
    assert share([1.0, 2.0] * 4) == 0
    assert share([1.0, 2.0] * 4, list(range(8))) is None  # one completion per prompt: nothing to compare
    # Of process rewards it is the steps' that differ, within a completion too.
    steps = [[0.0, 1.0], [], [1.0], [1.0], [], [], [0.0], [1.0]]
    assert share([1.0, 2.0] * 4, told_apart=steps) == 2 / 4
    assert share([1.0, 2.0] * 3 + [1.0, None], told_apart=steps) == 3 / 4


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
