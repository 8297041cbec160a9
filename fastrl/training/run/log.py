"""Record a run's metrics: a line per step, `metrics.jsonl`, TensorBoard, Weights & Biases, a report at the end."""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from fastrl.base.errors import UserError
from fastrl.base.json_text import to_json
from fastrl.base.terminal import say
from fastrl.report.report import plot_curves, write_report
from fastrl.training.config.sections import MARK, LoggingConfig
from fastrl.training.config.settings import import_for, json_values
from fastrl.training.data.digest import json_value
from fastrl.training.run.health import Watch

# Everything a run writes. Overwriting a run touches these and nothing else, and only beside MARK, which it wrote first.
FILES = ("config.json", "facts.json", "metrics.jsonl", "samples.jsonl", "summary.json", "curves.png", "report.html")
DIRECTORIES = ("tensorboard", "wandb", "checkpoints", "skipped", "model")
REPLACED = "replaced"


class RunLog:
    """Writes one record per step into the run's directory. A context manager; leaving it closes the files."""

    def __init__(
        self, config: Any, name: str, steps: int, shown: Sequence[str], step: int, facts: Mapping[str, str]
    ) -> None:
        """Create the directory and write `config.json`; if `step` > 0, continue the existing record after it.

        `name` labels the progress bar of `steps`. Each step's line shows the metrics in `shown` that it recorded.
        `facts` are the run's, as `run_facts` returns them, for the head of its report.
        Whether a new run may replace what the directory holds is for `check_output` to say, before.
        """
        settings, self.steps, self.shown = config.logging, steps, shown
        self.directory = settings.output_dir
        self.path = self.directory / "metrics.jsonl"
        self.last: dict[str, float | None] = {}
        self.watch = Watch(config, steps)
        # Before anything is replaced.
        wandb = import_for("logging.wandb", "wandb") if settings.wandb is not None else None
        if step == 0:
            _prepare(self.directory)
        else:
            steps_before = []
            for number, record, _ in _cut(self.path, step):
                self.last |= record
                steps_before += [number] * (number > 0)  # some runs measure before the first one
            if steps_before != list(range(1, step + 1)):
                say(f"warning: {self.path}: not all steps up to the checkpoint's, {step}, are in it")
            _cut(self.directory / "samples.jsonl", step)
            (self.directory / MARK).touch()  # an earlier version wrote none
        values = json_values(config)
        self._store("config.json", values)
        begun = f"resumed after step {step}" if step else "started"
        self._store("facts.json", {begun: f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}", **facts})
        # Before the first record, so that nothing is lost if the same command is tried again.
        self.wandb = None if wandb is None else _start_wandb(wandb, settings, values, resume=step > 0)
        self.file = self.path.open("a", encoding="utf-8")
        board, purged = self.directory / "tensorboard", step + 1 if step else None
        self.writer = SummaryWriter(board, purge_step=purged) if settings.tensorboard else None
        # Without a terminal, only the lines are printed.
        self.bar = tqdm(initial=step, total=steps, unit="step", desc=name, disable=None)
        self.started, self.first = time.monotonic(), step

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.bar.close()
        with suppress(OSError):  # of what a full disk had no room for, which was raised by the write already
            self.file.close()
        if self.writer is not None:
            self.writer.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=int(error is not None))

    def _store(self, name: str, values: dict[str, Any]) -> None:
        with _writing(self.directory / name):
            (self.directory / name).write_text(to_json(values, indent=2) + "\n", encoding="utf-8")

    def sync(self) -> None:
        """Wait until the records are on disk: a checkpoint must not be ahead of the records if the machine dies."""
        with _writing(self.path):
            os.fsync(self.file.fileno())

    def write(self, step: int, numbers: dict[str, float], samples: Sequence[dict[str, Any]] = ()) -> None:
        """Record a step: a line of JSON (a number that is not finite becomes null), TensorBoard scalars, the bar.

        Step 0 is what is measured before the first one.
        `samples` go to `samples.jsonl`, of which the report shows some. Warns if the run learns nothing.
        """
        record = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        with _writing(self.path, f" step {step}"):
            self.file.write(to_json({"step": step, **record}) + "\n")
            self.file.flush()
        if samples:
            path = self.directory / "samples.jsonl"
            with _writing(path, f" step {step}"), path.open("a", encoding="utf-8") as file:
                file.writelines(to_json({"step": step, **row}, default=json_value) + "\n" for row in samples)
        if self.writer is not None:
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()  # a checkpoint must not be ahead of the records if the run is killed
        if self.wandb is not None:
            self.wandb.log(record, step=step)
        values = "  ".join(f"{name} {numbers[name]:.4g}" for name in self.shown if name in numbers)
        line = f"step {step:>{len(str(self.steps))}}/{self.steps}  {values}"
        self.last |= record
        if step == 0:
            self.bar.write(line)
            self.started = time.monotonic()
            return
        seconds = (time.monotonic() - self.started) / (step - self.first) * (self.steps - step)
        self.bar.write(f"{line}  left {tqdm.format_interval(seconds)}")
        for warning in self.watch.look(numbers):
            self.bar.write(f"fastrl: warning: step {step}: {warning}", file=sys.stderr)
        self.bar.update()

    def summarize(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Write the summary (the last value of every metric, and `extra`), curves and report; returns the summary."""
        summary = {**self.last, **extra}
        self._store("summary.json", summary)
        with _writing(self.directory / "report.html"):
            self.draw()
        return summary

    def draw(self) -> None:
        """Write `curves.png` and `report.html` from the records so far."""
        plot_curves(self.directory)
        write_report(self.directory)


def _cut(path: Path, step: int) -> list[tuple[int, dict[str, Any], bytes]]:
    """Drop what an interrupted run recorded after its last checkpoint's `step`: those steps are repeated.

    Returns what is left: steps, records without them, and their lines.
    """
    path.touch()
    kept = []
    # Bytes, because a text may hold other line separators. What follows the last newline was being written when the
    # run was killed.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            record_step = int(record.pop("step"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{path}:{number}: is not a step's record, so the file is damaged ({type(error).__name__}: {error}); "
                "move it away to go on without what it holds"
            ) from error
        if record_step <= step:
            kept.append((record_step, record, line))
    unfinished = path.with_suffix(".unfinished")
    with _writing(path):
        unfinished.write_bytes(b"".join(line + b"\n" for _, _, line in kept))
        unfinished.replace(path)
    return kept


@contextmanager
def _writing(path: Path, what: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot write{what}: {error}; what is saved can be resumed") from error


def check_output(directory: Path, overwrite: bool) -> None:
    """Raise UserError if `directory` holds a run that may not be replaced, or files of its names that no run wrote."""
    existing = [name for name in (*FILES, *DIRECTORIES) if (directory / name).exists()]
    aside = directory / REPLACED
    for place, found in ((directory, ", ".join(existing)), (aside, "files" if aside.exists() else "")):
        if found and not (place / MARK).exists():
            raise UserError(
                f"{place}: holds {found}, but no {MARK}, the mark of a run that may be replaced; choose another "
                "--logging.output_dir, or move them away"
            )
    metrics = directory / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    # What a run has measured before its first step costs nothing to lose.
    if not overwrite and any(not line.startswith(b'{"step": 0,') for line in lines):
        raise UserError(
            f"{directory}: holds a run already; go on with it by --resume, choose another --logging.output_dir, or "
            "replace it with --logging.overwrite true"
        )


def _prepare(directory: Path) -> None:
    """Make room for a run. One that is replaced is moved to REPLACED if it has a checkpoint, else removed."""
    old = [path for path in (directory / name for name in (*FILES, *DIRECTORIES)) if path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MARK).touch()
        if any((directory / "checkpoints").glob("step-*")):
            aside = directory / REPLACED
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            (aside / MARK).touch()  # it can be resumed where it is
            for path in old:
                path.rename(aside / path.name)
        for path in old:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (directory / "metrics.jsonl").touch()  # empty: the run has started, and has nothing to lose yet
    except OSError as error:
        raise UserError(f"{directory}: cannot prepare logging.output_dir: {error}") from error


def _start_wandb(wandb: Any, settings: LoggingConfig, config: dict[str, Any], resume: bool) -> Any:
    """A run of Weights & Biases. A resumed run continues under the id of its first part."""
    path = settings.output_dir / "wandb" / "id"
    run_id = path.read_text(encoding="utf-8") if resume and path.exists() else None
    run: Any = wandb.init(
        project=settings.wandb, dir=settings.output_dir, config=config, id=run_id, resume="allow" if run_id else None
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(run.id, encoding="utf-8")
    return run
