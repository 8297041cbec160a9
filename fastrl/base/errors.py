"""The exception for mistakes that a user can fix: the command line prints it as a single line and exits with code 2."""


class UserError(Exception):
    """A config, dataset, model or reward function that cannot be used as given.

    The message is complete: it names the file and line (or field), the value, and what was expected.
    """
