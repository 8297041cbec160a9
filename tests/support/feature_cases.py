"""Small calls of the losses and of the functions of a vocabulary, with and without the features of docs/features.md.

A try compares a call with a feature to the plain call of the same function, by values and gradients. It returns "yes",
"no" for a NotImplementedError, ValueError or TypeError, or "-" where the function has no such argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastrl

B, T, V, H = 4, 4, 33, 8
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]).bool()
REFUSED = (NotImplementedError, ValueError, TypeError)
#: Of the largest entry, what roundings to 16 bits may do.
ROUNDED = 0.08

Found = dict[str, Tensor]


class Case(NamedTuple):
    """A function, the inputs that take gradients, and its other arguments."""

    function: Callable[..., Any]
    leaves: dict[str, Tensor]
    rest: dict[str, Any]

    def takes(self, argument: str) -> bool:
        """Whether the function has the argument."""
        return argument in inspect.signature(self.function).parameters

    def of(self, leaves: dict[str, Tensor] | None = None, **rest: Any) -> Case:
        """The same with these leaves and arguments instead."""
        return self._replace(leaves=self.leaves | (leaves or {}), rest=self.rest | rest)

    def map(self, change: Callable[[str, Any], Any]) -> Case:
        """The same with `change(name, value)` of all arguments."""
        changed = ({name: change(name, x) for name, x in given.items()} for given in (self.leaves, self.rest))
        return Case(self.function, *changed)


def cases(seed: int = 0) -> dict[str, Case]:
    """A call of each function, with masked tokens where it takes a mask."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    targets = torch.randint(5, V, (B, T), generator=g)  # the first five entries are no targets
    ids = torch.stack([targets, (targets - 4).clamp_min(5)], -1)
    hidden, weight, bias, teacher = normal(B, T, H), normal(V, H), normal(V), normal(B, T, H)
    logits = normal(B, T, V)
    logprobs = torch.log_softmax(logits, -1)
    head = {"hidden": hidden, "weight": weight, "bias": bias}
    taken = {"targets": targets, "mask": MASK}
    policy = {
        "objective": fastrl.GRPO(kl_coef=0.3),
        "advantages": normal(B),
        "old_logprobs": normal(B, T) - 3,
        "ref_logprobs": normal(B, T) - 3,
    }
    ref, desirable = normal(B) - 9, torch.tensor([True, False, False, True])
    pairs = {"chosen": normal(B), "rejected": normal(B)}
    refs = {"ref_chosen": normal(B), "ref_rejected": normal(B)}
    named = {f"{name}_logprobs": x for name, x in pairs.items()}
    found: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
        "token_logprobs": ({"logits": logits}, {**taken, "entropy": True}),
        "linear_token_logprobs": (head, {**taken, "entropy": True}),
        "gathered_logprobs": ({"logits": logits}, {"ids": ids, "mask": MASK}),
        "linear_gathered_logprobs": (head, {"ids": ids, "mask": MASK}),
        "logits_policy_loss": ({"logits": logits}, {**taken, **policy}),
        "linear_policy_loss": (head, {**taken, **policy}),
        "linear_cross_entropy": (head, {"targets": targets.where(MASK, -100)}),
        "linear_divergence": (head, {"teacher_hidden": teacher, "teacher_weight": normal(V, H), "mask": MASK}),
        "linear_preference_loss": (head, {**taken, "ref_logprobs": ref, "objective": fastrl.IPO()}),
        "linear_dpo_loss": (head, {**taken, "ref_logprobs": ref}),
        "linear_kto_loss": (head, {**taken, "ref_logprobs": ref, "desirable": desirable, "kl": 0.3}),
        "policy_loss": ({"logprobs": logprobs[..., 0]}, {**policy, "mask": MASK}),
        "topk_divergence": (
            {"logprobs": logprobs[..., :3]},
            {
                "teacher_logprobs": torch.log_softmax(teacher, -1)[..., :3],
                "kind": "jsd",
                "mask": MASK[..., None].expand(B, T, 3),
            },
        ),
        "preference_loss": (pairs, {**refs, "objective": fastrl.DPO()}),
        "dpo_loss": (named, refs),
        "kto_loss": ({"logprobs": ref + normal(B)}, {"ref_logprobs": ref, "desirable": desirable, "kl": 0.3}),
        "reward_model_loss": (
            {"scores": normal(B)},
            {"ranks": torch.tensor([0, 1, 1, 0]), "prompt_ids": torch.tensor([0, 0, 1, 1])},
        ),
        "value_loss": (
            {"values": normal(B, T)},
            {"returns": normal(B, T), "mask": MASK, "old_values": normal(B, T), "clip": 0.2},
        ),
    }
    return {name: Case(getattr(fastrl, name), *given) for name, given in found.items()}


