"""Runs lose nothing, whichever command: beside another process, by Ctrl-C, by kill -9, or where a bit flips."""

from __future__ import annotations

import errno
import json
import os
import pty
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_models import EXAMPLE, TOKENIZER, narrowed
from places import EXAMPLES
from run_files import checkpoints, records, repeatable, write_toml
from safetensors.torch import load_file

from fastrl.base.errors import UserError
from fastrl.cli import main
from fastrl.planning.budget import BudgetTooSmall
from fastrl.training.run.log import RunLog

pytestmark = pytest.mark.usefixtures("at_a_terminal")
LORA = {"model.lora_rank": 2, "model.lora_alpha": 64}
#: Name -> the command, its rows, and its settings beside the common ones. Epochs of four steps.
COMMANDS: dict[str, tuple[str, Path, dict[str, Any]]] = {
    "train": (
        "train",
        EXAMPLE / "train.jsonl",
        {
            "objective.name": "grpo",
            "reward.function": f"{EXAMPLE}/reward.py:reward",
            "rollout.prompts_per_step": 6,
            "rollout.num_generations": 4,
            "rollout.max_new_tokens": 4,
            "training.minibatches": 2,
            "evaluation.every": 5,
        },
    ),
    "sft": ("sft", EXAMPLES / "stages" / "sft.jsonl", {"training.packing": True}),
    "sft-lora": ("sft", EXAMPLES / "stages" / "sft.jsonl", LORA),
    "dpo": ("dpo", EXAMPLES / "stages" / "dpo.jsonl", {"training.micro_batch_tokens": 28}),
    "dpo-lora": ("dpo", EXAMPLES / "stages" / "dpo.jsonl", LORA),
    "reward-model": ("reward-model", EXAMPLES / "stages" / "reward_model.jsonl", {}),
}
STEPS = 12
#: What the others do not have: adapters, the trainer's rollouts, a row's reference, a classifier.
DISTINCT = ("train", "sft", "dpo-lora", "reward-model")
COMMON = {
    "model.tokenizer": TOKENIZER,
    "data.path": "rows.jsonl",
    "data.eval_path": "held_out.jsonl",
    "training.device": "cpu",
    "training.threads": 1,
    "optimizer.lr": 1e-2,
    "optimizer.weight_decay": 0.01,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_updates": 3,
    "logging.tensorboard": False,
    "logging.overwrite": True,  # what beside a live run would delete it
    "logging.keep_checkpoints": 2,
}


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a small run of one of COMMANDS in the folder `tmp_path / folder`."""

    def make(name: str, folder: str, **logging: Any) -> list[str]:
        command, rows, own = COMMANDS[name]
        lines = rows.read_text().splitlines(keepends=True)
        (tmp_path / "rows.jsonl").write_text("".join(lines[:14]))  # the last of four batches is smaller
        (tmp_path / "held_out.jsonl").write_text("".join(lines[14:17]))
        length = {"steps": STEPS} if command == "train" else {"epochs": STEPS // 4, "batch_size": 4}
        given = COMMON | own | {"model.config": str(narrowed(tmp_path)), "training": length}
        given |= {"logging": {"output_dir": folder, **logging}}
        return [command, write_toml(tmp_path / f"{folder}.toml", given)]

    return make


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Do something once, as soon as a step is recorded and the run still goes on."""

    def at_step(step: int, action: Callable[[], object]) -> None:
        write = RunLog.write

        def hooked(log: RunLog, number: int, *rest: Any) -> None:
            write(log, number, *rest)
            if number == step:
                monkeypatch.setattr(RunLog, "write", write)
                action()

        monkeypatch.setattr(RunLog, "write", hooked)

    return at_step


