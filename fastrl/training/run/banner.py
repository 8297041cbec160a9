"""What a command that trains prints before its first step and after its last."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastrl.planning.budget import memory_bytes, text
from fastrl.training.batches.memory import Expected
from fastrl.training.models.loading import name_of
from fastrl.training.run.checkpoint import checkpoint_of
from fastrl.training.run.interruption import exit_status


def _show(lines: Mapping[str, str]) -> None:
    for label, line in lines.items():
        print(f"{label:<12}{line}", flush=True)


def show_run(config: Any, what: str) -> None:
    """Print what is known before the model is loaded: what the run is, of which model, and where it writes."""
    _show({"run": what, "model": name_of(config.model), "output": str(config.logging.output_dir)})


def show_start(
    config: Any, facts: Mapping[str, str], data: str, memory: Expected, device: torch.device, processes: int = 1
) -> None:
    """Print the rest, once everything is loaded: `facts` are those of `run_facts`, the memory is that of a process."""
    lines = {"parameters": f"{facts['parameters']}; {facts['dtype']}", "device": facts["device"], "data": data}
    if memory.plan is not None:
        lines["losses"] = f"plan {memory.plan.name}, at most {text(memory.losses)} of temporary memory"
    tokens = config.training.micro_batch_tokens
    batch = "a minibatch" if tokens is None else f"micro-batches of {tokens} tokens"
    shared = f" by each of {processes} processes" if processes > 1 else ""
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
    """Print what a run did, where it is, and a command that can follow. Returns the exit status.

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
    return exit_status(interrupted, checkpoint_of(config.logging, done))
