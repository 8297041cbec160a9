"""Runs that are interrupted and resumed: the same numbers, weights and state, bit for bit, as one without a stop."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoint_files import checkpoints
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastrl.cli import main
from fastrl.training.common.checkpoint import NUMBERS, TENSORS
from fastrl.training.common.checksums import CHECKSUMS
from fastrl.training.rl.train import train

STEPS = 6
UNREPEATABLE = ("time/", "memory/")
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
        for number in signals * (step == steps):
            os.kill(os.getpid(), number)
    return [noise + sum(a == b for a, b in zip(c, r)) for c, r in zip(completions, answer)]
"""
PLAIN = {"training": {"steps": STEPS, "minibatches": 1, "micro_batch_size": 7}}
EVERYTHING = {
    "objective": {"name": "grpo", "presets": {}, "kl_coef": 0.1},
    "rollout": {"prompts_per_step": 6, "num_generations": 4, "top_p": 0.9, "batch_size": 10},
    "optimizer": {"schedule": "cosine", "warmup_updates": 3, "weight_decay": 0.01},
    "training": {"steps": STEPS, "epochs": 2, "minibatches": 3},
    "evaluation": {"every": 2},
}


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C as at a terminal: tests that run in the background of a shell would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def prepare(make_config, tmp_path, example):
    """A config of a run named like its directory; ten prompts, so that six steps go through them several times."""
    (tmp_path / "mine.py").write_text(REWARD)
    lines = (example / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:10]))

    def prepare(name, tables=PLAIN, **logging):
        tables = {**tables, "logging": {"output_dir": str(tmp_path / name), **logging}}
        reward = {"function": f"{tmp_path / 'mine.py'}:reward"}
        return make_config(data={"path": str(tmp_path / "train.jsonl")}, reward=reward, **tables)

    return prepare


@pytest.fixture
def interrupted(tmp_path):
    """Train until the reward function of a step sends signals to its own process."""

    def run(config, step=3, signals=(signal.SIGTERM,)):
        request = tmp_path / "request.json"
        request.write_text(json.dumps([step, [int(number) for number in signals]]))
        try:
            return train(config)
        finally:
            request.unlink()

    return run


def lines(config):
    """metrics.jsonl as it stands, but for the times."""
    records = [json.loads(line) for line in (config.logging.output_dir / "metrics.jsonl").read_text().splitlines()]
    return [json.dumps({k: v for k, v in record.items() if not k.startswith(UNREPEATABLE)}) for record in records]


def state(config):
    """Everything in the last step's checkpoint: bytes of tensors and, as JSON, all that is not the config."""
    directory = config.logging.output_dir / "checkpoints" / f"step-{STEPS:06d}"
    tensors = load_file(directory / "model.safetensors") | load_file(directory / TENSORS)
    numbers = json.loads((directory / NUMBERS).read_text())
    del numbers["config"]
    return {name: (str(t.dtype), t.shape, t.numpy().tobytes()) for name, t in tensors.items()}, numbers


@pytest.fixture
def unbroken(prepare):
    """A run from beginning to end, once for each set of tables."""

    def run(tables=PLAIN):
        config = prepare("unbroken", tables)
        train(config)
        return config

    return run


# --- the same run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tables", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(prepare, unbroken, interrupted, tables):
    whole = unbroken(tables)
    config = prepare("resumed", tables, overwrite=True)  # resuming is never overwriting
    assert interrupted(config)["interrupted"] == "SIGTERM"
    assert lines(config) == lines(whole)[:3]
    assert checkpoints(config) == ["step-000003"]
    summary = train(config, resume=True)
    assert lines(config) == lines(whole) and len(lines(whole)) == STEPS
    assert len(set(lines(whole))) == STEPS
    tensors, numbers = state(config)
    assert (tensors, numbers) == state(whole)
    assert {"torch", "shuffle", "prompts", "0.exp_avg", "0.exp_avg_sq", "0.step"} <= set(tensors)
    expected = json.loads((whole.logging.output_dir / "summary.json").read_text())
    given = json.loads((config.logging.output_dir / "summary.json").read_text())
    assert given == summary and given["interrupted"] is None
    for name in set(expected) - {"seconds"}:
        assert name.startswith(UNREPEATABLE) or given[name] == expected[name], name


