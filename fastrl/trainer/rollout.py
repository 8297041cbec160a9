"""Sampling completions with Hugging Face's ``generate``, and their log-probabilities."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from .. import SamplingMask, linear_token_logprobs
from ..integrations.transformers import SamplingMaskRecorder, record_sampling
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
    sampling_mask: SamplingMask | None = None  # B T rows, one a token; None means drawn from the whole vocabulary

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

        tokens = rows[:, None] * self.targets.shape[1] + torch.arange(longest, device=rows.device)
        return replace(
            self,
            input_ids=self.input_ids[rows, first:end],
            attention_mask=self.attention_mask[rows, first:end],
            prompt_length=self.prompt_length - first,
            advantages=None if self.advantages is None else self.advantages[rows],
            old_logprobs=cut(self.old_logprobs),
            ref_logprobs=cut(self.ref_logprobs),
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask.index(tokens),
        )


def completion_mask(completions: Tensor, eos_token_ids: list[int]) -> Tensor:
    """True up to and including the first EOS of each row: (B, T) int64 -> (B, T) bool."""
    is_eos = torch.isin(completions, torch.tensor(eos_token_ids, device=completions.device))
    return is_eos.cumsum(1) - is_eos.long() == 0


def generate(policy: Policy, examples: list[Example], config: RolloutConfig, *, greedy: bool = False) -> Rollout:
    """One completion for each example (repeat an example to sample it several times), sampled or greedy.

    Where sampling truncates the vocabulary, the rollout records what each token was drawn from.
    """
    prompts, prompt_mask = _pad_prompts(policy, examples)
    completions = torch.full((len(examples), config.max_new_tokens), policy.pad_token_id, device=policy.device)
    mask = torch.zeros_like(completions, dtype=torch.bool)
    sets: list[SamplingMask] = []
    for rows in torch.arange(len(examples), device=policy.device).split(config.batch_size or len(examples)):
        with _recording(policy.model, config, greedy) as recorder:
            new = _generate_batch(policy, prompts[rows], prompt_mask[rows], config, greedy)
        completions[rows, : new.shape[1]] = new
        mask[rows] = completion_mask(completions[rows], policy.eos_token_ids)
        if recorder is not None:
            sets.append(recorder.sampling_mask(mask[rows]))

    sampling_mask = SamplingMask.concat(sets) if sets else None
    input_ids, attention_mask = torch.cat([prompts, completions], 1), torch.cat([prompt_mask, mask], 1)
    return Rollout(input_ids, attention_mask, prompts.shape[1], sampling_mask=sampling_mask)


def _pad_prompts(policy: Policy, examples: list[Example]) -> tuple[Tensor, Tensor]:
    """The prompts' tokens (B, P) int64 and which of them count (B, P) bool, left-padded."""
    longest = max(len(example.token_ids) for example in examples)
    prompts = torch.full((len(examples), longest), policy.pad_token_id, device=policy.device)
    mask = torch.zeros_like(prompts, dtype=torch.bool)
    for row, example in enumerate(examples):
        start = longest - len(example.token_ids)
        prompts[row, start:] = torch.tensor(example.token_ids, device=policy.device)
        mask[row, start:] = True
    return prompts, mask


def _recording(
    model: PreTrainedModel, config: RolloutConfig, greedy: bool
) -> AbstractContextManager[SamplingMaskRecorder | None]:
    """A recorder around one call of generate, where that draws tokens from a part of the vocabulary."""
    return record_sampling(model) if config.truncates and not greedy else nullcontext()


def _generate_batch(policy: Policy, prompts: Tensor, mask: Tensor, config: RolloutConfig, greedy: bool) -> Tensor:
    """prompts and mask (b, P) -> new tokens (b, up to T); what follows an EOS is padding."""
    # All are named: transformers' own default of top_k is 50, and training knows of no truncation but the recorded one.
    sampling = {
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p or None,
    }
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
    """Log-probabilities (B, T) float32 of the sampled tokens under a policy, by the fused path that training takes.

    Every policy, a reference too, normalises over the entries that the sampler drew from.
    """
    logprobs = torch.zeros(rollout.targets.shape, device=policy.device)
    everything = torch.arange(len(logprobs), device=policy.device)
    size = batch_size or len(logprobs)
    for rows in everything.split(size) if size else ():
        part = rollout.select(rows)
        with policy.computing():
            hidden = policy.hidden_states(part.input_ids, part.attention_mask, part.prompt_length)
            stats = linear_token_logprobs(
                hidden,
                policy.weight,
                part.targets,
                mask=part.mask,
                temperature=temperature,
                sampling_mask=part.sampling_mask,
                **policy.head,
            )
        logprobs[rows, : part.targets.shape[1]] = stats.logprobs
    return logprobs


def completion_texts(policy: Policy, rollout: Rollout) -> list[str]:
    """The completions as text, without special tokens."""
    rows = [tokens[mask] for tokens, mask in zip(rollout.targets.cpu(), rollout.mask.cpu(), strict=True)]
    return policy.tokenizer.batch_decode(rows, skip_special_tokens=True)
