"""Prompts with what their rows say of them: a dataset's, in an order of the seed; or plain text."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fastrl.base.errors import UserError
from fastrl.base.terminal import say
from fastrl.training.config.data import PromptsConfig, Source
from fastrl.training.data.digest import digest
from fastrl.training.data.prompts import PromptFormat, encoded
from fastrl.training.data.sources import field_of, rows_of
from fastrl.training.parallel.seeds import shuffled

# Names of the reward function's own arguments.
RESERVED = ("prompts", "completions")


@dataclass(frozen=True)
class Example:
    """One prompt. `columns` holds the row's other fields, `token_ids` the model's input."""

    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    token_ids: list[int]
    source: str = ""  # file:line
    opened: str = ""  # "<think>\n" or the like, if the prompt as the model reads it ends so


@dataclass(frozen=True)
class Room:
    """The most tokens of a prompt (None: no limit), and whether longer ones are dropped."""

    tokens: int | None = None
    drop: bool = False

    @classmethod
    def of(cls, config: PromptsConfig, context: int | None, completion: int) -> "Room":
        """As a config has it, in models' contexts of so many tokens (None: no limit), which hold a completion too.

        Raises UserError for a completion that leaves no token for a prompt.
        """
        if context is not None and completion >= context:
            raise UserError(
                f"rollout.max_new_tokens: expected less than the context of the model (or its teacher), {context} "
                f"tokens, which holds the prompt too, got {completion}"
            )
        left = None if context is None else context - completion
        limits = [limit for limit in (config.max_prompt_tokens, left) if limit is not None]
        return cls(min(limits, default=None), config.overlong_prompts == "drop")

    def holds(self, example: Example) -> bool:
        """Whether the prompt is short enough. Raises UserError naming it if it is not, unless such are dropped."""
        length = len(example.token_ids)
        fits = self.tokens is None or length <= self.tokens
        if not fits and not self.drop:
            raise UserError(
                f"{example.source}: the prompt has {length} tokens, but data.max_prompt_tokens, or the context of the "
                f"model or its teacher besides rollout.max_new_tokens, leaves room for {self.tokens}; "
                'data.overlong_prompts = "drop" leaves such prompts out'
            )
        return fits


def load_examples(source: Source, prompts: PromptFormat, room: Room = Room()) -> tuple[list[Example], int]:
    """Read, check and tokenize a dataset. Returns its examples, and how many overlong prompts were dropped.

    Raises UserError naming file:line for a row that cannot be used, and if no prompt is left.
    """
    dropped, examples = 0, []
    for where, row in prompt_rows(source, prompts):
        example = as_example(prompts, where, row)
        if room.holds(example):
            examples.append(example)
        else:
            dropped += 1
    if not examples:
        raise nothing_left(source, dropped, room)
    if dropped:
        count = dropped + len(examples)
        say(f"{source.name}: {dropped} of {count} prompts dropped, which have more than {room.tokens} tokens")
    return examples, dropped


def nothing_left(source: Source, dropped: int, room: Room) -> UserError:
    """The error of a dataset whose prompts are all dropped."""
    return UserError(
        f"{source.name}: all {dropped} prompts have more than {room.tokens} tokens, so none is left "
        '(data.overlong_prompts = "drop")'
    )


def prompt_rows(source: Source, prompts: PromptFormat) -> Iterator[tuple[str, dict[str, Any]]]:
    """A dataset's rows, whose prompts have their final form. Raises UserError for one that cannot be used.

    Nothing is tokenized yet.
    """
    fields: list[str] = []
    for where, row in rows_of(source):
        prompt = prompts.prompt(field_of(row, "prompt", where), where)
        fields = fields or sorted(row)
        if sorted(row) != fields:
            raise UserError(
                f"{where}: expected the first row's fields ({', '.join(fields)}), got {', '.join(sorted(row))}"
            )
        for name in RESERVED:
            if name in row:
                raise UserError(
                    f'{where}: the field name "{name}" is taken by an argument of the reward function; data.fields '
                    "gives it another"
                )
        yield where, row | {"prompt": prompt}


def as_example(prompts: PromptFormat, where: str, row: dict[str, Any]) -> Example:
    """The example of one of `prompt_rows`. Raises UserError if its prompt has no tokens."""
    columns = {name: value for name, value in row.items() if name != "prompt"}
    token_ids = prompts.token_ids(row["prompt"], where, row.get("tools"))
    return Example(row["prompt"], columns, token_ids, where, prompts.opened(token_ids))


class PromptSampler:
    """Iterates over the examples in a new random order every epoch; a batch may span two epochs.

    An epoch's order depends only on the seed, the epoch and the number of examples, so the number of those drawn is a
    position.
    """

    def __init__(self, examples: list[Example], seed: int, dropped: int = 0) -> None:
        """`dropped` says how many overlong prompts are not among the examples."""
        self.examples, self.seed, self.dropped = examples, seed, dropped
        self.drawn = 0

    @property
    def data(self) -> dict[str, tuple[int, str]]:
        """What `Trained.data` holds of the dataset, whose digest is of prompts and of what the reward reads."""
        rows = ([example.token_ids, example.columns] for example in self.examples)
        return {"data.path": (len(self.examples), digest(rows))}

    def next(self, count: int) -> list[Example]:
        """The next `count` examples."""
        first, size = self.drawn, len(self.examples)
        self.drawn += count
        epochs = range(first // size, -(-self.drawn // size))
        order = torch.cat([shuffled(size, self.seed, "prompts", epoch) for epoch in epochs])
        return [self.examples[i] for i in order[first % size :][:count].tolist()]

    def state(self) -> dict[str, Any]:
        """The position, as JSON values: `load` goes on from there."""
        return {"drawn": self.drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a position of the same examples and seed, forward or back."""
        self.drawn = state["drawn"]


class TextStream:
    """A text file as one endless stream of tokens, cut into sequences of equal length."""

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        """Raises UserError for a file that cannot be read, or is shorter than one sequence."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot read the text: {getattr(error, 'strerror', error)}") from error
        # The newline at the end of the file is not part of the text.
        self.tokens = torch.tensor(encoded(text.removesuffix("\n"), tokenizer, str(path)))
        self.length, self.position = length, 0
        if len(self.tokens) < length:
            raise UserError(f"{path}: expected at least one sequence of {length} tokens, got {len(self.tokens)}")

    def next(self, count: int) -> torch.Tensor:
        """The next sequences, (count, length) int64; after its end the file starts again."""
        index = (self.position + torch.arange(count * self.length)) % len(self.tokens)
        self.position = (self.position + count * self.length) % len(self.tokens)
        return self.tokens[index].view(count, self.length)
