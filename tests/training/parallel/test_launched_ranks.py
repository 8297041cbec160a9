"""`--nproc` and torchrun: the same run, and the command's own exit status."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import rank_runs
import torch
from places import EXAMPLES, ROOT
from run_files import json_lines, write_toml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import fastrl.training.parallel.launch as launching
from fastrl.base.errors import UserError
from fastrl.training.commands import read_command
from fastrl.training.parallel.launch import on_rank
from fastrl.training.run.checksums import damage

TIMEOUT = 120  # seconds, of each command
KILLS = 3


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def fastrl(*arguments, timeout=TIMEOUT):
    """A command that has ended."""
    command = [sys.executable, "-m", "fastrl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(), check=False)


@pytest.mark.parametrize(("argument", "status"), [("--version", 0), ("nothing", 2)])
def test_the_status_is_the_commands(argument, status, tmp_path):
    """Of commands that end at once; nothing else is left of them."""
    code = f"import sys; from fastrl.training.parallel.launch import launch; sys.exit(launch(['{argument}'], 2))"
    variables = environment() | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, env=variables, check=False
    )
    assert done.returncode == status, done.stderr
    # A process may be ended before it has said the same as the first.
    assert len(set((done.stdout + done.stderr).splitlines())) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("codes", "status", "said"),
    [
        ({0: 1, 1: 7}, 7, "fastrl: rank 1 ended with status 7\n"),
        ({0: 1, 1: -9}, 137, "fastrl: rank 1 was ended by SIGKILL\n"),
        ({0: 2, 1: -15}, 2, ""),  # a rank that spoke, and one that torchrun ended
        ({0: 143}, 143, ""),  # a signal to one rank
    ],
)
def test_a_rank_that_ends_without_a_word_is_named(monkeypatch, capsys, codes, status, said):
    def fail(*_):
        raise ChildFailedError("fastrl", {rank: SimpleNamespace(exitcode=code) for rank, code in codes.items()})

    monkeypatch.setattr(launching, "elastic_launch", lambda *_: fail)
    monkeypatch.setattr(ChildFailedError, "format_msg", lambda self: "")
    monkeypatch.setattr("logging.disable", lambda level: None)
    with patch.dict(os.environ):
        assert launching.launch(["train"], 2) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("value", ["0", "two", "-1", "1.5"])
def test_a_number_of_processes_that_cannot_be_used(tables, tmp_path, capsys, value):
    from fastrl.cli import main

    assert main(["sft", write_toml(tmp_path / "config.toml", tables("sft", "run")), f"--nproc={value}"]) == 2
    assert capsys.readouterr().err == f"fastrl: --nproc: expected a number of processes of at least 1, got '{value}'\n"


def test_a_number_of_processes_that_is_missing(capsys):
    with pytest.raises(SystemExit):
        read_command("sft", ["x.toml", "--nproc"])
    assert capsys.readouterr().err.endswith("fastrl sft: error: argument --nproc: expected one argument\n")


@pytest.mark.parametrize(
    ("text", "reason"), [("", "DistBackendError"), ("[gloo/pair.cc:1] Connection closed. It may", "Connection closed")]
)
def test_a_rank_that_has_lost_another_says_so(monkeypatch, text, reason):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("fastrl.training.parallel.launch._first_to_fail", lambda: True)
    with pytest.raises(UserError, match=f"rank 0 has lost another rank: {reason}; --resume"):
        on_rank(Mock(side_effect=torch.distributed.DistBackendError(text)))


def numbers(folder):
    return [line | {"accuracy": 0} for line in json_lines(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_the_demos_config_learns_on_two_ranks(tmp_path):
    """As on one: what `make demo` runs, with another folder."""
    done = fastrl(
        "train",
        str(EXAMPLES / "reverse_digits" / "config.toml"),
        "--nproc",
        "2",
        "--logging.output_dir",
        str(tmp_path),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    last = json_lines(tmp_path / "metrics.jsonl")[-1]
    assert last["step"] == 120 and last["eval/exact_match"] >= 0.99


@pytest.mark.slow
def test_torchrun_and_nproc_and_one_process_agree(tables, tmp_path):
    tables_of = {name: tables("sft", name) for name in ("one", "nproc", "torchrun")}
    paths = {name: write_toml(tmp_path / f"{name}.toml", each) for name, each in tables_of.items()}
    done = fastrl("sft", paths["nproc"], "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 10/10") == 1 and "2 processes, 1 copy of the weights" in done.stdout
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fastrl"]
    subprocess.run([*command, "sft", paths["torchrun"]], timeout=TIMEOUT, env=environment(), check=True)
    rank_runs.train("sft", tables_of["one"])
    for name in ("nproc", "torchrun"):
        for mine, theirs in zip(numbers(tmp_path / name), numbers(tmp_path / "one"), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def ranks_of(launcher):
    """The process ids of a launcher's ranks."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children]


@pytest.mark.slow
def test_kills_at_random_moments_change_no_metric(tables, tmp_path):
    """Of a rank by SIGKILL, or of it or the launcher by SIGTERM; the seed is printed for a failure."""
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    run = tables("sft", "run")
    run["training"] |= {"epochs": 12}
    whole = run | {"logging": run["logging"] | {"output_dir": str(tmp_path / "whole")}}
    rank_runs.train("sft", whole)
    run["logging"] |= {"checkpoint_every": 1, "keep_checkpoints": 2}
    path, folder = write_toml(tmp_path / "config.toml", run), tmp_path / "run"
    metrics, statuses = folder / "metrics.jsonl", []
    for kills in range(KILLS + 1):
        saved = sorted((folder / "checkpoints").glob("step-*"))
        assert [damage(checkpoint) for checkpoint in saved] == [None] * len(saved)
        options = ["--resume"] if saved else ["--logging.overwrite", "true"]
        command = [sys.executable, "-m", "fastrl", "sft", path, "--nproc", "2", *options]
        size = metrics.stat().st_size if metrics.exists() else 0
        process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
        try:
            while kills < KILLS and process.poll() is None and (not metrics.exists() or metrics.stat().st_size <= size):
                try:
                    process.wait(0.01)  # until it goes on
                except subprocess.TimeoutExpired:
                    continue
            if kills < KILLS and process.poll() is None:
                try:
                    process.wait(draw.uniform(0.0, 0.5))
                except subprocess.TimeoutExpired:
                    number = signal.SIGKILL if kills % 2 == 0 else signal.SIGTERM
                    victims = [*ranks_of(process.pid), *([] if number == signal.SIGKILL else [process.pid])]
                    os.kill(draw.choice(victims), number)
            process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
        statuses.append(process.returncode)
    assert statuses[-1] == 0 and 137 in statuses and 143 in statuses, statuses
    for mine, theirs in zip(json_lines(metrics), json_lines(tmp_path / "whole" / "metrics.jsonl"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)  # 60 updates amplify what rounding differs in
