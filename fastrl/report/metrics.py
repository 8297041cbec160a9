"""What a metric's name says of it: its unit, which direction is better, and whether it is the time of a phase."""

TIMES = "time/"
STEP = "time/step"
# Seconds that are part of another phase of a step, or beside the steps: the losses' are the update's, the engine
# and tools work in those of time/generate, or with rollout.ahead during all phases.
NESTED = ("time/loss", "time/engine", "time/tools", "time/evaluation")
# Before the name of a metric that is the largest of several ranks, such as "time/update": the mean over the ranks.
MEAN = "mean_"
# Metrics with a better direction: the last parts of their names; others under "eval/" count as HIGHER.
HIGHER = ("reward", "accuracy", "margin", "exact_match")
LOWER = ("loss", "perplexity", "divergence", "cross_entropy")
# The units of metrics that are not bare numbers; of times they are seconds.
UNITS = {
    "nats per token": (
        *("entropy", "kl", "approx_kl", "kl_reference", "divergence", "teacher_logprob", "cross_entropy", "nll"),
        *("mismatch/abs_log_ratio", "mismatch/k3", "pretraining_loss"),
    ),
    "nats": ("rollout_log_weight_mean", "rollout_abs_log_weight_max"),
    "share": (
        *("without_reward", "without_variance", "kept", "truncated", "accuracy"),
        *("time/loss_share", "time/imbalance"),
        *("clip_frac", "clip_frac_low", "clip_frac_high"),
        *("rollout_ess", "rollout_frac_low", "rollout_frac_high", "rollout_frac_rejected"),
    ),
    "tokens": (
        *("length", "tokens", "tool_tokens"),
        *("ratio_not_one", "ratio_clamped", "masked_off_policy", "chosen_by_covariance"),
    ),
    "updates": ("skipped_updates",),
    "prompts": ("dropped_prompts",),
    "steps": ("off_policy_steps",),
    "GiB": ("memory/peak_gib",),
}


def is_phase(name: str) -> bool:
    """Whether a metric is the seconds of a phase; "time/loss_share", for example, is a ratio of two."""
    return name.startswith(TIMES) and name not in UNITS["share"]


def unit_of(name: str) -> str:
    """The metric's unit, empty for a bare number."""
    return "s" if is_phase(name) else next((unit for unit, names in UNITS.items() if name in names), "")


def direction(name: str) -> int:
    """1 for a metric that is better when higher, -1 when lower, 0 for one that has no better direction."""
    last = name.split("/")[-1]
    seconds = name.removeprefix(MEAN).startswith(TIMES)
    if seconds or last in ("chosen_reward", "rejected_reward"):  # the difference of the two rewards counts
        return 0
    if last in LOWER or last.endswith("_loss"):
        return -1
    return 1 if last in HIGHER or name.startswith("eval/") else 0
