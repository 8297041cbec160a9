"""AdamW with its learning-rate schedule, as every command that trains makes them."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastrl.base.errors import UserError
from fastrl.base.terminal import say
from fastrl.training.config.sections import OptimizerConfig


def make_optimizer(
    groups: Sequence[tuple[Iterable[Tensor], float]], settings: OptimizerConfig, updates: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW over groups of (tensors, peak learning rate), and its schedule over a run of this many updates.

    Tensors that need no gradient are left out.
    """
    trained: list[dict[str, Any]] = [{"params": [x for x in xs if x.requires_grad], "lr": lr} for xs, lr in groups]
    optimizer = torch.optim.AdamW(
        trained, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, fused=True
    )
    if settings.warmup_updates > updates:
        say(
            f"warning: optimizer.warmup_updates is {settings.warmup_updates}, but the run has {updates} updates, so "
            f"its learning rate ends at {updates / settings.warmup_updates:.3g} of optimizer.lr"
        )
    factor = partial(lr_factor, schedule=settings.schedule, warmup=settings.warmup_updates, updates=updates)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def lr_factor(update: int, schedule: str, warmup: int, updates: int) -> float:
    """What multiplies the peak learning rate in an update, numbered from 0, of a run of so many.

    Transformers' schedules are these, but begin a warm-up with 0, which wastes the first rollout.
    """
    if update < warmup:
        return (update + 1) / warmup
    progress = (update - warmup) / max(updates - warmup, 1)
    decays = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return max(decays[schedule], 0.0)


class Diverged(UserError):
    """The policy computes what is no number."""


def calmer(settings: OptimizerConfig) -> str:
    """What to change where training diverges."""
    return f"lower optimizer.lr ({settings.peak:g}) or optimizer.max_grad_norm, or raise optimizer.warmup_updates"
