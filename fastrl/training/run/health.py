"""Metrics of a rollout's rewards, and whether a run learns anything from them, and from its own tokens."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastrl.rewards.pool import FAILURES
from fastrl.training.run.optimizer import calmer

#: The mean difference of log-probabilities, in nats, above which it is no rounding that the sampler's differ by.
MISMATCH = 0.1
PATIENCE = 5  # steps in a row without anything to learn from before a warning; the first few steps may be such
AT_ONCE = ("none", "mismatch", "skipped")  # causes that no step has by chance


class Watch:
    """Warns that a run learns nothing, with the likely cause, or from another policy's tokens, each cause once."""

    def __init__(self, config: Any, steps: int) -> None:
        """`config` is any command's config; `steps` is the number of steps of the run."""
        self.config, self.patience = config, min(PATIENCE, steps)
        advantages = getattr(config, "advantages", None) if getattr(config, "rewarded", True) else None
        self.estimator = getattr(advantages, "estimator", None)  # None: it does not learn from rewards
        self.grouped = getattr(advantages, "grouped", False)
        self.rows: Counter[str] = Counter()  # cause -> steps in a row so far
        self.warned: set[str] = set()
        self.reward = math.nan

    def look(self, numbers: dict[str, float]) -> list[str]:
        """The warnings after a step with these metrics."""
        causes = dict(self._causes(numbers))
        self.reward = numbers.get("reward", math.nan)
        self.rows = Counter({cause: self.rows[cause] + 1 for cause in causes})
        warnings = []
        for cause, text in causes.items():
            needed = 1 if cause in AT_ONCE else self.patience
            if cause not in self.warned and self.rows[cause] >= needed:
                self.warned.add(cause)
                warnings.append(text)
        return warnings

    def _causes(self, numbers: dict[str, float]) -> Iterator[tuple[str, str]]:
        """Why nothing was learned in a step, or nothing right: the name of each cause, and a sentence."""
        if (mismatch := numbers.get("mismatch/abs_log_ratio", 0.0)) > MISMATCH:
            yield (
                "mismatch",
                f"mismatch/abs_log_ratio is {mismatch:.2g}: the engine's log-probabilities are not those of the policy "
                "that is trained; did it draw with other weights, or does it compute the model otherwise?",
            )
        last = "in the last step" if self.patience == 1 else f"in the last {self.patience} steps"
        cut = ", and all were cut off at rollout.max_new_tokens" if numbers.get("truncated") == 1 else ""
        same = numbers.get("reward") == self.reward or math.isnan(self.reward)
        without_update = 0.0 if "skipped_updates" in numbers else math.nan
        if self.estimator is not None and numbers.get("without_reward") == 1:
            yield (
                "none",
                "every reward is None: the reward function gives no completion a number, so nothing is learned",
            )
        elif self.estimator not in (None, "process") and numbers.get("reward_std") == 0 and same:
            yield (
                "constant",
                f"{last} every completion got the reward {numbers['reward']:.6g}{cut}{self._failed(numbers)}, so no "
                "advantage tells them apart; does the reward function read them, and are the prompts neither too hard "
                "nor too easy?",
            )
        elif self.grouped and numbers.get("without_variance") == 1:
            yield (
                "groups",
                f"{last} all completions of a prompt got the same reward{cut}, so every advantage in its group is 0; "
                "does the reward depend on the prompt alone, or are a prompt's completions all the same?",
            )
        elif numbers.get("skipped_updates"):
            if "grad_norm" not in numbers:
                yield (
                    "skipped",
                    "no update was made, because no loss and gradient was finite; if that goes on, the policy has "
                    f"diverged: {calmer(self.config.optimizer)}",
                )
        elif numbers.get("grad_norm", without_update) == 0:
            yield "gradient", f"the gradient was exactly 0 {last}: {self._reason(numbers)}"

    @staticmethod
    def _failed(numbers: dict[str, float]) -> str:
        """How many calls of reward functions failed in workers, if any did."""
        metrics = [f"reward/{name}" for name in FAILURES]
        found = [f"{metric} {numbers[metric]:g}" for metric in metrics if numbers.get(metric)]
        return f", and calls of reward functions failed ({', '.join(found)} in this step)" if found else ""

    def _reason(self, numbers: dict[str, float]) -> str:
        if self.estimator is None:
            if numbers.get("loss") == 0:
                return "the loss is 0 too; is there anything left to learn, or does the loss saturate (loss.beta)?"
            return "no weight that is trained reaches the loss; are they frozen?"
        tokens = numbers.get("tokens", 0)
        if not tokens:
            cut = ", for every completion was cut off at rollout.max_new_tokens (reward.overlong_filter)"
            return "no token counts" + (cut if numbers.get("truncated") == 1 else "")
        if numbers.get("masked_off_policy") == tokens:
            return "every token is masked as off-policy"
        if numbers.get("clip_frac") == 1:
            return "every token is clipped; is optimizer.lr too high?"
        return "every token's weight is 0; does rollout_correction mask them all, or is no term of the loss left?"
