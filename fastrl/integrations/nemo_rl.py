"""NeMo-RL's log-probabilities and entropies of logits that lie over the tensor parallel group, on fastrl.

    from fastrl.integrations import nemo_rl
    nemo_rl.enable()                 # in every policy worker

The classes take the place of those of the same names in nemo_rl/distributed/model_utils.py (as of 2026), which are
called as `X.apply(...)`; NeMo-RL's own functions around them (shifts, packed sequences, context parallelism, DTensors)
then use them. NeMo-RL is not on a package index, so they are written from its public source.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from fastrl.integrations.megatron import sharded
from fastrl.integrations.patching import Replaced
from fastrl.planning.announce import active

__all__ = [
    "ChunkedDistributedEntropy",
    "ChunkedDistributedLogprob",
    "DistributedLogprob",
    "disable",
    "enable",
    "from_parallel_logits_to_logprobs",
]

_MODULE = "nemo_rl.distributed.model_utils"
_replaced = Replaced("nemo_rl")


def _logprobs(logits: Tensor, target: Tensor, start: int, end: int, group: Any, inference_only: bool) -> Tensor:
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        logprobs = sharded(logits, target, group, int(start)).logprobs
    if int(end) - int(start) != logits.shape[-1]:  # only now: the other ranks wait for this one
        raise ValueError(
            f"vocab_start_index and vocab_end_index must be {logits.shape[-1]} apart, the columns of"
            f" vocab_parallel_logits, got {start} and {end}"
        )
    return logprobs


class DistributedLogprob:
    """`log p` of each target (B, S) float32, from logits (B, S, V_r)."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        group: Any,
        inference_only: bool = False,
    ) -> Tensor:
        """Targets (B, S) are ids of the whole vocabulary; this rank has [vocab_start_index, vocab_end_index) of it."""
        return _logprobs(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group, inference_only)


class ChunkedDistributedLogprob:
    """`DistributedLogprob`: chunk_size has no effect, because nothing that it would bound is held."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Any,
        inference_only: bool = False,
    ) -> Tensor:
        """See `DistributedLogprob.apply`."""
        return _logprobs(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only)


class ChunkedDistributedEntropy:
    """`sum p log p`, minus the entropy, (B, S) float32, from logits (B, S, V_r); chunk_size has no effect."""

    @staticmethod
    def apply(vocab_parallel_logits: Tensor, chunk_size: int, tp_group: Any, inference_only: bool = False) -> Tensor:
        """The sign is NeMo-RL's."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            entropy = sharded(vocab_parallel_logits, None, tp_group).entropy
            assert entropy is not None
            return -entropy


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
    *,
    shift_targets: bool = True,
) -> Tensor:
    """`log p` of the tokens that follow, (B, S - 1) float32, or with `shift_targets=False` of the targets, (B, S).

    Args:
        vocab_parallel_logits: (B, S', V_r) with S' >= S; rows beyond S are padding.
        target: (B, S) ids in the whole vocabulary, not shifted.
        vocab_start_index, vocab_end_index: the ids that this rank has.
        tp_group: the group over which the vocabulary lies.
        inference_only: whether to compute without a graph.
        cp_group: None or a group of one; NeMo-RL's own function handles more, and with `enable()` it uses fastrl.
        chunk_size: has no effect, because nothing that it would bound is held.
        sampling_params: top_k and top_p must be off.
        shift_targets: whether row t predicts token t + 1.

    Raises:
        NotImplementedError: a cp_group of several ranks, or top-k or top-p.
    """
    if cp_group is not None and torch.distributed.get_world_size(cp_group) > 1:
        raise NotImplementedError("cp_group must have one rank here; NeMo-RL's function takes more, after enable()")
    top_k, top_p = (getattr(sampling_params, name, None) for name in ("top_k", "top_p"))
    if top_k not in (None, -1) or top_p not in (None, 1.0):
        raise NotImplementedError(f"sampling_params must have top_k and top_p off, got {top_k} and {top_p}")
    length = target.shape[1]
    if shift_targets:
        target, length = target[:, 1:], length - 1
    logits = vocab_parallel_logits[:, :length]
    return _logprobs(logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only)


def enable() -> None:
    """Put fastrl's classes in the place of NeMo-RL's, wherever its modules hold them.

    Raises ImportError without NeMo-RL, RuntimeError if one of its classes takes other arguments.
    """
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        raise ImportError(f"fastrl.integrations.nemo_rl.enable needs nemo_rl ({error})") from error
    disable()
    _replaced.replace(module, DistributedLogprob, ChunkedDistributedLogprob, ChunkedDistributedEntropy)
    active("NeMo-RL")


def disable() -> None:
    """Restore what `enable()` replaced."""
    _replaced.restore()
