"""The command line of `fastrl bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from . import machine
from .measure import default_device
from .suites import SUITES, Setting, Shape

_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str]) -> int:
    """Run `fastrl bench` with these arguments; the exit status. Wrong ones raise SystemExit(2), as argparse does."""
    parser = _parser()
    options = parser.parse_args(argv)
    shapes = _shapes(parser, options.suite, options.shape)
    if find_spec("tabulate") is None:
        parser.exit(1, "fastrl bench needs the package's bench extra: pip install 'fastrl[bench]'\n")
    from .report import Section, as_json, as_markdown

    device = default_device()
    dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
    repeats = options.repeats or (20 if device == "cuda" else 5)
    header = machine.describe(argv)
    sections = []
    for name, suite in SUITES.items():
        for shape in shapes[name] or (() if any(shapes.values()) else suite.defaults[device]):
            if options.suite not in (name, "all"):
                continue
            log = partial(_log, f"{name} {'x'.join(map(str, shape))} {dtype}")
            setting = Setting(getattr(torch, dtype), device, repeats, log)
            limits, rows = suite.run(shape, setting)
            sections.append(Section(name, dict(zip(suite.axes, shape, strict=True)), limits, rows))
    markdown = as_markdown(header, sections)
    print(markdown)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(as_json(header, sections))
        (options.out / "results.md").write_text(markdown)
    return 0


def _log(title: str, text: str) -> None:
    print(f"{title}: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastrl bench",
        description="Time, memory and error of fastrl's paths beside eager torch, torch.compile, Liger, TRL and others,"
        " on the same inputs in one run. On the GPU if there is one.",
    )
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="all")
    parser.add_argument(
        "--shape", action="append", type=_shape, default=[], metavar="NxV|NxHxV",
        help="tokens x vocabulary (logits) or tokens x hidden x vocabulary (linear); may be repeated;"
        " without it, the suites' own shapes",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=_DTYPES, help="default: float32, on a GPU bfloat16")
    parser.add_argument("--repeats", type=_positive, help="timed repeats of each subject; default: 5, on a GPU 20")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results.json and results.md there")
    return parser


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def _shape(text: str) -> Shape:
    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"must be NxV or NxHxV in whole numbers of at least 1, such as 2048x32768 or 2048x512x32768, got {text!r}"
        )
    return tuple(int(part) for part in parts)


def _shapes(parser: argparse.ArgumentParser, chosen: str, given: Sequence[Shape]) -> dict[str, list[Shape]]:
    """Each suite's shapes, by how many numbers they have."""
    found: dict[str, list[Shape]] = {name: [] for name in SUITES}
    for shape in given:
        for name, suite in SUITES.items():
            if len(suite.axes) == len(shape) and chosen in (name, "all"):
                found[name].append(shape)
                break
        else:
            written = "x".join(map(str, shape))
            parser.error(f"argument --shape: the {chosen} suite takes {'x'.join(SUITES[chosen].axes)}, got {written}")
    return found
