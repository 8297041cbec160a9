"""The small tensors and models that the pages' python blocks find under the usual names."""

from __future__ import annotations

from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

import fastrl

#: Responses, their tokens, the prompts' tokens, widths of the policy's and the teacher's hidden states, the vocabulary.
B, T, P, H, H_TEACHER, V = 4, 6, 5, 16, 24, 32


def given(name: str) -> Any:
    """A new value of one of NAMES. Two responses belong to each of two prompts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(_SAME.get(name, name).encode()))
        return _MAKERS[_SAME.get(name, name)]()


def _completion_mask() -> Tensor:
    return torch.arange(T) < torch.tensor([6, 5, 4, 3])[:, None]


def _of_whole_sequences(completion: Tensor, prompt: int) -> Tensor:
    return torch.cat([torch.full((B, P), prompt, dtype=completion.dtype), completion], 1)


def _logprobs() -> Tensor:
    return -torch.rand(B, T) - 0.1


def _sampling_mask() -> fastrl.SamplingMask:
    kept = torch.zeros(B, T, V, dtype=torch.bool)
    kept[..., ::4] = True
    return fastrl.SamplingMask.from_dense(kept.scatter(-1, given("completion_ids")[..., None], True))


def _model(width: int) -> Any:
    from tiny_models import tiny_model  # transformers takes seconds to import

    return tiny_model("qwen3", vocab_size=V, hidden_size=width, head_dim=8, tie_word_embeddings=False).train()


_MAKERS: dict[str, Any] = {
    "B": lambda: B,
    "T": lambda: T,
    "H": lambda: H,
    "V": lambda: V,
    "input_ids": lambda: torch.randint(V, (B, P + T)),
    "attention_mask": lambda: _of_whole_sequences(_completion_mask(), True).long(),
    "labels": lambda: _of_whole_sequences(given("completion_ids").masked_fill(~_completion_mask(), -100), -100),
    "dataset": lambda: [
        {"input_ids": ids, "labels": labels} for ids, labels in zip(given("input_ids"), given("labels"), strict=True)
    ],
    "prompts": lambda: given("input_ids")[:, :P],
    "prompt_length": lambda: P,
    "completion_ids": lambda: given("input_ids")[:, P:].contiguous(),
    "completion_mask": _completion_mask,
    "prompt_ids": lambda: torch.tensor([0, 0, 1, 1]),
    "rewards": lambda: torch.tensor([1.0, 0.0, 0.5, 1.0]),
    "advantages": lambda: fastrl.group_advantages(given("rewards"), given("prompt_ids")),
    "hidden": lambda: torch.randn(B, T, H).requires_grad_(),
    "weight": lambda: torch.randn(V, H).requires_grad_(),
    "logits": lambda: torch.randn(B, T, V).requires_grad_(),
    "logprobs": lambda: _logprobs().requires_grad_(),
    "old_logprobs": _logprobs,
    "ref_logprobs": _logprobs,
    "rollout_logprobs": _logprobs,
    "values": lambda: torch.randn(B, T),
    "sampling_mask": _sampling_mask,
    "teacher_hidden": lambda: torch.randn(B, T, H_TEACHER),
    "teacher_logits": lambda: torch.randn(B, T, V),
    "model": partial(_model, H),
    "teacher": partial(_model, H_TEACHER),
}
_SAME = {
    "targets": "completion_ids",
    "completions": "completion_ids",
    "mask": "completion_mask",
    "student": "model",
    "policy": "model",
}
#: What a page may read without having made it.
NAMES = frozenset([*_MAKERS, *_SAME])