OF_LOGITS = ("token_logprobs", "gathered_logprobs", "logits_policy_loss")


def ran(case: Case, frozen: tuple[str, ...] = (), compiled: bool = False) -> Found:
    """The results by name, and gradients of the leaves but the frozen ones, of a fixed sum of what has gradients."""
    leaves = {name: x.detach().clone().requires_grad_(name not in frozen) for name, x in case.leaves.items()}

    def called(**leaves: Tensor) -> Any:
        # A consumed leaf would be written to.
        given = {k: x * 1 for k, x in leaves.items()} if case.rest.get("inplace") else leaves
        return case.function(**given, **case.rest)

    out = (torch.compile(called, fullgraph=True, backend="aot_eager") if compiled else called)(**leaves)
    return with_gradients(out, {name: x for name, x in leaves.items() if x.requires_grad})


def results_of(out: Any) -> Found:
    """What a function returned, by name."""
    results = {"loss": out} if isinstance(out, Tensor) else out._asdict()
    return {name: x for name, x in results.items() if isinstance(x, Tensor)}


def weighted(results: Found) -> Tensor:
    """A sum of all that has gradients, with weights that are always the same."""
    g = torch.Generator().manual_seed(7)
    total = torch.zeros(())
    for x in results.values():
        if x.requires_grad:
            total = total + (x.cpu() * (1 + torch.rand(x.shape, generator=g))).sum()
    return total


def with_gradients(out: Any, leaves: dict[str, Tensor]) -> Found:
    """The results of a function by name, and gradients."""
    results = results_of(out)
    gradients = torch.autograd.grad(weighted(results), list(leaves.values()))
    assert any(bool(x.any()) for x in gradients)
    named = {f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach().float() for name, x in (results | named).items()}


def assert_same(found: Found, expected: Found, what: str, rounded: bool = False) -> None:
    """All of what was found is as expected."""
    assert found, what
    for name, x in found.items():
        y = expected[name]
        scale = float(y.abs().max())
        rtol, atol = (0.0, ROUNDED * scale) if rounded else (2e-5, 2e-6 * max(1.0, scale))
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, msg=partial("{}: {}: {}".format, what, name))


# --- one process ------------------------------------------------------------------------------------------------------


def of_dtype(case: Case, dtype: torch.dtype) -> Case:
    """The inputs in another dtype: those that take gradients, and what must have the same."""
    same = ("teacher_hidden", "teacher_weight")
    return case.map(lambda name, x: x.to(dtype) if name in case.leaves or name in same else x)


def narrow(name: str, case: Case) -> str:
    cells = {in_dtype(name, case, dtype) for dtype in (torch.bfloat16, torch.float16)}
    assert len(cells) == 1
    return cells.pop()


def in_dtype(name: str, case: Case, dtype: torch.dtype) -> str:
    given = of_dtype(case, dtype)
    exact = of_dtype(given, torch.float32)  # the same numbers
    assert_same(ran(given), ran(exact), f"{name} in {dtype}", rounded=dtype.itemsize == 2)
    return "yes"


def masked_tokens(name: str, case: Case) -> str:
    """What is at masked tokens has no influence."""
    if name != "linear_cross_entropy" and "mask" not in case.rest:
        return "-"

    def changed(argument: str, x: Any) -> Any:
        if argument in ("mask", "objective") or not isinstance(x, Tensor) or x.shape[:2] != (B, T):
            return x
        mask = MASK.view(B, T, *[1] * (x.dim() - 2))
        if argument == "targets":
            return x.where(mask, -100)
        return x.where(mask, 11) if not x.is_floating_point() else x.where(mask, x.new_tensor(5.0))

    found, expected = ran(case.map(changed)), ran(case)
    assert_same(found, expected, name)
    gradients = [x for argument, x in found.items() if argument.startswith("d_") and x.shape[:2] == (B, T)]
    assert gradients and not any(x[~MASK].any() for x in gradients)
    return "yes"


