"""A training step of a causal language model with random weights, with each contender for head and loss."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.bench import candidates
from fastrl.bench.candidates import Candidate
from fastrl.bench.ceilings import products
from fastrl.bench.contenders import Contender, Function, Outcome, Result, Run, Workload
from fastrl.bench.machine import free_bytes
from fastrl.bench.problems import Expected, Problem, Size, Tokens, chunks, make_problem
from fastrl.bench.results import Row

#: The step without head and loss: it determines the share of head and loss in the others' steps.
BODY = "the model's body alone (loss: the mean of its hidden states)"
#: Approximate bytes of activations kept for the backward, per token, layer and hidden dimension, over element size.
_ACTIVATIONS = 40
#: From this width on the head has its own weight, apart from the embedding, as in Qwen3-8B.
_UNTIED_WIDTH = 4096
#: So small that the weights, and with them the workload, stay the same from step to step.
_LEARNING_RATE = 1e-6


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
    def tied(self) -> bool:
        """Whether the head shares the embedding's weight."""
        return self.width < _UNTIED_WIDTH

    def config(self) -> Any:
        """The configuration for transformers."""
        from transformers import Qwen3Config

        if self.width >= 1024:
            heads, kv_heads, head_dim = max(16, self.width // 128), 8, 128
        else:
            heads = max(1, self.width // 64)
            kv_heads = heads // 2 if heads % 2 == 0 else heads
            head_dim = max(2, self.width // heads // 2 * 2)  # even, because rotary positions come in pairs
        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.width,
            intermediate_size=3 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
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

    @property
    def size(self) -> Size:
        """The head's size."""
        architecture = self.architecture
        return Size(self.tokens.count, architecture.width, architecture.vocab, architecture.dtype.itemsize)

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
    head_inputs = {"hidden": hidden.detach().flatten(0, 1), "weight": model.lm_head.weight.detach()}
    head = make_problem(head_inputs, targets, generator, ids.shape[0])
    expected = _expected(model, hidden, head)
    return StepProblem(architecture, sum(p.numel() for p in model.parameters()), inputs, head.tokens, expected)


def _expected(model: Any, hidden: Tensor, head: Problem) -> Expected:
    """Head and loss in float64 on the body's own hidden states, and two gradients that depend on the whole backward.

    The last norm's gradient sums over all tokens' d_hidden; a tied weight's is the head's plus the embedding's.
    """
    loss, c = head.coefficients(head.loss)
    parts = chunks(head.tokens.count, head.size.vocab, c.device)
    d_hidden = torch.cat([head.row_gradients(rows, c) for rows in parts])
    hidden.backward(d_hidden.view_as(hidden).to(hidden.dtype))
    norm, embedding = model.model.norm.weight.grad.double(), model.lm_head.weight.grad
    entries, d_weight = head.weight_gradients(c)
    if embedding is not None:
        d_weight = d_weight + embedding[entries].double()
    gradients = {"norm": (torch.arange(norm.numel(), device=norm.device), norm), "weight": (entries, d_weight)}
    return Expected(loss, head.logprobs, head.entropy, gradients)


def workload(problem: StepProblem) -> Workload:
    """One step: forward, PPO's clipped loss, backward, AdamW."""
    first, *others = candidates.POLICY
    chosen = [replace(first, name="fastrl, linear_policy_loss"), candidates.POLICY_FROM_LOGITS, *others]
    checkpointed = "with" if problem.architecture.checkpointed else "no"
    return Workload(
        "step",
        f"forward, PPO's clipped loss (off-policy), backward, AdamW; Qwen3's layers, {problem.weights / 1e6:,.4g} M"
        f" weights, {checkpointed} gradient checkpointing",
        [_contender(problem, candidate) for candidate in chosen],
        problem.expected,
    )


def body(problem: StepProblem) -> Contender:
    """The same step with the body alone; the loss is the mean of its hidden states."""
    alone = Candidate(BODY, lambda tokens: lambda hidden, weight: Result(hidden.float().mean()), lambda size: 0)
    return _contender(problem, alone)


def head_products(problem: StepProblem) -> Contender:
    """The head's three matrix products alone, at the step's size."""
    arch, size = problem.architecture, problem.size

    def prepare() -> Run:
        # Random, because a GPU multiplies constants faster than data.
        hidden, weight = (
            torch.randn(n, arch.width, dtype=arch.dtype, device=arch.device) for n in (size.tokens, size.vocab)
        )
        return products(hidden, weight, range(3))

    return Contender("the head's three matrix products alone", prepare, size.once + size.gradients)


def add_shares(rows: list[Row], body: Row) -> None:
    """Fill the share of head and loss in each step's time: all but the body's."""
    for row in rows:
        if body.seconds is not None and row.seconds is not None:
            row.share_of_step = max(0.0, 1 - body.seconds / row.seconds)


def _contender(problem: StepProblem, candidate: Candidate) -> Contender:
    needed = problem.bytes_needed() + candidate.bytes_needed(problem.size)
    return Contender(candidate.name, partial(_step, problem, candidate.make), needed, candidate.ours)


def _step(problem: StepProblem, make: Callable[[Tokens], Function]) -> Run:
    head = make(problem.tokens)
    # Each contender makes its own model, with the same weights as the others: a copy would need the original in memory.
    model = problem.architecture.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)

    def call() -> Outcome:
        optimizer.zero_grad(set_to_none=True)
        hidden = hidden_states(model, problem.inputs)
        result = head(hidden.reshape(-1, hidden.shape[-1]), model.lm_head.weight)
        assert result.loss is not None
        result.loss.backward()
        optimizer.step()
        # Gradients are kept until the next step, so that they count as results, not as temporary memory.
        gradients = {"norm": model.model.norm.weight.grad, "weight": model.lm_head.weight.grad}
        return result.outcome(gradients)

    return Run(call)
