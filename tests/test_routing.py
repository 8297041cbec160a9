"""Keep routing: the experts of generate's forwards are recorded, and imposed on the training forward."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fastrl.integrations.routing import (
    ADAPTERS,
    RouterAdapter,
    RoutingRecorder,
    all_gates,
    has_routers,
    record_routing,
    replay_routing,
)
from fastrl.integrations.transformers import record_sampling

VOCAB, PAD, STEPS, EXPERTS, TOP_K = 29, 0, 7, 6, 2
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "num_experts_per_tok": TOP_K, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD,
}  # fmt: skip
QWEN = SIZES | {"num_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 8}


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=EXPERTS, sliding_window=None)
    return transformers.MixtralForCausalLM(config)


def qwen(**options: Any) -> Any:
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(QWEN | options)))


MODELS: dict[str, Callable[[], Any]] = {
    "qwen normalised": lambda: qwen(norm_topk_prob=True),
    "qwen": lambda: qwen(norm_topk_prob=False),
    "qwen with dense layers": lambda: qwen(norm_topk_prob=True, num_hidden_layers=4, decoder_sparse_step=2),
    "mixtral": mixtral,
}


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param().eval()


@pytest.fixture
def one_model() -> Any:
    torch.manual_seed(0)
    return qwen(norm_topk_prob=True).eval()


def prompts(*lengths: int) -> tuple[Tensor, Tensor]:
    """Left-padded prompts and their mask, (B, P)."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(max(lengths))[None] >= max(lengths) - torch.tensor(lengths)[:, None]
    ids = torch.randint(1, VOCAB, mask.shape, generator=generator)
    return ids.where(mask, PAD), mask


def generate(model: Any, lengths: tuple[int, ...] = (5, 3, 1, 4), **options: Any) -> Any:
    ids, mask = prompts(*lengths)
    torch.manual_seed(1)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": STEPS, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=mask.long(), output_logits=True, **(settings | options))


