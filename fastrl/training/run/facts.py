"""What a run is, in words: the head of its report and of what it prints, and `facts.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fastrl.base.system import cpu_name
from fastrl.training.parallel.machine import versions

if TYPE_CHECKING:
    from fastrl.training.config.sections import ModelConfig


def run_facts(
    config: Any, name: str, model: torch.nn.Module, device: torch.device, processes: str = ""
) -> dict[str, str]:
    """The run's objective, model, parameters, dtype, device, seed and versions, in this order: label -> text.

    Args:
        config: The config of `fastrl train` or of a stage.
        name: The run's name: the objective, or a stage's command.
        model: The model that is trained, with adapters if it has any.
        device: The device that it is on.
        processes: How many compute it, if several.
    """
    return {
        "objective": _objective(config, name),
        "model": str(config.model.config if config.model.path is None else config.model.path),
        "parameters": _parameters(model, config.model.lora_rank),
        "dtype": _dtype(config.model),
        "device": ", ".join(filter(None, [_device(device, config.training.threads), processes])),
        "seed": str(config.training.seed),
        "versions": ", ".join(f"{package} {number}" for package, number in versions().items()),
    }


def _objective(config: Any, name: str) -> str:
    loss = getattr(config, "loss", None)  # of `fastrl dpo`
    name = name if loss is None else loss.name
    distilled = getattr(config, "distillation", None) is not None and name != "distillation"
    return f"{name}, with a teacher" if distilled else name


def _parameters(model: torch.nn.Module, lora_rank: int | None) -> str:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained, total = sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)
    if trained == total:
        return f"{total:,}, all trained"
    adapters = "" if lora_rank is None else f", in adapters of rank {lora_rank}"
    return f"{trained:,} trained of {total:,}{adapters}"


def _dtype(config: ModelConfig) -> str:
    if config.dtype == "float32":
        return "float32"
    logits = "" if config.logits_dtype is None else f", logits in {config.logits_dtype}"
    return f"products in {config.dtype}{logits}; weights in float32"


def _device(device: torch.device, threads: int | None) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    count = threads or torch.get_num_threads()
    return f"{cpu_name()} (CPU, {count} thread{'s' * (count > 1)})" if device.type == "cpu" else str(device)
