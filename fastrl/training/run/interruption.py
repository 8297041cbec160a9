"""SIGTERM, SIGHUP and Ctrl-C, recorded so that a loop can stop in time."""

import os
import signal
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager

#: The signals that ask a run to end.
STOPPING = ("SIGTERM", "SIGHUP", "SIGINT")


@contextmanager
def stop_signals(announced: Container[str] = STOPPING) -> Iterator[list[str]]:
    """Yield a list that collects these signals by name, so that the loop can stop; a second one ends at once.

    Of those that are `announced` it is said at once what comes next.
    """
    noted: list[str] = []

    def restore() -> None:
        for number, handler in before.items():
            # A terminal that closes and its shell send SIGHUP twice: the second, which may come late, ends nothing.
            closed = number == signal.SIGHUP and "SIGHUP" in noted
            signal.signal(number, signal.SIG_IGN if closed else handler)

    def note(number: int, _: object) -> None:
        noted.append(signal.Signals(number).name)
        restore()
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        if noted[-1] not in announced:
            return
        # Not print: a handler may interrupt another print.
        os.write(2, f"\nfastrl: {noted[0]}: finishing the step, then saving; once more to end at once\n".encode())

    # Python allows handlers only in the main thread. A shell's background job is set to ignore Ctrl-C, nohup's SIGHUP.
    main = threading.current_thread() is threading.main_thread()
    numbers = [signal.Signals[name] for name in STOPPING] if main else []
    before = {n: signal.signal(n, note) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield noted
    finally:
        restore()


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process in the block, for imports: transformers makes other errors of KeyboardInterrupt."""

    def end(*_: object) -> None:
        os.write(2, b"fastrl: interrupted\n")
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # who has set another handler knows why
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_closed_terminal() -> None:
    """Let output go nowhere if its terminal is closed, where writing is an error that would end the run."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
