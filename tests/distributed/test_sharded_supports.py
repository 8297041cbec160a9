"""Sampling masks with ids of the whole vocabulary, over shards of the output head."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from objectives import OBJECTIVES
from pairs import each, turned
from ranks import Ranks
from shards import Case, Shards, check_over_ranks, slow

import fastrl

B, T, WIDTH, VOCAB = 2, 12, 16, 300
#: Sets of more than a tenth of the largest shard (a twenty-fifth in 16 bits) are wide.
SHARDS = (
    Shards((75, 75, 75, 75)),
    Shards((200, 0, 97, 3)),
    Shards((0, 150, 150), members=(0, 2, 3), starts=True),
    Shards((200, 120), members=(1, 3), padding=20),
    Shards((100, 100, 100, 40), padding=40),
)
MASK = torch.tensor([[12], [5]]).gt(torch.arange(T)) & (torch.arange(B * T).view(B, T) % 6 != 3)
KINDS = ("narrow", "mixed", "targets alone", "wide", "one shard", "full")
PLANS = ("recompute", "two-pass")


def sets_of(kind: str, targets: torch.Tensor, g: torch.Generator) -> fastrl.SamplingMask:
    """Of each token, among them sets that lie on one rank as a whole; an empty one is not recorded."""
    rows = []
    for i, y in enumerate(targets.flatten().tolist()):
        sizes = {"targets alone": 1, "wide": 100, "full": VOCAB, "one shard": 3 + 30 * (i % 3)}
        sizes |= {"narrow": 1 + i % 5, "mixed": (0, 1, 5, 60, VOCAB)[i % 5]}
        size = sizes[kind]
        ids = torch.randperm(VOCAB, generator=g)[:size].tolist()
        if kind == "one shard":  # around the target
            first = min(y // 75 * 75, VOCAB - size)
            ids = list(range(first, first + size))
        rows.append([] if size == 0 else [y, *ids[1:]])
    return fastrl.SamplingMask.from_lists(rows).with_targets(targets)


def posed(name: str, kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Case:
    problem = {"size": (B, T, WIDTH, VOCAB), "mask": MASK.long(), "sets": partial(sets_of, kind), "dtype": dtype}
    problem |= {"seed": KINDS.index(kind)}
    return Case(OBJECTIVES[name].replace(entropy_coef=0.02), problem=problem, **more)


def variants(kind: str) -> list[dict[str, Any]]:
    """Each plan and each layout once; wide sets are dense, or gathered."""
    gathered = "recompute" if kind == "mixed" else "sparse"  # the first has rows without a set
    chosen: list[dict[str, Any]] = [{"plan": gathered, "gathers": True}]
    if kind not in ("narrow", "targets alone"):
        chosen += [{"plan": plan} for plan in ("recompute", "two-pass")]
    return [{**x, "shards": shards} for x, shards in each(chosen, turned(SHARDS, KINDS.index(kind)))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["SAPO", slow("GSPO")])
def test_every_kind_of_support(ranks: Ranks, name: str, kind: str) -> None:
    check_over_ranks(ranks, posed(name, kind), variants(kind))


@pytest.mark.parametrize("name", [slow(x) if x not in ("GMPO", "VESPO") else x for x in fastrl.PRESETS])
def test_every_preset(ranks: Ranks, name: str) -> None:
    check_over_ranks(ranks, posed(name, "mixed"), [{"shards": x} for x in SHARDS[:2]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)], ids=str)
def test_half_precision(ranks: Ranks, dtype: torch.dtype, kind: str) -> None:
    options = {"temperature": 0.7, "logit_scale": 1.5, "softcap": 8.0}
    case = posed("SAPO", kind, dtype, upstream=1024.0 if dtype == torch.float16 else 1.0, arguments=options)
    check_over_ranks(ranks, case, variants(kind))


def test_float32_logits(ranks: Ranks) -> None:
    case = posed("SAPO", "mixed", torch.bfloat16, arguments={"logits_dtype": torch.float32})
    check_over_ranks(ranks, case, variants("mixed"))


@pytest.mark.parametrize("kind", [slow("narrow"), "mixed", slow("one shard")])
def test_gradients_of_some_inputs(ranks: Ranks, kind: str) -> None:
    for needs in (("hidden",), ("weight",), ("bias",), ()):
        few = [{"shards": x} for x in SHARDS]
        check_over_ranks(ranks, posed("GSPO", kind, needs=needs), few)
    parts = posed("SAPO", kind, arguments={"reduce_hidden_grad": False})
    check_over_ranks(ranks, parts, [{"shards": x} for x in SHARDS if len(x.members) == 4])


@pytest.mark.parametrize("kind", ["narrow", "mixed"])
def test_several_chunks_and_a_second_backward(ranks: Ranks, kind: str) -> None:
    case = posed("SAPO", kind, tile_bytes=4 * 128 * 4, backwards=2)
    check_over_ranks(ranks, case, variants(kind))


@pytest.mark.parametrize("backend", ["torch", slow("triton")])
def test_other_backends(ranks: Ranks, backend: str) -> None:
    case = posed("SAPO", "mixed", backend=backend)
    check_over_ranks(ranks, case, [{"shards": x} for x in SHARDS[: 3 if backend == "torch" else 1]])
