"""fastrl's presets as verl policy losses, and fastrl's head for verl's fused log-probabilities and entropies.

    from fastrl.integrations import verl as fast_verl

    fast_verl.register()    # then actor.policy_loss.loss_mode=fastrl_CISPO, fastrl_GSPO ...: fastrl_<preset> each
    fast_verl.enable()      # then model.use_fused_kernels=True computes log-probabilities and entropies with fastrl

verl trains in separate processes, so put both calls in a module that each of them imports, and name that module in
VERL_USE_EXTERNAL_MODULES (see docs/integrations/verl.md).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastrl import PRESETS, Objective, linear_token_logprobs, policy_loss
from fastrl.base.dependencies import how_to_install
from fastrl.integrations import megatron
from fastrl.integrations.patching import Replaced, exchange, say_once
from fastrl.objectives.gates import Clip, DivergenceMask
from fastrl.objectives.objective import CovarianceClip, CovarianceKL
from fastrl.planning.announce import active, announces_plan
from fastrl.planning.budget import parse_budget

__all__ = ["KNOWN", "FusedLinearForPPO", "disable", "enable", "linear_cross_entropy", "register"]

log = logging.getLogger("fastrl.verl")
#: The versions whose interfaces this adapter supports.
KNOWN = ("0.9.1",)

_ARGUMENTS = (
    "old_log_prob",
    "log_prob",
    "advantages",
    "response_mask",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
)
#: Aggregations fixed by the algorithm: verl's own SAPO and GMPO accept no other either.
_OWN_AGGREGATE = {"SAPO": "seq-mean-token-mean", "GMPO": "seq-mean-token-mean"}
_ONLY_AGGREGATE = {"LUSPO": "seq-mean-token-sum", "DrGRPO": "seq-mean-token-sum-norm"}
#: preset -> its arguments that verl's policy_loss has under another name
_OF_POLICY_LOSS = {
    "ClipCov": {"fraction": "clip_cov_ratio", "cov_low": "clip_cov_lb", "cov_high": "clip_cov_ub"},
    "KLCov": {"fraction": "kl_cov_ratio"},
}
_FROM_VERL = ("aggregate", "max_length")  # fields of an objective that `register` does not accept
_AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_BACKENDS = ("torch", "liger")  # of FusedLinearForPPO
_REDUCTIONS = ("none", "sum", "mean")  # of linear_cross_entropy
PolicyLossFunction = Callable[..., tuple[Tensor, dict[str, float]]]


def register(fields: Mapping[str, Mapping[str, Any]] | None = None) -> list[str]:
    """Register every preset of `fastrl.PRESETS` as verl policy loss `fastrl_<preset>`.

    Clip ratios (clip_ratio_low, clip_ratio_high, clip_ratio), clip_ratio_c (PPO's dual clip, DPPO's cap), tau_pos,
    tau_neg, policy_loss.ppo_kl_coef and policy_loss.dro_beta come from verl's actor config, Clip-Cov's and KL-Cov's
    numbers from its policy_loss, the aggregation from loss_agg_mode and the global batch. DPPO's clip ratios are its
    thresholds, and its kind is "tv", as verl's dppo_tv; `{"DPPO": {"kind": "kl"}}` makes it dppo_kl.

    Args:
        fields: preset -> its arguments or fields of `fastrl.Objective`, which override the config:
            `{"DeepSeekV32": {"off_policy_delta": 0.1}}`.

    Returns:
        The names registered.

    Raises:
        ImportError: without verl. RuntimeError: if this verl calls policy losses with other arguments. ValueError: for
            a preset that does not exist, a field that it does not have, or one that verl sets (aggregate, max_length).
    """
    core = _imported("verl.trainer.ppo.core_algos")
    parameters = tuple(inspect.signature(core.get_policy_loss_fn("vanilla")).parameters)
    if parameters != _ARGUMENTS:
        raise RuntimeError(
            f"fastrl.integrations.verl knows policy losses of verl {', '.join(KNOWN)}, called with"
            f" {', '.join(_ARGUMENTS)}; this verl calls them with {', '.join(parameters)}. Nothing was registered"
        )
    fields = {} if fields is None else fields
    for preset, overrides in fields.items():
        if preset not in PRESETS:
            raise ValueError(f"fields must name presets ({', '.join(PRESETS)}), got {preset!r}")
        for name in _FROM_VERL:
            if name in overrides:
                raise ValueError(
                    f"fields[{preset!r}] must leave {name} to verl's loss_agg_mode, got {overrides[name]!r}"
                )
        known = _fields_of(preset)
        for name in overrides:
            if name not in known:
                raise ValueError(f"fields[{preset!r}] must hold some of {', '.join(known)}, got {name!r}")
    for preset in PRESETS:
        core.register_policy_loss(f"fastrl_{preset}")(_policy_loss_of(preset, dict(fields.get(preset, {}))))
    active("verl")
    return [f"fastrl_{preset}" for preset in PRESETS]


def _fields_of(preset: str) -> list[str]:
    """The arguments of a preset and the fields of an objective, except those that verl sets."""
    arguments = [
        name
        for name, parameter in inspect.signature(PRESETS[preset]).parameters.items()
        if parameter.kind != parameter.VAR_KEYWORD
    ]
    names = dict.fromkeys([*arguments, *(field.name for field in dataclasses.fields(Objective))])
    return [name for name in names if name not in _FROM_VERL]


def _policy_loss_of(preset: str, fields: dict[str, Any]) -> PolicyLossFunction:
    """The function that verl calls for a preset."""

    def compute_policy_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        if config is None:
            raise ValueError("config must be verl's actor config, got None")
        aggregation, denominator = _aggregation(preset, loss_agg_mode, config, response_mask)
        objective = _objective(preset, config, fields, aggregation)
        weights = rollout_is_weights
        if weights is not None and objective.gate.token_clip is not None:
            weights = _geometric_means(weights, response_mask)
        inputs: dict[str, Any] = {
            "advantages": advantages,
            "mask": response_mask,
            "old_logprobs": old_log_prob,
            "token_weights": weights,
        }
        result = policy_loss(log_prob, objective=objective, denominator=denominator, **inputs)
        return result.loss, _metrics(objective, result.metrics, log_prob.detach(), inputs)

    compute_policy_loss.__doc__ = f"fastrl's {preset} as a policy loss of verl."
    return compute_policy_loss


def _objective(preset: str, config: Any, fields: dict[str, Any], aggregation: dict[str, Any]) -> Objective:
    """A preset with verl's numbers. Its KL is off if it needs a reference, because verl adds its own."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    from_config: dict[str, Callable[[], Any]] = {
        "clip": lambda: low,
        "clip_low": lambda: low,
        "clip_high": lambda: high,
        "dual_clip": lambda: getattr(config, "clip_ratio_c", 3.0),
        "tau_pos": lambda: config.tau_pos,
        "tau_neg": lambda: config.tau_neg,
        "coef": lambda: config.policy_loss.ppo_kl_coef,
        "kl_coef": lambda: 0.0,
        "beta": lambda: _dro_beta(config),
    }
    for name, option in _OF_POLICY_LOSS.get(preset, {}).items():
        value = getattr(config.policy_loss, option, None)
        if value is not None:  # else the preset's default, which is verl's
            from_config[name] = functools.partial(float, value)
    parameters = inspect.signature(PRESETS[preset]).parameters
    arguments = {k: number() for k, number in from_config.items() if k in parameters and k not in fields}
    if preset == "CISPO":
        arguments = {"cap": 1 + high, "low": max(1 - low, 0.0)}
    elif preset == "DPPO":
        arguments = {"low": low, "high": high, "cap": getattr(config, "clip_ratio_c", 20.0)}
    elif preset == "GMPO":
        if low != high and "clip" not in fields:
            raise ValueError(f"clip_ratio_low and clip_ratio_high must be equal for fastrl_GMPO, got {low} and {high}")
    elif "clip" in arguments and "clip_high" not in parameters:  # the preset's one number is both of its clip's
        del arguments["clip"]
        arguments["gate"] = Clip(low, high)
    if preset == "DeepSeekV32" and "off_policy_delta" not in fields:
        raise ValueError(
            "off_policy_delta is needed by fastrl_DeepSeekV32 and not in verl's config:"
            " register({'DeepSeekV32': {'off_policy_delta': ...}})"
        )
    if preset == "DeepSeekV32" and getattr(config, "use_kl_loss", False):
        say_once(log, "fastrl_DeepSeekV32: use_kl_loss adds verl's own KL, which is not multiplied by the ratio")
    return PRESETS[preset](**(arguments | fields | aggregation))


