"""Prints which GPU targets the results of `benchmarks/gpu.sh` reach, as Markdown.

    python benchmarks/targets.py FOLDER        # of its JSON files and of those in its archives

Every target is a ratio of two numbers of one run. A ratio without a measurement is listed as such. A time that is held
against matrix products is held against those of the cheapest plan at the shape, whichever plan was taken; the last
column names both. A file whose rows lack what is read here, from before a change of their fields, is named and left
out.
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """An upper or lower bound on a ratio of one contender's rows."""

    suite: str
    workload: str
    contender: str
    bound: float
    over: str | None = None  # the contender to compare with; None: the limit of the workload
    over_workload: str | None = None  # that contender's workload, if it is a different one
    faster: bool = False  # whether the ratio is the other's time over ours, which should reach the bound
    field: str = "milliseconds_median"
    least: tuple[tuple[str, int], ...] = ()  # lower bounds on sizes of the shape
    most: tuple[tuple[str, int], ...] = ()  # upper bounds
    dtype: str = "bfloat16"

    def matches(self, row: Row) -> bool:
        """Whether the target applies to this row."""
        shape = row["shape"]
        return (
            (row["suite"], row["contender"], row["dtype"]) == (self.suite, self.contender, self.dtype)
            and row["workload"] == self.workload
            and all(shape[name] >= size for name, size in self.least)
            and all(shape[name] <= size for name, size in self.most)
        )

    def ratio(self, row: Row, others: list[Row]) -> float | None:
        """The ratio for the row; `others` are the rows of the same shape and run. None if a number is missing."""
        if self.field == "peak_temporary_bytes":
            return None if row[self.field] is None else row[self.field] / 2**30
        base = row["milliseconds_limit"]
        if self.over is not None:
            names = (self.over_workload or row["workload"], self.over)
            base = next((o[self.field] for o in others if (o["workload"], o["contender"]) == names), None)
        if base is None or row[self.field] is None:
            return None
        return base / row[self.field] if self.faster else row[self.field] / base

    @property
    def words(self) -> str:
        """The ratio in words."""
        if self.field == "peak_temporary_bytes":
            return "temporary memory in GiB"
        other = "its limit" if self.over is None else self.over_workload or self.over
        return f"{other} / ours" if self.faster else f"ours / {other}"


_LARGE = (("N", 8192),)
_LONG = (("N", 65536),)
_SHORT = (("N", 65535),)
TARGETS = [
    Target("logits", "statistics", "fastrl", 1.10, least=_LARGE),
    Target("logits", "statistics", "fastrl", 1.10, least=_LARGE, dtype="float32"),
    Target("logits", "statistics and gradients", "fastrl", 1.10, least=_LARGE),
    Target("logits", "statistics", "fastrl", 0.6, faster=True, most=(("N", 256),)),
    Target("logits", "statistics", "fastrl", 1.2, "TRL kernel", faster=True, least=_LARGE),
    Target("logits", "loss and gradient", "fastrl, in place", 1.30, least=_LARGE),
    Target("logits", "loss and gradient", "fastrl, in place", 1.0, "Liger triton_grpo_loss", faster=True, least=_LARGE),
    Target("logits", "loss and gradient", "fastrl, in place", 5.0, "eager torch", faster=True, least=_LARGE),
    Target("overhead", "issue loss and gradient", "fastrl", 1.0, "eager torch"),
    Target("overhead", "issue loss and gradient", "fastrl, in place", 1.0, "eager torch"),
    Target("overhead", "issue linear loss and gradients", "fastrl", 1.3, "eager torch"),
    Target("overhead", "issue linear log-probabilities and gradients", "fastrl", 1.0, "eager torch"),
    Target("masks", "loss over recorded sets", "fastrl", 0.03, "fastrl", "loss over the whole vocabulary"),
    Target("sets", "top-p 0.95", "fastrl SamplingMask.from_logits", 5.0, "transformers' warpers", faster=True),
    *(
        Target("plans", workload, f"fastrl, {contender}", bound, least=(("H", width),), most=(("H", width), *_SHORT))
        for width, bound in ((4096, 1.10), (2048, 1.15))
        for workload, contender in (
            ("loss and gradients", "no budget"),
            ("loss and gradients", "recompute"),
            ("loss and gradients", "budget 512MiB"),
            ("loss, frozen head", "frozen head, frozen-head"),
            ("forward only", "linear_token_logprobs with entropy"),
        )
    ),
    Target("plans", "loss and gradients", "fastrl, budget 1GiB", 1.10, least=_LONG),
    Target("plans", "loss and gradients", "fastrl, budget 1GiB", 1.0, field="peak_temporary_bytes", least=_LONG),
    *(
        Target("linear", "loss and gradients", "fastrl", bound, over, faster=True)
        for over, bound in (("TRL chunked head", 1.25), ("Liger LigerFusedLinearGRPOLoss", 3.0), ("eager torch", 1.3))
    ),
]


#: What is read of a row here.
_FIELDS = (
    *("suite", "shape", "dtype", "workload", "contender", "plan", "cheapest_plan"),
    *("milliseconds_median", "milliseconds_limit", "peak_temporary_bytes"),
)


def sections(folder: Path) -> tuple[list[list[Row]], list[str]]:
    """The rows of each shape of each run in the folder; and for each file in an old format, what it lacks."""
    found, old = [], []
    for name, text in _files(folder):
        rows = [section["rows"] for section in json.loads(text).get("sections", [])]
        lacking = {field for part in rows for row in part for field in _FIELDS if field not in row}
        if lacking:
            old.append(f"{name}: old format, left out: its rows have no {', '.join(sorted(lacking))}")
        else:
            found += rows
    return found, old


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each JSON file in the folder, and at the top of each archive in it."""
    for path in sorted(folder.glob("*.json")):
        yield path.name, path.read_bytes()
    for path in sorted(folder.glob("*.tar.gz")):
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None and Path(member.name).parent == Path() and member.name.endswith(".json"):
                    yield f"{path.name}/{Path(member.name).name}", file.read()


def lines(found: list[list[Row]]) -> list[tuple[str, ...]]:
    """A line for each target and each row that it applies to."""
    table: list[tuple[str, ...]] = []
    for target in TARGETS:
        wanted = f"{'>=' if target.faster else '<='} {target.bound:g}"
        pairs = [(row, rows) for rows in found for row in rows if target.matches(row)]
        name = f"{target.suite}: {target.workload}, {target.contender} ({target.dtype})"
        if not pairs:
            table.append((name, "", target.words, wanted, "", "not measured", ""))
        for row, rows in pairs:
            ratio = target.ratio(row, rows)
            shape = "x".join(map(str, row["shape"].values()))
            if ratio is None:
                table.append((name, shape, target.words, wanted, "", "not measured", _plan(row)))
                continue
            reached = ratio >= target.bound if target.faster else ratio <= target.bound
            table.append((name, shape, target.words, wanted, f"{ratio:.3f}", "yes" if reached else "NO", _plan(row)))
    return table


def _plan(row: Row) -> str:
    taken, cheapest = row["plan"], row["cheapest_plan"]
    return taken or "" if taken == cheapest else f"{taken}, where {cheapest} is cheapest"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        print(f"usage: python benchmarks/targets.py FOLDER, got {' '.join(argv) or 'nothing'}", file=sys.stderr)
        return 2
    found, old = sections(Path(argv[0]))
    headers = ("what", "shape", "ratio", "target", "measured", "reached", "plan taken")
    print(tabulate(lines(found), headers, tablefmt="github", disable_numparse=True))
    for line in ["", *old] if old else []:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
