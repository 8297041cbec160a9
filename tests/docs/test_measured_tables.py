"""docs/performance.md: each measured number is that of the linked results' JSON, rounded, and so are the picture's."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import BENCHMARKS, ROOT

import fastrl
from fastrl.base.devices import H200

PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]
#: The last cell of a table's row -> for each row that ends so, in order: the shape (None: the only one), the workload,
#: and fastrl's contender.
ROWS: dict[str, list[tuple[dict[str, int] | None, str, str]]] = {
    "h200/bfloat16/linear": [
        (None, "loss and gradients", "fastrl"),
        (None, "cross-entropy", "fastrl"),
        (None, "statistics", "fastrl"),
    ],
    "h200/bfloat16/linear-2048": [(None, "loss and gradients", "fastrl")],
    "h200/bfloat16/masks": [(None, "loss over recorded sets", "fastrl")],
    "h200/bfloat16/plans-long": [
        (None, "loss and gradients", "fastrl, no budget"),
        (None, "loss and gradients", "fastrl, budget 1GiB"),
    ],
    "h200/bfloat16/logits": [
        ({"N": 8192, "V": 151936}, "statistics and gradients", "fastrl"),
        ({"N": 8192, "V": 151936}, "loss and gradient", "fastrl, in place"),
        ({"N": 8192, "V": 151936}, "statistics", "fastrl"),
    ],
    **{
        f"h200/bfloat16/{name}": [(None, "step", "fastrl, linear_policy_loss")]
        for name in ("step", "step-long", "step-8b")
    },
    "h200/bfloat16/divergence": [(None, "forward KL", "fastrl")],
    "h200/bfloat16/preference": [(None, "DPO", "fastrl")],
    "h200/bfloat16/sets": [(None, "top-p 0.95", "fastrl SamplingMask.from_logits")],
    "xeon-2-cores/float32/logits": [
        (None, "statistics and gradients", "fastrl"),
        (None, "loss and gradient", "fastrl, in place"),
        (None, "statistics", "fastrl"),
    ],
    "xeon-2-cores/float32/linear": [(None, "loss and gradients", "fastrl"), (None, "cross-entropy", "fastrl")],
    "xeon-2-cores/float32/memory": [(None, "2048 tokens", "fastrl, 64MiB")],
    "xeon-2-cores/float32/step": [(None, "step", "fastrl, linear_policy_loss")],
    "epyc-2-cores/float32/divergence": [(None, "forward KL", "fastrl"), (None, "forward KL", "fastrl, 64MiB")],
    "epyc-2-cores/float32/preference": [(None, "DPO", "fastrl"), (None, "DPO", "fastrl, 64MiB")],
    "epyc-2-cores/float32/masks": [
        (None, "loss over recorded sets", "fastrl"),
        (None, "loss over the whole vocabulary", "fastrl"),
    ],
    "epyc-2-cores/float32/sets": [(None, "top-p 0.95", "fastrl SamplingMask.from_logits")],
}
#: A column's name -> whether a contender belongs there. Of Liger's, all that ran may be named, and the fastest must be.
COLUMNS: dict[str, Callable[[str], bool]] = {
    "eager torch": lambda name: name in ("eager torch", "transformers' warpers"),
    "torch.compile": lambda name: name == "torch.compile",
    "TRL": lambda name: name.startswith("TRL"),
    "Liger": lambda name: name.startswith("Liger"),
}
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


def rounds_to(value: float, text: str) -> bool:
    """Whether the value, rounded to as many digits as the text has, is the text."""
    if "e" in text:
        return f"{value:.1e}".replace("e-0", "e-") == text
    return abs(value - float(text)) <= 0.5 * 10 ** -len(text.partition(".")[2]) * (1 + 1e-9)


def tables(section: str) -> Iterator[dict[str, str]]:
    """The rows of the tables between a heading and the next one of its level or above, by the columns' names."""
    level = section.partition(" ")[0]
    (text,) = re.findall(rf"^{section}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", PAGE.read_text(), re.M | re.S)
    names: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            names = []
        elif not names:
            names = cells
        elif set(line) - set("|-"):
            yield dict(zip(names, cells, strict=True))


