"""The exception for mistakes that a user can fix: the command line prints it as a single line and exits with code 2."""


def one_line(error: BaseException) -> str:
    """The kind of an error that is not ours, and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


class UserError(Exception):
    """A config, dataset, model or reward function that cannot be used as given.

    The message is complete: it names the file and line (or field), the value, and what was expected.
    """