def test_a_killed_run_resumes_at_its_last_checkpoint_and_no_step_is_recorded_twice(prepare, unbroken, tmp_path):
    """The second SIGTERM kills the process in step 4, when only step 2 is saved but step 3 is recorded."""
    whole = unbroken()
    config = prepare("killed", checkpoint_every=2, tensorboard=True)
    (tmp_path / "request.json").write_text(json.dumps([4, [signal.SIGTERM] * 2]))
    code = (
        "import json, sys; from fastrl.training.rl.config import Config; from fastrl.training.rl.train import train\n"
        "train(Config.model_validate(json.loads(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, config.model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "SIGTERM: finishing the step" in done.stderr
    (tmp_path / "request.json").unlink()

    metrics = config.logging.output_dir / "metrics.jsonl"
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2, 3]
    with metrics.open("a") as file:
        file.write('{"step": 4, "rew')  # killed while writing
    folder = config.logging.output_dir / "checkpoints"
    (folder / ".unfinished").mkdir()  # killed while saving
    (folder / ".unfinished" / NUMBERS).write_text("{")
    (folder / "step-000003").mkdir()  # a model alone, as one could have copied it there
    time.sleep(1)  # TensorBoard reads files in the order of the second in their names
    train(config, resume=True)
    assert lines(config) == lines(whole)
    assert state(config) == state(whole)
    assert checkpoints(config) == ["step-000002", "step-000003", "step-000004", "step-000006"]
    events = EventAccumulator(str(config.logging.output_dir / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3, 4, 5, 6]


def test_a_complete_run_has_nothing_left_to_do_but_more_steps(prepare):
    constant = {**PLAIN, "optimizer": {"schedule": "constant"}}
    config = prepare("more", {**constant, "training": {"steps": 3}})
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    first, before = train(config), lines(config)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    again = train(config, resume=True)
    assert again | {"seconds": 0} == first | {"seconds": 0} and lines(config) == before
    more = prepare("more", {**constant, "training": {"steps": 4}})
    assert train(more, resume=True)["steps"] == 4
    assert lines(more)[:3] == before and len(lines(more)) == 4


def test_what_decides_no_number_may_change(prepare, interrupted):
    interrupted(prepare("resumed"), step=5)
    tables = {"training": PLAIN["training"] | {"micro_batch_size": 3}, "evaluation": {"every": 4}}
    other = prepare("resumed", {**PLAIN, **tables}, checkpoint_every=2, keep_checkpoints=3)
    assert train(other, resume=True)["steps"] == STEPS


def test_nothing_is_unpickled(prepare, interrupted, monkeypatch):
    config = prepare("resumed")
    interrupted(config)
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
def command(prepare, example):
    """Arguments of ``fastrl`` for a run of four steps, and its config."""
    config = prepare("commanded", {"training": {"steps": 4, "minibatches": 1}})
    fields = (
        "model.config",
        "data.path",
        "reward.function",
        "rollout.prompts_per_step",
        "rollout.num_generations",
        "training.steps",
        "training.minibatches",
        "logging.output_dir",
        "logging.tensorboard",
    )
    options = []
    for field in fields:
        section, name = field.split(".")
        options += [f"--{field}", str(getattr(getattr(config, section), name))]
    return ["train", str(example / "config.toml"), *options], config


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_and_the_status_says_which(command, tmp_path, capfd, number, status):
    arguments, config = command
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    (tmp_path / "request.json").write_text(json.dumps([2, [number]]))
    assert main(arguments) == status
    output = capfd.readouterr()
    assert f"fastrl: {number.name}: finishing the step, then saving; once more to end at once" in output.err
    assert len(lines(config)) == 2 and checkpoints(config) == ["step-000002"]
    (checkpoint,) = (config.logging.output_dir / "checkpoints").iterdir()
    assert output.out.splitlines()[-1] == (
        f"interrupted by {number.name}, saved in {checkpoint}; the same command with --resume goes on from there"
    )
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers

    (tmp_path / "request.json").write_text(json.dumps([2, [number]]))  # in the last step: it is complete all the same
    assert main([*arguments, "--resume"]) == 0
    assert len(lines(config)) == 4 and checkpoints(config) == ["step-000002", "step-000004"]


def test_a_second_ctrl_c_ends_at_once(command, tmp_path, capsys):
    arguments, config = command
    (tmp_path / "request.json").write_text(json.dumps([2, [signal.SIGINT] * 2]))
    assert main(arguments) == 130
    assert capsys.readouterr().err.endswith("fastrl: interrupted\n")
    assert len(lines(config)) == 1 and not (config.logging.output_dir / "checkpoints").exists()


def test_a_signal_that_is_ignored_stays_ignored(prepare, interrupted):
    """As Ctrl-C is in a shell's background job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert interrupted(prepare("background"), signals=[signal.SIGINT])["steps"] == STEPS


def test_a_run_in_a_thread_takes_no_signals(prepare):
    with ThreadPoolExecutor() as pool:
        assert pool.submit(train, prepare("threaded")).result()["steps"] == STEPS
