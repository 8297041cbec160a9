"""The arithmetic of the objectives per token, each formula written once (ratio gates, KL estimators, weights).

Formulas may contain only straight-line arithmetic on literals, the functions of `arithmetic.py` and other formulas of
this file: the same functions run in torch, inside the Triton kernels and, translated, inside the C++ kernels.

Every gate is four functions; `p0..p3` are the gate's parameters:

    value(log_ratio, logp, advantage, p0, p1, p2, p3)           the per-token loss f
    weight(log_ratio, logp, active, advantage, p0, p1, p2, p3)  g >= 0 with d f / d logp = -advantage * g
    side(log_ratio, logp, advantage, p0, p1, p2, p3)            +1 clipped above, -1 clipped below, 0 not clipped

    baseline(old, rollout)                                      the log-probability that a token's ratio is against

What a gate does not read costs nothing: Triton and CUDA compile an objective's formulas into one function.

`log_ratio` is already clamped; `active` is 1 where the clamp did not change it and 0 elsewhere, and a gate whose
gradient passes through the ratio multiplies by it. Every KL estimator is two functions of `d = ref - logp` and
`log_ratio = logp - old`, both clamped:

    value(d, log_ratio)                       the estimate
    gradient(d, log_ratio, active_d, active)  d value / d logp; active_d, active: 1 where d, log_ratio pass it on

Every backend computes the coefficient c from these weights and gradients, torch too, because autograd would add terms
that cancel (k3's gradient, 1 - e^d, as (1 + (e^d - 1)) - 1). Each is written to keep a relative accuracy of 1e-5 in
float32 wherever it is above 1e-30. Only second derivatives, those of weights and gradients, come from autograd: a ratio
that is constant in the first derivative is detached for the second.
"""

# ruff: noqa: D103  (the module's docstring describes all functions)
# mypy: disable-error-code="no-untyped-def"

from fastrl.objectives.arithmetic import (
    clip,
    detach,
    exp,
    exp_of_exp,
    expm1,
    expm1_minus,
    log1p,
    maximum,
    minimum,
    sigmoid,
    where,
)

# --- gates: the policy that a token's ratio is against ----------------------------------------------------------------


def against_old(old, rollout):
    return old


def against_rollout(old, rollout):
    return rollout


# --- gates: the CPI / TRPO surrogate, and REINFORCE -------------------------------------------------------------------


def surrogate_value(log_ratio, logp, advantage, p0, p1, p2, p3):
    return -exp(log_ratio) * advantage


def surrogate_weight(log_ratio, logp, active, advantage, p0, p1, p2, p3):
    return exp(log_ratio) * active


def never_clipped(log_ratio, logp, advantage, p0, p1, p2, p3):
    return 0.0 * log_ratio


def reinforce(weight, advantage, logp):
    # -0 log 0 = 0: a token of probability 0 that the gate drops, or that has no advantage, loses nothing
    factor = weight * advantage
    return where((factor == 0.0) & (logp < -3e38), 0.0, -factor * logp)


def reinforce_value(log_ratio, logp, advantage, p0, p1, p2, p3):
    return reinforce(1.0, advantage, logp)


def reinforce_weight(log_ratio, logp, active, advantage, p0, p1, p2, p3):
    return 0.0 * log_ratio + 1.0


# --- gate: clip (PPO, GRPO, DAPO's clip-higher, verl's dual clip, INTELLECT-2's delta) --------------------------------


def clip_value(log_ratio, logp, advantage, low, high, dual, delta):
    ratio = exp(log_ratio)
    unclipped = minimum(ratio, delta) * advantage
    clipped = clip(ratio, 1.0 - low, 1.0 + high) * advantage
    loss = -minimum(unclipped, clipped)
    return where(advantage < 0.0, minimum(loss, -dual * advantage), loss)


def clip_side(log_ratio, logp, advantage, low, high, dual, delta):
    ratio = exp(log_ratio)
    # For A > 0 (good) the loss is clipped above alone; for A < 0 (bad) it is |A| max(min(r, delta), clip(r)), at most
    # |A| dual: clipped below, and above by a delta outside the clip range, or by dual.
    good_above = (advantage > 0.0) & ((ratio > 1.0 + high) | (ratio > delta))
    bad_above = (advantage < 0.0) & (((ratio > 1.0 + high) & (ratio > delta)) | (ratio > dual))
    bad_below = (advantage < 0.0) & (ratio < 1.0 - low)
    return where(good_above | bad_above, 1.0, 0.0) - where(bad_below, 1.0, 0.0)


