"""The results that every contender of a benchmark is compared with are autograd's, through whole logits in float64."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.bench import candidates, peers, plain, preference, step
from fastrl.bench.contenders import Function, Result, Unavailable
from fastrl.bench.measure import default_device, errors
from fastrl.bench.problems import Expected, Problem, Tokens, linear_problem, logits_problem
from fastrl.bench.step import Architecture, hidden_states, step_problem
from fastrl.bench.workloads import LINEAR, LOGITS, Definition

DEVICE = default_device()


def clipped_loss(logp: Tensor, tokens: Tokens) -> Tensor:
    """PPO's, written out once more."""
    ratio = (logp - tokens.old.double()).exp()
    return -torch.minimum(ratio * tokens.advantages, ratio.clamp(0.8, 1.2) * tokens.advantages).mean()


def check_expected(expected: Expected, loss: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """The loss, and its gradients at the rows that are named."""
    loss.backward()
    assert expected.loss is not None
    torch.testing.assert_close(expected.loss, loss.detach(), rtol=1e-9, atol=1e-12)
    for name, gradient in (("hidden", hidden.grad), ("weight", weight.grad)):
        rows, exact = expected.gradients[name]
        assert gradient is not None and exact.any()
        torch.testing.assert_close(exact, gradient[rows], rtol=1e-7, atol=1e-10)


def wide_inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight in float64, and the logits of them."""
    hidden, weight = (x.double().requires_grad_() for x in problem.inputs.values())
    return hidden, weight, hidden @ weight.t()


def of_targets(log_p: Tensor, tokens: Tokens) -> Tensor:
    return log_p.gather(-1, tokens.targets[:, None])[:, 0]


def test_the_expected_results_of_token_losses_are_autograds() -> None:
    problem = linear_problem(24, 5, 31, torch.float32, DEVICE)
    hidden, weight, logits = wide_inputs(problem)
    loss = torch.nn.functional.cross_entropy(logits, problem.tokens.targets)
    check_expected(problem.expected_cross_entropy(), loss, hidden, weight)
    hidden, weight, logits = wide_inputs(problem)
    loss = clipped_loss(of_targets(torch.log_softmax(logits, -1), problem.tokens), problem.tokens)
    check_expected(problem.expected_loss(), loss, hidden, weight)


def test_the_expected_results_of_sequence_ratios_are_autograds() -> None:
    problem = linear_problem(24, 5, 31, torch.float32, DEVICE, clipped=0.0)
    tokens = problem.tokens
    hidden, weight, logits = wide_inputs(problem)
    logp = of_targets(torch.log_softmax(logits, -1), tokens)
    losses = []
    for first, advantage in zip(range(0, 24, 3), tokens.per_response.double(), strict=True):
        ratio = (logp[first : first + 3] - tokens.old[first : first + 3].double()).mean().exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    check_expected(problem.expected_sequence_loss(), torch.stack(losses).mean(), hidden, weight)
    assert ((problem.logprobs - tokens.old).abs() < 0.18).all()  # within the clip of 0.2 on either side


def test_the_expected_results_over_sets_are_autograds() -> None:
    problem = linear_problem(24, 5, 31, torch.float32, DEVICE, mean_set=3)
    tokens = problem.tokens
    hidden, weight, logits = wide_inputs(problem)
    assert tokens.sets is not None
    log_p = torch.log_softmax(logits.masked_fill(~tokens.sets.to_dense(31), -torch.inf), -1)
    logp = of_targets(log_p, tokens)
    torch.testing.assert_close(problem.logprobs, logp.detach(), rtol=1e-9, atol=1e-12)
    entropy = -(log_p.exp() * log_p.where(log_p > -torch.inf, 0.0)).sum(-1)
    torch.testing.assert_close(problem.entropy, entropy.detach(), rtol=1e-9, atol=1e-12)
    check_expected(problem.expected_loss(), clipped_loss(logp, tokens), hidden, weight)
    assert 2.0 < tokens.sets.lengths.double().mean() < 4.0


def test_the_expected_results_of_preferences_are_autograds() -> None:
    problem = preference.preference_problem(40, 5, 31, 5, torch.float32, DEVICE)
    dpo, *_, orpo, kto = preference.LOSSES
    assert (dpo.name, orpo.name, kto.name) == ("DPO", "ORPO", "KTO")
    targets = problem.policy.tokens.targets.view(8, 5)

    def logps(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = torch.log_softmax(hidden.double() @ weight.double().t(), -1).view(8, 5, 31)
        return log_p.gather(-1, targets[..., None])[..., 0]

    reference = logps(*problem.reference).sum(-1)
    for loss in (dpo, orpo, kto):
        hidden, weight, _ = wide_inputs(problem.policy)
        each = logps(hidden, weight)
        losses = []
        for w, x in zip(range(4), range(4, 8), strict=True):  # the chosen and the rejected response of each pair
            chosen, rejected = each[w].sum() - reference[w], each[x].sum() - reference[x]
            odds = [(p := each[i].mean().exp()) / (1 - p) for i in (w, x)]
            losses.append(
                {
                    "DPO": (1 + (-0.1 * (chosen - rejected)).exp()).log(),
                    "KTO": 1 - (torch.sigmoid(0.1 * (chosen - 0.2)) + torch.sigmoid(0.1 * (0.2 - rejected))) / 2,
                    "ORPO": 0.1 * (1 + odds[1] / odds[0]).log() - each[w].mean(),
                }[loss.name]
            )
        check_expected(preference.workload(problem, loss).expected, torch.stack(losses).mean(), hidden, weight)


def test_tokens_that_make_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="N must be a multiple of 2 T"):
        preference.preference_problem(35, 5, 31, 5, torch.float32, DEVICE)


@pytest.mark.parametrize("tied", [True, False])
def test_a_steps_expected_results_are_autograds_through_the_whole_model(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tied:  # the expected gradient of a head of its own has no embedding in it
        monkeypatch.setattr(step, "_UNTIED_WIDTH", 16)
    problem = step_problem(2, 12, 2, 16, 61, torch.float32, DEVICE)
    model = problem.architecture.model().double()
    tokens = problem.tokens
    hidden = hidden_states(model, problem.inputs).reshape(-1, 16)
    loss = clipped_loss(of_targets(torch.log_softmax(hidden @ model.lm_head.weight.t(), -1), tokens), tokens)
    loss.backward()
    assert problem.expected.loss is not None
    torch.testing.assert_close(problem.expected.loss, loss.detach(), rtol=1e-5, atol=1e-6)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == problem.architecture.tied == tied
    for name, gradient in (("norm", model.model.norm.weight.grad), ("weight", model.lm_head.weight.grad)):
        rows, expected = problem.expected.gradients[name]
        scale = float(expected.abs().max())
        assert scale > 0
        # the body ran in float32 for the one, in float64 for the other
        torch.testing.assert_close(expected / scale, gradient[rows] / scale, rtol=0, atol=1e-4)


def test_every_step_starts_from_the_same_weights_and_trains_them() -> None:
    problem = step_problem(2, 12, 1, 16, 61, torch.float32, DEVICE)
    before = dict(problem.architecture.model().named_parameters())
    contenders = {s.name: s for s in step.workload(problem).contenders}
    run = contenders["fastrl, linear_policy_loss"].prepare()
    first, second = run.call(), run.call()
    assert first.loss is not None and second.loss is not None
    assert first.loss != second.loss
    again = contenders["fastrl, logits in place"].prepare().call()
    assert again.loss is not None
    torch.testing.assert_close(again.loss, first.loss, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(p, before[name]) for name, p in problem.architecture.model().named_parameters())


@pytest.mark.parametrize(
    ("layers", "width", "millions", "tied"),
    [(28, 1024, 596.05, True), (36, 4096, 8190.74, False)],  # Qwen3-0.6B and Qwen3-8B, as published
)
def test_the_large_architectures_are_qwen3s(layers: int, width: int, millions: float, tied: bool) -> None:
    from transformers import Qwen3ForCausalLM

    architecture = Architecture(layers, width, 151936, 2048, torch.bfloat16, "cpu")
    with torch.device("meta"):
        model = Qwen3ForCausalLM(architecture.config())
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == architecture.tied == tied
    attention = model.model.layers[0].self_attn
    assert attention.head_dim == 128
    assert (attention.q_proj.out_features, attention.k_proj.out_features) == (128 * max(16, width // 128), 128 * 8)


def test_what_a_step_needs_is_told_before_it_is_made() -> None:
    problem = step_problem(2, 12, 3, 16, 61, torch.bfloat16, DEVICE)
    parameters = 2 * sum(p.numel() for p in problem.architecture.model().parameters())
    assert problem.bytes_needed() == 4 * parameters + 2 * 40 * 24 * 3 * 16
    checkpointed = problem.architecture._replace(checkpointed=True)
    assert checkpointed.activation_bytes(24) == 2 * (40 + 3) * 24 * 16
    assert not problem.architecture.checkpointed and checkpointed.model().model.layers[0].gradient_checkpointing


def test_inputs_are_the_same_in_every_run_and_clear_of_the_clip() -> None:
    first, second = (logits_problem(400, 64, torch.float32, DEVICE) for _ in range(2))
    assert torch.equal(first.inputs["logits"], second.inputs["logits"])
    ratio = (first.logprobs - first.tokens.old).exp()
    for edge in (0.8, 1.2):
        assert (ratio - edge).abs().min() > 0.01
    clipped = (ratio - 1).abs() > 0.25
    assert 0 < clipped.float().mean() < 0.15
    assert math.isclose(first.tokens.advantages[0].item(), first.tokens.per_response[0].item())


def test_a_function_that_overwrites_its_logits_gets_them_anew() -> None:
    problem, given = logits_problem(24, 31, torch.float32, DEVICE), []

    def make(tokens: Tokens) -> Function:
        def function(logits: Tensor) -> Result:
            given.append(logits.detach())
            inputs = (logits[:, :-1].flatten(0, 1), tokens.targets, tokens.old, tokens.advantages, tokens.count)
            return Result(*plain.policy_loss(*inputs))

        return function

    liger = next(c for c in candidates.LOSS if c.name.startswith("Liger"))  # with a position that it ignores
    run = replace(liger, make=make).on(problem, ("logits",)).prepare()
    for _ in range(2):
        run.restore()
        found = errors(run.call(), problem.expected_loss())
        assert set(found) == {"loss", "logprobs", "entropy", "d_logits"}
        assert all(error is not None and error < 1e-5 for error in found.values()), found
        given[-1].zero_()


def _nll(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(hidden @ weight.t(), targets, reduction="none")


class _LigerHead:
    @staticmethod
    def apply(hidden: Tensor, weight: Tensor, targets: Tensor, return_entropy: bool) -> Any:
        nll = _nll(hidden, weight, targets)
        return (nll, plain.statistics(hidden @ weight.t(), targets)[1]) if return_entropy else nll


#: Torch behind the names and the signatures of what peers have for a GPU alone.
STAND_INS = {
    "quack.cross_entropy": {
        "cross_entropy": lambda x, target, inplace_backward: torch.nn.functional.cross_entropy(x, target)
    },
    "quack.linear_cross_entropy": {
        "chunked_linear_cross_entropy": lambda x, weight, target, tuned: _nll(x, weight, target).mean()
    },
    "liger_kernel.transformers": {"LigerCrossEntropyLoss": torch.nn.CrossEntropyLoss},
    "liger_kernel.ops": {"LigerFusedLinearScaledCrossEntropyFunction": _LigerHead},
    "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90": {
        "liger_fused_linear_cross_entropy_sm90": lambda x, weight, target: _nll(x, weight, target).mean()
    },
}


@pytest.mark.parametrize("definition", [*LOGITS, *LINEAR], ids=lambda definition: definition.name)
def test_peers_for_a_gpu_are_asked_for_what_the_workload_computes(
    definition: Definition, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in STAND_INS:
        parts = module.split(".")
        for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module, functions in STAND_INS.items():
        vars(sys.modules[module]).update(functions)
    for check in ("_needs_gpu", "_needs_hopper"):
        monkeypatch.setattr(peers, check, lambda tokens: None)
    of_logits = definition in LOGITS
    problem = (
        logits_problem(24, 31, torch.float32, DEVICE) if of_logits else linear_problem(24, 8, 31, torch.float32, DEVICE)
    )
    chosen = [c for c in definition.candidates if c.name.startswith("quack") or "Hopper" in c.name or "plain" in c.name]
    assert len(chosen) == {"cross-entropy from logits": 2, "cross-entropy": 3, "loss and gradients": 1}.get(
        definition.name, 0 if of_logits else 1
    )
    expected = definition.expected(problem)
    for candidate in chosen:
        run = candidate.on(problem, definition.gradients).prepare()
        run.restore()
        found = errors(run.call(), expected)
        assert {f"d_{name}" for name in definition.gradients} <= set(found)
        assert ("entropy" in found) == (definition.name in ("statistics", "loss and gradients"))
        assert len(found) > len(definition.gradients) and all(e is not None and e < 1e-5 for e in found.values()), found


def test_a_peer_for_hopper_is_skipped_elsewhere_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = linear_problem(8, 4, 5, torch.float32, "cpu").tokens
    with pytest.raises(Unavailable, match="need a GPU"):
        peers.liger_hopper_head(True, tokens)
    monkeypatch.setattr(peers, "_needs_gpu", lambda tokens: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for peer in (partial(peers.liger_hopper_head, True), peers.liger_hopper_cross_entropy):
        with pytest.raises(Unavailable, match=r"need a Hopper GPU .* this one has \(8, 0\)"):
            peer(tokens)
