"""Checkpoints: a model in the Hugging Face format, and the state that a run needs to continue as if it never stopped.

`from_pretrained` on the directory loads the model (or adapters) and the tokenizer. `training_state.safetensors` holds
the optimizer's moments, `training_state.json` plain numbers and the config, and `SHA256SUMS` the checksums of all
files. Other models have files of their own. Nothing is ever unpickled.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastrl.base.errors import UserError, out_of_memory
from fastrl.base.json_text import to_json
from fastrl.models.patching import is_sharded
from fastrl.planning.budget import BudgetTooSmall
from fastrl.training.batches.micro_batches import with_tokens
from fastrl.training.config.sections import LoggingConfig
from fastrl.training.config.settings import Section, json_values
from fastrl.training.models.saving import save_pretrained
from fastrl.training.parallel.shard import gathered, gathered_state, own_class, spread, spread_state
from fastrl.training.parallel.world import ALONE, World
from fastrl.training.run.checksums import CHECKSUMS, damage, write_checksums
from fastrl.training.run.files import remove, whole_directory
from fastrl.training.run.lock import sole_writer
from fastrl.training.run.log import check_output
from fastrl.training.run.optimizer import Diverged

TENSORS, NUMBERS = "training_state.safetensors", "training_state.json"
# Sections and fields that a resumed run may change (other batch sizes round differently). A change to any other
# field would make it another run.
FREE = (
    "logging",
    "evaluation",
    "training.device",
    "training.threads",
    "training.micro_batch_tokens",
    "training.memory_budget",
    "training.max_skipped_updates",
    "training.shard",
    "rollout.batch_size",
    "rollout.url",  # the same engine in another place, or with other limits
    "rollout.api_key_file",
    "rollout.timeout",
    "rollout.sleep",
    "data.overlong_prompts",  # no overlong prompt was drawn under either
)


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


def due(step: int, every: int | None, last: bool) -> bool:
    """Whether something that is done every `every` steps, and at the last one, is due at this step."""
    return last or (every is not None and step % every == 0)


class SaveClock:
    """Says when a checkpoint is due, by steps and by minutes."""

    def __init__(self, logging: LoggingConfig) -> None:
        self.logging, self.saved = logging, time.monotonic()

    def decide(self, step: int, last: bool, signals: Sequence[str], world: World) -> tuple[str | None, bool]:
        """The signal that ends the run after this step, or None; and whether to save it: of all ranks the same."""
        told, due = zip(*world.gathered(([*signals], self.due(step, last))), strict=True)
        interrupted = None if last else next(chain(*told), None)
        if interrupted and world.size > 1:
            print(f"fastrl: {interrupted}: saving after step {step}", file=sys.stderr)
        return interrupted, due[0] or interrupted is not None

    def due(self, step: int, last: bool) -> bool:
        """Whether to save after this step; if so, the minutes count from now."""
        minutes = self.logging.checkpoint_minutes
        late = minutes is not None and time.monotonic() - self.saved >= 60 * minutes
        if not late and not due(step, self.logging.checkpoint_every, last):
            return False
        self.saved = time.monotonic()
        return True


# --- writing ----------------------------------------------------------------------------------------------------------


def checkpoint_of(logging: LoggingConfig, step: int) -> Path:
    """The path of a step's checkpoint."""
    return logging.output_dir / "checkpoints" / f"step-{step:06d}"


