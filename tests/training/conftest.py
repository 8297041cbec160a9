"""What every training command's tests share: no model hub, nothing drawn, and files of rows."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import digit_models
import pytest
from run_files import write_json_lines


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach for a model hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No curves and no report, which take longer than the run, where the test has no mark `drawn`."""
    if "drawn" not in request.keywords:
        monkeypatch.setattr("fastrl.training.common.log.RunLog.draw", lambda self: None)


@pytest.fixture
def at_a_terminal() -> Iterator[None]:
    """Ctrl-C and its end as at a terminal: tests in the background of a shell, or by nohup, would ignore them."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def limited() -> Iterator[None]:
    """End a test that hangs, after a minute, in which none of those that use this comes near to it."""

    def end(*_: object) -> None:
        raise TimeoutError("longer than a minute")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def example() -> Path:
    """The folder of the reverse_digits example."""
    return digit_models.EXAMPLE


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSONL, one file per name."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        write_json_lines(tmp_path / name, rows)
        return tmp_path / name

    return write
