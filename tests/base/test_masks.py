"""Masks that hold something else than 0 and 1; tokens behind the last response; NaN and probabilities as inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_child import functions
from torch import Tensor

import fastrl
from fastrl.base import checks

VOCAB = 7


def more_functions() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Those that `functions` leaves out."""
    generator = torch.Generator().manual_seed(0)
    logits, hidden = torch.randn(2, 3, VOCAB, generator=generator), torch.randn(2, 3, 4, generator=generator)
    weight, ids = torch.randn(VOCAB, 4, generator=generator), torch.tensor([2, 5]).expand(2, 3, 2)
    logprobs = logits.log_softmax(-1)
    per_token = {"logprobs": logprobs[..., 0], "log_sum_sq_probs": (2 * logprobs).logsumexp(-1), "group_ids": [0, 0]}
    teacher = {"teacher_hidden": hidden + 1, "teacher_weight": weight, "kind": "jsd"}
    bare: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "gathered_logprobs": (fastrl.gathered_logprobs, {"logits": logits, "ids": ids}),
        "linear_gathered_logprobs": (fastrl.linear_gathered_logprobs, {"hidden": hidden, "weight": weight, "ids": ids}),
        "linear_divergence": (fastrl.linear_divergence, {"hidden": hidden, "weight": weight, **teacher}),
        "optimal_token_baseline_advantages": (
            fastrl.optimal_token_baseline_advantages,
            {"rewards": logits[..., 0], **per_token},
        ),
        "topk_divergence": (
            fastrl.topk_divergence,
            {"logprobs": logprobs[:, 0], "teacher_logprobs": logprobs[:, 1], "kind": "forward_kl"},
        ),
    }
    return {
        name: (function, {**given, "mask": torch.ones(2, VOCAB if name == "topk_divergence" else 3)})
        for name, (function, given) in bare.items()
    }


MASKS = ("mask", "desirable", "nll_mask")
CASES = {
    f"{name} {argument}": (function, given, argument)
    for name, (function, given) in {**functions(), **more_functions()}.items()
    for argument in MASKS
    if argument in given
}


def numbers(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, fastrl.SamplingMask):
        return [value.token_ids]
    return [x for part in value for x in numbers(part)] if isinstance(value, tuple) else []


