"""docs/troubleshooting.md: its errors are those that small mistakes really give, digit for digit or but for numbers."""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from digit_models import EXAMPLE, TOKENIZER, narrowed
from places import EXAMPLES, ROOT
from run_files import write_toml

import fastrl
import fastrl.backend.choice as choice
import fastrl.passes.head as head
import fastrl.training.rl.advantages as module_of_advantages
from fastrl.backend.cpp import build
from fastrl.base.errors import UserError
from fastrl.cli import main
from fastrl.planning.budget import BudgetTooSmall
from fastrl.training.parallel.world import ALONE
from fastrl.training.run.health import Watch
from fastrl.training.run.lock import sole_writer
from fastrl.training.run.loop import saved_on_error

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def part(heading: str) -> str:
    """What stands below a heading of level 2."""
    text = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert text
    return text


def rows(heading: str) -> list[str]:
    """The first cells of the tables there, without their backticks."""
    return re.findall(r"^\| `(.+?)` \|", part(heading), re.MULTILINE)


def quotes(heading: str) -> list[str]:
    """The lines of the blocks of text there."""
    blocks = re.findall(r"^```text\n(.*?)^```", part(heading), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def general(line: str) -> str:
    """The line without its numbers, which another machine may have others of."""
    return re.sub(r"\d+(\.\d+)?", "0", line)


# --- arguments --------------------------------------------------------------------------------------------------------


def mistakes() -> Iterator[Callable[[], object]]:
    """Wrong calls in the order of the page's table."""
    torch.manual_seed(0)
    batch, time, width, vocab = 4, 8, 16, 64
    hidden, weight = torch.randn(batch, time, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    ids, mask, advantages = torch.full((batch, time), 46), torch.ones(batch, time), torch.randn(batch)
    negative = ids.clone()
    negative[1, 2] = -100
    few = fastrl.SamplingMask.from_lists([[1, 2]] * (batch * time))
    lengths = torch.tensor([0, 8, 16, 24, 30], dtype=torch.int32)

    def wrong(targets: torch.Tensor = ids, head: torch.Tensor = weight, **options: Any) -> Callable[[], object]:
        given = {"objective": fastrl.DAPO(), "advantages": advantages, "mask": mask} | options
        return lambda: fastrl.linear_policy_loss(hidden, head, targets, **given)

    def inside(call: Callable[[], object]) -> Callable[[], object]:
        return fastrl.check_inputs()(call)  # a context manager is a decorator too

    def twice() -> None:
        loss = wrong()().loss
        loss.backward(retain_graph=True)
        loss.backward()

    def consumed() -> None:
        logits = torch.randn(batch, time, vocab, requires_grad=True) * 1
        for _ in range(2):
            fastrl.logits_policy_loss(logits, ids, objective=fastrl.DAPO(), advantages=advantages, inplace=True)

    yield wrong(ids[:, 1:])
    yield wrong(ids.int())
    yield wrong(negative)
    yield wrong(mask=mask / 2)
    yield wrong(mask=mask[:, 1:])
    yield wrong(head=weight.bfloat16())
    yield wrong(advantages=advantages[:2])
    yield wrong(advantages=[1.0] * batch)
    yield wrong(old_logprobs=mask / 2)
    yield inside(wrong(advantages=advantages * torch.nan))
    yield wrong(objective=fastrl.GRPO())
    yield wrong(objective="grpo")
    yield lambda: fastrl.DAPO(clip_lo=0.1)
    yield wrong(temperature=0.0)
    yield lambda: fastrl.linear_policy_loss(
        hidden.reshape(-1, width),
        weight,
        ids.reshape(-1),
        objective=fastrl.DAPO(),
        advantages=advantages,
        cu_seqlens=lengths,
    )
    yield lambda: fastrl.group_advantages(advantages, [0, 0, 1])
    yield wrong(sampling_mask=few)
    yield wrong(memory_budget="lots")
    yield twice
    yield consumed


def test_each_error_on_an_argument_is_quoted_as_it_is() -> None:
    found = []
    for mistake in mistakes():
        with pytest.raises((ValueError, TypeError, IndexError, RuntimeError)) as caught:
            mistake()
        found.append(str(caught.value))
    assert found == rows("Errors on arguments")


# --- memory and backends ----------------------------------------------------------------------------------------------


def test_the_errors_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list(map(general, quotes("Out of memory (OOM)")))
    hidden, weight = torch.randn(2, 16, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True)
    given = {"objective": fastrl.DAPO(), "advantages": torch.ones(2)}
    targets = torch.zeros(2, 16, dtype=torch.int64)
    with pytest.raises(BudgetTooSmall) as small:
        fastrl.linear_policy_loss(hidden, weight, targets, memory_budget="1KiB", **given)
    assert general(f"{type(small.value).__name__}: {small.value}") in lines
    assert small.value.least > 1024

    def fails(*args: Any, **options: Any) -> None:
        torch.empty(1 << 50)

    monkeypatch.setattr(head, "empty", fails)
    hidden, targets = torch.randn(2, 1024, 64, requires_grad=True), torch.zeros(2, 1024, dtype=torch.int64)
    weight = torch.zeros(151936, 64, requires_grad=True)
    with pytest.raises(RuntimeError) as out:
        fastrl.linear_policy_loss(hidden, weight, targets, **given)
    first, second = f"{type(out.value).__name__}: {out.value}".splitlines()
    assert re.fullmatch(r"RuntimeError: \[enforce fail.*DefaultCPUAllocator: can't allocate memory.*", first)
    assert general(second) in lines

    with pytest.raises(UserError) as full, saved_on_error(lambda: Path("runs/mine/checkpoints/step-000120"), ALONE):
        raise torch.OutOfMemoryError("CUDA out of memory. ...\nmore")
    assert general(f"fastrl: {full.value}") in lines


def test_the_reasons_of_a_missing_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, reasons = quotes("A backend is missing"), rows("A backend is missing")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.BackendUnavailable) as compiler:
        build.compiler_version()
    assert str(compiler.value) in reasons
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(choice, "interpreted", lambda: False)
    no_gpu = choice._why_unavailable.__wrapped__("triton")
    assert no_gpu in reasons or "does not import" in no_gpu
    monkeypatch.setattr(choice, "_why_unavailable", {"triton": reasons[-1], "cpp": str(compiler.value)}.get)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert choice._default.__wrapped__("cpu") == "torch"
    with pytest.raises(RuntimeError) as forced, fastrl.use_backend("triton"):
        pass
    with pytest.raises(RuntimeError) as elsewhere:
        choice.row_functions("cpp", SimpleNamespace(device=torch.device("cuda:0")))
    shown = (f"UserWarning: {caught[0].message}", *(f"RuntimeError: {x.value}" for x in (forced, elsewhere)))
    assert list(shown) == lines


# --- commands ---------------------------------------------------------------------------------------------------------

REWARDS = """
def short(prompts, completions, **columns):
    return [1.0]

def bad(prompts, completions, **columns):
    raise ValueError('mine')

def col(prompts, completions, solution):
    return [1.0]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Run a command, small; returns what it wrote to the standard error, with short paths and without numbers."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("fastrl.training.run.log.RunLog.draw", lambda self: None)
    narrowed(tmp_path)
    (tmp_path / "r.py").write_text(REWARDS)
    shutil.copy(EXAMPLE / "train.jsonl", tmp_path)

    def run(command: str, name: str, *switches: str, **tables: Any) -> list[str]:
        settings: dict[str, Any] = {
            "model": {"config": str(tmp_path / "model.json"), "tokenizer": TOKENIZER},
            "data": {"path": str(tmp_path / "train.jsonl")},
            "optimizer": {"lr": 0.002, "schedule": "linear"},
            "training": {"device": "cpu", "threads": 1},
            "logging": {"output_dir": str(tmp_path / "runs" / name), "tensorboard": False},
        }
        if command == "train":
            settings["objective"] = {"name": "grpo", "kl_coef": 0.0}
            settings["reward"] = {"function": f"{EXAMPLE}/reward.py:reward"}
            settings["rollout"] = {"prompts_per_step": 6, "num_generations": 4, "max_new_tokens": 4}
            settings["training"] |= {"steps": 2}
        for table, fields in tables.items():
            settings[table] = settings.get(table, {}) | fields
        main([command, write_toml(tmp_path / "config.toml", settings), *switches])
        return [general(line.replace(f"{tmp_path}/", "")) for line in capfd.readouterr().err.splitlines()]

    return run


def test_runs_that_end_by_nan(run: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    train, diverged, sft = map(general, quotes("NaN"))
    rows = {"path": str(EXAMPLES / "stages" / "sft.jsonl")}
    assert sft in run("sft", "sft", data=rows, optimizer={"lr": 1e30}, training={"batch_size": 20, "epochs": 1})
    assert diverged in run("train", "diverged", optimizer={"lr": 1e38}, training={"steps": 3})
    monkeypatch.setattr(module_of_advantages, "group_advantages", lambda scores, *args, **options: scores * math.nan)
    steps = {"steps": 5, "epochs": 2}
    assert train in run("train", "mine", training=steps)


def test_a_budget_that_is_too_small_for_a_run(run: Callable[..., list[str]]) -> None:
    (line,) = run("train", "mine", training={"memory_budget": "1KiB", "minibatches": 2})
    assert line in map(general, quotes("Out of memory (OOM)"))


def test_an_engine_that_does_not_answer(run: Callable[..., list[str]]) -> None:
    pytest.importorskip("httpx2")
    engine = {"engine": "vllm", "url": "http://127.0.0.1:9", "timeout": 0.2}
    assert run("train", "mine", rollout=engine) == list(map(general, quotes("The engine does not answer")))


def test_the_warning_of_a_mismatch() -> None:
    (line,) = Watch(SimpleNamespace(), 10).look({"mismatch/abs_log_ratio": 0.19, "grad_norm": 1.0})
    assert [f"fastrl: warning: step 1: {line}"] == quotes("The engine does not match")


def test_a_resume_that_is_refused(run: Callable[..., list[str]], tmp_path: Path) -> None:
    every = {"checkpoint_every": 1}
    assert run("train", "mine", logging=every) == []
    folder = tmp_path / "runs" / "mine"
    found = run("train", "mine", "--resume", logging=every, optimizer={"lr": 0.5})
    found += run("train", "mine", "--resume", logging=every, training={"steps": 3})
    with (tmp_path / "train.jsonl").open("r+") as file:
        rest = file.read().partition("\n")[2]
        file.seek(0)
        file.write(rest + rest.partition("\n")[0] + "\n")
    found += run("train", "mine", "--resume", logging=every)
    weights = folder / "checkpoints" / "step-000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"?")
    found += run("train", "mine", "--resume", logging=every)
    found += run("train", "mine")
    with sole_writer(folder, folder / ".lock", "train", "logging.output_dir"):
        found += run("train", "mine")
    (folder / ".fastrl-run").unlink()
    found += run("train", "mine")
    expected = list(map(general, rows("Resume is refused")))
    anywhere = re.compile(r" on \S+ since \S+ \S+ \S+;")  # the machine and the time
    for line, row in zip(found, expected, strict=False):
        assert anywhere.sub(" on vm;", row) in anywhere.sub(" on vm;", line)
    assert len(found) == len(expected) - 1  # the last is of another version


def test_mistakes_in_a_config(run: Callable[..., list[str]], tmp_path: Path) -> None:
    unknown, wrong, *functions = map(general, quotes("Errors on arguments"))
    assert run("train", "mine", "--training.minibatch", "3") == [unknown]
    assert run("train", "mine", "--training.minibatches", "many") == [wrong]
    for name, expected in zip(("short", "bad", "col"), functions, strict=True):
        (line,) = run(
            "train", "mine", "--logging.overwrite", "true", reward={"function": str(tmp_path / f"r.py:{name}")}
        )
        assert line == expected
