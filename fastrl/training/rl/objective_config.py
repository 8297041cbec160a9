"""The `[objective]` table. Its options are read from the presets' signatures, so a new preset is configurable at once.

    [objective]
    name = "grpo"                  # any key of fastrl.PRESETS, in any case
    entropy_coef = 0.01            # an option of that preset

    [objective.presets.gspo]       # options for name = "gspo", which win over those above
    clip_low = 0.1

A config that extends this one, and the command line (`--objective.clip_low 0.2`), win over both.
"""

from pydantic import create_model

from fastrl import PRESETS, Objective
from fastrl.training.common.preset_config import PresetConfig, Presets


class _ObjectiveBase(PresetConfig):
    """The objective."""

    known = Presets.of(PRESETS, Objective)

    def build(self) -> Objective:
        """The objective: the preset called with its options."""
        objective: Objective = super().build()
        return objective


ObjectiveConfig = create_model("ObjectiveConfig", __base__=_ObjectiveBase, **_ObjectiveBase.known.fields())
