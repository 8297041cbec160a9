"""A tokenizer that reads any text, a token a byte, with special tokens of its own."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(eos: str, *special: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Token 0 is the EOS, then come the other special tokens, then the bytes; two newlines are one token."""
    tokens = [eos, *special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([eos, *special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, chat_template=chat_template)
