"""The tables of sampling, which `fastrl train` and `fastrl sample` share: how completions are drawn and rewarded."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fastrl.training.config.sections import Budget, ModelLocation
from fastrl.training.config.settings import Location, Section


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

    def conflicts(self) -> dict[str, Any]:
        itself = self.engine == "transformers"
        return {
            'url: required for engine = "vllm", but not given; start a server (docs/engines.md) and name it': (
                self.engine == "vllm" and self.url is None
            ),
            'url: is for engine = "vllm" or an engine of your own, got engine = "transformers"': (
                itself and self.url is not None
            ),
            "api_key_file: is for a server, which url names": self.api_key_file is not None and self.url is None,
            "ahead: needs an engine besides the policy, got transformers": itself and self.ahead,
            "sleep: needs an engine besides the policy, got transformers": itself and self.sleep,
            "sleep: an engine that draws ahead has no time to sleep; leave one of them out": self.ahead and self.sleep,
            "top_k: vLLM records what top_p and min_p leave only where top_k bounds its size; set it (1000 is hardly "
            "felt beside top_p = 0.95), or leave top_p and min_p out": (
                self.engine == "vllm" and self.truncates and self.top_k == 0
            ),
            "stop: an empty text would end every completion": any(not text for text in self.stop),
        }

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

    def conflicts(self) -> dict[str, Any]:
        limits, count = {"timeout", "memory_limit"} & self.model_fields_set, len(self.functions)
        return {
            "function: required without a reward model, but not given": count == 0 and self.model is None,
            "timeout, memory_limit: only workers can be ended; set workers too": (
                limits and "workers" not in self.model_fields_set
            ),
            f"weights: expected one for each of {count} functions, got {self.weights}": (
                self.weights is not None and len(self.weights) != count
            ),
        }
