"""slime's log-probabilities and entropies of logits that lie over the tensor parallel group, on fastrl.

    from fastrl.integrations import slime
    slime.enable()                   # in every training process, for example from the module of a custom loss

The functions take the place of those of the same names in slime/utils/ppo_utils.py (as of 2026): same arguments and
results. slime is not on a package index, so they are written from its public source. As there, a group of None is
torch.distributed's default group, or none if that is not initialised. `linear_cross_entropy`, of hidden states, takes
that of slime/backends/megatron_utils/triton_log_probs, which is verl's: (hidden, weight, labels, temperature, "none",
group) -> (log-probabilities, entropies). `enable` does not replace it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl import token_logprobs
from fastrl.integrations.megatron import group_or_default, sharded
from fastrl.integrations.patching import Replaced
from fastrl.integrations.verl import linear_cross_entropy
from fastrl.planning.announce import active

__all__ = [
    "calculate_log_probs_and_entropy",
    "compute_entropy_from_logits",
    "compute_log_probs",
    "disable",
    "enable",
    "linear_cross_entropy",
]

_replaced = Replaced("slime")


def compute_log_probs(logits: Tensor, tokens: Tensor, process_group: Any) -> Tensor:
    """`log p` of each token, (R, 1) float32, from logits (R, V_r) and ids (R,) of the whole vocabulary."""
    return sharded(logits, tokens, process_group).logprobs[:, None]


def compute_entropy_from_logits(logits: Tensor, process_group: Any) -> Tensor:
    """The entropies (R,) float32 in nats, from logits (R, V_r)."""
    entropy = sharded(logits, None, process_group).entropy
    assert entropy is not None
    return entropy


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (R, 1) and entropies (R,) or None, both float32 and differentiable, in one collective.

    Args:
        logits: (R, V_r), this rank's columns; not copied unless they are masked.
        tokens: (R,) ids in the whole vocabulary.
        tp_group: the group over which the vocabulary lies.
        with_entropy: whether to return entropies, which are those of the unmasked logits.
        chunk_size: has no effect, because nothing that it would bound is held.
        log_prob_keep_mask: (R, V_r) bool; where it is False, an entry has no part in the log-probabilities, unless
            it is the row's token: what was drawn is kept. The ranks' shards are then equally wide, as Megatron's are.
        with_entropy_grad: whether the entropies are differentiable.
    """
    if logits.shape[0] == 0:
        return logits.new_zeros(0), logits.new_zeros(0) if with_entropy else None
    tp_group = group_or_default(tp_group)
    if log_prob_keep_mask is None:
        stats = token_logprobs(logits, tokens.long(), entropy=with_entropy, tp_group=tp_group)
        log_probs, entropy = stats.logprobs[:, None], stats.entropy
    else:
        width = logits.shape[1]
        own = tokens.long() - width * (0 if tp_group is None else dist.get_rank(tp_group))
        column = own.clamp(0, width - 1)[:, None]
        dropped = ~log_prob_keep_mask
        dropped.scatter_(1, column, dropped.gather(1, column) & (own[:, None] != column))
        kept = logits.masked_fill(dropped, -torch.inf)
        log_probs = compute_log_probs(kept, tokens, tp_group)
        entropy = compute_entropy_from_logits(logits, tp_group) if with_entropy else None
    return log_probs, entropy if entropy is None or with_entropy_grad else entropy.detach()


def enable() -> None:
    """Put fastrl's `calculate_log_probs_and_entropy`, which slime's losses call, in the place of slime's.

    Raises ImportError without slime, RuntimeError if slime's takes other arguments.
    """
    try:
        module = importlib.import_module("slime.utils.ppo_utils")
    except ImportError as error:
        raise ImportError(f"fastrl.integrations.slime.enable needs slime ({error})") from error
    disable()
    _replaced.replace(module, calculate_log_probs_and_entropy)
    active("slime")


def disable() -> None:
    """Restore what `enable()` replaced."""
    _replaced.restore()
