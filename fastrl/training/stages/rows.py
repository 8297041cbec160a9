"""Rows as tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from fastrl.base.errors import UserError
from fastrl.training.config.data import DatasetConfig, Source
from fastrl.training.data.prompts import PromptFormat
from fastrl.training.data.sources import field_of, rows_of

Row = TypeVar("Row")


class Tokens(NamedTuple):
    """A prompt and its completion, which ends with EOS."""

    prompt: list[int]
    completion: list[int]

    @property
    def all(self) -> list[int]:
        """The whole sequence."""
        return self.prompt + self.completion


@dataclass(frozen=True)
class Reader:
    """Parses rows; `limit` is the maximum number of tokens of a prompt and its completion together (None: no limit)."""

    prompts: PromptFormat
    limit: int | None

    @classmethod
    def of(cls, data: DatasetConfig, tokenizer: PreTrainedTokenizerBase, *limits: int | None) -> "Reader":
        """The reader of a dataset's rows, whose limit is the smallest of these."""
        return cls(PromptFormat.of(data, tokenizer), min((x for x in limits if x is not None), default=None))

    def load(self, source: Source | None, parse: Callable[["Reader", dict[str, Any], str], Row]) -> list[Row]:
        """Every row of a dataset, parsed; `parse` also gets its file:line. Raises UserError if there are none.

        Without a source, no rows.
        """
        return [parse(self, row, where) for where, row in rows_of(source)] if source else []

    def tokens(self, row: dict[str, Any], name: str, where: str) -> Tokens:
        """The row's prompt with the completion in field `name`. Raises UserError naming `where`."""
        return self.answer(row, field_of(row, name, where), where, name)

    def answer(self, row: dict[str, Any], completion: Any, where: str, name: str) -> Tokens:
        """The row's prompt with a completion from the field `name`. Raises UserError naming `where`."""
        if not isinstance(completion, str):
            raise UserError(f"{where}: {name}: expected a string, got {completion!r}")
        prompt = field_of(row, "prompt", where)
        tokens = Tokens(*self.prompts.pair(prompt, completion, where, row.get("tools")))
        if self.limit is not None and len(tokens.all) > self.limit:
            raise UserError(
                f"{where}: the prompt with {name} and EOS has {len(tokens.all)} tokens, expected at most {self.limit} "
                "(training.max_length and the context of the model or its teacher)"
            )
        return tokens
