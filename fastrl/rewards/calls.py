"""Reward functions: `path/to/file.py:function`, with TRL's signature; every result is checked.

    def reward(prompts, completions, **columns) -> list[float | None]

`prompts` and each column hold one entry per completion. A completion is a string, or for a chat prompt a list of one
assistant message (as in TRL), with tools of several messages. None means "no reward". A function that rewards steps
returns for each completion a list of pairs (end, reward) instead, where end is the number of characters up to the end
of the step. A tool returns what it answers. A function declared with `async def` is awaited. `fastrl.rewards.NAME` is a
built-in one.

Nothing here imports torch: worker processes (`worker.py`) import this module too.
"""

import inspect
import math
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from fastrl.base.errors import UserError
from fastrl.rewards.foreign import foreign_code
from fastrl.rewards.transcript import messages_of

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


class Prompted(Protocol):
    """What a reward function is given of an example: its prompt and columns, and for messages its file:line."""

    @property
    def prompt(self) -> str | list[dict[str, Any]]:
        """A text, or chat messages."""

    @property
    def columns(self) -> dict[str, Any]:
        """The row's other fields."""

    @property
    def source(self) -> str:
        """file:line."""

    @property
    def opened(self) -> str:
        """The `<think>` with which the prompt ends as the model reads it, or nothing."""


Steps = list[tuple[int, float]]  # a completion's steps: (characters up to its end, reward)


#: Computes results for all of some items, given what computes them for those from an index on.
Share = Callable[[list[Any], Callable[[Sequence[Any], int], list[Any]]], list[Any]]


def alone(items: list[Any], compute: Callable[[Sequence[Any], int], list[Any]]) -> list[Any]:
    """The share of a process that is alone: all."""
    return compute(items, 0)


@dataclass(frozen=True)
class RewardFunction:
    """A checked reward function, or a tool; `name` is the function's name, `source` its "file.py:function".

    It is called with the keyword `arguments` besides the columns, whose values they replace. Of several processes each
    may compute a `share` of the results.
    """

    function: Callable[..., Any]
    name: str
    source: str
    arguments: dict[str, Any] = field(default_factory=dict)
    takes_opened: bool = False  # whether it has a parameter of this name
    share: Share = alone

    def __call__(self, examples: Sequence[Prompted], completions: Sequence[str], first: int = 0) -> list[float | None]:
        """One finite float or None per completion; `examples[i]` is the prompt of `completions[i]`.

        Raises UserError naming the function and the sample for anything else, and for an exception inside it, including
        that of `sys.exit`. Samples are counted from `first`.
        """

        def numbers(rows: Sequence[Any], start: int) -> list[float | None]:
            some, texts = zip(*rows, strict=True)
            results = self._results(some, texts, first + start)
            return [self._number(value, index, some, first + start) for index, value in enumerate(results)]

        return self.share(list(zip(examples, completions, strict=True)), numbers)

    def steps(self, examples: Sequence[Prompted], completions: Sequence[str], first: int = 0) -> list[Steps]:
        """The pairs (end, reward) of each completion's steps, from a function for steps. Raises as a call does."""

        def all_steps(rows: Sequence[Any], start: int) -> list[Steps]:
            some, texts = zip(*rows, strict=True)
            return self._steps(some, texts, first + start)

        return self.share(list(zip(examples, completions, strict=True)), all_steps)

    def _steps(self, examples: Sequence[Prompted], completions: Sequence[str], first: int) -> list[Steps]:
        all_steps = []
        for index, result in enumerate(self._results(examples, completions, first)):
            pairs = result if isinstance(result, list | tuple) else None
            limit = len(completions[index])
            well_formed = pairs is not None and all(
                isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], int) and 0 < pair[0] <= limit
                for pair in pairs
            )
            if pairs is None or not well_formed:
                raise UserError(
                    f"{self.source}: steps of sample {first + index} must be a list of pairs (end, reward), end from "
                    f"1 to the completion's {limit} characters, got {result!r}; its prompt is "
                    f"{examples[index].prompt!r}"
                )
            rewards = [self._number(reward, index, examples, first) for _, reward in pairs]
            all_steps.append(
                [(end, reward) for (end, _), reward in zip(pairs, rewards, strict=True) if reward is not None]
            )
        return all_steps

    def check_columns(self, examples: Sequence[Prompted], completions: object = None, first: int = 0) -> list[None]:
        """Raise UserError if the function does not take the columns, or takes what no column or config gives.

        It is not called, so `completions` and `first` are only for workers, whose tasks have them.
        """
        signature, example = signature_of(self.function), examples[0]
        given = {"prompts", "completions", *example.columns, *self.arguments}
        if self.takes_opened:
            given.add("opened")
        try:
            if signature is not None:
                signature.bind(**dict.fromkeys(given))
        except TypeError as error:
            columns = ", ".join(example.columns) or "none"
            raise UserError(
                f"{self.source}: cannot be called with the columns of {example.source}, {columns}: {error}"
            ) from error
        return [None]

    def answers(self, examples: Sequence[Prompted], completions: Sequence[str], first: int = 0) -> list[Any]:
        """What a tool answers to each completion. Raises as a call does, but does not count samples.

        Nor is it called again to find the one on which it raises, because a tool may act on something.
        """
        try:
            answers = self._call(examples, completions)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code, as below
            which = "" if len(examples) == 1 else f"one of {len(examples)} completions, the first of them "
            sample = show_sample(examples[0], completions[0])
            raise UserError(f"{self.source}: raised {describe_error(error)} on {which}{sample}") from error
        if not isinstance(answers, list | tuple) or len(answers) != len(examples):
            got = len(answers) if isinstance(answers, list | tuple) else type(answers).__name__
            raise UserError(f"{self.source}: expected {len(examples)} answers, one per completion, got {got}")
        return list(answers)

    def _results(self, examples: Sequence[Prompted], completions: Sequence[str], first: int) -> list[Any]:
        try:
            results = self._call(examples, completions)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code: its user must fix whatever it raises
            culprit = self._culprit(examples, completions, first)
            raise UserError(f"{self.source}: raised {describe_error(error)} on {culprit}") from error
        if not hasattr(results, "__len__") or not hasattr(results, "__iter__") or isinstance(results, str | dict):
            raise UserError(f"{self.source}: expected a list of {len(examples)} rewards, got {type(results).__name__}")
        if len(results) != len(examples):
            raise UserError(f"{self.source}: expected {len(examples)} rewards, one per completion, got {len(results)}")
        return list(results.tolist() if hasattr(results, "tolist") else results)

    def _call(self, examples: Sequence[Prompted], completions: Sequence[str]) -> Any:
        columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
        texts = [as_trl(example, text) for example, text in zip(examples, completions, strict=True)]
        prompts = [example.prompt for example in examples]
        if self.takes_opened:
            columns.setdefault("opened", [example.opened for example in examples])  # a dataset's own column is before
        with foreign_code():
            results = self.function(prompts=prompts, completions=texts, **(columns | self.arguments))
            return wait_for(results) if inspect.isawaitable(results) else results

    def _culprit(self, examples: Sequence[Prompted], completions: Sequence[str], first: int) -> str:
        """Describe the sample on which the function raises, found by calling it with one at a time."""
        for index, (example, completion) in enumerate(zip(examples, completions, strict=True), first):
            try:
                self._call([example], [completion])
            except KeyboardInterrupt:
                raise
            except BaseException:
                return f"sample {index}: {show_sample(example, completion)}"
        # It needs several of them, or outside state has changed.
        return f"samples {first} to {first + len(examples) - 1} together, on none of them alone"

    def _number(self, value: Any, index: int, examples: Sequence[Prompted], first: int) -> float | None:
        if value is None:
            return None
        number = _as_float(value)
        if number is None or not math.isfinite(number):
            raise UserError(
                f"{self.source}: reward {first + index} must be a finite number or None, got {value!r} "
                f"({type(value).__name__}); its prompt is {examples[index].prompt!r}"
            )
        return number


