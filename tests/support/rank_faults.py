"""What goes wrong on one of the processes of `fastrl train`: context managers, for the run in this process.

with at("reward", 2, 1, partial(signalled, signal.SIGTERM)):  # in step 2, on rank 1
    rank_runs.train("train", tables)
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from fastrl.rewards.calls import RewardFunction
from fastrl.training.engines import choice, sampler
from fastrl.training.engines.protocol import Completion, EngineUnavailable, Request, Sampling, Weights
from fastrl.training.rl import evaluation, train, update
from fastrl.training.run import checkpoint

#: What a run does in a step -> whose attribute is called then.
PLACES: dict[str, tuple[Any, str]] = {
    "step": (train, "collect"),
    "rollout": (sampler.CompletionSampler, "_run"),
    "reward": (RewardFunction, "_results"),
    "update": (update, "_backward"),
    "evaluation": (evaluation, "completion_texts"),
    "save": (checkpoint, "save_file"),
}

Fault = AbstractContextManager[None]


def rank() -> int:
    """This process's number, 0 where it is alone; torchrun says it before processes have joined."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


@contextmanager
def seen(step: int) -> Iterator[Callable[[], bool]]:
    """A function that says whether the run is in this step, or in what follows it before the next one."""
    now, take_step = [0], train.take_step

    def noted(run: Any) -> Any:
        now[0] = run.step
        return take_step(run)

    with patch.object(train, "take_step", noted):
        yield lambda: now[0] == step


@contextmanager
def at(place: str, step: int, victim: int, act: Callable[[], None]) -> Iterator[None]:
    """`act` is called once, on this rank, where the step comes to this place."""
    owner, name = PLACES[place]
    known, done = getattr(owner, name), list[None]()
    with seen(step) as there:

        def called(*arguments: Any, **named: Any) -> Any:
            if there() and rank() == victim and not done:
                done.append(None)
                act()
            return known(*arguments, **named)

        with patch.object(owner, name, called):
            yield


def signalled(number: int) -> None:
    """This process gets a signal."""
    os.kill(os.getpid(), number)


def full(path: str) -> None:
    """No file can grow beyond what this one has."""
    limit = Path(path).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@contextmanager
def bad_reward(step: int, victim: int, kind: str) -> Iterator[None]:
    """In a step, or in the evaluation after it, the reward function raises for the last completion that this rank gives
    it, or returns one too few."""
    known, last = RewardFunction._call, list[str]()

    with seen(step) as there:

        def call(self: RewardFunction, examples: Sequence[Any], completions: Sequence[str]) -> Any:
            results = known(self, examples, completions)
            evaluated = "held_out" in examples[0].source
            if not there() or rank() != victim or evaluated != (kind == "evaluation"):
                return results
            if kind == "fewer":
                return results[:-1]
            last.extend([] if last else completions[-1:])
            if last[0] in completions:
                raise ValueError("no answer")
            return results

        with patch.object(RewardFunction, "_call", call):
            yield


class FaultyEngine:
    """An engine that is away, or wrong, on one rank."""

    def __init__(self, engine: Any, kind: str, here: Callable[[], bool]) -> None:
        self.engine, self.kind, self.here, self.away = engine, kind, here, False

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Sequence[Completion]]]:
        for count, (index, completions) in enumerate(self.engine.generate(requests, sampling)):
            if self.here() and count == len(requests) - 1:
                self._fail()
            if self.here() and self.kind == "wrong":
                completions = [replace(x, token_ids=[99, *x.token_ids[1:]]) for x in completions]
            yield index, completions

    def _fail(self) -> None:
        if (self.kind == "once" and not self.away) or self.kind in ("gone", "failing"):
            self.away = True
            raise EngineUnavailable("the engine does not answer")

    def update_weights(self, version: str, weights: Weights) -> None:
        if self.kind == "gone" and self.away:
            raise EngineUnavailable("the engine does not answer")
        self.engine.update_weights(version, weights)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake_up(self) -> None:
        self.engine.wake_up()


@contextmanager
def bad_engine(step: int, victim: int, kind: str) -> Iterator[None]:
    """In a step, before the last prompt's completions: the engine is away once, for ever ("gone"), or whenever it is to
    draw ("failing"); or it is "wrong", and returns a token that the policy does not know."""
    make = choice._make_engine
    with seen(step) as there:
        faulty = partial(FaultyEngine, kind=kind, here=lambda: rank() == victim and there())
        with patch.object(choice, "_make_engine", lambda *arguments: faulty(make(*arguments))):
            yield


def enter(fault: Fault | Callable[[], Fault], _: int) -> None:
    """For `started`: the fault, for the rest of the process."""
    fault = fault if isinstance(fault, AbstractContextManager) else fault()
    fault.__enter__()
    _kept.append(fault)


_kept: list[Fault] = []
