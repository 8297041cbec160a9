"""An engine whose completions depend on the requests' seeds alone, for `rollout.engine`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from fastrl import SamplingMask
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.engines.protocol import Completion, Request, Sampling, Weights
from fastrl.training.models.policy import Policy


class SeededEngine:
    """Draws from no distribution at all, with every record that is asked for."""

    def __init__(self, policy: Policy) -> None:
        self.vocabulary, self.end = policy.vocabulary, policy.eos_token_ids[0]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        assert requests, "it is asked for nothing"
        for index, request in enumerate(requests):
            yield index, [self._completion(request, number, sampling) for number in range(request.n)]

    def _completion(self, request: Request, number: int, sampling: Sampling) -> Completion:
        seeded = random.Random(f"{request.seed} {number} {sampling.temperature}")
        ids = [seeded.randrange(1, self.vocabulary) for _ in range(seeded.randint(1, request.max_tokens))]
        ended = len(ids) < request.max_tokens
        ids += [self.end] * ended
        others = [seeded.sample(range(self.vocabulary), 3) for _ in ids]
        return Completion(
            ids,
            ended,
            [-1.0 - seeded.random() for _ in ids] if sampling.logprobs else None,
            SamplingMask.from_lists([sorted({x, *xs}) for x, xs in zip(ids, others, strict=True)])
            if sampling.supports
            else None,
        )

    def update_weights(self, version: str, weights: Weights) -> None:
        """They change nothing."""

    def sleep(self) -> None:
        """There is nothing to free."""

    def wake_up(self) -> None:
        """There is nothing to take."""


def make(policy: Policy, rollout: RolloutConfig) -> SeededEngine:
    return SeededEngine(policy)
