"""Tables that several commands' configs share: model, machine, optimizer, teacher, and what a run writes."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from fastrl.planning.budget import parse_budget
from fastrl.training.config.settings import Location, Section

ModelLocation = Annotated[str | None, Location(hub=True)]
FileLocation = Annotated[Path, Location()]


def _budget(text: str | None) -> str | None:
    try:
        parse_budget(text, "the size")
    except TypeError as error:  # pydantic would not report it
        raise ValueError(str(error)) from error
    return text


Budget = Annotated[str | None, AfterValidator(_budget)]


class ModelConfig(Section):
    """The model that is trained, or that completions are drawn from."""

    displaces: ClassVar = {"path": ("config", "tokenizer"), "config": ("path",)}

    path: ModelLocation = None
    """A model with weights: a local directory or a hub name. If it holds peft's adapters, they are merged into their
    base."""
    config: Annotated[Path | None, Location()] = None
    """A model's config.json, to start from random weights. It needs tokenizer."""
    tokenizer: ModelLocation = None
    """A tokenizer's directory or hub name. The default is model.path."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the matrix products. Weights and the optimizer's moments are float32 in any case, because bfloat16
    would round away an update of size 1e-6."""
    logits_dtype: Literal["float32"] | None = None
    """For bfloat16 products: "float32" keeps the head's logits in float32, in every loss and log-probability, a
    teacher's too. The default rounds them to bfloat16. The logits that completions are drawn from do not change."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Set it only for models whose code you have read."""
    attention: str | None = None
    """The attn_implementation of transformers, such as "sdpa" or "flash_attention_2". The default is that of
    transformers."""
    gradient_checkpointing: bool = False
    """Store only the input of each layer, and compute the layer again in the backward. It takes less memory and a third
    more time."""
    lora_rank: int | None = Field(None, ge=1)
    """Train low-rank adapters of this rank instead of the weights (needs peft). The head stays frozen, so the losses
    skip its gradient. The reference of a KL term is the model without its adapters."""
    lora_alpha: int = Field(16, ge=1)
    """The adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: str | list[str] = "all-linear"
    """Which modules get adapters: a list of names, or "all-linear" for all linear modules but the head."""

    def conflicts(self) -> dict[str, Any]:
        return {
            "expected exactly one of path (a model with weights) and config (a model from scratch)": (
                (self.path is None) == (self.config is None)
            ),
            "config starts a model from scratch, so tokenizer must name a tokenizer directory": (
                self.config is not None and self.tokenizer is None
            ),
        }


class MachineConfig(Section):
    """The device and the random seed."""

    seed: int = Field(0, ge=0, lt=2**32)
    """The seed of all of the run's random numbers."""
    device: str = "auto"
    """cpu, cuda, cuda:1 and so on. auto takes cuda if there is a GPU."""
    threads: int | None = Field(None, ge=1, le=1024)
    """The number of torch's CPU threads. The default is torch's, the number of cores. With 1 a tiny model is as fast,
    and on a machine that has other work far faster. Numbers repeat exactly only for the same number of threads."""


def _number_or_all(value: Any) -> Any:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if number == "all" or (type(number) is int and number >= 1):
        return number
    raise ValueError('expected "all" or an integer of at least 1')


class MicroBatchConfig(MachineConfig):
    """How an update is computed."""

    micro_batch_tokens: int | None = Field(None, ge=1)
    """The most tokens in one forward and backward, prompts included, and padding unless packed. A sequence, a pair or a
    prompt's responses that are longer are computed on their own. Gradients are added up over an update. The default is
    all of an update, or as many halves of it as make the expected memory fit what the device has free at the start;
    --resume keeps it. Where memory runs out, it is halved, once."""
    shard: Annotated[int | Literal["all"], BeforeValidator(_number_or_all)] = "all"
    """On several processes: over how many of them a copy of the model's parameters, their gradients and moments lies; a
    divisor of their number. With "all" there is one copy, with 1 each process has a whole one."""


