"""The policy's weights under the names of its checkpoint, as an inference engine loads them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from fastrl.training.models.policy import Policy


@dataclass(frozen=True)
class PolicyWeights:
    """A policy's weights, adapters merged into them; read anew at each iteration."""

    policy: Policy
    dtype: torch.dtype = torch.float32
    whole: Mapping[str, Tensor] | None = None  # a sharded policy's `merged_weights`

    def cast(self, dtype: torch.dtype) -> "PolicyWeights":
        """The same weights with parameters of another dtype; buffers keep theirs."""
        return replace(self, dtype=dtype)

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        model = base_of(self.policy)
        named = dict(merged_weights(self.policy) if self.whole is None else self.whole)
        # A bias that chooses experts is float32 in checkpoints and engines of any dtype: rounded, it chooses others.
        names = (name.replace(".base_layer", "") for name, _ in model.named_buffers())
        buffers = {id(named[name]) for name in names if name in named}
        # transformers holds some weights, such as a mixture's experts, in another form than the checkpoint.
        for name, tensor in revert_weight_conversion(model, named).items():
            dtype = tensor.dtype if id(tensor) in buffers else self.dtype
            # A sender may need them where they would lie on one process.
            device = tensor.device if self.whole is None else self.policy.device
            yield name, tensor.detach().to(device, dtype)


def base_of(policy: Policy) -> Any:
    """The policy's model, without peft's wrapper."""
    model: Any = policy.model
    return model.get_base_model() if policy.has_adapters else model


@torch.no_grad()
def merged_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The weights of `base_of(policy)`, adapters added to them; of a sharded policy as they lie over the ranks."""
    model = base_of(policy)
    yield from _merged(model) if policy.has_adapters else _saved(model)


def _saved(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model, a tied one once, and the buffers that its checkpoint has."""
    yield from model.named_parameters()
    names = model.state_dict().keys()
    yield from ((name, tensor) for name, tensor in model.named_buffers() if name in names)


def _merged(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model with LoRA layers, the active adapters added to them: one more tensor at a time."""
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, tensor in _saved(model):
        owner, _, parameter = name.rpartition(".")
        if any(name.startswith(f"{layer}.") and not name.startswith(f"{layer}.base_layer.") for layer in layers):
            continue  # an adapter's own
        # Around a mixture's experts, which are several weights of one module, there is a layer for each weight.
        while owner.endswith(".base_layer") and (wrapper := owner.removesuffix(".base_layer")) in layers:
            layer, owner = layers[wrapper], wrapper
            if getattr(layer, "parameter_name", "weight") == parameter:
                for adapter in layer.active_adapters:
                    tensor = tensor + layer.get_delta_weight(adapter).to(tensor.dtype)
        yield f"{owner}.{parameter}", tensor
