"""Tables that several commands' configs share: model, machine, optimizer, sampling, reward, and what a run writes."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from fastrl.planning.budget import parse_budget
from fastrl.training.common.settings import Location, Section

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
    """The policy that is trained."""

    path: ModelLocation = None
    """A local directory or a hub name, with weights, or with peft's adapters, which are merged into their base."""
    config: Annotated[Path | None, Location()] = None
    """A model config.json: start from scratch with random weights (then tokenizer is needed)."""
    tokenizer: ModelLocation = None
    """A tokenizer directory or hub name; the default is model.path."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the matrix products. Weights and the optimizer's moments stay float32: a step of 1e-6 would be
    rounded away in bfloat16."""
    logits_dtype: Literal["float32"] | None = None
    """With bfloat16 products: "float32" keeps the float32 sums of the head's product as logits, in every loss and
    log-probability, of a teacher too; the default rounds them to bfloat16. Sampling has the model's own logits."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""
    attention: str | None = None
    """transformers' attn_implementation, such as "sdpa" or "flash_attention_2"; the default is transformers' own."""
    gradient_checkpointing: bool = False
    """Keep only a layer's input, and compute the layer again in the backward: less memory, a third more time."""
    lora_rank: int | None = Field(None, ge=1)
    """Train low-rank adapters of this rank (needs peft) in place of the weights. The head stays frozen, so the losses
    skip its gradient, and the reference of a KL term is the model without its adapters."""
    lora_alpha: int = Field(16, ge=1)
    """The adapters' scale is lora_alpha / lora_rank."""
    lora_targets: str | list[str] = "all-linear"
    """Which modules get adapters: names, or all linear ones but the head."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.config is None):
            raise ValueError("expected exactly one of path (a model with weights) and config (a model from scratch)")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("config starts a model from scratch, so tokenizer must name a tokenizer directory")
        return self


class MachineConfig(Section):
    """Where a command runs, and its randomness."""

    seed: int = Field(0, ge=0, lt=2**32)
    """Seeds Python, NumPy and torch."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto takes cuda if there is one."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of torch, whose default is the number of cores. A tiny model is as fast with 1, and far faster on a
    machine that has other work; numbers repeat exactly only for the same number of threads."""


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Gradients are scaled down to this global L2 norm; inf switches it off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: constant, or a decay to 0 over the run."""
    warmup_updates: int = Field(0, ge=0)
    """Optimizer updates of linear warm-up from 0."""


