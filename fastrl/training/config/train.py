"""The configuration of `fastrl train`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fastrl import Objective, RolloutCorrection
from fastrl.rewards.names import name_of
from fastrl.training.config.data import HeldOutConfig, PromptsConfig
from fastrl.training.config.objective import ObjectiveConfig, reads_sampler
from fastrl.training.config.sections import (
    BudgetConfig,
    FileLocation,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    TeacherConfig,
    check_input,
    with_learning_rate,
)
from fastrl.training.config.sections import LoggingConfig as CommonLogging
from fastrl.training.config.settings import Location, Section


class DataConfig(HeldOutConfig, PromptsConfig):
    """The prompts. A row's other columns go to the reward function."""

    streaming: bool = False
    """Read rows of data.path as they are needed and hold few of them, for data larger than memory."""
    shuffle_buffer: int = Field(10_000, ge=1)
    """For streaming: each prompt is drawn from this many of the next rows. 1 keeps the dataset's order."""


class AdvantagesConfig(Section):
    """How rewards become advantages."""

    estimator: Literal[
        "group", "rloo", "maxrl", "opo", "pass_at_k", "decoupled", "batch", "process", "optimal_token_baseline", "gae"
    ] = "group"
    """group: the reward relative to the prompt's group (GRPO). rloo: less the mean of the group's others. maxrl:
    relative to the group's mean (MaxRL). opo: less a mean weighted by length (OPO). pass_at_k: what a completion adds
    to the best of k. decoupled: each reward function normalised by itself (GDPO). batch: rewards to go, whitened over
    the batch (REINFORCE++). process: step rewards, normalised in the group (GRPO). optimal_token_baseline: a baseline
    at each token, weighted by squared gradients. gae: with the values of a critic (PPO)."""
    scale: Literal["group", "batch", "none"] = "group"
    """For group, process and decoupled: divide by the standard deviation of the group or of the batch, or not at all
    (Dr. GRPO, GPG)."""
    ddof: int = Field(0, ge=0, le=1)
    """For group, process and decoupled: 0 for the population's standard deviation, 1 for the sample's."""
    k: int | None = Field(None, ge=2)
    """For pass_at_k: the k. The default is the number of the prompt's completions."""
    gamma: float = Field(1.0, ge=0, le=1)
    """For batch and gae: the discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """For gae: the decay lambda of generalised advantage estimation."""
    lam_alpha: float | None = Field(None, gt=0)
    """For gae: in place of lam, a decay for each completion of 1 - 1 / (lam_alpha * its tokens). VAPO has lam_alpha =
    0.05."""
    lam_critic: float | None = Field(None, ge=0, le=1)
    """For gae: the decay in the critic's targets. The default is the decay of the advantages; VAPO has 1."""
    whiten: bool = True
    """For gae: shift and scale the batch's token advantages to mean 0 and standard deviation 1."""

    @property
    def grouped(self) -> bool:
        """Whether a completion is compared with the prompt's others."""
        return self.estimator not in ("batch", "gae")

    @property
    def per_token(self) -> bool:
        """Whether a completion's tokens get different advantages."""
        return self.estimator in ("batch", "process", "optimal_token_baseline", "gae")

    @model_validator(mode="after")
    def _read(self) -> "AdvantagesConfig":
        for name, estimator in (("k", "pass_at_k"), ("lam_alpha", "gae"), ("lam_critic", "gae")):
            if getattr(self, name) is not None and self.estimator != estimator:
                raise ValueError(f'{name}: is for estimator = "{estimator}", got {self.estimator!r}')
        return self


class CriticConfig(Section):
    """The value function of advantages.estimator = "gae": a linear head on a decoder."""

    shared: bool = False
    """Put the head on the policy's own decoder, instead of on a copy of it."""
    lr: float | None = Field(None, gt=0)
    """The learning rate of the critic's weights. The default is optimizer.lr."""
    clip: float | None = Field(0.2, gt=0)
    """How far a value may move from the rollout's before its loss is clipped."""
    coef: float = Field(0.5, gt=0)
    """The weight of the value loss beside the policy's loss."""


