"""Where a run's numbers go: a progress bar, ``metrics.jsonl``, TensorBoard, and ``summary.json`` at the end."""

import json
import math
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from .config import Config
from .errors import UserError

# Everything a run writes; overwriting a run removes these and nothing else.
FILES = ("config.json", "metrics.jsonl", "summary.json", "curves.png")
DIRECTORIES = ("tensorboard", "checkpoints", "skipped")
# What the progress bar shows, if it is there.
BAR = ("reward", "entropy", "clip_frac", "length", "eval/reward")


class RunLog:
    """Writes one record a step into the run's directory. A context manager; leaving it closes the files."""

    def __init__(self, config: Config, step: int = 0) -> None:
        """Create the directory and write ``config.json``; after a ``step``, go on with the record that is there.

        Raises UserError if a new run's directory holds another run.
        """
        self.directory = config.logging.output_dir
        self.path = self.directory / "metrics.jsonl"
        self.last: dict[str, float | None] = {}
        if step == 0:
            _prepare(self.directory, config.logging.overwrite)
        else:
            self._cut(step)
        (self.directory / "config.json").write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        self.file = self.path.open("a", encoding="utf-8")
        self.writer: SummaryWriter | None = None
        if config.logging.tensorboard:
            self.writer = SummaryWriter(self.directory / "tensorboard", purge_step=step + 1 if step else None)
        self.bar = tqdm(initial=step, total=config.training.steps, unit="step", desc=config.objective.name)
        self.shown: dict[str, str] = {}

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
        self.file.close()
        if self.writer is not None:
            self.writer.close()

    def _cut(self, step: int) -> None:
        """Drop what an interrupted run recorded after its last checkpoint's ``step``: those steps come again."""
        self.path.touch()
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        # A line without an end was being written when the run was killed.
        records = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
        kept = [(line, record) for line, record in records if record.pop("step") <= step]
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text("".join(line for line, _ in kept), encoding="utf-8")
        unfinished.replace(self.path)
        for _, record in kept:
            self.last |= record

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Record a step: a line of JSON (a number that is not finite becomes null), TensorBoard scalars, the bar."""
        record = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.file.write(json.dumps({"step": step, **record}) + "\n")
        self.file.flush()
        if self.writer is not None:
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()  # a checkpoint must not know of steps that a killed run never recorded
        self.shown |= {name: f"{numbers[name]:.3f}" for name in BAR if name in numbers}
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update()
        self.last |= record

    def summarize(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Write ``summary.json``: the last value of every metric, and ``extra``. Returns it."""
        summary = {**self.last, **extra}
        (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return summary


def check_output(directory: Path, overwrite: bool) -> None:
    """Raise UserError if ``directory`` holds a run that may not be replaced."""
    if (directory / "metrics.jsonl").exists() and not overwrite:
        raise UserError(
            f"{directory}: holds a run already; choose another --logging.output_dir, or replace it with "
            "--logging.overwrite true"
        )


def _prepare(directory: Path, overwrite: bool) -> None:
    check_output(directory, overwrite)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (directory / name).unlink(missing_ok=True)
        for name in DIRECTORIES:
            if (directory / name).exists():
                shutil.rmtree(directory / name)
    except OSError as error:
        raise UserError(f"{directory}: cannot prepare logging.output_dir: {error}") from error
