"""What mkdocstrings reads beside the source, in which presets lack the end of their docstrings: a decorator adds it."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

import fastrl

_PRESETS = fastrl.PRESETS | fastrl.PREFERENCES


class Docstrings(griffe.Extension):
    """Gives presets the docstrings that they have once they are imported."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """As Griffe calls it for each function."""
        preset = _PRESETS.get(func.name)
        if preset is not None and func.docstring is not None:
            func.docstring.value = inspect.getdoc(preset) or ""