class KLConfig(Section):
    """A KL term, in place of the preset's own."""

    place: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss (GRPO). reward: subtracted from each token's reward (PPO)."""
    kind: Literal["k1", "k2", "k3", "k3-unbiased", "k1+", "k3+", "forward", "old-new", "old-new-k2"] = "k3"
    """The estimator. In the reward it is k1, k2 or k3. old-new and old-new-k2 compare with the policy before the step,
    all others with the reference: the policy at the start of the run, or with sync_every a later one."""
    coef: float = Field(0.04, ge=0)
    """The weight beta of the term. With adaptive it is the value at the start."""
    ratio: Literal["token", "objective"] = "token"
    """For k3-unbiased: the ratio that corrects it, each token's own or the objective's."""
    adaptive: Literal["schulman", "rlhf"] | None = None
    """Adapt beta after each step. schulman: halve it if the KL is below target / 1.5, and double it if the KL is above
    1.5 times the target. rlhf: change it in proportion to KL / target - 1."""
    target: float | None = Field(None, gt=0)
    """For adaptive: the KL to keep, in nats per token for schulman, per response for rlhf."""
    horizon: int = Field(10_000, ge=1)
    """For rlhf: a step with n responses changes beta by at most 20 % times n / horizon."""
    sync_every: int | None = Field(None, ge=1)
    """Replace the reference by the current policy every this many steps."""

    @model_validator(mode="after")
    def _consistent(self) -> "KLConfig":
        if (self.adaptive is None) != (self.target is None):
            raise ValueError("adaptive and target go together")
        if self.adaptive is not None and self.coef == 0:
            raise ValueError("coef: an adaptive coefficient is multiplied, so it cannot start from 0")
        if self.place == "reward" and self.kind not in ("k1", "k2", "k3"):
            raise ValueError(f"kind: expected k1, k2 or k3 in the reward, got {self.kind!r}")
        return self


class CorrectionConfig(Section):
    """Weights exp(old - rollout): the trainer's probability of a token over that of the engine that drew it."""

    level: Literal["token", "sequence", "sequence-mean"] = "token"
    """token: each token has its own weight. sequence: a response has one, the product over its tokens. sequence-mean: a
    response has one, the geometric mean over its tokens."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate (TIS): a weight is held within [low, high]. mask (MIS, IcePop): a weight outside of [low, high] is set
    to 0."""
    low: float = Field(0.0, ge=0)
    """The lower bound."""
    high: float = Field(2.0, gt=0, allow_inf_nan=True)
    """The upper bound, which may be inf."""
    reject: tuple[float, Annotated[float, Field(allow_inf_nan=True)]] | None = None
    """Two bounds outside of which the weight is 0, in either mode: [0.1, inf] in a file, 0.1,10 on a command line."""

    @model_validator(mode="after")
    def _buildable(self) -> "CorrectionConfig":
        self.build()
        return self

    def build(self) -> RolloutCorrection:
        """The correction. Raises ValueError for bounds that do not go together."""
        return RolloutCorrection(**self.model_dump())


class EntropyConfig(Section):
    """A learned entropy coefficient, as in SAC. It starts at objective.entropy_coef and aims at a target."""

    target: float = Field(ge=0)
    """The entropy to reach, in nats per token."""
    lr: float = Field(1e-2, gt=0)
    """The learning rate (Adam) of the coefficient's logarithm."""


class DistillationConfig(TeacherConfig):
    """On-policy distillation: the policy learns from a frozen teacher on the completions that it samples itself."""

    form: Literal["full", "top-k", "sampled"] = "full"
    """full: the divergence over the whole vocabulary. top-k: the divergence over the teacher's top_k likeliest entries,
    and one entry that stands for all others. sampled: log p_teacher - log p_policy of each sampled token, an estimate
    of the reverse KL, is the token's advantage in the objective."""
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "reverse_kl"
    """forward_kl: KL(teacher || policy); reverse_kl: KL(policy || teacher); jsd: the generalised Jensen-Shannon
    divergence (GKD). The form sampled estimates reverse_kl."""
    top_k: int = Field(64, ge=1)
    """For top-k: the number of entries."""
    policy_coef: float = Field(0.0, ge=0)
    """The weight of what is learned from rewards: of the objective's loss with its KL and entropy terms, or for sampled
    of the rewards' advantages. With 0 there is distillation alone, which needs no [reward], and an [objective] only for
    sampled."""

    @model_validator(mode="after")
    def _estimated(self) -> "DistillationConfig":
        if self.form == "sampled" and self.kind != "reverse_kl":
            raise ValueError(f'kind: form = "sampled" estimates reverse_kl, got {self.kind!r}')
        return self


class PretrainingConfig(Section):
    """PPO-ptx: the cross-entropy of pretraining text, added to the policy's loss."""

    path: FileLocation
    """A text file."""
    coef: float = Field(1.0, gt=0)
    """The weight of the cross-entropy."""
    batch_size: int = Field(8, ge=1)
    """The number of sequences per update."""
    length: int = Field(512, ge=2)
    """The number of tokens per sequence."""


