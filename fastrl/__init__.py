"""fastrl: fused kernels and losses for reinforcement learning of language models.

It computes token log-probabilities, entropies and whole policy losses, with their gradients, from logits or from hidden
states and the output head, without an (N, V) float32 tensor.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _modules() -> dict[str, str]:
    """Public name -> its module, from `__init__.pyi`, which type checkers and editors read."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_MODULES = _modules()
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the command line answers before torch is loaded."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fastrl' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
