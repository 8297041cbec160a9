"""What every command that trains does first: its processes join, its folder is locked, its settings are checked."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fastrl.training.parallel.machine import cpu_threads, start
from fastrl.training.parallel.world import World, facts_of, joined
from fastrl.training.run.banner import show_run
from fastrl.training.run.checkpoint import run_folder
from fastrl.training.run.interruption import stop_signals


def stopping(world: World) -> AbstractContextManager[list[str]]:
    """The signals that ask the run to end, as `stop_signals`; rank 0 alone announces what comes next.

    Of several ranks it does so for Ctrl-C only: torchrun sends the others to those that are left when one has failed.
    """
    if world.size == 1:
        return stop_signals()
    return stop_signals(("SIGINT",) if world.main else ())


@contextmanager
def prepared(config: Any, name: str, length: str, what: str, resume: bool) -> Iterator[tuple[World, Path | None]]:
    """Yield the world, and the checkpoint to resume from or None; the run's folder is locked for the block.

    `length` is the field that sets the length of a run, `what` the run in words. Raises UserError as `joined` and
    `run_folder` do, before there is any work to lose.
    """
    training = config.training
    with joined(training, training.shard) as world, ExitStack() as stack:
        world.check_alike(facts_of(config))
        folder = run_folder(config, config.logging, name, length, resume)
        checkpoint = world.first(lambda: stack.enter_context(folder))
        stack.enter_context(cpu_threads(training.threads))
        start(training)
        show_run(config, what)
        yield world, checkpoint
