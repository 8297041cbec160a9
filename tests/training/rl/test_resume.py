"""Runs that are interrupted and resumed: the same numbers, weights and state, bit for bit, as one without a stop."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from run_files import checkpoints, records, repeatable, state, write_toml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastrl.cli import main
from fastrl.training.rl.train import train
from fastrl.training.run.checkpoint import TENSORS
from fastrl.training.run.checksums import CHECKSUMS
from fastrl.training.run.folder import NUMBERS

STEPS = 6
#: A reward that draws from every generator a run has, and sends the signals that a file asks for at the step it says.
REWARD = """
import json, os, pathlib, random, signal, numpy, torch
steps = 0
def reward(prompts, completions, answer):
    global steps
    noise = 0.1 * (random.random() + random.gauss(0, 1) + numpy.random.rand() + float(torch.rand(())))
    request = pathlib.Path(__file__).with_name("request.json")
    steps += len(prompts) == 24  # not an evaluation
    if len(prompts) == 24 and request.exists():
        step, signals = json.loads(request.read_text())
        if step == steps:
            request.unlink()
            for number in signals:
                os.kill(os.getpid(), number)
    return [noise + sum(a == b for a, b in zip(c, r)) for c, r in zip(completions, answer)]
"""
PLAIN = {"training": {"steps": STEPS, "minibatches": 1, "micro_batch_tokens": 98}}
EVERYTHING = {
    "objective": {"name": "grpo", "presets": {}, "kl_coef": 0.1},
    "rollout": {"prompts_per_step": 6, "num_generations": 4, "top_p": 0.9, "batch_size": 10},
    "optimizer": {"schedule": "cosine", "warmup_updates": 3, "weight_decay": 0.01},
    "training": {"steps": STEPS, "epochs": 2, "minibatches": 3},
    "evaluation": {"every": 2},
}
DRAWN = {
    "objective": {"name": "clipcov", "fraction": 0.2, "cov_low": -9.0, "cov_high": 9.0, "presets": {}},
    "training": {"steps": STEPS, "minibatches": 2},
}


pytestmark = pytest.mark.usefixtures("at_a_terminal")


@pytest.fixture
def prepare(make_config, tmp_path, example):
    """A config of a run named like its directory; ten prompts, so that six steps go through them several times."""
    (tmp_path / "mine.py").write_text(REWARD)
    lines = (example / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:10]))
    given = {"data": {"path": str(tmp_path / "train.jsonl")}, "reward": {"function": f"{tmp_path / 'mine.py'}:reward"}}
    return lambda name, tables=PLAIN, **logging: make_config(name, **given, **tables, logging=logging)


@pytest.fixture
def ask(tmp_path):
    """Let the reward function, in a step counted from the start or the resume, send signals to its own process."""
    return lambda step, *signals: (tmp_path / "request.json").write_text(json.dumps([step, signals]))


# --- the same run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tables", [PLAIN, EVERYTHING, DRAWN], ids=["plain", "everything", "drawn by the objective"])
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(prepare, ask, tables):
    whole = prepare("unbroken", tables)
    train(whole)
    config = prepare("resumed", tables, overwrite=True)  # resuming is never overwriting
    ask(3, signal.SIGTERM)
    assert train(config)["interrupted"] == "SIGTERM"
    assert repeatable(config) == repeatable(whole)[:3]
    assert checkpoints(config) == ["step-000003"]
    summary = train(config, resume=True)
    assert repeatable(config) == repeatable(whole) and len(repeatable(whole)) == STEPS
    assert state(config, STEPS) == state(whole, STEPS)
    tensors = load_file(config.logging.output_dir / "checkpoints" / f"step-{STEPS:06d}" / TENSORS)
    assert {name.partition(".")[2] for name in tensors} == {"exp_avg", "exp_avg_sq", "step"}  # no generator's state
    expected = json.loads((whole.logging.output_dir / "summary.json").read_text())
    given = json.loads((config.logging.output_dir / "summary.json").read_text())
    assert given == summary and given["interrupted"] is None
    for name in set(expected) - {"seconds", "resumed"}:
        assert name.startswith(("time/", "memory/")) or given[name] == expected[name], name


def test_a_killed_run_resumes_at_its_last_checkpoint_and_no_step_is_recorded_twice(prepare, ask):
    """The second SIGTERM kills the process in step 4, when only step 2 is saved but step 3 is recorded."""
    whole = prepare("unbroken")
    train(whole)
    config = prepare("killed", checkpoint_every=2, tensorboard=True)
    ask(4, signal.SIGTERM, signal.SIGTERM)
    code = (
        "import json, sys; from fastrl.training.config.train import Config\n"
        "from fastrl.training.rl.train import train\n"
        "train(Config.model_validate(json.loads(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, config.model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "SIGTERM: finishing the step" in done.stderr

    metrics = config.logging.output_dir / "metrics.jsonl"
    assert [record["step"] for record in records(config)] == [1, 2, 3]
    with metrics.open("a") as file:
        file.write('{"step": 4, "rew')  # killed while writing
    folder = config.logging.output_dir / "checkpoints"
    (folder / ".unfinished").mkdir()  # killed while saving
    (folder / ".unfinished" / NUMBERS).write_text("{")
    (folder / "step-000003").mkdir()  # a model alone, as one could have copied it there
    time.sleep(1)  # TensorBoard reads files in the order of the second in their names
    train(config, resume=True)
    assert repeatable(config) == repeatable(whole)
    assert state(config, STEPS) == state(whole, STEPS)
    assert checkpoints(config) == ["step-000002", "step-000003", "step-000004", "step-000006"]
    events = EventAccumulator(str(config.logging.output_dir / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3, 4, 5, 6]


def test_a_complete_run_has_nothing_left_to_do_but_more_steps(prepare, tmp_path, capsys):
    constant = {**PLAIN, "optimizer": {"schedule": "constant"}}
    config = prepare("more", {**constant, "training": {"steps": 3}})
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    first, before = train(config), repeatable(config)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    again = train(config, resume=True)
    assert again | {"seconds": 0} == first | {"seconds": 0, "resumed": 3} and repeatable(config) == before
    assert main(["train", write_toml(tmp_path / "more.toml", config.model_dump(mode="json")), "--resume"]) == 0
    *_, done, _, follows = capsys.readouterr().out.splitlines()
    assert done.startswith("grpo: complete, all 3 steps were done before. eval/reward ")
    assert follows.startswith("next: the same with --resume and a larger --training.steps, or fastrl sample ")
    more = prepare("more", {**constant, "training": {"steps": 4}})
    assert train(more, resume=True)["steps"] == 4
    assert repeatable(more)[:3] == before and len(repeatable(more)) == 4


def test_what_decides_no_number_may_change(prepare, ask):
    ask(5, signal.SIGTERM)
    train(prepare("resumed"))
    tables = {"training": PLAIN["training"] | {"micro_batch_tokens": 42}, "evaluation": {"every": 4}}
    other = prepare("resumed", {**PLAIN, **tables}, checkpoint_every=2, keep_checkpoints=3)
    assert train(other, resume=True)["steps"] == STEPS


def test_nothing_is_unpickled(prepare, ask, monkeypatch):
    config = prepare("resumed")
    ask(3, signal.SIGTERM)
    train(config)
    (checkpoint,) = (config.logging.output_dir / "checkpoints").iterdir()
    (checksums,) = {path.name for path in checkpoint.iterdir()} - {path.name for path in checkpoint.glob("*.*")}
    assert checksums == CHECKSUMS
    assert {path.suffix for path in checkpoint.glob("*.*")} <= {".json", ".safetensors", ".jinja"}

    def refuse(*_, **__):
        raise AssertionError("a checkpoint was unpickled")

    for name in ("torch.load", "torch.serialization.load", "pickle.load", "pickle.loads"):
        monkeypatch.setattr(name, refuse)
    assert train(config, resume=True)["steps"] == STEPS


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(prepare, tmp_path):
    """Arguments of `fastrl` for a run of four steps, and its config."""
    config = prepare("commanded", {"training": {"steps": 4, "minibatches": 1}})
    return ["train", write_toml(tmp_path / "commanded.toml", config.model_dump(mode="json"))], config


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_and_the_status_says_which(command, ask, number, status):
    arguments, config = command
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    ask(2, number)
    assert main(arguments) == status
    assert len(records(config)) == 2 and checkpoints(config) == ["step-000002"]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers

    ask(2, number)  # in the last step: it is complete all the same
    assert main([*arguments, "--resume"]) == 0
    assert len(records(config)) == 4 and checkpoints(config) == ["step-000002", "step-000004"]


def test_a_second_ctrl_c_ends_at_once(command, ask, capsys):
    arguments, config = command
    ask(2, signal.SIGINT, signal.SIGINT)
    assert main(arguments) == 130
    assert capsys.readouterr().err.endswith("fastrl: interrupted\n")
    assert len(records(config)) == 1 and not (config.logging.output_dir / "checkpoints").exists()


def test_a_signal_that_is_ignored_stays_ignored(prepare, ask):
    """As Ctrl-C is in a shell's background job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ask(3, signal.SIGINT)
    assert train(prepare("background"))["steps"] == STEPS


def test_a_run_in_a_thread_takes_no_signals(prepare):
    with ThreadPoolExecutor() as pool:
        assert pool.submit(train, prepare("threaded")).result()["steps"] == STEPS