def clip_weight(log_ratio, logp, active, advantage, low, high, dual, delta):
    side = clip_side(log_ratio, logp, advantage, low, high, dual, delta)
    return where(side == 0.0, exp(log_ratio) * active, 0.0)


# --- gate: soft (SAPO) ------------------------------------------------------------------------------------------------


def soft_value(log_ratio, logp, advantage, tau_pos, tau_neg, p2, p3):
    tau = where(advantage > 0.0, tau_pos + 0.0 * advantage, tau_neg)  # the sum gives tau the advantage's dtype
    return -(4.0 / tau) * sigmoid(tau * (exp(log_ratio) - 1.0)) * advantage


def soft_weight(log_ratio, logp, active, advantage, tau_pos, tau_neg, p2, p3):
    tau = where(advantage > 0.0, tau_pos + 0.0 * advantage, tau_neg)  # the sum gives tau the advantage's dtype
    # r sech^2(z / 2) = 4 r e^-|z| / (1 + e^-|z|)^2 with z = tau (r - 1): neither tail cancels or overflows
    tail = exp_of_exp(log_ratio, where(log_ratio < 0.0, -tau, tau), 0.0)
    return 4.0 * tail / ((1.0 + tail) * (1.0 + tail)) * exp(log_ratio) * active


# --- gate: stop-gradient clip (CISPO) ---------------------------------------------------------------------------------


def stop_gradient_clip_weight(log_ratio, logp, active, advantage, cap, low, p2, p3):
    return detach(clip(exp(log_ratio), low, cap))


def stop_gradient_clip_value(log_ratio, logp, advantage, cap, low, p2, p3):
    weight = stop_gradient_clip_weight(log_ratio, logp, 1.0, advantage, cap, low, p2, p3)
    return reinforce(weight, advantage, logp)


def stop_gradient_clip_side(log_ratio, logp, advantage, cap, low, p2, p3):
    ratio = exp(log_ratio)
    return where(ratio > cap, 1.0, 0.0) - where(ratio < low, 1.0, 0.0)


# --- gate: gamma weight (VESPO); log_ratio is the response's log W ----------------------------------------------------


def gamma_weight(log_ratio, logp, active, advantage, k_pos, lam_pos, k_neg, lam_neg):
    k = where(advantage >= 0.0, k_pos + 0.0 * advantage, k_neg)
    lam = where(advantage >= 0.0, lam_pos + 0.0 * advantage, lam_neg)
    log_w = clip(log_ratio, -18.420680743952367, 20.0)  # [ln 1e-8, 20]
    return detach(exp_of_exp(log_w, lam, k * log_w))


def gamma_value(log_ratio, logp, advantage, k_pos, lam_pos, k_neg, lam_neg):
    weight = gamma_weight(log_ratio, logp, 1.0, advantage, k_pos, lam_pos, k_neg, lam_neg)
    return reinforce(weight, advantage, logp)


# --- gate: ratio mask (IcePop on the current ratio) -------------------------------------------------------------------


def ratio_mask_weight(log_ratio, logp, active, advantage, low, high, p2, p3):
    ratio = exp(log_ratio)
    return detach(where((ratio >= low) & (ratio <= high), ratio, 0.0))


def ratio_mask_value(log_ratio, logp, advantage, low, high, p2, p3):
    weight = ratio_mask_weight(log_ratio, logp, 1.0, advantage, low, high, p2, p3)
    return reinforce(weight, advantage, logp)


def ratio_mask_side(log_ratio, logp, advantage, low, high, p2, p3):
    ratio = exp(log_ratio)
    return where(ratio > high, 1.0, 0.0) - where(ratio < low, 1.0, 0.0)


# --- gate: tapered (TOPR) ---------------------------------------------------------------------------------------------


def tapered_weight(log_ratio, logp, active, advantage, low, high, p2, p3):
    return detach(where(advantage > 0.0, 1.0, clip(exp(log_ratio), low, high)))