def inputs(sequences: Tensor, lengths: tuple[int, ...] = (5, 3, 1, 4)) -> dict[str, Tensor]:
    """What the training forward gets for generated sequences (B, S)."""
    mask = nn.functional.pad(prompts(*lengths)[1], (0, sequences.shape[1] - max(lengths)), value=True)
    return {"input_ids": sequences, "attention_mask": mask.long(), "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def logprobs(logits: Tensor, sequences: Tensor) -> Tensor:
    """Of the sampled tokens, (B, T), from logits (B, S, V)."""
    steps = logits.log_softmax(-1)[:, :-1].gather(-1, sequences[:, 1:, None])[..., 0]
    return steps[:, -STEPS:]


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


@contextmanager
def another_choice(model: Any, choose: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Routers choose the experts that `choose` (layer, logits) says; the gate rule is written out once more here."""

    def hook(layer: int) -> Callable[..., Any]:
        def change(router: Any, args: Any, output: Any) -> Any:
            experts = choose(layer, output[0])
            gates = torch.softmax(output[0], -1)[torch.arange(len(experts))[:, None], experts]
            if getattr(router, "norm_topk_prob", True):
                gates = gates / gates.sum(-1, keepdim=True)
            return output[0], gates, experts

        return change

    handles = [router.register_forward_hook(hook(layer)) for layer, router in enumerate(routers(model))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def swapping() -> Callable[[int, Tensor], Tensor]:
    """The third expert for the second, at a third of the tokens, as another engine's rounding would choose."""
    generator = torch.Generator().manual_seed(5)

    def choose(layer: int, logits: Tensor) -> Tensor:
        ranks = logits.topk(3).indices
        swapped = torch.rand(len(ranks), 1, generator=generator) < 0.3
        return torch.where(swapped, ranks[:, [0, 2]], ranks[:, :2])

    return choose


def perturbed_rollout(model: Any) -> tuple[Any, Tensor]:
    """What generate returned while its routers chose other experts at times, and which experts (B, S, L, K)."""
    with another_choice(model, swapping()), record_routing(model) as recorder:
        out = generate(model)
    return out, recorder.routing(out.sequences.shape[1])


def gradients(model: Any, sequences: Tensor, **more: Any) -> dict[str, Tensor]:
    model.zero_grad()
    logprobs(model(**inputs(sequences), **more).logits, sequences).sum().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_ratios_of_an_unchanged_model_are_one(model: Any) -> None:
    out, routing = perturbed_rollout(model)
    sampled = logprobs(torch.stack([out.logits[0]] * 5 + list(out.logits[1:]) + [out.logits[-1]], 1), out.sequences)
    with torch.no_grad():
        own = logprobs(model(**inputs(out.sequences)).logits, out.sequences)
        with replay_routing(model, routing):
            replayed = logprobs(model(**inputs(out.sequences)).logits, out.sequences)
    assert routing.shape == (4, 5 + STEPS, len(routers(model)), TOP_K) and routing.dtype == torch.int16
    assert ((replayed - sampled).exp() - 1).abs().max() < 1e-5
    assert ((own - sampled).exp() - 1).abs().max() > 1e-3


def test_what_is_recorded_is_what_the_routers_chose(model: Any) -> None:
    """Every position's experts, but the last's: the model never saw that token."""
    with record_routing(model) as recorder:
        sequences = generate(model).sequences
    chosen = []
    handles = [r.register_forward_hook(lambda m, a, o: chosen.append(o[2].view(4, -1, TOP_K))) for r in routers(model)]
    model(**inputs(sequences))
    for handle in handles:
        handle.remove()
    expected = torch.stack(chosen, 2).to(torch.int16)
    routing = recorder.routing(sequences.shape[1] + 2)
    mask = inputs(sequences)["attention_mask"][:, :-1].bool()
    assert torch.equal(routing[:, :-3][mask], expected[:, :-1][mask])
    assert (routing[:, -3:] == -1).all()
    assert torch.equal(recorder.routing(4), routing[:, :4])


def test_replaying_the_models_own_choice_changes_nothing(model: Any) -> None:
    sequences = generate(model).sequences
    with record_routing(model) as recorder:
        model.generate(**inputs(sequences), max_new_tokens=1)
    routing = recorder.routing(sequences.shape[1])
    assert routing.min() >= 0
    plain, expected = model(**inputs(sequences)).logits, gradients(model, sequences)
    with replay_routing(model, routing):
        assert torch.equal(model(**inputs(sequences)).logits, plain)
        found = gradients(model, sequences)
    assert all(torch.equal(found[name], expected[name]) for name in expected) and len(found) == len(expected)


def test_gradients_go_through_the_gates_at_the_imposed_experts(model: Any) -> None:
    out, routing = perturbed_rollout(model)
    own = gradients(model, out.sequences)
    routing[:, -1] = routing[:, -2]  # that of the last token has no say in any log-probability
    with another_choice(model, lambda layer, logits: routing[:, :, layer].flatten(0, 1).long()):
        expected = gradients(model, out.sequences)
    with replay_routing(model, routing):
        found = gradients(model, out.sequences)
    assert_equal(found, expected)
    gates = [name for name in expected if name.endswith("gate.weight")]
    assert len(gates) == len(routers(model))
    assert all((expected[name] - own[name]).abs().max() > 1e-3 and found[name].abs().max() > 0 for name in gates)


def test_the_logits_of_the_routers_are_their_own(one_model: Any) -> None:
    """A forward of one layer's experts changes the next layer's logits, so those of the first are compared."""
    out, routing = perturbed_rollout(one_model)
    expected = one_model(**inputs(out.sequences), output_router_logits=True).router_logits
    with replay_routing(one_model, routing):
        found = one_model(**inputs(out.sequences), output_router_logits=True).router_logits
    assert torch.equal(found[0], expected[0]) and len(found) == len(expected) == 3
    assert all(logits.requires_grad for logits in found)  # an auxiliary loss trains them


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("name", ["qwen normalised", "mixtral"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_checkpointing_routes_alike_in_the_backward(name: str, kwargs: dict[str, bool] | None) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    out, routing = perturbed_rollout(model)
    model.train()
    own = gradients(model, out.sequences)
    calls = []
    with replay_routing(model, routing):
        expected = gradients(model, out.sequences)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        handle = routers(model)[0].register_forward_hook(lambda *_: calls.append(1))
        found = gradients(model, out.sequences, use_cache=False)
        handle.remove()
    assert len(calls) == 2  # it did run again
    assert_equal(found, expected)
    assert max((expected[key] - own[key]).abs().max() for key in expected) > 1e-3


def test_a_packed_batch_is_routed_as_a_padded_one(model: Any) -> None:
    out, routing = perturbed_rollout(model)
    padded = inputs(out.sequences)
    mask = padded["attention_mask"].bool()
    with torch.no_grad():
        with replay_routing(model, routing):
            expected = model(**padded).logits[mask]
        with replay_routing(model, routing[mask][None]):
            found = model(
                input_ids=out.sequences[mask][None], position_ids=padded["position_ids"][mask][None], use_cache=False
            ).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_rows_of_minus_one_are_the_models_own(one_model: Any, dtype: torch.dtype) -> None:
    out, routing = perturbed_rollout(one_model)
    routing, batch = routing.to(dtype), inputs(out.sequences)
    plain = one_model(**batch).logits
    with replay_routing(one_model, torch.full_like(routing, -1)):
        assert torch.equal(one_model(**batch).logits, plain)
    mixed = routing.clone()
    mixed[:2] = -1
    with replay_routing(one_model, routing):
        imposed = one_model(**batch).logits
    with replay_routing(one_model, mixed):
        found = one_model(**batch).logits
    torch.testing.assert_close(found[:2], plain[:2], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[2:], imposed[2:], rtol=0, atol=1e-5)
    assert (imposed - plain)[:2].abs().max() > 1e-2 < (imposed - plain)[2:].abs().max()


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((1, 1), {}),
        ((1,), {"num_return_sequences": 3}),
        ((4, 2), {"num_return_sequences": 2}),
        ((4, 2), {"do_sample": False}),
        ((4, 2), {"use_cache": False}),
        ((1, 1), {"use_cache": False}),
        ((5, 2), {"prefill_chunk_size": 2}),
        ((5, 2), {"cache_implementation": "static"}),
        ((3, 2), {"max_new_tokens": 1}),
    ],
)
def test_ways_to_generate(one_model: Any, lengths: tuple[int, ...], options: dict[str, Any]) -> None:
    with record_routing(one_model) as recorder:
        sequences = generate(one_model, lengths, **options).sequences
    rows = tuple(length for length in lengths for _ in range(options.get("num_return_sequences", 1)))
    batch = inputs(sequences, lengths=rows) if rows == lengths else expanded(sequences, lengths)
    with record_routing(one_model) as whole:
        one_model.generate(**batch, max_new_tokens=1)
    mask = batch["attention_mask"].bool()
    mask[:, -1] = False
    length = sequences.shape[1]
    assert torch.equal(recorder.routing(length)[mask], whole.routing(length)[mask])
    assert (recorder.routing(length)[:, -1] == -1).all()


def expanded(sequences: Tensor, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    copies = len(sequences) // len(lengths)
    mask = nn.functional.pad(prompts(*lengths)[1], (0, sequences.shape[1] - max(lengths)), value=True)
    mask = mask.repeat_interleave(copies, 0)
    return {"input_ids": sequences, "attention_mask": mask.long(), "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def test_embeddings_for_a_prompt(one_model: Any) -> None:
    ids, mask = prompts(4, 2)
    options = {"attention_mask": mask.long(), "max_new_tokens": 3}
    with record_routing(one_model) as recorder:
        one_model.generate(ids, **options)
        expected = recorder.routing(7)
        one_model.generate(inputs_embeds=one_model.get_input_embeddings()(ids), **options)
    assert torch.equal(recorder.routing(7), expected) and (expected[:, :6] >= 0).all()


def test_each_generate_begins_anew_and_blocks_nest(one_model: Any) -> None:
    with record_routing(one_model) as outer:
        generate(one_model)
        first = outer.routing(12)
        one_model(**inputs(torch.ones(4, 9, dtype=torch.long)))  # not of a generate
        assert torch.equal(outer.routing(12), first)
        with record_routing(one_model) as inner:
            generate(one_model, (1, 1))
        assert torch.equal(inner.routing(8), outer.routing(8)) and inner.routing(8).shape[0] == 2
        assert not torch.equal(outer.routing(8), first[:2, :8])
        generate(one_model)
    assert torch.equal(outer.routing(12), first) and inner.routing(8).shape[0] == 2


def test_an_inner_replay_overrules_and_a_recording_sees_it(one_model: Any) -> None:
    out, routing = perturbed_rollout(one_model)
    batch, other = inputs(out.sequences), routing.roll(1, 0)
    routing[:, -1], other[:, -1] = torch.tensor([0, 1]), torch.tensor([1, 2])
    with replay_routing(one_model, other):
        expected = one_model(**batch).logits
    with replay_routing(one_model, routing):
        outer = one_model(**batch).logits
        with replay_routing(one_model, other):
            assert torch.equal(one_model(**batch).logits, expected)
        assert torch.equal(one_model(**batch).logits, outer) and not torch.equal(outer, expected)
    with record_routing(one_model) as recorder, replay_routing(one_model, other):
        one_model.generate(**batch, max_new_tokens=1)
    assert torch.equal(recorder.routing(12), other)


def test_the_model_is_left_as_it_was(one_model: Any) -> None:
    def state() -> list[Any]:
        hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in one_model.modules()]
        return [*hooks, *([*vars(m)] for m in one_model.modules())]

    generate(one_model)
    before = state()
    with pytest.raises(ValueError, match="got beam_search"), record_routing(one_model) as recorder:
        one_model.generate(prompts(2)[0], num_beams=2, max_new_tokens=2)
    assert state() == before
    with record_routing(one_model) as recorder:
        assert state() != before
        generate(one_model, (3,))
    assert state() == before
    routing = recorder.routing(3 + STEPS)
    with replay_routing(one_model, routing):
        assert state() != before
    assert state() == before
    with pytest.raises(ValueError, match="must have a row"), replay_routing(one_model, routing):
        one_model(prompts(4)[0])
    assert state() == before
    plain = one_model(**inputs(generate(one_model, (3,)).sequences, (3,))).logits
    assert torch.equal(recorder.routing(3 + STEPS), routing) and plain.shape[1] == 3 + STEPS


def test_a_wrapper_that_passes_attributes_on(one_model: Any) -> None:
    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            return getattr(one_model, name)

    assert has_routers(Wrapper())
    with (
        record_routing(Wrapper()) as recorder,
        record_sampling(Wrapper()) as sampling,
        record_routing(Wrapper()) as inner,
    ):
        out = generate(Wrapper(), (3,), top_k=4)
    assert torch.equal(inner.routing(3 + STEPS), recorder.routing(3 + STEPS))
    assert len(sampling.sampling_mask()) == STEPS
    with replay_routing(Wrapper(), recorder.routing(3 + STEPS)):
        one_model(out.sequences)
        with pytest.raises(ValueError, match="must have a row"):
            one_model(out.sequences[:, :-1])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2, "do_sample": False}, "got beam_search"),
        ({"num_beams": 2}, "got beam_sample"),
        ({"prompt_lookup_num_tokens": 2}, "got assisted_generation"),
        ({"guidance_scale": 1.5}, "guidance can be recorded"),
    ],
)
def test_only_sampling_is_recorded(one_model: Any, options: dict[str, Any], reason: str) -> None:
    with record_routing(one_model), pytest.raises(ValueError, match=reason):
        generate(one_model, (3,), **options)


