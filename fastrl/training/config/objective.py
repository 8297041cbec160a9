"""The `[objective]` table. Its options are read from the presets' signatures, so a new preset is configurable at once.

    [objective]
    name = "grpo"                  # any key of fastrl.PRESETS, in any case
    entropy_coef = 0.01            # an option of that preset

    [objective.presets.gspo]       # options for name = "gspo", which win over those above
    clip_low = 0.1

A config that extends this one, and the command line (`--objective.clip_low 0.2`), win over both.
"""

from pydantic import create_model, field_validator

from fastrl import PRESETS, Objective
from fastrl.training.config.presets import PresetConfig, Presets


class _ObjectiveBase(PresetConfig):
    """The objective: a preset of fastrl.PRESETS and its options. An option that is not given has the preset's value."""

    known = Presets.of(PRESETS, Objective)

    @field_validator("name")
    @classmethod
    def _is_no_callable(cls, name: str) -> str:
        if ":" in name or name.endswith(".py"):
            raise ValueError(
                "a config cannot name a function of yours, because the trainer must know before the run what an "
                "objective reads; give it a name in a script, as docs/guides/custom_objective.md says"
            )
        return name

    def build(self) -> Objective:
        """The objective: the preset called with its options."""
        objective: Objective = super().build()
        return objective


_TEXTS = {
    "ratio": "The level of the ratio that the gate reads.",
    "entropy_coef": "The weight of the entropy, which is subtracted from the loss.",
    "aggregate": "How the losses of tokens become one number.",
    "max_length": 'For aggregate = "seq-mean-token-sum-norm": the length, in tokens, by which sums are divided.',
    "max_log_ratio": "Every exponent (of a ratio, a KL term, a weight) is clamped to [-max_log_ratio, max_log_ratio].",
    "off_policy_delta": "A completion with a negative advantage has no policy loss if the mean over its tokens of the"
    " engine's log-probability less the policy's exceeds this, in nats.",
    "top_entropy_fraction": "Only this share of the tokens, those with the largest entropy, has a policy loss.",
}
ObjectiveConfig = create_model(
    "ObjectiveConfig", __base__=_ObjectiveBase, __doc__=_ObjectiveBase.__doc__, **_ObjectiveBase.known.fields(_TEXTS)
)


def reads_sampler(objective: Objective) -> bool:
    """Whether the objective's loss reads the sampler's log-probabilities."""
    corrects = objective.rollout_correction is not None or objective.off_policy_delta is not None
    return corrects or objective.gate.reads_rollout


def ranks_tokens(objective: Objective) -> bool:
    """Whether the objective compares the tokens of a whole minibatch, which micro-batches would take apart."""
    return objective.top_entropy_fraction is not None or objective.covariance is not None
