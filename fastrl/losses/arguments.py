"""Checks the arguments of the entry points that read the vocabulary, and flattens them for the operators."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.backend.contract import Transform
from fastrl.base import checks
from fastrl.linear.head import Head


class VocabularyArguments(NamedTuple):
    """The arguments that all these entry points share."""

    targets: Tensor  # (N,) int64
    mask: Tensor | None  # (N,) bool
    transform: Transform

    def shaped_mask(self, targets: Tensor) -> Tensor | None:
        """The mask in the shape of the targets."""
        return None if self.mask is None else self.mask.view(targets.shape)


def vocabulary_arguments(
    targets: Tensor, mask: object, temperature: object, logit_scale: object, softcap: object, like_name: str = "targets"
) -> VocabularyArguments:
    """Checks and flattens the arguments that all these entry points share; errors call the targets `like_name`.

    Where the mask holds neither 0 nor 1, and may not be read, the target is `checks.WRONG_MASK`.
    """
    checked = checks.mask(mask, targets, like_name)
    transform = checked_transform(temperature, logit_scale, softcap, targets, checked, like_name)
    wrong = checks.wrong_mask(mask)
    if wrong is not None:
        targets = targets.masked_fill(wrong, checks.WRONG_MASK)
    return VocabularyArguments(
        targets.reshape(-1).contiguous(), None if checked is None else checked.reshape(-1).contiguous(), transform
    )


def checked_transform(
    temperature: object,
    logit_scale: object,
    softcap: object,
    like: Tensor,
    mask: Tensor | None,
    like_name: str = "targets",
    prefix: str = "",
) -> Transform:
    """The transform of logits; a tensor of temperatures has the shape of `like`, which errors call `like_name`.

    prefix: of the arguments' names.
    """
    scalar, per_token = checks.temperature(temperature, like, mask, like_name, f"{prefix}temperature")
    scale = checks.number(f"{prefix}logit_scale", logit_scale, positive=True)
    return Transform(scalar, per_token, scale, checks.softcap(softcap, f"{prefix}softcap"))


def checked_logits(
    logits: object, targets: object, inplace: object, may_be_empty: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the logits (..., V) and their targets (...); raises an error that names a wrong argument.

    V may be 0 for a rank's part of a vocabulary.
    """
    logits = checks.tensor("logits", logits, checks.LOGIT_DTYPES)
    checks.once_differentiable("logits", logits)
    if logits.dim() < 1 or (logits.shape[-1] == 0 and not may_be_empty):
        raise ValueError(f"logits must have shape (..., V) with V >= 1, got {tuple(logits.shape)}")
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace must be a bool, got {type(inplace).__name__}")
    return logits, checks.targets(targets, logits.shape[:-1], "logits.shape[:-1]", logits, "logits")


def consumes(logits: Tensor, inplace: bool) -> bool:
    """Whether the gradient overwrites the logits: `inplace` is true and they need a gradient.

    Never in a graph of torch.compile, which plans memory itself.
    """
    return inplace and forms_gradient(logits)


def forms_gradient(logits: Tensor) -> bool:
    """Whether the logits need a gradient; always False in a graph of torch.compile."""
    return logits.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def checked_head(
    hidden: object, weight: object, bias: object, targets: object, group: ProcessGroup | None = None
) -> tuple[Head, Tensor, int]:
    """Returns a head with hidden states (N, H), the targets (...) and the bytes copied; raises for a wrong argument.

    Over a group, weight and bias are this rank's shard, which may be empty, or DTensors that lie over the group.
    """
    hidden, head, copied = head_arguments(hidden, weight, bias, group)
    return head, checks.targets(targets, hidden.shape[:-1], "hidden.shape[:-1]", hidden, "hidden"), copied


def head_arguments(
    hidden: object, weight: object, bias: object, group: ProcessGroup | None = None, prefix: str = ""
) -> tuple[Tensor, Head, int]:
    """Returns hidden (..., H), a head with hidden states (N, H), and the bytes copied; raises for a wrong argument.

    Under autocast, hidden, weight and bias are cast to its dtype, as torch.nn.functional.linear would cast them.
    prefix: of the arguments' names.
    """
    names = tuple(f"{prefix}{name}" for name in ("hidden", "weight", "bias"))
    hidden = checks.tensor(names[0], hidden)
    weight = checks.tensor(names[1], own_part(names[1], weight, group))
    bias = None if bias is None else checks.tensor(names[2], own_part(names[2], bias, group))
    inputs = (hidden, weight, bias)
    for name, value in zip(names, inputs, strict=True):
        if value is not None:
            checks.once_differentiable(name, value)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    checks.of_dtype(names[0], hidden, checks.LOGIT_DTYPES)
    sizes = weight.shape[1:] if group is not None else weight.shape
    if hidden.dim() < 1 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or 0 in sizes:
        raise ValueError(
            f"{names[0]} must have shape (..., H) and {names[1]} (V, H) with V, H >= 1,"
            f" got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    for name, value in zip(names[1:], (weight, bias), strict=True):
        if value is not None:
            checks.same_device(name, value, hidden, names[0])
            if value.dtype != hidden.dtype:
                raise TypeError(f"{name} must be {hidden.dtype} like {names[0]}, got {value.dtype}")
    if bias is not None:
        checks.shape(names[2], bias, weight.shape[:1], "one per vocabulary entry")
    head = Head(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    return hidden, head, _copied_bytes(inputs, head)


def own_part(name: str, value: object, group: ProcessGroup | None) -> object:
    """This rank's rows of a DTensor that lies over the group in shards of its first dimension; other values as is."""
    if group is None or type(value).__name__ != "DTensor":
        return value
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(value, DTensor)
    members = dist.get_process_group_ranks(group)
    if value.device_mesh.mesh.flatten().tolist() != members or value.placements != (Shard(0),):
        raise TypeError(
            f"{name} must be a tensor, or a DTensor with placements (Shard(0),) over the ranks of tp_group, {members};"
            f" got a DTensor with placements {value.placements} over ranks {value.device_mesh.mesh.tolist()}"
        )
    return value.to_local()


def _copied_bytes(given: tuple[Tensor | None, ...], head: Head) -> int:
    """Bytes of the copies of hidden, weight and bias that the entry points or autograd make under every plan."""
    total = 0
    for before, after in zip(given, head.tensors, strict=True):
        if before is None or after is None:
            continue
        copies = 0
        if before.dtype != after.dtype:
            copies += 2  # the cast, and the cast of its gradient
        if not before.is_contiguous():
            if before.dim() > 2:
                copies += 1  # it has no view (N, H)
            if before.dim() == 2 or (before.requires_grad and before.is_leaf):
                copies += 1  # its gradient is contiguous, and autograd copies it into the layout of a leaf
        total += copies * after.numel() * after.element_size()
    return total
