"""A causal language model with random weights, a batch, and the expected results of its first step in float64."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.bench import plain
from fastrl.bench.problems import Expected, Tokens, checked_entries, chunks, make_tokens
from fastrl.planning.budget import free_bytes

#: Approximate bytes of activations kept for the backward, per token, layer and hidden dimension, over element size.
_ACTIVATIONS = 40
#: From this width on the head has its own weight, apart from the embedding, as in Qwen3-8B.
_UNTIED_WIDTH = 4096


class Architecture(NamedTuple):
    """A Qwen3 with random weights: 28 x 1024 is Qwen3-0.6B, 36 x 4096 Qwen3-8B."""

    layers: int
    width: int
    vocab: int
    length: int  # of the longest sequence
    dtype: torch.dtype
    device: str
    checkpointed: bool = False  # whether the backward computes layers again

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return max(16, self.width // 128) if self.width >= 1024 else max(1, self.width // 64)

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads."""
        if self.width >= 1024:
            return 8
        return self.heads // 2 if self.heads % 2 == 0 else self.heads

    @property
    def head_dim(self) -> int:
        """The width of each head; even, because rotary positions come in pairs."""
        return 128 if self.width >= 1024 else max(2, self.width // self.heads // 2 * 2)

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding's weight."""
        return self.width < _UNTIED_WIDTH

    def config(self) -> Any:
        """The configuration for transformers."""
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.width,
            intermediate_size=3 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=max(self.length, 2048),
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
        )

    def model(self) -> Any:
        """A causal language model of transformers, with `model` (the body) and `lm_head`; deterministic."""
        from transformers import Qwen3ForCausalLM

        devices = [torch.cuda.current_device()] if self.device == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.device(self.device):
            torch.manual_seed(0)
            model: Any = Qwen3ForCausalLM(self.config())
        model = model.to(self.dtype).train()
        if self.checkpointed:
            model.gradient_checkpointing_enable()
        return model

    def activation_bytes(self, tokens: int) -> int:
        """Approximate bytes kept for the body's backward: all layers' activations, or their inputs and one layer's."""
        layers = 1 if self.checkpointed else self.layers
        inputs = self.layers if self.checkpointed else 0
        return (_ACTIVATIONS * layers + inputs) * tokens * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class StepProblem:
    """Inputs (B, T), the tokens (N = B T) that their hidden states predict, and the first step's expected results.

    It does not hold the model: each contender makes its own, with the same initial weights.
    """

    architecture: Architecture
    weights: int  # the number of weights of the model
    inputs: Tensor
    tokens: Tokens
    expected: Expected

    def bytes_needed(self) -> int:
        """Approximate bytes of a model with gradients and AdamW's two numbers per weight, and of its activations."""
        architecture = self.architecture
        return 4 * self.weights * architecture.dtype.itemsize + architecture.activation_bytes(self.tokens.count)


def hidden_states(model: Any, inputs: Tensor) -> Tensor:
    """The body's last hidden states (B, T, H), with their graph."""
    states: Tensor = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    return states


def step_problem(
    responses: int, length: int, layers: int, width: int, vocab: int, dtype: torch.dtype, device: str
) -> StepProblem:
    """A Qwen3-shaped model and uniform tokens; deterministic."""
    generator = torch.Generator(device).manual_seed(0)
    architecture = Architecture(layers, width, vocab, length, dtype, device)
    free = free_bytes(device)
    if free is not None and architecture.activation_bytes(responses * length) > free // 3:
        architecture = architecture._replace(checkpointed=True)
    ids = torch.randint(vocab, (responses, length + 1), device=device, generator=generator)
    problem = _first_step(architecture, ids, generator)
    gc.collect()  # frees the model, which has reference cycles
    return problem


def _first_step(architecture: Architecture, ids: Tensor, generator: torch.Generator) -> StepProblem:
    model = architecture.model()
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].reshape(-1)
    hidden = hidden_states(model, inputs)
    flat, weight = hidden.detach().reshape(-1, architecture.width), model.lm_head.weight.detach().double()
    with torch.no_grad():
        parts = [
            plain.linear_statistics(flat[rows].double(), weight, targets[rows])
            for rows in chunks(targets.numel(), architecture.vocab)
        ]
    logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    tokens = make_tokens(targets, logprobs, generator, ids.shape[0])
    expected = _expected(model, hidden, tokens, logprobs, entropy)
    return StepProblem(architecture, sum(p.numel() for p in model.parameters()), inputs, tokens, expected)


def _expected(model: Any, hidden: Tensor, tokens: Tokens, logprobs: Tensor, entropy: Tensor) -> Expected:
    """Head and loss in float64 on the body's own hidden states, and two gradients that depend on the whole backward.

    The last norm's gradient sums over all tokens' d_hidden; a tied weight's is the head's plus the embedding's.
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
    d_weight = weight.grad[entries]
    if model.lm_head.weight.grad is not None:  # the embedding's part
        d_weight = d_weight + model.lm_head.weight.grad[entries].double()
    indices = torch.arange(norm.numel(), device=norm.device)
    return Expected(loss, logprobs, entropy, {"norm": (indices, norm), "weight": (entries, d_weight)})