def results(path: str) -> list[Row]:
    """The rows of the JSON file; older ones call a workload a work, and a contender a subject."""
    sections = json.loads((RESULTS / f"{path}.json").read_text())["sections"]
    rows = [row for section in sections for row in section["rows"]]
    return [
        {"milliseconds_limit": None, "workload": row.get("work"), "contender": row.get("subject")} | row for row in rows
    ]


def measured() -> Iterator[tuple[dict[str, str], str, list[Row], Row]]:
    """Each row of the page: its cells, where it is from, the results of its workload, and fastrl's."""
    rows = [row for row in tables("## Measured") if "from" in row]
    seen: dict[str, int] = {}
    for cells in rows:
        (path,) = re.findall(r"\]\(\.\./benchmarks/results/(.*)\.md\)", cells["from"])
        place = seen[path] = seen.get(path, -1) + 1
        shape, workload, contender = ROWS[path][place]
        of = [x for x in results(path) if x["workload"] == workload and (shape is None or x["shape"] == shape)]
        (ours,) = (x for x in of if x["contender"] == contender)
        yield cells, path, of, ours
    assert seen == {path: len(rows) - 1 for path, rows in ROWS.items()}, "every row that is known is on the page"


def cell(cells: dict[str, str], column: str) -> str:
    """The text of the column whose name begins so; empty if the table has none."""
    return next((text for name, text in cells.items() if name.startswith(column)), "")


def wrong(text: str, rows: list[Row], ours: float) -> str | None:
    """What is wrong with a cell that names the times of these other contenders."""
    times = [row["milliseconds_median"] for row in rows if row["skipped"] is None]
    if text.startswith("needs"):
        (found,) = (re.findall(r"needs about ([\d.]+) GiB", row["skipped"])[0] for row in rows)
        return None if rounds_to(float(found), NUMBER.findall(text)[0]) else f"it needs {found} GiB"
    if not times or not text:
        return None if not times and not text else f"{times} are {text!r}"
    named = [NUMBER.findall(part)[0] for part in text.split(";")]
    ratios = re.findall(r"\(([\d.]+) x\)", text)
    if not all(any(rounds_to(time, part) for time in times) for part in named):
        return f"{times} are {text!r}"
    if not any(rounds_to(min(times), part) for part in named):
        return f"the fastest, {min(times)}, is left out"
    return None if all(rounds_to(min(times) / ours, ratio) for ratio in ratios) else f"{min(times) / ours} is {ratios}"


def test_the_measured_tables_have_the_results() -> None:
    found = []
    for cells, path, of, ours in measured():
        ms, name = ours["milliseconds_median"], f"{path}: {cells['workload']}"
        if not rounds_to(ms, cells["fastrl"].removesuffix(" ms")):
            found.append(f"{name}: fastrl: {ms}")
        if "the same within" not in name and "the same, `memory" not in name:  # beside nobody
            for column, belongs in COLUMNS.items():
                rows = [row for row in of if belongs(row["contender"])]
                if column in " ".join(cells) and (reason := wrong(cell(cells, column), rows, ms)):
                    found.append(f"{name}: {column}: {reason}")
        if limit := cell(cells, "limit"):
            bare = ours["milliseconds_limit"] or next(x for x in of if x["is_limit"])["milliseconds_median"]
            if not rounds_to(bare, limit.removesuffix(" ms")):
                found.append(f"{name}: limit: {bare}")
    assert found == []


def test_the_measured_tables_have_the_memory_and_the_errors() -> None:
    units = {"MiB": 2**20, "GiB": 2**30}
    for cells, path, of, ours in measured():
        found = [ours, *(x for x in of if COLUMNS["eager torch"](x["contender"]) and x["skipped"] is None)]
        text = cell(cells, "temporary memory")
        parts, unit = text.split(", "), text.split()[-1]
        for part, row in zip(parts, found, strict=len(parts) > 1):
            number, _, own = part.partition(" ")
            assert rounds_to(row["peak_temporary_bytes"] / units[own or unit], number), f"{path}: {cells['workload']}"
        if cells.get("error"):
            assert rounds_to(max(ours["errors"].values()), cells["error"]), f"{path}: {cells['workload']}"