def files(folder: Path, *suffixes: str) -> dict[str, bytes]:
    """The files in a folder and below, or those with these suffixes."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not suffixes or path.suffix in suffixes}


def results(folder: Path) -> list[dict[str, bytes]]:
    """The weights, moments and generators of a complete run, and the model that a stage leaves beside them."""
    checkpoint = folder / "checkpoints" / f"step-{STEPS:06d}"
    return [files(path, ".safetensors") for path in (checkpoint, folder / "model") if path.exists()]


@pytest.mark.parametrize(
    "name", [name if name in DISTINCT else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
)
def test_a_run_goes_on_bit_for_bit_and_nothing_comes_between(name, arguments, at_step, tmp_path, capfd, monkeypatch):
    """Stopped in its second epoch, once others have tried to write to its folder; then a bit flips in each file."""
    if "lora" in name:
        pytest.importorskip("peft")
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    assert main(arguments(name, "whole")) == 0
    command, number = arguments(name, "stopped"), signal.SIGINT if "lora" in name else signal.SIGTERM

    def disturb():
        before = files(folder)
        capfd.readouterr()
        for attempt in (command, [*command, "--resume"]):
            assert main(attempt) == 2
            assert re.fullmatch(
                rf"fastrl: {folder}: is being written to by process {os.getpid()} \(fastrl {command[0]}\) on .* since "
                r".*; wait for it or stop it, or choose another --logging\.output_dir\n",
                capfd.readouterr().err,
            )
        assert files(folder) == before
        if name == "sft":  # reading is no writing; drawing takes longer than the run
            assert main(["report", str(folder)]) == 0 and (folder / "report.html").exists()
        os.kill(os.getpid(), number)

    at_step(6, disturb)
    assert main(command) == 128 + number
    output = capfd.readouterr()
    assert f"fastrl: {number.name}: finishing the step, then saving; once more to end at once" in output.err
    assert output.out.splitlines()[-1] == (
        f"interrupted by {number.name}, saved in {folder / 'checkpoints' / 'step-000006'}; the same command with "
        "--resume goes on from there"
    )
    assert repeatable(folder) == repeatable(whole)[:6] and len(repeatable(whole)) == STEPS
    assert checkpoints(folder) == ["step-000006"]
    assert not (folder / "model").exists() and not (folder / ".lock").exists()
    assert json.loads((folder / "summary.json").read_text())["interrupted"] == number.name

    check_every_file(command, folder / "checkpoints" / "step-000006", capfd)
    check_the_record(command, folder / "metrics.jsonl", capfd)
    # It is in the checkpoint: the model may have moved since.
    monkeypatch.delattr("fastrl.training.stages.dpo.PreferenceStage.before")
    assert main([*command, "--resume"]) == 0
    assert repeatable(folder) == repeatable(whole)
    assert results(folder) == results(whole) and all(results(whole))
    assert len(results(whole)) == 1 + (name != "train")
    assert checkpoints(folder) == ["step-000006", f"step-{STEPS:06d}"]


def check_every_file(command, checkpoint, capfd):
    """A bit that flips in any file of a checkpoint is refused by name, and so is a file that is missing."""
    found = files(checkpoint)
    assert {"training_state.safetensors", "training_state.json", "tokenizer.json", "SHA256SUMS"} <= set(found)
    assert {"model.safetensors", "adapter_model.safetensors"} & set(found)
    for number, (file, content) in enumerate(found.items()):
        place = len(content) * number // len(found)  # anywhere
        flipped = bytearray(content)
        flipped[place] ^= 1 << number % 8
        (checkpoint / file).write_bytes(flipped)
        capfd.readouterr()
        assert main([*command, "--resume"]) == 2, (file, place)
        assert capfd.readouterr().err == (
            f"fastrl: {checkpoint}: the checkpoint is damaged: {file} is not as it was written; there is no intact one "
            "before it\n"
        )
        (checkpoint / file).write_bytes(content)
    (checkpoint / file).unlink()
    assert main([*command, "--resume"]) == 2
    assert f"the checkpoint is damaged: {file} is missing; " in capfd.readouterr().err
    (checkpoint / file).write_bytes(content)


def check_the_record(command, path, capfd):
    """A damaged metrics.jsonl is refused by its line, and left as it is."""
    content = path.read_bytes()
    for damaged, line in ((b"\0\0\n" + content, 1), (content + b"{}\n", 8), (content.replace(b"{", b"[", 1), 1)):
        path.write_bytes(damaged)
        capfd.readouterr()
        assert main([*command, "--resume"]) == 2
        assert f"fastrl: {path}:{line}: is not a step's record, so the file is damaged (" in capfd.readouterr().err
        assert path.read_bytes() == damaged
    path.write_bytes(content)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, Exception], Any]:
    """The context in which one call of a function, counted from 1, raises."""

    @contextmanager
    def failing(path: str, call: int, error: Exception) -> Iterator[None]:
        module, _, name = path.rpartition(".")
        function, calls = getattr(import_module(module), name), count(1)

        def fail(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                raise error
            return function(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(path, fail)
            yield

    return failing


#: An error in step 4: where, at which call, and what a user reads of it.
FAILURES: dict[str, tuple[str, int, Exception, str]] = {
    "rollout": ("fastrl.training.rl.train.collect", 4, UserError("mine.py: raised"), "mine.py: raised"),
    "update": ("fastrl.training.rl.update._clip", 7, torch.OutOfMemoryError("no GiB"), "out of memory: no GiB"),
    "budget": (
        "fastrl.training.rl.update.linear_policy_loss",
        7,
        BudgetTooSmall("9 bytes", 9),
        "training.memory_budget: 9 bytes",
    ),
    "stage": (
        "fastrl.training.stages.loop._clip",
        4,
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        "out of memory: DefaultCPUAllocator: can't allocate memory: 9 bytes; saved",
    ),
}


@pytest.mark.parametrize(
    ("name", "failure"),
    [("train", "rollout"), ("train", "update"), ("train", "budget"), *((name, "stage") for name in DISTINCT[1:])],
)
def test_an_error_loses_no_step_before_it(name, failure, arguments, failing, tmp_path, capfd):
    """One command serves the first start and the next, and ends where the whole run does, bit for bit."""
    if "lora" in name:
        pytest.importorskip("peft")
    assert main(arguments(name, "whole")) == 0
    command, (place, call, error, text) = [*arguments(name, "run"), "--resume"], FAILURES[failure]
    with failing(place, call, error):
        assert main(command) == 2
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003"
    hint = f"saved in {checkpoint}; the same command with --resume goes on from there"
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith(f"fastrl: {text}") and hint in last
    assert main(command) == 0
    assert repeatable(tmp_path / "run") == repeatable(tmp_path / "whole")
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def test_updates_of_a_step_that_fails_are_kept(arguments, failing, tmp_path):
    """The first of two was made: the step is drawn anew from what it left."""
    command = arguments("train", "run")
    with failing("fastrl.training.rl.update._clip", 8, RuntimeError("mine")), pytest.raises(RuntimeError, match="mine"):
        main(command)
    state = load_file(tmp_path / "run" / "checkpoints" / "step-000003" / "training_state.safetensors")
    assert state["0.step"] == 7
    assert main([*command, "--resume"]) == 0
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("name", ["train", "sft"])
def test_an_error_in_an_evaluation_loses_no_step(name, arguments, failing, tmp_path, capfd):
    command = arguments(name, "run")
    # Once before the first step. In a stage every step measures once, and an epoch's last once more.
    place, call, step = ("rl.train.evaluate", 2, 5) if name == "train" else ("stages.loop.measure", 6, 4)
    with failing(f"fastrl.training.{place}", call, ValueError("mine")), pytest.raises(ValueError, match="mine"):
        main(command)
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-00000{step}"
    hint = f"fastrl: ValueError; saved in {checkpoint}; the same command with --resume goes on from there"
    assert hint in capfd.readouterr().err.splitlines()
    assert main([*command, "--resume"]) == 0
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, STEPS + 1))


def test_what_cannot_be_recorded_is_in_the_checkpoint(arguments, tmp_path, capfd, monkeypatch):
    command, write = arguments("sft", "run"), RunLog.write

    def full(log: RunLog, step: int, *rest: Any) -> None:
        if step == 4:
            raise UserError(f"{log.path}: cannot write step 4")
        write(log, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", full)
        assert main(command) == 2
    assert "cannot write step 4; saved in " in capfd.readouterr().err
    assert checkpoints(tmp_path / "run") == ["step-000004"]


def test_an_error_before_the_first_step_leaves_room_for_the_next_try(arguments, failing, tmp_path, capfd):
    command = [*arguments("sft", "run"), "--logging.overwrite", "false", "--resume"]
    for _ in range(2):
        with failing("fastrl.training.stages.loop._clip", 1, UserError("mine")):
            assert main(command) == 2
        assert capfd.readouterr().err.splitlines()[-1] == "fastrl: mine"
    assert main(command) == 0


def test_a_run_without_a_checkpoint_is_begun_again_by_resume(arguments, tmp_path, capfd):
    """As one that was killed before its first. Records of another config stay."""
    command, folder = [*arguments("sft", "run"), "--logging.overwrite", "false"], tmp_path / "run"
    assert main(command) == 0
    before = repeatable(folder)
    shutil.rmtree(folder / "checkpoints")
    for other in (command, [*command, "--optimizer.lr", "0.5", "--resume"]):
        assert main(other) == 2
        assert "holds a run already" in capfd.readouterr().err
        assert repeatable(folder) == before
    assert main([*command, "--resume"]) == 0
    assert "holds no checkpoint to resume from; starting anew" in capfd.readouterr().err
    assert repeatable(folder) == before


def test_checkpoints_by_the_clock_count_among_those_that_are_kept(arguments, at_step, tmp_path):
    found: list[list[str]] = []
    at_step(9, lambda: found.append(checkpoints(tmp_path / "run")))
    assert main(arguments("sft", "run", checkpoint_minutes=1e-9, checkpoint_every=5)) == 0
    # keep_checkpoints is 2 here
    assert found == [["step-000007", "step-000008"]]
    assert checkpoints(tmp_path / "run") == ["step-000011", "step-000012"]


def test_an_overwritten_run_is_kept_aside_if_it_has_a_checkpoint(arguments, failing, tmp_path):
    folder = tmp_path / "run"
    assert main(arguments("sft", "run")) == 0
    before = files(folder)
    with failing("fastrl.training.stages.loop._clip", 1, UserError("mine")):
        assert main(arguments("sft", "run")) == 2
    assert files(folder / "replaced") == before
    assert main(arguments("sft", "run")) == 0  # what it replaces has nothing to keep
    assert files(folder / "replaced") == before


def test_an_old_checkpoint_that_cannot_be_removed_ends_nothing(arguments, tmp_path, capfd, monkeypatch):
    def busy(directory: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr("fastrl.training.run.checkpoint.remove", busy)
    assert main(arguments("sft", "run", checkpoint_every=4)) == 0
    old = tmp_path / "run" / "checkpoints" / "step-000004"
    warning = f"fastrl: warning: {old}: cannot be removed: [Errno {errno.EBUSY}] Device or resource busy"
    assert warning in capfd.readouterr().err.splitlines()


def test_a_full_disk_under_the_record_is_one_line(arguments, at_step, tmp_path, capfd):
    path, limits = tmp_path / "run" / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    at_step(3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1])))
    try:
        assert main(arguments("sft", "run")) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith(f"fastrl: {path}: cannot write step 4: [Errno {errno.EFBIG}]")
    assert "step 4: cannot save a checkpoint in" in last


def test_a_record_that_lacks_steps_is_told(arguments, at_step, tmp_path, capfd):
    command = arguments("sft", "run")
    at_step(6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert main(command) == 143
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    assert main([*command, "--resume"]) == 0
    assert f"fastrl: warning: {path}: not all steps up to the checkpoint's, 6, are in it\n" in capfd.readouterr().err


def test_a_model_that_cannot_be_saved_is_in_the_checkpoint(arguments, tmp_path, capfd, monkeypatch):
    command, folder = arguments("sft", "run"), tmp_path / "run"

    def full(model: Any, directory: Path, state_dict: None) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fastrl.training.stages.loop.save_pretrained", full)
        assert main(command) == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"fastrl: {folder / 'model'}: cannot save the model: [Errno 28] No space left on device; it is in "
        f"{folder / 'checkpoints' / 'step-000012'}, and --resume writes it again"
    )
    assert not list(folder.glob("*model*"))
    assert main([*command, "--resume"]) == 0 and (folder / "model" / "model.safetensors").exists()


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Start a command as a process of its own, which does not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def start(command: list[str]) -> subprocess.Popen[str]:
        code = [sys.executable, "-m", "fastrl.cli", *command]
        started.append(subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def wait_for(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    """Until the process has recorded so many steps."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"step {steps} was not reached: {process.communicate(timeout=60)[0][-3000:]}")
        time.sleep(0.001)


