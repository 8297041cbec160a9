"""Checkpoints: a model in the Hugging Face format, and beside it what a run needs to go on as if it had never stopped.

``from_pretrained`` on the directory gives model (or adapters) and tokenizer back. ``training_state.safetensors`` holds
the moments of the optimizer and the generators, ``training_state.json`` plain numbers and the config, and
``SHA256SUMS`` what all files must be. Other models have files of their own. Nothing is ever unpickled.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastrl.base.errors import UserError
from fastrl.training.common.checksums import CHECKSUMS, damage, write_checksums
from fastrl.training.common.files import remove, whole_directory
from fastrl.training.common.lock import sole_writer
from fastrl.training.common.log import check_output
from fastrl.training.common.sections import LoggingConfig
from fastrl.training.common.settings import Section

TENSORS, NUMBERS = "training_state.safetensors", "training_state.json"
# Sections and fields that a resumed run may change. Other batches round and sample differently; all else would make it
# another run.
FREE = (
    "logging",
    "evaluation",
    "training.device",
    "training.threads",
    "training.micro_batch_size",
    "training.memory_budget",
    "training.max_skipped_updates",
    "rollout.batch_size",
)


@dataclass(frozen=True)
class Trained:
    """What any run trains, and what its next step depends on; reading a checkpoint changes all of it in place."""

    model: Any  # a PreTrainedModel, or peft's wrapper around one
    tokenizer: PreTrainedTokenizerBase
    has_adapters: bool  # the model is that wrapper, and only its adapters are trained
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    generators: Mapping[str, torch.Generator]  # beside those of the process
    data: Mapping[str, tuple[int, str]]  # by config field: how many rows a dataset has, and their digest
    models: Mapping[str, torch.nn.Module] = field(default_factory=dict)  # beside the trained one, by file name

    def all_generators(self) -> dict[str, torch.Generator]:
        """Every torch generator that a run draws from."""
        found = {"torch": torch.default_generator, **self.generators}
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            found["cuda"] = torch.cuda.default_generators[device.index]
        return found


def due(step: int, every: int | None, last: bool) -> bool:
    """Whether it is the step for what is done every so many, and at the end."""
    return last or (every is not None and step % every == 0)


# --- writing ----------------------------------------------------------------------------------------------------------


def checkpoint_of(logging: LoggingConfig, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return logging.output_dir / "checkpoints" / f"step-{step:06d}"


def write_checkpoint(
    config: Section,
    logging: LoggingConfig,
    trained: Trained,
    step: int,
    numbers: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write ``checkpoint_of(logging, step)``, which exists only once it is complete, and prune the oldest.

    ``numbers`` (JSON) and ``tensors`` are what the run keeps besides. Raises UserError where writing fails (a full
    disk), and leaves the earlier checkpoints as they were.
    """
    directory = checkpoint_of(logging, step)
    try:
        with whole_directory(directory, directory.with_name(".unfinished")) as unfinished:
            _write(unfinished, config, trained, {"step": step, **numbers}, tensors or {})
    except (OSError, SafetensorError) as error:
        good = _found(directory.parent)
        left = f"the last good checkpoint is {good[-1]}" if good else "there is no earlier one"
        raise UserError(f"step {step}: cannot save a checkpoint in {directory.parent}: {error}; {left}") from error
    if logging.keep_checkpoints is not None:
        for old in _found(directory.parent)[: -logging.keep_checkpoints]:
            remove(old)


