"""Record the experts that a mixture-of-experts model chose while sampling, and replay them in training.

    with record_routing(model) as recorder:
        tokens = model.generate(prompts, attention_mask=prompt_mask, do_sample=True)
    routing = recorder.routing(tokens.shape[1])
    with replay_routing(model, routing):
        loss(model(tokens, attention_mask=mask)).backward()  # checkpointing runs the routers again in the backward

A token close to the boundary between two experts may go to one in the sampler and to the other in the training forward.
Its ratio is then far from 1 although no parameter has changed. DeepSeek-V3.2 (arXiv:2512.02556, "Keep Routing") trains
the experts that were used in sampling; the gate weights are the current ones at those experts, normalised by the
model's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fastrl.base.dependencies import how_to_install
from fastrl.models.patching import replaced_method

try:
    import transformers
except ImportError as why:
    raise ImportError(
        f"fastrl.integrations.routing needs transformers ({why}): {how_to_install(['transformers'])}"
    ) from why


def all_gates(router: Any, logits: Tensor, experts: Tensor, sigmoid: bool = False) -> Tensor:
    """Float32 softmax over all experts, or sigmoids, at `experts` (N, K): (N, K), normalised by the router's rule."""
    scores = logits.float().sigmoid() if sigmoid else logits.softmax(-1, dtype=torch.float32)
    gates = scores.gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):  # routers like Mixtral's have no such option, and normalise
        # The model's own choice never sums to 0, but experts that its router no longer chooses may underflow.
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    return gates * getattr(router, "routed_scaling_factor", 1.0)


def chosen_gates(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Softmax over the logits of only `experts` (N, K): (N, K), in the logits' dtype."""
    return logits.gather(-1, experts).softmax(-1)


@dataclass(frozen=True)
class RouterAdapter:
    """Describes a router class whose forward returns (logits (N, E), gate weights, experts (N, K), ...)."""

    gate_weights: Callable[[Any, Tensor, Tensor], Tensor]  # (router, logits, experts) -> weights, by the model's rule
    sizes: Callable[[Any], tuple[int, int]] = lambda router: (router.weight.shape[0], router.top_k)  # E and K


# Keys are names of router classes in transformers 5.
_SOFTMAX = """FlexOlmoTopKRouter MellumTopKRouter MiniMaxTopKRouter MixtralTopKRouter OlmoeTopKRouter Qwen2MoeTopKRouter
    Qwen3MoeTopKRouter Qwen3NextTopKRouter Qwen3OmniMoeTextTopKRouter Qwen3OmniMoeThinkerTextTopKRouter
    Qwen3VLMoeTextTopKRouter Qwen3_5MoeTopKRouter"""
_SIGMOID = """DeepseekV3TopkRouter DeepseekV32TopkRouter Dots1TopkRouter ExaoneMoeTopkRouter Glm4MoeTopkRouter
    Glm4MoeLiteTopkRouter Glm4vMoeTextTopkRouter GlmMoeDsaTopkRouter NemotronHTopkRouter SolarOpenTopkRouter"""
_CHOSEN_SOFTMAX = "AriaTextTopKRouter GptOssTopKRouter GraniteMoeTopKRouter GraniteMoeHybridTopKRouter"
ADAPTERS: dict[str, RouterAdapter] = {
    **dict.fromkeys(_SOFTMAX.split(), RouterAdapter(all_gates)),
    **dict.fromkeys(_SIGMOID.split(), RouterAdapter(partial(all_gates, sigmoid=True))),
    **dict.fromkeys(_CHOSEN_SOFTMAX.split(), RouterAdapter(chosen_gates)),
}
_Adapters = Mapping[str, RouterAdapter] | None


class RoutingRecorder:
    """The experts of one run of `generate`, created by `record_routing`. Recording never waits for the GPU."""

    def __init__(self, layers: int, dtype: torch.dtype) -> None:
        self._layers, self._dtype = layers, dtype
        self._begin(0, 0, True)
        self._recording = False

    def routing(self, length: int) -> Tensor:
        """The experts of the sequences that `generate` returned: (B, length, L, K) int16, on the device.

        L is the number of router modules, in the model's order. The dtype is int32 for more than 32767 experts. Entries
        are -1 where nothing was recorded: at the last sampled token, which the model never saw, and in columns beyond
        it. Padding is recorded. For a packed batch use routing[mask][None], (1, N, L, K). Raises ValueError if nothing
        was recorded, or if length < 1.
        """
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"length must be a positive integer, got {length!r}")
        recorded = {layer: torch.cat(steps, 1) for layer, steps in enumerate(self._steps) if steps}
        if not recorded:
            raise ValueError("nothing was recorded: record_routing's model must be the one whose generate is called")
        first = next(iter(recorded.values()))
        routing = first.new_full((self._batch, length, self._layers, first.shape[2]), -1)
        for layer, experts in recorded.items():
            routing[:, : experts.shape[1], layer] = experts[:, :length]
        return routing

    def _begin(self, batch: int, prompt: int, cached: bool) -> None:
        self._recording, self._batch, self._prompt, self._cached = True, batch, prompt, cached
        self._steps: list[list[Tensor]] = [[] for _ in range(self._layers)]  # per layer and forward: (B, new tokens, K)
        self._positions = [0] * self._layers

    def _record(self, layer: int, adapter: RouterAdapter, router: Any, args: Any, output: Any) -> None:
        """A forward hook: stores the experts (B T, K) of the prompt, whole or in chunks, or of one more token."""
        if not self._recording:
            return
        chosen = _checked(router, adapter, output)[2]
        position, tokens = self._positions[layer], chosen.shape[:-1].numel() / self._batch
        prefill = position < self._prompt
        new = tokens if prefill else 1
        expected = new if prefill or self._cached else position + 1
        if tokens != expected or not tokens.is_integer() or (prefill and position + new > self._prompt):
            got = f"{tokens:g} tokens per sequence in router {layer}, after {position} with a prompt of {self._prompt}"
            raise ValueError(f"only sampling one token per step, without an assistant, can be recorded, got {got}")
        chosen = chosen.detach().view(self._batch, int(tokens), -1)
        self._steps[layer].append(chosen[:, -int(new) :].to(self._dtype))
        self._positions[layer] += int(new)