@pytest.mark.parametrize("own", [True, False])
def test_an_assistant_is_refused(one_model: Any, own: bool) -> None:
    assistant = one_model if own else qwen().eval()
    with record_routing(one_model), pytest.raises(ValueError, match="without an assistant"):
        generate(one_model, (3,), assistant_model=assistant)


@pytest.mark.parametrize("tokens", [2, STEPS])  # two: a single forward, of prompt and draft
def test_forwards_of_several_new_tokens_are_refused(one_model: Any, tokens: int) -> None:
    """Where an assistant comes unseen: by its position."""
    ids, assistant = prompts(3)[0], qwen().eval()
    config = transformers.GenerationConfig(max_new_tokens=tokens, pad_token_id=PAD)
    with record_routing(one_model), pytest.raises(ValueError, match=r"a token a step, .* got \d tokens a sequence"):
        one_model.generate(ids, config, None, None, None, None, assistant)


def test_a_cache_with_tokens_is_refused(one_model: Any) -> None:
    ids = prompts(5)[0]
    past = one_model(ids[:, :3], use_cache=True).past_key_values
    with record_routing(one_model), pytest.raises(ValueError, match="past_key_values must be empty"):
        one_model.generate(ids, past_key_values=past, max_new_tokens=2)


def test_nothing_recorded_and_bad_lengths(one_model: Any) -> None:
    with record_routing(one_model) as recorder:
        one_model(prompts(4)[0])
    with pytest.raises(ValueError, match="nothing was recorded"):
        recorder.routing(4)
    for length in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"length must be a positive integer, got {length}"):
            recorder.routing(length)  # type: ignore[arg-type]


