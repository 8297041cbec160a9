"""Adapters are tested against the real package: without it, its tests are left out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("trl") else ["test_trl*.py"]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str], list[dict[str, Any]]]:
    """watch(module, name): the keyword arguments of each call of that function from now on."""

    def watched(module: ModuleType, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(kwargs)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)
        return found

    return watched
