"""benchmarks/targets.py: which ratios it forms, of which rows, and what it says of those that were not measured."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from places import BENCHMARKS

pytest.importorskip("tabulate")
sys.path.insert(0, str(BENCHMARKS))

import targets

from fastrl.bench import suites

SHAPE = {"N": 8192, "V": 151936}


def row(contender: str, milliseconds: float | None, **fields: Any) -> dict[str, Any]:
    found = {
        "suite": "logits",
        "shape": SHAPE,
        "dtype": "bfloat16",
        "workload": "loss and gradient",
        "contender": contender,
        "milliseconds_median": milliseconds,
        "milliseconds_limit": 2.0,
        "plan": None,
        "cheapest_plan": None,
        "peak_temporary_bytes": None,
    }
    return found | fields


def measured(found: list[list[dict[str, Any]]]) -> dict[str, tuple[str, str]]:
    """What was measured and whether that is enough, by the ratio's words, of the targets that any row is for."""
    return {line[2]: line[4:6] for line in targets.lines(found) if line[1] == "8192x151936"}


def test_ratios_to_the_limit_and_to_others() -> None:
    rows = [row("fastrl, in place", 2.7), row("eager torch", 10.8), row("Liger triton_grpo_loss", None)]
    assert measured([rows]) == {
        "ours / its limit": ("1.350", "NO"),
        "eager torch / ours": ("4.000", "NO"),
        "Liger triton_grpo_loss / ours": ("", "not measured"),
    }


def test_the_other_may_belong_to_another_workload_of_the_same_run() -> None:
    dense = {"suite": "masks", "workload": "loss over the whole vocabulary"}
    rows = [row("fastrl", 1.0, suite="masks", workload="loss over recorded sets"), row("fastrl", 40.0, **dense)]
    assert measured([rows]) == {"ours / loss over the whole vocabulary": ("0.025", "yes")}
    assert measured([rows[:1], rows[1:]]) == {"ours / loss over the whole vocabulary": ("", "not measured")}


@pytest.mark.parametrize(("vocab", "milliseconds", "reached"), [(151936, 2.6, "yes"), (262144, 2.61, "NO")])
def test_a_limit_is_met_by_its_share_and_by_no_more(vocab: int, milliseconds: float, reached: str) -> None:
    rows = [row("fastrl, in place", milliseconds, shape={"N": 8192, "V": vocab})]
    assert [line[5] for line in targets.lines([rows]) if line[1] and line[2] == "ours / its limit"] == [reached]
    assert {target.bound for target in targets.TARGETS if target.words == "ours / its limit"} == {1.10, 1.15, 1.30}


def test_a_dearer_plan_than_the_cheapest_is_named() -> None:
    of = {"suite": "plans", "workload": "loss and gradients", "shape": {"N": 8192, "H": 4096, "V": 151936}}
    plans = [("forward-gradient", "forward-gradient"), ("recompute", "forward-gradient")]
    rows = [row("fastrl, no budget", 2.1, **of, plan=taken, cheapest_plan=cheapest) for taken, cheapest in plans]
    found = [line[4:] for line in targets.lines([rows]) if line[1]]
    assert found == [
        ("1.050", "yes", "forward-gradient"),
        ("1.050", "yes", "recompute, where forward-gradient is cheapest"),
    ]


def test_a_file_in_an_old_format_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {"subject" if name == "contender" else name: value for name, value in row("fastrl, in place", 2.0).items()}
    (tmp_path / "old.json").write_text(json.dumps({"sections": [{"rows": [old]}]}))
    assert targets.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "old.json: old format, left out: its rows have no contender\n" in printed
    assert "1.000" not in printed


def test_every_target_names_a_suite_and_an_axis_that_there_is() -> None:
    for target in targets.TARGETS:
        axes = suites.SUITES[target.suite].axes
        assert all(name in axes for name, _ in (*target.least, *target.most))
        if target.suite in ("logits", "linear", "plans", "overhead"):  # some default shape is one that it speaks of
            shapes = [dict(zip(axes, shape, strict=True)) for shape in suites.SUITES[target.suite].defaults["cuda"]]
            given = {"suite": target.suite, "workload": target.workload, "dtype": target.dtype}
            assert any(target.matches(row(target.contender, 1.0, **given, shape=shape)) for shape in shapes), target


def test_a_folder_is_read_and_nothing_in_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "logits.json").write_text(json.dumps({"sections": [{"rows": [row("fastrl, in place", 2.0)]}]}))
    assert targets.main([str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "1.000" in table and "not measured" in table
    with tarfile.open(tmp_path / "speed.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "logits.json", "./logits.json")
        archive.add(tmp_path / "logits.json", "./ncu-statistics/logits.json")
        (tmp_path / "logits.json").unlink()
    assert targets.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == table
    assert targets.main([]) == 2 and targets.main([str(tmp_path / "none")]) == 2
