"""A run's folder: its lock, its checkpoints, and whether a run may go on from one of them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastrl.base.errors import UserError
from fastrl.base.terminal import say
from fastrl.training.batches.micro_batches import with_tokens
from fastrl.training.config.sections import LoggingConfig
from fastrl.training.config.settings import Section, json_values
from fastrl.training.parallel.world import World
from fastrl.training.run.checksums import CHECKSUMS, damage
from fastrl.training.run.lock import sole_writer
from fastrl.training.run.log import check_output

NUMBERS = "training_state.json"
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


def checkpoint_of(logging: LoggingConfig, step: int) -> Path:
    """The path of a step's checkpoint."""
    return logging.output_dir / "checkpoints" / f"step-{step:06d}"


@contextmanager
def run_folder(config: Any, command: str, length: str, resume: bool) -> Iterator[Path | None]:
    """Lock the run's folder for the block. Yields the checkpoint to resume from, or None for a new run.

    `length` is the field that sets the length of a run. With `resume` a run is new if the folder holds no complete
    checkpoint; records of the same config, which was stopped before its first one, are replaced. Raises UserError if
    another process writes to the folder, if a new run may not replace it, and if the checkpoint is of another run, or
    damaged.
    """
    directory, overwrite = config.logging.output_dir, config.logging.overwrite
    with sole_writer(directory, directory / ".lock", command, "logging.output_dir"):
        if resume and (checkpoints := checkpoints_in(directory / "checkpoints")):
            newest = checkpoints[-1]
            _verify(newest, NUMBERS)  # reading the other files takes long
            if changed := _changes(numbers_of(newest)["config"], config, length):
                raise UserError(f"{newest}: cannot be resumed with another config: {'; '.join(changed)}")
            _verify(newest)
            yield newest
            return
        if resume:
            say(f"{directory}: holds no checkpoint to resume from; starting anew")
        check_output(directory, overwrite or (resume and _started_alike(config, directory, length)))
        yield None


def as_started(config: Any, checkpoint: Path | None, world: World) -> Any:
    """The config with the micro-batches of a checkpoint's run, if it names none: others would round differently."""
    if checkpoint is None or config.training.micro_batch_tokens is not None:
        return config
    tokens = world.first(lambda: numbers_of(checkpoint)["config"]["training"].get("micro_batch_tokens"))
    return with_tokens(config, tokens)


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


def numbers_of(directory: Path) -> dict[str, Any]:
    """The numbers of a checkpoint. Raises UserError if they cannot be read."""
    try:
        return _read(directory / NUMBERS)
    except (OSError, ValueError) as error:
        raise damaged(directory, f"{NUMBERS}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    """A file of JSON; earlier versions wrote infinite numbers in Python's way."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=str)
    return values


def _verify(directory: Path, *names: str) -> None:
    """Raise UserError unless these files of a checkpoint (default: all) are as they were written."""
    if (problem := damage(directory, *names)) is not None:
        raise damaged(directory, problem)


def damaged(directory: Path, problem: str) -> UserError:
    """The error of a damaged checkpoint, which names the newest intact one before it."""
    older = [path for path in checkpoints_in(directory.parent) if _step(path) < _step(directory)]
    intact = next((path for path in reversed(older) if damage(path) is None), None)
    hint = "there is no intact one before it"
    if intact is not None:
        newer = " ".join(path.name for path in checkpoints_in(directory.parent) if _step(path) > _step(intact))
        hint = f"the newest intact one is {intact.name}; move {newer} away to go on from there"
    return UserError(f"{directory}: the checkpoint is damaged: {problem}; {hint}")


def checkpoints_in(directory: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first. They are complete unless files were removed."""
    paths = [path for path in directory.glob("step-*") if path.name[5:].isdigit()]
    return sorted((path for path in paths if any((path / name).is_file() for name in (NUMBERS, CHECKSUMS))), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name[5:])
