"""A pytest plugin: the seed of a run's random calls, new each time and the same in all workers, and their count."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

SEED = "random_calls_seed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-calls-seed", type=int, default=None, help="draw the same random calls as an earlier run")
    parser.addoption("--random-calls-for", type=float, metavar="SECONDS", help="make as many as that takes, not 20,000")


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--random-calls-seed")
    drawn = secrets.randbelow(2**31) if given is None else given
    # A worker has been told the controller's.
    config.stash[KEY] = getattr(config, "workerinput", {}).get(SEED, drawn)


KEY = pytest.StashKey[int]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of xdist, in the controller: what a worker is started with."""
    node.workerinput[SEED] = node.config.stash[KEY]


def pytest_report_header(config: pytest.Config) -> str:
    return f"random calls: --random-calls-seed {config.stash[KEY]}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many random calls were made, where any were."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, []) if r.when == "call"]
    told = [value for report in reports for name, value in report.user_properties if name == "random_calls"]
    if told:
        made, left_out, wrong = (sum(column) for column in list(zip(*told, strict=True))[:3])
        worst = max(shares[3] for shares in told)
        terminalreporter.write_line(
            f"random calls: {made} made with --random-calls-seed {config.stash[KEY]}, {wrong} wrong, {left_out} too "
            f"near a border to compare; the largest error is {worst:.2f} of what is allowed"
        )


@pytest.fixture
def random_calls_seed(request: pytest.FixtureRequest) -> int:
    """The run's seed."""
    return request.config.stash[KEY]


@pytest.fixture
def random_calls_for(request: pytest.FixtureRequest) -> float | None:
    """The seconds that the run has for them, if they are bounded."""
    return request.config.getoption("--random-calls-for")
