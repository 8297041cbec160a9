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

    known = Presets(PRESETS, Objective)

    @field_validator("name")
    @classmethod
    def _is_no_callable(cls, name: str) -> str:
        if ":" in name or name.endswith(".py"):
            raise ValueError(
                "a config cannot name a function of yours, because the trainer must know before the run what an "
                "objective reads; give it a name in a script, as docs/guides/custom_objective.md says"
            )
        return name


ObjectiveConfig = create_model(
    "ObjectiveConfig", __base__=_ObjectiveBase, __doc__=_ObjectiveBase.__doc__, **_ObjectiveBase.known.fields()
)


def reads_sampler(objective: Objective) -> bool:
    """Whether the objective's loss reads the sampler's log-probabilities."""
    corrects = objective.rollout_correction is not None or objective.off_policy_delta is not None
    return corrects or objective.gate.reads_rollout


def ranks_tokens(objective: Objective) -> bool:
    """Whether the objective compares the tokens of a whole minibatch, which micro-batches would take apart."""
    return objective.top_entropy_fraction is not None or objective.covariance is not None