@pytest.mark.parametrize("name", CASES)
def test_what_is_neither_0_nor_1_never_counts_without_a_word(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, given, argument = CASES[name]
    right = given[argument].clone().bool()
    right.view(-1)[1] = False
    expected = numbers(function(**{**given, argument: right}))
    for dtype, wrong in ((torch.float32, 0.5), (torch.int64, 2), (torch.float32, torch.nan)):
        mask = right.to(dtype)
        mask.view(-1)[1] = wrong
        with pytest.raises(ValueError, match=f"{argument} must hold only 0 and 1, got"):
            function(**{**given, argument: mask})
        with monkeypatch.context() as patch:
            patch.setattr(checks, "values_are_checked", lambda tensor: checks.always)  # on a CPU as on a GPU
            found = numbers(function(**{**given, argument: right.to(dtype)}))
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            if name.startswith("SamplingMask"):  # waits for the device in any case
                with pytest.raises(ValueError, match="must hold only 0 and 1"):
                    function(**{**given, argument: mask})
            else:
                spoilt = numbers(function(**{**given, argument: mask}))
                some = all if name.endswith("token_logprobs") else any
                assert some(x.isnan().any() for x in spoilt if x.is_floating_point()), (dtype, wrong)


def packed_functions() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Functions of packed responses, with arguments of 8 tokens in 2 responses, of which 6 are unmasked."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(8, generator=generator) - 2 for _ in range(3))
    head = {"hidden": torch.randn(8, 4, generator=generator), "weight": torch.randn(VOCAB, 4, generator=generator)}
    for x in head.values():
        x.requires_grad_()
    shared = {"mask": torch.tensor([1, 1, 0, 1, 0, 1, 1, 1]).bool(), "cu_seqlens": torch.tensor([0, 3, 8]).int()}
    targets = torch.arange(8) % VOCAB
    of_policy = {"advantages": torch.tensor([1.0, -2.0]), "old_logprobs": a, "ref_logprobs": b, **shared}
    of_responses = {**head, "targets": targets, "ref_logprobs": torch.tensor([-3.0, -4.0]), **shared}
    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "gae": (fastrl.gae, {"rewards": a, "values": b, **shared}),
        "value_loss": (fastrl.value_loss, {"values": a, "returns": b, **shared}),
        "kl_penalized_rewards": (
            partial(fastrl.kl_penalized_rewards, beta=0.1),
            {"scores": torch.ones(2), "logprobs": a, "ref_logprobs": b, **shared},
        ),
        "optimal_token_baseline_advantages": (
            partial(fastrl.optimal_token_baseline_advantages, group_ids=[0, 0]),
            {"rewards": a, "logprobs": b, "log_sum_sq_probs": 1.5 * b, **shared},
        ),
        "linear_dpo_loss": (fastrl.linear_dpo_loss, of_responses),
        "linear_kto_loss": (fastrl.linear_kto_loss, {**of_responses, "desirable": torch.tensor([True, False])}),
    }
    for name in ("GRPO", "GSPO", "DrGRPO", "GMPO"):
        objective = fastrl.PRESETS[name](**({"max_length": 9} if name == "DrGRPO" else {}))
        for function, inputs in (
            (fastrl.policy_loss, {"logprobs": c}),
            (fastrl.logits_policy_loss, {"logits": torch.randn(8, VOCAB, generator=generator), "targets": targets}),
            (fastrl.linear_policy_loss, {**head, "targets": targets}),
        ):
            found[f"{function.__name__} {name}"] = (partial(function, objective=objective), {**inputs, **of_policy})
    return found


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("name", packed_functions())
def test_masked_tokens_behind_the_last_response_are_ignored(
    name: str, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, given = packed_functions()[name]
    if not read:
        monkeypatch.setattr(checks, "values_are_checked", lambda tensor: checks.always)  # on a CPU as on a GPU

    def padded(key: str, value: Any, mask: int) -> Any:
        per_token = isinstance(value, Tensor) and value.shape[:1] == (8,)
        if not per_token:
            return value
        behind = value.new_full((3, *value.shape[1:]), mask if key == "mask" else 5)
        return torch.cat([value.detach(), behind]).requires_grad_(value.requires_grad)

    def result(**given: Any) -> tuple[list[Tensor], list[Tensor]]:
        result = function(**given)
        losses = [x for x in numbers(result) if not x.dim()]
        leaves = [x for x in (given.get("hidden"), given.get("weight")) if x is not None]
        gradients = torch.autograd.grad(result.loss, leaves) if leaves else ()
        metrics = list(getattr(result, "metrics", {}).values())
        return [*losses, *metrics], [x[:8] for x in (*numbers(result), *gradients) if x.dim()]

    expected = result(**given)
    found = result(**{k: padded(k, x, mask=0) for k, x in given.items()})
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, equal_nan=True)
    unmasked = {k: padded(k, x, mask=1) for k, x in given.items()}
    if read or name in ("linear_policy_loss GSPO", "linear_policy_loss GMPO"):  # which wait for the device in any case
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of tokens, 11, or to less"):
            function(**unmasked)
    else:
        losses, others = result(**unmasked)
        assert any(x.isnan().any() for x in (*losses, *others))


