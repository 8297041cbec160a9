"""The configuration of ``fastrl train``: pydantic models, read from a TOML file and overridden on the command line.

The command line (``--section.field value``) is generated from the same models that check the file, so there is one list
of fields, one set of checks and one form of error for both.
"""

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import UserError
from .objective_config import ObjectiveConfig, without

# Dotted fields that hold a path, or a path with ":function". In the file they are relative to the file, on the command
# line to the working directory.
PATH_FIELDS = (
    "model.path",
    "model.config",
    "model.tokenizer",
    "data.path",
    "data.eval_path",
    "reward.function",
    "evaluation.metrics",
    "logging.output_dir",
)
# These may also be a model hub's "owner/name", so they are only resolved if something lies at the resolved path.
HUB_FIELDS = ("model.path", "model.tokenizer")


class Section(BaseModel):
    """A table of the config file. Unknown fields are errors; the docstring under a field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """The policy that is trained."""

    path: str | None = None
    """A local directory or a hub name, with weights."""
    config: Path | None = None
    """A model config.json: start from scratch with random weights (then tokenizer is needed)."""
    tokenizer: str | None = None
    """A tokenizer directory or hub name; the default is model.path."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the matrix products. Weights stay float32: a step of 1e-6 would be rounded away in bfloat16."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.config is None):
            raise ValueError("expected exactly one of path (a model with weights) and config (a model from scratch)")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("config starts a model from scratch, so tokenizer must name a tokenizer directory")
        return self


class DataConfig(Section):
    """What is asked."""

    path: Path
    """Training prompts: JSONL with a field "prompt" and any other columns, which go to the reward function."""
    eval_path: Path | None = None
    """Held-out prompts of the same form; without it there is no evaluation."""


class RewardConfig(Section):
    """What pays."""

    function: str
    """path/to/file.py:function with the signature (prompts, completions, **columns) -> list[float | None]."""


class AdvantagesConfig(Section):
    """From rewards to advantages, relative to the prompt's group."""

    scale: Literal["group", "batch", "none"] = "group"
    """Divide the centred rewards by the group's standard deviation, the batch's, or not at all (Dr.GRPO, GPG)."""


class RolloutConfig(Section):
    """How completions are sampled."""

    prompts_per_step: int = Field(128, ge=1)
    """Prompts a step."""
    num_generations: int = Field(8, ge=2)
    """Completions a prompt (the group)."""
    max_new_tokens: int = Field(256, ge=1)
    """The longest completion, EOS included."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Sampling temperature; training uses the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest entries with at least this probability together; 1 = off. Which entries top_p, top_k
    and min_p leave for each token is recorded, and training normalises over the same ones."""
    top_k: int = Field(0, ge=0)
    """Sample from this many of the likeliest entries; 0 = off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from entries at least this likely, relative to the likeliest; 0 = off."""
    batch_size: int | None = Field(None, ge=1)
    """Sequences generated at a time; the default is all of them."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    lr: float = Field(1e-6, gt=0, allow_inf_nan=False)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global L2 norm; inf switches it off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: constant, or a decay to 0 over the run."""
    warmup_updates: int = Field(0, ge=0)
    """Optimizer updates of linear warm-up from 0."""


class TrainingConfig(Section):
    """The loop."""

    steps: int = Field(100, ge=1)
    """Rollouts in the run."""
    epochs: int = Field(1, ge=1)
    """Passes over each rollout."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates a pass: the rollout is shuffled and split into this many."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Sequences in one forward and backward, gradients accumulate over a minibatch; the default is all of it."""
    seed: int = Field(0, ge=0)
    """Seeds Python, NumPy and torch."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto takes cuda where there is one."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch, whose default is the number of cores. A tiny model is as fast with 1, and far faster on a
    machine that has other work; numbers repeat exactly only for the same number of threads."""
    max_skipped_updates: int = Field(10, ge=1)
    """An update whose loss or gradient is not finite is skipped: weights, optimizer and schedule stay as they are, and
    its batch is saved under output_dir/skipped. After this many in a row the run stops."""


class EvaluationConfig(Section):
    """Greedy decoding on held-out prompts."""

    every: int | None = Field(None, ge=1)
    """Evaluate (greedy decoding on data.eval_path) every this many steps, besides once at the end."""
    metrics: list[str] = []
    """More functions like reward.function; each one's mean is reported as eval/<its name>."""


class LoggingConfig(Section):
    """What a run leaves behind."""

    output_dir: Path = Path("runs/default")
    """Metrics, plots and checkpoints go here."""
    overwrite: bool = False
    """Replace the run that output_dir holds; without it that is an error."""
    tensorboard: bool = True
    """Write TensorBoard event files too."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Save a checkpoint every this many steps, besides once at the end and at SIGTERM or Ctrl-C."""
    keep_checkpoints: int | None = Field(None, ge=1)
    """Keep only this many of the newest checkpoints; the default is all of them."""


class Config(Section):
    """Everything a run depends on."""

    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    objective: ObjectiveConfig
    advantages: AdvantagesConfig = AdvantagesConfig()
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _evaluation_has_data(self) -> "Config":
        if self.data.eval_path is None and (self.evaluation.every or self.evaluation.metrics):
            raise ValueError("evaluation is configured but data.eval_path names no prompts to evaluate on")
        return self


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read and check a TOML file; ``overrides`` is a tree of the same shape whose values win.

    Raises UserError naming the file and line of a syntax error, or every field that is wrong.
    """
    overrides = overrides or {}
    tree = _read_toml(path)
    _map_paths(tree, lambda field, text: _resolve(field, text, path.parent))
    _map_paths(overrides, lambda field, text: _resolve(field, text, Path.cwd()))
    objective = tree.get("objective")
    if isinstance(objective, dict) and "presets" in objective:
        objective["presets"] = without(objective["presets"], overrides.get("objective", {}))
    try:
        return Config.model_validate(_merge(tree, overrides))
    except ValidationError as error:
        raise UserError("\n".join(_describe(error, path, overrides))) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:  # its message ends in "(at line 3, column 8)"
        raise UserError(f"{path}: not valid TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the config: {error}") from error


def _map_paths(tree: dict[str, Any], change: Callable[[str, str], str]) -> None:
    for field in PATH_FIELDS:
        section, name = field.split(".")
        table = tree.get(section)
        if not isinstance(table, dict):
            continue
        value = table.get(name)
        if isinstance(value, str):
            table[name] = change(field, value)
        elif isinstance(value, list):
            table[name] = [change(field, item) if isinstance(item, str) else item for item in value]


def _resolve(field: str, text: str, base: Path) -> str:
    resolved = base / Path(text).expanduser()
    if field in HUB_FIELDS and not resolved.exists() and not text.startswith((".", "/", "~")):
        return text
    return os.path.normpath(resolved.absolute())


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged


def _describe(error: ValidationError, path: Path, overrides: dict[str, Any]) -> list[str]:
    lines = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        given: Any = overrides  # what the command line says about this field
        for part in item["loc"]:
            given = given.get(part) if isinstance(given, dict) else None
        if isinstance(given, dict) and given:  # several fields that do not go together
            options = " ".join(f"--{field}.{name}".replace("--.", "--") for name in given)
            where = f"{path} with {options}: {field}".removesuffix(": ")
        else:
            where = f"{path}: {field}".removesuffix(": ") if given is None or given == {} else f"--{field}"
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown field (value {item['input']!r})")
        elif item["type"] == "missing":
            lines.append(f"{where}: required, but not given")
        else:
            came = "" if isinstance(item["input"], BaseModel | dict) else f", got {item['input']!r}"
            lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{came}")
    return lines