class RolloutConfig(Section):
    """How completions are sampled."""

    engine: Annotated[str, Location(dotted=True)] = "transformers"
    """What samples: transformers (its generate, in this process), vllm, sglang, or path/to/file.py:function, which is
    called with the policy and these settings and returns an engine."""
    url: str | None = None
    """The engine's server, such as "http://127.0.0.1:8000". Without it vllm runs in this process."""
    api_key_file: Annotated[Path | None, Location()] = None
    """A file with the key that the server was started with (--api-key), and nothing else. What a run writes names the
    file, and nothing that is in it."""
    timeout: float = Field(600.0, gt=0)
    """Seconds to wait for an engine that does not answer, before the run ends; what is saved can be resumed."""
    ahead: int = Field(0, ge=0, le=1)
    """1: the engine draws the next step's completions while the policy is updated, so they are one step old."""
    sleep: bool = False
    """The engine frees its memory while the policy is updated, where both use one GPU."""
    engine_options: dict[str, Any] = Field({})
    """For vllm in this process: arguments of vllm.LLM."""
    stop: list[str] = Field([])
    """Texts that end a completion, or with tools the policy's turn, besides EOS. They are part of it."""
    tools: Annotated[str | None, Location()] = None
    """path/to/file.py:function with the signature (prompts, completions, **columns), which answers turns of the policy:
    for each completion that ended a list with None, or with what follows it before the policy goes on: a text, or for a
    chat prompt a list of messages. Answers are not trained on."""
    tool_workers: int = Field(1, ge=0, le=1024)
    """Processes that call the function, with one completion at a time. 0: this process calls it once per turn with all
    completions, without a limit of time or memory, so a call that never ends holds up the run for ever."""
    tool_timeout: float = Field(10.0, gt=0)
    """Seconds that a tool's call may take. One that takes longer is killed, and its completion ends there; as does one
    whose call runs out of memory, or ends its process."""
    tool_memory_limit: Budget = None
    """The address space of a tool's worker and of each process that it starts; the default is no limit."""
    max_turns: int = Field(8, ge=1)
    """With tools: the most turns of the policy in a completion. The last one is not answered."""
    prompts_per_step: int = Field(128, ge=1)
    """Prompts per step."""
    num_generations: int = Field(8, ge=1)
    """Completions per prompt (the group)."""
    max_new_tokens: int = Field(256, ge=1)
    """The longest completion, EOS and tools' answers included."""
    temperature: float = Field(1.0, gt=0)
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
    dynamic_sampling: bool = False
    """DAPO's: groups whose rewards are all equal are left out, and other prompts sampled in their place. Compared is
    what the reward functions earned together, before reward.overlong_cache takes its price of length."""
    dynamic_sampling_reward: str | None = None
    """Compare the rewards of this function alone, such as "exact"; the others differ in every group, or nearly so."""
    max_refills: int = Field(3, ge=0)
    """How often dynamic sampling may do so in a step; after that the step uses the groups it has."""
    keep_routing: bool = False
    """Record which experts of a mixture each token took, and take the same in training."""

    @model_validator(mode="after")
    def _has_engine(self) -> "RolloutConfig":
        served = self.engine in ("vllm", "sglang")
        if self.engine == "sglang" and self.url is None:
            raise ValueError('url: required for engine = "sglang", but not given')
        if self.url is not None and not served:
            raise ValueError(f'url: is for engine = "vllm" or "sglang", got engine = {self.engine!r}')
        if self.api_key_file is not None and self.url is None:
            raise ValueError("api_key_file: is for a server, which url names")
        if self.engine_options and (self.engine != "vllm" or self.url is not None):
            raise ValueError('engine_options: is for engine = "vllm" without a url')
        if self.engine == "transformers" and (self.ahead or self.sleep):
            raise ValueError(
                f"{'ahead' if self.ahead else 'sleep'}: needs an engine besides the policy, got transformers"
            )
        if self.ahead and self.sleep:
            raise ValueError("sleep: an engine that draws ahead has no time to sleep; leave one of them out")
        if served and self.truncates and self.top_k == 0:
            raise ValueError(
                "top_k: vLLM and SGLang record what top_p and min_p leave only where top_k bounds its size; "
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
    """The reward: functions and a reward model, summed with their weights, and a length penalty."""

    function: Annotated[str | list[str], Location(dotted=True)] = Field([])
    """path/to/file.py:function with the signature (prompts, completions, **columns) -> list[float | None] (async too),
    or a built-in one: fastrl.rewards.exact, regex, length, format or math; or several. A completion for which all
    return None is left out of its group."""
    arguments: dict[str, dict[str, Any]] = Field({})
    """Keyword arguments by the function's name, such as [reward.arguments.regex] pattern = "..."; for reward.steps and
    evaluation.metrics too."""
    workers: int = Field(0, ge=0, le=1024)
    """Processes that call the functions, those of reward.steps and evaluation.metrics too, with one completion at a
    time. 0: this process calls each once with all completions, without a limit of time or memory."""
    timeout: float = Field(10.0, gt=0)
    """Seconds that a worker's call may take, thus a completion. One that takes longer is killed and gets the lowest
    reward of its function in the batch, at most 0; as does one that runs out of memory, or ends its process."""
    memory_limit: Budget = None
    """The address space of a worker and of each process that it starts, such as "1GiB"; the default is no limit."""
    weights: list[float] | None = None
    """One per function; the default is 1 for each."""
    model: ModelLocation = None
    """A reward model: the directory or hub name of a sequence classifier with one label."""
    model_weight: float = 1.0
    """Its weight beside the functions'."""
    steps: Annotated[str | None, Location(dotted=True)] = None
    """A function that rewards steps, for advantages.estimator = "process": for each completion a list of pairs (end,
    reward), end the number of characters up to the end of the step."""
    overlong_cache: int | None = Field(None, ge=0)
    """DAPO's soft punishment: the reward falls by up to 1 over this many tokens before rollout.max_new_tokens."""
    overlong_filter: bool = False
    """DAPO's filter: no token of a completion that was cut off at rollout.max_new_tokens enters the loss. The number of
    completions by which the seq-mean aggregations divide still counts it."""

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
    """The teacher: the directory or hub name of a model whose tokenizer is the policy's."""
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """forward_kl: KL(teacher || policy); reverse_kl: KL(policy || teacher); jsd: the generalised Jensen-Shannon
    divergence (GKD)."""
    beta: float = Field(0.5, gt=0, lt=1)
    """For jsd: the teacher's weight in the mixture that both are compared with."""
    coef: float = Field(1.0, gt=0)
    """The weight of the divergence."""


class LoggingConfig(Section):
    """What a run writes."""

    output_dir: FileLocation = Path("runs/default")
    """Metrics, plots, the report and checkpoints go here."""
    overwrite: bool = False
    """Replace the run that output_dir holds; without it that is an error. A run with checkpoints is kept in its folder
    replaced/, in place of the one replaced before it."""
    tensorboard: bool = True
    """Write TensorBoard event files too."""
    wandb: str | None = None
    """Log to this project of Weights & Biases too (needs wandb, and an account or WANDB_MODE=offline)."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Save a checkpoint every this many steps, besides once at the end, after an error, and at SIGTERM, SIGHUP or
    Ctrl-C. Those of other steps are removed when there is a newer one."""
    checkpoint_minutes: float | None = Field(30.0, gt=0)
    """Save one too after the step at which this many minutes have passed since the last."""
    keep_checkpoints: int | None = Field(None, ge=1)
    """Keep only this many of the newest checkpoints; the default is all those of checkpoint_every, and the newest."""


def check_input(field: str, source: str | None, logging: LoggingConfig) -> None:
    """Raise ValueError if an input of a run is in its output directory, where it may be replaced."""
    output = logging.output_dir.absolute()
    if source is not None and Path(source).is_relative_to(output):  # a hub's name never is
        raise ValueError(f"{field}: {source} lies in logging.output_dir, whose contents this run may replace")
