"""What `batch_invariant=True` costs: docs/batch_invariance.md has the numbers.

    python benchmarks/batch_invariance.py --out benchmarks/results/MACHINE

On the CPU at hand each call is measured with and without it, in turns of a few calls. For an H100 the plans of both are
modelled as `fastrl plan` does, with the same budget.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastrl
from fastrl.base.devices import Device
from fastrl.bench.machine import describe
from fastrl.planning.command import NAMED_GPUS
from fastrl.planning.memory import call_of
from fastrl.planning.plans import choose
from fastrl.planning.prices import plan_seconds

#: (N, H, V) of the calls that are modelled.
MODELLED = [
    (8192, 2048, 32768),
    (8192, 2048, 151936),
    (8192, 4096, 128256),
    (32768, 4096, 151936),
    (8192, 8192, 262144),
]
#: Calls of a turn that are measured.
TURN = 3
OBJECTIVE = fastrl.GRPO(kl_coef=0.0)
#: What is computed -> its objective and gradients.
CALLS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "log-probabilities": (None, ()),
    "log-probabilities, backward of a frozen head": (None, ("hidden",)),
    "log-probabilities, backward": (None, ("hidden", "weight")),
    "GRPO, backward": (OBJECTIVE, ("hidden", "weight")),
}


def prepared(shape: tuple[int, int, int], dtype: torch.dtype, kind: str) -> Callable[[bool], None]:
    """A function that makes the call, with or without batch_invariant."""
    (tokens, width, vocab), (objective, needs) = shape, CALLS[kind]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, tokens // 4, width, generator=generator).to(dtype).requires_grad_("hidden" in needs)
    weight = torch.randn(vocab, width, generator=generator).mul_(width**-0.5).to(dtype)
    weight.requires_grad_("weight" in needs)
    targets = torch.randint(vocab, hidden.shape[:2], generator=generator)

    def call(batch_invariant: bool) -> None:
        hidden.grad = weight.grad = None
        options: dict[str, Any] = {"batch_invariant": batch_invariant}
        if objective is None:
            loss = fastrl.linear_token_logprobs(hidden, weight, targets, **options).logprobs.sum()
        else:
            options |= {"advantages": torch.ones(4), "old_logprobs": torch.full(targets.shape, -10.0)}
            loss = fastrl.linear_policy_loss(hidden, weight, targets, objective=objective, **options).loss
        if needs:
            loss.backward()

    return call


def measured(shape: tuple[int, int, int], dtype: torch.dtype, kind: str, repeats: int) -> dict[str, Any]:
    """The seconds of a call, without and with batch_invariant, of which each has `repeats` turns."""
    call, seconds = prepared(shape, dtype, kind), {False: list[float](), True: list[float]()}
    for _ in range(repeats):
        for batch_invariant, times in seconds.items():
            call(batch_invariant)  # checks the products, and makes the memory that the others use again
            for _ in range(TURN):
                started = time.perf_counter()
                call(batch_invariant)
                times.append(time.perf_counter() - started)
    without, with_it = seconds.values()
    return {
        "call": kind,
        "dtype": str(dtype).removeprefix("torch."),
        "without_seconds": without,
        "with_seconds": with_it,
        "ratio_of_medians": statistics.median(with_it) / statistics.median(without),
        "ratio_of_least": min(with_it) / min(without),
    }


def modelled(shape: tuple[int, int, int], kind: str, device: Device, budget: int) -> float:
    """The modelled time of a call with batch_invariant over that without."""
    (objective, needs), seconds = CALLS[kind], []
    for batch_invariant in (True, False):
        call = call_of(
            *shape,
            torch.bfloat16,
            objective,
            needs,
            False,
            shape[0] // 4,
            0,
            0,
            "cuda",
            batch_invariant=batch_invariant,
        )
        seconds.append(plan_seconds(call, choose(call, budget), device))
    return seconds[0] / seconds[1]


def measured_table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| call | dtype | seconds without | with | ratio of medians | of the least |", "|---|---|---|---|---|---|"]
    for row in rows:
        without, with_it = (statistics.median(row[f"{name}_seconds"]) for name in ("without", "with"))
        ratios = f"{row['ratio_of_medians']:.2f} | {row['ratio_of_least']:.2f}"
        lines.append(f"| {row['call']} | {row['dtype']} | {without:.3f} | {with_it:.3f} | {ratios} |")
    return "\n".join(lines)


def modelled_table() -> str:
    """Markdown: what the planner models now."""
    lines = [f"| N, H, V | {' | '.join(CALLS)} |", f"|---{'|---' * len(CALLS)}|"]
    for shape in MODELLED:
        ratios = (modelled(shape, kind, NAMED_GPUS["h100"], 8 << 30) for kind in CALLS)
        lines.append(f"| {', '.join(map(str, shape))} | {' | '.join(f'{x:.3f}' for x in ratios)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=[2048, 512, 32768], metavar=("N", "H", "V"))
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--out", type=Path, help="a folder for batch_invariance.json")
    args = parser.parse_args()
    named = {**describe([]), "command": shlex.join(["python", *sys.argv])}
    dtypes, shape = (torch.float32, torch.bfloat16), tuple(args.shape)
    rows = [measured(shape, dtype, kind, args.repeats) for dtype in dtypes for kind in CALLS]
    print(f"{measured_table(rows)}\n\nmodelled on an H100, in bfloat16, 8 GiB:\n\n{modelled_table()}")
    if args.out is not None:
        found = {**named, "shape": args.shape, "rows": rows}
        (args.out / "batch_invariance.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
