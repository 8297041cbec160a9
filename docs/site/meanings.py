"""What the fields of a config mean: their docstrings, or for options of presets what is said here and by presets."""

from __future__ import annotations

import inspect
import re
from typing import Any

from fastrl.training.config.objective import ObjectiveConfig
from fastrl.training.config.settings import Section
from fastrl.training.config.stages import LossConfig

# What the options of every preset mean; the presets' docstrings say it of their own.
_OBJECTIVE = {
    "ratio": "The level of the ratio that the gate reads.",
    "entropy_coef": "The weight of the entropy, which is subtracted from the loss.",
    "aggregate": "How the losses of tokens become one number.",
    "max_length": 'For aggregate = "seq-mean-token-sum-norm": the length, in tokens, by which sums are divided.',
    "max_log_ratio": "Every exponent (of a ratio, a KL term, a weight) is clamped to [-max_log_ratio, max_log_ratio].",
    "off_policy_delta": "A completion with a negative advantage has no policy loss if the mean over its tokens of the"
    " engine's log-probability less the policy's exceeds this, in nats.",
    "top_entropy_fraction": "Only this share of the tokens, those with the largest entropy, has a policy loss.",
}
_PREFERENCE = {
    "beta": "Multiplies the scores.",
    "label_smoothing": "The share of pairs that are assumed to be labelled the wrong way round.",
    "gamma": "The margin that beta times the difference of the scores should exceed.",
    "tau": "The width of DiscoPOP's blend of losses.",
    "nll_coef": "The weight of the chosen completions' negative log-likelihood per token.",
    "average": "Whether a score is the mean over a completion's tokens, instead of the sum.",
    "reference": "Whether the reference's log-probability is subtracted from the policy's.",
}
_SHARED: dict[type[Section], dict[str, str]] = {ObjectiveConfig: _OBJECTIVE, LossConfig: _PREFERENCE}


def meaning(table: type[Section], name: str) -> str:
    """What a field of a table means."""
    described = table.model_fields[name].description
    return described or _of_presets(table.known.functions, name, _SHARED[table].get(name))


def _of_presets(functions: dict[str, Any], option: str, shared: str | None) -> str:
    """What an option means, `shared` or what the docstrings of the presets say of it, with its defaults."""
    presets: dict[tuple[str, str], list[str]] = {}
    for preset, function in functions.items():
        if (parameter := inspect.signature(function).parameters.get(option)) is None:
            continue
        listed = (inspect.getdoc(function) or "").partition("Args:\n")[2]
        found = re.search(rf"^ +{option}: (.+)$", listed, re.MULTILINE)
        text = found[1].replace(", a float or a 0-dim tensor", "") if found else ""
        default = f"default {parameter.default}"
        if parameter.default is parameter.empty:
            default = "required"
        elif parameter.default is None:
            text, default = text.replace("None:", "left out:"), ""
        else:  # TOML has no None, so nothing can put it in the default's place
            text = re.sub(r"; None: .*", ".", text)
        presets.setdefault((shared or text, default), []).append(preset)
    if shared is not None:
        defaults = (f"{default.capitalize()} for {', '.join(of)}." for (_, default), of in presets.items())
        return " ".join([shared, *defaults])
    return "\n".join(
        f"For {', '.join(of)}{f' ({default})' if default else ''}: {text}" for (text, default), of in presets.items()
    )
