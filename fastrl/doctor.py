"""``fastrl doctor``: what this machine has, which backends run on it, and why one is missing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from .bench import machine
from .ops import cpp_build

_TRAIN_MODULES = ("transformers", "pydantic", "pydantic_settings", "tensorboard", "matplotlib", "tqdm")


def missing_for_train() -> list[str]:
    """The modules of the ``train`` extra that are not installed."""
    return [name for name in _TRAIN_MODULES if find_spec(name) is None]


def main() -> int:
    """Print versions, devices, compiler and backends; 0 always, for a missing backend is news and not an error."""
    facts = machine.describe(())
    _section("versions", {name: value or "none" for name, value in facts["versions"].items()})
    _section("machine", facts["machine"])
    _section("compiler", {"C++": _compiler()})
    _section("backends", facts["backends"])
    missing = missing_for_train()
    ready = f"missing {', '.join(missing)}: pip install 'fastrl[train]'" if missing else "ready"
    _section("commands", {f"fastrl {name}": ready for name in ("train", "sft", "dpo", "reward-model", "sample")})
    return 0


def _section(title: str, facts: dict[str, Any]) -> None:
    print(title)
    width = max(map(len, facts))
    for name, value in facts.items():
        first, *rest = str(value).splitlines() or [""]
        print(f"  {name:<{width}}  {first}")
        for line in rest:
            print(f"  {'':<{width}}  {line}")
    print()


def _compiler() -> str:
    try:
        return cpp_build.compiler_version()
    except cpp_build.BackendUnavailable as error:
        return str(error)
