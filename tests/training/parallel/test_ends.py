"""However a run on several processes ends: all of them do, one says why, and what was saved can be resumed."""

from __future__ import annotations

import os
import resource
import signal
from functools import partial

import pytest
import rank_runs
from run_files import checkpoints, json_lines, write_toml
from started import started

from fastrl.base.errors import UserError
from fastrl.training.data import sources
from fastrl.training.run import checkpoint
from fastrl.training.run.checksums import damage
from fastrl.training.stages.sft import SFT


@pytest.fixture
def command(tables, tmp_path):
    """The arguments of a run that saves every step, and its folder."""
    run = tables("sft", "run")
    run["logging"] |= {"checkpoint_every": 1, "keep_checkpoints": 2}
    return ["sft", write_toml(tmp_path / "config.toml", run)], tmp_path / "run"


def assert_refused(ended, *words):
    """One line on standard error, from one process."""
    (line,) = ended.errors.splitlines()
    assert line.startswith("fastrl: ") and all(word in line for word in words)
    # The others end by themselves where they lose the first, or are ended.
    assert ended.statuses.count(2) == 1 and {*ended.statuses} <= {2, 1, -signal.SIGTERM}
    assert ended.seconds < 15


def test_a_row_that_cannot_be_used(command):
    argv, folder = command
    path = folder.parent / "bad.jsonl"
    path.write_text('{"prompt": "1=", "completion": 5}\n')
    assert_refused(started([*argv, "--data.path", str(path)], 2), "bad.jsonl:1: completion: expected a string, got 5")
    assert not folder.exists()


def another_rate(rank):
    return ["--optimizer.lr", "0.5"] if rank == 1 else None


def without_the_data(rank):
    def lines(path):
        raise UserError(f"{path}: no such file")

    if rank == 1:
        sources._read_json_lines = lines


def test_what_differs_on_one_rank(command):
    argv, _ = command
    assert_refused(started(argv, 2, another_rate), "optimizer.lr", "0.001 on rank 0 and 0.5 on rank 1")
    assert_refused(started(argv, 2, without_the_data), "rows.jsonl: no such file")


def test_a_command_that_runs_in_one_process(command):
    (_, config), _ = command
    assert_refused(started(["sample", config], 2), "sample runs in one process, and torchrun started 2")
    assert_refused(started(["sft", config, "--nproc", "2"], 2), "--nproc: torchrun has started 2 processes already")


def full_disk(rank):
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def test_a_full_disk(command):
    argv, folder = command
    assert_refused(started(argv, 2, full_disk), "cannot save a checkpoint", "File too large", "there is no earlier one")
    assert checkpoints(folder) == []


def end_itself(victim, place, number, rank):
    """Have this rank end itself by a signal in its fifth forward or backward, or in the third checkpoint it writes."""
    calls = []

    def reached(count):
        calls.append(None)
        if len(calls) == count:
            os.kill(os.getpid(), number)

    if rank != victim:
        return
    if number == signal.SIGINT:  # which a job in the background ignores
        signal.signal(number, signal.default_int_handler)
    if place == "save":
        save_file = checkpoint.save_file
        checkpoint.save_file = lambda *arguments: (reached(3), save_file(*arguments))
        return
    part = SFT.part

    def noted(self, rows, total):
        if place == "forward":
            reached(5)
        loss, numbers = part(self, rows, total)
        if place == "backward" and loss.requires_grad:
            loss.register_hook(lambda gradient: reached(4))
        return loss, numbers

    SFT.part = noted


@pytest.mark.parametrize(("victim", "place"), [(0, "save"), (1, "forward"), (1, "backward"), (0, "backward")])
def test_a_rank_that_is_killed(command, tables, victim, place):
    argv, folder = command
    ended = started(argv, 2, partial(end_itself, victim, place, signal.SIGKILL))
    assert ended.statuses[victim] == -signal.SIGKILL and ended.seconds < 15
    # The other may be ended before it notices; then torchrun alone says it.
    assert all(f"rank {1 - victim} has lost another rank: " in line for line in ended.errors.splitlines())
    saved = [folder / "checkpoints" / name for name in checkpoints(folder) if name.startswith("step-")]
    assert saved and [damage(path) for path in saved] == [None] * len(saved)
    resumed = rank_runs.train("sft", tables("sft", "run"), resume=True)
    assert resumed["resumed"] == int(saved[-1].name[5:]) and resumed["steps"] == 10


@pytest.mark.parametrize(
    ("victim", "name", "announced"),
    [
        (1, "SIGTERM", ""),
        (0, "SIGINT", "\nfastrl: SIGINT: finishing the step, then saving; once more to end at once\n"),
    ],
)
def test_a_stop_signal_to_one_rank(command, tables, victim, name, announced):
    argv, folder = command
    number = signal.Signals[name]
    ended = started(argv, 2, partial(end_itself, victim, "forward", number))
    assert ended.statuses == [128 + number, 0]
    assert ended.errors == f"{announced}fastrl: {name}: saving after step 4\n"
    assert f"interrupted by {name}, saved in" in ended.output
    assert checkpoints(folder)[-1] == "step-000004" and len(json_lines(folder / "metrics.jsonl")) == 1 + 4
    assert rank_runs.train("sft", tables("sft", "run"), resume=True)["resumed"] == 4
