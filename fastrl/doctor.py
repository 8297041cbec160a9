"""`fastrl doctor`: versions, devices, the backends that run on this machine, and why one is missing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch

from fastrl.backend.cpp import build as cpp_build
from fastrl.base import dependencies
from fastrl.bench import machine
from fastrl.losses.logprobs import linear_token_logprobs
from fastrl.losses.policy import linear_policy_loss
from fastrl.objectives.presets import GRPO

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
#: (H, V) of the heads with which batch_invariant=True is tried, and their dtypes.
HEADS = ((512, 5000), (1024, 8192))
DTYPES = (torch.float32, torch.bfloat16)
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
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    _section(
        "batch_invariant=True",
        {f"{device}, {str(x).removeprefix('torch.')}": _invariance(device, x) for device in devices for x in DTYPES},
    )
    missing = dependencies.missing(dependencies.TRAIN)
    ready = f"packages are missing: {dependencies.how_to_install(missing)}" if missing else "ready"
    _section("commands", {f"fastrl {name}": ready for name in ("train", "sft", "dpo", "reward-model", "sample")})
    _section("what a config may need", {what: _installed(modules) for what, modules in OPTIONAL.items()})
    return 0


def _waiting() -> str:
    """What the user has set for OpenMP, which reads it when torch is loaded."""
    found = [f"{name}={os.environ[name]}" for name in _OPENMP if name in os.environ]
    return ", ".join(found) or "spin; beside other work set OMP_WAIT_POLICY=PASSIVE before torch is imported"


def _invariance(device: str, dtype: torch.dtype) -> str:
    """Whether it holds there: a call with a shape checks its products before it runs."""
    cores = torch.get_num_threads()
    counts = sorted({1, 2, cores}) if device == "cpu" else [cores]
    try:
        for threads in counts:
            torch.set_num_threads(threads)
            for width, vocab in HEADS:
                _try_head(torch.zeros(1, 1, width, dtype=dtype, device=device), vocab)
    except RuntimeError as error:
        return f"fails with {threads} thread{'s' * (threads > 1)}: {error}"
    finally:
        torch.set_num_threads(cores)
    with_threads = f" with {', '.join(map(str, counts))} threads" if device == "cpu" else ""
    return f"holds{with_threads}, for heads of {' and '.join(f'{width} x {vocab}' for width, vocab in HEADS)}"


def _try_head(hidden: torch.Tensor, vocab: int) -> None:
    """Log-probabilities and a loss of hidden (1, 1, H) and a random head, so that every kind of product is checked."""
    weight = torch.randn(vocab, hidden.shape[-1]).to(hidden).requires_grad_()
    states, targets = hidden.requires_grad_(), torch.zeros(1, 1, dtype=torch.int64, device=hidden.device)
    linear_token_logprobs(states, weight, targets, batch_invariant=True).logprobs.sum().backward()
    one = torch.ones(1, device=hidden.device)
    linear_policy_loss(states, weight, targets, objective=GRPO(kl_coef=0.0), advantages=one, batch_invariant=True)


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
