"""The loop of every command that trains: steps, with what surrounds them.

`run_loop` locks the run's folder, resumes, logs, evaluates, saves and stops; a `Loop` is what a command does in it.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastrl.base.errors import UserError, out_of_memory
from fastrl.base.terminal import say
from fastrl.planning.budget import BudgetTooSmall
from fastrl.training.batches.memory import Expected
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.config.sections import LoggingConfig
from fastrl.training.models.names import name_of
from fastrl.training.models.saving import check_savable
from fastrl.training.parallel.machine import cpu_threads, start
from fastrl.training.parallel.seeds import seed_step
from fastrl.training.parallel.world import World, facts_of, joined
from fastrl.training.run.banner import run_facts, show_run, show_start
from fastrl.training.run.checkpoint import Trained, read_checkpoint, write_checkpoint
from fastrl.training.run.folder import as_started, checkpoint_of, run_folder
from fastrl.training.run.interruption import stop_signals
from fastrl.training.run.log import RunLog
from fastrl.training.run.optimizer import Diverged


class Loop(ABC):
    """What a command that trains does in its steps, and what its checkpoints hold.

    `__init__` makes and checks everything, and raises UserError for what cannot be used.
    """

    config: Any  # of the command, with the micro-batches' tokens
    name: str  # of the run: its objective or command
    shown: Sequence[str]  # the metrics in a step's line on the terminal
    steps: int  # of the whole run
    described: str  # the data in words
    trained: Trained
    micro_batches: MicroBatches
    memory: Expected
    step: int = 0  # the current one, or the last one
    signals: Sequence[str] = ()  # that ask the run to end after its step
    closing: AbstractContextManager[Any] = nullcontext()  # what the loop has started, to be ended with the run

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self.micro_batches.world

    @property
    def saved(self) -> list[torch.nn.Module]:
        """The models whose files must be writable."""
        return [self.trained.model]

    @property
    def digests(self) -> Mapping[str, str]:
        """By config field what its data is, which must be the same on all ranks."""
        data = self.trained.data.items()
        return {field: f"{count} rows, digest {digest[:12]}" for field, (count, digest) in data}

    @abstractmethod
    def take_step(self) -> tuple[dict[str, float], list[dict[str, object]]]:
        """Do the step `step`. Returns its metrics, and samples for the log."""

    @abstractmethod
    def evaluates(self, step: int) -> bool:
        """Whether held-out data is measured after this step; 0: before the first one."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """The metrics of an evaluation."""

    def state(self) -> dict[str, Any]:
        """What the next step depends on besides `trained`, as JSON values."""
        return {}

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that checkpoints hold besides those of `trained`."""
        return {}

    @abstractmethod
    def begin(self, numbers: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what a checkpoint holds besides `trained`, a state and tensors; None: it is a new run."""

    @abstractmethod
    def complete(self) -> None:
        """Write what is left of a run that has made all its steps."""


def run_loop(
    config: Any, command: str, length: str, what: str, resume: bool, make: Callable[[Any, World], Loop]
) -> dict[str, Any]:
    """Run a command's loop, or with `resume` the rest of it.

    Args:
        config: The command's config.
        command: Its name.
        length: The field that sets the length of a run.
        what: The run in words.
        resume: Whether to go on from the newest checkpoint in the run's folder, if it holds one.
        make: Makes the loop.

    Returns:
        The run's summary: the last value of every metric, "steps", "seconds" (of this call), "resumed", the steps that
        were done before it, and "interrupted", the name of the signal that ended it early, or None.

    Raises:
        UserError: Before any work for a folder that another process writes to, or that holds another run, and for what
            `make` raises it for; later for a step that fails, whose message says where the steps before it are.
    """
    started = time.perf_counter()
    with joined(config.training, config.training.shard) as world, ExitStack() as stack:
        world.check_alike(facts_of(config))
        folder = run_folder(config, command, length, resume)
        checkpoint = world.first(lambda: stack.enter_context(folder))
        stack.enter_context(cpu_threads(config.training.threads))
        start(config.training)
        show_run(config, what)
        loop = make(as_started(config, checkpoint, world), world)
        stack.enter_context(loop.closing)
        if world.size > 1:  # else nothing needs them
            world.check_alike(loop.digests)
        model, tokenizer, output = name_of(config.model), loop.trained.tokenizer, config.logging.output_dir
        world.first(lambda: check_savable(model, tokenizer, loop.saved, output))
        if checkpoint is None:
            loop.begin(None, {})
        else:
            numbers, tensors = read_checkpoint(checkpoint, loop.trained)
            loop.step = numbers["step"]
            loop.begin(numbers, tensors)
        first = loop.step
        facts = run_facts(loop.config, loop.name, loop.trained.model, world)
        show_start(loop.config, facts, loop.described, loop.memory, world)
        log: Any = None  # rank 0's
        if world.main:
            log = RunLog(loop.config, loop.name, loop.steps, loop.shown, first, facts)
            stack.enter_context(log)
        loop.signals = stack.enter_context(_stopping(world))
        interrupted = _take_steps(loop, log)
        if interrupted is None:
            loop.complete()
        summary = {"steps": loop.step, "resumed": first, "interrupted": interrupted}
        return world.first(lambda: log.summarize({**summary, "seconds": time.perf_counter() - started}))


def _take_steps(loop: Loop, log: Any) -> str | None:
    """Take all steps that are left. Returns the signal that has ended the run before, if one has."""
    world, clock = loop.world, SaveClock(loop.config.logging)
    if loop.step == 0 and loop.evaluates(0):
        numbers = loop.evaluate()
        world.first(lambda: log.write(0, numbers))
    interrupted = None
    while loop.step < loop.steps and not interrupted:
        before = loop.state()
        loop.step += 1
        with saved_on_error(partial(_save_earlier, loop, log, before), world):
            seed_step(loop.config.training.seed, loop.step)
            numbers, samples = loop.take_step()
        record = partial(RunLog.write, log, loop.step, numbers, samples)
        with saved_on_error(partial(_save, loop, log), world), _written(record, world):
            if loop.evaluates(loop.step):
                numbers |= loop.evaluate()
        interrupted, is_due = clock.decide(loop.step, loop.step == loop.steps, loop.signals, world)
        if is_due:
            _save(loop, log)
    return interrupted


def _stopping(world: World) -> AbstractContextManager[list[str]]:
    """The signals that ask the run to end, as `stop_signals`; rank 0 alone announces what comes next.

    Of several ranks it does so for Ctrl-C only: torchrun sends the others to those that are left when one has failed.
    """
    if world.size == 1:
        return stop_signals()
    return stop_signals(("SIGINT",) if world.main else ())


# --- saving -----------------------------------------------------------------------------------------------------------


def _save(loop: Loop, log: Any, state: Mapping[str, Any] | None = None) -> Path | None:
    """Save the run after its current step, if it is not yet. Returns the checkpoint, or None before the first step.

    `state` may be the one before a step that failed. Updates that this step had made are in the weights: resumed, the
    step is drawn anew from these.
    """
    checkpoint, world = checkpoint_of(loop.config.logging, loop.step), loop.world
    if loop.step == 0:
        return None
    if world.first(lambda: not checkpoint.exists()):
        world.first(lambda: log.sync())
        config = loop.micro_batches.noted(loop.config)
        write_checkpoint(config, loop.trained, loop.step, loop.state() if state is None else state, loop.tensors())
    return checkpoint


def _save_earlier(loop: Loop, log: Any, before: Mapping[str, Any]) -> Path | None:
    """Save the steps before one that failed."""
    loop.step -= 1
    return _save(loop, log, before)


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
            say(f"{interrupted}: saving after step {step}")
        return interrupted, due[0] or interrupted is not None

    def due(self, step: int, last: bool) -> bool:
        """Whether to save after this step; if so, the minutes count from now."""
        minutes = self.logging.checkpoint_minutes
        late = minutes is not None and time.monotonic() - self.saved >= 60 * minutes
        if not late and not due(step, self.logging.checkpoint_every, last):
            return False
        self.saved = time.monotonic()
        return True


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
            say(f"{type(error).__name__}{hint}")
        raise


@contextmanager
def _written(write: Callable[[], None], world: World) -> Iterator[None]:
    """Write a step's record after the block, also where it raises: the step is complete, and is saved."""
    try:
        yield
    except Exception as error:
        if world.size == 1 or isinstance(error, UserError):  # another may be one rank's
            world.first(write)
        raise
    world.first(write)
