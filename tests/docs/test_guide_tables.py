"""The guides' tables of plans are what the planner says, and their script of a named objective trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from page_tables import table
from places import EXAMPLES, ROOT
from python import python

import fastrl
from fastrl.planning.command import main as plan

GUIDES = ROOT / "docs" / "guides"


def text(name: str) -> str:
    return (GUIDES / f"{name}.md").read_text(encoding="utf-8")


def code(page: str, first_line: str) -> str:
    """The python block of a page that begins with this line."""
    (found,) = [x for x in re.findall(r"(?ms)^```python\n(.*?)^```$", text(page)) if x.startswith(first_line)]
    return str(found)


def test_the_plans_of_a_callable() -> None:
    (source,) = re.findall(r"(?ms)^def spo\(.*?(?=^\n\nspo\.row_local)", text("custom_objective"))
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    local, whole = namespace["spo"], namespace["spo"].__class__(namespace["spo"].__code__, {})
    local.row_local = True
    objectives = {"`fastrl.PPO()`": fastrl.PPO(), "`spo`, `row_local`": local, "`spo` without it": whole}
    rows = table(text("custom_objective"), "objective")
    assert [cells[0] for cells in rows] == list(objectives)
    calls: list[dict[str, Any]] = [{}, {"gradients": ("hidden",)}, {"budget": "4GiB"}]
    for name, *cells in rows:
        for call, cell in zip(calls, cells, strict=True):
            plans = fastrl.plan_memory(8192, 4096, 151936, objective=objectives[name], device="cuda", **call)
            assert f"{plans.chosen.name}, {plans.chosen.units}U" == cell, (name, call)
        masked = fastrl.plan_memory(8192, 4096, 151936, objective=objectives[name], device="cuda", kept=65536)
        assert masked.chosen.name == "sparse"


def test_the_plans_of_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--tokens", "32768", "--hidden", "4096", "--vocab", "151936", "--device", "h100"]
    for change, cell in table(text("long_responses"), "change"):
        name = (re.findall(r"\b(GSPO)\b", change) or ["DAPO"])[0]
        options = " ".join(re.findall(r"`(--[^`]*)`", change)).split()
        options = options if "--objective" in options else [*options, "--objective", name]
        assert plan([*size, *options]) == 0
        (chosen,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("->")]
        found, units = chosen.split()[1:3]
        assert cell.startswith(f"{found}, {units}" if found != "sparse" else "sparse:"), (change, chosen)


@pytest.mark.slow
def test_the_script_of_a_named_objective_trains(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(code("custom_objective", "# train.py"), encoding="utf-8")
    short = ("--training.steps", "1", "--rollout.prompts_per_step", "4", "--training.minibatches", "1")
    more = ("--objective.name", "cappedgspo", "--objective.cap", "1.1", "--logging.output_dir", str(tmp_path / "run"))
    printed = python(
        script, "train", EXAMPLES / "reverse_digits" / "config.toml", *short, *more, PYTHONPATH=str(ROOT), timeout=120
    )
    assert "cappedgspo: 1 steps" in printed


def test_the_way_of_a_step() -> None:
    """From `train()` to `optimizer.step()` in at most nine files, which are there."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").partition("\n## A training step\n")[2]
    files = re.findall(r"^\| `([\w/]+\.py)` \|", page.partition("\n## ")[0], re.MULTILINE)
    texts = [(ROOT / "fastrl" / "training" / file).read_text(encoding="utf-8") for file in files]
    assert 5 < len(files) <= 9 and "def train(" in texts[0] and any("optimizer.step()" in text for text in texts)
