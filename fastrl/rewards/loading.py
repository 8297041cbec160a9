"""Functions that a config names, imported from their files."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fastrl.base.errors import UserError
from fastrl.rewards.calls import RewardFunction, Share, alone, describe_error, signature_of
from fastrl.rewards.foreign import foreign_code
from fastrl.rewards.names import BUILT_IN, name_of

_GIVEN = ("prompts", "completions", "opened")  # by the trainer, not by a config


def load_reward(
    source: str, arguments: dict[str, Any] | None = None, what: str = "reward function", share: Share = alone
) -> RewardFunction:
    """Import `path/to/file.py:function`, a `what`, or take `fastrl.rewards.NAME`, to be called with these arguments.

    Raises UserError naming the file (and line) if that fails, and for an argument that the function does not name.
    """
    name, arguments = name_of(source), arguments or {}
    function = _built_in(source) if source.startswith(BUILT_IN) else _from_file(source, what)
    signature = signature_of(function)
    parameters = set() if signature is None else signature.parameters.keys()
    if arguments and signature is None:
        raise UserError(f"reward.arguments.{name}: {source} does not say which parameters it has")
    for argument in arguments:  # not in its **columns: a misspelt name would be lost there
        if argument not in parameters or argument in _GIVEN:
            raise UserError(f"reward.arguments.{name}: {source} has no parameter {argument!r}")
    if source.startswith(BUILT_IN):
        try:
            function(prompts=[], completions=[], **arguments)
        except (ImportError, TypeError, ValueError) as error:
            raise UserError(f"reward.arguments.{name}: {error}") from error
    return RewardFunction(function, name, source, arguments, "opened" in parameters, share)


def _built_in(source: str) -> Callable[..., Any]:
    module = importlib.import_module(BUILT_IN.removesuffix("."))
    name = name_of(source)
    if name not in module.__all__:
        names = ", ".join(BUILT_IN + name for name in module.__all__)
        raise UserError(f"reward function: {source} is none of the built-in ones, which are {names}")
    function: Callable[..., Any] = getattr(module, name)
    return function


def _from_file(source: str, what: str) -> Callable[..., Any]:
    return import_function(source, what, f' or "{BUILT_IN}NAME"')


def import_function(source: str, what: str, otherwise: str = "") -> Callable[..., Any]:
    """Import `path/to/file.py:function`, a `what`. Raises UserError naming the file (and line) if that fails."""
    file, separator, name = source.rpartition(":")
    if not separator or not file.endswith(".py") or not name.isidentifier():
        raise UserError(f'{what}: expected "path/to/file.py:function"{otherwise}, got {source!r}')
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{path}: no such file ({what})")
    module = _import(path.resolve())
    function = getattr(module, name, None)
    if not callable(function):
        available = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise UserError(f"{file}: has no function {name!r}; it has {', '.join(available) or 'none'}")
    checked: Callable[..., Any] = function
    return checked


def forget_files() -> None:
    """Have files run anew from now on: a run does not begin with what an earlier one in this process left in them."""
    _import.cache_clear()


@cache
def _import(path: Path) -> ModuleType:
    """The file's module, which a run runs once: a reward and a tool in it share what it holds."""
    spec = importlib.util.spec_from_file_location(f"fastrl_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look up their module here
    try:
        with foreign_code():
            spec.loader.exec_module(module)
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}" if error.filename else str(path)
        raise UserError(f"{where}: {error.msg}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code: its user must fix whatever it raises
        raise UserError(f"{path}: importing it raised {describe_error(error)}") from error
    return module
