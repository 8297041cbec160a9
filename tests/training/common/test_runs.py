"""Runs lose nothing, whichever command: beside another process, by Ctrl-C, by kill -9, or where a bit flips."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from digit_models import EXAMPLE, TOKENIZER, narrowed
from places import EXAMPLES
from run_files import checkpoints, repeatable, write_toml

from fastrl.cli import main
from fastrl.training.common.log import RunLog

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
    "dpo": ("dpo", EXAMPLES / "stages" / "dpo.jsonl", {"training.micro_batch_size": 2}),
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
    for damaged, line in ((b"\0\0\n" + content, 1), (content + b"{}\n", 7), (content.replace(b"{", b"[", 1), 1)):
        path.write_bytes(damaged)
        capfd.readouterr()
        assert main([*command, "--resume"]) == 2
        assert f"fastrl: {path}:{line}: is not a step's record, so the file is damaged (" in capfd.readouterr().err
        assert path.read_bytes() == damaged
    path.write_bytes(content)


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

    def full(stage: Any, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fastrl.training.stages.loop.PolicyStage.save", full)
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
