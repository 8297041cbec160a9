"""The report of a run, or of several beside each other: one HTML file that needs no network; and `curves.png`.

Read from a run's directory: `metrics.jsonl` and, if present, `samples.jsonl`, `facts.json`, `config.json` and
`summary.json`. Any command's run works: a metric that is not named here gets a panel under "others".
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from fastrl.base.errors import UserError
from fastrl.report.curves import COLOURS, draw_png, draw_svg
from fastrl.report.page import page
from fastrl.report.panels import panels, summary_panels
from fastrl.report.records import read_records, read_run, series

SAMPLED_STEPS = 6


def main(argv: Sequence[str]) -> int:
    """`fastrl report RUN_DIR ...`: write the report and print its path. Raises UserError for what the user can fix."""
    about = "Write a run's curves, samples, timings and config into one HTML file, which any browser opens from disk"
    several = "of several runs the curves over each other, and how their configs differ. A run may still be going on."
    parser = argparse.ArgumentParser(prog="fastrl report", description=f"{about}; {several}")
    parser.add_argument("directories", metavar="RUN_DIR", type=Path, nargs="+", help="a run's logging.output_dir")
    what = "the file to write (default: RUN_DIR/report.html; of several runs compare.html in the working directory)"
    parser.add_argument("--output", metavar="FILE", type=Path, help=what)
    arguments = parser.parse_args(argv)
    print(write_report(*arguments.directories, output=arguments.output))
    return 0


def write_report(*directories: Path, output: Path | None = None) -> Path:
    """Write the report of one run, or of several, complete or not at all; returns its path.

    Args:
        directories: The runs' directories, 1 to 7 different ones.
        output: The file; by default `report.html` in the run's directory, of several runs `compare.html` here.

    Raises:
        UserError: For a directory without `metrics.jsonl` or one that is given twice, for more runs than colours, and
            for a line or file that cannot be read or written. A last line that is still being written is left out.
    """
    if len(directories) > len(COLOURS):
        raise UserError(f"report: expected at most {len(COLOURS)} runs, one for each colour, got {len(directories)}")
    steps = max(2, SAMPLED_STEPS // len(directories))
    names = short_names([directory.resolve() for directory in directories])
    runs = [read_run(directory, name, steps) for directory, name in zip(directories, names, strict=True)]
    groups, unchanged = panels(runs)
    curves = {title: [draw_svg(panel) for panel in drawn] for title, drawn in groups.items()}
    path = output or (directories[0] / "report.html" if len(runs) == 1 else Path("compare.html"))
    unfinished = path.parent / f"{path.name}.{os.getpid()}.unfinished"  # a live run may be writing its own
    try:
        # A byte-level tokenizer can leave half a character behind, which UTF-8 cannot encode.
        unfinished.write_text(page(runs, curves, unchanged), encoding="utf-8", errors="replace")
        return unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot write it: {error.strerror}") from error


def short_names(directories: Sequence[Path]) -> list[str]:
    """The fewest last parts of each path, the same number for all, that tell them apart."""
    for count in range(1, max(len(directory.parts) for directory in directories) + 1):
        names = ["/".join(directory.parts[-count:]) for directory in directories]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"report: expected different runs, got {', '.join(map(str, directories))}")


def plot_curves(directory: Path) -> None:
    """Draw `curves.png` of a run, in its directory, from its records so far: at most four panels."""
    draw_png(summary_panels(series(read_records(directory / "metrics.jsonl"))), directory / "curves.png")
