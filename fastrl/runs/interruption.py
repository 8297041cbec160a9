"""SIGTERM and Ctrl-C, noted for a loop to stop in time."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