def write_checkpoint(
    config: Section,
    logging: LoggingConfig,
    trained: Trained,
    step: int,
    numbers: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `checkpoint_of(logging, step)`, which exists only once it is complete.

    `numbers` (JSON values; infinite ones and NaN are read back as texts, which `float` takes) and `tensors` are the
    run's additional state. Earlier checkpoints that it makes superfluous are removed; if that fails, it warns. Raises
    UserError if writing fails (a full disk), and leaves the earlier ones as they were. Rank 0 writes what all ranks of
    a run hold.
    """
    directory, (weights, others, moments) = checkpoint_of(logging, step), _gathered(trained)

    def write() -> None:
        try:
            with whole_directory(directory, directory.with_name(".unfinished")) as unfinished:
                values, kept = {"step": step, **numbers}, {**(tensors or {}), **moments}
                _write(unfinished, config, trained, values, kept, weights, others)
        except (OSError, SafetensorError) as error:
            earlier = _checkpoints(directory.parent)
            hint = f"the last good checkpoint is {earlier[-1]}" if earlier else "there is no earlier one"
            raise UserError(f"step {step}: cannot save a checkpoint in {directory.parent}: {error}; {hint}") from error
        keep = logging.keep_checkpoints
        for old in _checkpoints(directory.parent)[:-keep] if keep else ():
            try:
                remove(old)
            except OSError as error:  # such as a network disk's: the new one is complete, so the run goes on
                print(f"fastrl: warning: {old}: cannot be removed: {error}", file=sys.stderr)

    trained.world.first(write)


def _gathered(trained: Trained) -> tuple[dict[str, Tensor] | None, dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The weights of sharded models, the trained one's and others' by file; and the optimizer's moments."""
    world = trained.world
    state = trained.optimizer.state_dict()["state"]
    moments = ((f"{index}.{name}", gathered(x)) for index, each in state.items() for name, x in each.items())
    kept = {name: moment.cpu().contiguous() for name, moment in moments if world.main}
    if not is_sharded(trained.model):
        return None, {}, kept
    others = {file: gathered_state(model, world) for file, model in trained.models.items()}
    return gathered_state(trained.model, world, trained.has_adapters), others, kept


@contextmanager
def saved_on_error(save: Callable[[], Path | None], world: World) -> Iterator[None]:
    """Where the block raises, save the steps that are complete, and tell the user how to go on.

    `save` returns the checkpoint that holds them, or None if there are none. An error that the user can mend, and
    running out of memory, is raised with the hint at its end; another as it is, after a line. Weights that have
    diverged would take the place of better ones, so they are not saved. Interrupts save nothing either: a second signal
    ends a run at once. All ranks are needed to save, and raise the same UserError; another error may be one rank's.
    """
    try:
        yield
    except Diverged:
        raise
    except Exception as error:  # whatever it is, the steps before it are worth keeping
        if world.size > 1 and not isinstance(error, UserError):
            raise
        try:
            checkpoint = save()
            hint = f"; saved in {checkpoint}; the same command with --resume goes on from there" if checkpoint else ""
        except UserError as failure:
            hint = f"; {failure}"
        if out_of_memory(error):
            reason = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"out of memory: {reason}{hint}; less is needed with a smaller training.micro_batch_tokens or "
                "training.memory_budget, or with model.gradient_checkpointing"
            ) from error
        if isinstance(error, UserError):
            raise UserError(f"{error}{hint}") from (error.__cause__ or error)
        if isinstance(error, BudgetTooSmall):
            raise BudgetTooSmall(f"{error}{hint}", error.least) from error
        if hint:
            print(f"fastrl: {type(error).__name__}{hint}", file=sys.stderr)
        raise


@contextmanager
def written(write: Callable[[], None], world: World) -> Iterator[None]:
    """Write a step's record after the block, also where it raises: the step is complete, and is saved."""
    try:
        yield
    except Exception as error:
        if world.size == 1 or isinstance(error, UserError):  # another may be one rank's
            world.first(write)
        raise
    world.first(write)


def _write(
    directory: Path,
    config: Section,
    trained: Trained,
    numbers: Mapping[str, Any],
    tensors: dict[str, Tensor],
    weights: dict[str, Tensor] | None,
    others: dict[str, dict[str, Tensor]],
) -> None:
    """Write all files of a checkpoint."""
    numbers = {
        **numbers,
        "data": trained.data,
        "optimizer": trained.optimizer.state_dict()["param_groups"],
        "scheduler": trained.scheduler.state_dict(),
        "config": json_values(config),
    }
    save_pretrained(trained.model, directory, state_dict=weights)
    trained.tokenizer.save_pretrained(directory)
    for file, model in trained.models.items():
        save_file(others.get(file) or gathered_state(model, trained.world), directory / file, {"format": "pt"})
    save_file(tensors, directory / TENSORS)
    (directory / NUMBERS).write_text(to_json(numbers, constant=str) + "\n", encoding="utf-8")
    write_checksums(directory)


# --- resuming ---------------------------------------------------------------------------------------------------------


@contextmanager
def run_folder(
    config: Section, logging: LoggingConfig, command: str, length: str, resume: bool
) -> Iterator[Path | None]:
    """Lock the run's folder for the block. Yields the checkpoint to resume from, or None for a new run.

    `length` is the field that sets the length of a run. With `resume` a run is new if the folder holds no complete
    checkpoint; records of the same config, which was stopped before its first one, are replaced. Raises UserError if
    another process writes to the folder, if a new run may not replace it, and if the checkpoint is of another run, or
    damaged.
    """
    directory = logging.output_dir
    with sole_writer(directory, directory / ".lock", command, "logging.output_dir"):
        checkpoints = _checkpoints(directory / "checkpoints") if resume else []
        if checkpoints:
            yield _checked(config, checkpoints[-1], length)
            return
        if resume:
            print(f"fastrl: {directory}: holds no checkpoint to resume from; starting anew", file=sys.stderr)
        check_output(directory, logging.overwrite or (resume and _started_alike(config, directory, length)))
        yield None


def as_started(config: Any, checkpoint: Path | None, world: World = ALONE) -> Any:
    """The config with the micro-batches of a checkpoint's run, if it names none: others would round differently."""
    if checkpoint is None or config.training.micro_batch_tokens is not None:
        return config
    tokens = world.first(lambda: _numbers(checkpoint)["config"]["training"].get("micro_batch_tokens"))
    return with_tokens(config, tokens)


def _checked(config: Section, checkpoint: Path, length: str) -> Path:
    """The checkpoint, after checking that it is of this run and that all its files are as they were written."""
    _verify(checkpoint, NUMBERS)  # reading the other files takes long
    changed = _changes(_numbers(checkpoint)["config"], config, length)
    if changed:
        raise UserError(f"{checkpoint}: cannot be resumed with another config: {'; '.join(changed)}")
    _verify(checkpoint)
    return checkpoint