@pytest.mark.usefixtures("limited")
def test_a_terminal_that_closes_ends_a_run_as_sigterm_does(arguments, tmp_path):
    """With SIGHUP, at once and from its shell, and with errors for whoever writes to it."""
    command, folder = [*arguments("sft", "run"), "--training.epochs", "5000"], tmp_path / "run"
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-m", "fastrl.cli", *command])
    try:
        while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").read_bytes().count(b"\n") < 3:
            assert os.read(terminal, 1 << 16)  # raises once the process has ended
        os.close(terminal)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGHUP)
    finally:
        _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    steps = len(records(folder))
    assert checkpoints(folder) == [f"step-{steps:06d}"]
    assert json.loads((folder / "summary.json").read_text())["interrupted"] == "SIGHUP"


def test_a_live_process_keeps_its_folder_and_a_killed_one_leaves_it(arguments, start, tmp_path, capsys):
    """The processes of all commands are in the slow test below; this is the fast one of them."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    assert main(arguments("sft", "whole")) == 0
    command = arguments("sft", "killed", checkpoint_every=1)
    process = start(command)
    wait_for(process, folder, 3)
    process.send_signal(signal.SIGSTOP)  # it lives, and has time
    before = files(folder)
    for attempt in (command, [*command, "--resume"]):
        assert main(attempt) == 2
        assert f"is being written to by process {process.pid} (fastrl sft) on " in capsys.readouterr().err
    assert files(folder) == before
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and (folder / ".lock").exists()
    assert main([*command, "--resume"]) == 0
    assert repeatable(folder) == repeatable(whole) and results(folder) == results(whole)
    assert not (folder / ".lock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_processes_of_every_command(name, arguments, start, tmp_path, monkeypatch):
    """Two at once, kill -9, Ctrl-C and SIGTERM, each at a moment of chance; then it is the run without all that."""
    if "lora" in name:
        pytest.importorskip("peft")
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 160)
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    assert main(arguments(name, "whole")) == 0
    command = arguments(name, "stopped", checkpoint_every=1)
    process = start(command)
    wait_for(process, folder, 3)
    process.send_signal(signal.SIGSTOP)
    before = files(folder)
    second = start(command)  # which would overwrite it
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 2 and f"by process {process.pid} (fastrl {command[0]}) on " in output, output
    assert files(folder) == before
    process.send_signal(signal.SIGCONT)
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        time.sleep(draw.uniform(0, 0.2))
        process.send_signal(number)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), output
        done = int(checkpoints(folder)[-1][5:])
        process = start([*command, "--resume"])
        wait_for(process, folder, done + 3)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert repeatable(folder) == repeatable(whole) and results(folder) == results(whole)
