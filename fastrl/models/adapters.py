"""What PEFT's wrapper around an output head computes now: a linear layer, and LoRA adapters on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Adapter(NamedTuple):
    """An active LoRA adapter of the head: logits += scale * first(dropout(hidden)) second^T."""

    first: Callable[[Tensor], Tensor]  # (..., H) -> (..., r)
    dtype: torch.dtype  # of its weights, to which PEFT casts the hidden states
    dropout: Callable[[Tensor], Tensor]
    second: Tensor  # (V, r)
    bias: Tensor | None  # (V,), of the second product
    scale: float  # of both

    def down(self, hidden: Tensor) -> Tensor:
        """The first product with the scale, (..., r)."""
        return self.scale * self.first(self.dropout(hidden.to(self.dtype)))


def narrow_factors(adapters: Sequence[Adapter], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """down (..., R) and up (V, R) of all adapters side by side: logits += down up^T."""
    return torch.cat([x.down(hidden) for x in adapters], -1), torch.cat([x.second for x in adapters], -1)


def unwrapped(head: Any) -> tuple[Any, tuple[Adapter, ...]]:
    """The module whose weight counts, and the active adapters on it; the head itself if PEFT has not wrapped it.

    Disabled and merged adapters count as PEFT counts them. Raises TypeError for other adapters than LoRA's.
    """
    if "peft" not in sys.modules:
        return head, ()
    from peft.tuners.lora.layer import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(head, ModulesToSaveWrapper):  # one copy per adapter is trained whole
        off = head.disable_adapters or not head.active_adapters
        head = head.original_module if off else head.modules_to_save[head.active_adapters[0]]
    if not isinstance(head, BaseTunerLayer):
        return head, ()
    if not isinstance(head, Linear):
        raise TypeError(f"the output head has an adapter of a kind that is not supported: {type(head)}")
    if head.disable_adapters:
        if head.merged:
            head.unmerge()  # as its forward does
        return head.get_base_layer(), ()
    names = [] if head.merged else [name for name in head.active_adapters if name in head.lora_A]
    for name in names:
        if name in head.lora_variant:
            kind = type(head.lora_variant[name]).__name__
            raise TypeError(
                f"the output head's adapter {name!r} must be plain LoRA, got {kind}: merge it into the head"
            )
    adapters = []
    for name in names:
        first: Any = head.lora_A[name]
        second: Any = head.lora_B[name]
        dropout, scale = head.lora_dropout[name], float(head.scaling[name])
        adapters.append(Adapter(first, first.weight.dtype, dropout, second.weight, second.bias, scale))
    return head.get_base_layer(), tuple(adapters)