class TrainingConfig(BudgetConfig):
    """Steps, updates and memory."""

    steps: int = Field(100, ge=1)
    """The number of steps, each with one rollout."""
    epochs: int = Field(1, ge=1)
    """The number of passes over each rollout."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates per pass: the rollout is shuffled and split into this many minibatches."""
    max_skipped_updates: int = Field(10, ge=1)
    """An update whose loss or gradient is not finite is skipped: weights, optimizer and schedule stay as they are, and
    the batch is saved under output_dir/skipped. After this many skipped updates in a row the run stops."""


class EvaluationConfig(Section):
    """Scores on held-out prompts."""

    every: int | None = Field(None, ge=1)
    """Evaluate with greedy decoding on data.eval_path every this many steps. A run with held-out prompts also does so
    before its first step, as step 0, and at its end."""
    metrics: Annotated[list[str], Location(dotted=True)] = Field([])
    """Functions like those of reward.function. The mean of each is reported as eval/<its name>."""
    samples: int = Field(0, ge=0)
    """For pass@k and maj@k: completions per prompt, sampled as in the rollout. 0: none."""
    k: tuple[Annotated[int, Field(ge=1)], ...] = Field((1,), min_length=1)
    """For samples: the values of k. eval/<name>/pass@k is the share of prompts that one of k samples solves,
    eval/<name>/maj@k the share that the most frequent of k completions solves. A value of 1 or more means solved."""

    @model_validator(mode="after")
    def _enough_samples(self) -> "EvaluationConfig":
        if self.samples and max(self.k) > self.samples:
            raise ValueError(f"k: expected at most evaluation.samples = {self.samples}, got {self.k}")
        return self


class LoggingConfig(CommonLogging):
    """What a run writes."""

    samples: int = Field(4, ge=0)
    """How many completions of each step samples.jsonl and the report keep."""


