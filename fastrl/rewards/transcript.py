"""A chat's completion of several messages, where everything else sees one text.

Nothing here imports torch: what reads it may be another process.
"""

from collections.abc import Sequence
from typing import Any


class Transcript(str):
    """A completion's text, and the messages of which it is: the policy's, and those of tools between them."""

    messages: Sequence[dict[str, Any]]

    def __new__(cls, text: str, messages: Sequence[dict[str, Any]] = ()) -> "Transcript":
        made = super().__new__(cls, text)
        made.messages = messages
        return made


def messages_of(completion: str) -> list[dict[str, Any]]:
    """The messages of a chat's completion: one of the assistant, or with tools those of its transcript."""
    if isinstance(completion, Transcript):
        return list(completion.messages)
    return [{"role": "assistant", "content": completion}]