def packed(name: str, case: Case) -> str:
    """The valid tokens one after the other, with cu_seqlens, are the padded batch."""
    if not case.takes("cu_seqlens"):
        return "-"
    cu_seqlens = torch.cat([torch.zeros(1), MASK.sum(1).cumsum(0)]).int()

    def own(argument: str, x: Any) -> Any:
        return x[MASK] if isinstance(x, Tensor) and x.shape[:2] == (B, T) else x

    found, expected = ran(case.map(own).of(cu_seqlens=cu_seqlens)), ran(case)
    assert_same(found, {argument: own(argument, x) for argument, x in expected.items()}, name)
    return "yes"


def recorded(name: str, case: Case) -> str:
    """A support without the first five entries is a vocabulary in which these have probability 0."""
    if not case.takes("sampling_mask"):
        return "-"
    kept = (torch.arange(V) >= 5).expand(B * T, V)
    cut = "logits" if "logits" in case.leaves else "bias"
    without = case.leaves[cut].masked_fill(torch.arange(V) < 5, -torch.inf)
    found = ran(case.of(sampling_mask=fastrl.SamplingMask.from_dense(kept)))
    assert_same(found, ran(case.of({cut: without})), name)
    assert not torch.allclose(found[next(iter(found))], ran(case)[next(iter(found))])
    return "yes"


def float32_logits(name: str, case: Case) -> str:
    if not case.takes("logits_dtype"):
        return "-"
    given = of_dtype(case, torch.bfloat16)
    found, exact = ran(given.of(logits_dtype=torch.float32)), ran(of_dtype(given, torch.float32))
    values = {argument for argument in found if not argument.startswith("d_")}
    assert_same({x: found[x] for x in values}, exact, name)  # no rounding before the softmax
    assert_same(found, exact, name, rounded=True)
    return "yes"


def padded_vocabulary(name: str, case: Case) -> str:
    """Three more entries that vocab_size leaves out."""
    if not case.takes("vocab_size"):
        return "-"

    def longer(argument: str, x: Any) -> Any:
        if argument == "logits":
            return torch.cat([x, torch.full((B, T, 3), 9.0)], -1)
        return (
            torch.cat([x, 9 * torch.ones(3, *x.shape[1:])]) if argument in ("weight", "bias", "teacher_weight") else x
        )

    def shorter(argument: str, x: Tensor) -> Tensor:
        if argument == "d_logits":
            assert not x[..., V:].any()
            return x[..., :V]
        return x[:V] if argument in ("d_weight", "d_bias") else x

    found = ran(case.map(longer).of(vocab_size=V))
    assert_same({argument: shorter(argument, x) for argument, x in found.items()}, ran(case), name)
    return "yes"


def within_a_budget(name: str, case: Case) -> str:
    """A size is accepted, and one that no plan fits is an error that names the least."""
    if not case.takes("memory_budget"):
        return "-"
    with pytest.raises(ValueError, match="smallest"):
        ran(case.of(memory_budget=1))
    assert_same(ran(case.of(memory_budget="8MiB")), ran(case), name)
    return "yes"


def in_place(name: str, case: Case) -> str:
    if not case.takes("inplace"):
        return "-"
    assert_same(ran(case.of(inplace=True)), ran(case), name)
    return "yes"


def frozen_head(name: str, case: Case) -> str:
    if "weight" not in case.leaves:
        return "-"
    found = ran(case, frozen=("weight", "bias"))
    assert "d_hidden" in found and "d_weight" not in found
    assert_same(found, ran(case), name)
    return "yes"


def compiled(name: str, case: Case) -> str:
    """Without a break in the graph."""
    kept = fastrl.SamplingMask.from_dense((torch.arange(V) >= 5).expand(B * T, V))
    for given in (case, *([case.of(sampling_mask=kept)] if name == "linear_policy_loss" else [])):
        torch.compiler.reset()
        assert_same(ran(given, compiled=True), ran(given), name)
    return "yes"


# --- two processes ----------------------------------------------------------------------------------------------------

CUT = 20  # the entries of rank 0; rank 1 has the others


def over_tp(name: str, case: Case) -> str:
    if not case.takes("tp_group"):
        return "-"
    own = slice(0, CUT) if dist.get_rank() == 0 else slice(CUT, V)

    def mine(argument: str, x: Any) -> Any:
        if argument.removeprefix("d_") == "logits":
            return x[..., own]
        return x[own] if argument.removeprefix("d_") in ("weight", "bias") else x

    expected = {argument: mine(argument, x) for argument, x in ran(case).items()}
    assert_same(ran(case.map(mine).of(tp_group=dist.group.WORLD)), expected, name)
    return "yes"


