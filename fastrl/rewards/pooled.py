"""A reward function, or a tool, in a pool's workers."""

import random
from collections.abc import Sequence
from typing import Any

from fastrl.rewards.calls import Prompted, Share, Steps, alone
from fastrl.rewards.names import name_of
from fastrl.rewards.pool import Outcome, WorkerPool
from fastrl.rewards.worker import Task


class PooledFunction:
    """A reward function in a pool's workers, which is a scorer, or a tool.

    A reward's call that fails (over its time or its memory, or its process ended) gets the lowest reward that the
    function gives in the same batch, and at most 0: None would leave out exactly the completions that never end, and a
    fixed 0 would be better than wrong for a function that returns -1.
    """

    def __init__(self, pool: WorkerPool, number: int, source: str, share: Share = alone) -> None:
        """`number` is the function's position among those of the pool; of several processes each has a `share`."""
        self.pool, self.number, self.source, self.name = pool, number, source, name_of(source)
        self.share = share

    def __call__(self, examples: Sequence[Prompted], completions: Sequence[str]) -> list[float | None]:
        """One finite float or None per completion; raises as a `RewardFunction`."""
        outcomes = self._outcomes(examples, completions, "__call__")
        lowest = min([0.0, *(result for result, _ in outcomes if result is not None)])
        return [result if failure is None else lowest for result, failure in outcomes]

    def steps(self, examples: Sequence[Prompted], completions: Sequence[str]) -> list[Steps]:
        """The steps (end, reward) of each completion; one that fails is a single step. Raises as a `RewardFunction`."""
        outcomes = self._outcomes(examples, completions, "steps")
        lowest = min([0.0, *(reward for result, _ in outcomes for _, reward in result or ())])
        found: list[Steps] = []
        for (result, failure), completion in zip(outcomes, completions, strict=True):
            whole = [(len(completion), lowest)] if completion else []
            found.append([(end, reward) for end, reward in result] if failure is None else whole)
        return found

    def answers(self, examples: Sequence[Prompted], completions: Sequence[str], seeds: Sequence[int]) -> list[Any]:
        """A tool's answer to each completion, None where a call fails. Raises as a `RewardFunction`.

        The random numbers of each call are those of its seed: tools are also called while the run uses its own.
        """
        tasks = self._tasks(examples, completions, "answers", seeds)
        return [result for result, _ in self.pool.call(tasks)]

    def check_columns(self, examples: Sequence[Prompted]) -> None:
        """As a `RewardFunction`, in a worker."""
        self.pool.call(self._tasks(examples[:1], [""], "check_columns", [0]))

    def _outcomes(self, examples: Sequence[Prompted], completions: Sequence[str], method: str) -> list[Outcome]:
        tasks = self._tasks(examples, completions, method)
        return self.share(tasks, lambda some, _: self.pool.call(some))

    def _tasks(
        self, examples: Sequence[Prompted], completions: Sequence[str], method: str, seeds: Sequence[int] | None = None
    ) -> list[Task]:
        if seeds is None:
            seed = random.getrandbits(31)  # the run's own random numbers decide the functions'
            seeds = range(seed, seed + len(examples))
        return [
            Task(self.number, method, i, seed, x.prompt, x.columns, x.source, x.opened, completion)
            for i, (x, completion, seed) in enumerate(zip(examples, completions, seeds, strict=True))
        ]
