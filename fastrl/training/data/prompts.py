"""Prompts: a row's field `prompt` and its other columns, which are passed to the reward function; or plain text.

Every error names the file and the line, or the dataset and the row.
"""

import json
import re
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from fastrl.base.errors import UserError
from fastrl.rewards.transcript import messages_of
from fastrl.training.config.data import DatasetConfig
from fastrl.training.data.turn_end import turn_end

_LONGEST_OPENING = 16  # tokens, of a tokenizer of characters


@dataclass(frozen=True)
class PromptFormat:
    """How a row's prompt becomes the model's input: a string as it is, chat messages by the tokenizer's template."""

    tokenizer: PreTrainedTokenizerBase
    system_prompt: str | None = None  # a message before the prompt; "" only makes messages of a string
    template: Mapping[str, Any] = field(default_factory=dict)  # arguments of the chat template

    @classmethod
    def of(cls, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> "PromptFormat":
        """As a config has it."""
        return cls(tokenizer, config.system_prompt, config.chat_template_kwargs)

    def prompt(self, prompt: Any, where: str) -> str | list[dict[str, Any]]:
        """A row's prompt with the system prompt. Raises UserError naming `where` if it is of no form that is known."""
        if isinstance(prompt, str) and self.system_prompt is None:
            if self.template:
                raise UserError(
                    f"{where}: the prompt is a string, which no chat template sees, so data.chat_template_kwargs mean "
                    'nothing; make it a message by data.system_prompt ("" for a user\'s message alone)'
                )
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _checked(prompt, where)
        if not self.system_prompt:
            return messages
        if any(message["role"] == "system" for message in messages):
            raise UserError(f"{where}: the prompt has a system message already; leave data.system_prompt out")
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def token_ids(self, prompt: str | list[dict[str, Any]], where: str, tools: Any = None) -> list[int]:
        """The model's input for what `prompt` returned, and the row's field `tools`, which a chat template describes.

        Raises UserError naming `where` if there is none.
        """
        if isinstance(prompt, str):
            token_ids = self._open_ids(prompt, where)
        else:
            token_ids = self._own_ids(self._rendered(prompt, where, tools, add_generation_prompt=True), where)
        if not token_ids:
            raise UserError(f"{where}: the prompt has no tokens, got {prompt!r}")
        return token_ids

    def _open_ids(self, text: str, where: str) -> list[int]:
        """The text's tokens with what the tokenizer puts before them, but not what it appends, such as EOS: the
        completion goes on behind the text."""
        ids, plain = (encoded(text, self.tokenizer, where, add_special_tokens=special) for special in (True, False))
        if not plain:  # what stands before it alone
            return [token for token in ids if token == self.tokenizer.bos_token_id][:1]
        ends = range(len(plain), len(ids) + 1)
        return next((ids[:end] for end in ends if ids[end - len(plain) : end] == plain), ids)

    def opened(self, token_ids: list[int]) -> str:
        """The `<think>`, with the space after it, that a prompt's tokens end with: the completion is its thought."""
        end = re.search(r"<think>\s*$", str(self.tokenizer.decode(token_ids[-_LONGEST_OPENING:])))
        return "" if end is None else end[0]

    def _rendered(self, messages: list[dict[str, Any]], where: str, tools: Any, **options: Any) -> str:
        if self.tokenizer.chat_template is None:
            raise UserError(f"{where}: the prompt is a list of messages, but the tokenizer has no chat template")
        options |= {**self.template, **described_tools(tools, where)}
        try:
            return chat_text(self.tokenizer, messages, **options)
        except Exception as error:  # a template raises what it likes
            raise UserError(f"{where}: the tokenizer's chat template fails on the prompt: {error}") from error

    def _own_ids(self, text: str, where: str) -> list[int]:
        """The tokens of a text that has all its special tokens."""
        return encoded(text, self.tokenizer, where, add_special_tokens=False)

    def pair(self, prompt: Any, completion: str, where: str, tools: Any = None) -> tuple[list[int], list[int]]:
        """The tokens of a row's prompt, and of a completion that ends as one that is sampled: in every command alike.

        Strings are tokenized separately, as in sampling, and end with EOS. The completion of chat messages is what the
        chat template writes for an assistant's message, or a transcript's, after them, up to the token that ends the
        turn (`turn_end`, or EOS): what is written behind it, such as a newline, is never sampled. Where the template
        does not write the prompt and the whole completion so, as those that drop thoughts, it is the completion's own
        text, and that token. Raises UserError naming `where` for what could not be sampled.
        """
        prompt = self.prompt(prompt, where)
        prompt_ids = self.token_ids(prompt, where, tools)
        eos: Any = self.tokenizer.eos_token_id
        if eos is None:
            raise UserError(f"{where}: a completion ends with EOS, but the tokenizer names no EOS token")
        if isinstance(prompt, str):
            ids = self._own_ids(completion, where)
            return prompt_ids, ids if ids[-1:] == [eos] else [*ids, eos]
        written = self._written_ids(prompt, prompt_ids, completion, where, tools)
        ids = self._answer_ids(prompt_ids, completion, where) if written is None else written
        places = [place for place, token in enumerate(ids) if token in (eos, self._turn_end)]
        if places:  # of a transcript's turns the last one
            return prompt_ids, ids[: 1 + (places[-1] if len(messages_of(completion)) > 1 else places[0])]
        return prompt_ids, [*ids, eos if written is not None or self._turn_end is None else self._turn_end]

    def _written_ids(
        self, prompt: list[dict[str, Any]], prompt_ids: list[int], completion: str, where: str, tools: Any
    ) -> list[int] | None:
        """What the template writes for the completion's messages after the prompt's tokens; None if it does not."""
        messages = messages_of(completion)
        begin = self._rendered(prompt, where, tools, add_generation_prompt=True)
        text = self._rendered([*prompt, *messages], where, tools)
        ids, rest = self._own_ids(text, where), text.removeprefix(begin)
        if all(str(message.get("content") or "").strip() in rest for message in messages):
            if ids[: len(prompt_ids)] == prompt_ids:
                return ids[len(prompt_ids) :]
            if len(rest) < len(text):
                return self._own_ids(rest, where)  # its first token may join with the prompt's last one
        if len(messages) > 1:
            raise UserError(
                f"{where}: the chat template writes the prompt, or a message, differently once others follow, so the "
                "completion's tokens cannot be told from the prompt's"
            )
        return None

    def _answer_ids(self, prompt_ids: list[int], completion: str, where: str) -> list[int]:
        """The tokens of the completion's own text, after the thought that the prompt opened, if it did."""
        opened = self.opened(prompt_ids)
        if opened and "</think>" not in completion:
            raise UserError(
                f"{where}: the chat template ends the prompt with {opened!r}, so a completion needs the end of that "
                f"thought, </think>, got {completion[:60]!r}"
            )
        if opened and (thought := completion.lstrip()).startswith("<think>"):
            completion = thought.removeprefix("<think>").lstrip("\n" if opened.endswith("\n") else "")
        return self._own_ids(completion, where)

    @cached_property
    def _turn_end(self) -> int | None:
        return turn_end(self.tokenizer)


def encoded(text: str, tokenizer: PreTrainedTokenizerBase, where: str, **options: Any) -> list[int]:
    """A text's tokens. Raises UserError naming `where` for one that the tokenizer cannot read."""
    try:
        return list(tokenizer(text, **options)["input_ids"])
    except Exception as error:  # tokenizers raises nothing narrower for text that its vocabulary cannot encode
        raise UserError(f"{where}: the tokenizer cannot read the text: {error}") from error


def described_tools(tools: Any, where: str) -> dict[str, Any]:
    """The chat template's argument for a row's field `tools`: the functions that it describes, as JSON schemas.

    A list, or its JSON; nothing for None. Raises UserError naming `where` for anything else.
    """
    if tools is None:
        return {}
    read = tools
    if isinstance(tools, str):
        with suppress(ValueError):
            read = json.loads(tools)
    if not isinstance(read, list) or not all(isinstance(tool, dict) for tool in read):
        raise UserError(
            f"{where}: tools: expected a list of tables for the chat template, or its JSON, got {tools!r}; data.fields "
            "gives a column of another kind another name"
        )
    return {"tools": without_none(read)}


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], /, **options: Any) -> str:
    """What the tokenizer's chat template writes for messages, whatever the version of transformers does with None.

    A content that is None, or missing, is empty, and other keys that are None are not there: 5.17 shows them to the
    template, which may write "None"; 5.23 leaves a message's own out, and a template that appends its content to a text
    then fails.
    Raises what the template raises.
    """
    filled = [message | {"content": ""} if message.get("content") is None else message for message in messages]
    return str(tokenizer.apply_chat_template(without_none(filled), tokenize=False, **options))


def without_none(value: Any, kept: Container[str] = ()) -> Any:
    """The value without keys that are None, at any depth: Parquet fills with it what a row lacks and another one has.

    `kept` names keys of the outermost table that stay.
    """
    if isinstance(value, dict):
        return {key: without_none(x) for key, x in value.items() if x is not None or key in kept}
    return [without_none(x) for x in value] if isinstance(value, list | tuple) else value


def _checked(prompt: Any, where: str) -> list[dict[str, Any]]:
    """The messages of a prompt that is no string."""
    expected = 'expected a string or a list of {"role": ..., "content": ...}'
    if not isinstance(prompt, list) or not prompt:
        raise UserError(f"{where}: prompt: {expected}, got {prompt!r}")
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(f"{where}: prompt[{index}]: {expected}, got {message!r}")
    # A message keeps its content, as the message of a tool call may be without one.
    return [without_none(message, ("content",)) for message in prompt]
