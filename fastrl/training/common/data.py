"""Datasets: JSONL with a field `prompt` and any other columns, which are passed to the reward function; or plain text.

Every error names the file and the line.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fastrl.base.errors import UserError
from fastrl.training.common.checksums import digest

# Names of the reward function's own arguments.
RESERVED = ("prompts", "completions")


@dataclass(frozen=True)
class Example:
    """One prompt. `columns` holds the row's other fields, `token_ids` the model's input."""

    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    token_ids: list[int]
    source: str = ""  # file:line


def load_examples(path: Path, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int | None) -> list[Example]:
    """Read, check and tokenize a dataset.

    A string is tokenized as it is, a list of chat messages with the tokenizer's chat template.
    `max_prompt_tokens` is the room that the model's context leaves for a prompt (None: no limit). Raises UserError
    naming file:line for a row that cannot be used.
    """
    examples: list[Example] = []
    fields: list[str] = []
    for where, row in read_rows(path):
        prompt = field(row, "prompt", where)
        fields = fields or sorted(row)
        if sorted(row) != fields:
            raise UserError(
                f"{where}: expected the first row's fields ({', '.join(fields)}), got {', '.join(sorted(row))}"
            )
        for name in RESERVED:
            if name in row:
                raise UserError(f'{where}: the field name "{name}" is taken by an argument of the reward function')
        token_ids = _tokenize(prompt, tokenizer, where)
        if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
            raise UserError(
                f"{where}: the prompt has {len(token_ids)} tokens, but the context of the model or its teacher "
                f"leaves room for {max_prompt_tokens} besides rollout.max_new_tokens"
            )
        examples.append(Example(row.pop("prompt"), row, token_ids, where))
    return examples


def field(row: dict[str, Any], name: str, where: str) -> Any:
    """The value of a field that a row must have."""
    if name not in row:
        raise UserError(f'{where}: no field "{name}"; the row has {", ".join(row) or "no fields"}')
    return row[name]


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file with their file:line; empty lines are skipped. Raises UserError if there are none."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot read the dataset: {error.strerror}") from error
    empty = True
    for number, raw in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            text = raw.decode("utf-8").strip()
            row = json.loads(text) if text else None
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8: {error.reason} at byte {error.start} of the line") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not valid JSON: {error.msg} (column {error.colno})") from error
        except (ValueError, RecursionError) as error:  # a number too long, or brackets nested too deep
            raise UserError(f"{where}: cannot be read: {error}") from error
        if not text:
            continue
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
        empty = False
        yield where, row
    if empty:
        raise UserError(f"{path}: the dataset is empty; expected one JSON object per line")


def _ids(text: str, tokenizer: PreTrainedTokenizerBase, where: str, **options: Any) -> list[int]:
    try:
        return list(tokenizer(text, **options)["input_ids"])
    except Exception as error:  # tokenizers raises nothing narrower for text that its vocabulary cannot encode
        raise UserError(f"{where}: the tokenizer cannot read the text: {error}") from error


def _tokenize(prompt: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    if isinstance(prompt, str):
        token_ids = _ids(prompt, tokenizer, where)
    else:
        _check_messages(prompt, where)
        if tokenizer.chat_template is None:
            raise UserError(f"{where}: the prompt is a list of messages, but the tokenizer has no chat template")
        text = str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
        # The template writes the special tokens itself.
        token_ids = _ids(text, tokenizer, where, add_special_tokens=False)
    if not token_ids:
        raise UserError(f"{where}: the prompt has no tokens, got {prompt!r}")
    return token_ids


def tokenize_pair(
    prompt: Any, completion: str, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[int]]:
    """The tokens of a prompt, and of a completion that ends with EOS: the same wherever completions are given.

    Strings are tokenized separately, as in sampling. The completion of chat messages is what the chat template writes
    for an assistant's message after them. Raises UserError naming `where` if there are no such tokens.
    """
    prompt_ids = _tokenize(prompt, tokenizer, where)
    eos: Any = tokenizer.eos_token_id
    if eos is None:
        raise UserError(f"{where}: a completion ends with EOS, but the tokenizer names no EOS token")
    if isinstance(prompt, str):
        ids = _ids(completion, tokenizer, where, add_special_tokens=False)
    else:
        messages = [*prompt, {"role": "assistant", "content": completion}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        ids = _ids(text, tokenizer, where, add_special_tokens=False)
        if ids[: len(prompt_ids)] != prompt_ids:
            raise UserError(
                f"{where}: the chat template writes the prompt differently once an assistant's message follows, so the "
                "completion's tokens cannot be told from the prompt's"
            )
        ids = ids[len(prompt_ids) :]
        if eos in ids:  # what a template writes after it, such as a newline, is never sampled
            ids = ids[: len(ids) - ids[::-1].index(eos)]
    return prompt_ids, ids if ids[-1:] == [eos] else [*ids, eos]


def _check_messages(prompt: Any, where: str) -> None:
    expected = 'expected a string or a list of {"role": ..., "content": ...}'
    if not isinstance(prompt, list) or not prompt:
        raise UserError(f"{where}: prompt: {expected}, got {prompt!r}")
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(f"{where}: prompt[{index}]: {expected}, got {message!r}")


class PromptSampler:
    """Iterates over the examples in a new random order every epoch; a batch may span two epochs.

    The order depends only on the seed and the number of examples.
    """

    def __init__(self, examples: list[Example], seed: int) -> None:
        self.examples, self.seed = examples, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []
        self.drawn = 0

    @cached_property
    def digest(self) -> str:
        """The digest of the examples: the prompts, and the columns that the reward reads."""
        return digest([example.token_ids, example.columns] for example in self.examples)

    def next(self, count: int) -> list[Example]:
        """The next `count` examples."""
        while len(self.order) < count:
            self.order += torch.randperm(len(self.examples), generator=self.generator).tolist()
        taken, self.order = self.order[:count], self.order[count:]
        self.drawn += count
        return [self.examples[i] for i in taken]

    def state(self) -> dict[str, Any]:
        """The position, as JSON values: `load` goes on from there."""
        return {"drawn": self.drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a position of the same examples and seed, forward or back."""
        self.drawn, self.order = state["drawn"], []
        self.generator.manual_seed(self.seed)
        epochs, rest = divmod(self.drawn, len(self.examples))
        for _ in range(epochs):
            torch.randperm(len(self.examples), generator=self.generator)
        if rest:
            self.order = torch.randperm(len(self.examples), generator=self.generator).tolist()[rest:]


class TextStream:
    """A text file as one endless stream of tokens, cut into sequences of equal length."""

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        """Raises UserError for a file that cannot be read, or is shorter than one sequence."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{path}: cannot read the text: {reason}") from error
        # The newline at the end of the file is not part of the text.
        self.tokens = torch.tensor(_ids(text.removesuffix("\n"), tokenizer, str(path)))
        self.length, self.position = length, 0
        if len(self.tokens) < length:
            raise UserError(f"{path}: expected at least one sequence of {length} tokens, got {len(self.tokens)}")

    def next(self, count: int) -> torch.Tensor:
        """The next sequences, (count, length) int64; after its end the file starts again."""
        index = (self.position + torch.arange(count * self.length)) % len(self.tokens)
        self.position = (self.position + count * self.length) % len(self.tokens)
        return self.tokens[index].view(count, self.length)
