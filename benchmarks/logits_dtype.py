"""What float32 logits gain over those rounded to bfloat16: docs/logits_dtype.md has the numbers.

    python benchmarks/logits_dtype.py --out benchmarks/results/MACHINE/bfloat16

Hidden states and head are bfloat16 random normal numbers, scaled so that logits have a standard deviation of 3.
Ordinary tokens are drawn from the exact softmax. Confident ones have a logit of about 24: hidden states are moved along
the token's row of the head. Exact are products and log-softmax of the same bfloat16 operands in float64. Beside them
stand `linear_token_logprobs` with both logits dtypes, and torch's log-softmax of float32 products of the same operands,
which is what an inference engine with a float32 head computes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.bench.machine import describe

#: Of the logits, and how far a confident token's is above the mean.
STD, LIFT = 3.0, 24.0
#: Rows of the head that are held in float64 at once.
PIECE = 4096


def exact(hidden: Tensor, weight: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Targets (N,), drawn where none are given, and their log-probabilities, in float64."""
    rows = hidden.double()
    logits = torch.cat([rows @ part.double().t() for part in weight.split(PIECE)], 1)
    drawn = logits.softmax(-1).multinomial(1)[:, 0] if targets is None else targets
    others = logits.scatter(1, drawn[:, None], -torch.inf)  # without the target: 1 - p keeps its digits
    gap = torch.logsumexp(others, -1) - logits.gather(1, drawn[:, None])[:, 0]
    return drawn, -torch.nn.functional.softplus(gap)


def by_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """From whole float32 logits of float32 copies."""
    logits = torch.cat([hidden.float() @ part.float().t() for part in weight.split(PIECE)], 1)
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def by_fastrl(logits_dtype: torch.dtype | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`linear_token_logprobs` with this logits dtype."""
    return lambda hidden, weight, targets: (
        fastrl.linear_token_logprobs(hidden, weight, targets, logits_dtype=logits_dtype).logprobs
    )


WAYS = {
    "bfloat16 logits": by_fastrl(None),
    "logits_dtype=torch.float32": by_fastrl(torch.float32),
    "torch, float32 head": by_torch,
}


def measure(width: int, tokens: int, vocab: int) -> list[dict[str, Any]]:
    """The errors of each way for ordinary and for confident tokens."""
    g = torch.Generator().manual_seed(width)
    weight = torch.randn(vocab, width, generator=g).mul_(STD / width**0.5).bfloat16()
    rows = []
    for kind in ("ordinary", "confident"):
        hidden, targets = torch.randn(tokens, width, generator=g), None
        if kind == "confident":
            targets = torch.randint(vocab, (tokens,), generator=g)
            hidden += LIFT / STD**2 * weight[targets].float()
        hidden = hidden.bfloat16()
        targets, logprobs = exact(hidden, weight, targets)
        for way, function in WAYS.items():
            found = function(hidden, weight, targets).double()
            error = (found - logprobs).abs()
            # 1 - p, which is what a confident token's gradient is made of
            missing = (torch.expm1(found) / torch.expm1(logprobs) - 1).abs()
            rows.append(
                {
                    "hidden": width,
                    "tokens": kind,
                    "logprob_mean": logprobs.mean().item(),
                    "way": way,
                    "error_mean": error.mean().item(),
                    "error_max": error.max().item(),
                    "missing_error_mean": missing.mean().item(),
                    "missing_error_max": missing.max().item(),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| H | tokens | mean logp | computed by | error of logp: mean | max | relative error of 1 - p: mean | max |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {x['hidden']} | {x['tokens']} | {x['logprob_mean']:.2g} | {x['way']} | {x['error_mean']:.1e} |"
        f" {x['error_max']:.1e} | {x['missing_error_mean']:.1e} | {x['missing_error_max']:.1e} |"
        for x in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=256, help="of each kind")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--out", type=Path, help="a folder for logits_dtype.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = [row for width in args.hidden for row in measure(width, args.tokens, args.vocab)]
    print(table(rows))
    if args.out is not None:
        named = {**describe([]), "command": shlex.join(["python", *sys.argv])}
        found = {**named, "vocab": args.vocab, "tokens": args.tokens, "rows": rows}
        (args.out / "logits_dtype.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
