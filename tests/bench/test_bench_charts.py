"""The charts of `fastrl bench`, drawn from rows that were never measured."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bench_rows import new_row
from run_files import strict_json

from fastrl.bench import charts
from fastrl.bench.contenders import EAGER
from fastrl.bench.report import as_json, as_markdown
from fastrl.bench.results import Limit, Row, Section, finish

SHAPE = dict.fromkeys("NHV", 1)
HEADER = {
    "command": "fastrl bench",
    "date": "2026-01-01",
    "commit": None,
    "machine": {"cpu": "a processor", "cpu_cores": 2, "torch_threads": 2, "memory_gib": 4.0},
    "versions": {"fastrl": "0", "torch": "0", "cuda": None},
    "backends": {},
}


def section_of(rows: list[Row], suite: str = "linear", **limits: float | None) -> Section:
    return Section(suite, SHAPE, {**limits}, {row.workload: "this" for row in rows}, rows)


def _texts(section: Section) -> str:
    found = charts.figure(HEADER, section)
    found.canvas.draw()
    axes = [text for panel in found.axes for text in (*panel.texts, panel.title, *panel.get_yticklabels())]
    axes += [panel._right_title for panel in found.axes]  # type: ignore[attr-defined]
    return "\n".join(text.get_text() for text in (*found.texts, *axes))


def test_bars_show_ours_others_the_limit_and_who_did_not_run() -> None:
    rows = [
        new_row("the bare products", 50.0, is_limit=True),
        new_row("fastrl", 60.0, ours=True),
        new_row(EAGER, 240.0),
        new_row("a peer", skipped="its Triton kernels need a GPU"),
        new_row("a peer", workload="another workload", skipped="its Triton kernels need a GPU"),
    ]
    finish(rows[:3], Limit(0.05, "the bare matrix products"))
    section = section_of(rows)
    found = charts.figure(HEADER, section)
    (panel,) = found.axes  # nobody did the other workload
    assert [bar.get_width() for bar in panel.patches] == [60.0, 240.0]
    assert panel.patches[0].get_facecolor() != panel.patches[1].get_facecolor()
    (limit,) = panel.lines
    assert list(limit.get_xdata()) == pytest.approx([50.0, 50.0])
    text = _texts(section)
    bars = ("60 ms  (4 × eager)", "240 ms", "limit: the bare matrix products, 50 ms")
    assert all(expected in text for expected in (*bars, "a processor, 2 threads")), text
    assert text.count("a peer: skipped, its Triton kernels need a GPU") == 1


def test_a_number_that_is_none_is_null() -> None:
    row = new_row("a contender", 60.0, peak_temporary_bytes=5 << 20)
    finish([row], Limit(math.nan, "3U"))
    found = strict_json(as_json(HEADER, [section_of([row], "plans")]).encode())
    assert found["sections"][0]["rows"][0]["fraction_of_limit"] is None


def test_plans_have_a_limit_each_and_say_what_they_reached() -> None:
    rows = [
        new_row("fastrl, no budget", 60.0, ours=True, plan="forward-gradient", peak_temporary_bytes=5 << 20),
        new_row("fastrl, recompute", 90.0, ours=True, plan="recompute"),
    ]
    for found, seconds, of in zip(rows, (0.045, 0.06), ("3U", "4U"), strict=True):
        finish([found], Limit(seconds, of))
    section = section_of(rows, "plans", **{"milliseconds: 3U, whole-response": 45.0})
    (panel,) = charts.figure(HEADER, section).axes
    assert [list(line.get_xdata()) for line in panel.lines] == [[45.0] * 2, [60.0] * 2]
    text = _texts(section)
    assert "60 ms  forward-gradient, 75 % of 3U, 5 MiB" in text
    assert "90 ms  67 % of 4U" in text  # its plan is in its name
    table = as_markdown(HEADER, [section])
    assert "Limit: 3U, whole-response, 45 ms" in table
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert lines[0][-5:] == ["tokens/s", "limit", "of", "temporary", "plan"]
    assert [line[-5:] for line in lines[2:]] == [
        ["17", "75 %", "3U", "5 MiB", "forward-gradient"],
        ["11", "67 %", "4U", "", "recompute"],
    ]


def test_what_all_rows_of_a_table_are_held_against_is_said_once() -> None:
    rows = [new_row("fastrl", 2.0, ours=True, milliseconds_hot=1.5), new_row("a peer", 4.0)]
    finish(rows, Limit(0.001, "a read of as many bytes"))
    section = section_of(rows, "logits", copy_bytes_per_second=4.2e12, read_bytes_per_second=4.5e12)
    text = as_markdown(HEADER, [section])
    assert "this. Limit: a read of as many bytes.\n" in text and "Limit: read, 4500.0 GB/s\n" in text
    header, _, first, second = (line for line in text.splitlines() if line.startswith("|"))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (header, first, second)]
    hot = cells[0].index("hot L2")
    assert "of" not in cells[0] and [line[hot] for line in cells[1:]] == ["1.5", ""]


def test_lines_show_memory_and_time_against_tokens() -> None:
    rows = []
    for tokens in (256, 512):
        same = {"suite": "memory", "shape": SHAPE | {"N": tokens}, "workload": f"{tokens} tokens"}
        rows.append(new_row("fastrl, no budget", 1.0, ours=True, peak_temporary_bytes=0, **same))
        rows.append(new_row(EAGER, 2.0, peak_temporary_bytes=tokens << 20, **same))
        rows.append(new_row("a peer", skipped=f"{tokens} are many", **same))
    section = section_of(rows, "memory")
    found = charts.figure(HEADER, section)
    memory, time = found.axes
    assert [(panel.get_xscale(), panel.get_yscale()) for panel in found.axes] == [("log", "log")] * 2
    assert (memory.get_xlabel(), memory.get_ylabel(), time.get_ylabel()) == ("tokens", "MiB", "ms, median")
    lines = {str(line.get_label()): line for line in memory.lines}
    assert set(lines) == {"fastrl, no budget", EAGER}
    assert list(lines[EAGER].get_xdata()) == [256, 512] and list(lines[EAGER].get_ydata()) == [256, 512]
    assert all(y > 0 for y in lines["fastrl, no budget"].get_ydata())  # a logarithm has no place for 0
    assert "a peer at 256, 512 tokens: skipped, 512 are many" in _texts(section)


def test_a_section_without_numbers_is_still_drawn_and_written(tmp_path: Path) -> None:
    for suite in ("linear", "memory"):
        section = section_of([new_row(suite=suite, skipped="nobody could")], suite)
        assert charts.draw(HEADER, section, tmp_path).stat().st_size > 1000
        assert "- a contender: skipped, nobody could" in as_markdown(HEADER, [section])