class BudgetConfig(MicroBatchConfig):
    """How an update with a loss over the vocabulary is computed."""

    packing: bool = False
    """Concatenate the sequences of a micro-batch, without padding. It is fast with model.attention =
    "flash_attention_2"; other kinds compute a dense mask of the whole row."""
    memory_budget: Budget = None
    """The most temporary memory of the fused losses, such as "512MiB". The default is a sixteenth of the device's
    memory."""


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    lr: float | None = Field(None, gt=0)
    """The learning rate after the warm-up. The default follows the command, as in papers on models of 7 billion
    parameters and more: 1e-6 for train (DAPO, arXiv:2503.14476), 1e-5 for sft (Llama 3, arXiv:2407.21783) and
    reward-model (Llama 2, arXiv:2307.09288), 5e-7 for dpo (Zephyr, arXiv:2310.16944); with model.lora_rank ten times as
    much (Schulman et al., LoRA Without Regret, 2025)."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Gradients are scaled down to this global L2 norm. inf switches that off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or a linear or cosine decay to 0 at the end of the run."""
    warmup_updates: int = Field(0, ge=0)
    """The number of optimizer updates over which the learning rate rises linearly: the first has 1 / warmup_updates of
    it."""

    @property
    def peak(self) -> float:
        """The learning rate after the warm-up, in a command's config."""
        assert self.lr is not None  # `with_learning_rate`
        return self.lr


#: Command -> its peak learning rate for all weights, and for adapters, which take about ten times as much.
_LEARNING_RATES = {"train": (1e-6, 1e-5), "sft": (1e-5, 1e-4), "dpo": (5e-7, 5e-6), "reward-model": (1e-5, 1e-4)}


def with_learning_rate(config: Any, command: str) -> None:
    """Set a command's default in its config, so that what the run saves says what it used."""
    optimizer = config.optimizer
    if optimizer.lr is None:
        lr = _LEARNING_RATES[command][config.model.lora_rank is not None]
        object.__setattr__(config, "optimizer", optimizer.model_copy(update={"lr": lr}))


class TeacherConfig(Section):
    """Distillation: a frozen teacher, and the divergence between its next tokens and the policy's."""

    teacher: Annotated[str, Location(hub=True)]
    """The teacher: the directory or hub name of a model with the same tokenizer."""
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """The divergence between the teacher and the trained model. forward_kl: KL(teacher || model); reverse_kl: KL(model
    || teacher); jsd: the generalised Jensen-Shannon divergence (GKD)."""
    beta: float = Field(0.5, gt=0, lt=1)
    """For jsd: the teacher's weight in the mixture that both are compared with."""
    coef: float = Field(1.0, gt=0)
    """The weight of the divergence."""


class LoggingConfig(Section):
    """What a run writes."""

    output_dir: FileLocation = Path("runs/default")
    """The folder for metrics, plots, the report and checkpoints."""
    overwrite: bool = False
    """Replace the run in output_dir, which is otherwise an error. A replaced run with checkpoints is moved to the
    folder's replaced/, and the one that was there before is deleted."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: str | None = None
    """A project of Weights & Biases to log to (needs wandb, and an account or WANDB_MODE=offline)."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Save a checkpoint every this many steps. One is also saved at the end, after an error, and at SIGTERM, SIGHUP or
    Ctrl-C."""
    checkpoint_minutes: float | None = Field(30.0, gt=0)
    """Save a checkpoint also after a step that ends this many minutes or more after the last checkpoint."""
    keep_checkpoints: int = Field(3, ge=0)
    """Keep this many of the newest checkpoints and remove older ones. 0 keeps all."""


def replaced_inputs(logging: LoggingConfig, inputs: dict[str, str | None]) -> dict[str, Any]:
    """Conflicts: the inputs of a run, by field, that lie in its output directory."""
    output = logging.output_dir.absolute()
    return {
        f"{field}: {source} lies in logging.output_dir, whose contents this run may replace": (
            source is not None and Path(source).is_relative_to(output)  # a hub's name never is
        )
        for field, source in inputs.items()
    }


#: A file in the folder of every run.
MARK = ".fastrl-run"