def _write(
    directory: Path, config: Section, trained: Trained, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """All files of a checkpoint."""
    optimizer = trained.optimizer.state_dict()
    tensors = {**tensors, **{name: generator.get_state() for name, generator in trained.all_generators().items()}}
    for index, moments in optimizer["state"].items():
        tensors |= {f"{index}.{name}": moment.contiguous() for name, moment in moments.items()}
    numbers = {
        **numbers,
        "data": trained.data,
        "optimizer": optimizer["param_groups"],
        "scheduler": trained.scheduler.state_dict(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "config": config.model_dump(mode="json"),
    }
    trained.model.save_pretrained(directory)
    trained.tokenizer.save_pretrained(directory)
    for name, model in trained.models.items():
        save_model(model, str(directory / name))
    save_file(tensors, directory / TENSORS)
    (directory / NUMBERS).write_text(json.dumps(numbers, default=np.ndarray.tolist) + "\n", encoding="utf-8")
    write_checksums(directory)


# --- going on ---------------------------------------------------------------------------------------------------------


@contextmanager
def run_folder(
    config: Section, logging: LoggingConfig, command: str, length: str, resume: bool
) -> Iterator[Path | None]:
    """Hold the run's folder for the block; the checkpoint to go on from, or without ``resume`` None.

    ``length`` is the field that says how long a run is. Raises UserError if another process writes to the folder, for a
    new run's folder that may not be replaced, and for a checkpoint that is not there, another run's, or damaged.
    """
    directory = logging.output_dir
    with sole_writer(directory, directory / ".lock", command, "logging.output_dir"):
        if not resume:
            check_output(directory, logging.overwrite)
        yield _newest(config, directory / "checkpoints", length) if resume else None


def _newest(config: Section, directory: Path, length: str) -> Path:
    """The newest checkpoint in a directory, once all its files are known to be as they were written."""
    found = _found(directory)
    if not found:
        raise UserError(f"{directory}: holds no complete checkpoint to resume from; start the run without --resume")
    checkpoint = found[-1]
    _verify(checkpoint, NUMBERS)  # the others are long to read
    changed = _changes(_numbers(checkpoint)["config"], config.model_dump(mode="json"), length)
    if changed:
        raise UserError(f"{checkpoint}: cannot be resumed with another config: {'; '.join(changed)}")
    _verify(checkpoint)
    return checkpoint


def _changes(before: dict[str, Any], now: dict[str, Any], length: str) -> list[str]:
    """What of a config has changed that may not."""
    # A decay is spread over the whole run; a constant schedule does not care how long that is.
    free = (*FREE, length) if now["optimizer"]["schedule"] == "constant" else FREE
    changed = []
    for section, table in now.items():
        earlier = before.get(section)
        if section in free or table == earlier:
            continue
        if table is None or earlier is None:  # a table that was not there, or is no more
            changed.append(f"{section} was {earlier!r} and is now {table!r}")
            continue
        changed += [
            f"{section}.{name} was {earlier[name]!r} and is now {value!r}"
            for name, value in table.items()
            if f"{section}.{name}" not in free and earlier.get(name, value) != value
        ]
    return changed


def read_checkpoint(directory: Path, trained: Trained) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Bring a new run's objects to where the checkpoint was written, and the process' random generators too.

    Returns the numbers and tensors that were written with it. Raises UserError if a dataset has other rows, where the
    position in it would mean nothing.
    """
    numbers = _numbers(directory)
    for name, (count, found) in trained.data.items():
        before, digest_before = numbers["data"][name]
        if found != digest_before:
            what = "has other rows now" if count == before else f"had {before} rows and now has {count}"
            raise UserError(f"{directory}: cannot be resumed with another dataset: {name} {what}")
    try:
        tensors = _load_tensors(directory, trained, numbers)
    except (OSError, SafetensorError) as error:
        raise _damaged(directory, str(error)) from error
    random.setstate(tuple(tuple(part) if isinstance(part, list) else part for part in numbers["python"]))
    np.random.set_state(tuple(numbers["numpy"]))
    return numbers, tensors


def _load_tensors(directory: Path, trained: Trained, numbers: dict[str, Any]) -> dict[str, Tensor]:
    """Weights, generators and the optimizer; the tensors that are left."""
    if trained.has_adapters:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(trained.model, load_file(directory / "adapter_model.safetensors"))
    else:
        kind = type(trained.model)
        saved = kind.from_pretrained(directory, dtype=torch.float32, use_safetensors=True)
        trained.model.load_state_dict(saved.state_dict())
    for name, model in trained.models.items():
        load_model(model, directory / name)
    # Not views of a file that will be pruned.
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / TENSORS).items()}
    for name, generator in trained.all_generators().items():
        if name in tensors:  # not where a CPU's run goes on on a GPU
            generator.set_state(tensors.pop(name))
    moments: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key in list(tensors):
        index, _, name = key.partition(".")
        if index.isdigit():
            moments[int(index)][name] = tensors.pop(key)
    trained.optimizer.load_state_dict({"state": moments, "param_groups": numbers["optimizer"]})
    trained.scheduler.load_state_dict(numbers["scheduler"])
    return tensors


def _numbers(directory: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((directory / NUMBERS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(directory, f"{NUMBERS}: {error}") from error
    return found


def _verify(directory: Path, *names: str) -> None:
    """Raise UserError unless these files of a checkpoint, or all, are as they were written."""
    problem = damage(directory, *names)
    if problem is not None:
        raise _damaged(directory, problem)


def _damaged(directory: Path, problem: str) -> UserError:
    older = [path for path in _found(directory.parent) if _step(path) < _step(directory)]
    intact = next((path for path in reversed(older) if damage(path) is None), None)
    hint = "there is no intact one before it"
    if intact is not None:
        newer = " ".join(path.name for path in _found(directory.parent) if _step(path) > _step(intact))
        hint = f"the newest intact one is {intact.name}; move {newer} away to go on from there"
    return UserError(f"{directory}: the checkpoint is damaged: {problem}; {hint}")


def _found(directory: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first. They are complete as long as no one takes files away."""
    found = [path for path in directory.glob("step-*") if path.name[5:].isdigit()]
    return sorted((path for path in found if any((path / n).is_file() for n in (NUMBERS, CHECKSUMS))), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name[5:])