def has_routers(model: Any, adapters: _Adapters = None) -> bool:
    """Whether the model has a router that `record_routing` and `replay_routing` support."""
    return bool(_find(model, adapters))


@contextmanager
def record_routing(model: Any, adapters: _Adapters = None) -> Iterator[RoutingRecorder]:
    """Record the experts of each token in the forwards of `model.generate` inside the block.

    Each call of `generate` begins a new recording; other forwards are not recorded. The model may be a wrapper that
    forwards attributes (PEFT). It is restored afterwards, also after an error. Blocks nest. `adapters`, keyed by the
    name of the router's class, take precedence over `ADAPTERS`. Raises TypeError for a model without known routers or
    one that cannot generate; ValueError if its routers choose different numbers of experts, and from a `generate` with
    beams, an assistant, guidance or a cache that is not empty.
    """
    routers = routers_of(model, adapters)
    # `generate` calls this method once, before its first forward, with its final settings.
    build = getattr(model, "_get_logits_processor", None)
    if build is None:
        got = f"{type(model).__name__} with transformers {transformers.__version__}"
        raise TypeError(f"model must be one whose generate calls _get_logits_processor, got {got}")
    owner = getattr(build, "__self__", model)  # the object that `generate` runs on, if model is a wrapper
    generate = owner.generate
    experts = max(adapter.sizes(router)[0] for router, adapter in routers)
    recorder = RoutingRecorder(len(routers), torch.int16 if experts <= torch.iinfo(torch.int16).max else torch.int32)

    @wraps(generate)
    def generate_recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("assistant_model") is not None:
            raise ValueError("only sampling without an assistant can be recorded, got assistant_model")
        try:
            return generate(*args, **kwargs)
        finally:
            recorder._recording = False

    @wraps(build)
    def build_and_begin(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        config = generation_config
        mode = str(config.get_generation_mode().value)
        if mode not in ("sample", "greedy_search") or config.guidance_scale not in (None, 1):
            raise ValueError(f"only sampling without beams, assistant and guidance can be recorded, got {mode}")
        past = kwargs["model_kwargs"].get("past_key_values")
        if past is not None and past.get_seq_length() > 0:
            raise ValueError("past_key_values must be empty to record routing: the experts of its tokens are not known")
        batch, prompt = kwargs["encoder_input_ids"].shape[:2]  # ids or embeddings
        recorder._begin(batch * (config.num_return_sequences or 1), prompt, config.use_cache is not False)
        return build(config, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced_method(owner, "generate", MethodType(generate_recorded, owner)))
        stack.enter_context(replaced_method(owner, "_get_logits_processor", MethodType(build_and_begin, owner)))
        for layer, (router, adapter) in enumerate(routers):
            stack.callback(router.register_forward_hook(partial(recorder._record, layer, adapter)).remove)
        yield recorder


@contextmanager
def replay_routing(model: Any, routing: Tensor, adapters: _Adapters = None) -> Iterator[None]:
    """Send the tokens of every forward of the model inside the block to these experts.

    Run the backward inside the block too: gradient checkpointing runs the routers again, and outside the block they
    would make their own choice, without an error. An inner block overrides an outer one, and a recording records the
    imposed experts. Router logits, for auxiliary losses, are not changed. The model is restored afterwards, also after
    an error.

    `routing` is (B, S, L, K) int16, int32 or int64 for forwards over (B, S) tokens, or (1, N, L, K) for packed ones, L
    as in a recording. A row of -1 leaves the choice to the router. `fastrl.integrations.vllm.routing_from_vllm` builds
    it from vLLM's records. The check of its values waits for the GPU once. Raises TypeError for a model without known
    routers; ValueError for a routing of another shape or dtype, or with experts that do not exist or are repeated for a
    token, and from a forward over another number of tokens.
    """
    routers = routers_of(model, adapters)
    _check_routing(routing, routers)
    with ExitStack() as stack:
        for layer, (router, adapter) in enumerate(routers):
            forward = _imposing(router, adapter, routing[:, :, layer].flatten(0, 1))
            stack.enter_context(replaced_method(router, "forward", forward))
        yield


def _imposing(router: Any, adapter: RouterAdapter, imposed: Tensor) -> Callable[..., Any]:
    """The router's forward with its choice replaced by `imposed` (N, K), except for rows of -1."""
    forward = router.forward

    @wraps(forward)
    def forward_imposed(*args: Any, **kwargs: Any) -> Any:
        logits, weights, chosen, *rest = _checked(router, adapter, forward(*args, **kwargs))
        tokens = chosen.shape[:-1].numel()
        if tokens != len(imposed):
            raise ValueError(f"routing must have a row for each of the forward's {tokens} tokens, got {len(imposed)}")
        replayed = imposed.to(chosen.device, chosen.dtype).view(chosen.shape)
        experts = chosen.where(replayed < 0, replayed)
        return (logits, adapter.gate_weights(router, logits, experts).to(weights.dtype), experts, *rest)

    return forward_imposed


def _checked(router: Any, adapter: RouterAdapter, output: Any) -> Any:
    """Return a router's output, or raise TypeError if its order is unknown: versions of transformers differ."""
    (experts, chosen), (logits, _, choice, *_) = adapter.sizes(router), output
    if choice.is_floating_point() or (logits.shape[-1], choice.shape[-1]) != (experts, chosen):
        got = ", ".join(f"{str(x.dtype).removeprefix('torch.')} (..., {x.shape[-1]})" for x in output[:3])
        raise TypeError(
            f"{type(router).__name__} must return logits (..., {experts}), gate weights and the choice (..., {chosen}),"
            f" got {got} with transformers {transformers.__version__}"
        )
    return output


def _check_routing(routing: Tensor, routers: list[tuple[Any, RouterAdapter]]) -> None:
    sizes = [adapter.sizes(router) for router, adapter in routers]
    if not isinstance(routing, Tensor) or routing.dtype not in (torch.int16, torch.int32, torch.int64):
        got = str(routing.dtype) if isinstance(routing, Tensor) else type(routing).__name__
        got += "" if isinstance(routing, Tensor) else " (for vLLM's: fastrl.integrations.vllm.routing_from_vllm)"
        raise ValueError(f"routing must be a tensor of torch.int16, torch.int32 or torch.int64, got {got}")
    if routing.dim() != 4 or routing.shape[2:] != (len(sizes), sizes[0][1]):
        raise ValueError(f"routing must have shape (B, S, {len(sizes)}, {sizes[0][1]}), got {tuple(routing.shape)}")
    count = torch.tensor([experts for experts, _ in sizes], device=routing.device)[:, None]
    twice = routing.sort(-1).values.diff() == 0
    wrong = (((routing < 0) | (routing >= count)).any(-1) | twice.any(-1)) & (routing != -1).any(-1)
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        expected = f"different experts from 0 to {sizes[at[2]][0] - 1}, or -1 alone"
        raise ValueError(f"routing must hold {expected}, got {routing[*at].tolist()} at {at}")


def _find(model: Any, adapters: _Adapters) -> list[tuple[Any, RouterAdapter]]:
    """The model's routers, in module order."""
    known = {**ADAPTERS, **(adapters or {})}
    named = [(type(module).__name__, module) for module in getattr(model, "modules", list)()]
    return [(module, known[name]) for name, module in named if name in known]


def routers_of(model: Any, adapters: _Adapters) -> list[tuple[Any, RouterAdapter]]:
    """The model's routers in module order: at least one, and all choose the same number of experts."""
    routers = _find(model, adapters)
    if not routers:
        known = ", ".join(sorted({**ADAPTERS, **(adapters or {})}))
        more = f"got {type(model).__name__}: for another class pass adapters={{'ItsName': RouterAdapter(...)}}"
        raise TypeError(f"model must have routers of a known class ({known}), {more}")
    if len(chosen := {adapter.sizes(router)[1] for router, adapter in routers}) > 1:
        raise ValueError(f"model must have routers that all choose the same number of experts, got {sorted(chosen)}")
    return routers
