"""Helpers shared by adapters that patch another package: replacing its objects, and logging a line once."""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any

_said: set[tuple[str, str]] = set()


def say_once(log: logging.Logger, line: str) -> None:
    """Log the line as a warning, only the first time in this log."""
    if (log.name, line) not in _said:
        _said.add((log.name, line))
        log.warning(line)


def exchange(package: str, name: str, old: Any, new: Any) -> None:
    """Replace `old` by `new` in every loaded module of the package that holds it under this name."""
    for path, module in sys.modules.copy().items():  # in one go: what ends meanwhile may import
        if module is not None and (path == package or path.startswith(f"{package}.")) and vars(module).get(name) is old:
            setattr(module, name, new)


class Replaced:
    """Functions and classes of another package in whose places ours of the same names are."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._pairs: list[tuple[str, Any, Any]] = []

    def replace(self, module: Any, *ours: Any) -> None:
        """Put ours in the places of those that `module` defines, wherever the package's modules hold them.

        Raises RuntimeError, before anything is replaced, if one is called with other arguments than ours.
        """
        for new in ours:
            theirs, known = _arguments(getattr(module, new.__name__)), _arguments(new)
            if theirs != known[: len(theirs)]:
                raise RuntimeError(
                    f"fastrl knows {module.__name__}.{new.__name__} with the arguments {', '.join(known)}; this one"
                    f" takes {', '.join(theirs)}. Nothing was replaced"
                )
        for new in ours:
            self._pairs.append((new.__name__, getattr(module, new.__name__), new))
            exchange(self._package, *self._pairs[-1])

    def restore(self) -> None:
        """Put everything back."""
        for name, old, new in self._pairs:
            exchange(self._package, name, new, old)
        self._pairs.clear()


def _arguments(x: Any) -> list[str]:
    """The names of a function's arguments, or of those that an autograd function is applied to."""
    function = next((getattr(x, name) for name in ("forward", "apply") if hasattr(x, name)), x)
    return [name for name in inspect.signature(function).parameters if name != "ctx"]
