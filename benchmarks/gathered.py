"""What K log-probabilities per row cost beside one: `linear_gathered_logprobs` over `linear_token_logprobs`.

    python benchmarks/gathered.py --out benchmarks/results/MACHINE/gathered

On the CPU, in one thread, processor time: the forward alone (no gradients), the forward and the backward, and these
with a frozen head. The two functions take turns, and the best of several calls counts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastrl
from fastrl.bench.machine import describe

#: Which of hidden and weight need gradients.
CASES = {"forward": (False, False), "forward and backward": (True, True), "frozen head": (True, False)}


def best_of(calls: list[Callable[[], None]], repeats: int) -> list[float]:
    """The shortest processor time of each call, in seconds; a first one of each is not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, of_call in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            of_call.append(time.process_time() - start)
    return [min(of_call[1:]) for of_call in times]


def measure(case: str, shape: tuple[int, int, int], k: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Seconds for rows, hidden size and vocabulary of this shape."""
    rows, width, vocab = shape
    g = torch.Generator().manual_seed(0)
    hidden_grad, weight_grad = CASES[case]
    hidden = torch.randn(rows, width, generator=g).to(dtype).requires_grad_(hidden_grad)
    weight = torch.randn(vocab, width, generator=g).mul_(width**-0.5).to(dtype).requires_grad_(weight_grad)
    ids = torch.randint(vocab, (rows, k), generator=g)
    upstream = torch.randn(rows, k, generator=g)

    def run(logprobs: torch.Tensor, gradient: torch.Tensor) -> None:
        if hidden_grad:
            logprobs.backward(gradient)
            hidden.grad = weight.grad = None

    one, several = best_of(
        [
            lambda: run(fastrl.linear_token_logprobs(hidden, weight, ids[:, 0]).logprobs, upstream[:, 0]),
            lambda: run(fastrl.linear_gathered_logprobs(hidden, weight, ids), upstream),
        ],
        repeats,
    )
    return {"dtype": str(dtype).removeprefix("torch."), "case": case, "one_s": one, "gathered_s": several}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| dtype | case | linear_token_logprobs, ms | linear_gathered_logprobs, ms | ratio |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {x['dtype']} | {x['case']} | {1e3 * x['one_s']:.1f} | {1e3 * x['gathered_s']:.1f} |"
        f" {x['gathered_s'] / x['one_s']:.3f} |"
        for x in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=[1024, 256, 32768], metavar=("N", "H", "V"))
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a folder for gathered.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    n, width, vocab = args.shape
    given = [(case, getattr(torch, dtype)) for dtype in args.dtype for case in CASES]
    rows = [measure(case, (n, width, vocab), args.k, dtype, args.repeats) for case, dtype in given]
    print(table(rows))
    if args.out is not None:
        named = {**describe([]), "command": shlex.join(["python", *sys.argv])}
        found = {**named, "shape": args.shape, "k": args.k, "repeats": args.repeats, "rows": rows}
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "gathered.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
