"""A causal language model with random weights, a batch for it, and the float64 answers of its first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastrl.budget import free_bytes

from . import plain
from .problems import Tokens, Truth, checked_entries, chunks, make_tokens

#: Bytes of activations a token, layer and hidden dimension, over the element size: kept for the backward, roughly.
_ACTIVATIONS = 40


@dataclass(frozen=True)
class StepProblem:
    """A model, its inputs (B, T), and the tokens (N = B T) that its hidden states predict."""

    model: Any  # a causal language model of transformers, with `model` (the body) and `lm_head`
    inputs: Tensor
    tokens: Tokens
    truth: Truth
    checkpointed: bool

    @property
    def weight(self) -> Tensor:
        """The output head (V, H)."""
        weight: Tensor = self.model.lm_head.weight
        return weight

    def bytes_needed(self) -> int:
        """Of a copy of the model with gradients and AdamW's two numbers a weight, and of activations, roughly."""
        parameters = sum(p.numel() * p.element_size() for p in self.model.parameters())
        config = self.model.config
        kept = 0 if self.checkpointed else _activation_bytes(self.tokens.count, config, self.weight.element_size())
        return 4 * parameters + kept


def hidden_states(model: Any, inputs: Tensor) -> Tensor:
    """The body's last hidden states (B, T, H), with their graph."""
    found: Tensor = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    return found


def step_problem(
    responses: int, length: int, layers: int, width: int, vocab: int, dtype: torch.dtype, device: str
) -> StepProblem:
    """A Qwen3-shaped model, head tied to the embedding as in Qwen3-0.6B, and uniform tokens; the same every time."""
    generator = torch.Generator(device).manual_seed(0)
    model = _model(layers, width, vocab, length, dtype, device)
    free = free_bytes(device)
    activations = _activation_bytes(responses * length, model.config, dtype.itemsize)
    checkpointed = free is not None and activations > free // 3
    if checkpointed:
        model.gradient_checkpointing_enable()
    ids = torch.randint(vocab, (responses, length + 1), device=device, generator=generator)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].reshape(-1)
    hidden = hidden_states(model, inputs)
    flat, weight = hidden.detach().reshape(-1, width), model.lm_head.weight.detach().double()
    with torch.no_grad():
        parts = [
            plain.linear_statistics(flat[rows].double(), weight, targets[rows])
            for rows in chunks(targets.numel(), vocab)
        ]
    logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    tokens = make_tokens(targets, logprobs, generator, responses)
    truth = _truth(model, hidden, tokens, logprobs, entropy)
    return StepProblem(model, inputs, tokens, truth, checkpointed)


def _model(layers: int, width: int, vocab: int, length: int, dtype: torch.dtype, device: str) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = max(1, width // 64)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=128 if width >= 1024 else max(2, width // heads // 2 * 2),  # rotary positions come in pairs
        max_position_embeddings=max(length, 2048),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(config)
    return model.to(dtype).train()


def _activation_bytes(tokens: int, config: Any, element_size: int) -> int:
    return _ACTIVATIONS * tokens * config.hidden_size * config.num_hidden_layers * element_size


def _truth(model: Any, hidden: Tensor, tokens: Tokens, logprobs: Tensor, entropy: Tensor) -> Truth:
    """Head and loss in float64 on the body's own hidden states; two gradients that everything behind them enters.

    The last norm's gradient sums over all tokens' d_hidden, and the tied weight's has the head's and the embedding's.
    """
    flat = hidden.detach().reshape(-1, hidden.shape[-1]).double()
    weight = model.lm_head.weight.detach().double().requires_grad_()
    d_hidden = torch.empty_like(flat)
    loss = torch.zeros((), dtype=torch.float64, device=flat.device)
    for rows in chunks(tokens.count, weight.shape[0]):
        x = flat[rows].requires_grad_()
        part, *_ = plain.linear_policy_loss(
            x, weight, tokens.targets[rows], tokens.old[rows].double(), tokens.advantages[rows].double(), tokens.count
        )
        part.backward()
        assert x.grad is not None
        d_hidden[rows] = x.grad
        loss += part.detach()
    assert weight.grad is not None
    hidden.backward(d_hidden.view_as(hidden).to(hidden.dtype))
    entries = checked_entries(tokens, weight.shape[0])
    norm = model.model.norm.weight.grad.double()
    d_weight = weight.grad[entries] + model.lm_head.weight.grad[entries].double()
    model.zero_grad(set_to_none=True)
    every = torch.arange(norm.numel(), device=norm.device)
    return Truth(loss, logprobs, entropy, {"norm": (every, norm), "weight": (entries, d_weight)})
