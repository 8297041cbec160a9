"""Sampling completions with Hugging Face's ``generate``, and their log-probabilities."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from .. import linear_token_logprobs
from .config import RolloutConfig
from .data import Example
from .policy import Policy


@dataclass(frozen=True)
class Rollout:
    """B completions of up to T tokens after prompts left-padded to P tokens, on the policy's device."""

    input_ids: Tensor  # (B, P + T) int64
    attention_mask: Tensor  # (B, P + T) bool; completions count up to and including their EOS
    prompt_length: int  # P
    advantages: Tensor | None = None  # (B,) float32
    old_logprobs: Tensor | None = None  # (B, T) float32; None means on-policy
    ref_logprobs: Tensor | None = None  # (B, T) float32

    @property
    def targets(self) -> Tensor:
        """The sampled tokens, (B, T) int64."""
        return self.input_ids[:, self.prompt_length :]

    @property
    def mask(self) -> Tensor:
        """Which of them count, (B, T) bool."""
        return self.attention_mask[:, self.prompt_length :]

    def select(self, rows: Tensor) -> "Rollout":
        """The rows (int64 indices), without the padding columns that none of them needs."""
        used = self.attention_mask[rows].any(0).nonzero()
        first, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, self.prompt_length)
        longest = end - self.prompt_length

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows, :longest]

        return replace(
            self,
            input_ids=self.input_ids[rows, first:end],
            attention_mask=self.attention_mask[rows, first:end],
            prompt_length=self.prompt_length - first,
            advantages=None if self.advantages is None else self.advantages[rows],
            old_logprobs=cut(self.old_logprobs),
            ref_logprobs=cut(self.ref_logprobs),
        )


def completion_mask(completions: Tensor, eos_token_ids: list[int]) -> Tensor:
    """True up to and including the first EOS of each row: (B, T) int64 -> (B, T) bool."""
    is_eos = torch.isin(completions, torch.tensor(eos_token_ids, device=completions.device))
    return is_eos.cumsum(1) - is_eos.long() == 0


def generate(policy: Policy, examples: list[Example], config: RolloutConfig, *, greedy: bool = False) -> Rollout:
    """One completion for each example (repeat an example to sample it several times), sampled or greedy."""
    size = config.batch_size or len(examples)
    longest = max(len(example.token_ids) for example in examples)
    prompts = torch.full((len(examples), longest), policy.pad_token_id, device=policy.device)
    prompt_mask = torch.zeros_like(prompts, dtype=torch.bool)
    for row, example in enumerate(examples):
        start = longest - len(example.token_ids)
        prompts[row, start:] = torch.tensor(example.token_ids, device=policy.device)
        prompt_mask[row, start:] = True

    completions = torch.full((len(examples), config.max_new_tokens), policy.pad_token_id, device=policy.device)
    for start in range(0, len(examples), size):
        rows = slice(start, start + size)
        new = _generate_batch(policy, prompts[rows], prompt_mask[rows], config, greedy)
        completions[rows, : new.shape[1]] = new

    mask = completion_mask(completions, policy.eos_token_ids)
    return Rollout(torch.cat([prompts, completions], 1), torch.cat([prompt_mask, mask], 1), longest)


def _generate_batch(policy: Policy, prompts: Tensor, mask: Tensor, config: RolloutConfig, greedy: bool) -> Tensor:
    """prompts and mask (b, P) -> new tokens (b, up to T); what follows an EOS is padding."""
    # top_k=0: transformers' own default is 50, and training knows nothing of a truncated vocabulary.
    sampling = {"temperature": config.temperature, "top_k": 0, "top_p": 1.0}
    settings = GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        eos_token_id=policy.eos_token_ids,
        pad_token_id=policy.pad_token_id,
        do_sample=not greedy,
        **({} if greedy else sampling),
    )
    with _neutral_generation_config(policy.model), policy.computing():
        sample: Any = policy.model.generate  # a mixin's method, which Module's types do not know
        tokens: Tensor = sample(input_ids=prompts, attention_mask=mask.long(), generation_config=settings)
    return tokens[:, prompts.shape[1] :]


@contextmanager
def _neutral_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Keep a model's shipped top-k, top-p and penalties from filling what our settings leave open.

    With them the tokens would come from another distribution than the one whose log-probabilities are trained.
    """
    shipped = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = shipped


@torch.no_grad()
def rollout_logprobs(policy: Policy, rollout: Rollout, temperature: float, batch_size: int | None) -> Tensor:
    """Log-probabilities (B, T) float32 of the sampled tokens under a policy, by the fused path that training takes."""
    logprobs = torch.zeros(rollout.targets.shape, device=policy.device)
    everything = torch.arange(len(logprobs), device=policy.device)
    size = batch_size or len(logprobs)
    for rows in everything.split(size) if size else ():
        part = rollout.select(rows)
        with policy.computing():
            hidden = policy.hidden_states(part.input_ids, part.attention_mask, part.prompt_length)
            stats = linear_token_logprobs(
                hidden, policy.weight, part.targets, mask=part.mask, temperature=temperature, **policy.head
            )
        logprobs[rows, : part.targets.shape[1]] = stats.logprobs
    return logprobs


def completion_texts(policy: Policy, rollout: Rollout) -> list[str]:
    """The completions as text, without special tokens."""
    rows = [tokens[mask] for tokens, mask in zip(rollout.targets.cpu(), rollout.mask.cpu(), strict=True)]
    return policy.tokenizer.batch_decode(rows, skip_special_tokens=True)
