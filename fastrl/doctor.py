"""`fastrl doctor`: versions, devices, the backends that run on this machine, and why one is missing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from fastrl.backend.cpp import build as cpp_build
from fastrl.base import dependencies
from fastrl.bench import machine

#: The oldest and newest version of each that `make test` passed with, but for what docs/features.md names.
TESTED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11.0", "2.15.0"),
    "triton": ("3.6.0", "3.9.0"),
    "transformers": ("5.17.0", "5.23.0"),
}
#: What some configs need beside that, and the modules that it imports.
OPTIONAL = {
    "data.path: Parquet, a hub's dataset": ("datasets", "pyarrow"),
    "reward.function: fastrl.rewards.math": ("math_verify",),
    "rollout.url: an engine's server": ("httpx2",),
    "rollout.url: weights by NCCL, CUDA IPC": ("vllm",),
    "model.lora_rank": ("peft",),
    "logging.wandb": ("wandb",),
}
#: How long OpenMP's threads spin before they sleep: the standard's setting, GNU's, and LLVM's and Intel's.
_OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def main(argv: Sequence[str] = ()) -> int:
    """Print versions, devices, compiler and backends; always returns 0, because a missing backend is not an error."""
    about = "versions, devices, backends, and why one is missing"
    argparse.ArgumentParser(prog="fastrl doctor", description=about).parse_args(argv)
    facts = machine.describe(())
    _section("versions", {name: _version(name, value) for name, value in facts["versions"].items()})
    _section("machine", {**facts["machine"], "threads that wait": _waiting()})
    _section("compiler", {"C++": _compiler()})
    _section("backends", facts["backends"])
    missing = dependencies.missing(dependencies.TRAIN)
    ready = f"packages are missing: {dependencies.how_to_install(missing)}" if missing else "ready"
    _section("commands", {f"fastrl {name}": ready for name in ("train", "sft", "dpo", "reward-model", "sample")})
    _section("what a config may need", {what: _installed(modules) for what, modules in OPTIONAL.items()})
    return 0


def _waiting() -> str:
    """What the user has set for OpenMP, which reads it when torch is loaded."""
    found = [f"{name}={os.environ[name]}" for name in _OPENMP if name in os.environ]
    return ", ".join(found) or "spin; beside other work set OMP_WAIT_POLICY=PASSIVE before torch is imported"


def _installed(modules: Sequence[str]) -> str:
    missing = dependencies.missing(modules)
    return f"not installed: {dependencies.how_to_install(missing)}" if missing else "installed"


def _version(name: str, value: str | None) -> str:
    if value is None:
        return "none"
    return f"{value} (tested: {' to '.join(TESTED[name])})" if name in TESTED else value


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
