"""Completions of an engine as the padded tensors that a step trains on."""

from collections.abc import Sequence
from typing import Any

import torch

from fastrl import SamplingMask
from fastrl.base.errors import UserError
from fastrl.integrations.vllm import routing_from_vllm
from fastrl.training.common.data import Example
from fastrl.training.common.policy import Policy, left_pad
from fastrl.training.common.rollout import Rollout
from fastrl.training.engines.protocol import Completion, Sampling


def assemble(
    policy: Policy, examples: Sequence[Example], completions: Sequence[Completion], length: int, sampling: Sampling
) -> Rollout:
    """The rollout of B completions, padded to `length` tokens, with what `sampling` asked to record."""
    device = policy.device
    prompts, prompt_mask = left_pad([example.token_ids for example in examples], policy.pad_token_id, device)
    lengths = torch.tensor([len(completion.token_ids) for completion in completions], device=device)
    mask = torch.arange(length, device=device) < lengths[:, None]  # (B, T)
    tokens = torch.full(mask.shape, policy.pad_token_id, device=device)
    tokens[mask] = torch.tensor([token for c in completions for token in c.token_ids], device=device)
    attention_mask = torch.cat([prompt_mask, mask], 1)
    drawn = logprobs = routing = None
    if any(c.drawn is not None for c in completions):
        drawn = torch.zeros_like(mask)
        flags = [flag for c in completions for flag in c.drawn or [True] * len(c.token_ids)]
        drawn[mask] = torch.tensor(flags, device=device)
    if sampling.logprobs:
        flat = [value for c in completions for value in _recorded(c.logprobs, "log-probabilities")]
        logprobs = torch.zeros(mask.shape, device=device)
        logprobs[mask] = torch.tensor(flat, device=device)
    if sampling.routing:
        try:
            records = [_recorded(c.routed_experts, "routed experts") for c in completions]
            routing = routing_from_vllm(policy.model, records, attention_mask)
        except (ValueError, TypeError) as error:
            raise UserError(f"rollout.keep_routing: the engine's routed experts cannot be used: {error}") from error
    return Rollout(
        torch.cat([prompts, tokens], 1),
        attention_mask,
        prompts.shape[1],
        drawn=drawn,
        messages=[c.messages or [] for c in completions] if any(c.messages for c in completions) else None,
        ended=torch.tensor([completion.ended for completion in completions], device=device),
        sampling_mask=_sampling_mask(completions, length, device) if sampling.supports else None,
        rollout_logprobs=logprobs,
        routing=routing,
    )


def _recorded(record: Any, what: str) -> Any:
    """What a completion has recorded. Raises UserError if it has not."""
    if record is None:
        raise UserError(f"rollout.engine: the engine returned a completion without its {what}")
    return record


def _sampling_mask(completions: Sequence[Completion], length: int, device: torch.device) -> SamplingMask:
    masks = []
    for completion in completions:
        mask = completion.sampling_mask
        if mask is None:
            raise UserError("rollout.engine: the engine returned a completion without its sampling mask")
        masks.append(mask)
    return SamplingMask.padded(masks, length).to(device)
