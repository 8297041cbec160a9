"""A run's rewards: its config's functions, in this process or in workers, and the weighted sum of all that scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastrl.base.errors import UserError
from fastrl.planning.budget import parse_budget
from fastrl.rewards.calls import RewardFunction
from fastrl.rewards.loading import forget_files, load_reward
from fastrl.rewards.names import BUILT_IN, name_of
from fastrl.rewards.pool import FAILURES, WorkerPool
from fastrl.rewards.pooled import PooledFunction
from fastrl.training.config.sampling import RewardConfig
from fastrl.training.data.examples import Example
from fastrl.training.parallel.world import ALONE, World

# How many rows of a dataset are looked at before the first step.
CHECKED = 100
# Its library may compute for ever on what a completion says, and only a worker can be ended.
_NEEDS_WORKERS = "fastrl.rewards.math"


@dataclass(frozen=True)
class Rewards:
    """The weighted sum of several scorers: functions and a reward model, each with its weight.

    A scorer has a name, and gives each completion one finite float or None.
    """

    scorers: Sequence[tuple[Any, float]]

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


class RewardFunctions:
    """The functions that a config names: `outcome`, `steps`, and an evaluation's `metrics`; `close` ends workers."""

    def __init__(self, config: RewardConfig, metrics: Sequence[str] = (), world: World = ALONE) -> None:
        """Load the functions; with workers, these import them. `metrics` are more sources.

        Each rank of `world` computes a share of the rewards, with a share of the workers.

        Raises UserError for one that cannot be loaded, equal names of outcome functions or of metrics, and arguments
        for a function that there is none of.
        """
        forget_files()
        self.world = world
        for what, sources in (("reward functions", config.functions), ("evaluation.metrics", metrics)):
            names = [name_of(source) for source in sources]
            if len(set(names)) < len(names):
                raise UserError(f"{what}: expected names that differ, got {', '.join(names)}")
            taken = {"reward"} if sources is metrics else set(FAILURES)
            for name in taken & set(names):
                raise UserError(f'{what}: the name "{name}" is taken by a metric')
        steps = [] if config.steps is None else [config.steps]
        sources = list(dict.fromkeys([*config.functions, *steps, *metrics]))
        known = {name_of(source) for source in sources}
        for name in config.arguments:
            if name not in known:
                raise UserError(f"reward.arguments.{name}: no function has this name; there are {', '.join(known)}")
        loaded = self._load(sources, config)
        self.outcome = [loaded[source] for source in config.functions]
        self.steps = None if config.steps is None else loaded[config.steps]
        self.metrics = [loaded[source] for source in metrics]

    def _load(self, sources: Sequence[str], config: RewardConfig) -> dict[str, RewardFunction | PooledFunction]:
        requests = [(source, config.arguments.get(name_of(source), {})) for source in sources]
        self.pool, share = None, self.world.share
        if not config.workers or not sources:
            if _NEEDS_WORKERS in sources:
                raise UserError(
                    f"{_NEEDS_WORKERS}: needs reward.workers of 1 or more, because what it computes may never end"
                )
            return {source: load_reward(source, arguments, share=share) for source, arguments in requests}
        count = -(-config.workers // self.world.size)
        self.pool = WorkerPool(requests, count, config.timeout, parse_budget(config.memory_limit))
        return {source: PooledFunction(self.pool, number, source, share) for number, source in enumerate(sources)}

    def check(self, examples: Sequence[Example], evaluated: bool = False) -> None:
        """Raise UserError for a dataset that lacks what the functions take, as its first rows show.

        Of a dataset that is `evaluated` the metrics are computed, and no rewards of steps.
        """
        others = self.metrics if evaluated else [self.steps] if self.steps is not None else []
        for function in (*self.outcome, *others) if examples else ():
            check_function(function, examples)

    def failures(self, prefix: str) -> dict[str, float]:
        """The calls that failed since the last time, as metrics: prefix/timeouts, ...; none without workers."""
        counts = {} if self.pool is None else self.pool.drain(prefix)
        totals = self.world.total(torch.tensor([*counts.values()], dtype=torch.float64))
        return dict(zip(counts, totals.tolist(), strict=True))

    def close(self) -> None:
        """End the workers, if there are any."""
        if self.pool is not None:
            self.pool.close()


def check_function(function: RewardFunction | PooledFunction, examples: Sequence[Example]) -> None:
    """Raise UserError if the first of the examples lack what the function takes."""
    if function.source.startswith(BUILT_IN):
        function(examples[:CHECKED], [""] * len(examples[:CHECKED]))
    else:
        function.check_columns(examples)
