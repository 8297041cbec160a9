"""A mixture's load balancing loss, as the model's own forward computes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor


def asks_for_routers(model: Any, given: bool | None) -> bool:
    """Whether the model's own loss has this term: `given` is its argument output_router_logits, None = the config's."""
    if given is None:
        given = getattr(model.config.get_text_config(), "output_router_logits", False)
    return bool(given) and _own_function(model) is not None


def balancing_loss(model: Any, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    """The loss (), unweighted, of the router logits that the decoder returned; attention_mask (B, S) or None."""
    function, config = _own_function(model), model.config.get_text_config()
    assert function is not None, "asks_for_routers says so"
    # A family's model has the numbers as attributes, or only its config has them.
    experts, used = (getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok"))
    loss: Tensor = function(
        router_logits,
        config.num_experts if experts is None else experts,
        config.num_experts_per_tok if used is None else used,
        attention_mask,
    )
    return loss


def balancing_weight(model: Any) -> float:
    """The factor of `balancing_loss` in the model's own loss."""
    for owner in (model, model.config.get_text_config()):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if getattr(owner, name, None) is not None:
                return float(getattr(owner, name))
    raise ValueError(f"{type(model).__name__} has a load balancing loss, but no factor (router_aux_loss_coef) for it")


def _own_function(model: Any) -> Callable[..., Any] | None:
    """What the model's forward calls for this loss; None if it has none, as where a bias balances the experts.

    The families have copies of one function: of all router logits, experts, experts per token and attention mask.
    """
    for kind in type(model).__mro__:
        forward = vars(kind).get("forward")
        if forward is not None:
            function = getattr(inspect.unwrap(forward), "__globals__", {}).get("load_balancing_loss_func")
            if function is not None:
                found: Callable[..., Any] = function
                return found
    return None