def tapered_value(log_ratio, logp, advantage, low, high, p2, p3):
    weight = tapered_weight(log_ratio, logp, 1.0, advantage, low, high, p2, p3)
    return reinforce(weight, advantage, logp)


def tapered_side(log_ratio, logp, advantage, low, high, p2, p3):
    ratio = exp(log_ratio)
    above = (advantage <= 0.0) & (ratio > high)
    below = (advantage <= 0.0) & (ratio < low)
    return where(above, 1.0, 0.0) - where(below, 1.0, 0.0)


# --- gate: divergence mask (DPPO); q = p / r is the baseline's probability, with the clamped ratio --------------------


def probability_change(log_ratio, logp):
    return -exp(logp) * expm1(-log_ratio)  # p - q


def rest_of(logp):
    # 1 - p, with 1e-8 more as in the authors' code: in float32 a confident token's p is 1
    return 1e-8 - minimum(expm1(logp), 0.0)


def binary_kl(log_ratio, logp):
    # KL of q and p, each against its complement, as q (e^x - 1 - x) + (1 - q) (e^y - 1 - y) with x = log(p / q) and
    # y = log((1 - p) / (1 - q)): neither summand is negative, so that nothing cancels where p is near q.
    old = logp - log_ratio
    change = probability_change(log_ratio, logp)
    size = log1p(maximum(change, -change) / rest_of(maximum(logp, old)))
    y = where(change > 0.0, -size, size)
    return exp(logp) * (exp(-log_ratio) * expm1_minus(log_ratio)) + rest_of(old) * expm1_minus(y)


def divergence_tv_side(log_ratio, logp, advantage, low, high, cap, p3):
    change = probability_change(log_ratio, logp)
    above = (advantage > 0.0) & (change > high)
    below = (advantage <= 0.0) & (change < -low)
    return where(above, 1.0, 0.0) - where(below, 1.0, 0.0)


def divergence_tv_weight(log_ratio, logp, active, advantage, low, high, cap, p3):
    side = divergence_tv_side(log_ratio, logp, advantage, low, high, cap, p3)
    return detach(where(side == 0.0, minimum(exp(log_ratio), cap), 0.0))


def divergence_tv_value(log_ratio, logp, advantage, low, high, cap, p3):
    weight = divergence_tv_weight(log_ratio, logp, 1.0, advantage, low, high, cap, p3)
    return reinforce(weight, advantage, logp)


def divergence_kl_side(log_ratio, logp, advantage, low, high, cap, p3):
    kl = binary_kl(log_ratio, logp)
    above = (advantage > 0.0) & (log_ratio > 0.0) & (kl > high)
    below = (advantage <= 0.0) & (log_ratio < 0.0) & (kl > low)
    return where(above, 1.0, 0.0) - where(below, 1.0, 0.0)


def divergence_kl_weight(log_ratio, logp, active, advantage, low, high, cap, p3):
    side = divergence_kl_side(log_ratio, logp, advantage, low, high, cap, p3)
    return detach(where(side == 0.0, minimum(exp(log_ratio), cap), 0.0))


def divergence_kl_value(log_ratio, logp, advantage, low, high, cap, p3):
    weight = divergence_kl_weight(log_ratio, logp, 1.0, advantage, low, high, cap, p3)
    return reinforce(weight, advantage, logp)


# --- KL estimators: value, d value / d logp ---------------------------------------------------------------------------


def kl_none_value(d, log_ratio):
    return 0.0 * d


def kl_none_gradient(d, log_ratio, active_d, active):
    return 0.0 * d


def kl_k1_value(d, log_ratio):
    return -d


def kl_k1_gradient(d, log_ratio, active_d, active):
    return active_d


def kl_k2_value(d, log_ratio):
    return 0.5 * d * d


def kl_k2_gradient(d, log_ratio, active_d, active):
    return -d * active_d


def kl_k3_value(d, log_ratio):
    return expm1_minus(d)


def kl_k3_gradient(d, log_ratio, active_d, active):
    return -expm1(d) * active_d


def kl_k3_unbiased_value(d, log_ratio):
    return exp(log_ratio) * expm1_minus(d)


