"""Reward functions: `path/to/file.py:function`, with TRL's signature; every result is checked.

    def reward(prompts, completions, **columns) -> list[float | None]

`prompts` and each column hold one entry per completion. A completion is a string, or for a chat prompt a list of one
assistant message (as in TRL). None means "no reward". A function that rewards steps returns for each completion a list
of pairs (end, reward) instead, where end is the number of characters up to the end of the step.
"""

import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from fastrl.base.errors import UserError
from fastrl.training.common.data import Example


@dataclass(frozen=True)
class RewardFunction:
    """A checked reward function; `name` is the function's name, `source` its "file.py:function"."""

    function: Callable[..., Any]
    name: str
    source: str

    def __call__(self, examples: list[Example], completions: list[str]) -> list[float | None]:
        """One finite float or None per completion; `examples[i]` is the prompt of `completions[i]`.

        Raises UserError naming the function and the sample for anything else, and for an exception inside it, including
        that of `sys.exit`.
        """
        results = self._results(examples, completions)
        return [self._number(value, index, examples) for index, value in enumerate(results)]

    def steps(self, examples: list[Example], completions: list[str]) -> list[list[tuple[int, float]]]:
        """The pairs (end, reward) of each completion's steps, from a function for steps. Raises as a call does."""
        all_steps = []
        for index, result in enumerate(self._results(examples, completions)):
            pairs = result if isinstance(result, list | tuple) else None
            limit = len(completions[index])
            well_formed = pairs is not None and all(
                isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], int) and 0 < pair[0] <= limit
                for pair in pairs
            )
            if pairs is None or not well_formed:
                raise UserError(
                    f"{self.source}: steps of sample {index} must be a list of pairs (end, reward), end from 1 to the "
                    f"completion's {limit} characters, got {result!r}; its prompt is {examples[index].prompt!r}"
                )
            rewards = [self._number(reward, index, examples) for _, reward in pairs]
            all_steps.append(
                [(end, reward) for (end, _), reward in zip(pairs, rewards, strict=True) if reward is not None]
            )
        return all_steps

    def _results(self, examples: list[Example], completions: list[str]) -> list[Any]:
        try:
            results = self._call(examples, completions)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code: its user must fix whatever it raises
            culprit = self._culprit(examples, completions)
            raise UserError(f"{self.source}: raised {_description(error)} on {culprit}") from error
        if not hasattr(results, "__len__") or not hasattr(results, "__iter__") or isinstance(results, str | dict):
            raise UserError(f"{self.source}: expected a list of {len(examples)} rewards, got {type(results).__name__}")
        if len(results) != len(examples):
            raise UserError(f"{self.source}: expected {len(examples)} rewards, one per completion, got {len(results)}")
        return list(results.tolist() if hasattr(results, "tolist") else results)

    def _call(self, examples: list[Example], completions: list[str]) -> Any:
        columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
        texts = [_as_trl(example, text) for example, text in zip(examples, completions, strict=True)]
        return self.function(prompts=[example.prompt for example in examples], completions=texts, **columns)

    def _culprit(self, examples: list[Example], completions: list[str]) -> str:
        """Describe the sample on which the function raises, found by calling it again on halves of its input."""
        first, end = 0, len(examples)
        while end - first > 1:
            middle = (first + end) // 2
            for half in (slice(first, middle), slice(middle, end)):
                try:
                    self._call(examples[half], completions[half])
                except KeyboardInterrupt:
                    raise
                except BaseException:
                    first, end = half.start, half.stop
                    break
            else:  # it needs samples of both halves, or outside state has changed
                return f"samples {first} to {end - 1} together, on neither half of them alone"
        example, completion = examples[first], completions[first]
        return f"sample {first}: prompt {example.prompt!r} ({example.source}), completion {completion!r}"

    def _number(self, value: Any, index: int, examples: list[Example]) -> float | None:
        if value is None:
            return None
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise UserError(
                f"{self.source}: reward {index} must be a finite number or None, got {value!r} "
                f"({type(value).__name__}); its prompt is {examples[index].prompt!r}"
            )
        return float(value)


class Scorer(Protocol):
    """Gives each completion a reward: a function, or a reward model."""

    @property
    def name(self) -> str:
        """The name of its rewards in the metrics."""

    def __call__(self, examples: list[Example], completions: list[str]) -> list[float | None]:
        """One finite float or None per completion."""


@dataclass(frozen=True)
class Rewards:
    """The weighted sum of several scorers."""

    scorers: Sequence[tuple[Scorer, float]]

    def __call__(self, examples: list[Example], completions: list[str]) -> list[float | None]:
        """The sum over the rewards that are not None; None if all are None."""
        return self.parts(examples, completions)[0]

    def parts(
        self, examples: list[Example], completions: list[str]
    ) -> tuple[list[float | None], dict[str, list[float | None]]]:
        """The sums, and each scorer's own rewards by its name; all None without a scorer."""
        if not self.scorers:
            return [None] * len(completions), {}
        by_scorer = {scorer.name: scorer(examples, completions) for scorer, _ in self.scorers}
        weights = [weight for _, weight in self.scorers]
        totals: list[float | None] = []
        for values in zip(*by_scorer.values(), strict=True):
            weighted = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
            totals.append(sum(weighted) if weighted else None)
        return totals, by_scorer


def _as_trl(example: Example, completion: str) -> str | list[dict[str, str]]:
    return completion if isinstance(example.prompt, str) else [{"role": "assistant", "content": completion}]


def load_rewards(sources: Sequence[str], weights: Sequence[float] | None) -> list[tuple[Scorer, float]]:
    """Functions with their weights (1 by default). Raises UserError as `load_reward`, and if two names are equal."""
    functions = [load_reward(source) for source in sources]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise UserError(f"reward functions: expected names that differ, got {', '.join(names)}")
    return list(zip(functions, weights or [1.0] * len(functions), strict=True))


def load_reward(source: str) -> RewardFunction:
    """Import `path/to/file.py:function`. Raises UserError naming the file (and line) if that fails."""
    function = import_function(source, "reward function")
    if inspect.iscoroutinefunction(function):
        file, _, name = source.rpartition(":")
        raise UserError(f"{file}: {name} is declared with async def, expected a function that returns the rewards")
    return RewardFunction(function, source.rpartition(":")[2], source)


def import_function(source: str, what: str) -> Callable[..., Any]:
    """Import `path/to/file.py:function`, a `what`. Raises UserError naming the file (and line) if that fails."""
    file, separator, name = source.rpartition(":")
    if not separator or not file.endswith(".py") or not name.isidentifier():
        raise UserError(f'{what}: expected "path/to/file.py:function", got {source!r}')
    module = _import(Path(file), what)
    function = getattr(module, name, None)
    if not callable(function):
        available = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise UserError(f"{file}: has no function {name!r}; it has {', '.join(available) or 'none'}")
    found: Callable[..., Any] = function
    return found


def _import(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path}: no such file ({what})")
    spec = importlib.util.spec_from_file_location(f"fastrl_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look up their module here
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}" if error.filename else str(path)
        raise UserError(f"{where}: {error.msg}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code, as above
        raise UserError(f"{path}: importing it raised {_description(error)}") from error
    return module


def _description(error: BaseException) -> str:
    """An exception's name, its message, and where it was raised."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}{f': {error}' if str(error) else ''} ({line.filename}:{line.lineno})"
