"""Prompts of a dataset that is too large to hold: read row by row, in an order that a buffer shuffles."""

import hashlib
import random
from collections.abc import Mapping
from itertools import chain
from typing import Any

from fastrl.base.errors import UserError
from fastrl.training.config.data import Source
from fastrl.training.data.digest import digested
from fastrl.training.data.examples import Example, Room, as_example, nothing_left, prompt_rows
from fastrl.training.data.prompts import PromptFormat
from fastrl.training.data.sources import Rows
from fastrl.training.parallel.world import ALONE, World


class StreamSampler:
    """Iterates over a dataset's prompts in a new order every epoch, as PromptSampler does, with few in memory.

    Each row is drawn from a buffer of the next `size` rows of the dataset, so it comes at most `size - 1` places
    earlier than there. The order depends only on the seed and the rows. A position is found again by reading the rows
    up to it: what a buffer held is not saved, and what is read again is known to be the same.

    Of the ranks of `world` the first alone reads beyond the first row, and has the position: nothing compares what they
    would read.
    """

    rows: Rows  # of the epoch, that have not entered the buffer yet

    def __init__(
        self, source: Source, prompts: PromptFormat, room: Room, seed: int, size: int, world: World = ALONE
    ) -> None:
        """Reads the first row. Raises UserError if there is none, or it cannot be used."""
        self.source, self.prompts, self.room, self.seed, self.size = source, prompts, room, seed, size
        self.world = world
        self.drawn, self.dropped = 0, 0  # examples returned, and overlong prompts in their place, over all epochs
        self._start(0)
        first = next(self.rows)
        as_example(prompts, *first)
        self.rows = chain([first], self.rows)

    @property
    def data(self) -> dict[str, tuple[int, str]]:
        """What `Trained.data` holds of the dataset: nothing, since not all of it was read; `load` checks what was."""
        return {}

    def next(self, count: int) -> list[Example]:
        """The next `count` examples. Raises UserError for a row that cannot be used, and if no prompt is left."""
        return self.world.first(lambda: self._next(count))

    def _next(self, count: int) -> list[Example]:
        examples: list[Example] = []
        while len(examples) < count:
            item = self._take()
            if item is None:
                if not self.drawn + len(examples):
                    raise nothing_left(self.source, self.dropped, self.room)
                self._start(self.epoch + 1)
                continue
            example = as_example(self.prompts, *item)
            if self.room.holds(example):
                examples.append(example)
            else:
                self.dropped += 1
        self.drawn += count
        return examples

    def state(self) -> dict[str, Any]:
        """The position, as JSON values, with the digest of the rows that this epoch has read: `load` goes on there."""
        position = {"epoch": self.epoch, "taken": self.taken, "drawn": self.drawn, "dropped": self.dropped}
        return {**position, "digest": self.digest.hexdigest()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a position, forward or back, by reading up to it.

        Raises UserError if the rows up to there, and those that were in the buffer, are not the same as then.
        """
        self.world.first(lambda: self._load(state))

    def _load(self, state: Mapping[str, Any]) -> None:
        self._start(state["epoch"])
        while self.taken < state["taken"] and self._take() is not None:
            pass
        if self.digest.hexdigest() != state["digest"]:
            raise UserError(
                f"{self.source.name}: cannot be resumed with another dataset: its first "
                f"{self.taken + len(self.buffer)} rows are not those that the run has read"
            )
        self.drawn, self.dropped = state["drawn"], state["dropped"]

    def _start(self, epoch: int) -> None:
        self.epoch, self.taken = epoch, 0  # rows of the epoch that have left the buffer
        self.buffer: list[tuple[str, dict[str, Any]]] = []
        self.rows = prompt_rows(self.source, self.prompts)
        self.random = random.Random(f"{self.seed}, epoch {epoch}")
        self.digest = hashlib.sha256()  # of the rows that have entered it

    def _take(self) -> tuple[str, dict[str, Any]] | None:
        """The next row of the epoch's order, or None at its end."""
        while len(self.buffer) < self.size and (item := next(self.rows, None)) is not None:
            self.buffer.append(item)
            self.digest.update(digested(item[1]))
        if not self.buffer:
            return None
        index = self.random.randrange(len(self.buffer))
        self.buffer[index], self.buffer[-1] = self.buffer[-1], self.buffer[index]
        self.taken += 1
        return self.buffer.pop()
