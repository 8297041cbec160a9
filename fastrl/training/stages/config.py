"""The tables that the configs of the stages share."""

from typing import ClassVar

from pydantic import Field, model_validator

from fastrl.training.common.data_config import HeldOutConfig
from fastrl.training.common.sections import (
    Budget,
    LoggingConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    check_input,
    with_learning_rate,
)
from fastrl.training.common.settings import Section


class TrainingConfig(MachineConfig):
    """Epochs, updates and memory."""

    epochs: int = Field(1, ge=1)
    """The number of passes over the data, each in a new random order."""
    batch_size: int = Field(32, ge=1)
    """Rows of the data per update."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Rows in one forward and backward. Gradients are added up over an update. The default is all rows of the update,
    or as many halves of them as make the expected memory fit what the device has free at the start; --resume keeps
    it."""
    max_length: int | None = Field(None, ge=2)
    """The most tokens of a prompt and its completion together. A longer row is an error. The default is the model's
    context."""


class TokenTrainingConfig(TrainingConfig):
    """Epochs, updates and memory."""

    packing: bool = False
    """Concatenate the sequences of a micro-batch, without padding."""
    memory_budget: Budget = None
    """The most temporary memory of the fused loss, such as "512MiB". The default is a sixteenth of the device's
    memory."""


class DataConfig(HeldOutConfig):
    """The training data. On held-out rows the loss and the metrics beside it are computed before the first update, as
    step 0, and after each epoch."""


class StageConfig(Section):
    """Everything a training stage depends on."""

    command: ClassVar[str]

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _whole(self) -> "StageConfig":
        with_learning_rate(self, self.command)
        check_input("model.path", self.model.path, self.logging)
        return self


class TokenStageConfig(StageConfig):
    """Everything that a stage with a loss over the vocabulary depends on."""

    training: TokenTrainingConfig = TokenTrainingConfig()
