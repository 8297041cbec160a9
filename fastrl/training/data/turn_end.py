"""Special tokens: the one that ends the assistant's message, where rollouts and training data stop, and all of them."""

from typing import Any

from transformers import PreTrainedTokenizerBase

_CONTENT = "what the assistant says"


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first special token behind an assistant's message, such as `<|im_end|>`, which need not be the EOS.

    None if the tokenizer has no chat template, or that writes none, or writes no such conversation.
    """
    if tokenizer.chat_template is None:
        return None
    messages = [{"role": "user", "content": "what the user says"}, {"role": "assistant", "content": _CONTENT}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        behind = tokenizer(text.rpartition(_CONTENT)[2], add_special_tokens=False)["input_ids"]
    # A template raises what it likes, and a small vocabulary lacks letters: the error of a row says so.
    except Exception:
        return None
    special = special_ids(tokenizer)
    return next((token for token in behind if token in special), None)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The special tokens, with those that the tokenizer has no name for."""
    added: Any = tokenizer.added_tokens_decoder
    named = {*tokenizer.all_special_ids} - {None}  # of a token that is an empty text
    if not isinstance(added, dict):  # a method that raises, of mistral-common's, which names all of them
        return named
    return {token_id for token_id, token in added.items() if token.special} | named
