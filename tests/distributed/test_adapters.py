"""Adapters for logits that lie over a tensor parallel group, against Megatron-Core's and verl's own files on gloo.

NeMo-RL and slime are not on a package index: what their functions return is restated here in float64, from
nemo_rl/distributed/model_utils.py (NVIDIA-NeMo/RL, commit 0433dae8) and slime/utils/ppo_utils.py (THUDM/slime, commits
06787cf5 and 501dae9c, and its caller in slime/backends/megatron_utils/loss.py, commit 00c2d6db).
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import verl_cases
from peer_cases import folder_of, load_file, stand_in
from ranks import Ranks, group_of
from torch import Tensor
from vocabulary import target_stats

import fastrl
from fastrl.integrations import megatron, nemo_rl, slime
from fastrl.integrations import verl as fast_verl
from fastrl.integrations.liger import LigerFusedLinearScaledCrossEntropyTPFunction
from fastrl.integrations.losses_from_logits import slime_loss

CLOSE = verl_cases.CLOSE
B, S, V, RANKS = 2, 5, 24, 2
OURS: list[Callable[..., Tensor]] = [
    megatron.vocab_parallel_log_probs_from_logits,
    megatron.vocab_parallel_entropy,
    megatron.vocab_parallel_entropy_with_chunking,
    megatron.vocab_parallel_cross_entropy,
    megatron.fused_vocab_parallel_cross_entropy,
]


@contextmanager
def own_files(group: Any) -> Iterator[dict[str, Callable[..., Tensor]]]:
    """The functions of Megatron's and verl's files by name, for this group; importable inside the block."""
    core, peer = folder_of("megatron") / "core", folder_of("verl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda **_: lambda function: function)  # verl compiles one product
        with_group(patch, group)
        stand_in(
            patch,
            "megatron.core.utils",
            divide=lambda a, b: a // b,
            get_tensor_model_parallel_group_if_none=None,
            is_torch_min_version=lambda version: True,
        )
        stand_in(patch, "megatron.core.jit", jit_fuser=lambda function: function)
        parallel = stand_in(patch, "megatron.core.tensor_parallel")
        stand_in(patch, "megatron.core.fusions")
        found: dict[str, Any] = {}
        for name in ("tensor_parallel.utils", "tensor_parallel.cross_entropy", "fusions.fused_cross_entropy"):
            module = load_file(patch, f"megatron.core.{name}", core / f"{name.replace('.', '/')}.py")
            found |= {x: getattr(module, x) for x in vars(module) if x.endswith("vocab_parallel_cross_entropy")}
        parallel.vocab_parallel_cross_entropy = found["vocab_parallel_cross_entropy"]
        sys.modules["megatron.core"].tensor_parallel = parallel
        for name in ("verl", "verl.utils", "verl.utils.megatron"):
            if name not in sys.modules:
                stand_in(patch, name)
        name = "verl.utils.megatron.tensor_parallel"
        module = load_file(patch, name, peer / "utils" / "megatron" / "tensor_parallel.py")
        yield found | {x.__name__: getattr(module, x.__name__) for x in OURS[:3]}


def with_group(patch: pytest.MonkeyPatch, group: Any) -> None:
    """Puts in Megatron's parallel state, with this tensor parallel group."""
    values = {
        "get_tensor_model_parallel_group": lambda: group,
        "get_tensor_model_parallel_rank": lambda: group.rank(),
        "get_tensor_model_parallel_world_size": lambda: group.size(),
        "get_context_parallel_world_size": lambda: 1,
    }
    stand_in(patch, "megatron")
    state = stand_in(patch, "megatron.core.parallel_state", **values)
    stand_in(patch, "megatron.core", parallel_state=state, mpu=state)