def over_cp(name: str, case: Case) -> str:
    if not case.takes("cp_group"):
        return "-"
    own = slice(0, 1) if dist.get_rank() == 0 else slice(1, T)

    def mine(argument: str, x: Any) -> Any:
        return x[:, own] if isinstance(x, Tensor) and x.shape[:2] == (B, T) else x

    found, expected = ran(case.map(mine).of(cp_group=dist.group.WORLD)), ran(case)
    for argument in ("d_weight", "d_bias"):  # each rank's are its part
        if argument in found:
            dist.all_reduce(found[argument])
    assert_same(found, {argument: mine(argument, x) for argument, x in expected.items()}, name)
    return "yes"


class _Head(nn.Module):
    """A module that owns a head and calls the loss in its forward, as docs/distributed.md says."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.function, self.rest = case.function, case.rest
        self.weight, self.bias = (nn.Parameter(case.leaves[name].clone()) for name in ("weight", "bias"))

    def forward(self, hidden: Tensor) -> Any:
        return self.function(hidden, weight=self.weight, bias=self.bias, **self.rest)


def under_fsdp(name: str, case: Case) -> str:
    """Each rank has a batch of its own, and FSDP2 averages the gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if "weight" not in case.leaves:
        return "-"
    head = {argument: case.leaves[argument] for argument in ("weight", "bias")}
    batches = [cases(seed)[name].of(head) for seed in range(dist.get_world_size())]
    alone, mine = [ran(batch) for batch in batches], batches[dist.get_rank()]
    module: Any = _Head(mine)
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    hidden = mine.leaves["hidden"].clone().requires_grad_()
    results = results_of(module(hidden))
    weighted(results).backward()
    assert hidden.grad is not None
    own = {argument: x.detach().float() for argument, x in results.items()} | {"d_hidden": hidden.grad}
    assert_same(own, alone[dist.get_rank()], name)
    gradients = {f"d_{argument}": parameter.grad.full_tensor() for argument, parameter in module.named_parameters()}
    means = {argument: torch.stack([x[argument] for x in alone]).mean(0) for argument in gradients}
    assert_same(gradients, means, name)
    return "yes"


Try = Callable[[str, Case], str]
ALONE: dict[str, Try] = {
    "bfloat16, float16": narrow,
    "float64": lambda name, case: in_dtype(name, case, torch.float64),
    "masked tokens": masked_tokens,
    "`cu_seqlens`": packed,
    "`sampling_mask`": recorded,
    "`logits_dtype`": float32_logits,
    "`vocab_size`": padded_vocabulary,
    "`memory_budget`": within_a_budget,
    "`inplace`": in_place,
    "frozen head": frozen_head,
    "torch.compile": compiled,
}
SPREAD: dict[str, Try] = {"`tp_group`": over_tp, "`cp_group`": over_cp, "FSDP2": under_fsdp}


def tried(attempt: Try, name: str, case: Case) -> str:
    """The cell: what the try found, or what was wrong."""
    try:
        return attempt(name, case)
    except REFUSED as error:
        return f"no: {type(error).__name__}: {error}"
    except AssertionError as error:
        return f"wrong: {error}"


def spread() -> dict[str, dict[str, str]]:
    """The cells of `SPREAD` by function; all ranks call it together."""
    return {
        name: {what: tried(attempt, name, case) for what, attempt in SPREAD.items()} for name, case in cases().items()
    }


# --- what raises ------------------------------------------------------------------------------------------------------


