"""TRL's unchanged trainers with fastrl behind their head: the same losses, gradients and metrics; and TRL restored."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from trl.trainer import utils
from trl_cases import PROMPTS, assert_same_history, make_trainer

from fastrl.integrations import trl as fast_trl
from fastrl.integrations.trl import patches

pytestmark = pytest.mark.filterwarnings("ignore")
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
COMPLETIONS = (" w7 w3", " w11 w12 w13", " w20", " w31 w30 w33 w37")


@pytest.fixture
def calls(watch: Callable[..., list[Any]]) -> list[Any]:
    """One entry per call of the head by fastrl."""
    return watch(patches, "linear_token_logprobs")


def rows(**columns: Sequence[Any]) -> list[dict[str, Any]]:
    """The prompts, with these columns beside them."""
    each = zip(PROMPTS, *columns.values(), strict=True)
    return [prompt | dict(zip(columns, values, strict=True)) for prompt, *values in each]


#: name of a trainer -> its data and options
TRAINERS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "SFT": (rows(completion=COMPLETIONS), {"max_steps": 5}),
    # weighting by the policy's own probabilities reads log sum p^2; the metrics read mean logits and top-1
    "DPO": (rows(chosen=COMPLETIONS, rejected=COMPLETIONS[::-1]), {"max_steps": 5, "use_weighting": True}),
    "KTO": (
        rows(completion=COMPLETIONS, label=(True, False, True, False)),
        {"max_steps": 3, "gradient_accumulation_steps": 1},
    ),
    "RLOO": (PROMPTS, {"max_steps": 3, "beta": 0.1}),
    "GRPO": (PROMPTS, {"max_steps": 10, "beta": 0.1, "top_entropy_quantile": 0.7, "entropy_coef": 0.01}),
}


def make(name: str, path: str) -> Any:
    data, options = TRAINERS[name]
    return make_trainer(name, path, data, **options)


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_log_the_same(path: str, calls: list[Any], name: str) -> None:
    expected = make(name, path)
    expected.train()
    assert not calls
    trainer = make(name, path)
    with fast_trl.enabled(memory_budget="32MiB"):  # trainers made before are served too
        trainer.train()
    assert len(calls) >= expected.state.max_steps
    assert_same_history(trainer.state.log_history, expected.state.log_history)
    assert trainer.state.log_history[0]["grad_norm"] > 1e-3


def test_gradients_with_the_head_frozen(path: str, calls: list[Any]) -> None:
    """Another plan of fastrl's: DPO of everything but the head."""
    histories = []
    for head in (nullcontext(), fast_trl.enabled()):
        trainer = make("DPO", path)
        trainer.model.lm_head.weight.requires_grad_(False)
        with head:
            trainer.train()
        histories.append(trainer.state.log_history)
    assert calls
    assert_same_history(histories[1], histories[0])


@pytest.mark.parametrize(
    ("softcap", "scale", "temperature", "autocast"),
    [(None, 1.0, 0.7, False), (3.0, 0.5, 1.3, False), (None, 1.0, 1.0, True)],
)
def test_the_head_is_trls(softcap: float | None, scale: float, temperature: float, autocast: bool) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 16, generator=g), torch.randn(77, 16, generator=g)
    # TRL rounds twice where it adds a bias in half precision, fastrl once
    bias = None if autocast else torch.randn(77, generator=g)
    targets, up = torch.randint(77, (9,), generator=g), torch.randn(2, 9, generator=g)
    original = getattr(utils, "_ChunkedLogProbFunction")  # noqa: B009 (a private name)
    found = []
    for head in (original, patches.FusedHead(original, None)):
        leaves = [None if x is None else x.clone().requires_grad_() for x in (hidden, weight, bias)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = head.apply(*leaves, targets, temperature, 32, softcap, scale, OUTPUTS)
        (up[0] * out[0] + up[1] * out[1]).sum().backward()
        found.append((*(x.detach() for x in out), *(x.grad for x in leaves if x is not None)))
    assert not any(x.requires_grad for x in out[2:])
    # Under autocast both round hidden states, weight and logits to bfloat16; gradients, and the mean of the logits,
    # which fastrl does not round, differ by some 2^-8 of their size.
    tight, loose = {"rtol": 1e-4, "atol": 1e-5}, {"rtol": 1e-2, "atol": 3e-2}
    for i, (theirs, ours) in enumerate(zip(*found, strict=True)):
        assert ours.dtype == theirs.dtype
        if ours.dtype == torch.bool:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, **(loose if autocast and i >= 3 else tight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_of_logits_are_trls(dtype: torch.dtype) -> None:
    """float64, and several targets per row, stay TRL's."""
    g = torch.Generator().manual_seed(0)
    logits, index = torch.randn(2, 5, 33, generator=g, dtype=dtype), torch.randint(33, (2, 5), generator=g)
    several, mask = torch.randint(33, (2, 5, 3), generator=g), torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 0, 1]])

    def numbers() -> list[torch.Tensor]:
        leaf = logits.clone().requires_grad_()
        both = utils.selective_log_softmax_and_entropy(leaf, index, temperature=0.7, row_mask=mask)
        sum(x.sum() for x in both).backward()
        half = utils.selective_log_softmax_and_entropy(leaf, index, entropy_requires_grad=False)
        assert half[0].requires_grad and not half[1].requires_grad
        return [
            *both,
            leaf.grad,
            *half,
            utils.selective_log_softmax(logits, index, 1.3, mask),
            utils.selective_log_softmax(logits, several),
            utils.entropy_from_logits(logits),
        ]

    expected = numbers()
    with fast_trl.enabled():
        found = numbers()
        with pytest.raises(ValueError, match="temperature must be positive"):
            utils.selective_log_softmax(logits, index, 0.0)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _everything() -> dict[str, Any]:
    """What TRL's loaded modules hold under the names that are replaced."""
    names = ("_ChunkedLogProbFunction", "ChunkedLogProbFunction", *patches._FUNCTIONS)
    modules = {k: m for k, m in sys.modules.items() if m is not None and k.split(".")[0] == "trl"}
    return {f"{path}.{name}": vars(m)[name] for path, m in modules.items() for name in names if name in vars(m)}


