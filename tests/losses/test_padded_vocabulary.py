"""`vocab_size=` on one device: the same numbers as without the padding, to the bit, whatever the padding holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl
from fastrl.passes.head import Head, Workspace
from fastrl.planning.plans import use_plan
from fastrl.planning.tiling import Tile

pytestmark = pytest.mark.usefixtures("one_thread")
# Several slices of the smallest tile that is ever chosen (64 x 128), the last of them ragged; no multiple of a vector.
RESPONSES, LENGTH, WIDTH, VOCAB, PADDING = 2, 34, 16, 301, 19
ROWS = (RESPONSES, LENGTH)
FILLS = {"numbers": 3.0, "nan": math.nan, "inf": math.inf}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Tensors = dict[str, Tensor]
SLOW = "Triton's interpreter is slow, and the loops around the kernels are the same for all backends"
INTERPRETED_PLANS = [("tiles", torch.bfloat16, "two-pass"), ("tiles", torch.float32, "forward-gradient")]


def posed(device: str, dtype: torch.dtype = torch.float32) -> Tensors:
    g = torch.Generator().manual_seed(2)
    found = {
        "hidden": torch.randn(*ROWS, WIDTH, generator=g),
        "weight": torch.randn(VOCAB, WIDTH, generator=g) / 2,
        "bias": torch.randn(VOCAB, generator=g),
    }
    return {name: x.to(dtype).to(device) for name, x in found.items()}


def targets_of(device: str) -> tuple[Tensor, Tensor]:
    """Targets, of which those of masked tokens are in the padding, and the mask."""
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(*ROWS, generator=g) > 0.2
    targets = torch.randint(VOCAB, ROWS, generator=g).where(mask, VOCAB + 1)
    targets[1, 5:7], mask[1, 5:7] = VOCAB - 1, True
    return targets.to(device), mask.to(device)


def interpreted(backend: str, device: str) -> bool:
    return backend == "triton" and device == "cpu"


def padded(x: Tensor, dim: int, fill: float, count: int = PADDING) -> Tensor:
    """With `count` more entries, those of a NaN or infinite fill alone."""
    shape = list(x.shape)
    shape[dim] = count
    more = torch.full(shape, fill, dtype=x.dtype, device=x.device)
    return torch.cat([x, more], dim)


def check(call: Callable[..., Any], plain: Tensors, filled: Tensors, dims: dict[str, int], **options: Any) -> None:
    """The results and gradients of a call with padding (whose dimension `dims` names) against those without it."""
    results, gradients = [], []
    for given, more in ((plain, {}), (filled, {"vocab_size": VOCAB})):
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        outputs = [x for x in call(leaves, **options, **more) if x is not None]
        differentiable = [x for x in outputs if x.requires_grad]
        g = torch.Generator().manual_seed(4)
        weights = [torch.randn(x.shape, generator=g).to(x.device) for x in differentiable]
        total = torch.stack([(x * w).sum() for x, w in zip(differentiable, weights, strict=True)]).sum()
        gradients.append(dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True)))
        results.append(outputs)
    assert len(results[0]) == len(results[1]) > 0
    for x, expected in zip(results[1], results[0], strict=True):
        assert not expected.isnan().any() and torch.equal(x, expected)
    for name, expected in gradients[0].items():
        found = gradients[1][name]
        assert expected.abs().max() > 0
        if name in dims:
            assert found.shape == filled[name].shape and found.is_contiguous()
            found, padding = found.split([VOCAB, PADDING], dims[name])
            assert torch.equal(padding, torch.zeros_like(padding)), name
        assert torch.equal(found, expected), name


GSPO = fastrl.GSPO(clip_low=0.3, clip_high=0.3, entropy_coef=0.01)
#: plan, objective
PLANS: list[tuple[str, Any]] = [
    ("forward-gradient", fastrl.GRPO()),
    ("whole-response", GSPO),
    ("frozen-head", fastrl.GRPO(entropy_coef=0.01)),
    ("recompute", fastrl.GRPO()),
    ("two-pass", fastrl.GRPO(entropy_coef=0.01)),
]


def sets_of(device: str, all_recorded: bool = False) -> fastrl.SamplingMask:
    """Recorded rows, some of them wide, and rows without a set unless `all_recorded`."""
    targets, mask = targets_of("cpu")
    g = torch.Generator().manual_seed(5)
    shares = torch.tensor([0.02, 0.02, 0.01, 0.01] if all_recorded else [0.02, 0.02, 0.6, 0.0])
    shares = shares.repeat(RESPONSES * LENGTH // 4)
    kept = torch.rand(RESPONSES * LENGTH, VOCAB, generator=g) < shares[:, None]
    kept[torch.arange(len(kept)), targets.where(mask, 0).view(-1)] |= shares > 0
    return fastrl.SamplingMask.from_lists([row.nonzero()[:, 0].tolist() for row in kept]).to(device)


def policy_loss(device: str, objective: Any, **options: Any) -> Callable[..., Any]:
    targets, mask = targets_of(device)
    g = torch.Generator().manual_seed(6)
    advantages = torch.randn(RESPONSES, generator=g).to(device)
    old = (-math.log(VOCAB) + 0.3 * torch.randn(*ROWS, generator=g)).to(device)
    given = {
        "objective": objective,
        "advantages": advantages,
        "mask": mask,
        "old_logprobs": old,
        "ref_logprobs": old,
        **options,
    }

    def call(leaves: Tensors, **more: Any) -> Any:
        if "logits" in leaves:
            out = fastrl.logits_policy_loss(leaves["logits"], targets, **given, **more)
        else:
            out = fastrl.linear_policy_loss(**leaves, targets=targets, **given, **more)
        return out.loss, out.logprobs, out.entropy

    return call


def heads(device: str, dtype: torch.dtype, fill: float) -> tuple[Tensors, Tensors, dict[str, int]]:
    plain = posed(device, dtype)
    filled = {name: x if name == "hidden" else padded(x, 0, fill) for name, x in plain.items()}
    return plain, filled, {"weight": 0, "bias": 0}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("plan", "objective"), PLANS, ids=lambda x: x if isinstance(x, str) else "")
def test_policy_losses_by_plan(
    backend: str, backend_device: str, tiles: str, plan: str, objective: Any, dtype: torch.dtype
) -> None:
    if dtype == torch.float16 and plan in ("forward-gradient", "whole-response"):
        pytest.skip("float16 gradients want a scale that is known only after all statistics")
    if interpreted(backend, backend_device) and (tiles, dtype, plan) not in INTERPRETED_PLANS:
        pytest.skip(SLOW)
    plain, filled, dims = heads(backend_device, dtype, math.nan)
    call = policy_loss(backend_device, objective, memory_budget="1GiB")
    if plan == "frozen-head":
        frozen = {name: {k: x.pop(k) for k in ("weight", "bias")} for name, x in (("p", plain), ("f", filled))}

        def of_hidden(leaves: Tensors, **more: Any) -> Any:
            return call({**leaves, **frozen["f" if "vocab_size" in more else "p"]}, **more)

        with use_plan(plan):
            check(of_hidden, plain, filled, {})
        return
    with use_plan(plan):
        check(call, plain, filled, dims)


@pytest.mark.parametrize(("fill", "wide"), [("numbers", None), ("nan", torch.float32), ("inf", None)])
def test_options_of_a_head(backend: str, backend_device: str, fill: str, wide: torch.dtype | None) -> None:
    """Softcap, temperatures, float32 logits, extras."""
    if interpreted(backend, backend_device) and fill != "nan":
        pytest.skip(SLOW)
    targets, mask = targets_of(backend_device)
    temperature = (0.5 + torch.rand(*ROWS, generator=torch.Generator().manual_seed(7))).to(backend_device)

    def call(leaves: Tensors, **more: Any) -> Any:
        extras = ("mean_logits", "is_top1", "log_sum_sq_probs")
        options: dict[str, Any] = {"temperature": temperature, "softcap": 8.0, "logit_scale": 0.7}
        out = fastrl.linear_token_logprobs(
            **leaves, targets=targets, mask=mask, entropy=True, extras=extras, logits_dtype=wide, **options, **more
        )
        plain = fastrl.linear_token_logprobs(**leaves, targets=targets, mask=mask, extras=extras[:1], **more)
        return *out, plain.mean_logits

    check(call, *heads(backend_device, torch.bfloat16, FILLS[fill]))


@pytest.mark.parametrize("objective", [fastrl.GRPO(), GSPO], ids=["GRPO", "GSPO"])
@pytest.mark.parametrize("all_recorded", [True, False])
def test_sampling_masks(backend: str, backend_device: str, objective: Any, all_recorded: bool) -> None:
    if interpreted(backend, backend_device) and (all_recorded or objective is GSPO):
        pytest.skip(SLOW)
    call = policy_loss(backend_device, objective, sampling_mask=sets_of(backend_device, all_recorded))
    check(call, *heads(backend_device, torch.float32, math.nan))


def test_functions_of_a_head(backend: str, backend_device: str) -> None:
    """Several entries, cross-entropy, DPO; divergences are below."""
    targets, mask = targets_of(backend_device)
    ids = torch.randint(VOCAB, (*ROWS, 3), generator=torch.Generator().manual_seed(8)).to(backend_device)
    ids[0, 0, 1], labels = VOCAB - 1, targets.where(mask, -100)
    ref = torch.zeros(RESPONSES, device=backend_device)

    def call(leaves: Tensors, **more: Any) -> Any:
        several = fastrl.linear_gathered_logprobs(**leaves, ids=ids, mask=mask, **more)
        in_sets = fastrl.linear_gathered_logprobs(
            **leaves, ids=sets_of(backend_device), mask=mask, sampling_mask=sets_of(backend_device), **more
        )
        losses = [fastrl.linear_cross_entropy(**leaves, targets=labels, reduction=x, **more) for x in ("mean", "none")]
        preference = fastrl.linear_dpo_loss(**leaves, targets=targets, mask=mask, ref_logprobs=ref, **more)
        return several, in_sets, *losses, preference.loss

    check(call, *heads(backend_device, torch.float32, math.nan))


def test_several_entries_with_a_frozen_head(backend: str, backend_device: str) -> None:
    plain, filled, _ = heads(backend_device, torch.bfloat16, math.nan)
    ids = torch.randint(VOCAB, (*ROWS, 3), generator=torch.Generator().manual_seed(8)).to(backend_device)

    def call(leaves: Tensors, **more: Any) -> Any:
        head = {name: (filled if more else plain)[name] for name in ("weight", "bias")}
        return (fastrl.linear_gathered_logprobs(leaves["hidden"], ids=ids, **head, **more),)

    hidden = {"hidden": plain["hidden"]}
    check(call, hidden, hidden, {})


@pytest.mark.parametrize("plan", ["forward-gradient", "recompute", "two-pass"])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_divergences(backend: str, backend_device: str, tiles: str, kind: str, plan: str) -> None:
    """The two heads have different numbers of padding rows."""
    if interpreted(backend, backend_device) and (tiles, kind, plan) != ("tiles", "jsd", "two-pass"):
        pytest.skip(SLOW)
    plain, filled, dims = heads(backend_device, torch.bfloat16, math.nan)
    _, mask = targets_of(backend_device)
    g = torch.Generator().manual_seed(9)
    states, weight, bias = (torch.randn(*shape, generator=g) / 2 for shape in ((*ROWS, 8), (VOCAB, 8), (VOCAB,)))
    states, weight, bias = (x.to(torch.bfloat16).to(backend_device) for x in (states, weight, bias))

    def call(leaves: Tensors, **more: Any) -> Any:
        head = [padded(x, 0, math.nan, 5) if more else x for x in (weight, bias)]
        teacher = dict(zip(("teacher_hidden", "teacher_weight", "teacher_bias"), (states, *head), strict=True))
        out = fastrl.linear_divergence(**leaves, **teacher, kind=kind, mask=mask, memory_budget="1GiB", **more)
        return out.loss, out.per_token

    with use_plan(plan):
        check(call, plain, filled, dims)


# --- from logits ------------------------------------------------------------------------------------------------------


def layouts(device: str, dtype: torch.dtype, fill: float) -> dict[str, tuple[Tensor, Tensor]]:
    """Logits without and with padding: dense, and all but the last of a padded batch's tokens."""
    g = torch.Generator().manual_seed(10)
    x = (2 * torch.randn(RESPONSES, LENGTH + 1, VOCAB, generator=g)).to(dtype).to(device)
    return {"dense": (x[:, :-1].contiguous(), padded(x[:, :-1], -1, fill)), "shifted": (x, padded(x, -1, fill))}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", ["dense", "shifted"])
