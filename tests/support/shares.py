"""A pytest plugin: a share of the tests, for as long as there is time. `make slow` runs one (`run_slow.py`).

    pytest -m slow --share 3/12 --stop-after 480 --first tests/losses

Each test is in one of the twelve shares, which a hash of its name decides: it stays there whatever is added beside it.
Tests marked `every_share` are in all. A test that has not begun in time is left: it is skipped, with that reason.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import shlex
import time
from collections.abc import Iterator
from typing import Any

import pytest

LEFT = "left for want of time"
STOP_AT = pytest.StashKey[float]()  # by the clock of time.time()


def _share(text: str) -> tuple[int, int]:
    mine, _, count = text.partition("/")
    if not (mine.isdecimal() and count.isdecimal() and int(mine) < int(count)):
        raise argparse.ArgumentTypeError(f"invalid I/N, I from 0 to N - 1: {text!r}")
    return int(mine), int(count)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shares")
    group.addoption("--share", type=_share, metavar="I/N", help="of N shares of the tests, only number I, from 0")
    group.addoption("--stop-after", type=float, metavar="SECONDS", help="start no test when the run is older than that")
    group.addoption("--first", action="append", default=[], metavar="PATH", help="its tests first, then the next one's")


def pytest_configure(config: pytest.Config) -> None:
    seconds = config.getoption("--stop-after")
    stop_at = math.inf if seconds is None else time.time() + seconds
    # A worker has been told the controller's: they all stop at the same moment.
    config.stash[STOP_AT] = getattr(config, "workerinput", {}).get("stop_at", stop_at)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of xdist, in the controller: what a worker is started with."""
    node.workerinput["stop_at"] = node.config.stash[STOP_AT]


def number(name: str, count: int) -> int:
    """The share that a test of this name (a node ID) is in."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()) % count


@pytest.hookimpl(trylast=True)  # pytest's own order, by fixtures, is kept within each part
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (share := config.getoption("--share")) is not None:
        mine, count = share
        others = [x for x in items if number(x.nodeid, count) != mine and not x.get_closest_marker("every_share")]
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
    first = [config.rootpath / path for path in config.getoption("--first")]
    items.sort(key=lambda item: [item.path.is_relative_to(path) for path in first], reverse=True)


@pytest.hookimpl(tryfirst=True)  # before any fixture is made
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() >= item.config.stash[STOP_AT]:
        pytest.skip(LEFT)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Such tests are not in a plain run, which would find nothing under their names."""
    reports = (report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, []))
    failed = [report for report in reports if isinstance(report, pytest.TestReport)]  # not of a collection
    alone = {report.nodeid: marker for marker in ("slow", "engine") for report in failed if marker in report.keywords}
    for name, marker in alone.items():
        command = f".venv/bin/python -m pytest -m {marker} {shlex.quote(name)}"
        terminalreporter.write_line(f"run it alone: {command}", red=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, so that its line is the last one
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    result = yield
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")  # workers have none
    if config.getoption("--share") is not None and reporter is not None:
        mine, count = config.getoption("--share")
        skipped = [report.longrepr[2] for report in reporter.stats.get("skipped", [])]
        left = sum(reason.endswith(LEFT) for reason in skipped)
        ran = {report.nodeid for kind in ("passed", "failed", "error") for report in reporter.stats.get(kind, [])}
        reporter.write_line(
            f"share {mine} of {count}: {len(ran)} ran, {len(skipped) - left} skipped themselves, {left} {LEFT}"
        )
    return result