def _started_alike(config: Section, directory: Path, length: str) -> bool:
    """Whether the records in a run's folder are those of this config."""
    try:
        return not _changes(_read(directory / "config.json"), config, length)
    except (OSError, ValueError, TypeError, AttributeError):  # none, or damaged
        return False


def _changes(before: dict[str, Any], config: Section, length: str) -> list[str]:
    """The changes of a config that are not allowed; a field that an earlier version did not know had its default."""
    now = json_values(config)
    # A decay is spread over the whole run; a constant schedule does not depend on its length.
    free = (*FREE, length) if now["optimizer"]["schedule"] == "constant" else FREE
    changed = []
    for section, table in now.items():
        earlier = before.get(section)
        if section in free or table == earlier:
            continue
        if table is None or earlier is None:  # a table was added or removed
            changed.append(f"{section} was {earlier!r} and is now {table!r}")
            continue
        earlier = _defaults(getattr(config, section)) | earlier
        changed += [
            f"{section}.{name} was {earlier[name]!r} and is now {value!r}"
            for name, value in table.items()
            if f"{section}.{name}" not in free and earlier.get(name, value) != value
        ]
    return changed


def _defaults(section: Section) -> dict[str, Any]:
    """The values of the fields that may be left out, as a checkpoint has them."""
    fields = type(section).model_fields
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    return {name: json_values(x) for name, x in defaults.items() if not fields[name].is_required()}


def read_checkpoint(directory: Path, trained: Trained) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Restore a new run's objects from a checkpoint.

    Returns the numbers and tensors that were written with it. Raises UserError if a dataset has other rows, because the
    position in it would mean nothing.
    """
    whole: dict[str, Any] = {"weights": {}, "moments": {}}  # rank 0's

    def read() -> tuple[dict[str, Any], dict[str, Tensor], dict[str, torch.Size]]:
        """What all ranks need of it: numbers, the remaining tensors, and the moments' shapes."""
        numbers = _numbers(directory)
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
            raise _damaged(directory, str(error)) from error
        whole["moments"] = {key: tensors.pop(key) for key in list(tensors) if key.partition(".")[0].isdigit()}
        return numbers, tensors, {key: moment.shape for key, moment in whole["moments"].items()}

    world = trained.world
    numbers, tensors, shapes = world.first(read)
    if is_sharded(trained.model):
        spread_state(trained.model, whole["weights"].pop("", {}), world, trained=trained.has_adapters)
        for file, model in trained.models.items():
            spread_state(model, whole["weights"].pop(file, {}), world)
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
    """Load all models' weights; returns those of sharded ones, which do not have them yet, by file ("" the trained)."""
    sharded = is_sharded(trained.model)
    others = {file: load_file(directory / file) for file in trained.models} if sharded else {}
    for file, model in trained.models.items() if not sharded else ():
        load_model(model, directory / file)
    if trained.has_adapters:
        from peft import set_peft_model_state_dict

        adapters = load_file(directory / "adapter_model.safetensors")
        if not sharded:
            set_peft_model_state_dict(trained.model, adapters)
            return {}
        names = [name for name, tensor in trained.model.named_parameters() if tensor.requires_grad]
        # A file has them without their name.
        return {"": {name: adapters[name.replace(".default", "")] for name in names}, **others}
    model_class: Any = own_class(trained.model)
    saved = model_class.from_pretrained(directory, dtype=torch.float32, use_safetensors=True).state_dict()
    if sharded:
        return {"": dict(saved), **others}
    trained.model.load_state_dict(saved)
    return {}


def _numbers(directory: Path) -> dict[str, Any]:
    try:
        return _read(directory / NUMBERS)
    except (OSError, ValueError) as error:
        raise _damaged(directory, f"{NUMBERS}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    """A file of JSON; earlier versions wrote infinite numbers in Python's way."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=str)
    return values


def _verify(directory: Path, *names: str) -> None:
    """Raise UserError unless these files of a checkpoint (default: all) are as they were written."""
    problem = damage(directory, *names)
    if problem is not None:
        raise _damaged(directory, problem)


def _damaged(directory: Path, problem: str) -> UserError:
    older = [path for path in _checkpoints(directory.parent) if _step(path) < _step(directory)]
    intact = next((path for path in reversed(older) if damage(path) is None), None)
    hint = "there is no intact one before it"
    if intact is not None:
        newer = " ".join(path.name for path in _checkpoints(directory.parent) if _step(path) > _step(intact))
        hint = f"the newest intact one is {intact.name}; move {newer} away to go on from there"
    return UserError(f"{directory}: the checkpoint is damaged: {problem}; {hint}")


def _checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first. They are complete unless files were removed."""
    paths = [path for path in directory.glob("step-*") if path.name[5:].isdigit()]
    return sorted((path for path in paths if any((path / name).is_file() for name in (NUMBERS, CHECKSUMS))), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name[5:])
