"""Models on their device: loaded, sharded over ranks, with adapters, or like another one."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fastrl.base.errors import UserError, one_line
from fastrl.training.config.sections import ModelConfig
from fastrl.training.config.settings import import_for
from fastrl.training.models.decoder import layers_of
from fastrl.training.models.loading import load_weights
from fastrl.training.models.names import name_of
from fastrl.training.parallel.shard import own_class, shard
from fastrl.training.parallel.world import ALONE, World


def load_model(
    config: ModelConfig,
    device: torch.device,
    kind: Any = AutoModelForCausalLM,
    *,
    new_head: bool = False,
    world: World = ALONE,
    **extra: Any,
) -> Any:
    """The model alone, on its device and in evaluation mode, with new adapters if the config asks for them.

    Over several ranks it is sharded.
    """
    model: Any = with_adapters(load_weights(config, kind, new_head=new_head, world=world, **extra), config)
    _set_up(model, config.gradient_checkpointing)
    if world.size == 1:
        return model.to(device)
    shard(model, layers_of(model), world, getattr(torch, config.dtype))
    return model


def _set_up(model: Any, gradient_checkpointing: bool) -> None:
    """Put a model in evaluation mode, with gradient checkpointing if it is to have that."""
    if gradient_checkpointing:
        # Later releases of transformers 5 warn about the older name; the first ones have no other.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        for layer in layers_of(model):  # some apply dropout themselves, if their flag says training
            for name in [name for name in vars(layer) if name.endswith("dropout")]:
                if isinstance(getattr(layer, name), float):
                    setattr(layer, name, 0.0)
    model.eval()  # dropout would make the new log-probabilities differ from the old ones before the first update


def with_adapters(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """The model wrapped by peft, its own weights frozen, if the config asks for LoRA."""
    if config.lora_rank is None:
        return model
    peft = import_for("model.lora_rank", "peft")
    settings = peft.LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=config.lora_targets, task_type="CAUSAL_LM"
    )
    try:
        wrapped: Any = peft.get_peft_model(model, settings)
    except ValueError as error:  # no module of that name
        raise UserError(f"model.lora_targets: {one_line(error)}") from error
    if model.config.get_text_config().tie_word_embeddings and hasattr(model.get_input_embeddings(), "base_layer"):
        # Merged, in an engine or a saved model, its adapter would change the head as well.
        raise UserError(
            f"model.lora_targets: {name_of(config)} uses its embedding as its head, which has no adapter; leave the "
            "embedding out"
        )
    return wrapped


def empty_copy(model: Any) -> Any:
    """A model like a sharded one, which cannot be copied itself, on the device "meta"."""
    adapters, base = getattr(model, "peft_config", None), getattr(model, "get_base_model", lambda: model)()
    with torch.device("meta"):
        made = own_class(base)._from_config(base.config, dtype=torch.float32)
        if adapters is not None:
            made = import_for("model.lora_rank", "peft").get_peft_model(made, *adapters.values())
    _set_up(made, any(layer.gradient_checkpointing for layer in layers_of(model)))
    return made


def tensors_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by name."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
