"""`fastrl sft`: supervised fine-tuning on {"prompt": string or messages, "completion": string} rows.

The loss is the mean cross-entropy of an update's completion tokens, EOS included; or with a teacher also, or only,
the mean divergence from its distributions of these tokens. On the model's own samples `fastrl train` distils.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fastrl import linear_cross_entropy
from fastrl.objectives.row_local import TOKEN
from fastrl.training.batches.distillation import Distillation
from fastrl.training.batches.loss_calls import LossCall
from fastrl.training.batches.rollout import Rollout, as_rollout, hidden_states
from fastrl.training.config.stages import SFTConfig, TokenTrainingConfig
from fastrl.training.models.policy import Policy
from fastrl.training.models.teacher import check_teacher, load_teacher, teacher_width
from fastrl.training.parallel.world import World
from fastrl.training.stages.loop import finish, policy_loop, run_stage
from fastrl.training.stages.rows import Reader, Tokens
from fastrl.training.stages.stage import PolicyStage


class SFT(PolicyStage[Tokens]):
    """Cross-entropy on completions, and with a teacher the divergence from it there."""

    shown = ("loss", "divergence", "eval/loss", "eval/divergence", "lr", "grad_norm")

    def __init__(self, policy: Policy, training: TokenTrainingConfig, distillation: Distillation | None = None) -> None:
        super().__init__(policy, training)
        self.distillation = distillation

    @classmethod
    def of(cls, config: SFTConfig, policy: Policy, world: World) -> "SFT":
        """The stage that the config describes, with its teacher."""
        settings, training = config.distillation, config.training
        if settings is None:
            return cls(policy, training)
        packing, budget = training.packing, training.memory_budget
        teacher = load_teacher(settings, config.model, policy, packing, world)
        return cls(policy, training, Distillation(teacher, settings, packing=packing, memory_budget=budget))

    @staticmethod
    def parse(reader: Reader, row: dict[str, Any], where: str) -> Tokens:
        """Parse a row of the dataset; its other fields are ignored."""
        return reader.tokens(row, "completion", where)

    @staticmethod
    def completions(rows: Sequence[Tokens]) -> list[Tokens]:
        """The rows themselves."""
        return list(rows)

    @staticmethod
    def calls(config: SFTConfig, call: LossCall) -> list[LossCall]:
        """The cross-entropy, the divergence from a teacher, or both."""
        settings, call = config.distillation, call._replace(scope=TOKEN)
        if settings is None:
            return [call]
        divergence = call._replace(what="the divergence", teacher=teacher_width(settings, config.model))
        return [divergence] if settings.coef == 1 else [call, divergence]

    @property
    def models(self) -> list[Any]:
        """The model and its teacher."""
        return [self.model, *([self.distillation.teacher.model] if self.distillation else [])]

    def total(self, rows: Sequence[Tokens]) -> int:
        """The number of valid tokens."""
        return sum(len(row.completion) for row in rows)

    def part(self, rows: Sequence[Tokens], total: int) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        """The loss summed over the rows, divided by the number of the update's tokens."""
        policy, batch = self.policy, as_rollout(self.policy, rows).to(self.policy.device)
        count = self.total(rows)
        states = hidden_states(policy, batch, self.packing)
        if self.distillation is None:
            return self._cross_entropy(states, batch, count, total), {"tokens": count}
        coef, teacher_states = self.distillation.settings.coef, self.distillation.states(batch)
        divergence, in_all = self.distillation.loss(policy, states, teacher_states, batch, count, total)
        numbers: dict[str, float | Tensor] = {"tokens": count, "divergence": in_all / total}
        if coef == 1:
            return divergence, numbers
        loss = self._cross_entropy(states, batch, count, total)
        numbers["cross_entropy"] = loss.detach()
        return coef * divergence + (1 - coef) * loss, numbers

    def _cross_entropy(self, states: Tensor, batch: Rollout, count: int, total: int) -> Tensor:
        """The cross-entropy of a batch's `count` tokens, summed and divided by `total`."""
        targets = batch.targets[batch.mask] if self.packing else batch.targets.masked_fill(~batch.mask, -100)
        sizes = {"denominator": total, "num_tokens": count, "memory_budget": self.memory_budget}
        return self.policy.apply_head(linear_cross_entropy, states, targets, **sizes)


def train(config: SFTConfig, resume: bool = False) -> dict[str, Any]:
    """Run the stage, or the rest of it; returns the run's summary.

    Raises UserError before the first update for input that cannot be used.
    """
    if config.distillation is not None:
        check_teacher(config.distillation, config.model)
    return run_stage(config, resume, partial(policy_loop, SFT))


def main(config: SFTConfig, resume: bool) -> int:
    """`fastrl sft`: train, print what came out, and return the exit status."""
    return finish(config, train(config, resume), "fastrl train TRAIN_CONFIG.toml --model.path")
