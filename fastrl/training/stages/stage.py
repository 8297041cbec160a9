"""What a stage trains, and with which loss."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastrl.models.patching import is_sharded
from fastrl.training.batches.loss_calls import LossCall
from fastrl.training.batches.micro_batches import MicroBatches, Shape
from fastrl.training.config.stages import TokenTrainingConfig
from fastrl.training.engines.weights import base_of, merged_weights
from fastrl.training.models.policy import Policy
from fastrl.training.parallel.shard import gathered_state, whole_on_main
from fastrl.training.parallel.world import World
from fastrl.training.stages.rows import Reader, Row, Tokens


class Stage(ABC, Generic[Row]):
    """What is trained, and with which loss; `model` is on its device and in evaluation mode."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    has_adapters = False  # the model is peft's wrapper, and only its adapters are trained
    shown: Sequence[str]  # the metrics in a line on the terminal

    @abstractmethod
    def sequences(self, row: Row) -> list[list[int]]:
        """The row's prompt with each of its completions, as tokens."""

    def shape(self, row: Row) -> Shape:
        """What the row takes in a micro-batch."""
        lengths = list(map(len, self.sequences(row)))
        return Shape(len(lengths), max(lengths), sum(lengths))

    @property
    def models(self) -> list[Any]:
        """Every model that reads the rows."""
        return [self.model]

    def total(self, rows: Sequence[Row]) -> Any:
        """What an update's loss is averaged over: the number of its rows, or of what they hold."""
        return len(rows)

    @abstractmethod
    def part(self, rows: Sequence[Row], total: Any) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        """The rows' part of the loss over all rows of an update, of which `total` is given, and of its metrics.

        Parts add up to the loss and the metrics of the whole update, however its rows are split. A metric is a number,
        or a detached scalar, for which the host does not wait.
        """

    def before(self, rows: Sequence[Row], micro_batches: MicroBatches) -> Tensor | None:
        """What only the model before the first update can compute for each row, (rows, k). Checkpoints hold it."""
        return None

    def attach(self, rows: list[Row], before: Tensor) -> list[Row]:
        """The rows with their results from `before`."""
        raise NotImplementedError

    def complete(self, world: World) -> None:
        """Compute what the model lacks, once it is trained."""

    def saved(self, world: World) -> Mapping[str, tuple[Any, Any]]:
        """By folder in the model's directory, what is written there: a model, and its weights if they are not in it.

        Weights that all ranks hold are on rank 0.
        """
        return {"": (self.model, gathered_state(self.model, world) if is_sharded(self.model) else None)}


class PolicyStage(Stage[Row]):
    """A stage that trains a policy, with a loss over the vocabulary."""

    def __init__(self, policy: Policy, training: TokenTrainingConfig) -> None:
        self.policy, self.model, self.tokenizer = policy, policy.model, policy.tokenizer
        self.has_adapters = policy.has_adapters
        self.packing, self.memory_budget = training.packing, training.memory_budget

    @classmethod
    @abstractmethod
    def of(cls, config: Any, policy: Policy, world: World) -> "PolicyStage[Row]":
        """The stage that a command's config describes."""

    @staticmethod
    @abstractmethod
    def parse(reader: Reader, row: dict[str, Any], where: str) -> Any:
        """Parse a row of the dataset; its other fields are ignored."""

    @staticmethod
    @abstractmethod
    def completions(rows: Sequence[Any]) -> list[Tokens]:
        """The completions of the rows, of each equally many, with their prompts."""

    @staticmethod
    def calls(config: Any, call: LossCall) -> list[LossCall]:
        """The calls of the losses over the vocabulary for the rows of this one."""
        return [call]

    def sequences(self, row: Row) -> list[list[int]]:
        """The prompt with each completion."""
        return [tokens.all for tokens in self.completions([row])]

    def saved(self, world: World) -> Mapping[str, tuple[Any, Any]]:
        """As of every stage, with adapters merged into the model's weights; and the adapters themselves.

        Adapters alone need the model that they were made for, which may move, or be a random one that is gone.
        """
        if not self.has_adapters:
            return super().saved(world)
        merged = whole_on_main(merged_weights(self.policy), world)
        adapters = gathered_state(self.model, world, trained=True)
        return {"adapters": (self.model, adapters), "": (base_of(self.policy), merged)}