def _dro_beta(config: Any) -> float:
    beta: float | None = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError(f"policy_loss.dro_beta must be > 0 for fastrl_DRO, got {beta}")
    return beta


def _aggregation(preset: str, mode: str, config: Any, mask: Tensor) -> tuple[dict[str, Any], Tensor | float]:
    """The objective's fields and the denominator that reproduce verl's `agg_loss`."""
    if mode not in _AGGREGATIONS:
        raise ValueError(f"loss_agg_mode must be one of {', '.join(_AGGREGATIONS)}, got {mode!r}")
    only = _ONLY_AGGREGATE.get(preset, mode)
    if mode != only:
        raise ValueError(f"loss_agg_mode must be {only!r} for fastrl_{preset}, which is defined by it, got {mode!r}")
    mode = _OWN_AGGREGATE.get(preset, mode)
    info = dict(config.global_batch_info)
    ranks, tokens, responses = info.get("dp_size", 1), info.get("batch_num_tokens"), info.get("global_batch_size")
    if mode == "token-sum":
        return {"aggregate": "token-mean"}, 1 / ranks
    by_tokens = mode == "token-mean"
    count = tokens if by_tokens else responses
    if count is None:
        if ranks > 1:
            name = "batch_num_tokens" if by_tokens else "global_batch_size"
            raise ValueError(f"global_batch_info must hold {name} where dp_size is {ranks}")
        counts = (mask != 0).sum(-1)
        count = (counts if by_tokens else counts > 0).sum()  # verl does not count a response without tokens
    denominator = torch.as_tensor(count).clamp(min=1) / ranks
    fields: dict[str, Any] = {"aggregate": mode}
    if mode == "seq-mean-token-sum-norm":
        length = info.get("loss_scale_factor")
        fields["max_length"] = mask.shape[-1] if length is None else length
    return fields, denominator


