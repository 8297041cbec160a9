"""Checkpoints: a model in the Hugging Face format, and beside it what a run needs to go on as if it had never stopped.

``from_pretrained`` on the directory gives model (or adapters) and tokenizer back. ``training_state.safetensors`` holds
the moments of the optimizer and the generators, ``training_state.json`` plain numbers and the config, and where there
are, ``critic.safetensors`` and ``reference.safetensors`` their weights; nothing is ever unpickled.
"""

import hashlib
import json
import random
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model

from ..runs.data import PromptSampler
from ..runs.errors import UserError
from ..runs.log import flush
from .config import Config
from .run import Run

TENSORS, NUMBERS = "training_state.safetensors", "training_state.json"
# Sections and fields that a resumed run may change. Other batches round and sample differently; all else would make it
# another run.
FREE = (
    "logging", "evaluation", "training.device", "training.threads", "training.micro_batch_size",
    "training.memory_budget", "training.max_skipped_updates", "rollout.batch_size",
)  # fmt: skip


def save_checkpoint(run: Run) -> None:
    """Write ``checkpoints/step-<run.step>``, which exists only once it is complete, and prune the oldest.

    Raises UserError where that fails (a full disk), and leaves the earlier checkpoints as they were.
    """
    directory = run.config.logging.output_dir / "checkpoints" / f"step-{run.step:06d}"
    unfinished = directory.with_name(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        _write(run, unfinished)
        if directory.exists():
            shutil.rmtree(directory)
        unfinished.rename(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)  # what is there of it takes room and is no use
        good = _complete(directory.parent)
        left = f"the last good checkpoint is {good[-1]}" if good else "there is no earlier one"
        raise UserError(f"step {run.step}: cannot save a checkpoint in {directory.parent}: {error}; {left}") from error
    if run.config.logging.keep_checkpoints is not None:
        removed = directory.with_name(".removed")
        shutil.rmtree(removed, ignore_errors=True)
        for old in _complete(directory.parent)[: -run.config.logging.keep_checkpoints]:
            old.rename(removed)  # or a run killed here would leave half of it under a checkpoint's name
            shutil.rmtree(removed)


def _write(run: Run, directory: Path) -> None:
    """All files of a checkpoint, flushed to the disk."""
    optimizer = run.optimizer.state_dict()
    tensors = {name: generator.get_state() for name, generator in _generators(run).items()}
    for index, moments in optimizer["state"].items():
        tensors |= {f"{index}.{name}": moment.contiguous() for name, moment in moments.items()}
    numbers = {
        "step": run.step,
        "skipped": run.skipped,
        "prompts": len(run.sampler.examples),
        "digest": _digest(run.sampler),
        "order": run.sampler.order,
        "text": run.text and run.text.position,
        "kl": run.kl and run.kl.state(),
        "entropy": run.entropy and run.entropy.state(),
        "optimizer": optimizer["param_groups"],
        "scheduler": run.scheduler.state_dict(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "config": run.config.model_dump(mode="json"),
    }
    run.policy.model.save_pretrained(directory)
    run.policy.tokenizer.save_pretrained(directory)
    for name, model in _other_models(run).items():
        save_model(model, str(directory / name))
    save_file(tensors, directory / TENSORS)
    (directory / NUMBERS).write_text(json.dumps(numbers, default=np.ndarray.tolist) + "\n", encoding="utf-8")
    flush(directory)


def newest_checkpoint(config: Config) -> Path:
    """What ``--resume`` goes on from. Raises UserError if there is nothing, or if it is another run's."""
    directory = config.logging.output_dir / "checkpoints"
    found = _complete(directory)
    if not found:
        raise UserError(f"{directory}: holds no complete checkpoint to resume from; start the run without --resume")
    before = _numbers(found[-1])["config"]
    # A decay is spread over the whole run; a constant schedule does not care how long that is.
    free = (*FREE, "training.steps") if config.optimizer.schedule == "constant" else FREE
    changed = []
    for section, table in config.model_dump(mode="json").items():
        earlier = before.get(section)
        if section in free or table == earlier:
            continue
        if table is None or earlier is None:  # a table that was not there, or is no more
            changed.append(f"{section} was {earlier!r} and is now {table!r}")
            continue
        changed += [
            f"{section}.{field} was {earlier[field]!r} and is now {value!r}"
            for field, value in table.items()
            if f"{section}.{field}" not in free and earlier.get(field, value) != value
        ]
    if changed:
        raise UserError(f"{found[-1]}: cannot be resumed with another config: {'; '.join(changed)}")
    return found[-1]


def load_checkpoint(directory: Path, run: Run) -> None:
    """Bring a new run's objects to where the checkpoint was written, and the process' random generators too.

    Raises UserError if the dataset has another length, where the position in it would mean nothing.
    """
    numbers, sampler = _numbers(directory), run.sampler
    if len(sampler.examples) != numbers["prompts"]:
        lengths = f"data.path had {numbers['prompts']} prompts and now has {len(sampler.examples)}"
        raise UserError(f"{directory}: cannot be resumed with another dataset: {lengths}")
    if _digest(sampler) != numbers["digest"]:
        raise UserError(f"{directory}: cannot be resumed with another dataset: data.path has other prompts now")
    try:
        _load_tensors(directory, run, numbers)
    except (OSError, SafetensorError) as error:
        raise _damaged(directory, error) from error
    run.step, run.skipped, sampler.order = numbers["step"], numbers["skipped"], numbers["order"]
    if run.text is not None:
        run.text.position = numbers["text"]
    for name, controller in (("kl", run.kl), ("entropy", run.entropy)):
        if controller is not None:
            controller.load(numbers[name])
    random.setstate(tuple(tuple(part) if isinstance(part, list) else part for part in numbers["python"]))
    np.random.set_state(tuple(numbers["numpy"]))


def _load_tensors(directory: Path, run: Run, numbers: dict[str, Any]) -> None:
    """Weights, generators and the optimizer."""
    _load_policy(directory, run)
    for name, model in _other_models(run).items():
        load_model(model, directory / name)
    tensors = load_file(directory / TENSORS)
    for name, generator in _generators(run).items():
        if name in tensors:  # not where a CPU's run goes on on a GPU
            generator.set_state(tensors[name])
    moments: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        if index.isdigit():
            moments[int(index)][name] = tensor.clone()  # not a view of a file that will be pruned
    run.optimizer.load_state_dict({"state": moments, "param_groups": numbers["optimizer"]})
    run.scheduler.load_state_dict(numbers["scheduler"])


def _numbers(directory: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((directory / NUMBERS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(directory, error) from error
    return found


def _damaged(directory: Path, error: Exception) -> UserError:
    older = [path for path in _complete(directory.parent) if path < directory]
    hint = f"move it away to go on from {older[-1]}" if older else "there is no earlier one"
    return UserError(f"{directory}: the checkpoint cannot be read: {error}; {hint}")


def _digest(sampler: PromptSampler) -> str:
    """What the dataset's prompts are, in short."""
    return hashlib.sha256(json.dumps([example.token_ids for example in sampler.examples]).encode()).hexdigest()


def _load_policy(directory: Path, run: Run) -> None:
    model: Any = run.policy.model
    if run.policy.has_adapters:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(directory / "adapter_model.safetensors"))
        return
    saved = type(model).from_pretrained(directory, dtype=torch.float32, use_safetensors=True)
    model.load_state_dict(saved.state_dict())


def _other_models(run: Run) -> dict[str, torch.nn.Module]:
    """What has weights of its own beside the policy, by file name."""
    found: dict[str, torch.nn.Module] = {} if run.critic is None else {"critic.safetensors": run.critic}
    if run.reference is not None and run.config.kl is not None and run.config.kl.sync_every is not None:
        found["reference.safetensors"] = run.reference.model
    return found


def _generators(run: Run) -> dict[str, torch.Generator]:
    """Every torch generator that a run draws from."""
    found = {"torch": torch.default_generator, "shuffle": run.generator, "prompts": run.sampler.generator}
    if run.policy.device.type == "cuda":
        found["cuda"] = torch.cuda.default_generators[run.policy.device.index]
    return found


def _complete(directory: Path) -> list[Path]:
    """The checkpoints that a run can go on from, oldest first."""
    found = [path for path in directory.glob("step-*") if path.name[5:].isdigit() and (path / NUMBERS).is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))
