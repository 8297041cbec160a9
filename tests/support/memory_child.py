"""Every tensor argument of every public function, without memory of its own: one process for each function.

Run by `test_arguments_in_memory.py`. Each line of the output is a JSON list [function, argument, kind, outcome], where
the outcome is the exception's type and text, "returned", or "died: SIGNAL" for a process that a kernel killed.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import fastrl

B, T, V, H = 2, 3, 7, 4


class Wrapper(Tensor):
    """Stands for a tensor that it holds, and has no memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Any = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapper) else x

        found = function(*(bare(x) for x in args), **{k: bare(x) for k, x in (kwargs or {}).items()})
        return cls(found) if isinstance(found, Tensor) else found


def resized(x: Tensor, size: int) -> Tensor:
    """A copy, of whose memory so many bytes are left."""
    x = x.clone()
    x.untyped_storage().resize_(size)
    return x


def freed_view(x: Tensor) -> Tensor:
    """Its address is not 0, but how far into its storage it began."""
    held = torch.stack([x, x])
    x = held[1]
    held.untyped_storage().resize_(0)
    return x


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "wrapper": Wrapper,
    "DTensor": lambda x: DTensor.from_local(x, DeviceMesh("cpu", [0]), [Replicate()]),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "meta": lambda x: x.to("meta"),
    "freed": lambda x: resized(x, 0),
    "freed view": freed_view,
    "shrunk": lambda x: resized(x, x.numel() * x.element_size() - 1),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([x, x], layout=torch.strided),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "complex": lambda x: x.to(torch.complex64),
}


def functions() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Public functions and valid arguments of each, every tensor that they can take among them."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def logprobs(*shape: int) -> Tensor:
        return -normal(*shape).abs()

    targets, mask = torch.randint(0, V, (B, T), generator=generator), torch.ones(B, T)
    logits = {"logits": normal(B, T, V).requires_grad_()}
    shapes = {"hidden": (B, T, H), "weight": (V, H), "bias": (V,)}
    head = {k: normal(*shape).requires_grad_() for k, shape in shapes.items()}
    vocabulary = {"targets": targets, "mask": mask, "temperature": torch.ones(B, T)}
    denominator, cu_seqlens = torch.tensor(3.0), torch.tensor([0, T, B * T], dtype=torch.int32)
    per_token = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "token_weights", "entropy_weights")
    batch = {
        "advantages": normal(B),
        **{k: mask.clone() if "weights" in k else logprobs(B, T) for k in per_token},
        "entropy_threshold": torch.tensor(0.0),
        "denominator": denominator,
    }
    packed = {
        **{k: x.flatten() if x.ndim else x for k, x in batch.items()},
        "logprobs": logprobs(B * T),
        "entropy": normal(B * T).abs(),
        "mask": mask.flatten(),
        "cu_seqlens": cu_seqlens,
    }
    tokens = {**vocabulary, **batch}
    correction = fastrl.RolloutCorrection()
    row_local = {"objective": fastrl.GRPO(entropy_coef=0.01, rollout_correction=correction)}
    whole = {"objective": fastrl.GSPO(kl=fastrl.KL("k3"), entropy_coef=0.01, rollout_correction=correction)}
    dense = torch.ones(B * T, V, dtype=torch.bool)
    recorded = fastrl.SamplingMask.from_dense(dense)

    def in_place(logits: Tensor, **rest: Any) -> fastrl.PolicyLoss:
        return fastrl.logits_policy_loss(logits * 1 if logits.requires_grad else logits, inplace=True, **rest)

    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "token_logprobs": (fastrl.token_logprobs, {**logits, **vocabulary}),
        "token_logprobs recorded": (fastrl.token_logprobs, {**logits, **vocabulary, "sampling_mask": recorded}),
        "linear_token_logprobs": (fastrl.linear_token_logprobs, {**head, **vocabulary}),
        "linear_token_logprobs recorded": (
            fastrl.linear_token_logprobs,
            {**head, **vocabulary, "sampling_mask": recorded},
        ),
        "linear_cross_entropy": (
            fastrl.linear_cross_entropy,
            {**head, "targets": targets, "temperature": torch.ones(B, T), "denominator": denominator},
        ),
        "policy_loss": (fastrl.policy_loss, {**packed, **row_local}),
        "logits_policy_loss": (fastrl.logits_policy_loss, {**logits, **tokens, **row_local}),
        "logits_policy_loss in place": (in_place, {**logits, **tokens, **row_local}),
        "logits_policy_loss sequence": (fastrl.logits_policy_loss, {**logits, **tokens, **whole}),
        "linear_policy_loss": (fastrl.linear_policy_loss, {**head, **tokens, **row_local}),
        "linear_policy_loss sequence": (fastrl.linear_policy_loss, {**head, **tokens, **whole}),
        "linear_dpo_loss": (fastrl.linear_dpo_loss, {**head, **vocabulary, "ref_logprobs": logprobs(B)}),
        "linear_preference_loss": (
            partial(fastrl.linear_preference_loss, objective=fastrl.CPO(reference=True)),
            {**head, **vocabulary, "ref_logprobs": logprobs(B), "nll_mask": mask, "denominator": denominator},
        ),
        "linear_kto_loss": (
            fastrl.linear_kto_loss,
            {**head, **vocabulary, "ref_logprobs": logprobs(B), "desirable": torch.tensor([True, False])},
        ),
        "KL": (partial(fastrl.KL, "k3"), {"coef": torch.tensor(0.1)}),
        "Objective": (fastrl.PPO, {"entropy_coef": torch.tensor(0.1)}),
    }
    pairs = {k: logprobs(B) for k in ("chosen_logprobs", "rejected_logprobs", "ref_chosen", "ref_rejected")}
    whole_pairs = {k: logprobs(B) for k in ("chosen", "rejected", "ref_chosen", "ref_rejected")}
    whole_pairs |= {"chosen_lengths": torch.tensor([2, 3]), "rejected_lengths": torch.tensor([1, 2])}
    whole_pairs |= {"denominator": denominator, "nll_denominator": denominator}
    unpaired = {"logprobs": logprobs(B), "ref_logprobs": logprobs(B), "desirable": torch.tensor([True, False])}
    unpaired |= {"kl": normal(3), "denominator": denominator}
    groups = torch.tensor([0, 0])
    steps = {"step_rewards": normal(B, 2), "step_ends": torch.tensor([[0, 1], [0, 2]]), "group_ids": groups}
    critic = {**{k: normal(B, T) for k in ("values", "returns", "old_values")}, "denominator": denominator}
    penalty = {k: logprobs(B, T) for k in ("logprobs", "ref_logprobs")} | {"beta": torch.tensor(0.1)}
    ranked = {"scores": normal(B), "ranks": torch.tensor([1, 2]), "prompt_ids": groups}
    found |= {
        "dpo_loss": (fastrl.dpo_loss, pairs),
        "preference_loss": (partial(fastrl.preference_loss, objective=fastrl.IPO(nll_coef=0.5)), whole_pairs),
        "kto_loss": (fastrl.kto_loss, unpaired),
        "reward_model_loss": (fastrl.reward_model_loss, ranked),
        "group_advantages": (fastrl.group_advantages, {"rewards": normal(B), "group_ids": groups}),
        "rloo_advantages": (fastrl.rloo_advantages, {"rewards": normal(B), "group_ids": groups}),
        "process_advantages": (
            fastrl.process_advantages,
            {**steps, "lengths": torch.tensor([T, T]), "cu_seqlens": cu_seqlens},
        ),
        "gae": (fastrl.gae, {"rewards": normal(B, T), "values": normal(B, T), "mask": mask, "bootstrap": normal(B)}),
        "value_loss": (partial(fastrl.value_loss, clip=0.2), {**critic, "mask": mask}),
        "kl_penalized_rewards": (fastrl.kl_penalized_rewards, {**penalty, "scores": normal(B), "mask": mask}),
        "overlong_penalty": (
            partial(fastrl.overlong_penalty, max_length=8, cache=2),
            {"lengths": torch.tensor([3, 9])},
        ),
    }
    ids, offsets = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 1, 2])
    found |= {
        "SamplingMask": (fastrl.SamplingMask, {"token_ids": ids, "offsets": offsets}),
        "SamplingMask.from_dense": (fastrl.SamplingMask.from_dense, {"kept": dense}),
        "SamplingMask.from_logits": (partial(fastrl.SamplingMask.from_logits, top_p=0.9), {"logits": normal(B, V)}),
        "SamplingMask.from_scores": (
            lambda scores: fastrl.SamplingMask.from_scores([scores]),
            {"scores": normal(B, V)},
        ),
        "SamplingMask.index": (recorded.index, {"rows": torch.tensor([0, 1])}),
        "SamplingMask.with_targets": (recorded.with_targets, {"targets": targets, "mask": mask}),
    }
    return found


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    try:
        function(**arguments)
    except Exception as error:  # whatever comes is reported, and judged by the test
        return f"{type(error).__name__}: {error}"
    return "returned"


