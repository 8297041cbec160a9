"""Causal language models of transformers, as small as their architectures allow."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_model(kind: str, **values: Any) -> Any:
    """A model of this type in evaluation mode, with these values in its configuration, and random weights."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | values))).eval()
