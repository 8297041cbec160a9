"""Recorded routing: every expert of every forward of generate, however it generates; what both recorders refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from routing_cases import PAD, STEPS, TOP_K, generate, inputs, own_routing, prompts, qwen, routers

from fastrl import SamplingMask
from fastrl.integrations.routing import RoutingRecorder, has_routers, record_routing, replay_routing
from fastrl.integrations.transformers import record_sampling


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
    batch = inputs(sequences, lengths)
    mask = batch["attention_mask"].bool()
    mask[:, -1] = False
    length = sequences.shape[1]
    assert torch.equal(recorder.routing(length)[mask], own_routing(one_model, batch)[mask])
    assert (recorder.routing(length)[:, -1] == -1).all()


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

    wrapper = Wrapper()
    assert has_routers(wrapper)
    with record_routing(wrapper) as recorder, record_sampling(wrapper) as sampling, record_routing(wrapper) as inner:
        out = generate(wrapper, (3,), top_k=4, output_scores=True)
    assert torch.equal(inner.routing(3 + STEPS), recorder.routing(3 + STEPS))
    assert sampling.sampling_mask() == SamplingMask.from_scores(out.scores)
    assert len(sampling.sampling_mask()) == STEPS
    with replay_routing(wrapper, recorder.routing(3 + STEPS)):
        one_model(out.sequences)
        with pytest.raises(ValueError, match="must have a row"):
            one_model(out.sequences[:, :-1])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2, "do_sample": False}, "got beam_search"),
    ({"num_beams": 2}, "got beam_sample"),
    ({"prompt_lookup_num_tokens": 2}, "got assisted_generation"),
    ({"assistant_model": lambda model: model}, "without an assistant"),
]


@pytest.mark.parametrize(
    ("record", "options", "reason"),
    [
        *((record, *case) for record in (record_routing, record_sampling) for case in REFUSED),
        (record_routing, {"guidance_scale": 1.5}, "beams, assistant and guidance"),
        (record_routing, {"assistant_model": lambda model: qwen()}, "without an assistant"),
        (record_sampling, {"do_sample": False}, "got greedy_search"),
    ],
)
def test_only_sampling_is_recorded(one_model: Any, record: Any, options: dict[str, Any], reason: str) -> None:
    options = {name: value(one_model) if callable(value) else value for name, value in options.items()}
    with record(one_model), pytest.raises(ValueError, match=rf"only sampling .*{reason}") as error:
        generate(one_model, (3,), **options)
    assert "can be recorded" in str(error.value)


@pytest.mark.parametrize("tokens", [2, STEPS])  # two: a single forward, of prompt and draft
def test_forwards_of_several_new_tokens_are_refused(one_model: Any, tokens: int) -> None:
    """Where an assistant comes unseen: by its position."""
    ids, assistant = prompts(3)[0], qwen()
    config = transformers.GenerationConfig(max_new_tokens=tokens, pad_token_id=PAD)
    with (
        record_routing(one_model),
        pytest.raises(ValueError, match=r"one token per step, .* got \d tokens per sequence"),
    ):
        one_model.generate(ids, config, None, None, None, None, assistant)


def test_a_cache_with_tokens_is_refused(one_model: Any) -> None:
    ids = prompts(5)[0]
    past = one_model(ids[:, :3], use_cache=True).past_key_values
    with record_routing(one_model), pytest.raises(ValueError, match="past_key_values must be empty"):
        one_model.generate(ids, past_key_values=past, max_new_tokens=2)


def test_nothing_recorded_and_bad_lengths(one_model: Any) -> None:
    with record_routing(one_model) as recorder:
        one_model(prompts(4)[0])
    for empty in (recorder, RoutingRecorder(1, torch.int16)):
        with pytest.raises(ValueError, match="nothing was recorded"):
            empty.routing(4)
    for length in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"length must be a positive integer, got {length}"):
            recorder.routing(length)  # type: ignore[arg-type]
