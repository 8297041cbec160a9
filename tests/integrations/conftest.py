"""Adapters are tested against the real package: without it, its tests are left out."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from verl_cases import loaded

from fastrl.integrations import patching

collect_ignore_glob = [] if importlib.util.find_spec("trl") else ["test_trl*.py"]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The warnings of adapters so far; nothing has been said before."""
    patching._said.clear()
    with caplog.at_level(logging.WARNING, "fastrl"):
        yield lambda: [r.getMessage() for r in caplog.records if r.name.startswith("fastrl.")]


@pytest.fixture(scope="module")
def core() -> Iterator[Any]:
    """verl.trainer.ppo.core_algos."""
    with loaded() as module:
        yield module


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the model of TRL's trainers is."""
    from trl_cases import save_model

    return save_model(tmp_path_factory.mktemp("tiny"))