def test_a_bad_routing_is_named_before_any_forward(one_model: Any) -> None:
    good = torch.tensor([0, 1]).expand(2, 4, 3, 2)

    def changed(values: list[int]) -> Tensor:
        routing = good.clone()
        routing[1, 2, 1] = torch.tensor(values)
        return routing

    cases = {
        "must be a tensor of torch.int16, torch.int32 or torch.int64, got torch.float32": good.float(),
        "torch.int32 or torch.int64, got list": good.tolist(),
        "must have shape (B, S, 3, 2), got (2, 4, 2, 2)": good[:, :, :2],
        "must have shape (B, S, 3, 2), got (2, 4, 3, 1)": good[..., :1],
        "must have shape (B, S, 3, 2), got (4, 3, 2)": good[0],
        "different experts from 0 to 5, or -1 alone, got [0, 6] at [1, 2, 1]": changed([0, 6]),
        "different experts from 0 to 5, or -1 alone, got [-2, 1] at [1, 2, 1]": changed([-2, 1]),
        "different experts from 0 to 5, or -1 alone, got [3, -1] at [1, 2, 1]": changed([3, -1]),
        "different experts from 0 to 5, or -1 alone, got [4, 4] at [1, 2, 1]": changed([4, 4]),
    }
    for message, routing in cases.items():
        with pytest.raises(ValueError, match="^routing .*" + re.escape(message)), replay_routing(one_model, routing):
            pytest.fail("the block ran")
    with replay_routing(one_model, changed([-1, -1])), pytest.raises(ValueError, match="forward's 6 tokens, got 8"):
        one_model(torch.ones(2, 3, dtype=torch.long))


