"""What the trainer asks of an inference engine: tokens in; completions, and what the engine recorded of them, out.

An engine of your own is a class with the four methods of `Engine`, and a function in a file that makes one:

    [rollout]
    engine = "my_engine.py:make"        # def make(policy, rollout) -> Engine

Of several processes each makes one, a client of something that all of them reach: each asks its own for a share of the
requests, and rank 0 alone gives its own the weights.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fastrl import SamplingMask
from fastrl.base.errors import UserError
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.data.examples import Example


class EngineUnavailable(Exception):
    """The engine cannot be reached, or lost what it was doing. The trainer waits for it, and asks again."""


class EngineFailed(EngineUnavailable):
    """The engine is there, but fails or does other than it was asked to. The trainer asks again a few times only."""


class EngineLost(UserError):
    """The run cannot go on with its engine, which stayed away, fails again and again, or is not the one it needs."""


@dataclass(frozen=True)
class Request:
    """Some completions of one prompt."""

    id: str  # no two requests of a run have the same, also after a resume
    token_ids: Sequence[int]  # the prompt
    n: int  # completions, drawn independently
    max_tokens: int  # the longest completion
    seed: int  # the same seed, weights and engine give the same completions, up to rounding
    example: Example | None = None  # the row of the data that it is from; the trainer always says it


@dataclass(frozen=True)
class Sampling:
    """How all completions of a call are drawn, and what is recorded of them."""

    temperature: float  # 0 = the likeliest token
    top_p: float
    top_k: int  # 0 = off
    min_p: float
    eos_token_ids: Sequence[int]  # a completion ends with one of them, which is its last token,
    stop: Sequence[str]  # or with the token that completes one of these texts
    logprobs: bool  # record each token's log-probability under the distribution that it was drawn from
    supports: bool  # record the entries that top_p, top_k and min_p left
    routing: bool  # record the experts of a mixture

    @classmethod
    def of(cls, settings: RolloutConfig, eos_token_ids: Sequence[int], greedy: bool, record: bool) -> "Sampling":
        """From the config. Nothing is recorded of greedy completions."""
        record = record and not greedy
        supports, routing = record and settings.truncates, record and settings.keep_routing
        drawn = (0.0, 1.0, 0, 0.0) if greedy else (settings.temperature, settings.top_p, settings.top_k, settings.min_p)
        return cls(*drawn, eos_token_ids, tuple(settings.stop), record, supports, routing)


@dataclass(frozen=True)
class Completion:
    """One completion, with what was asked for; what was not is None.

    Where tools answered in between, `drawn` tells their tokens: their log-probabilities are 0 and not read, and their
    rows of the sampling mask are not recorded.
    """

    token_ids: Sequence[int]  # up to and including the EOS, or the token that completed a stop string
    ended: bool  # by one of these, and not by the limit on its length
    logprobs: Sequence[float] | None = None  # of each token
    sampling_mask: SamplingMask | None = None  # a row for each token
    routed_experts: Any = None  # vLLM's array (prompt and completion tokens - 1, layers, experts per token)
    weights: str | None = None  # the version of the weights that drew it, if the engine says
    drawn: Sequence[bool] | None = None  # which tokens the policy drew; None means all
    messages: list[dict[str, Any]] | None = None  # of a chat with tools: what followed the prompt


class Weights(Protocol):
    """The policy's weights in the format of its checkpoint, made anew at each iteration."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Name and full tensor of each parameter, a tied one once, and of each buffer that the checkpoint has."""

    def cast(self, dtype: torch.dtype) -> "Weights":
        """The same weights with parameters of another dtype."""


class Engine(Protocol):
    """Draws completions with the weights that it was last given.

    Every method may raise `EngineUnavailable`, for which the trainer waits up to rollout.timeout, and UserError for
    what waiting cannot mend. Calls do not overlap, but `generate` may run in another thread than the others. Of several
    processes rank 0 alone calls the other methods, while no process is in `generate`.
    """

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterable[tuple[int, Sequence[Completion]]]:
        """The completions of each request with its index, in any order, as soon as they are there."""

    def update_weights(self, version: str, weights: Weights) -> None:
        """Replace the weights; completions drawn from now on carry the version. It follows a lost connection too."""

    def sleep(self) -> None:
        """Free the accelerator's memory until `wake_up`. The weights may be lost."""

    def wake_up(self) -> None:
        """Take the memory again; `update_weights` follows."""