def try_kinds(function: Callable[..., Any], given: dict[str, Any], writable: int) -> None:
    tensors = [argument for argument, value in given.items() if isinstance(value, Tensor)]
    with os.fdopen(writable, "w", buffering=1) as lines:
        for argument, (kind, make) in itertools.product(tensors, KINDS.items()):
            try:
                unusual = make(given[argument].detach().clone())
            except (RuntimeError, ValueError, IndexError):  # a 0-dim tensor has no rows to be nested
                continue
            print(json.dumps([argument, kind, "died"]), file=lines)
            print(json.dumps([argument, kind, outcome(function, {**given, argument: unusual})]), file=lines)


def cases(function: Callable[..., Any], given: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(argument, kind, outcome) of every tensor argument, tried in a process of their own: one may be its end."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try_kinds(function, given, writable)
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as lines:
        told = {(argument, kind): what for argument, kind, what in map(json.loads, lines)}
    _, status = os.waitpid(child, 0)
    for (argument, kind), what in told.items():
        signalled = what == "died" and os.WIFSIGNALED(status)
        yield argument, kind, f"died: {signal.Signals(os.WTERMSIG(status)).name}" if signalled else what


if __name__ == "__main__":
    torch.set_num_threads(1)  # a thread pool would not survive a fork
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with fastrl.use_backend(sys.argv[1]):
        for name, (function, given) in functions().items():
            print(json.dumps([name, "", "plain", outcome(function, given)]), flush=True)
            for case in cases(function, given):
                print(json.dumps([name, *case]), flush=True)
    dist.destroy_process_group()
