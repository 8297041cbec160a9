"""Tables that several commands' configs share: model, machine, optimizer, sampling, reward, and what a run writes."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

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

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.config is None):
            raise ValueError("expected exactly one of path (a model with weights) and config (a model from scratch)")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("config starts a model from scratch, so tokenizer must name a tokenizer directory")
        return self


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


#: Command -> its peak learning rate for all weights, and for adapters, which take about ten times as much.
LEARNING_RATES = {"train": (1e-6, 1e-5), "sft": (1e-5, 1e-4), "dpo": (5e-7, 5e-6), "reward-model": (1e-5, 1e-4)}


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


def with_learning_rate(config: Any, command: str) -> None:
    """Set a command's default in its config, so that what the run saves says what it used."""
    optimizer = config.optimizer
    if optimizer.lr is None:
        lr = LEARNING_RATES[command][config.model.lora_rank is not None]
        object.__setattr__(config, "optimizer", optimizer.model_copy(update={"lr": lr}))


class RolloutConfig(Section):
    """How completions are sampled."""

    engine: Annotated[str, Location(dotted=True)] = "transformers"
    """What draws completions: transformers (generate, in this process), vllm (a server), or path/to/file.py:function,
    which is called with the policy and this table and returns an engine."""
    url: str | None = None
    """The address of the engine's server, such as "http://127.0.0.1:8000"."""
    api_key_file: Annotated[Path | None, Location()] = None
    """A file that holds the server's key (--api-key) and nothing else. Logs, checkpoints and saved configs have the
    file's name, never the key."""
    timeout: float = Field(600.0, gt=0)
    """Seconds to wait for an engine that does not answer. After that the run saves what it has and ends, and can be
    resumed."""
    ahead: int = Field(0, ge=0, le=1)
    """1: the engine draws the next step's completions while the policy is updated, with weights that are one step old.
    It needs an objective or a [rollout_correction] that corrects for that."""
    sleep: bool = False
    """The engine frees its memory while the policy is updated, for an engine and a trainer on one GPU."""
    stop: list[str] = Field([])
    """Texts that end a completion, or with tools the policy's turn, as EOS does. They are part of the completion."""
    tools: Annotated[str | None, Location()] = None
    """path/to/file.py:function with the signature `(prompts, completions, **columns)`. It is called when the policy
    has ended a turn, and returns for each completion what follows: None (the completion ends), a text, or for a chat
    prompt a list of messages. What it returns is not trained on."""
    tool_workers: int = Field(1, ge=0, le=1024)
    """How many processes call the tool, each with one completion at a time. 0: the trainer's own process calls it once
    per turn with all completions, without limits of time and memory, so a call that never returns blocks the run."""
    tool_timeout: float = Field(10.0, gt=0)
    """Seconds that a tool's call in a worker may take. A call that takes longer, runs out of memory or ends its process
    is killed, and its completion ends there."""
    tool_memory_limit: Budget = None
    """The address space of a tool's worker and of each process that it starts. The default is no limit."""
    max_turns: int = Field(8, ge=1)
    """With tools: the most turns of the policy in a completion. The last one is not answered."""
    prompts_per_step: int = Field(128, ge=1)
    """The number of prompts per step."""
    num_generations: int = Field(8, ge=1)
    """The number of completions per prompt, which form a group."""
    max_new_tokens: int = Field(256, ge=1)
    """The most tokens of a completion, EOS and the answers of tools included."""
    temperature: float = Field(1.0, gt=0)
    """The sampling temperature. Training uses the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest entries whose probabilities add up to at least this. 1 switches it off. The entries
    that top_p, top_k and min_p leave for each token are recorded, and training normalises over the same ones."""
    top_k: int = Field(0, ge=0)
    """Sample from this many of the likeliest entries. 0 switches it off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from the entries whose probability is at least this share of the likeliest one's. 0 switches it off."""
    batch_size: int | None = Field(None, ge=1)
    """For transformers: how many completions are drawn at a time, which changes them by rounding only. The default is
    all, or as many halves of them as are expected to fit what the device has free then. Where memory runs out, it is
    halved, once."""
    dynamic_sampling: bool = False
    """DAPO's: leave out groups whose rewards are all equal, and sample other prompts in their place. The compared
    reward is the sum over functions and reward model, before reward.overlong_cache lowers it."""
    dynamic_sampling_reward: str | None = None
    """With dynamic_sampling: compare the rewards of this function alone, such as "exact", if those of the others differ
    in nearly every group."""
    max_refills: int = Field(3, ge=0)
    """The most times that a step samples other prompts for dynamic_sampling. After that it uses the groups that it
    has."""
    keep_routing: bool = False
    """For mixtures of experts: record which experts each token took, and route it to the same ones in training."""

    @model_validator(mode="after")
    def _has_engine(self) -> "RolloutConfig":
        if self.engine == "vllm" and self.url is None:
            raise ValueError(
                'url: required for engine = "vllm", but not given; start a server (docs/engines.md) and name it'
            )
        if self.engine == "transformers" and self.url is not None:
            raise ValueError('url: is for engine = "vllm" or an engine of your own, got engine = "transformers"')
        if self.api_key_file is not None and self.url is None:
            raise ValueError("api_key_file: is for a server, which url names")
        if self.engine == "transformers" and (self.ahead or self.sleep):
            raise ValueError(
                f"{'ahead' if self.ahead else 'sleep'}: needs an engine besides the policy, got transformers"
            )
        if self.ahead and self.sleep:
            raise ValueError("sleep: an engine that draws ahead has no time to sleep; leave one of them out")
        if self.engine == "vllm" and self.truncates and self.top_k == 0:
            raise ValueError(
                "top_k: vLLM records what top_p and min_p leave only where top_k bounds its size; "
                "set it (1000 is hardly felt beside top_p = 0.95), or leave top_p and min_p out"
            )
        if any(not text for text in self.stop):
            raise ValueError("stop: an empty text would end every completion")
        return self

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class RewardConfig(Section):
    """The reward: the weighted sum of functions and of a reward model, less a price of length."""

    function: Annotated[str | list[str], Location(dotted=True)] = Field([])
    """One or several reward functions. Each is path/to/file.py:function with the signature
    `(prompts, completions, **columns) -> list[float | None]`, async if you like, or a built-in one:
    fastrl.rewards.exact, regex, length, format or math. A completion for which all of them return None is left out of
    its group."""
    arguments: dict[str, dict[str, Any]] = Field({})
    """Keyword arguments for each function, by its name, such as [reward.arguments.regex] pattern = "...". They hold for
    reward.steps and evaluation.metrics too."""
    workers: int = Field(0, ge=0, le=1024)
    """How many processes call the functions (those of reward.steps and evaluation.metrics too), each with one
    completion at a time. 0: the trainer's own process calls each function once with all completions, without limits of
    time and memory."""
    timeout: float = Field(10.0, gt=0)
    """Seconds that a call in a worker may take. A call that takes longer, runs out of memory or ends its process is
    killed, and its completion gets the lowest reward of that function in the batch, at most 0."""
    memory_limit: Budget = None
    """The address space of a worker and of each process that it starts, such as "1GiB". The default is no limit."""
    weights: list[float] | None = None
    """The weight of each function. The default is 1."""
    model: ModelLocation = None
    """A reward model: the directory or hub name of a sequence classifier with one label."""
    model_weight: float = 1.0
    """The weight of the reward model."""
    steps: Annotated[str | None, Location(dotted=True)] = None
    """A function that rewards steps, for advantages.estimator = "process". It returns a list of pairs (end, reward) for
    each completion, where end is the number of the completion's characters up to the end of the step."""
    overlong_cache: int | None = Field(None, ge=0)
    """DAPO's soft punishment of length: the reward falls, by up to 1, over this many tokens before
    rollout.max_new_tokens."""
    overlong_filter: bool = False
    """DAPO's filter: no token of a completion that was cut off at rollout.max_new_tokens enters the loss. The seq-mean
    aggregations still count the completion in their denominator."""

    @property
    def functions(self) -> list[str]:
        """All outcome reward functions."""
        return [self.function] if isinstance(self.function, str) else self.function

    @model_validator(mode="after")
    def _weighted(self) -> "RewardConfig":
        if not self.functions and self.model is None:
            raise ValueError("function: required without a reward model, but not given")
        if "workers" not in self.model_fields_set and {"timeout", "memory_limit"} & self.model_fields_set:
            raise ValueError("timeout, memory_limit: only workers can be ended; set workers too")
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(f"weights: expected one for each of {len(self.functions)} functions, got {self.weights}")
        return self


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


def check_input(field: str, source: str | None, logging: LoggingConfig) -> None:
    """Raise ValueError if an input of a run is in its output directory, where it may be replaced."""
    output = logging.output_dir.absolute()
    if source is not None and Path(source).is_relative_to(output):  # a hub's name never is
        raise ValueError(f"{field}: {source} lies in logging.output_dir, whose contents this run may replace")


#: A file in the folder of every run.
MARK = ".fastrl-run"
