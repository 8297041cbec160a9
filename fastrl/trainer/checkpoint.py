"""Checkpoints: a model in the Hugging Face format, and beside it what a run needs to go on as if it had never stopped.

``from_pretrained`` on the directory gives model and tokenizer back. ``training_state.safetensors`` holds the moments of
the optimizer and the generators, ``training_state.json`` plain numbers and the config; nothing is ever unpickled.
"""

import json
import os
import random
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .config import Config
from .data import PromptSampler
from .errors import UserError
from .policy import Policy
from .update import Optimization

TENSORS, NUMBERS = "training_state.safetensors", "training_state.json"
# Sections and fields that a resumed run may change. Other batches round and sample differently; all else would make it
# another run.
FREE = ("logging", "evaluation", "device", "threads", "batch_size", "micro_batch_size", "max_skipped_updates")


def save_checkpoint(policy: Policy, state: Optimization, sampler: PromptSampler, config: Config) -> None:
    """Write ``checkpoints/step-<state.step>``, which exists only once it is complete, and prune the oldest."""
    optimizer = state.optimizer.state_dict()
    tensors = {name: generator.get_state() for name, generator in _generators(policy, state, sampler).items()}
    for index, moments in optimizer["state"].items():
        tensors |= {f"{index}.{name}": moment.contiguous() for name, moment in moments.items()}
    numbers = {
        "step": state.step,
        "skipped": state.skipped,
        # The numbers of a controller (an adaptive KL coefficient, say) go here, and load_checkpoint gives them back.
        "prompts": len(sampler.examples),
        "order": sampler.order,
        "optimizer": optimizer["param_groups"],
        "scheduler": state.scheduler.state_dict(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "config": config.model_dump(mode="json"),
    }
    directory = config.logging.output_dir / "checkpoints" / f"step-{state.step:06d}"
    unfinished = directory.with_name(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    policy.model.save_pretrained(unfinished)
    policy.tokenizer.save_pretrained(unfinished)
    save_file(tensors, unfinished / TENSORS)
    (unfinished / NUMBERS).write_text(json.dumps(numbers, default=np.ndarray.tolist) + "\n", encoding="utf-8")
    for path in unfinished.iterdir():  # or a machine that dies could leave the final name on empty files
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if directory.exists():
        shutil.rmtree(directory)
    unfinished.rename(directory)
    if config.logging.keep_checkpoints is not None:
        for old in _complete(directory.parent)[: -config.logging.keep_checkpoints]:
            shutil.rmtree(old)


def newest_checkpoint(config: Config) -> Path:
    """What ``--resume`` goes on from. Raises UserError if there is nothing, or if it is another run's."""
    directory = config.logging.output_dir / "checkpoints"
    found = _complete(directory)
    if not found:
        raise UserError(f"{directory}: holds no complete checkpoint to resume from; start the run without --resume")
    before = json.loads((found[-1] / NUMBERS).read_text(encoding="utf-8"))["config"]
    # A decay is spread over the whole run; a constant schedule does not care how long that is.
    free = (*FREE, "steps") if config.optimizer.schedule == "constant" else FREE
    changed = [
        f"{section}.{field} was {before[section][field]!r} and is now {value!r}"
        for section, table in config.model_dump(mode="json").items()
        for field, value in table.items()
        if section not in free and field not in free and before[section].get(field, value) != value
    ]
    if changed:
        raise UserError(f"{found[-1]}: cannot be resumed with another config: {'; '.join(changed)}")
    return found[-1]


def load_checkpoint(directory: Path, policy: Policy, state: Optimization, sampler: PromptSampler) -> None:
    """Bring a new run's objects to where the checkpoint was written, and the process' random generators too.

    Raises UserError if the dataset has another length, where the position in it would mean nothing.
    """
    numbers = json.loads((directory / NUMBERS).read_text(encoding="utf-8"))
    if len(sampler.examples) != numbers["prompts"]:
        lengths = f"data.path had {numbers['prompts']} prompts and now has {len(sampler.examples)}"
        raise UserError(f"{directory}: cannot be resumed with another dataset: {lengths}")
    model = type(policy.model).from_pretrained(directory, dtype=torch.float32, use_safetensors=True)
    policy.model.load_state_dict(model.state_dict())
    tensors = load_file(directory / TENSORS)
    for name, generator in _generators(policy, state, sampler).items():
        if name in tensors:  # not where a CPU's run goes on on a GPU
            generator.set_state(tensors[name])
    moments: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        if index.isdigit():
            moments[int(index)][name] = tensor.clone()  # not a view of a file that will be pruned
    state.optimizer.load_state_dict({"state": moments, "param_groups": numbers["optimizer"]})
    state.scheduler.load_state_dict(numbers["scheduler"])
    state.step, state.skipped, sampler.order = numbers["step"], numbers["skipped"], numbers["order"]
    random.setstate(tuple(tuple(part) if isinstance(part, list) else part for part in numbers["python"]))
    np.random.set_state(tuple(numbers["numpy"]))


def _generators(policy: Policy, state: Optimization, sampler: PromptSampler) -> dict[str, torch.Generator]:
    """Every torch generator that a run draws from."""
    found = {"torch": torch.default_generator, "shuffle": state.generator, "prompts": sampler.generator}
    if policy.device.type == "cuda":
        found["cuda"] = torch.cuda.default_generators[policy.device.index]
    return found


def _complete(directory: Path) -> list[Path]:
    """The checkpoints that a run can go on from, oldest first."""
    found = [path for path in directory.glob("step-*") if path.name[5:].isdigit() and (path / NUMBERS).is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))