def test_it_is_put_back_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    import trl.experimental.tpo.tpo_trainer as before

    name = "selective_log_softmax_and_entropy"
    was = _everything()
    theirs = getattr(utils, name)
    fast_trl.enable()
    fast_trl.enable(memory_budget="1MiB")
    assert getattr(utils, name) is not theirs and getattr(before, name) is getattr(utils, name)
    assert isinstance(utils._ChunkedLogProbFunction, patches.FusedHead)
    assert utils._ChunkedLogProbFunction.memory_budget == 1 << 20
    with fast_trl.enabled(memory_budget=2 << 20):
        assert utils._ChunkedLogProbFunction.memory_budget == 2 << 20
    assert utils._ChunkedLogProbFunction.memory_budget == 1 << 20
    # a module that is imported meanwhile gets fastrl's, and TRL's afterwards
    monkeypatch.setitem(sys.modules, "trl.imported_later", late := type(sys)("trl.imported_later"))
    vars(late)[name] = getattr(utils, name)
    fast_trl.disable()
    fast_trl.disable()
    assert getattr(late, name) is theirs
    monkeypatch.delitem(sys.modules, "trl.imported_later")
    assert _everything() == was
    with pytest.raises(RuntimeError, match="inside"), fast_trl.enabled():
        raise RuntimeError("inside")
    assert _everything() == was
    with pytest.raises(ValueError, match="memory_budget"):
        fast_trl.enable(memory_budget="lots")
    assert _everything() == was


def test_another_layout_is_refused_before_anything_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fewer(logits: Any, index: Any) -> Any:
        return logits

    monkeypatch.setattr(utils, "selective_log_softmax", fewer)
    was = _everything()
    with pytest.raises(RuntimeError, match=r"knows TRL 1\.16.*selective_log_softmax takes logits, index.*Nothing was"):
        fast_trl.enable()
    assert _everything() == was
    monkeypatch.undo()
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    with pytest.raises(RuntimeError, match="_ChunkedLogProbFunction is not there"):
        fast_trl.enable()


@pytest.mark.parametrize(
    ("dtype", "outputs", "reason"),
    [
        (torch.float64, [(), ()], "the hidden states are torch.float64"),
        # Of a version that knows more, which would be left out in silence.
        (torch.float32, [("log_probs", "entropy"), ("log_probs", "rank")], "outputs rank are not known"),
    ],
    ids=["dtype", "outputs"],
)
def test_a_head_that_fastrl_cannot_take_is_trls(
    said: Callable[[], list[str]], dtype: torch.dtype, outputs: list[tuple[str, ...]], reason: str
) -> None:
    hidden, weight = torch.randn(3, 4, dtype=dtype), torch.randn(7, 4, dtype=dtype)
    targets = torch.tensor([0, 3, 6])
    with fast_trl.enabled():
        for names in outputs:
            found = utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 8, None, 1.0, names)
    expected = torch.log_softmax(hidden @ weight.T, -1).gather(-1, targets[:, None])[:, 0].float()
    torch.testing.assert_close(found[0], expected)
    assert said() == [f"TRL's own head is used: {reason}"]
