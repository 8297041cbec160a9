"""SIGTERM and Ctrl-C, noted for a loop to stop in time, and what a command says and returns then."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# For the help of every command that has such a loop.
ABOUT = "SIGTERM and Ctrl-C finish the step, save a checkpoint and exit with 143 and 130; a second one ends at once."
RESUME = {"resume": "go on from the newest checkpoint in logging.output_dir, to the same end"}


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """A list in which SIGTERM and Ctrl-C are noted by name, for the loop to stop in time; a second one ends at once."""
    noted: list[str] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: object) -> None:
        restore()
        noted.append(signal.Signals(number).name)
        # Not print: a handler may run in the middle of another one.
        os.write(2, f"\nfastrl: {noted[0]}: finishing the step, then saving; once more to end at once\n".encode())

    # Python allows handlers in the main thread alone; and a shell's background job is told to ignore Ctrl-C.
    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {n: signal.signal(n, note) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield noted
    finally:
        restore()


def exit_status(signal_name: str | None, checkpoint: Path) -> int:
    """What a shell makes of the signal that ended a run early, after saying so and where it was saved; or 0."""
    if signal_name is None:
        return 0
    print(f"interrupted by {signal_name}, saved in {checkpoint}; the same command with --resume goes on from there")
    return 128 + signal.Signals[signal_name]
