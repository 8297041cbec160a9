"""What rounding logits to bfloat16 does to log-probabilities and ratios: docs/integrations/verl.md has the numbers.

    OMP_NUM_THREADS=1 python benchmarks/integrations/bf16_logits.py

Hidden states and head are bfloat16 random normal numbers, scaled so that logits have the standard deviation of the
first column. Tokens are drawn from the softmax of exact logits: products of the same operands in float32, then float64.
Beside them stand fastrl's log-probabilities, from logits in the head's dtype. A second policy has hidden states that
differ by 1 %, as after an update: the error of its log-ratio to the first, both rounded, is the last column.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import Tensor

import fastrl

RESPONSE = 128  # tokens over which a sequence's ratio is averaged


class Cost(NamedTuple):
    """All but the first two are of the rounding."""

    logit: float  # of the token that was drawn, mean
    logprob: float  # mean
    rms: float  # of the log-probability's error
    largest: float
    tokens_off: float  # share whose ratio to the exact policy is more than 1 % away from 1
    sequences_off: float  # share whose geometric mean of ratios is more than 3e-4 away, GSPO's lower clip
    log_ratio: float  # root mean square of the error after a step


def exact(hidden: Tensor, weight: Tensor, ids: Tensor | None = None) -> list[Tensor]:
    """Tokens (drawn where none are given), their logits and their log-probabilities, a few rows at a time."""
    found = []
    for i in range(0, len(hidden), 64):
        logits = (hidden[i : i + 64].float() @ weight.float().t()).double()
        drawn = logits.softmax(-1).multinomial(1)[:, 0] if ids is None else ids[i : i + 64]
        found.append((drawn, *(x.gather(-1, drawn[:, None])[:, 0] for x in (logits, logits.log_softmax(-1)))))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def rounded(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """fastrl's log-probabilities of a bfloat16 head."""
    return fastrl.linear_token_logprobs(hidden, weight, ids).logprobs.double()


def measure(std: float, tokens: int = 4096, width: int = 256, vocab: int = 32768) -> Cost:
    """Over `tokens` tokens, a multiple of RESPONSE."""
    weight, scale = torch.randn(vocab, width).bfloat16(), std / width**0.5
    before = scale * torch.randn(tokens, width)
    hidden, moved = before.bfloat16(), (before + 0.01 * scale * torch.randn(tokens, width)).bfloat16()
    ids, logits, logprobs = exact(hidden, weight)
    error = rounded(hidden, weight, ids) - logprobs
    after = rounded(moved, weight, ids) - exact(moved, weight, ids)[2]
    sequences = error.view(-1, RESPONSE).mean(-1)
    return Cost(
        *(
            float(x)
            for x in (
                logits.mean(),
                logprobs.mean(),
                error.pow(2).mean().sqrt(),
                error.abs().max(),
                (error.expm1().abs() > 0.01).double().mean(),
                (sequences.expm1().abs() > 3e-4).double().mean(),
                (after - error).pow(2).mean().sqrt(),
            )
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    print("logits'   token's          error of logp     ratio      sequence   log-ratio's")
    print("    std     logit  logp      rms  largest  >1% off  >3e-4 off  error, rms")
    for std in (1.0, 3.0, 5.0, 8.0):
        cost = measure(std, args.tokens)
        print(
            f"{std:7.0f} {cost.logit:9.1f} {cost.logprob:5.1f} {cost.rms:8.4f} {cost.largest:8.3f}"
            f" {cost.tokens_off:8.0%} {cost.sequences_off:10.0%} {cost.log_ratio:11.4f}"
        )


if __name__ == "__main__":
    main()