def test_a_model_without_known_routers_is_named() -> None:
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    routing = torch.zeros(1, 1, 1, 2, dtype=torch.long)
    assert not has_routers(dense) and not has_routers(object())
    for block in (lambda: record_routing(dense), lambda: replay_routing(dense, routing)):
        with (
            pytest.raises(TypeError, match=r"MixtralTopKRouter.*Qwen3MoeTopKRouter.*LlamaForCausalLM.*adapters=\{"),
            block(),
        ):
            pytest.fail("the block ran")
    with pytest.raises(TypeError, match="_get_logits_processor, got MixtralModel"), record_routing(mixtral().model):
        pytest.fail("the block ran")


def test_an_adapter_of_ones_own(one_model: Any) -> None:
    """A router with its sizes elsewhere, another rule for its gates, and one more output."""

    class OddRouter(nn.Module):
        def __init__(self, like: Any) -> None:
            super().__init__()
            self.inner = nn.Linear(16, EXPERTS, bias=False)
            self.inner.weight = like.weight

        def forward(self, hidden: Tensor) -> Any:
            logits = self.inner(hidden)
            values, experts = logits.topk(TOP_K)
            return logits, values.tanh(), experts

    for layer in one_model.model.layers:
        layer.mlp.gate = OddRouter(layer.mlp.gate)
    adapters = {
        "OddRouter": RouterAdapter(
            lambda router, logits, experts: logits.gather(-1, experts).tanh(), lambda router: (EXPERTS, TOP_K)
        )
    }
    assert not has_routers(one_model) and has_routers(one_model, adapters)
    sequences = generate(one_model, (3, 2)).sequences
    batch = inputs(sequences, (3, 2))
    with record_routing(one_model, adapters) as recorder:
        one_model.generate(**batch, max_new_tokens=1)
    routing = recorder.routing(10)
    plain = one_model(**batch).logits
    with replay_routing(one_model, routing, adapters):
        assert torch.equal(one_model(**batch).logits, plain)
    with replay_routing(one_model, routing.roll(1, 0), adapters):
        assert not torch.equal(one_model(**batch).logits, plain)