def _gradient(case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    """A leaf's gradient, and the leaf."""
    name, *_ = case.leaves
    leaf = case.leaves[name].detach().clone().requires_grad_()
    out = case.of({name: leaf})
    value = out.function(**out.leaves, **out.rest)
    (gradient,) = torch.autograd.grad((value if isinstance(value, Tensor) else value[0]).sum(), leaf, **options)
    return gradient, leaf


def _second_derivative(case: Case) -> None:
    gradient, leaf = _gradient(case, create_graph=True)
    torch.autograd.grad(gradient.square().sum(), leaf)


def _second_backward(case: Case) -> None:
    name, *_ = case.leaves
    loss = case.function(**{**case.leaves, name: case.leaves[name].clone().requires_grad_()}, **case.rest).loss
    loss.backward(retain_graph=True)
    loss.backward()


def _tangent(case: Case) -> None:
    name, *_ = case.leaves

    def value(x: Tensor) -> Tensor:
        out = case.function(**{**case.leaves, name: x}, **case.rest)
        return out if isinstance(out, Tensor) else out[0]

    torch.func.jvp(value, (case.leaves[name],), (torch.ones_like(case.leaves[name]),))


def _call(case: Case) -> None:
    case.function(**case.leaves, **case.rest)


def _wide(case: Case) -> None:
    _call(of_dtype(case, torch.float64))


def _extras(case: Case) -> None:
    mask = fastrl.SamplingMask.from_dense(torch.ones(B * T, V, dtype=torch.bool))
    _call(case.of(sampling_mask=mask, extras=("is_top1",)))


def _teacher(case: Case) -> None:
    _call(case.of(teacher_hidden=case.rest["teacher_hidden"].clone().requires_grad_()))


#: By the first column of the page's table "What raises": the functions, and what to do with each.
REFUSED_ALONE: dict[str, tuple[tuple[str, ...], Callable[[Case], None]]] = {
    "float64 logits, or hidden states and a head": ((*OF_LOGITS, "linear_policy_loss", "linear_divergence"), _wide),
    "`extras` with a `sampling_mask`": (("linear_token_logprobs",), _extras),
    "a `memory_budget` that no plan fits": (("linear_policy_loss",), lambda case: _call(case.of(memory_budget=1))),
    "`teacher_hidden` that requires a gradient": (("linear_divergence",), _teacher),
    "a second derivative (`create_graph=True`)": (
        (*OF_LOGITS, "linear_token_logprobs", "linear_policy_loss", "linear_divergence", "linear_kto_loss"),
        _second_derivative,
    ),
    "a second backward through a fused loss (`retain_graph=True`)": (
        ("logits_policy_loss", "linear_policy_loss", "linear_divergence", "linear_kto_loss", "linear_preference_loss"),
        _second_backward,
    ),
    "forward-mode differentiation (`torch.func.jvp`)": (
        (*OF_LOGITS, "linear_token_logprobs", "linear_policy_loss", "linear_divergence", "linear_kto_loss"),
        _tangent,
    ),
}


def _compiled_over(group: str) -> None:
    torch.compiler.reset()
    given: dict[str, Any] = {group: dist.group.WORLD}
    torch.compile(_call, backend="eager")(cases()["linear_policy_loss"].of(**given))


def _callable_objective() -> None:
    def objective(log_ratio: Tensor, advantages: Tensor, context: Any) -> Tensor:
        return -log_ratio.exp() * advantages

    _call(cases()["linear_policy_loss"].of(cp_group=dist.group.WORLD, objective=objective))


def _whole_head_missing() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    case = cases()["linear_policy_loss"]
    _call(case.of({"weight": distribute_tensor(case.leaves["weight"], mesh, [Shard(0)])}))


REFUSED_OVER_RANKS: dict[str, Callable[[], None]] = {
    "`tp_group` under `torch.compile`": lambda: _compiled_over("tp_group"),
    "`cp_group` under `torch.compile`": lambda: _compiled_over("cp_group"),
    "a callable objective without `row_local = True` beside `cp_group`": _callable_objective,
    "`FIPO` beside `cp_group` without `position_ids`": lambda: _call(
        cases()["linear_policy_loss"].of(cp_group=dist.group.WORLD, objective=fastrl.FIPO())
    ),
    "the `tp_group` as `cp_group` too": lambda: _call(
        cases()["linear_policy_loss"].of(cp_group=dist.group.WORLD, tp_group=dist.group.WORLD)
    ),
    "a DTensor as `weight` outside its module's forward, and without its `tp_group`": _whole_head_missing,
}


def error_of(call: Callable[[], Any]) -> str:
    """The built-in exception that a call raises or that its exception is one of, "" if none."""
    try:
        call()
    except Exception as error:  # which, the page says
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return ""


def refused_over_ranks() -> dict[str, str]:
    """The errors of `REFUSED_OVER_RANKS`; all ranks call it together."""
    return {what: error_of(call) for what, call in REFUSED_OVER_RANKS.items()}
