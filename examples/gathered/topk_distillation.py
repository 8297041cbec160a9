"""Distils a teacher's top-k probabilities into a student's head, without logits of either.

The teacher's k most likely tokens of each position were recorded with their log-probabilities (a file, or an inference
engine's answer). The student's log-probabilities of the same ids are one call, normalised over its whole vocabulary.
What is left of either distribution is one further bucket, the tail, so that the loss is a divergence between
distributions: it is 0 where both agree on the k entries, and mass outside them costs.

    python examples/gathered/topk_distillation.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastrl


def distillation_loss(hidden: Tensor, weight: Tensor, ids: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """The mean over tokens of KL(teacher || student) on k entries and a tail.

    hidden: (N, H), weight: (V, H), ids: (N, k) int64, teacher_logprobs: (N, k).
    """
    logprobs = fastrl.linear_gathered_logprobs(hidden, weight, ids)
    return fastrl.topk_divergence(logprobs, teacher_logprobs, kind="forward_kl", tail=True).mean()


def main(tokens: int = 256, width: int = 64, vocab: int = 1000, k: int = 32, steps: int = 100) -> list[float]:
    """Trains a random head towards a random teacher; returns the loss of every step."""
    torch.manual_seed(0)
    hidden, teacher = torch.randn(tokens, width), torch.randn(vocab, width) / width**0.5
    weight = torch.zeros(vocab, width, requires_grad=True)
    teacher_logprobs, ids = torch.log_softmax(2 * hidden @ teacher.t(), -1).topk(k)
    optimizer = torch.optim.Adam([weight], lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = distillation_loss(hidden, weight, ids, teacher_logprobs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    found = main()
    print(f"KL(teacher || student) on 32 entries and the tail: {found[0]:.3f} -> {found[-1]:.3f}")
