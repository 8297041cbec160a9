"""Calls over a `tp_group`: what its ranks must agree on before they compute, and this rank's part of the vocabulary.

    group = tensor_parallel_group(tp_group)
    with over(group):
        ...                                             # every check of the arguments: an error reaches all ranks
        shard = agreed_shard(group, weight.shape[0], vocab_start, vocab_size, reduce_hidden_grad, same)

After it every rank knows that the others have the same targets and options and make the same collectives. What is wrong
with the whole vocabulary (a target outside it) is then found by all ranks alike.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.backend.choice import forced, kernels
from fastrl.base import checks
from fastrl.distributed.groups import agree, checked_group, reporting
from fastrl.distributed.shards import VocabularyShard, checked_options, shard_of
from fastrl.losses.arguments import VocabularyArguments
from fastrl.losses.supports import checked_mask
from fastrl.operators import consumed
from fastrl.sampling_mask.mask import SamplingMask


def agreed_shard(
    group: ProcessGroup,
    held: int,
    vocab_start: int | None,
    vocab_size: int | None,
    reduce_hidden_grad: bool,
    same: Mapping[str, object],
) -> VocabularyShard:
    """This rank's part of the vocabulary, of which it holds `held` rows or columns, padding included.

    One exchange between the hosts. Raises ValueError on every rank if something of `same`, which `same_arguments` and
    the caller gather, differs between the ranks, or if the shards do not fit together.
    """
    checked_options(vocab_start, vocab_size, reduce_hidden_grad, group)
    options = {"vocab_size": vocab_size, "reduce_hidden_grad": reduce_hidden_grad}
    facts = agree("tp_group", group, {**same, **options}, {"held": held, "start": vocab_start})
    helds, starts = ([x[name] for x in facts] for name in ("held", "start"))
    return shard_of(group, helds, starts, vocab_size, reduce_hidden_grad)


def tensor_parallel_group(tp_group: object) -> ProcessGroup | None:
    """The group, checked; raises NotImplementedError for one under torch.compile."""
    group = checked_group("tp_group", tp_group)
    if group is not None and torch.compiler.is_compiling():
        raise NotImplementedError("tp_group is not built for torch.compile; call the function outside of it")
    return group


def over(group: ProcessGroup | None) -> AbstractContextManager[None]:
    """The context of the checks before `agreed_shard`: an error in it reaches all ranks."""
    return nullcontext() if group is None else reporting(tp_group=group)


def agreed_logits(
    group: ProcessGroup,
    rows: Tensor,
    args: VocabularyArguments,
    shape: torch.Size,
    sampling_mask: object,
    vocab_start: int | None,
    vocab_size: int | None,
    reduce_hidden_grad: bool,
    **same: object,
) -> VocabularyShard:
    """`agreed_shard` of logits (A, B, V_r), after the checks that could fail on one rank alone."""
    consumed.refuse(rows)
    kernels(forced(), rows)
    checked_mask(sampling_mask, args, None)
    alike = same_arguments(args, shape, rows.dtype, sampling_mask, **same)
    return agreed_shard(group, rows.shape[-1], vocab_start, vocab_size, reduce_hidden_grad, alike)


def same_arguments(
    args: VocabularyArguments, shape: torch.Size, dtype: torch.dtype, sampling_mask: object, **more: object
) -> dict[str, object]:
    """What every rank must pass alike, by name: the arguments that all functions of a vocabulary share, and `more`.

    Tensors are compared by a checksum where their values may be read, on a GPU inside `check_inputs()` alone.
    """
    targets, mask, (temperature, temperatures, logit_scale, softcap) = args
    recorded: object = None
    if isinstance(sampling_mask, SamplingMask):
        values = _values(sampling_mask.token_ids, sampling_mask.offsets)
        recorded = f"{len(sampling_mask)} rows with {sampling_mask.token_ids.shape[0]} ids{values}"
    valid = targets if mask is None else targets.where(mask, 0)
    return {
        "targets": f"shape {tuple(shape)}{_values(valid)}",
        "dtype": dtype,
        "mask": None if mask is None else f"one{_values(mask)}",
        "temperature": temperature if temperatures is None else f"one per token{_values(temperatures)}",
        "logit_scale": logit_scale,
        "softcap": softcap or None,
        "sampling_mask": recorded,
        "backend": forced() or None,
        **{name: described(value) for name, value in more.items()},
    }


def _values(*tensors: Tensor) -> str:
    """A checksum of the values, if they may be read."""
    if not all(checks.values_are_checked(x) for x in tensors):
        return ""
    checksum = 0
    for x in tensors:
        checksum = zlib.crc32(x.detach().cpu().contiguous().numpy(), checksum)
    return f" with checksum {checksum:08x}"


def described(value: Any) -> str:
    """A text that is equal in every process: no addresses, and no values of tensors, which may lie on a GPU."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{x.name}={described(getattr(value, x.name))}" for x in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return repr(value)
