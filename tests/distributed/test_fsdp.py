"""A fused head under FSDP2 and DistributedDataParallel: the gradients of one process over the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fastrl

VOCAB = 51  # uneven over any number of ranks
ROWS, LENGTH, ACCUMULATION = 8, 7, 2


def imported() -> None:
    """What the tests need is imported."""
    from fastrl.integrations.transformers import fused_lm_head

    fused_lm_head(model_of(False))


def model_of(tied: bool) -> Any:
    """The same on every rank: one layer; a bias on the head unless it is tied."""
    from tiny_models import tiny_model

    torch.manual_seed(0)
    model = tiny_model("qwen2" if tied else "phi", vocab_size=VOCAB, tie_word_embeddings=tied, head_dim=8).train()
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batches() -> list[dict[str, Tensor]]:
    """Two micro-batches of 4 rows, left-padded by another number each; many labels do not count."""
    torch.manual_seed(1)
    input_ids = torch.randint(VOCAB, (ACCUMULATION, ROWS, LENGTH))
    mask = torch.arange(LENGTH) >= torch.arange(ROWS)[:, None] % 4
    mask = mask.expand(ACCUMULATION, ROWS, LENGTH)
    labels = input_ids.masked_fill(~mask | (torch.rand(input_ids.shape) < 0.3), -100)
    return [
        {"input_ids": i, "attention_mask": m.long(), "labels": x}
        for i, m, x in zip(input_ids, mask, labels, strict=True)
    ]


def mine(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's rows."""
    return {name: x.chunk(dist.get_world_size())[dist.get_rank()] for name, x in batch.items()}


def count() -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches())


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Whole, on every rank."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        name = name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
    return found


def of_one_process(tied: bool) -> dict[str, Tensor]:
    """Gradients of the model's own loss, the mean over all tokens of both micro-batches."""
    model = model_of(tied)
    for batch in batches():
        model(**batch, num_items_in_batch=count()).loss.backward()
    return gradients(model)


def sharded(model: Any, layout: str, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None) or decoder.final_layernorm
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, **options)
    if layout == "own unit":
        fully_shard(model.lm_head, mesh=mesh, **options)
    elif layout == "with the norm":  # as accelerate
        fully_shard([norm, model.lm_head], mesh=mesh, **options)
    elif layout == "with norm and embedding":  # as accelerate for tied ones
        fully_shard([norm, model.get_input_embeddings(), model.lm_head], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def step(model: Any, called: Any, entry: str, sync: Callable[[bool], Any]) -> list[float]:
    """The losses of all micro-batches; `called` is the model or what wraps it."""
    from fastrl.integrations.transformers import compute_loss_func

    total = count() / dist.get_world_size()  # gradients are averaged over the ranks
    losses = []
    for i, batch in enumerate(batches()):
        inputs = mine(batch)
        with sync(i == ACCUMULATION - 1):
            if entry == "token stats":
                loss = called(**inputs, num_items_in_batch=total, return_token_stats=True).loss
            elif entry == "own":
                loss = called(**inputs, num_items_in_batch=total).loss
            else:
                labels = inputs.pop("labels")
                loss = compute_loss_func(model)(called(**inputs), labels, total)
            loss.backward()
            losses.append(loss.item())
    return losses


def fsdp_step(
    tied: bool, layout: str, entry: str, first: bool, accumulate: bool, checkpoint: str | None, options: dict[str, Any]
) -> dict[str, Tensor]:
    from fastrl.integrations.transformers import fused_lm_head

    model = model_of(tied)
    if checkpoint == "layers":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        layers = model.get_decoder().layers
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer)
    elif checkpoint == "transformers":
        model.gradient_checkpointing_enable()
    if first:
        fused_lm_head(model)
    sharded(model, layout, **options)
    if not first:
        fused_lm_head(model)

    def sync(last: bool) -> Any:
        if accumulate:
            model.set_requires_gradient_sync(last)
        return nullcontext()

    with warnings.catch_warnings():
        if entry != "own":  # whose bfloat16 logits are a view, of which FSDP2 warns
            warnings.simplefilter("error")
        step(model, model, entry, sync)
    return gradients(model)


