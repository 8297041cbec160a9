"""The configs of `fastrl sft`, `dpo`, `reward-model` and `sample`. Nothing here imports transformers."""

import inspect
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, create_model, model_validator

from fastrl import PREFERENCES, Preference
from fastrl.training.config.data import HeldOutConfig, PromptsConfig
from fastrl.training.config.presets import PresetConfig, Presets
from fastrl.training.config.sampling import RewardConfig, RolloutConfig
from fastrl.training.config.sections import (
    BudgetConfig,
    FileLocation,
    LoggingConfig,
    MachineConfig,
    MicroBatchConfig,
    ModelConfig,
    OptimizerConfig,
    TeacherConfig,
    replaced_inputs,
    with_learning_rate,
)
from fastrl.training.config.settings import Location, Section


class TrainingConfig(MicroBatchConfig):
    """Epochs, updates and memory."""

    epochs: int = Field(1, ge=1)
    """The number of passes over the data, each in a new random order."""
    batch_size: int = Field(32, ge=1)
    """Rows of the data per update."""
    max_length: int | None = Field(None, ge=2)
    """The most tokens of a prompt and its completion together. A longer row is an error. The default is the model's
    context."""


class TokenTrainingConfig(TrainingConfig, BudgetConfig):
    """Epochs, updates and memory."""


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
    def _with_learning_rate(self) -> "StageConfig":
        with_learning_rate(self, self.command)
        return self

    def conflicts(self) -> dict[str, Any]:
        return replaced_inputs(self.logging, {"model.path": self.model.path})


class TokenStageConfig(StageConfig):
    """Everything that a stage with a loss over the vocabulary depends on."""

    training: TokenTrainingConfig = TokenTrainingConfig()


# --- fastrl sft -------------------------------------------------------------------------------------------------------


class DistillationConfig(TeacherConfig):
    """Distillation on the data: the model learns the next-token distributions of a frozen teacher."""

    coef: float = Field(1.0, gt=0, le=1)
    """The loss is coef times the divergence, plus 1 - coef times the cross-entropy."""


class SFTConfig(TokenStageConfig):
    """Everything that supervised fine-tuning depends on."""

    command = "sft"

    distillation: DistillationConfig | None = None

    def conflicts(self) -> dict[str, Any]:
        teacher = None if self.distillation is None else self.distillation.teacher
        return super().conflicts() | replaced_inputs(self.logging, {"distillation.teacher": teacher})


# --- fastrl dpo -------------------------------------------------------------------------------------------------------


class _LossBase(PresetConfig):
    """The loss: a preset of fastrl.PREFERENCES and its options. An option that is not given has the preset's value."""

    # gamma and tau change a loss: only those have them that name them.
    known = Presets(PREFERENCES, Preference, without=("formula", "gamma", "tau"))

    name: str = "dpo"
    """The preset, in any case."""

    @model_validator(mode="before")
    @classmethod
    def _with_beta(cls, table: Any) -> Any:
        # Every preset has a beta; the checkpoints of runs from before there was more than one hold theirs.
        preset = cls.known.functions.get(str(table.get("name", "dpo")).lower()) if isinstance(table, dict) else None
        if preset is None or table.get("beta") is not None:
            return table
        return table | {"beta": inspect.signature(preset).parameters["beta"].default}


LossConfig = create_model("LossConfig", __base__=_LossBase, __doc__=_LossBase.__doc__, **_LossBase.known.fields())


class DPOConfig(TokenStageConfig):
    """Everything that preference optimisation depends on."""

    command = "dpo"

    loss: LossConfig = LossConfig()


# --- fastrl reward-model ----------------------------------------------------------------------------------------------


class RewardDataConfig(DataConfig):
    """The training data."""

    reference_path: Annotated[Path | None, Location()] = None
    """Rows {"prompt", "completion"} whose mean score shall be 0. The default is the training responses."""


class RewardModelConfig(StageConfig):
    """Everything that a reward model depends on."""

    command = "reward-model"

    data: RewardDataConfig

    def conflicts(self) -> dict[str, Any]:
        lora, logits = self.model.lora_rank, self.model.logits_dtype
        return super().conflicts() | {
            "model.lora_rank: a reward model trains all its weights; leave that out": lora is not None,
            "model.logits_dtype: a reward model has no logits over a vocabulary; leave that out": logits is not None,
        }


# --- fastrl sample ----------------------------------------------------------------------------------------------------


class SampleDataConfig(PromptsConfig):
    """The prompts. A row's other columns go to the reward functions."""


class OutputConfig(Section):
    """The output file."""

    path: FileLocation = Path("runs/samples.jsonl")
    """The JSONL file to write. Until it is complete its name ends in ".unfinished"."""
    overwrite: bool = False
    """Replace the file if it exists, which is otherwise an error."""
    best: int | None = Field(None, ge=1)
    """Write only this many completions of each prompt, those with the highest rewards. Equal texts count once.
    Completions that were cut off or have no reward are left out, because a model trained on them would learn to stop
    there. The default writes all completions."""


class SampleConfig(Section):
    """Everything that sampling depends on."""

    model: ModelConfig
    data: SampleDataConfig
    reward: RewardConfig = RewardConfig.model_construct()
    rollout: RolloutConfig = RolloutConfig()
    training: MachineConfig = MachineConfig()
    output: OutputConfig = OutputConfig()

    def conflicts(self) -> dict[str, Any]:
        best, count, path = self.output.best, self.rollout.num_generations, self.output.path
        unused = {
            "reward.steps": self.reward.steps is not None,
            "reward.overlong_cache": self.reward.overlong_cache is not None,
            "reward.overlong_filter": self.reward.overlong_filter,
            "rollout.dynamic_sampling": self.rollout.dynamic_sampling,
            "rollout.keep_routing": self.rollout.keep_routing,
            "rollout.ahead": self.rollout.ahead > 0,
            "rollout.sleep": self.rollout.sleep,
            "model.lora_rank": self.model.lora_rank is not None,
            "model.gradient_checkpointing": self.model.gradient_checkpointing,
            "model.logits_dtype": self.model.logits_dtype is not None,
        }
        return {
            f"output.best: expected at most rollout.num_generations = {count}, got {best}": (best or 0) > count,
            "output.best: the best are those with the highest rewards; it needs a table [reward]": (
                best is not None and "reward" not in self.model_fields_set
            ),
            f"output.path: {path} is data.path too": path.absolute() == Path(self.data.path).absolute(),
            # What is there is replaced by the finished file.
            f"output.path: expected a file, got a directory, a link or a device, {path}": (
                path.is_symlink() or (path.exists() and not path.is_file())
            ),
        } | {
            f"{name}: means nothing here, where nothing is trained; leave it out": is_set
            for name, is_set in unused.items()
        }
