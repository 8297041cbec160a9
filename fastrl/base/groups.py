"""Responses in groups, one for each prompt: the numbers of the groups, and the sums over a response's group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fastrl.base import checks
from fastrl.base.responses import INTEGER_DTYPES


def group_numbers(group_ids: object, count: int, device: torch.device, like_name: str) -> Tensor:
    """Checks the ids; returns each response's group as a number in [0, count), `(count,)` int64 on `device`.

    like_name: what errors call the tensor on that device.
    """
    if not isinstance(group_ids, Tensor):
        return _number_hashables(group_ids, count).to(device, non_blocking=True)
    checks.tensor("group_ids", group_ids, INTEGER_DTYPES)
    checks.shape("group_ids", group_ids, (count,), "one per response")
    if group_ids.device != device:
        raise ValueError(f"group_ids must be on {device} like {like_name}, got {group_ids.device}")
    # The same numbers as from torch.unique, but without sending the number of groups to the host.
    ids, order = torch.sort(group_ids, stable=True)
    is_new = torch.zeros_like(order)
    is_new[1:] = ids[1:] != ids[:-1]
    groups = torch.empty_like(order)
    groups[order] = is_new.cumsum(0)
    return groups


def _number_hashables(group_ids: object, count: int) -> Tensor:
    """Numbers the ids of a list in order of appearance."""
    if not isinstance(group_ids, Sequence) or isinstance(group_ids, str | bytes):
        raise TypeError(f"group_ids must be an integer tensor or a list, got {type(group_ids).__name__}")
    if len(group_ids) != count:
        raise ValueError(f"group_ids must hold {count} ids, one per response, got {len(group_ids)}")
    seen: dict[Hashable, int] = {}
    numbers = []
    for position, group in enumerate(group_ids):
        # A tensor's hash is its address: equal ones would differ.
        key = group.item() if isinstance(group, Tensor) and group.dim() == 0 else group
        if isinstance(key, Tensor) or not isinstance(key, Hashable):
            raise TypeError(f"group_ids[{position}] must be hashable, and not a tensor with dimensions; got {key!r}")
        numbers.append(seen.setdefault(key, len(seen)))
    return torch.tensor(numbers, dtype=torch.int64)


def group_total(x: Tensor, groups: Tensor) -> Tensor:
    """The sum over each element's group, per element."""
    return torch.zeros_like(x).index_add_(0, groups, x)[groups]
