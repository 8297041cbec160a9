"""`fastrl sft`: supervised fine-tuning on {"prompt": string or messages, "completion": string} rows.

The loss is the mean cross-entropy of an update's completion tokens, EOS included.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastrl import REINFORCE, linear_cross_entropy
from fastrl.training.common.memory_needs import LossCall, check_budget
from fastrl.training.common.policy import Policy, load_policy, max_positions
from fastrl.training.common.rollout import hidden_states
from fastrl.training.stages.config import StageConfig, TokenTrainingConfig
from fastrl.training.stages.loop import PolicyStage, command, fit, prepared
from fastrl.training.stages.rows import Reader, Tokens, as_rollout, largest_call, smallest


class Config(StageConfig):
    """Everything that supervised fine-tuning depends on."""

    training: TokenTrainingConfig = TokenTrainingConfig()


class SFT(PolicyStage[Tokens]):
    """Cross-entropy on completions."""

    shown = ("loss", "eval/loss", "lr", "grad_norm")

    def __init__(self, policy: Policy, training: TokenTrainingConfig) -> None:
        super().__init__(policy)
        self.packing, self.memory_budget = training.packing, training.memory_budget

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


def _largest_call(training: TokenTrainingConfig, lengths: list[int]) -> LossCall:
    size = training.micro_batch_size or training.batch_size
    return largest_call("the loss", lengths, size, training.packing, objective=REINFORCE())


def train(config: Config, resume: bool = False) -> dict[str, Any]:
    """Run the stage, or the rest of it; returns the run's summary.

    Raises UserError before the first update for input that cannot be used.
    """
    with prepared(config, "sft", resume) as (device, checkpoint):
        training = config.training
        check_budget(training, config.model, device, [_largest_call(training, [1])])
        policy = load_policy(config.model, device, packing=training.packing)
        reader = Reader(policy.tokenizer, smallest(training.max_length, max_positions(policy.model)))
        rows = reader.load(config.data.path, parse)
        held_out = reader.load(config.data.eval_path, parse) if config.data.eval_path else []
        lengths = [len(row.completion) for row in rows + held_out]
        check_budget(training, config.model, device, [_largest_call(training, lengths)], policy)
        return fit(SFT(policy, training), rows, held_out, config, "sft", checkpoint)


def main(argv: list[str]) -> int:
    """`fastrl sft CONFIG.toml [--resume] [--section.field value ...]`. Raises UserError for what the user can fix."""
    return command(Config, "sft", "Fine-tune a language model on prompts and completions.", train, argv)