class Config(Section):
    """Everything a run depends on."""

    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig.model_construct()
    objective: ObjectiveConfig = ObjectiveConfig(name="reinforce")
    advantages: AdvantagesConfig = AdvantagesConfig()
    critic: CriticConfig | None = None
    kl: KLConfig | None = None
    rollout_correction: CorrectionConfig | None = None
    entropy: EntropyConfig | None = None
    pretraining: PretrainingConfig | None = None
    distillation: DistillationConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def rewarded(self) -> bool:
        """Whether the policy learns from rewards."""
        return self.distillation is None or self.distillation.policy_coef > 0

    @property
    def has_policy_loss(self) -> bool:
        """Whether the loss has the objective's in it."""
        return self.rewarded or self.distils_samples

    @property
    def distils_samples(self) -> bool:
        """Whether a teacher's log-probabilities of the sampled tokens are advantages."""
        return self.distillation is not None and self.distillation.form == "sampled"

    @property
    def on_policy(self) -> bool:
        """Whether the policy is still the one that sampled at every update: one update per rollout."""
        return self.training.epochs * self.training.minibatches == 1

    @property
    def kl_in_reward(self) -> bool:
        """Whether a KL to the reference is subtracted from each token's reward."""
        return self.kl is not None and self.kl.place == "reward"

    @property
    def needs_gradient_norms(self) -> bool:
        """Whether the advantages read the tokens' squared score norms."""
        return self.rewarded and self.advantages.estimator == "optimal_token_baseline"

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a step reads the log-probabilities of the policy before its first update."""
        return (self.has_policy_loss and not self.on_policy) or self.kl_in_reward or self.distils_samples

    def needs_reference(self, objective: Objective) -> bool:
        """Whether a step with this objective, the built one with the changes from the other tables, reads those of the
        reference."""
        kl = objective.kl if self.has_policy_loss else None
        return self.kl_in_reward or (kl is not None and kl.needs_reference)

    @property
    def name(self) -> str:
        """What the run does: its objective's name, or distillation."""
        return str(self.objective.name) if self.rewarded else "distillation"

    @property
    def sequences(self) -> int:
        """The number of a rollout's completions."""
        return self.rollout.prompts_per_step * self.rollout.num_generations

    @property
    def minibatch(self) -> int:
        """The most completions of an update."""
        return -(-self.sequences // self.training.minibatches)

    @model_validator(mode="after")
    def _needed(self) -> "Config":
        needed = {"reward": self.rewarded, "objective": self.has_policy_loss}
        for table, is_needed in needed.items():
            if is_needed and table not in self.model_fields_set:
                raise ValueError(f"{table}: required, but not given")
        unused = {
            "advantages.estimator": not self.rewarded and self.advantages.estimator in ("process", "gae"),
            "rollout.dynamic_sampling": not self.rewarded and self.rollout.dynamic_sampling,
            "kl.place": not self.rewarded and self.kl_in_reward,
            "kl": not self.has_policy_loss and self.kl is not None,
            "rollout_correction": not self.has_policy_loss and self.rollout_correction is not None,
            "entropy": not self.has_policy_loss and self.entropy is not None,
        }
        for name, is_set in unused.items():
            if is_set:
                raise ValueError(f"{name}: means nothing where distillation.policy_coef is 0; leave it out")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        evaluates = bool(self.evaluation.every or self.evaluation.metrics or self.evaluation.samples)
        estimator, objective, lora = self.advantages.estimator, self.objective.build(), self.model.lora_rank is not None
        single = self.rollout.num_generations == 1
        updates = self.training.epochs * self.training.minibatches
        if self.data.eval_source is None and evaluates:
            raise ValueError("evaluation is configured but data.eval_path names no prompts to evaluate on")
        if single and self.rewarded and (self.advantages.grouped or self.rollout.dynamic_sampling):
            raise ValueError("rollout.num_generations: expected at least 2 to compare a prompt's completions, got 1")
        compared = self.rollout.dynamic_sampling_reward
        names = [*map(name_of, self.reward.functions), *(["model"] if self.reward.model is not None else [])]
        if compared is not None and not self.rollout.dynamic_sampling:
            raise ValueError("rollout.dynamic_sampling_reward: means nothing without rollout.dynamic_sampling = true")
        if compared is not None and compared not in names:
            raise ValueError(
                f"rollout.dynamic_sampling_reward: expected one of the rewards, {', '.join(names)}, got {compared!r}"
            )
        if (estimator == "gae") != (self.critic is not None):
            raise ValueError('advantages.estimator = "gae" and a [critic] table go together')
        if (estimator == "process") != (self.reward.steps is not None):
            raise ValueError('advantages.estimator = "process" and reward.steps go together')
        if self.entropy is not None and not float(objective.entropy_coef) > 0:
            raise ValueError("entropy: objective.entropy_coef must be the positive coefficient to start from")
        if self.kl_in_reward and estimator in ("process", "decoupled", "maxrl"):
            raise ValueError(f'kl.place: a KL in the reward does not go with advantages.estimator = "{estimator}"')
        if estimator == "optimal_token_baseline" and self.rollout.truncates:
            raise ValueError(
                'advantages.estimator = "optimal_token_baseline" needs the whole vocabulary; leave rollout.top_k, '
                "top_p and min_p out"
            )
        if self.kl is not None and self.kl.sync_every is not None and lora:
            raise ValueError("kl.sync_every: with model.lora_rank the reference is the model without its adapters")
        if estimator == "decoupled" and self.reward.overlong_cache is not None:
            raise ValueError(
                'reward.overlong_cache: does not go with advantages.estimator = "decoupled"; make the price of length '
                "a reward function"
            )
        if self.critic is not None and self.critic.shared and lora:
            raise ValueError("critic.shared: does not go with model.lora_rank; leave one of them out")
        if estimator == "process" and self.reward.overlong_cache is not None:
            raise ValueError(
                'reward.overlong_cache: with advantages.estimator = "process" only reward.steps is learned from'
            )
        if self.kl is not None and self.kl.kind.startswith("old-new") and updates == 1:
            raise ValueError(
                f'kl.kind: "{self.kl.kind}" is always 0 with one update per rollout; set training.minibatches or'
                " training.epochs"
            )
        if self.training.minibatches > self.sequences:
            raise ValueError(
                f"training.minibatches: expected at most the rollout's {self.sequences} sequences, got "
                f"{self.training.minibatches}"
            )
        corrected = self.rollout_correction is not None or reads_sampler(objective)
        if self.rollout.ahead and self.has_policy_loss and not corrected:  # a divergence alone has nothing to correct
            raise ValueError(
                "rollout.ahead: its completions are a step old, so their weights must be corrected; add a table "
                "[rollout_correction]"
            )
        if (self.reward.overlong_cache or 0) > self.rollout.max_new_tokens:
            raise ValueError(
                f"reward.overlong_cache: expected at most rollout.max_new_tokens = {self.rollout.max_new_tokens}, got "
                f"{self.reward.overlong_cache}"
            )
        ranks = {
            "objective.top_entropy_fraction": objective.top_entropy_fraction,
            f"objective.name = {self.objective.name!r}": objective.covariance,
        }
        for name, value in ranks.items():
            if value is not None and self.training.micro_batch_tokens is not None:
                raise ValueError(
                    f"{name} ranks the tokens of a whole minibatch, so it does not go with "
                    f"training.micro_batch_tokens (got {self.training.micro_batch_tokens}); leave that out"
                )
        with_learning_rate(self, "train")
        check_input("model.path", self.model.path, self.logging)
        check_input("reward.model", self.reward.model, self.logging)
        if self.distillation is not None:
            check_input("distillation.teacher", self.distillation.teacher, self.logging)
        return self
