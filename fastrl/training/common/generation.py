"""Sampling completions with Hugging Face's `generate`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from fastrl import SamplingMask
from fastrl.models.recording import record_sampling
from fastrl.models.routing import record_routing
from fastrl.training.common.data import Example
from fastrl.training.common.policy import Policy, left_pad
from fastrl.training.common.rollout import Rollout
from fastrl.training.common.sections import RolloutConfig


def completion_mask(completions: Tensor, eos_token_ids: list[int]) -> Tensor:
    """True up to and including the first EOS of each row: (B, T) int64 -> (B, T) bool."""
    is_eos = torch.isin(completions, torch.tensor(eos_token_ids, device=completions.device))
    return is_eos.cumsum(1) - is_eos.long() == 0


@torch.no_grad()
def generate(
    policy: Policy, examples: list[Example], config: RolloutConfig, *, greedy: bool = False, record: bool = True
) -> Rollout:
    """One completion for each example (repeat an example to sample it several times), sampled or greedy.

    Unless it is greedy, or `record` is off, the rollout holds the sampler's log-probabilities, each token's support if
    sampling truncates the vocabulary, and with rollout.keep_routing its experts.
    """
    prompts, prompt_mask = left_pad([e.token_ids for e in examples], policy.pad_token_id, policy.device)
    completions = torch.full((len(examples), config.max_new_tokens), policy.pad_token_id, device=policy.device)
    mask = torch.zeros_like(completions, dtype=torch.bool)
    sampling_masks: list[SamplingMask] = []
    logprobs: list[Tensor] = []
    routing: list[Tensor] = []
    record = record and not greedy
    for rows in torch.arange(len(examples), device=policy.device).split(config.batch_size or len(examples)):
        with ExitStack() as stack:
            sampling = experts = None
            if record:
                sampling = stack.enter_context(record_sampling(policy.model, logprobs=True, sets=config.truncates))
            if record and config.keep_routing:
                experts = stack.enter_context(record_routing(policy.model))
            new_tokens = _generate_batch(policy, prompts[rows], prompt_mask[rows], config, greedy)
        completions[rows, : new_tokens.shape[1]] = new_tokens
        mask[rows] = completion_mask(completions[rows], policy.eos_token_ids)
        if sampling is not None:
            logprobs.append(sampling.logprobs(completions[rows], mask[rows]))
            if config.truncates:
                sampling_masks.append(sampling.sampling_mask(mask[rows]))
        if experts is not None:
            routing.append(experts.routing(prompts.shape[1] + config.max_new_tokens))
    return Rollout(
        torch.cat([prompts, completions], 1),
        torch.cat([prompt_mask, mask], 1),
        prompts.shape[1],
        sampling_mask=SamplingMask.concat(sampling_masks) if sampling_masks else None,
        rollout_logprobs=torch.cat(logprobs) if logprobs else None,
        routing=torch.cat(routing) if routing else None,
    )


def _generate_batch(policy: Policy, prompts: Tensor, mask: Tensor, config: RolloutConfig, greedy: bool) -> Tensor:
    """Sample from prompts and mask (b, P) the new tokens (b, up to T); everything after an EOS is padding."""
    # All are set, because transformers' default top_k is 50, and training uses only the recorded truncation.
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
        sample: Any = policy.model.generate  # a mixin's method, unknown to Module's type
        tokens: Tensor = sample(input_ids=prompts, attention_mask=mask.long(), generation_config=settings)
    return tokens[:, prompts.shape[1] :]


@contextmanager
def _neutral_generation_config(model: Any) -> Iterator[None]:
    """Keep a model's shipped top-k, top-p and penalties from filling what our settings leave unset.

    Otherwise the tokens would come from another distribution than the one whose log-probabilities are trained.
    """
    shipped = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = shipped


def ended_by_eos(policy: Policy, rollout: Rollout) -> Tensor:
    """Which completions ended with EOS, and were not cut off at the longest length: (B,) bool."""
    eos = torch.tensor(policy.eos_token_ids, device=rollout.targets.device)
    return (torch.isin(rollout.targets, eos) & rollout.completion_mask).any(1)


def completion_texts(policy: Policy, rollout: Rollout) -> list[str]:
    """The completions as text, without special tokens."""
    rows = [tokens[mask] for tokens, mask in zip(rollout.targets.cpu(), rollout.completion_mask.cpu(), strict=True)]
    return policy.tokenizer.batch_decode(rows, skip_special_tokens=True)