@torch.no_grad()
def _geometric_means(weights: Tensor, mask: Tensor) -> Tensor:
    """GMPO's weights: the geometric mean of each response's weights, at all its tokens, as in verl."""
    logs = (weights.float() + 1e-10).log().where(mask != 0, 0.0)
    return (logs.sum(-1, keepdim=True) / (mask != 0).sum(-1, keepdim=True).clamp(min=1)).exp().expand_as(weights)


@torch.no_grad()
def _metrics(
    objective: Objective, metrics: dict[str, Tensor], log_prob: Tensor, inputs: dict[str, Any]
) -> dict[str, float]:
    """verl's three metrics as floats, in one synchronisation."""
    clipped, lower = metrics["clip_frac"], torch.zeros_like(metrics["clip_frac"])
    gate = objective.gate
    if gate.token_clip is not None:
        clipped, lower = metrics["clip_frac_high"], metrics["clip_frac_low"]
    elif isinstance(gate, Clip) and gate.dual is not None:  # `lower`: tokens that only the dual clip stopped
        plain = objective.replace(gate=dataclasses.replace(gate, dual=None), future_kl=None, covariance=None)
        clipped = policy_loss(log_prob, objective=plain, **inputs).metrics["clip_frac"]
        lower = metrics["clip_frac"] - clipped
    elif isinstance(gate, DivergenceMask):  # `lower`: tokens that only the cap stopped
        capped = (log_prob.float() - inputs["old_logprobs"].float()).exp() > gate.cap
        among = inputs | {"mask": inputs["mask"] * capped}
        stopped = policy_loss(log_prob, objective=objective, **among).metrics
        lower = stopped["tokens"] * (1 - stopped["clip_frac"]) / metrics["tokens"].clamp(min=1)
    bound, mask = objective.max_log_ratio, inputs["mask"] != 0
    drift = (inputs["old_logprobs"].float() - log_prob.float()).clamp(-bound, bound).where(mask, 0.0)
    if isinstance(objective.covariance, CovarianceClip):
        clipped = metrics["chosen_by_covariance"] / metrics["tokens"].clamp(min=1)
    elif isinstance(objective.covariance, CovarianceKL):
        drift = drift.abs()
    kl = drift.sum() / mask.sum().clamp(min=1)
    values = torch.stack([clipped, kl, lower]).tolist()
    return dict(zip(("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"), values, strict=True))


# --- log-probabilities and entropies ----------------------------------------------------------------------------------

_memory_budget: int | None = None
_replaced: dict[str, tuple[Any, Any]] = {}  # name -> verl's own and fastrl's
_of_shards = Replaced("verl")


