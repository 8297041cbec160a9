"""Random numbers from what they are for: the run's seed, a step, a completion. No generator's state is ever stored."""

import hashlib

import torch
from torch import Tensor
from transformers import set_seed


def seed_of(*parts: object) -> int:
    """A seed below 2^48, which is far from those of other parts."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:6], "big")


def shuffled(count: int, *parts: object) -> Tensor:
    """The numbers below `count` in a random order of their own for these parts: (count,) int64, on the CPU."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed_of(*parts)))


def seed_step(seed: int, step: int) -> None:
    """Seed Python's, NumPy's and torch's own generators for a step: those that foreign code draws from."""
    set_seed(seed_of(seed, "step", step) % 2**32)  # NumPy's seeds are below