def test_no_responses_have_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values are not read, each token would get the number of a response that is not there."""
    monkeypatch.setattr(checks, "values_are_checked", lambda tensor: False)
    given = {"objective": fastrl.GRPO(kl_coef=0), "advantages": torch.ones(4), "cu_seqlens": torch.zeros(1).int()}
    with pytest.raises(ValueError, match=r"cu_seqlens must have shape .* at least \(2,\) for 4 tokens, got \(1,\)"):
        fastrl.policy_loss(torch.zeros(4), **given)


def test_a_compiled_call_names_the_mask_that_its_graph_could_not_read() -> None:
    logits, targets = torch.randn(2, 3, VOCAB), torch.zeros(2, 3, dtype=torch.int64)
    call = torch.compile(lambda mask: fastrl.token_logprobs(logits, targets, mask=mask).logprobs, backend="eager")
    assert call(torch.ones(2, 3)).isfinite().all()
    with pytest.raises(ValueError, match="mask must hold only 0 and 1"):
        call(torch.full((2, 3), 0.5))


# --- NaN, and probabilities in the place of log-probabilities ---------------------------------------------------------

LOGPROBS = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs", "log_sum_sq_probs")
LOGPROBS += ("chosen", "rejected", "chosen_logprobs", "rejected_logprobs", "ref_chosen", "ref_rejected")
NUMBERS = (*LOGPROBS, "advantages", "token_weights", "entropy_weights", "entropy", "values", "returns", "old_values")
NUMBERS += ("bootstrap", "kl", "rewards", "scores")
#: Functions for which NaN means that there is no number.
NAN_IS_NONE = ("group_advantages rewards", "rloo_advantages rewards", "kl_penalized_rewards scores")
NAN_IS_NONE += ("optimal_token_baseline_advantages rewards",)
WITH_NUMBERS = {
    f"{name} {argument}": (function, given, argument)
    for name, (function, given) in {**functions(), **more_functions()}.items()
    for argument in NUMBERS
    if argument in given and not name.startswith("SamplingMask") and f"{name} {argument}" not in NAN_IS_NONE
}


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_nan_and_probabilities_are_refused(name: str) -> None:
    function, given, argument = WITH_NUMBERS[name]
    value = given[argument].detach().clone()
    value.view(-1)[-1] = torch.nan
    with fastrl.check_inputs():
        function(**given)
        with pytest.raises(ValueError, match=rf"^{argument}\[.*\d\] is nan and not masked$"):
            function(**{**given, argument: value})
        per_token = value.shape == given["mask"].shape if "mask" in given else False
        if per_token or (argument == "advantages" and given["mask"].dim() == 2):
            mask = given["mask"].clone()
            mask[(-1, -1) if per_token and mask.dim() == 2 else -1] = 0  # the token, or all tokens of the response
            function(**{**given, argument: value, "mask": mask})
    function(**{**given, argument: value})
    if argument not in LOGPROBS:
        return
    with pytest.raises(
        ValueError, match=rf"^{argument}\[.*\d\] is .*, but a log-probability is at most 0: pass the log"
    ):
        function(**{**given, argument: torch.full_like(value, 0.3)})
    rounded = given[argument].detach() * 0 + 1e-3  # as bfloat16 may round log 1
    some = rounded - 2
    some.view(-1)[-1] = 0.3
    function(**{**given, argument: some})  # a single one may be a strange rounding
    with fastrl.check_inputs():
        function(**{**given, argument: rounded})
        with pytest.raises(ValueError, match=rf"^{argument}\[.*\d\] is 0.3, but"):
            function(**{**given, argument: some})


def test_what_torch_compile_traces_is_not_read() -> None:
    probabilities, given = torch.full((2, 3), 0.5), {"objective": fastrl.PPO(), "advantages": torch.ones(2)}
    call = torch.compile(lambda x: fastrl.policy_loss(x, **given).loss, backend="eager", fullgraph=True)
    assert call(probabilities).isfinite()


@pytest.mark.parametrize("capturing", [False, True])
def test_a_gpu_is_read_inside_check_inputs_but_for_the_capture_of_a_graph(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    assert not checks.values_are_checked(on_gpu)
    with fastrl.check_inputs():
        assert checks.values_are_checked(on_gpu) != capturing