def router_class(name: str) -> Any:
    folder = Path(transformers.__file__).parent / "models"
    for path in sorted(folder.glob("*/modeling_*.py")):
        if f"class {name}(" in path.read_text():
            return getattr(importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"), name)
    return None


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_has_its_models_rule(name: str) -> None:
    """Gate weights at the router's own choice are those that the router returns, in float32 and bfloat16."""
    cls = router_class(name)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    for normalised in (True, False):
        config = SimpleNamespace(
            hidden_size=16, num_experts=8, num_local_experts=8, n_routed_experts=8, moe_num_experts=8, moe_topk=3,
            num_experts_per_tok=3, norm_topk_prob=normalised, routed_scaling_factor=2.5, n_group=2, topk_group=1,
        )  # fmt: skip
        torch.manual_seed(0)
        router = cls(config)
        for parameter in router.parameters():
            nn.init.normal_(parameter)
        for dtype in (torch.float32, torch.bfloat16):
            router.to(dtype)
            logits, gates, experts = router(torch.randn(20, 16, dtype=dtype))
            adapter = ADAPTERS[name]
            assert adapter.sizes(router) == (8, 3) == (logits.shape[1], experts.shape[1])
            assert torch.equal(adapter.gate_weights(router, logits, experts).to(gates.dtype), gates)


def test_experts_that_the_router_has_left_have_finite_gates() -> None:
    logits = torch.tensor([[300.0, 0.0, -50.0, 1.0]], requires_grad=True)
    gates = all_gates(SimpleNamespace(), logits, torch.tensor([[1, 2]]))
    gates.sum().backward()
    assert gates.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()


def test_routers_that_choose_different_numbers_are_refused(one_model: Any) -> None:
    routers(one_model)[1].top_k = 3
    with pytest.raises(ValueError, match=re.escape("same number of experts, got [2, 3]")), record_routing(one_model):
        pytest.fail("the block ran")


def test_many_experts_need_int32() -> None:
    """16-bit indices would come back negative."""

    class Router(nn.Module):
        top_k, weight = 2, torch.empty(40_000, 1)

    model = qwen().eval()
    model.model.extra = Router()
    with record_routing(model, {"Router": RouterAdapter(all_gates)}) as recorder:
        generate(model, (2,))
    routing = recorder.routing(9)
    assert routing.dtype == torch.int32 and (routing[:, :, 3] == -1).all()  # the one that never ran
    assert (routing[:, :8, :3] >= 0).all()


def test_a_recorder_is_nothing_before_a_generate() -> None:
    with pytest.raises(ValueError, match="nothing was recorded"):
        RoutingRecorder(1, torch.int16).routing(1)


def test_without_transformers_the_extra_is_named() -> None:
    code = "import sys; sys.modules['transformers'] = None; import fastrl.integrations.routing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "pip install 'fastrl[train]'" in done.stderr