def _as_float(value: Any) -> float | None:
    """A real scalar of any kind: Python's, NumPy's, a Decimal, a Fraction, a tensor without dimensions; else None."""
    if isinstance(value, str | bytes | bytearray | complex) or getattr(value, "ndim", 0) != 0:
        return None
    if getattr(getattr(value, "dtype", None), "kind", "f") not in "biuf":  # NumPy's: a text, a complex number
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a complex tensor's is the last
        return None


def show_sample(example: Prompted, completion: str) -> str:
    """A sample in a message."""
    return f"prompt {example.prompt!r} ({example.source}), completion {completion!r}"


def as_trl(example: Prompted, completion: str) -> str | list[dict[str, Any]]:
    """A completion as a user's function gets it."""
    return completion if isinstance(example.prompt, str) else messages_of(completion)


# --- async functions --------------------------------------------------------------------------------------------------


def wait_for(results: Awaitable[Any]) -> Any:
    """Run an awaitable to its end; on Ctrl-C it is cancelled."""
    import asyncio  # 30 ms, for async functions only

    async def wait() -> Any:
        return await results

    future = asyncio.run_coroutine_threadsafe(wait(), _event_loop())
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise


@cache
def _event_loop() -> "AbstractEventLoop":
    """The process' loop for reward functions, the same at every step: a function may keep its connections open.

    It runs in a thread of its own, because whoever calls may have a loop in theirs.
    """
    import asyncio

    loop = asyncio.new_event_loop()

    def serve() -> None:
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # raised in a task: they reach its awaiter, and end the loop
                loop.run_forever()

    threading.Thread(target=serve, name="fastrl-rewards", daemon=True).start()
    return loop


# --- what loading needs too -------------------------------------------------------------------------------------------


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """A function's signature; None for something compiled that does not say."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def describe_error(error: BaseException) -> str:
    """An exception's name, its message, and where it was raised."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}{f': {error}' if str(error) else ''} ({line.filename}:{line.lineno})"
