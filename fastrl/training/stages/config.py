"""The tables that the configs of the stages share."""

from pydantic import Field, model_validator

from fastrl.training.common.data_config import HeldOutConfig
from fastrl.training.common.sections import (
    Budget,
    LoggingConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    check_input,
)
from fastrl.training.common.settings import Section


class TrainingConfig(MachineConfig):
    """The loop."""

    epochs: int = Field(1, ge=1)
    """Passes over the data, each in a new random order."""
    batch_size: int = Field(32, ge=1)
    """Rows of the data per update."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Rows in one forward and backward, gradients accumulate over the update; the default is all of them."""
    max_length: int | None = Field(None, ge=2)
    """The most tokens of a prompt and its completion together; a longer row is an error. The default is the model's
    context."""


class TokenTrainingConfig(TrainingConfig):
    """The loop, with a loss over the vocabulary."""

    packing: bool = False
    """Concatenate a micro-batch's sequences without padding."""
    memory_budget: Budget = None
    """The most temporary memory of the fused loss, such as "512MiB"; default: a sixteenth of the device's."""


class DataConfig(HeldOutConfig):
    """The training data. Over held-out rows there are the loss, and what is logged beside it, after each epoch."""


class StageConfig(Section):
    """Everything a training stage depends on."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _keeps_its_input(self) -> "StageConfig":
        check_input("model.path", self.model.path, self.logging)
        return self


class TokenStageConfig(StageConfig):
    """Everything that a stage with a loss over the vocabulary depends on."""

    training: TokenTrainingConfig = TokenTrainingConfig()
