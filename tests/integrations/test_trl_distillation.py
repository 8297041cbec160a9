"""TRL's distillation trainers with fastrl's divergence: the same losses, gradients and metrics."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor
from trl.trainer import distillation_trainer as dense
from trl_cases import PROMPTS, assert_same_history, make_trainer

from fastrl.integrations import trl as fast_trl
from fastrl.integrations.trl import distillation

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.async_distillation import async_distillation_trainer as top_k

pytestmark = pytest.mark.filterwarnings("ignore")
B, T, H, H_T, V = 3, 7, 16, 24, 131
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # both sum 131 float32 exponentials, in another order


@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.5, 1.0), (1.0, 1.3)])
def test_the_trainer_logs_the_same(path: str, watch: Callable[..., list[Any]], beta: float, temperature: float) -> None:
    calls = watch(distillation, "linear_divergence")
    histories = []
    for own in (True, False):
        torch.manual_seed(1)
        trainer = make_trainer(
            "Distillation",
            path,
            2 * PROMPTS,
            teacher_model=tiny_model("qwen2", vocab_size=64, hidden_size=24, initializer_range=0.3),
            max_steps=4,
            max_completion_length=6,
            beta=beta,
            temperature=temperature,
        )
        if own:
            trainer.train()
            assert not calls
        else:
            with fast_trl.enabled(memory_budget="32MiB"):  # a trainer made before is served too
                trainer.train()
        histories.append(trainer.state.log_history)
    assert len(calls) == 8  # two micro-batches per step
    assert all(call["memory_budget"] == 32 << 20 and call["temperature"] == temperature for call in calls)
    assert_same_history(histories[1], histories[0])
    assert histories[0][0]["grad_norm"] > 1e-3 and histories[0][0]["entropy"] > 1


class Heads(NamedTuple):
    """Both models' hidden states and heads, and which tokens count."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    teacher: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    mask: Tensor

    @classmethod
    def of(cls, bias: bool = False, dtype: torch.dtype = torch.float32, vocab: int = V) -> Heads:
        g = torch.Generator().manual_seed(0)
        shapes = ((B, T, H), (V, H), (V,), (B, T, H_T), (vocab, H_T), (vocab,))
        values = [torch.randn(*shape, generator=g).to(dtype) for shape in shapes]
        if not bias:
            values[2] = values[5] = None
        mask = (torch.arange(T) < torch.tensor([7, 4, 1])[:, None]).long()
        mask[1, 2] = 0
        return cls(*values, mask)

    def divergence(self, beta: float, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
        """What TRL's function, as it is now, returns for this; and the student's gradients."""
        leaves = [None if x is None else x.clone().requires_grad_() for x in self[:3]]
        teacher = [None if x is None else x.clone().requires_grad_() for x in self[3:6]]
        found = dense._chunked_divergence_loss(
            leaves[0],
            teacher[0],
            leaves[1],
            teacher[1],
            self.mask,
            beta,
            student_lm_head_bias=leaves[2],
            teacher_lm_head_bias=teacher[2],
            **options,
        )
        (2 * found[0]).backward()
        assert all(x is None or x.grad is None for x in teacher)
        return [x.detach() for x in found], [x.grad for x in leaves if x is not None]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("bias", "items", "options"),
    [
        (False, None, {}),
        (True, 17, {"temperature": 0.7}),
        (True, torch.tensor(9.0), {"student_logit_scale": 0.5, "teacher_logit_scale": 2.0}),
        (False, None, {"student_final_logit_softcapping": 3.0, "temperature": 1.3}),
        (False, 17, {"teacher_final_logit_softcapping": 2.0, "student_final_logit_softcapping": 5.0}),
    ],
    ids=["plain", "bias, temperature", "scales", "one softcap", "two softcaps"],
)
def test_the_divergence_is_trls(
    watch: Callable[..., list[Any]], beta: float, bias: bool, items: Any, options: dict[str, Any]
) -> None:
    calls = watch(distillation, "linear_divergence")
    heads = Heads.of(bias)
    expected = heads.divergence(beta, num_items_in_batch=items, **options)
    with fast_trl.enabled():
        found = heads.divergence(beta, num_items_in_batch=items, **options)
    assert len(calls) == 1
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_bfloat16(beta: float, autocast: bool) -> None:
    """Both form float32 logits of rounded operands, and round the gradient of the logits to bfloat16."""
    heads = Heads.of(False, torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = heads.divergence(beta)
        with fast_trl.enabled():
            found = heads.divergence(beta)
    torch.testing.assert_close(found[0], expected[0], **CLOSE)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-7 * float(theirs.abs().max()))


def test_no_tokens() -> None:
    heads = Heads.of()._replace(mask=torch.zeros(B, T))
    with fast_trl.enabled():
        (loss, entropies, count), gradients = heads.divergence(0.5)
    assert float(loss) == float(entropies) == int(count) == 0
    assert len(gradients) == 2 and not any(g.any() for g in gradients)


