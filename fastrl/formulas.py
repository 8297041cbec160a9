"""The objectives' arithmetic, one token at a time, each formula written once (ratio gates, KL estimators, weights).

Only straight-line arithmetic on the names of `arithmetic.py`, literals and other formulas of this file may appear here:
the same functions run in torch (with autograd), inside the Triton kernels and, translated, inside the C++ kernels.

Every gate is three functions of the same arguments, `p0..p3` being the gate's own numbers:

    value(log_ratio, logp, advantage, p0, p1, p2, p3)     the per-token loss f; torch differentiates it
    weight(log_ratio, active, advantage, p0, p1, p2, p3)  g >= 0 with d f / d logp = -advantage * g, for the kernels
    side(log_ratio, advantage, p0, p1, p2, p3)            +1 clipped above, -1 clipped below, 0 not clipped

`log_ratio` is already clamped; `active` is 1 where the clamp left it alone and 0 where it did not, and a gate whose
gradient passes through the ratio multiplies it in. Every KL estimator is three functions of `d = ref - logp` and
`log_ratio = logp - old`: its value and its derivatives in `d` and in `log_ratio`.
"""

# ruff: noqa: D103  (the module's docstring is the contract that all of these share)
# mypy: disable-error-code="no-untyped-def"

from .arithmetic import detach, exp, expm1, maximum, minimum, sigmoid, where

# --- gates: the CPI / TRPO surrogate, and REINFORCE -------------------------------------------------------------------


def surrogate_value(log_ratio, logp, advantage, p0, p1, p2, p3):
    return -exp(log_ratio) * advantage


def surrogate_weight(log_ratio, active, advantage, p0, p1, p2, p3):
    return exp(log_ratio) * active


def never_clipped(log_ratio, advantage, p0, p1, p2, p3):
    return 0.0 * log_ratio


def reinforce_value(log_ratio, logp, advantage, p0, p1, p2, p3):
    return -advantage * logp


def reinforce_weight(log_ratio, active, advantage, p0, p1, p2, p3):
    return 0.0 * log_ratio + 1.0


# --- gate: clip (PPO, GRPO, DAPO's clip-higher, verl's dual clip, INTELLECT-2's delta) --------------------------------


def clip_value(log_ratio, logp, advantage, low, high, dual, delta):
    ratio = exp(log_ratio)
    unclipped = minimum(ratio, delta) * advantage
    clipped = minimum(maximum(ratio, 1.0 - low), 1.0 + high) * advantage
    loss = -minimum(unclipped, clipped)
    return where(advantage < 0.0, minimum(loss, -dual * advantage), loss)


def clip_side(log_ratio, advantage, low, high, dual, delta):
    ratio = exp(log_ratio)
    # For A < 0 the loss is |A| max(min(r, delta), clip(r)), so a delta inside the clip range never binds.
    good_above = (advantage > 0.0) & ((ratio > 1.0 + high) | (ratio > delta))
    bad_above = (advantage < 0.0) & (((ratio > 1.0 + high) & (ratio > delta)) | (ratio > dual))
    bad_below = (advantage < 0.0) & (ratio < 1.0 - low)
    return where(good_above | bad_above, 1.0, 0.0) - where(bad_below, 1.0, 0.0)


def clip_weight(log_ratio, active, advantage, low, high, dual, delta):
    side = clip_side(log_ratio, advantage, low, high, dual, delta)
    return where(side == 0.0, exp(log_ratio) * active, 0.0)


# --- gate: soft (SAPO) ------------------------------------------------------------------------------------------------


def soft_value(log_ratio, logp, advantage, tau_pos, tau_neg, p2, p3):
    tau = where(advantage > 0.0, tau_pos + 0.0 * advantage, tau_neg)  # the sum gives tau the advantage's dtype
    return -(4.0 / tau) * sigmoid(tau * (exp(log_ratio) - 1.0)) * advantage


def soft_weight(log_ratio, active, advantage, tau_pos, tau_neg, p2, p3):
    tau = where(advantage > 0.0, tau_pos + 0.0 * advantage, tau_neg)  # the sum gives tau the advantage's dtype
    ratio = exp(log_ratio)
    z = tau * (ratio - 1.0)
    # sech^2(z / 2), written so that neither tail cancels
    return 4.0 * sigmoid(z) * sigmoid(-z) * ratio * active


# --- gate: stop-gradient clip (CISPO) ---------------------------------------------------------------------------------


def stop_gradient_clip_value(log_ratio, logp, advantage, cap, low, p2, p3):
    return -detach(maximum(minimum(exp(log_ratio), cap), low)) * advantage * logp


def stop_gradient_clip_weight(log_ratio, active, advantage, cap, low, p2, p3):
    return maximum(minimum(exp(log_ratio), cap), low)


def stop_gradient_clip_side(log_ratio, advantage, cap, low, p2, p3):
    ratio = exp(log_ratio)
    return where(ratio > cap, 1.0, 0.0) - where(ratio < low, 1.0, 0.0)


# --- gate: gamma weight (VESPO); log_ratio is the response's log W ----------------------------------------------------


