"""The configuration of `fastrl train`."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from fastrl.objectives.objective import Objective
from fastrl.rewards.names import name_of
from fastrl.training.config.algorithm import (
    AdvantagesConfig,
    CorrectionConfig,
    CriticConfig,
    DistillationConfig,
    EntropyConfig,
    KLConfig,
    PretrainingConfig,
)
from fastrl.training.config.data import HeldOutConfig, PromptsConfig
from fastrl.training.config.objective import ObjectiveConfig, reads_sampler
from fastrl.training.config.sampling import RewardConfig, RolloutConfig
from fastrl.training.config.sections import (
    BudgetConfig,
    ModelConfig,
    OptimizerConfig,
    replaced_inputs,
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


class TrainingConfig(BudgetConfig):
    """Steps, updates and memory."""

    steps: int = Field(100, ge=1)
    """The number of steps, each with one rollout."""
    epochs: int = Field(1, ge=1)
    """The number of passes over each rollout."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates per pass: the rollout is shuffled and split into this many minibatches."""
    batch_invariant: bool = False
    """Compute the policy's losses and log-probabilities, old, new and the reference's, so that the head gives a token
    the same bits in any micro-batch. Where the decoder does so too, a ratio is exactly 1 until the first update; the
    start tries that with two sequences."""
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

    def conflicts(self) -> dict[str, Any]:
        too_many = self.samples > 0 and max(self.k) > self.samples
        return {f"k: expected at most evaluation.samples = {self.samples}, got {self.k}": too_many}


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
    def _with_learning_rate(self) -> "Config":
        with_learning_rate(self, "train")
        return self

    def conflicts(self) -> dict[str, Any]:
        reward, rollout, training, evaluation = self.reward, self.rollout, self.training, self.evaluation
        estimator, objective = self.advantages.estimator, self.objective.build()
        kl = self.kl or KLConfig()  # whose defaults go with everything
        lora, shared = self.model.lora_rank is not None, self.critic is not None and self.critic.shared
        gae, process, decoupled = estimator == "gae", estimator == "process", estimator == "decoupled"
        length_price = reward.overlong_cache is not None
        needed = {"reward": self.rewarded, "objective": self.has_policy_loss}
        # What distillation alone has no use for.
        unused = {
            "advantages.estimator": not self.rewarded and (process or gae),
            "rollout.dynamic_sampling": not self.rewarded and rollout.dynamic_sampling,
            "kl.place": not self.rewarded and self.kl_in_reward,
            "kl": not self.has_policy_loss and self.kl is not None,
            "rollout_correction": not self.has_policy_loss and self.rollout_correction is not None,
            "entropy": not self.has_policy_loss and self.entropy is not None,
        }
        compared = rollout.dynamic_sampling_reward
        names = [*map(name_of, reward.functions), *([] if reward.model is None else ["model"])]
        corrected = self.rollout_correction is not None or reads_sampler(objective)
        ranks = {
            "objective.top_entropy_fraction": objective.top_entropy_fraction,
            f"objective.name = {self.objective.name!r}": objective.covariance,
        }
        inputs = {
            "model.path": self.model.path,
            "reward.model": reward.model,
            "distillation.teacher": None if self.distillation is None else self.distillation.teacher,
        }
        return {
            **{
                f"{table}: required, but not given": is_needed and table not in self.model_fields_set
                for table, is_needed in needed.items()
            },
            **{
                f"{name}: means nothing where distillation.policy_coef is 0; leave it out": is_set
                for name, is_set in unused.items()
            },
            "evaluation is configured but data.eval_path names no prompts to evaluate on": (
                self.data.eval_source is None and (evaluation.every or evaluation.metrics or evaluation.samples)
            ),
            "rollout.num_generations: expected at least 2 to compare a prompt's completions, got 1": (
                rollout.num_generations == 1 and self.rewarded and (self.advantages.grouped or rollout.dynamic_sampling)
            ),
            "rollout.dynamic_sampling_reward: means nothing without rollout.dynamic_sampling = true": (
                compared is not None and not rollout.dynamic_sampling
            ),
            f"rollout.dynamic_sampling_reward: expected one of the rewards, {', '.join(names)}, got {compared!r}": (
                compared is not None and compared not in names
            ),
            'advantages.estimator = "gae" and a [critic] table go together': gae != (self.critic is not None),
            'advantages.estimator = "process" and reward.steps go together': process != (reward.steps is not None),
            "entropy: objective.entropy_coef must be the positive coefficient to start from": (
                self.entropy is not None and not float(objective.entropy_coef) > 0
            ),
            f'kl.place: a KL in the reward does not go with advantages.estimator = "{estimator}"': (
                self.kl_in_reward and estimator in ("process", "decoupled", "maxrl")
            ),
            'advantages.estimator = "optimal_token_baseline" needs the whole vocabulary; leave rollout.top_k, '
            "top_p and min_p out": estimator == "optimal_token_baseline" and rollout.truncates,
            "kl.sync_every: with model.lora_rank the reference is the model without its adapters": (
                kl.sync_every is not None and lora
            ),
            'reward.overlong_cache: does not go with advantages.estimator = "decoupled"; make the price of length '
            "a reward function": decoupled and length_price,
            "critic.shared: does not go with model.lora_rank; leave one of them out": lora and shared,
            'reward.overlong_cache: with advantages.estimator = "process" only reward.steps is learned from': (
                process and length_price
            ),
            f'kl.kind: "{kl.kind}" is always 0 with one update per rollout; set training.minibatches or '
            "training.epochs": kl.kind.startswith("old-new") and self.on_policy,
            f"training.minibatches: expected at most the rollout's {self.sequences} sequences, got "
            f"{training.minibatches}": training.minibatches > self.sequences,
            # A divergence alone has nothing to correct.
            "rollout.ahead: its completions are a step old, so their weights must be corrected; add a table "
            "[rollout_correction]": rollout.ahead and self.has_policy_loss and not corrected,
            f"reward.overlong_cache: expected at most rollout.max_new_tokens = {rollout.max_new_tokens}, got "
            f"{reward.overlong_cache}": (reward.overlong_cache or 0) > rollout.max_new_tokens,
            **{
                f"{name} ranks the tokens of a whole minibatch, so it does not go with training.micro_batch_tokens "
                f"(got {training.micro_batch_tokens}); leave that out": (
                    value is not None and training.micro_batch_tokens is not None
                )
                for name, value in ranks.items()
            },
            **replaced_inputs(self.logging, inputs),
        }