class Candidates(NamedTuple):
    """A student's hidden states and head, and the teacher's most probable tokens with their log-probabilities."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    ids: Tensor
    logps: Tensor
    valid: Tensor
    teachers: Tensor | None

    @classmethod
    def of(cls, dtype: torch.dtype, head: torch.dtype, width: int = 5) -> Candidates:
        heads, g = Heads.of(True, dtype), torch.Generator().manual_seed(1)
        hidden = heads.hidden.flatten(0, 1)
        n = len(hidden)
        logps, ids = torch.randn(n, V, generator=g).mul(2).log_softmax(-1).topk(width)
        valid = torch.rand(n, width, generator=g) < 0.8
        valid[:, 0] = True
        return cls(
            hidden,
            heads.weight.to(head),
            heads.bias.to(head),
            ids.masked_fill(~valid, -1),
            logps.masked_fill(~valid, -torch.inf),
            valid,
            torch.randint(3, (n,), generator=g),
        )

    def divergence(self, beta: float, tail: bool, scale: float, softcap: float | None) -> tuple[list[Tensor], ...]:
        leaves = [x.clone().requires_grad_() for x in self[:3]]
        found = top_k._chunked_jsd_loss(*leaves, scale, softcap, *self[3:6], beta, 0.8, tail, self.teachers, 4, 8)
        (2 * found[0]).backward()
        assert not any(x.requires_grad for x in found[1:])
        return [x.detach() for x in found], [x.grad for x in leaves]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_the_top_k_divergence_is_trls(
    watch: Callable[..., list[Any]], beta: float, tail: bool, dtype: torch.dtype, head: torch.dtype
) -> None:
    """The logits are float32 products in both; of a bfloat16 head, fastrl rounds their gradient, TRL only its sums."""
    calls = watch(distillation, "linear_gathered_logprobs")
    for case, scale, softcap in (
        (Candidates.of(dtype, head), 1.0, None),
        (Candidates.of(dtype, head, width=1)._replace(teachers=None), 0.5, 4.0),
    ):
        expected = case.divergence(beta, tail, scale, softcap)
        assert not calls
        with fast_trl.enabled(memory_budget="8MiB"):
            found = case.divergence(beta, tail, scale, softcap)
        assert [call["memory_budget"] for call in calls] == [8 << 20]
        calls.clear()
        torch.testing.assert_close(found[0], expected[0], **CLOSE)
        for ours, theirs in zip(found[1], expected[1], strict=True):
            assert ours.dtype == theirs.dtype
            rounded = {"rtol": 2**-6, "atol": 2**-7 * float(theirs.abs().max()) + 1e-5}
            torch.testing.assert_close(ours, theirs, **(CLOSE if head == torch.float32 == dtype else rounded))


@pytest.mark.parametrize(
    ("heads", "options", "reason"),
    [
        (Heads.of(dtype=torch.float64), {}, "the hidden states are torch.float64"),
        (Heads.of(vocab=V + 2), {}, f"the heads have {V} and {V + 2} entries"),
        (Heads.of(), {"student_logit_scale": 0.0}, "the model scales its logits by 0.0"),
        (Heads.of(), {"teacher_logit_scale": -1.0}, "the model scales its logits by -1.0"),
        (Heads.of(), {"teacher_final_logit_softcapping": 0.0}, "the model caps its logits at 0.0"),
    ],
    ids=["dtype", "vocabularies", "scale", "teacher's scale", "softcap"],
)
def test_what_fastrl_cannot_take_is_trls(
    said: Callable[[], list[str]], heads: Heads, options: dict[str, Any], reason: str
) -> None:
    expected = heads.divergence(0.5, **options)
    with fast_trl.enabled():
        for _ in range(2):
            found = heads.divergence(0.5, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert said() == [f"TRL's own _chunked_divergence_loss is used: {reason}"]


def test_functions_are_put_back_and_other_layouts_left_alone(
    said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    was = dense._chunked_divergence_loss, top_k._chunked_jsd_loss
    fast_trl.enable()
    assert dense._chunked_divergence_loss is not was[0] and top_k._chunked_jsd_loss is not was[1]
    fast_trl.disable()
    assert (dense._chunked_divergence_loss, top_k._chunked_jsd_loss) == was
    assert not said()

    def other(hidden: Tensor) -> Tensor:
        return hidden

    monkeypatch.setattr(dense, "_chunked_divergence_loss", other)
    monkeypatch.delattr(top_k, "_chunked_jsd_loss")
    with fast_trl.enabled():
        assert dense._chunked_divergence_loss is other
    assert [line.split(" is not laid out")[0] for line in said()] == [
        "TRL's own _chunked_divergence_loss is used: trl.trainer.distillation_trainer",
        "TRL's own _chunked_jsd_loss is used: trl.experimental.async_distillation.async_distillation_trainer",
    ]
