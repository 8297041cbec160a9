"""`fastrl sft`: supervised fine-tuning on {"prompt": string or messages, "completion": string} rows.

The loss is the mean cross-entropy of an update's completion tokens, EOS included.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastrl import REINFORCE, linear_cross_entropy
from fastrl.training.common.rollout import hidden_states
from fastrl.training.stages.config import TokenStageConfig
from fastrl.training.stages.loop import PolicyStage, command, train_policy
from fastrl.training.stages.rows import Reader, Tokens, as_rollout


class Config(TokenStageConfig):
    """Everything that supervised fine-tuning depends on."""


class SFT(PolicyStage[Tokens]):
    """Cross-entropy on completions."""

    shown = ("loss", "eval/loss", "lr", "grad_norm")

    def weight(self, row: Tokens) -> int:
        """The number of valid tokens."""
        return len(row.completion)

    def part(self, rows: Sequence[Tokens], total: int) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy summed over the rows, divided by the number of the update's tokens."""
        policy, batch = self.policy, as_rollout(self.policy, rows)
        targets = batch.targets[batch.mask] if self.packing else batch.targets.masked_fill(~batch.mask, -100)
        count = sum(map(self.weight, rows))
        with policy.computing():
            loss = linear_cross_entropy(
                hidden_states(policy, batch, self.packing),
                policy.weight,
                targets,
                denominator=total,
                num_tokens=count,
                memory_budget=self.memory_budget,
                **policy.head,
            )
        return loss, {"tokens": count}


def parse(reader: Reader, row: dict[str, Any], where: str) -> Tokens:
    """Parse a row of the dataset; its other fields are ignored."""
    return reader.tokens(row, "completion", where)


def train(config: Config, resume: bool = False) -> dict[str, Any]:
    """Run the stage, or the rest of it; returns the run's summary.

    Raises UserError before the first update for input that cannot be used.
    """
    return train_policy(
        lambda policy: SFT(policy, config.training), parse, list, config, "sft", resume, objective=REINFORCE()
    )


def main(argv: list[str]) -> int:
    """`fastrl sft CONFIG.toml [--resume] [--section.field value ...]`. Raises UserError for what the user can fix."""
    return command(Config, "sft", "Fine-tune a language model on prompts and completions.", train, argv)
