"""The prompt dataset: JSONL with a field ``prompt`` and any other columns, which travel to the reward function.

Every error names the file and the line.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .errors import UserError

# Names that the reward function's own arguments take.
RESERVED = ("prompts", "completions")


@dataclass(frozen=True)
class Example:
    """One prompt. ``columns`` are the row's other fields, ``token_ids`` what the model is given."""

    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    token_ids: list[int]
    source: str = ""  # file:line


def load_examples(path: Path, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int | None) -> list[Example]:
    """Read, check and tokenize a dataset.

    A string is tokenized as it stands, a list of chat messages through the tokenizer's chat template.
    ``max_prompt_tokens`` is what the model's context leaves for a prompt (None: no limit). Raises UserError naming
    file:line for a row that cannot be used.
    """
    examples: list[Example] = []
    fields: list[str] = []
    for line, row in _rows(path):
        where = f"{path}:{line}"
        if "prompt" not in row:
            raise UserError(f'{where}: no field "prompt"; the row has {", ".join(row) or "no fields"}')
        fields = fields or sorted(row)
        if sorted(row) != fields:
            raise UserError(
                f"{where}: expected the first row's fields ({', '.join(fields)}), got {', '.join(sorted(row))}"
            )
        for name in RESERVED:
            if name in row:
                raise UserError(f'{where}: the field name "{name}" is taken by an argument of the reward function')
        prompt = row.pop("prompt")
        token_ids = _tokenize(prompt, tokenizer, where)
        if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
            raise UserError(
                f"{where}: the prompt has {len(token_ids)} tokens, but the model's context leaves room for "
                f"{max_prompt_tokens} besides rollout.max_new_tokens"
            )
        examples.append(Example(prompt, row, token_ids, where))
    if not examples:
        raise UserError(f"{path}: the dataset is empty; expected one JSON object a line")
    return examples


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot read the dataset: {error}") from error
    for number, raw in enumerate(lines, start=1):
        try:
            text = raw.decode("utf-8").strip()
            row = json.loads(text) if text else None
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start} of the line") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not valid JSON: {error.msg} (column {error.colno})") from error
        if not text:
            continue
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        yield number, row


def _tokenize(prompt: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    if isinstance(prompt, str):
        token_ids = list(tokenizer(prompt)["input_ids"])
    else:
        _check_messages(prompt, where)
        if tokenizer.chat_template is None:
            raise UserError(f"{where}: the prompt is a list of messages, but the tokenizer has no chat template")
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself.
        token_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not token_ids:
        raise UserError(f"{where}: the prompt has no tokens, got {prompt!r}")
    return token_ids


def _check_messages(prompt: Any, where: str) -> None:
    wanted = 'expected a string or a list of {"role": ..., "content": ...}'
    if not isinstance(prompt, list) or not prompt:
        raise UserError(f"{where}: prompt: {wanted}, got {prompt!r}")
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(f"{where}: prompt[{index}]: {wanted}, got {message!r}")


class PromptSampler:
    """Goes through the examples in a new random order every epoch; a batch may span two epochs.

    The order depends on the seed and the number of examples alone.
    """

    def __init__(self, examples: list[Example], seed: int) -> None:
        self.examples = examples
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []

    def next(self, count: int) -> list[Example]:
        """The next ``count`` examples."""
        while len(self.order) < count:
            self.order += torch.randperm(len(self.examples), generator=self.generator).tolist()
        taken, self.order = self.order[:count], self.order[count:]
        return [self.examples[i] for i in taken]