class FusedLinearForPPO(torch.nn.Module):
    """Replaces verl's module of this name: (log-probabilities, entropies) from hidden states and the head.

    chunk_size and impl_backend ("torch" or "liger") have no effect. Both results are float32 and differentiable; verl's
    entropies have the hidden states' dtype. Logits are rounded to the head's dtype, as in verl's torch backend.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        if impl_backend not in _BACKENDS:
            raise ValueError(f"impl_backend must be one of {', '.join(_BACKENDS)}, got {impl_backend!r}")
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """hidden_states (..., H), vocab_weights (V, H), input_ids (...). Both results are (...)."""
        return _scored(hidden_states, vocab_weights, input_ids, temperature)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Replaces verl's kernel of this name: log-probabilities and entropies, flattened to (N,) as in verl.

    Logits are the products' float32 sums whatever the head's dtype, as in verl's kernel. With a process group (tensor
    parallelism) weight is this rank's part of the head, and the gradient of hidden is the part of it that comes from
    there, as verl's kernel leaves it: Megatron's sequence parallelism sums the parts. For another reduction it calls
    verl's own kernel, and logs one line.
    """
    if str(reduction).lower() not in _REDUCTIONS:  # as in verl
        raise ValueError(f"reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    shards = 1 if dist_process_group is None else torch.distributed.get_world_size(dist_process_group)
    if reduction != "none":
        if "linear_cross_entropy" not in _replaced:
            raise NotImplementedError(f"linear_cross_entropy does not take reduction {reduction!r}")
        say_once(log, f"verl's own kernel is used: fastrl does not take reduction {reduction!r}")
        original, _ = _replaced["linear_cross_entropy"]
        result: tuple[Tensor, Tensor] = original(hidden, weight, labels, temperature, reduction, dist_process_group)
        return result
    group = dist_process_group if shards > 1 else None
    # The kernels that verl 0.9.1 has for this (efficient_entropy_kernel_general_mainloop and those of the backward, in
    # verl/utils/kernel/kernels.py) add up the products in a float32 tile, `logits`, and never round it.
    rows = hidden.reshape(-1, hidden.shape[-1])
    return _scored(rows, weight, labels.reshape(-1), temperature, group, torch.float32)


@announces_plan("verl's fused log-probabilities")
def _scored(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    group: Any = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    stats = linear_token_logprobs(
        hidden,
        weight,
        labels.long(),
        temperature=float(temperature),
        entropy=True,
        logits_dtype=logits_dtype,
        memory_budget=_memory_budget,
        tp_group=group,
        reduce_hidden_grad=False,
    )
    assert stats.entropy is not None
    return stats.logprobs, stats.entropy


_PLACES: dict[str, tuple[str, Any]] = {
    "FusedLinearForPPO": ("verl.utils.experimental.torch_functional", FusedLinearForPPO),
    "linear_cross_entropy": ("verl.utils.kernel.linear_cross_entropy", linear_cross_entropy),
}


def enable(*, memory_budget: int | str | None = None) -> None:
    """Make models with use_fused_kernels score tokens with fastrl, for any fused_kernels_backend.

    Where Megatron is installed, log-probabilities and entropies of logits that lie over its tensor parallel group are
    fastrl's too, without fused kernels (see `fastrl.integrations.megatron`).

    Args:
        memory_budget: as in `fastrl.linear_token_logprobs`, for each call.

    Raises:
        ImportError: without verl. RuntimeError: for a version that is not in `KNOWN`, before anything is changed.
    """
    global _memory_budget
    budget = parse_budget(memory_budget)
    version = getattr(_imported("verl"), "__version__", "unknown")
    if version not in KNOWN:
        raise RuntimeError(
            f"fastrl.integrations.verl knows the fused kernels of verl {', '.join(KNOWN)}, not of {version}."
            " Nothing was changed"
        )
    modules = {name: _imported(path) for name, (path, _) in _PLACES.items()}
    disable()
    for name, module in modules.items():
        _replaced[name] = getattr(module, name), _PLACES[name][1]
        exchange("verl", name, *_replaced[name])
    _memory_budget = budget
    active("verl")
    try:
        of_shards = importlib.import_module("verl.utils.megatron.tensor_parallel")
    except ImportError:  # without Megatron, verl has no logits of vocabulary shards
        return
    try:
        _of_shards.replace(
            of_shards,
            megatron.vocab_parallel_log_probs_from_logits,
            megatron.vocab_parallel_entropy,
            megatron.vocab_parallel_entropy_with_chunking,
        )
    except RuntimeError:  # its functions take other arguments: nothing is replaced
        disable()
        raise


def disable() -> None:
    """Restore what `enable()` replaced."""
    global _memory_budget
    for name, (old, new) in _replaced.items():
        exchange("verl", name, new, old)
    _replaced.clear()
    _of_shards.restore()
    _memory_budget = None


def _imported(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ImportError(f"fastrl.integrations.verl needs verl ({error}): {how_to_install(['verl'])}") from error
