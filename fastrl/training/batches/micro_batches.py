"""Rows cut into micro-batches of at most so many tokens."""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from fastrl.base.errors import out_of_memory
from fastrl.base.terminal import say
from fastrl.training.parallel.world import ALONE, World

T = TypeVar("T")


class Shape(NamedTuple):
    """What a row, or a micro-batch of rows, holds."""

    sequences: int
    longest: int  # tokens of its longest sequence, to which all are padded
    tokens: int  # of all its sequences

    def __add__(self, other: "Shape") -> "Shape":  # type: ignore[override]  # not a tuple's
        """That of both in one micro-batch."""
        longest = max(self.longest, other.longest)
        return Shape(self.sequences + other.sequences, longest, self.tokens + other.tokens)

    def size(self, packed: bool) -> int:
        """The tokens that a forward computes, padding included unless it is packed."""
        return self.tokens if packed else self.sequences * self.longest


@dataclass
class MicroBatches:
    """Micro-batches of at most `limit` tokens, padded or packed; None: of any number."""

    limit: int | None
    packed: bool = False
    name: str = "micro-batches"  # what they are called where they are halved
    halved: bool = False
    world: World = ALONE  # whose ranks share them out

    def cut(self, shapes: Sequence[Shape]) -> list[list[int]]:
        """The indices of rows of these shapes in each micro-batch, the longest rows first.

        They are as few as rows in this order allow, and the largest of so many is as small as can be. A row that is
        longer than the limit has one of its own. For several ranks they are as many times as few of each.
        """
        if self.limit is None:
            return [list(range(len(shapes)))] if shapes else []
        order = sorted(range(len(shapes)), key=lambda row: -shapes[row].longest)

        def within(limit: int) -> list[list[int]]:
            parts, held = list[list[int]](), Shape(0, 0, 0)
            for row in order:
                held += shapes[row]
                if not parts or held.size(self.packed) > limit:
                    parts.append([])
                    held = shapes[row]
                parts[-1].append(row)
            return parts

        ranks = self.world.size
        fewest = -(-len(within(self.limit)) // ranks) * ranks
        return within(bisect.bisect_left(range(self.limit), True, key=lambda limit: len(within(limit)) <= fewest))

    def noted(self, config: Any) -> Any:
        """The config with the limit, if it was halved, for a checkpoint: a resumed run need not halve it again."""
        return with_tokens(config, self.limit) if self.halved else config

    def fitted(self, compute: Callable[[], T]) -> T:
        """`compute()`. Where memory runs out, the limit is halved, once, and it is called again.

        What it has done until then must not matter, and nor must the cut. Of several ranks one may be out of memory
        while others wait for its part of a sum, so there it is an error.
        """
        if self.halved or self.limit is None or self.world.size > 1:
            return compute()
        try:
            return compute()
        except Exception as error:
            if not out_of_memory(error):
                raise
            reason = (str(error).splitlines() or [""])[0]
        # Not in the handler, where the error keeps the tensors of its frames.
        self.limit, self.halved = -(-self.limit // 2), True
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        say(f"out of memory: {reason}; going on with {self.name} of {self.limit} tokens")
        return compute()


def with_tokens(config: Any, tokens: int | None) -> Any:
    """The config with micro-batches of so many tokens, for what the run saves."""
    training = config.training.model_copy(update={"micro_batch_tokens": tokens})
    return config.model_copy(update={"training": training})
