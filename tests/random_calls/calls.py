"""All random calls by name: `check(seed)` makes the one that a seed stands for and raises where a number is wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

from advantage_calls import (
    decoupled_call,
    gae_call,
    group_call,
    penalty_call,
    preference_call,
    process_call,
    relative_call,
    sampling_mask_call,
    token_baseline_call,
    value_call,
)
from comparing import Comparison, NearBorder, Tally
from divergence_calls import divergence_call, topk_divergence_call
from drawing import Draw
from gathered_calls import gathered_call
from logprob_calls import cross_entropy_call, dpo_call, statistics_call
from policy_calls import policy_call, vocabulary_policy_call
from preference_calls import kto_call, linear_preference_call, preference_loss_call

#: name -> (the call, how often it is drawn)
CALLS: dict[str, tuple[Any, int]] = {
    "policy_loss": (policy_call, 18),
    "logits_policy_loss": (partial(vocabulary_policy_call, linear=False), 20),
    "linear_policy_loss": (partial(vocabulary_policy_call, linear=True), 24),
    "token_logprobs": (partial(statistics_call, linear=False), 7),
    "linear_token_logprobs": (partial(statistics_call, linear=True), 9),
    "gathered_logprobs": (partial(gathered_call, linear=False), 5),
    "linear_gathered_logprobs": (partial(gathered_call, linear=True), 7),
    "linear_cross_entropy": (cross_entropy_call, 5),
    "linear_dpo_loss": (dpo_call, 4),
    "linear_preference_loss": (linear_preference_call, 6),
    "kto_loss and linear_kto_loss": (kto_call, 4),
    "preference_loss": (preference_loss_call, 2),
    "linear_divergence": (divergence_call, 8),
    "topk_divergence": (topk_divergence_call, 2),
    "group and rloo_advantages": (group_call, 3),
    "maxrl, opo and pass_at_k_advantages": (relative_call, 3),
    "decoupled_group_advantages": (decoupled_call, 2),
    "optimal_token_baseline_advantages": (token_baseline_call, 2),
    "process_advantages": (process_call, 2),
    "gae": (gae_call, 2),
    "value_loss": (value_call, 2),
    "kl_penalized_rewards and overlong_penalty": (penalty_call, 2),
    "dpo_loss and reward_model_loss": (preference_call, 2),
    "SamplingMask.from_logits": (sampling_mask_call, 2),
}


def check(seed: int, tally: Tally | None = None, *, name: str | None = None) -> dict[str, Any]:
    """Make the call of this seed and compare it; returns what was drawn. AssertionError names the seed and the call.

    name: the function, where it is not to be drawn too.
    """
    tally = Tally() if tally is None else tally
    draw = Draw(seed)
    drawn = draw.choices(list(CALLS), [weight for _, weight in CALLS.values()])[0]
    name = name or drawn
    tally.calls[name] += 1
    try:
        CALLS[name][0](draw, Comparison(lambda value, share: tally.note(f"{name}: {value}", share, seed)))
    except NearBorder:
        tally.left_out[name] += 1
    except Exception as error:
        tally.wrong[name] += 1
        told = "\n".join(f"  {key} = {value!r}" for key, value in draw.told.items())
        raise AssertionError(
            f"{name}: {type(error).__name__}: {error}\nthe call:\n{told}\n"
            f"again: .venv/bin/python tests/random_calls/repeat.py {seed} {name.split()[0]}"
        ) from error
    return {"function": name} | draw.told
