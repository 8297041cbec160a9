"""A run in words: what a command prints before its first step and after its last, and the head of its report."""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastrl.base.system import cpu_name
from fastrl.planning.budget import memory_bytes, text
from fastrl.training.batches.memory import Expected
from fastrl.training.models.names import name_of
from fastrl.training.parallel.machine import versions
from fastrl.training.parallel.world import World
from fastrl.training.run.folder import checkpoint_of


def _show(lines: Mapping[str, str]) -> None:
    for label, line in lines.items():
        print(f"{label:<12}{line}", flush=True)


def show_run(config: Any, what: str) -> None:
    """Print what is known before the model is loaded: what the run is, of which model, and where it writes."""
    _show({"run": what, "model": name_of(config.model), "output": str(config.logging.output_dir)})


def show_start(config: Any, facts: Mapping[str, str], data: str, memory: Expected, world: World) -> None:
    """Print the rest, once everything is loaded: `facts` are those of `run_facts`, the memory is that of a process."""
    lines = {"parameters": f"{facts['parameters']}; {facts['dtype']}", "device": facts["device"], "data": data}
    if memory.plan is not None:
        lines["losses"] = f"plan {memory.plan.name}, at most {text(memory.losses)} of temporary memory"
    tokens = config.training.micro_batch_tokens
    batch = "a minibatch" if tokens is None else f"micro-batches of {tokens} tokens"
    shared, device = f" by each of {world.size} processes" if world.size > 1 else "", world.device
    gathered = f"gathered {text(memory.gathered)}, " if memory.gathered else ""
    lines["memory"] = (
        f"{text(memory.weights + memory.more)} of {text(memory_bytes(device.type, device.index))} expected{shared} "
        f"(modelled): weights {text(memory.weights)}, gradients and moments {text(memory.updates)}, {gathered}{batch} "
        f"{text(memory.activations)}"
    )
    _show(lines)


def show_end(
    config: Any, name: str, unit: str, length: str, summary: Mapping[str, Any], scores: Sequence[str], following: str
) -> int:
    """Print what a run did, where it is, and a command that can follow. Returns the exit status, as a shell has it.

    `unit` is what the run counts, `length` the field that sets their number, `scores` the metrics to print.
    """
    done, interrupted = summary["steps"], summary["interrupted"]
    values = ", ".join(f"{metric} {summary[metric]:.4f}" for metric in scores if summary.get(metric) is not None)
    complete = done == summary["resumed"]
    if complete:
        print(f"{name}: complete, all {done} {unit} were done before. {values}")
    else:
        earlier = f", after {summary['resumed']} before" if summary["resumed"] else ""
        print(f"{name}: {done - summary['resumed']} {unit} in {summary['seconds']:.0f} s{earlier}. {values}")
    print(f"metrics, report and checkpoints: {config.logging.output_dir}")
    if interrupted is None:
        more = complete and config.optimizer.schedule == "constant"
        longer = f"the same with --resume and a larger --{length}, or " if more else ""
        print(f"next: {longer}{following}")
        return 0
    saved = checkpoint_of(config.logging, done)
    print(f"interrupted by {interrupted}, saved in {saved}; the same command with --resume goes on from there")
    return 128 + signal.Signals[interrupted]


def run_facts(config: Any, name: str, model: torch.nn.Module, world: World) -> dict[str, str]:
    """The run's objective, model, parameters, dtype, device, seed and versions, in this order: label -> text.

    They are in `facts.json`, which a report begins with.

    Args:
        config: The config of `fastrl train` or of a stage.
        name: The run's name: the objective, or a stage's command.
        model: The model that is trained, with adapters if it has any.
        world: The processes that compute it, and their device.
    """
    loss = getattr(config, "loss", None)  # of `fastrl dpo`
    objective = name if loss is None else loss.name
    if getattr(config, "distillation", None) is not None and objective != "distillation":
        objective += ", with a teacher"
    return {
        "objective": objective,
        "model": str(config.model.config if config.model.path is None else config.model.path),
        "parameters": _parameters(model, config.model.lora_rank),
        "dtype": _dtype(config.model),
        "device": _device(world.device, config.training.threads) + (f", {world}" if world.size > 1 else ""),
        "seed": str(config.training.seed),
        "versions": ", ".join(f"{package} {number}" for package, number in versions().items()),
    }


def _parameters(model: torch.nn.Module, lora_rank: int | None) -> str:
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if trained == total:
        return f"{total:,}, all trained"
    adapters = "" if lora_rank is None else f", in adapters of rank {lora_rank}"
    return f"{trained:,} trained of {total:,}{adapters}"


def _dtype(config: Any) -> str:
    if config.dtype == "float32":
        return "float32"
    logits = "" if config.logits_dtype is None else f", logits in {config.logits_dtype}"
    return f"products in {config.dtype}{logits}; weights in float32"


def _device(device: torch.device, threads: int | None) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    count = threads or torch.get_num_threads()
    return f"{cpu_name()} (CPU, {count} thread{'s' * (count > 1)})" if device.type == "cpu" else str(device)
