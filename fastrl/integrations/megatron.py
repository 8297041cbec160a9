"""Functions of logits whose vocabulary lies over Megatron's tensor parallel group, under Megatron's and verl's names.

    from fastrl.integrations import megatron

    logprobs = megatron.vocab_parallel_log_probs_from_logits(logits, labels)      # verl
    entropy = megatron.vocab_parallel_entropy(logits)
    loss = megatron.vocab_parallel_cross_entropy(logits, labels)                  # Megatron-Core

Each takes the place of the function of this name: `megatron/core/tensor_parallel/cross_entropy.py` and
`megatron/core/fusions/fused_cross_entropy.py` of Megatron-Core 0.16, `verl/utils/megatron/tensor_parallel.py` of verl
0.9. Logits (..., V_r) are float32, bfloat16 or float16, and are not written to; ids (...) are of the whole vocabulary.
Results are float32, differentiable and the same on every rank. A forward makes one collective, a backward none, and
neither makes a float32 copy of the logits. A negative id, an ignored label, gives 0 and no gradient. Unlike theirs, an
id beyond the vocabulary is an error: IndexError on the CPU, NaN on a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl import TokenStats, token_logprobs

__all__ = [
    "fused_vocab_parallel_cross_entropy",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_entropy_with_chunking",
    "vocab_parallel_log_probs_from_logits",
]


def tensor_parallel_group() -> Any:
    """Megatron's tensor parallel group of this process; raises ImportError without Megatron-Core."""
    try:
        parallel_state = importlib.import_module("megatron.core.parallel_state")
    except ImportError as error:
        raise ImportError(f"the tensor parallel group is Megatron's ({error}): pip install megatron-core") from error
    return parallel_state.get_tensor_model_parallel_group()


def group_or_default(group: Any) -> Any:
    """The group; for None torch.distributed's default group if there is one, as in the collectives of the originals."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def sharded(logits: Tensor, ids: Tensor | None, group: Any, vocab_start: int | None = None) -> TokenStats:
    """The statistics of logits (..., V_r); with ids (...) of None the entropies alone count."""
    group = group_or_default(group)
    if ids is None:
        ids = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        return token_logprobs(logits, ids, entropy=True, tp_group=group)
    ids = ids.long()
    return token_logprobs(logits, ids, mask=ids >= 0, tp_group=group, vocab_start=vocab_start)


# --- Megatron-Core ----------------------------------------------------------------------------------------------------


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """`-log p` of each target, shaped like it. Raises NotImplementedError for a label_smoothing other than 0."""
    if label_smoothing:
        raise NotImplementedError(f"label_smoothing must be 0, got {label_smoothing}")
    return -sharded(vocab_parallel_logits, target, tensor_parallel_group()).logprobs


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
    """`-log p` of each target, shaped like it; its gradient has the logits' dtype, where Megatron's is bfloat16."""
    return -sharded(vocab_parallel_logits, target, tp_group).logprobs


# --- verl -------------------------------------------------------------------------------------------------------------


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """`log p` of each label, shaped like it."""
    return sharded(logits, labels, tensor_parallel_group()).logprobs


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    """The entropies in nats, of the logits' leading shape; verl's have the logits' dtype."""
    entropy = sharded(vocab_parallel_logits, None, tensor_parallel_group()).entropy
    assert entropy is not None
    return entropy


def vocab_parallel_entropy_with_chunking(vocab_parallel_logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """`vocab_parallel_entropy`: chunk_size has no effect, because nothing that it would bound is held."""
    return vocab_parallel_entropy(vocab_parallel_logits)
