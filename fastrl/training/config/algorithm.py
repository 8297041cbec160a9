"""The tables of `fastrl train` that say how the policy learns, beside `[objective]`."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fastrl import RolloutCorrection
from fastrl.training.config.sections import FileLocation, TeacherConfig
from fastrl.training.config.settings import Section


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

    def conflicts(self) -> dict[str, Any]:
        return {
            f'{name}: is for estimator = "{reader}", got {self.estimator!r}': value is not None
            and self.estimator != reader
            for name, value, reader in (
                ("k", self.k, "pass_at_k"),
                ("lam_alpha", self.lam_alpha, "gae"),
                ("lam_critic", self.lam_critic, "gae"),
            )
        }


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

    def conflicts(self) -> dict[str, Any]:
        adaptive = self.adaptive is not None
        unknown = self.place == "reward" and self.kind not in ("k1", "k2", "k3")
        return {
            "adaptive and target go together": adaptive != (self.target is not None),
            "coef: an adaptive coefficient is multiplied, so it cannot start from 0": adaptive and self.coef == 0,
            f"kind: expected k1, k2 or k3 in the reward, got {self.kind!r}": unknown,
        }


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

    def conflicts(self) -> dict[str, Any]:
        other = self.form == "sampled" and self.kind != "reverse_kl"
        return {f'kind: form = "sampled" estimates reverse_kl, got {self.kind!r}': other}


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