@pytest.mark.parametrize(("fill", "dtype"), zip(FILLS, DTYPES, strict=True), ids=str)
def test_functions_of_logits(
    backend: str, backend_device: str, fill: str, dtype: torch.dtype, layout: str, inplace: bool
) -> None:
    """The gradient of the padding is 0; written over the logits, it is there too."""
    if interpreted(backend, backend_device) and (fill, layout, inplace) != ("nan", "shifted", True):
        pytest.skip(SLOW)
    targets, mask = targets_of(backend_device)
    ids = torch.randint(VOCAB, (*ROWS, 3), generator=torch.Generator().manual_seed(8)).to(backend_device)
    temperature = (0.5 + torch.rand(*ROWS, generator=torch.Generator().manual_seed(7))).to(backend_device)
    plain, filled = ({"logits": x} for x in layouts(backend_device, dtype, FILLS[fill])[layout])
    options: dict[str, Any] = {"mask": mask, "inplace": inplace}

    def of_rows(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(leaves: Tensors, **more: Any) -> Any:
            logits = leaves["logits"] * 1  # a leaf may not be overwritten
            written.append(logits)
            return function(logits[:, :LENGTH], **more)

        return call

    def statistics(logits: Tensor, sets: fastrl.SamplingMask | None = None, **more: Any) -> Any:
        out = fastrl.token_logprobs(logits, targets, entropy=True, sampling_mask=sets, softcap=5.0, **options, **more)
        return out.logprobs, out.entropy

    def entries(logits: Tensor, sets: fastrl.SamplingMask | None = None, **more: Any) -> Any:
        given = ids if sets is None else sets
        found = fastrl.gathered_logprobs(logits, given, sampling_mask=sets, temperature=temperature, **options, **more)
        return (found,)

    def losses(objective: Any) -> Callable[..., Any]:
        loss = policy_loss(backend_device, objective, inplace=inplace)
        return lambda logits, **more: loss({"logits": logits}, **more)

    for function in (statistics, entries, losses(fastrl.GRPO()), losses(GSPO)):
        written: list[Tensor] = []
        check(of_rows(function), plain, filled, {"logits": -1})
        if inplace:  # the leaf's gradient is that of its copy, which the call has overwritten
            assert not written[1].detach()[:, :LENGTH, VOCAB:].any()
    for function in (statistics, entries):
        check(of_rows(function), plain, filled, {"logits": -1}, sets=sets_of(backend_device))


# --- bad input --------------------------------------------------------------------------------------------------------

FROM_HEAD = ["linear_policy_loss", "linear_token_logprobs", "linear_gathered_logprobs", "linear_cross_entropy"]
FROM_HEAD += ["linear_divergence", "linear_dpo_loss", "linear_preference_loss", "linear_kto_loss"]
FROM_LOGITS = ["logits_policy_loss", "token_logprobs", "gathered_logprobs"]


def called(name: str, target: int = 0, **more: Any) -> None:
    """A call with 7 entries, of which `more` says how many count, and a target at one place."""
    g = torch.Generator().manual_seed(11)
    targets = torch.zeros(2, 3, dtype=torch.int64)
    targets[1, 2] = target
    values: Tensors = {"hidden": torch.randn(2, 3, 4, generator=g), "weight": torch.randn(7, 4, generator=g)}
    if name in FROM_LOGITS:
        values = {"logits": torch.randn(2, 3, 7, generator=g)}
    if "gathered" in name:
        values["ids"] = targets[..., None]
    elif name == "linear_divergence":
        values |= {
            "teacher_hidden": torch.randn(2, 3, 5, generator=g),
            "teacher_weight": torch.randn(8, 5, generator=g),
        }
    else:
        values["targets"] = targets
    if "policy" in name:
        more |= {"objective": fastrl.REINFORCE(), "advantages": torch.ones(2)}
    if "dpo" in name or "preference" in name or "kto" in name:
        more |= {"mask": torch.ones(2, 3), "ref_logprobs": torch.zeros(2)}
    if "preference" in name:
        more["objective"] = fastrl.IPO()
    if "kto" in name:
        more["desirable"] = torch.ones(2)
    getattr(fastrl, name)(**values, **more)


@pytest.mark.parametrize("name", FROM_HEAD + FROM_LOGITS)
def test_bad_sizes(name: str) -> None:
    called(name, vocab_size=6)
    for size, error, message in (
        (0, ValueError, "vocab_size must be at least 1, got 0"),
        (-3, ValueError, "vocab_size must be at least 1, got -3"),
        (8, ValueError, "vocab_size must be from 1 to 7, the entries of (weight|logits), got 8"),
        (True, TypeError, "vocab_size must be an int, got bool"),
        (6.0, TypeError, "vocab_size must be an int, got float"),
        (torch.tensor([3, 4]), TypeError, "vocab_size must be an int, got Tensor"),
    ):
        with pytest.raises(error, match=message):
            called(name, vocab_size=size)


@pytest.mark.parametrize("name", [x for x in FROM_HEAD if x != "linear_divergence"])
def test_a_number_is_no_switch(name: str) -> None:
    """Although 1 == True."""
    with pytest.raises(TypeError, match="reduce_hidden_grad must be a bool, got int"):
        called(name, 6, reduce_hidden_grad=1)


@pytest.mark.parametrize("name", [x for x in FROM_HEAD + FROM_LOGITS if x != "linear_divergence"])
def test_padding_is_no_target(name: str) -> None:
    called(name, 6)
    with pytest.raises(IndexError, match="6"):
        called(name, 6, vocab_size=6)


@pytest.mark.parametrize("name", ["linear_token_logprobs", "token_logprobs", "gathered_logprobs"])
def test_padding_is_in_no_set(name: str) -> None:
    sets = fastrl.SamplingMask.from_lists([[0, 6]] * 6)
    called(name, sampling_mask=sets)
    with pytest.raises(ValueError, match="sampling_mask"):
        called(name, sampling_mask=sets, vocab_size=6)


def test_heads_of_a_divergence_count_the_same_entries() -> None:
    with pytest.raises(ValueError, match="teacher_weight must have weight's vocabulary, 7 entries, got 8"):
        called("linear_divergence")
    called("linear_divergence", vocab_size=7)


def test_rows_of_a_tile_begin_on_a_cache_line(device: str) -> None:
    """Of an odd vocabulary, whose products would not be aligned; and the planner counts that memory."""
    head = Head(torch.randn(5, 8, device=device), torch.randn(101, 8, device=device), None)
    held = Workspace(head, Tile(3, 101), False, "")
    logits = held.logits(held.hidden(slice(1, 3)), slice(0, 101))
    assert logits.shape == (2, 101) and logits.stride() == (128, 1)
    assert logits.untyped_storage().nbytes() == 3 * 128 * 4
    torch.testing.assert_close(logits, head.hidden[1:3] @ head.weight.T)