def kl_k3_unbiased_gradient(d, log_ratio, active_d, active):
    # r (e^d - 1 - d) through the ratio and -r (e^d - 1) through d: together r (logp - ref), without the exponentials
    both = active_d * active
    through_one = expm1_minus(d) * (active - both) - expm1(d) * (active_d - both)
    return exp(log_ratio) * (through_one - d * both)


def kl_forward_value(d, log_ratio):
    return exp(d) * expm1_minus(-d)  # x d - (x - 1) with x = e^d, which would cancel near 0


def kl_forward_gradient(d, log_ratio, active_d, active):
    return -exp(d) * d * active_d


def kl_old_new_value(d, log_ratio):
    return expm1_minus(log_ratio)


def kl_old_new_gradient(d, log_ratio, active_d, active):
    return expm1(log_ratio) * active


def kl_old_new_k2_value(d, log_ratio):
    return 0.5 * log_ratio * log_ratio


def kl_old_new_k2_gradient(d, log_ratio, active_d, active):
    return log_ratio * active


# --- rollout correction: the weight of a token (or a response) from log rho = log old - log rollout -------------------


def rollout_weight(log_rho, low, high, reject_low, reject_high):
    # 1 for low = high = 1 and no rejection
    rho = exp(log_rho)
    return where((rho < reject_low) | (rho > reject_high), 0.0, clip(rho, low, high))


# --- clamped exponents ------------------------------------------------------------------------------------------------


def clamp(x, bound):
    return clip(x, -bound, bound)


def difference(a, b):
    # 0, not NaN, where both are -inf: tokens of probability 0 under both policies
    return where((a == b) & (a < -3e38), 0.0, a - b)


def within(x, clamped):
    return where(x == clamped, 1.0, 0.0)


def possible(logp):
    # What has probability 0 passes no gradient through a ratio: that is clamped, or 1 under both policies.
    return where(logp > -3e38, 1.0, 0.0)


# --- all terms of a row-local token, as the kernels run them ----------------------------------------------------------


def token_terms(
    gate_value, gate_weight, gate_side, gate_baseline, kl_value, kl_gradient, logp, entropy, inputs, numbers
):
    # In the order of RowInputs and Numbers (rows.py). Absent inputs arrive as neutral values: old = logp, ref = logp,
    # rollout = old, weights of 0, entropy_threshold = -1e30.
    advantage, policy_weight, old, ref, rollout, kl_weight, entropy_weight, entropy_threshold = inputs
    p0, p1, p2, p3, rollout_low, rollout_high, reject_low, reject_high, max_log_ratio = numbers

    raw = difference(logp, gate_baseline(old, rollout))
    log_ratio = clamp(raw, max_log_ratio)
    free = within(raw, log_ratio)
    raw_old = difference(logp, old)
    log_old = clamp(raw_old, max_log_ratio)
    free_old = within(raw_old, log_old)
    raw_d = difference(ref, logp)
    d = clamp(raw_d, max_log_ratio)
    free_d = within(raw_d, d)
    is_possible = possible(logp)
    active = free * is_possible
    active_old = free_old * is_possible
    active_d = free_d * is_possible
    raw_rho = difference(old, rollout)
    log_rho = clamp(raw_rho, max_log_ratio)
    rho = rollout_weight(log_rho, rollout_low, rollout_high, reject_low, reject_high)
    kept = where(entropy >= entropy_threshold, rho, 0.0) * policy_weight

    weight = gate_weight(log_ratio, logp, active, advantage, p0, p1, p2, p3)
    value = gate_value(log_ratio, logp, advantage, p0, p1, p2, p3)
    kl = kl_value(d, log_old)
    policy = where(kept == 0.0, 0.0, kept * value)
    loss = policy + kl_weight * kl - entropy_weight * entropy
    c = where(kept == 0.0, 0.0, -kept * advantage * weight) + kl_weight * kl_gradient(d, log_old, active_d, active_old)
    h = -entropy_weight

    side = gate_side(log_ratio, logp, advantage, p0, p1, p2, p3)
    approx_kl = expm1_minus(log_old)
    clamped = 1.0 - minimum(free, free_old) * free_d * within(raw_rho, log_rho)
    return loss, policy, kl, exp(log_ratio), weight, side, approx_kl, clamped, c, h
