"""`fastrl dpo`: preference optimisation on {"prompt", "chosen": string, "rejected": string} rows, by any preference.

    [loss]
    name = "simpo"                 # any key of fastrl.PREFERENCES, in any case; the default is "dpo"
    gamma = 0.5                    # an option of that preset

The reference is the policy that the run starts from. Its log-probabilities of the data are computed once, before the
first update, so no second model is kept; checkpoints hold them. A preference without a reference needs none of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from fastrl import Preference, linear_preference_loss
from fastrl.base.errors import UserError
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import as_rollout, hidden_states, rollout_logprobs
from fastrl.training.config.stages import DPOConfig, TokenTrainingConfig
from fastrl.training.models.policy import Policy, reference_of
from fastrl.training.parallel.world import World
from fastrl.training.stages.loop import finish, policy_loop, run_stage
from fastrl.training.stages.rows import Reader, Tokens
from fastrl.training.stages.stage import PolicyStage


@dataclass(frozen=True)
class Pair:
    """Two completions of a prompt, and the reference's log-probability of each."""

    chosen: Tokens
    rejected: Tokens
    reference: tuple[float, float] = (0.0, 0.0)


class PreferenceStage(PolicyStage[Pair]):
    """A preference of the policy, or of how it has changed since the run began, for the chosen completion."""

    shown = ("loss", "accuracy", "margin", "eval/loss", "eval/accuracy", "lr", "grad_norm")

    def __init__(self, policy: Policy, training: TokenTrainingConfig, objective: Preference) -> None:
        super().__init__(policy, training)
        self.objective = objective

    @classmethod
    def of(cls, config: DPOConfig, policy: Policy, world: World) -> "PreferenceStage":
        """The stage that the config describes."""
        return cls(policy, config.training, config.loss.build())

    @staticmethod
    def parse(reader: Reader, row: dict[str, Any], where: str) -> Pair:
        """Parse a row of the dataset; its other fields are ignored."""
        pair = Pair(reader.tokens(row, "chosen", where), reader.tokens(row, "rejected", where))
        if pair.chosen == pair.rejected:
            raise UserError(
                f"{where}: chosen and rejected: expected completions that differ, got {row['chosen']!r} twice"
            )
        return pair

    @staticmethod
    def completions(rows: Sequence[Pair]) -> list[Tokens]:
        """2B sequences in the loss's order: first the chosen, then the rejected in the same order."""
        return [row.chosen for row in rows] + [row.rejected for row in rows]

    def total(self, rows: Sequence[Pair]) -> tuple[int, int]:
        """The number of pairs, and of the chosen completions' tokens, over which a likelihood term is averaged."""
        return len(rows), sum(len(row.chosen.completion) for row in rows)

    def part(self, rows: Sequence[Pair], total: tuple[int, int]) -> tuple[Tensor, dict[str, float]]:
        """The loss summed over the pairs, divided by the number of the update's pairs."""
        pairs, likely = total
        policy, batch = self.policy, as_rollout(self.policy, self.completions(rows)).to(self.policy.device)
        layout = batch.loss_arguments(self.packing)
        targets = layout["targets"]
        reference = None
        if self.objective.reference:
            reference = torch.tensor([row.reference for row in rows], device=policy.device).T.flatten()
        result = policy.apply_head(
            linear_preference_loss,
            hidden_states(policy, batch, self.packing),
            targets,
            torch.ones_like(targets, dtype=torch.bool) if self.packing else layout["mask"],
            reference,
            objective=self.objective,
            denominator=pairs,
            nll_denominator=likely,
            cu_seqlens=layout.get("cu_seqlens"),
            memory_budget=self.memory_budget,
        )
        numbers = {
            "accuracy": float((result.margins > 0).sum()) / pairs,
            "margin": float(result.margins.sum()) / pairs,
            "chosen_reward": float(result.chosen_rewards.sum()) / pairs,
            "rejected_reward": float(result.rejected_rewards.sum()) / pairs,
            "tokens": float(batch.mask.sum()),
        }
        if result.nll is not None:
            numbers["nll"] = float(result.nll)
        return result.loss, numbers

    def before(self, rows: Sequence[Pair], micro_batches: MicroBatches) -> Tensor | None:
        """The current policy's log-probabilities of chosen and rejected, without its adapters: (pairs, 2)."""
        if not self.objective.reference:
            return None
        reference = reference_of(self.policy) if self.policy.has_adapters else self.policy
        logprobs, world = torch.zeros(len(rows), 2), micro_batches.world
        whole = MicroBatches(None, self.packing)

        def fill() -> None:
            parts = world.deal(micro_batches.cut(list(map(self.shape, rows))))
            for part, weight in tqdm(parts, desc="reference", unit="batch", disable=None if rows else True):
                rollout = as_rollout(self.policy, self.completions([rows[row] for row in part]))
                sums = rollout_logprobs(reference, rollout, 1.0, whole, self.memory_budget).sum(1)
                if weight:
                    logprobs[part] = sums.view(2, -1).T

        micro_batches.fitted(fill)
        return world.total(logprobs)

    def attach(self, rows: list[Pair], before: Tensor) -> list[Pair]:
        """The pairs with the reference's log-probabilities."""
        return [
            replace(row, reference=(chosen, rejected))
            for row, (chosen, rejected) in zip(rows, before.tolist(), strict=True)
        ]


def train(config: DPOConfig, resume: bool = False) -> dict[str, Any]:
    """Run the stage, or the rest of it; returns the run's summary.

    Raises UserError before the first update for input that cannot be used.
    """
    return run_stage(config, resume, partial(policy_loop, PreferenceStage))


def main(config: DPOConfig, resume: bool) -> int:
    """`fastrl dpo`: train, print what came out, and return the exit status."""
    return finish(config, train(config, resume), "fastrl sample SAMPLE_CONFIG.toml --model.path")