def unequal_batch(rank: int) -> dict[str, Tensor]:
    """Rank 0 has a short row without a label that counts; rank 1 has many more tokens than fit in the budget."""
    generator = torch.Generator().manual_seed(rank)
    input_ids = torch.randint(VOCAB, (1, 5) if rank == 0 else (8, 60), generator=generator)
    return {"input_ids": input_ids, "labels": torch.full_like(input_ids, -100) if rank == 0 else input_ids}


UNEQUAL_COUNT = 8 * 59
COLLECTIVES = ("FSDP::all_gather", "FSDP::post_backward_reduce")


def unequal_step(tied: bool, layout: str, entry: str, budget: int) -> tuple[dict[str, Tensor], list[str], int]:
    """Gradients, what FSDP2 gathered and reduced, and how often the head was called."""
    from fastrl.integrations.transformers import compute_loss_func, fused_lm_head

    model = fused_lm_head(sharded(model_of(tied), layout, reshard_after_forward=True), memory_budget=budget)
    calls: list[None] = []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: calls.append(None))
    batch, count = unequal_batch(dist.get_rank()), UNEQUAL_COUNT / dist.get_world_size()
    with torch.profiler.profile() as profile:
        if entry == "token stats":
            loss = model(**batch, num_items_in_batch=count, return_token_stats=True).loss
        else:
            labels = batch.pop("labels")
            loss = compute_loss_func(model)(model(**batch), labels, count)
        loss.backward()
    names = [e.name for e in profile.events() if e.name.split(" (")[0] in COLLECTIVES]  # "... (name of the unit)"
    return gradients(model), sorted(names), len(calls)


