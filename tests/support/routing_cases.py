"""What the tests of routing share: small mixtures, generations, and routers that choose other experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn

from fastrl.integrations.routing import record_routing, replay_routing

VOCAB, PAD, STEPS, EXPERTS, TOP_K = 29, 0, 7, 6, 2
SIZES = {
    "vocab_size": VOCAB,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_experts_per_tok": TOP_K,
    "initializer_range": 0.4,
    "pad_token_id": PAD,
}
QWEN = SIZES | {"num_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 8}


def mixtral() -> Any:
    return tiny_model("mixtral", **SIZES, num_local_experts=EXPERTS, sliding_window=None)


def qwen(**options: Any) -> Any:
    return tiny_model("qwen3_moe", **(QWEN | options))


MODELS: dict[str, Callable[[], Any]] = {
    "qwen normalised": lambda: qwen(norm_topk_prob=True),
    "qwen": lambda: qwen(norm_topk_prob=False),
    "qwen with dense layers": lambda: qwen(norm_topk_prob=True, num_hidden_layers=4, decoder_sparse_step=2),
    "mixtral": mixtral,
}


def seeded(make: Callable[[], Any]) -> Any:
    """A model of MODELS, the same at each call."""
    torch.manual_seed(0)
    return make()


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
    """What the training forward gets for generated sequences (B, S), of which each prompt may have several."""
    mask = nn.functional.pad(prompts(*lengths)[1], (0, sequences.shape[1] - max(lengths)), value=True)
    mask = mask.repeat_interleave(len(sequences) // len(lengths), 0)
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


def own_routing(model: Any, batch: dict[str, Tensor], adapters: Any = None) -> Tensor:
    """The experts that the model takes in a forward of the whole sequences, (B, S, L, K)."""
    with record_routing(model, adapters) as recorder:
        model.generate(**batch, max_new_tokens=1)
    return recorder.routing(batch["input_ids"].shape[1])


def replayed(model: Any, routing: Tensor, batch: dict[str, Any], adapters: Any = None) -> Tensor:
    """The logits with a replayed routing, (B, S, V)."""
    with replay_routing(model, routing, adapters):
        return model(**batch).logits


def assert_refused(error: type[Exception], words: str, block: AbstractContextManager[Any]) -> None:
    """The block is not entered."""
    with pytest.raises(error, match=words), block:
        pytest.fail("the block ran")


def gradients(model: Any, sequences: Tensor, **more: Any) -> dict[str, Tensor]:
    model.zero_grad()
    logprobs(model(**inputs(sequences), **more).logits, sequences).sum().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)
