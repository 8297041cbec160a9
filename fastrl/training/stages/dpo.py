"""`fastrl dpo`: direct preference optimisation on {"prompt", "chosen": string, "rejected": string} rows.

The reference is the policy that the run starts from. Its log-probabilities of the data are computed once, before the
first update, so no second model is kept; checkpoints hold them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from tqdm import tqdm

from fastrl import linear_dpo_loss
from fastrl.base.errors import UserError
from fastrl.training.common.policy import Policy, reference_of
from fastrl.training.common.rollout import hidden_states, rollout_logprobs
from fastrl.training.common.settings import Section
from fastrl.training.stages.config import TokenStageConfig, TokenTrainingConfig
from fastrl.training.stages.loop import PolicyStage, command, train_policy
from fastrl.training.stages.rows import Reader, Tokens, as_rollout


class LossConfig(Section):
    """The loss."""

    beta: float = Field(0.1, gt=0)
    """How strongly the policy is held to the reference."""


class Config(TokenStageConfig):
    """Everything that direct preference optimisation depends on."""

    loss: LossConfig = LossConfig()


@dataclass(frozen=True)
class Pair:
    """Two completions of a prompt, and the reference's log-probability of each."""

    chosen: Tokens
    rejected: Tokens
    reference: tuple[float, float] = (0.0, 0.0)


class DPO(PolicyStage[Pair]):
    """-log sigmoid of beta times how much more the policy prefers the chosen completion than the reference does."""

    shown = ("loss", "accuracy", "margin", "eval/loss", "eval/accuracy", "lr", "grad_norm")

    def __init__(self, policy: Policy, training: TokenTrainingConfig, beta: float) -> None:
        super().__init__(policy, training)
        self.beta = beta

    def part(self, rows: Sequence[Pair], total: int) -> tuple[Tensor, dict[str, float]]:
        """The loss summed over the pairs, divided by the number of the update's pairs."""
        policy, batch = self.policy, as_rollout(self.policy, both(rows))
        layout = batch.loss_arguments(self.packing)
        targets = layout["targets"]
        reference = [row.reference[0] for row in rows] + [row.reference[1] for row in rows]
        with policy.computing():
            result = linear_dpo_loss(
                hidden_states(policy, batch, self.packing),
                policy.weight,
                targets,
                torch.ones_like(targets, dtype=torch.bool) if self.packing else layout["mask"],
                torch.tensor(reference, device=policy.device),
                beta=self.beta,
                cu_seqlens=layout.get("cu_seqlens"),
                memory_budget=self.memory_budget,
                **policy.head,
            )
        numbers = {
            "accuracy": float((result.margins > 0).sum()) / total,
            "margin": float(result.margins.sum()) / total,
            "chosen_reward": float(result.chosen_rewards.sum()) / total,
            "rejected_reward": float(result.rejected_rewards.sum()) / total,
            "tokens": float(batch.mask.sum()),
        }
        return result.loss * (len(rows) / total), numbers

    def before(self, rows: Sequence[Pair], size: int) -> Tensor:
        """The current policy's log-probabilities of chosen and rejected, without its adapters: (pairs, 2)."""
        reference = reference_of(self.policy) if self.policy.has_adapters else self.policy
        logprobs = [torch.empty(0, 2)]
        for first in tqdm(range(0, len(rows), size), desc="reference", unit="batch", disable=None if rows else True):
            batch = rows[first : first + size]
            rollout = as_rollout(self.policy, both(batch))
            sums = rollout_logprobs(reference, rollout, 1.0, None, self.packing, self.memory_budget).sum(1)
            logprobs.append(sums.view(2, -1).T.cpu())
        return torch.cat(logprobs)

    def attach(self, rows: list[Pair], before: Tensor) -> list[Pair]:
        """The pairs with the reference's log-probabilities."""
        return [
            replace(row, reference=(chosen, rejected))
            for row, (chosen, rejected) in zip(rows, before.tolist(), strict=True)
        ]


def both(rows: Sequence[Pair]) -> list[Tokens]:
    """2B sequences in the loss's order: first the chosen, then the rejected in the same order."""
    return [row.chosen for row in rows] + [row.rejected for row in rows]


def parse(reader: Reader, row: dict[str, Any], where: str) -> Pair:
    """Parse a row of the dataset; its other fields are ignored."""
    pair = Pair(reader.tokens(row, "chosen", where), reader.tokens(row, "rejected", where))
    if pair.chosen == pair.rejected:
        raise UserError(f"{where}: chosen and rejected: expected completions that differ, got {row['chosen']!r} twice")
    return pair


def train(config: Config, resume: bool = False) -> dict[str, Any]:
    """Run the stage, or the rest of it; returns the run's summary.

    Raises UserError before the first update for input that cannot be used.
    """

    def make(policy: Policy) -> DPO:
        return DPO(policy, config.training, config.loss.beta)

    return train_policy(make, parse, both, config, "dpo", resume, per_row=2)


def main(argv: list[str]) -> int:
    """`fastrl dpo CONFIG.toml [--resume] [--section.field value ...]`. Raises UserError for what the user can fix."""
    return command(Config, "dpo", "Train a language model on pairs of completions.", train, argv)
