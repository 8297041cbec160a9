"""The command line of `fastrl bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastrl.base import dependencies
from fastrl.bench import machine
from fastrl.bench.measure import default_device
from fastrl.bench.results import Row, Section
from fastrl.bench.suites import SUITES, Shape, Suite, bench

_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str]) -> int:
    """Run `fastrl bench`; returns the exit status. Invalid arguments raise SystemExit(2), as in argparse."""
    parser = _parser()
    options = parser.parse_args(argv)
    chosen = [name for name in SUITES if options.suite in (name, "all")]
    shapes = _shapes(parser, chosen, options.shape)
    _check_packages(parser, [name for name in chosen if shapes[name] or not options.shape], options.out)

    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"argument --out: cannot write to {str(options.out)!r}: {error.strerror}")

    from fastrl.bench.report import as_markdown

    device = default_device()
    dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
    repeats = options.repeats or (20 if device == "cuda" else 5)
    seconds = options.seconds or (5.0 if device == "cuda" else 60.0)
    header = machine.describe(argv)
    sections: list[Section] = []
    for name in chosen:
        suite = SUITES[name]
        for shape in shapes[name] if options.shape else suite.defaults[device]:
            log = partial(_log, f"{name} {'x'.join(map(str, shape))} {dtype}")
            sections.append(suite.run(bench(name, shape, getattr(torch, dtype), device, repeats, log, seconds)))
            if options.out is not None:  # after every shape, so that an interrupted run leaves its results
                _write(options.out, options.name, header, sections)
    print(as_markdown(header, sections))
    return _status(row for section in sections for row in section.rows)


def _write(folder: Path, name: str, header: dict[str, Any], sections: list[Section]) -> None:
    from fastrl.bench import charts
    from fastrl.bench.report import as_json, as_markdown

    (folder / f"{name}.json").write_text(as_json(header, sections), encoding="utf-8")
    (folder / f"{name}.md").write_text(as_markdown(header, sections), encoding="utf-8")
    charts.draw(header, sections[-1], folder)


def _status(rows: Iterable[Row]) -> int:
    failed = [f"{row.suite}, {row.workload}, {row.contender}: {row.skipped}" for row in rows if row.failed]
    for line in failed:
        print(f"fastrl bench: failed: {line}", file=sys.stderr)
    return int(bool(failed))


def _check_packages(parser: argparse.ArgumentParser, suites: Sequence[str], out: Path | None) -> None:
    """Exit with the missing packages before anything is measured."""
    needed = ["tabulate", *(["matplotlib"] if out is not None else [])]
    needed += [package for name in suites for package in SUITES[name].needs]
    if missing := dependencies.missing(needed):
        install = dependencies.how_to_install(missing)
        parser.exit(
            1, f"fastrl bench needs packages that are not installed: {install}; the extra bench has all that it needs\n"
        )


def _log(title: str, text: str) -> None:
    print(f"{title}: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, SUITES))
    parser = argparse.ArgumentParser(
        prog="fastrl bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Time, memory and error of fastrl's paths beside eager torch, torch.compile, Liger, TRL and others,"
        "\non the same inputs in one run. On the GPU if there is one.",
        epilog="suites, and their shapes here:\n"
        + "".join(f"  {name:<{width}}  {_suite_help(suite)}\n" for name, suite in SUITES.items()),
    )
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="all", help="default: all")
    parser.add_argument(
        "--shape",
        action="append",
        type=_shape,
        default=[],
        metavar="NxV|NxHxV|NxHxVxK|BxTxLxHxV",
        help="for the suites that take so many numbers (see below), the others are left out; may be repeated;"
        " without it, the suites' own shapes",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="default: float32, on a GPU bfloat16")
    parser.add_argument("--repeats", type=_positive, help="timed repeats of each contender; default: 5, on a GPU 20")
    parser.add_argument(
        "--seconds", type=_positive, help="repeat a contender no further after so long; default: 60, on a GPU 5"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write NAME.json, NAME.md and a chart a shape there")
    parser.add_argument("--name", type=_name, default="results", help="of the files in DIR; default: results")
    return parser


def _suite_help(suite: Suite) -> str:
    shapes = ", ".join("x".join(map(str, shape)) for shape in suite.defaults[default_device()])
    return f"{suite.description}\n{'':>10}{'x'.join(suite.axes)}: {shapes}"


def _name(text: str) -> str:
    if not text or Path(text).name != text:
        raise argparse.ArgumentTypeError(f"must be a file's name without a folder, got {text!r}")
    return text


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def _shape(text: str) -> Shape:
    parts = text.lower().split("x")
    counts = {len(suite.axes) for suite in SUITES.values()}
    if len(parts) not in counts or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            "must be NxV, NxHxV, NxHxVxK or BxTxLxHxV in whole numbers of at least 1, such as 2048x32768,"
            f" 2048x512x32768, 4096x512x151936x8 or 4x128x2x128x32768, got {text!r}"
        )
    return tuple(int(part) for part in parts)


def _shapes(parser: argparse.ArgumentParser, chosen: Sequence[str], given: Sequence[Shape]) -> dict[str, list[Shape]]:
    """The shapes of each chosen suite, assigned by their number of axes."""
    by_suite: dict[str, list[Shape]] = {name: [] for name in chosen}
    for shape in given:
        suites = [name for name in chosen if len(SUITES[name].axes) == len(shape)]
        if not suites:  # only if one suite was chosen: among all, some suite takes each number of axes
            shape_text, axes = "x".join(map(str, shape)), "x".join(SUITES[chosen[0]].axes)
            parser.error(f"argument --shape: the {chosen[0]} suite takes {axes}, got {shape_text}")
        for name in suites:
            by_suite[name].append(shape)
    return by_suite