def test_the_missed_targets_are_those_of_the_results() -> None:
    lines = [
        [x.strip() for x in line.strip("|").split("|")]
        for line in (RESULTS / "h200/bfloat16/targets.md").read_text().splitlines()
    ]
    reached = [cells for cells in lines if cells[5] in ("yes", "NO")]
    missed = [cells[:5] for cells in reached if cells[5] == "NO"]
    assert [list(row.values()) for row in tables("## Missed targets")] == missed
    assert f"{len(missed)} of the [{len(reached)} ratios]" in PAGE.read_text()


#: A row of the table of what an H200 said of the model -> the contender of the suite "plans", its products, the inputs
#: that have gradients, and the options of the ledger.
SAID: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "default: forward-gradient, 3U": ("fastrl, no budget", 3, "hidden weight", {}),
    "recompute, 4U": ("fastrl, recompute", 4, "hidden weight", {"plan": "recompute"}),
    "recompute in 512 MiB, 4U": ("fastrl, budget 512MiB", 4, "hidden weight", {"budget": "512MiB"}),
    "two-pass, 5U": ("fastrl, two-pass", 5, "hidden weight", {"plan": "two-pass"}),
    "whole-response (GSPO), 3U": (
        "fastrl, whole-response",
        3,
        "hidden weight",
        {"objective": fastrl.GSPO(), "longest": 1024},
    ),
    "frozen head, frozen-head, 2U": ("fastrl, frozen head, frozen-head", 2, "hidden", {"plan": "frozen-head"}),
    "log-probabilities and entropy, 1U": ("fastrl, linear_token_logprobs with entropy", 1, "", {"objective": None}),
}


def test_what_an_h200_said_of_the_model() -> None:
    rows = [row for row in results("h200/bfloat16/plans") if row["shape"]["H"] == 4096]
    median = {row["contender"]: row["milliseconds_median"] for row in rows}
    found = {cells["call"]: cells for cells in tables("### What an H200 said of the model")}
    for call, (contender, units, *_) in SAID.items():
        cells, ms = found[call], median[contender]
        limit = next(row["milliseconds_limit"] for row in rows if row["contender"] == contender)
        alone, _, in_a_row = cells["products alone, and in a row"].partition(", ")
        assert rounds_to(ms, cells["measured ms"]) and rounds_to(limit, alone), call
        assert rounds_to(ms / limit, cells["measured / products alone"]), call
        if units > 1:
            assert rounds_to(median[f"{units}U"], in_a_row), call
            assert rounds_to(ms / median[f"{units}U"], cells["in a row"]), call


def test_what_the_model_says_of_an_h200() -> None:
    pytest.importorskip("triton")
    sys.path.insert(0, str(BENCHMARKS))
    import ledger

    rows = [row for row in results("h200/bfloat16/plans") if row["shape"]["H"] == 4096]
    median = {row["contender"]: row["milliseconds_median"] for row in rows}
    found = {cells["call"]: cells for cells in tables("### What an H200 said of the model")}
    for call, (contender, _, gradients, options) in SAID.items():
        given = {"objective": fastrl.PPO(), "gradients": tuple(gradients.split()), **options}
        modelled = 1e3 * ledger.linear(8192, 4096, 151936, torch.bfloat16, H200, **given).seconds(H200)
        assert rounds_to(modelled, found[call]["modelled ms"]), (call, modelled)
        assert rounds_to(median[contender] / modelled, found[call]["measured / modelled"]), call


def text_chunk(path: Path) -> str:
    """The PNG's text chunk "Description"."""
    data, at = path.read_bytes(), 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if kind == b"tEXt" and body.startswith(b"Description\0"):
            return body.partition(b"\0")[2].decode()
        at += 12 + length
    raise AssertionError("no description")


def test_the_picture_has_the_results() -> None:
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(BENCHMARKS))
    import draw_comparison

    picture = ROOT / "docs" / "comparison.png"
    assert text_chunk(picture) == draw_comparison.described(*draw_comparison.bars(draw_comparison.RESULTS))
    assert picture.stat().st_size < 60_000
    first = next(cells for cells, *_ in measured())
    assert text_chunk(picture).startswith(
        f"fastrl: {first['fastrl']}, {first['temporary memory: fastrl, eager'][:3]} GiB;"
    )
    assert text_chunk(picture).endswith(f"limit: {first['limit']} ms")