def posed(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Whole logits (B, S, V), targets and upstream gradients (B, S)."""
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(B, S, V, generator=g)).to(dtype)
    return logits, torch.randint(V, (B, S), generator=g), torch.randn(B, S, generator=g)


def part_of(logits: Tensor) -> Tensor:
    """This rank's columns, as a leaf."""
    return logits.chunk(RANKS, -1)[dist.get_rank()].clone().requires_grad_()


def with_gradient(function: Callable[[Tensor], Tensor], logits: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """The result of a function of this rank's columns, and the gradient of these."""
    leaf = part_of(logits)
    out = function(leaf * 1)  # a copy: Megatron's functions write to their logits
    (gradient,) = torch.autograd.grad(out, leaf, upstream.view_as(out).to(out.dtype))
    return out.detach(), gradient


def against_own_files(dtype: torch.dtype) -> dict[str, Any] | None:
    """By name: what ours and theirs give, and the gradients."""
    group = group_of(0, 1)
    if group is None:
        return None
    logits, targets, upstream = posed(dtype)
    more: dict[str, tuple[Any, ...]] = {
        "vocab_parallel_entropy": (),
        "vocab_parallel_entropy_with_chunking": (S,),  # the backward of verl's raises for more than one chunk
        "fused_vocab_parallel_cross_entropy": (targets, group),
    }
    found = {}
    with own_files(group) as theirs:
        for function in OURS:
            given = more.get(function.__name__, (targets,))
            found[function.__name__] = [
                with_gradient(lambda x, f=f, given=given: f(x, *given), logits, upstream)
                for f in (function, theirs[function.__name__])
            ]
        name = "vocab_parallel_entropy_with_chunking"
        part = part_of(logits).detach()
        found["chunks"] = [(f(part, 2), part) for f in (getattr(megatron, name), theirs[name])]
    return found


@pytest.fixture
def peers() -> None:
    """Skips without the files of Megatron and verl."""
    folder_of("verl")
    folder_of("megatron")


def test_results_and_gradients_are_megatrons_and_verls(ranks: Ranks, peers: None) -> None:
    for found in ranks.run(against_own_files, torch.float32)[:RANKS]:
        assert found.keys() == {x.__name__ for x in OURS} | {"chunks"}
        for name, (ours, theirs) in found.items():
            torch.testing.assert_close(ours[0], theirs[0], msg=lambda text, name=name: f"{name}: {text}", **CLOSE)
            # Megatron's fused function rounds its gradient to bfloat16.
            loose = {"rtol": 2**-8, "atol": 2**-12} if name.startswith("fused") else CLOSE
            torch.testing.assert_close(ours[1], theirs[1], msg=lambda text, name=name: f"{name}: {text}", **loose)


def test_bfloat16_logits(ranks: Ranks, peers: None) -> None:
    """Megatron's loss is float32; verl's entropies have the logits' dtype, so only their precision is compared."""
    logits, _, _ = posed(torch.bfloat16)
    _, exact = target_stats(logits.double(), torch.zeros(B, S, dtype=torch.int64))
    for found in ranks.run(against_own_files, torch.bfloat16)[:RANKS]:
        for name in ("vocab_parallel_log_probs_from_logits", "vocab_parallel_cross_entropy"):
            ours, theirs = found[name]
            torch.testing.assert_close(ours[0], theirs[0], **CLOSE)
            assert ours[1].dtype == torch.bfloat16
            torch.testing.assert_close(ours[1], theirs[1], rtol=2**-7, atol=2**-14)  # each rounded once
        ours, theirs = found["vocab_parallel_entropy"]
        torch.testing.assert_close(ours[0], exact.float(), **CLOSE)
        assert (ours[0] - exact).abs().max() < (theirs[0] - exact).abs().max()


IGNORED = torch.arange(B * S).view(B, S) % 3 == 0


def with_ignored_labels() -> tuple[Tensor, Tensor] | None:
    group = group_of(0, 1)
    if group is None:
        return None
    logits, labels, _ = posed()
    part = part_of(logits)
    loss = megatron.fused_vocab_parallel_cross_entropy(part, labels.masked_fill(IGNORED, -100), group)
    loss.sum().backward()
    assert part.grad is not None
    return loss.detach(), part.grad


def test_ignored_labels_count_nothing(ranks: Ranks) -> None:
    """Callers multiply by a loss mask, which would not remove a NaN."""
    for loss, gradient in ranks.run(with_ignored_labels)[:2]:
        assert (loss[IGNORED] == 0).all() and (loss[~IGNORED] > 0).all()
        assert (gradient[IGNORED] == 0).all() and (gradient[~IGNORED] != 0).all()


def verls_head(*inputs: Tensor, group: Any) -> Any:
    return fast_verl.linear_cross_entropy(*inputs, 0.7, "none", group)


def ligers_head(*inputs: Tensor, group: Any) -> Any:
    """As verl calls it (verl/utils/kernel/linear_cross_entropy.py, the backend "liger")."""
    rows, weight, labels = inputs[0].reshape(-1, 8), inputs[1], inputs[2].reshape(-1)
    apply = LigerFusedLinearScaledCrossEntropyTPFunction.apply
    nll, entropy = apply(rows, weight, labels, group, temperature=0.7, ignore_index=-100, return_entropy=True)
    return -nll, entropy


def head_of_ranks(function: Callable[..., Any]) -> list[Tensor] | None:
    """A head's function with the group, of a head whose rows lie over the ranks."""
    group = group_of(0, 1)
    return None if group is None else scored_head(function, group)


def scored_head(function: Callable[..., Any], group: Any) -> list[Tensor]:
    """Log-probabilities, entropies and both gradients; without a group of the whole head."""
    _, targets, upstream = posed()
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(B, S, 8, generator=g).requires_grad_(), torch.randn(V, 8, generator=g)
    weight = (weight if group is None else weight.chunk(RANKS)[dist.get_rank()]).clone().requires_grad_()
    logp, entropy = function(hidden, weight, targets, group=group)
    upstreams = [upstream.view(-1), upstream.view(-1).flip(0)]
    return [logp.detach(), entropy.detach(), *torch.autograd.grad([logp, entropy], [hidden, weight], upstreams)]


@pytest.mark.parametrize("function", [verls_head, ligers_head])
def test_fused_heads_over_the_tensor_parallel_group(ranks: Ranks, function: Callable[..., Any]) -> None:
    """verl's kernel leaves a rank its part of the gradient of the hidden states; Liger's sums the parts."""
    logp, entropy, d_hidden, d_weight = scored_head(verls_head, None)
    found = ranks.run(head_of_ranks, function)[:RANKS]
    for rank, (own_logp, own_entropy, _, own_weight) in enumerate(found):
        expected = logp, entropy, d_weight.chunk(RANKS)[rank]
        torch.testing.assert_close((own_logp, own_entropy, own_weight), expected, **CLOSE)
    if function is ligers_head:
        torch.testing.assert_close((found[0][2], found[1][2]), (d_hidden, d_hidden), **CLOSE)
        return
    torch.testing.assert_close(found[0][2] + found[1][2], d_hidden, **CLOSE)
    assert (found[0][2] - d_hidden).abs().max() > 0.1


def like(ours: Any) -> Any:
    """Something of another package that is called like ours: a function, or an autograd function."""

    def theirs(*_: Any) -> None: ...

    theirs.__signature__ = inspect.signature(getattr(ours, "apply", ours))  # type: ignore[attr-defined]
    return type(ours.__name__, (), {"forward": theirs}) if hasattr(ours, "apply") else theirs


def test_verl_is_patched_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verl.utils", "verl.utils.experimental", "verl.utils.kernel", "verl.utils.megatron"):
        stand_in(monkeypatch, name)
    stand_in(monkeypatch, "verl", __version__=fast_verl.KNOWN[0])
    stand_in(monkeypatch, "verl.utils.experimental.torch_functional", FusedLinearForPPO=object())
    stand_in(monkeypatch, "verl.utils.kernel.linear_cross_entropy", linear_cross_entropy=object())
    theirs = {x.__name__: like(x) for x in OURS[:3]}
    paths = ("verl.utils.megatron.tensor_parallel", "verl.workers.engine.megatron.transformer_impl")
    holders = [stand_in(monkeypatch, path, **theirs) for path in paths]
    fast_verl.enable()
    assert all(getattr(x, name) is getattr(megatron, name) for x in holders for name in theirs)
    fast_verl.disable()
    assert all(getattr(x, name) is theirs[name] for x in holders for name in theirs)


# --- NeMo-RL ----------------------------------------------------------------------------------------------------------


def of_nemo_rl() -> dict[str, Any] | None:
    """By name: results and gradients."""
    group = group_of(0, 1)
    if group is None:
        return None
    logits, targets, upstream = posed()
    start = dist.get_rank() * V // RANKS
    span = (start, start + V // RANKS)
    shifted = lambda x: nemo_rl.from_parallel_logits_to_logprobs(x, targets, *span, group, chunk_size=2)  # noqa: E731
    padded = lambda x: nemo_rl.from_parallel_logits_to_logprobs(x, targets[:, :3], *span, group, shift_targets=False)  # noqa: E731
    found: dict[str, Any] = {
        "whole": with_gradient(lambda x: nemo_rl.DistributedLogprob.apply(x, targets, *span, group), logits, upstream),
        "chunked": with_gradient(
            lambda x: nemo_rl.ChunkedDistributedLogprob.apply(x, targets, *span, 2, group, False), logits, upstream
        ),
        "entropy": with_gradient(
            lambda x: nemo_rl.ChunkedDistributedEntropy.apply(x, 2, group, False), logits, upstream
        ),
        "shifted": with_gradient(shifted, logits, upstream[:, 1:].contiguous()),
        "padded": with_gradient(padded, logits, upstream[:, :3].contiguous()),
    }
    leaf = part_of(logits)
    found["without a graph"] = [
        nemo_rl.DistributedLogprob.apply(leaf, targets, *span, group, True).requires_grad,
        nemo_rl.ChunkedDistributedEntropy.apply(leaf, 2, group, True).requires_grad,
    ]
    found["errors"] = []
    for error, given, options in (
        (ValueError, (span[0], span[1] + 1), {}),
        (ValueError, (span[0] + 1, span[1] + 1), {}),
        (NotImplementedError, span, {"cp_group": group}),
        (NotImplementedError, span, {"sampling_params": types.SimpleNamespace(top_k=4, top_p=1.0)}),
    ):
        with pytest.raises(error) as raised:
            nemo_rl.from_parallel_logits_to_logprobs(leaf, targets, *given, group, **options)
        found["errors"].append(str(raised.value))
    return found


def exact(of: str) -> tuple[Tensor, Tensor]:
    """NeMo-RL's result and the gradient of whole logits, in float64."""
    logits, targets, upstream = posed()
    leaf = logits.double().requires_grad_()
    if of == "shifted":  # row t predicts token t + 1, and the last row nothing
        logp, entropy = target_stats(leaf[:, :-1], targets[:, 1:])
        upstream = upstream[:, 1:]
    elif of == "padded":  # rows beyond the targets are padding
        logp, entropy = target_stats(leaf[:, :3], targets[:, :3])
        upstream = upstream[:, :3]
    else:
        logp, entropy = target_stats(leaf, targets)
    out = -entropy if of == "entropy" else logp  # its entropy is sum p log p
    return out.detach().float(), torch.autograd.grad(out, leaf, upstream.double())[0].float()


def test_nemo_rl_gets_what_its_functions_return(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(of_nemo_rl)[:RANKS]):
        for name in ("whole", "chunked", "entropy", "shifted", "padded"):
            out, gradient = exact(name)
            expected = out, gradient.chunk(RANKS, -1)[rank]
            torch.testing.assert_close(found[name], expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)
        assert found["without a graph"] == [False, False]
        apart, start, context, filtered = found["errors"]
        assert "vocab_start_index and vocab_end_index must be 12 apart" in apart
        assert "vocab_start must be 0 on rank 0" in start
        assert "cp_group must have one rank" in context and "top_k and top_p off, got 4 and 1.0" in filtered


# --- slime ------------------------------------------------------------------------------------------------------------


def keep_mask() -> Tensor:
    """(B S, V): some rows keep entries of one rank alone, some all, some not their token, and one nothing."""
    kept = torch.rand(B * S, V, generator=torch.Generator().manual_seed(1)) < 0.4
    targets = posed()[1].view(-1)
    kept[0] = (torch.arange(V) < V // 2) == (targets[0] < V // 2)
    kept[1], kept[2] = True, False
    kept[torch.arange(B * S), targets] = torch.arange(B * S) % 2 == 0
    return kept


def of_slime(masked: bool, with_entropy_grad: bool) -> list[Tensor] | None:
    """Log-probabilities, entropies and the gradient of both; then the shapes that slime's callers expect."""
    group = group_of(0, 1)
    if group is None:
        return None
    logits, targets, upstream = (x.flatten(0, 1) for x in posed())
    mask = keep_mask().chunk(RANKS, -1)[dist.get_rank()] if masked else None
    leaf = part_of(logits)
    logp, entropy = slime.calculate_log_probs_and_entropy(leaf, targets.int(), group, True, 3, mask, with_entropy_grad)
    assert entropy is not None and logp.shape == (B * S, 1) and entropy.shape == (B * S,)
    loss = (upstream * logp.squeeze(-1)).sum() + (upstream.flip(0) * entropy).sum()
    loss.backward()
    none, no_entropy = slime.calculate_log_probs_and_entropy(leaf[:0], targets[:0], group)
    assert none.shape == (0,) and no_entropy is None
    assert torch.equal(slime.compute_log_probs(part_of(logits), targets, group), logp) or masked
    assert torch.equal(slime.compute_entropy_from_logits(part_of(logits), group), entropy)
    return [logp.detach(), entropy.detach(), leaf.grad]


@pytest.mark.parametrize(("masked", "with_entropy_grad"), [(False, True), (True, True), (False, False)])
def test_slime_gets_what_its_functions_return(ranks: Ranks, masked: bool, with_entropy_grad: bool) -> None:
    """The mask is of log-probabilities alone, and never drops the row's token."""
    logits, targets, upstream = (x.flatten(0, 1) for x in posed())
    leaf = logits.double().requires_grad_()
    dropped = ~keep_mask() & (torch.arange(V) != targets[:, None])
    logp, _ = target_stats(leaf.masked_fill(dropped, -torch.inf) if masked else leaf, targets)
    _, entropy = target_stats(leaf, targets)
    loss = (upstream * logp).sum() + (upstream.flip(0) * (entropy if with_entropy_grad else entropy.detach())).sum()
    loss.backward()
    for rank, found in enumerate(ranks.run(of_slime, masked, with_entropy_grad)[:RANKS]):
        expected = [logp[:, None].detach(), entropy.detach(), leaf.grad.chunk(RANKS, -1)[rank]]
        torch.testing.assert_close(found, [x.float() for x in expected], **CLOSE)


def test_slimes_mask_keeps_the_token_that_was_drawn() -> None:
    """Without torch.distributed, a group of None is none."""
    mask = torch.tensor([[False, True, True, False]])
    logp, _ = slime.calculate_log_probs_and_entropy(
        torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([3]), None, log_prob_keep_mask=mask
    )
    torch.testing.assert_close(logp, torch.tensor([[-0.4076059644]]))
    assert mask.tolist() == [[False, True, True, False]]


def over_the_default_group() -> dict[str, Tensor]:
    """By name: what a group of None gives; each rank holds V columns of its own."""
    logits, targets, _ = posed()
    start, ids = V * dist.get_rank(), targets + V * (dist.get_world_size() - 1)
    rows, tokens = logits.flatten(0, 1), ids.flatten()
    nothing = torch.zeros(rows.shape, dtype=torch.bool)
    logp, entropy = slime.calculate_log_probs_and_entropy(rows, tokens, None, True)
    masked, _ = slime.calculate_log_probs_and_entropy(rows, tokens, None, log_prob_keep_mask=nothing)
    assert entropy is not None
    return {
        "slime": logp[:, 0],
        "slime, masked": masked[:, 0],
        "slime, alone": slime.compute_log_probs(rows, tokens, None)[:, 0],
        "slime, entropy": entropy,
        "slime, entropy alone": slime.compute_entropy_from_logits(rows, None),
        "nemo_rl": nemo_rl.DistributedLogprob.apply(logits, ids, start, start + V, None).flatten(),
        "nemo_rl, entropy": -nemo_rl.ChunkedDistributedEntropy.apply(logits, 2, None).flatten(),
        "megatron": -megatron.fused_vocab_parallel_cross_entropy(logits, ids, None).flatten(),
    }


def test_a_group_of_none_is_the_default_group(ranks: Ranks) -> None:
    """As in torch's collectives, which the originals call."""
    logits, targets, _ = posed()
    logp, entropy = (x.flatten().float() for x in target_stats(logits.double().repeat(1, 1, ranks.size), targets))
    for found in ranks.run(over_the_default_group):
        torch.testing.assert_close(found.pop("slime, masked"), torch.zeros(B * S))
        for name, values in found.items():
            expected = entropy if "entropy" in name else logp
            torch.testing.assert_close(values, expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


def custom_loss(group: Any, logits: Tensor) -> list[Tensor]:
    """`slime_loss` of two packed samples and its gradient; on a group's columns, or whole."""
    g = torch.Generator().manual_seed(2)
    totals, responses = [6, 4], [3, 2]
    batch = {
        "unconcat_tokens": [torch.randint(V, (n,), generator=g) for n in totals],
        "total_lengths": totals,
        "response_lengths": responses,
        "loss_masks": [torch.ones(n) for n in responses],
        "advantages": [torch.randn(n, generator=g) for n in responses],
        "log_probs": [torch.randn(n, generator=g) - 3 for n in responses],
    }
    leaf = logits.view(1, B * S, -1)
    leaf = (leaf if group is None else leaf.chunk(RANKS, -1)[dist.get_rank()]).clone().requires_grad_()
    args = types.SimpleNamespace(rollout_temperature=0.8)
    with pytest.MonkeyPatch.context() as patch:
        if group is not None:
            with_group(patch, group)
        objective = fastrl.GSPO(entropy_coef=0.01)
        loss, log = slime_loss(objective)(args, batch, leaf, lambda x: x.sum() / 2)
    loss.backward()
    return [loss.detach(), log["entropy_loss"], leaf.grad]


def custom_loss_of_ranks() -> list[Tensor] | None:
    group = group_of(0, 1)
    return None if group is None else custom_loss(group, posed()[0])


def test_slimes_custom_loss_runs_over_the_tensor_parallel_group(ranks: Ranks) -> None:
    loss, entropy, gradient = custom_loss(None, posed()[0])
    for rank, found in enumerate(ranks.run(custom_loss_of_ranks)[:RANKS]):
        torch.testing.assert_close(found, [loss, entropy, gradient.chunk(RANKS, -1)[rank]], **CLOSE)


@pytest.mark.parametrize(
    ("adapter", "module", "other", "names"),
    [
        (slime, "slime.utils.ppo_utils", "slime.backends.megatron_utils.loss", ["calculate_log_probs_and_entropy"]),
        (
            nemo_rl,
            "nemo_rl.distributed.model_utils",
            "nemo_rl.algorithms.loss.utils",
            ["DistributedLogprob", "ChunkedDistributedLogprob", "ChunkedDistributedEntropy"],
        ),
    ],
    ids=["slime", "nemo_rl"],
)
def test_enable_puts_ours_in_and_disable_takes_it_out(
    adapter: Any, module: str, other: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ImportError, match=rf"fastrl\.integrations\.{adapter.__name__.rpartition('.')[2]}\.enable"):
        adapter.enable()
    theirs = {name: like(getattr(adapter, name)) for name in names}
    for i in range(1, module.count(".") + 1):
        stand_in(monkeypatch, module.rsplit(".", i)[0])
    holders = [stand_in(monkeypatch, path, **theirs) for path in (module, other)]
    adapter.enable()
    adapter.enable()
    assert all(getattr(x, name) is getattr(adapter, name) for x in holders for name in names)
    adapter.disable()
    assert all(getattr(x, name) is theirs[name] for x in holders for name in names)
    setattr(holders[0], names[-1], lambda logits, other: None)
    with pytest.raises(RuntimeError, match=rf"{names[-1]} with the arguments .*; this one takes logits, other"):
        adapter.enable()
    assert all(getattr(holders[1], name) is theirs[name] for name in names)