def adapted(model: Any) -> Any:
    import peft

    torch.manual_seed(2)
    settings = peft.LoraConfig(r=2, target_modules=["fc1", "fc2"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, settings)


def adapter_step(entry: str, first: bool) -> dict[str, Tensor]:
    from fastrl.integrations.transformers import fused_lm_head

    model = adapted(model_of(False))
    if first:
        fused_lm_head(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    if not first:
        fused_lm_head(model)
    step(model, model, entry, lambda last: nullcontext())
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def refused() -> list[str]:
    """The errors for a sharded weight outside its module's forward, sharded hidden states, and a model in parts."""
    from fastrl.integrations.transformers import fused_lm_head

    model = model_of(False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.lm_head, mesh=mesh)
    hidden, targets = torch.randn(4, 16), torch.arange(4)
    plain = torch.randn(VOCAB, 16)
    calls: list[Callable[[], Any]] = [
        lambda: fastrl.linear_cross_entropy(hidden, model.lm_head.weight, targets),
        lambda: fastrl.linear_token_logprobs(distribute_tensor(hidden, mesh, [Shard(0)]), plain, targets),
        lambda: fused_lm_head(model),
    ]
    texts = []
    for call in calls:
        try:
            call()
        except (TypeError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def ddp_step(tied: bool, entry: str, accumulate: bool, unused: bool) -> dict[str, Tensor]:
    from fastrl.integrations.transformers import fused_lm_head

    model = fused_lm_head(model_of(tied))
    wrapped = DistributedDataParallel(model, find_unused_parameters=unused)
    step(model, wrapped, entry, lambda last: nullcontext() if last or not accumulate else wrapped.no_sync())
    return gradients(wrapped)


def agree(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for of_rank in found:
        assert of_rank.keys() == expected.keys()
        for name, value in expected.items():
            # Float32 sums over ranks and micro-batches, in another order.
            margin = 2e-6 * float(value.abs().max())
            torch.testing.assert_close(of_rank[name], value, rtol=1e-5, atol=margin, msg=lambda x, n=name: f"{n}: {x}")


LAYOUTS = [
    (False, "own unit"),
    (False, "with the norm"),
    (False, "root"),
    (True, "root"),
    (True, "with norm and embedding"),
]
ENTRIES = ["token stats", "loss function"]
#: reshard_after_forward, fused_lm_head before fully_shard, gradients reduced after the last micro-batch only
MANNERS = [(True, True, True), (False, False, True), (None, True, False), (True, False, False), (None, False, True)]
#: Two manners of each layout and entry are fast tests; among them each manner meets each entry.
EVERY = [
    pytest.param(*layout, *manner, entry, marks=() if (i + j + 2 * k) % 5 in (0, 2) else pytest.mark.slow)
    for i, layout in enumerate(LAYOUTS)
    for j, manner in enumerate(MANNERS)
    for k, entry in enumerate(ENTRIES)
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two processes, because each of them imports transformers, and does so before it has others to wait for."""
    processes = Ranks(2)
    processes.run(imported, timeout=150)
    yield processes
    processes.stop()


@pytest.mark.parametrize(("tied", "layout", "reshard", "first", "accumulate", "entry"), EVERY)
def test_gradients_under_fsdp_are_those_of_one_process(
    pair: Ranks, tied: bool, layout: str, reshard: bool | None, first: bool, accumulate: bool, entry: str
) -> None:
    options = {"reshard_after_forward": reshard}
    agree(pair.run(fsdp_step, tied, layout, entry, first, accumulate, None, options), of_one_process(tied))


@pytest.mark.parametrize(
    ("tied", "layout", "checkpoint"), [(*LAYOUTS[0], "layers"), (*LAYOUTS[2], "layers"), (*LAYOUTS[4], "transformers")]
)
def test_activation_checkpointing_changes_nothing(pair: Ranks, tied: bool, layout: str, checkpoint: str) -> None:
    for entry in ENTRIES:
        agree(pair.run(fsdp_step, tied, layout, entry, True, True, checkpoint, {}), of_one_process(tied))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("tied", "accumulate", "unused"), [(False, True, True), (True, False, False), (True, True, True)]
)
def test_gradients_under_ddp_are_those_of_one_process(
    pair: Ranks, tied: bool, accumulate: bool, unused: bool, entry: str
) -> None:
    agree(pair.run(ddp_step, tied, entry, accumulate, unused), of_one_process(tied))


@pytest.mark.parametrize("output", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tied", "layout"), LAYOUTS[::4])
def test_mixed_precision_is_as_exact_as_the_models_own_loss(
    pair: Ranks, tied: bool, layout: str, output: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output)
    exact = of_one_process(tied)
    (own, _), *results = (
        pair.run(fsdp_step, tied, layout, x, True, False, None, {"mp_policy": policy}) for x in ("own", *ENTRIES)
    )
    for entry, (found, _) in zip(ENTRIES, results, strict=True):
        for name, value in exact.items():
            error, allowed = (float((x[name].float() - value).norm() / value.norm()) for x in (found, own))
            # Roundings to bfloat16 are as many, but not the same.
            assert error <= 1.2 * allowed + 1e-3, f"{entry}, {name}: {error}, the model's own loss {allowed}"


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("tied", "layout"), [LAYOUTS[0], LAYOUTS[3], LAYOUTS[4]])
def test_a_rank_without_tokens_makes_the_same_collectives(pair: Ranks, tied: bool, layout: str, entry: str) -> None:
    model = model_of(tied)
    model(**unequal_batch(1), num_items_in_batch=UNEQUAL_COUNT).loss.backward()
    (found, collectives, calls), (other, others, more) = pair.run(unequal_step, tied, layout, entry, 1_200_000)
    agree([found, other], gradients(model))
    assert calls == more == 1, "the head's module is called once, whatever the rank's chunks"
    assert collectives == others
    # The loss function comes after the forward, for which a unit with the embedding was gathered already; torch 2.11
    # keeps some of these.
    most = 4 if entry == "loss function" and layout != "own unit" else 2
    own = [name for name in collectives if "lm_head" in name]
    of_head = [name.split()[0] for name in own or collectives if "layers" not in name]  # a root has no name
    gathers, reductions = (of_head.count(name) for name in COLLECTIVES)
    assert 2 <= gathers <= most and reductions == 1


def test_adapters_under_fsdp(pair: Ranks) -> None:
    """PEFT's wrapper is then the root."""
    pytest.importorskip("peft")
    model = adapted(model_of(False))
    for batch in batches():
        model(**batch, num_items_in_batch=count()).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for entry in ENTRIES:
        for first in (True, False):
            agree(pair.run(adapter_step, entry, first), expected)


def test_what_is_not_whole_is_refused_with_what_to_do(pair: Ranks) -> None:
    for weight, hidden, partial in pair.run(refused):
        for argument, text in (("weight", weight), ("hidden", hidden)):
            assert text.startswith(f"TypeError: {argument} must be a dense tensor"), text
            for way in ("inside its module's forward, where FSDP2", "the tp_group that it lies over", ".full_tensor()"):
                assert way in text
        assert partial.startswith("ValueError: fully_shard was applied to parts of PhiForCausalLM and not to itself")
