"""OpenRLHF's PolicyLoss on fastrl against OpenRLHF's own file, loaded without what OpenRLHF imports."""

import importlib.util
import itertools
import types

import pytest
import torch
from peer_cases import B, folder_of, load_file, policy_batch, stand_in

from fastrl.integrations.openrlhf import PolicyLoss, log_probs_from_logits

CLOSE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(scope="module")
def theirs():
    """openrlhf/models/loss.py, with a stand-in for DeepSpeed, which its neighbour utils.py imports."""
    folder = folder_of("openrlhf") / "models"
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, "_openrlhf_models")
        if importlib.util.find_spec("deepspeed") is None:
            stand_in(patch, "deepspeed")
        utils, loss = (load_file(patch, f"_openrlhf_models.{n}", folder / f"{n}.py") for n in ("utils", "loss"))
        yield types.SimpleNamespace(PolicyLoss=loss.PolicyLoss, log_probs_from_logits=utils.log_probs_from_logits)


def make_batch(empty=False):
    """OpenRLHF's arguments."""
    log_probs, old, rollout, mask, advantages = policy_batch(0.3, empty)
    return log_probs, old, advantages, mask, rollout


def run(kind, batch, counts, **options):
    log_probs, old, advantages, mask, rollout = batch
    log_probs = log_probs.clone().requires_grad_()
    loss, *metrics = kind(**options)(log_probs, old, advantages, mask, rollout, **counts)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.detach(), gradient, [None if m is None else m.detach().float() for m in metrics]


COUNTS = (
    {},
    {"dp_size": 2},
    {"dp_size": 2, "batch_num_tokens": 40.0, "global_batch_size": 8.0},
    {"batch_num_tokens": torch.tensor(40.0), "global_batch_size": torch.tensor(8.0)},
)
CORRECTIONS = (
    {},
    {"is_correction_level": "token", "is_correction_threshold": (0.7, 1.3)},
    {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": (0.7, 1.3)},
    {"is_correction_level": "seq", "is_correction_threshold": (0.9, 1.1)},
    {"is_correction_level": "token", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.05)},
    {"is_correction_level": "seq", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.04)},
    {"is_correction_level": "seq", "is_correction_gating": "tv", "is_correction_threshold": (0.0, 0.12)},
)


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: "-".join(map(str, c.values())) or "off")
def test_policy_loss_is_openrlhfs(theirs, kind, correction):
    for token_level, dual, counts, empty in itertools.product([True, False], [None, 1.3], COUNTS, [False, True]):
        if empty and correction.get("is_correction_level") == "seq":
            continue  # an empty response's statistic is NaN there, and counted as out of the band
        options = {
            "clip_eps_low": 0.1,
            "clip_eps_high": 0.15,
            "dual_clip": dual,
            "token_level_loss": token_level,
            "policy_loss_type": kind,
            **correction,
        }
        batch = make_batch(empty)
        expected = run(theirs.PolicyLoss, batch, counts, **options)
        torch.testing.assert_close(run(PolicyLoss, batch, counts, **options), expected, **CLOSE)


def test_the_gates_bind(theirs):
    """Otherwise the test above could not tell one gate from another: each filters some, and not all."""
    for correction in CORRECTIONS[1:]:
        filtered = run(theirs.PolicyLoss, make_batch(), {}, **correction)[2][3]
        assert 0 < filtered < 1, correction
    assert run(theirs.PolicyLoss, make_batch(), {}, clip_eps_low=0.1, clip_eps_high=0.15)[2][0] > 0.2


def test_defaults_without_a_mask_and_without_tokens(theirs):
    batch = make_batch()
    for given in (batch, (*batch[:3], None, None)):
        torch.testing.assert_close(run(PolicyLoss, given, {}), run(theirs.PolicyLoss, given, {}), **CLOSE)
    nothing = (*batch[:3], torch.zeros_like(batch[3]), None)
    for options in ({}, {"token_level_loss": False}):
        loss, gradient, _ = run(PolicyLoss, nothing, {}, **options)
        assert loss == 0 and not gradient.any()


def test_an_empty_response_is_not_filtered(theirs):
    batch = make_batch(empty=True)
    found = run(PolicyLoss, batch, {}, **CORRECTIONS[3])
    expected = run(theirs.PolicyLoss, batch, {}, **CORRECTIONS[3])
    torch.testing.assert_close(found[:2], expected[:2], **CLOSE)
    assert expected[2][3] - found[2][3] == pytest.approx(1 / B)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy_loss_type": "dpo"}, "policy_loss_type"),
        ({"is_correction_level": "turn"}, "is_correction_level"),
        ({"is_correction_level": "seq", "is_correction_mode": "clip"}, "is_correction_mode"),
        ({"is_correction_level": "token", "is_correction_gating": "tv"}, "is_correction_gating"),
        ({"dual_clip": 0.9}, "dual"),
        ({"is_correction_threshold": (0.5, 2.0, 5.0)}, "is_correction_threshold must hold a lower and an upper bound"),
        ({"is_correction_threshold": 5.0}, "is_correction_threshold must hold a lower and an upper bound"),
        ({"is_correction_threshold": (5.0, 0.5)}, "is_correction_threshold must not have its lower bound above"),
    ],
)
def test_what_does_not_go_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        PolicyLoss(**options)


def test_a_correction_needs_the_engines_logprobs():
    log_probs, old, advantages, mask, _ = make_batch()
    for kind in ("ppo", "gspo"):
        with pytest.raises(ValueError, match="rollout_log_probs"):
            PolicyLoss(policy_loss_type=kind, is_correction_level="token")(log_probs, old, advantages, mask)


def test_logprobs_are_openrlhfs(theirs):
    logits, labels = torch.randn(3, 5, 17), torch.randint(17, (3, 5))
    ours = log_probs_from_logits(logits, labels, 0.8)
    torch.testing.assert_close(ours, theirs.log_probs_from_logits(logits.clone(), labels, 0.8), **CLOSE)
    given = logits.clone()
    theirs.log_probs_from_logits(given, labels, 0.8)
    assert not torch.equal(given, logits)  # it divides the caller's logits in place
