"""Distillation: a frozen teacher, and the divergence of the policy from it on the tokens of completions."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl import (
    DivergenceLoss,
    gathered_logprobs,
    linear_divergence,
    linear_gathered_logprobs,
    linear_token_logprobs,
    topk_divergence,
)
from fastrl.backend.choice import forced
from fastrl.base import checks
from fastrl.base.errors import UserError
from fastrl.passes.head import Head, Workspace
from fastrl.planning.budget import default_budget, parse_budget
from fastrl.planning.tiling import TILE_BYTES, Tile
from fastrl.training.batches.rollout import Rollout, hidden_states
from fastrl.training.config.sections import TeacherConfig
from fastrl.training.models.policy import Policy

# Choosing a teacher's likeliest entries: how many bytes a logit and an entry take, with the work on them. One row fits
# any budget with which `linear_gathered_logprobs` computes the policy's.
LOGIT_BYTES, ENTRY_BYTES = 12, 96


@dataclass(frozen=True)
class Distillation:
    """The divergence of a policy from a teacher, as a loss."""

    teacher: Policy
    settings: TeacherConfig
    temperature: float = 1.0  # of both
    top_k: int | None = None  # the teacher's likeliest entries, and one for all others; None: the whole vocabulary
    packing: bool = False
    memory_budget: str | None = None

    @torch.no_grad()
    def states(self, batch: Rollout) -> Tensor:
        """The teacher's hidden states of a batch, as `hidden_states` returns them."""
        return hidden_states(self.teacher, batch, self.packing)

    def loss(
        self, policy: Policy, states: Tensor, teacher_states: Tensor, batch: Rollout, count: int, denominator: int
    ) -> tuple[Tensor, Tensor]:
        """The divergence summed over a batch's `count` tokens, divided by `denominator`; and the sum alone, detached.

        `states` and `teacher_states` are the hidden states of policy and teacher. Both results are scalars.
        """
        policy = replace(policy, vocabulary=self.teacher.vocabulary)
        mask = None if self.packing else batch.mask
        kind: dict[str, Any] = {"kind": self.settings.kind, "beta": self.settings.beta}
        shared: dict[str, Any] = {"temperature": self.temperature, "memory_budget": self.memory_budget}
        if self.top_k is None:

            def divergence(*teacher: Tensor, softcap: float | None, logits_dtype: Any, **head: Any) -> DivergenceLoss:
                head |= {"softcap": softcap or 0}  # None would be the policy's
                head = {f"teacher_{name}": x for name, x in head.items()}
                sizes = {"num_tokens": count, "denominator": denominator}
                return policy.apply_head(
                    linear_divergence, states, *teacher, mask=mask, **sizes, **head, **kind, **shared
                )

            result = self.teacher.apply_head(divergence, teacher_states)
            return result.loss, result.per_token.sum()
        if mask is not None:
            states, teacher_states = states[mask], teacher_states[mask]
        ids, teacher_logprobs = self.teacher.apply_head(self._likeliest, teacher_states, self.top_k)
        logprobs = policy.apply_head(linear_gathered_logprobs, states, ids, **shared)
        total = topk_divergence(logprobs, teacher_logprobs, tail=True, **kind).sum()
        return total / denominator, total.detach()

    @torch.no_grad()
    def logprobs(self, teacher_states: Tensor, batch: Rollout) -> Tensor:
        """The teacher's log-probability of a batch's tokens, summed, a scalar."""
        stats = self.teacher.apply_head(
            linear_token_logprobs,
            teacher_states,
            batch.targets[batch.mask] if self.packing else batch.targets,
            mask=None if self.packing else batch.mask,
            temperature=self.temperature,
            memory_budget=self.memory_budget,
        )
        return stats.logprobs.sum()

    @torch.no_grad()
    def _likeliest(
        self, states: Tensor, weight: Tensor, count: int, *, bias: Tensor | None, logits_dtype: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """The teacher's `count` likeliest ids of each token, int64, and their log-probabilities, float32: (N, count).

        `states` (N, H) are its hidden states; a tile of logits is formed at a time.
        """
        device, dtype = states.device, self.teacher.dtype
        wide = checks.float32_logits(logits_dtype, dtype)
        # Cast once: autocast would cast the head anew for every tile. The budget of the tiles leaves this copy out.
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        budget = parse_budget(self.memory_budget) or default_budget(device.type, device.index)
        size = min(TILE_BYTES.get(device.type, TILE_BYTES["cpu"]), budget)
        rows = max(size // (LOGIT_BYTES * len(weight) + ENTRY_BYTES * (count + 1)), 1)
        ids, logprobs = [], []
        for part in states.split(rows):
            tile = Tile(len(part), len(weight))
            held = Workspace(Head(part.to(dtype), weight, bias), tile, False, forced(), float32_logits=wide)
            logits = held.logits(held.hidden(slice(None)), slice(0, len(weight)))
            ids.append(logits.topk(count).indices)  # neither scale nor softcap nor temperature changes the order
            logprobs.append(gathered_logprobs(logits, ids[-1], temperature=self.temperature, **options))
        return torch.cat(ids), torch.cat(logprobs)


def check_sampled(rollout: Rollout, teacher: Policy | None, policy: Policy) -> None:
    """Raise UserError if the policy sampled one of its padding entries, and its teacher (if any) has no such entry."""
    size = (teacher or policy).vocabulary
    if size < policy.vocabulary and (largest := int(rollout.input_ids.max())) >= size:
        raise UserError(
            f"distillation.teacher: the policy sampled the id {largest}, which its tokenizer lacks, and the teacher's "
            f"vocabulary ends at {size - 1}"
        )