def gamma_phi(log_ratio, advantage, k_pos, lam_pos, k_neg, lam_neg):
    k = where(advantage >= 0.0, k_pos + 0.0 * advantage, k_neg)
    lam = where(advantage >= 0.0, lam_pos + 0.0 * advantage, lam_neg)
    log_w = minimum(maximum(log_ratio, -18.420680743952367), 20.0)  # [ln 1e-8, 20]
    return exp(lam + k * log_w - lam * exp(log_w))


def gamma_value(log_ratio, logp, advantage, k_pos, lam_pos, k_neg, lam_neg):
    return -detach(gamma_phi(log_ratio, advantage, k_pos, lam_pos, k_neg, lam_neg)) * advantage * logp


def gamma_weight(log_ratio, active, advantage, k_pos, lam_pos, k_neg, lam_neg):
    return gamma_phi(log_ratio, advantage, k_pos, lam_pos, k_neg, lam_neg)


# --- KL estimators: value, d value / d d, d value / d log_ratio -------------------------------------------------------


def zero(d, log_ratio):
    return 0.0 * d


def kl_k1_value(d, log_ratio):
    return -d


def kl_k1_slope(d, log_ratio):
    return 0.0 * d - 1.0


def kl_k2_value(d, log_ratio):
    return 0.5 * d * d


def kl_k2_slope(d, log_ratio):
    return d


def kl_k3_value(d, log_ratio):
    return expm1(d) - d


def kl_k3_slope(d, log_ratio):
    return expm1(d)


def kl_k3_unbiased_value(d, log_ratio):
    return exp(log_ratio) * kl_k3_value(d, log_ratio)


def kl_k3_unbiased_slope(d, log_ratio):
    return exp(log_ratio) * expm1(d)


def kl_k1_straight_value(d, log_ratio):
    return kl_k2_value(d, log_ratio) + detach(kl_k1_value(d, log_ratio) - kl_k2_value(d, log_ratio))


def kl_k3_straight_value(d, log_ratio):
    return kl_k2_value(d, log_ratio) + detach(kl_k3_value(d, log_ratio) - kl_k2_value(d, log_ratio))


def kl_forward_value(d, log_ratio):
    return exp(d) * d - expm1(d)


def kl_forward_slope(d, log_ratio):
    return exp(d) * d


def kl_old_new_value(d, log_ratio):
    return expm1(log_ratio) - log_ratio


def kl_old_new_ratio_slope(d, log_ratio):
    return expm1(log_ratio)


# --- rollout correction: the weight of a token (or a response) from log rho = log old - log rollout -------------------


def rollout_none(log_rho, low, high):
    return 0.0 * log_rho + 1.0


def rollout_truncate(log_rho, low, high):
    return maximum(minimum(exp(log_rho), high), low)


def rollout_mask(log_rho, low, high):
    rho = exp(log_rho)
    return where((rho >= low) & (rho <= high), rho, 0.0)


# --- clamped exponents ------------------------------------------------------------------------------------------------


def clamp(x, bound):
    return minimum(maximum(x, -bound), bound)


def difference(a, b):
    # 0, not NaN, where both are -inf: tokens of probability 0 under both policies
    return where((a == b) & (a < -3e38), 0.0, a - b)


def within(x, bound):
    return where((x >= -bound) & (x <= bound), 1.0, 0.0)


# --- a row-local token, whole: what the kernels run -------------------------------------------------------------------


def token_terms(
    gate_value, gate_weight, gate_side, kl_value, kl_slope, kl_ratio_slope, rollout_weight,
    logp, entropy, old, ref, rollout, advantage, policy_weight, kl_weight, entropy_weight, entropy_threshold,
    p0, p1, p2, p3, rollout_low, rollout_high, max_log_ratio,
):  # fmt: skip
    # Absent inputs arrive as neutral values: old = logp, ref = logp, rollout = old, entropy_threshold = -1e30.
    raw = difference(logp, old)
    log_ratio = clamp(raw, max_log_ratio)
    active = within(raw, max_log_ratio)
    raw_d = difference(ref, logp)
    d = clamp(raw_d, max_log_ratio)
    active_d = within(raw_d, max_log_ratio)
    raw_rho = difference(old, rollout)
    rho = rollout_weight(clamp(raw_rho, max_log_ratio), rollout_low, rollout_high)
    kept = where(entropy >= entropy_threshold, rho, 0.0) * policy_weight

    weight = gate_weight(log_ratio, active, advantage, p0, p1, p2, p3)
    value = gate_value(log_ratio, logp, advantage, p0, p1, p2, p3)
    kl = kl_value(d, log_ratio)
    policy = where(kept == 0.0, 0.0, kept * value)
    loss = policy + kl_weight * kl - entropy_weight * entropy
    kl_gradient = kl_ratio_slope(d, log_ratio) * active - kl_slope(d, log_ratio) * active_d
    c = where(kept == 0.0, 0.0, -kept * advantage * weight) + kl_weight * kl_gradient
    h = -entropy_weight

    side = gate_side(log_ratio, advantage, p0, p1, p2, p3)
    approx_kl = expm1(log_ratio) - log_ratio
    clamped = 1.0 - active * active_d * within(raw_rho, max_log_ratio)
    return loss, policy, kl, exp(log_ratio), weight, side, approx_kl, clamped, c, h
