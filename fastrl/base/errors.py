"""The exception for mistakes that a user can fix: the command line prints it as a single line and exits with code 2."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is an allocator's: Python's, a GPU's, or torch's on a CPU, which is a bare RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's: it is not imported here
        return True
    words = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in words or "not enough memory" in words)


def one_line(error: BaseException) -> str:
    """The kind of an error that is not ours, and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


class UserError(Exception):
    """A config, dataset, model or reward function that cannot be used as given.

    The message is complete: it names the file and line (or field), the value, and what was expected.
    """
