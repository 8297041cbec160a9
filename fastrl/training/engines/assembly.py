"""Completions of an engine as the rollout that a step trains on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fastrl.base.errors import UserError
from fastrl.integrations.vllm import routing_from_vllm
from fastrl.training.batches.rollout import Rollout, as_rollout
from fastrl.training.data.examples import Example
from fastrl.training.engines.protocol import Completion, Sampling
from fastrl.training.models.policy import Policy


def assemble(
    policy: Policy, examples: Sequence[Example], completions: Sequence[Completion], sampling: Sampling
) -> Rollout:
    """The rollout of B completions, with what `sampling` asked to record."""
    pairs = zip(examples, completions, strict=True)
    rollout = as_rollout(policy, [(example.token_ids, completion.token_ids) for example, completion in pairs])
    mask, drawn, logprobs, routing = rollout.completion_mask, None, None, None
    if any(c.drawn is not None for c in completions):
        drawn = torch.zeros_like(mask)
        drawn[mask] = torch.tensor([flag for c in completions for flag in c.drawn or [True] * len(c.token_ids)])
    if sampling.logprobs:
        logprobs = torch.zeros(mask.shape)
        logprobs[mask] = torch.tensor([x for c in completions for x in _recorded(c.logprobs, "log-probabilities")])
    if sampling.routing:
        try:
            records = [_recorded(c.routed_experts, "routed experts") for c in completions]
            routing = routing_from_vllm(policy.model, records, rollout.attention_mask)
        except (ValueError, TypeError) as error:
            raise UserError(f"rollout.keep_routing: the engine's routed experts cannot be used: {error}") from error
    masks = [_recorded(c.sampling_mask, "sampling mask") for c in completions] if sampling.supports else None
    return replace(
        rollout,
        drawn=drawn,
        messages=[c.messages or [] for c in completions],
        ended=torch.tensor([completion.ended for completion in completions]),
        supports=None if masks is None else [mask.to("cpu") for mask in masks],
        rollout_logprobs=logprobs,
        routing=routing,
    )


def _recorded(record: Any, what: str) -> Any:
    """What a completion has recorded. Raises UserError if it has not."""
    if record is None:
        raise UserError(f"rollout.engine: the engine returned a completion without its {what}")
    return record
