"""Checkpoints: a model in the Hugging Face format, and the state that a run needs to continue as if it never stopped.

`from_pretrained` on the directory loads the model (or adapters) and the tokenizer. `training_state.safetensors` holds
the optimizer's moments, `training_state.json` plain numbers and the config, and `SHA256SUMS` the checksums of all
files. Other models have files of their own. Nothing is ever unpickled.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastrl.base.errors import UserError
from fastrl.base.json_text import to_json
from fastrl.base.terminal import say
from fastrl.training.config.settings import json_values
from fastrl.training.models.saving import save_pretrained
from fastrl.training.parallel.shard import gathered_state, own_class, spread, spread_state, whole_on_main
from fastrl.training.parallel.world import ALONE, World
from fastrl.training.run.checksums import write_checksums
from fastrl.training.run.files import remove, whole_directory
from fastrl.training.run.folder import NUMBERS, checkpoint_of, checkpoints_in, damaged, numbers_of

TENSORS = "training_state.safetensors"


@dataclass(frozen=True)
class Trained:
    """What a run trains, and the state its next step depends on; reading a checkpoint changes all of it in place."""

    model: Any  # a PreTrainedModel, or peft's wrapper around one
    tokenizer: PreTrainedTokenizerBase
    has_adapters: bool  # the model is that wrapper, and only its adapters are trained
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    data: Mapping[str, tuple[int, str]]  # by config field: a dataset's number of rows, and their digest
    models: Mapping[str, torch.nn.Module] = field(default_factory=dict)  # besides the trained one, by file name
    world: World = ALONE  # whose ranks the model lies over

    @property
    def everything(self) -> dict[str, Any]:
        """All models by file name; that of the trained one, which has several files, is empty."""
        return {"": self.model, **self.models}


def write_checkpoint(
    config: Any,
    trained: Trained,
    step: int,
    numbers: Mapping[str, Any],
    tensors: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write `checkpoint_of(config.logging, step)`, which exists only once it is complete.

    `numbers` (JSON values; infinite ones and NaN are read back as texts, which `float` takes) and `tensors` are the
    run's additional state. Earlier checkpoints that it makes superfluous are removed; if that fails, it warns. Raises
    UserError if writing fails (a full disk), and leaves the earlier ones as they were. Rank 0 writes what all ranks of
    a run hold.
    """
    directory, keep, world = checkpoint_of(config.logging, step), config.logging.keep_checkpoints, trained.world
    optimizer = trained.optimizer.state_dict()
    moments = ((f"{index}.{name}", x) for index, each in optimizer["state"].items() for name, x in each.items())
    kept = {**tensors, **whole_on_main(moments, world)}

    def state_of(file: str) -> dict[str, Tensor]:
        return gathered_state(trained.everything[file], world, trained=trained.has_adapters and not file)

    # Of several ranks together, before rank 0 writes alone; else one after the other, so that no two are held.
    weights = {file: state_of(file) for file in trained.everything} if world.size > 1 else {}
    values = {
        "step": step,
        **numbers,
        "data": trained.data,
        "optimizer": optimizer["param_groups"],
        "scheduler": trained.scheduler.state_dict(),
        "config": json_values(config),
    }

    def write() -> None:
        try:
            with whole_directory(directory, directory.with_name(".unfinished")) as unfinished:
                save_pretrained(trained.model, unfinished, state_dict=weights.pop("", {}) or state_of(""))
                trained.tokenizer.save_pretrained(unfinished)
                for file in trained.models:
                    save_file(weights.pop(file, {}) or state_of(file), unfinished / file, {"format": "pt"})
                save_file(kept, unfinished / TENSORS)
                (unfinished / NUMBERS).write_text(to_json(values, constant=str) + "\n", encoding="utf-8")
                write_checksums(unfinished)
        except (OSError, SafetensorError) as error:
            earlier = checkpoints_in(directory.parent)
            hint = f"the last good checkpoint is {earlier[-1]}" if earlier else "there is no earlier one"
            raise UserError(f"step {step}: cannot save a checkpoint in {directory.parent}: {error}; {hint}") from error
        for old in checkpoints_in(directory.parent)[:-keep] if keep else ():
            try:
                remove(old)
            except OSError as error:  # such as a network disk's: the new one is complete, so the run goes on
                say(f"warning: {old}: cannot be removed: {error}")

    world.first(write)


def read_checkpoint(directory: Path, trained: Trained) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Restore a new run's objects from a checkpoint.

    Returns the numbers and tensors that were written with it. Raises UserError if a dataset has other rows, because the
    position in it would mean nothing.
    """
    whole: dict[str, Any] = {"weights": {}, "moments": {}}  # rank 0's

    def read() -> tuple[dict[str, Any], dict[str, Tensor], dict[str, torch.Size]]:
        """What all ranks need of it: numbers, the remaining tensors, and the moments' shapes."""
        numbers = numbers_of(directory)
        for name, (count, digest_now) in trained.data.items():
            before, digest_before = numbers["data"][name]
            if digest_now != digest_before:
                change = "has other rows now" if count == before else f"had {before} rows and now has {count}"
                raise UserError(f"{directory}: cannot be resumed with another dataset: {name} {change}")
        try:
            whole["weights"] = _load_weights(directory, trained)
            # Copies, not views of a file that will be removed.
            tensors = {name: tensor.clone() for name, tensor in load_file(directory / TENSORS).items()}
        except (OSError, SafetensorError) as error:
            raise damaged(directory, str(error)) from error
        whole["moments"] = {key: tensors.pop(key) for key in list(tensors) if key.partition(".")[0].isdigit()}
        return numbers, tensors, {key: moment.shape for key, moment in whole["moments"].items()}

    world = trained.world
    numbers, tensors, shapes = world.first(read)
    for file, model in trained.everything.items():
        spread_state(model, whole["weights"].pop(file, {}), world, trained=trained.has_adapters and not file)
    parameters = [parameter for group in trained.optimizer.param_groups for parameter in group["params"]]
    moments: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, shape in shapes.items():
        index, _, name = key.partition(".")
        like = parameters[int(index)] if len(shape) else torch.zeros(())
        moments[int(index)][name] = spread(whole["moments"].pop(key, None), like, world)
    trained.optimizer.load_state_dict({"state": moments, "param_groups": numbers["optimizer"]})
    trained.scheduler.load_state_dict(numbers["scheduler"])
    return numbers, tensors


def _load_weights(directory: Path, trained: Trained) -> dict[str, dict[str, Tensor]]:
    """The weights of all models, as `gathered_state` has them, by file name."""
    weights = {file: load_file(directory / file) for file in trained.models}
    if trained.has_adapters:
        adapters = load_file(directory / "adapter_model.safetensors")
        names = [name for name, tensor in trained.model.named_parameters() if tensor.requires_grad]
        weights[""] = {name: adapters[name.replace(".default", "")] for name in names}  # a file leaves that out
    else:
        model_class: Any = own_class(trained.model)
        model = model_class.from_pretrained(directory, dtype=torch.float32, use_safetensors=True)
        weights[""] = dict(model.state_dict())
    return weights
