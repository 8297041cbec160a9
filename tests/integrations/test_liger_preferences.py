"""Liger's preference losses on fastrl: the losses, gradients and metrics of Liger's own classes, and an oracle's."""

import inspect
import itertools

import pytest
import torch
from liger_cases import Batch, agree, gradients
from torch.nn.functional import logsigmoid

pytest.importorskip("liger_kernel", reason="the extra 'bench' is not installed")
from liger_kernel import chunked_loss as chunked

import fastrl
from fastrl.integrations import liger as ours
from fastrl.planning.budget import BudgetTooSmall

LABELS = torch.tensor([True, False, True, True, False])
KINDS = ("DPO", "CPO", "SimPO", "ORPO", "KTO")
TYPES = sorted(chunked.LigerFusedLinearDPOLoss._SUPPORTED_LOSS_TYPES)
SWITCHES = list(itertools.product([False, True], repeat=3))


def class_of(package, kind):
    return getattr(package, f"LigerFusedLinear{kind}Loss")


def targets_of(batch, count=4):
    return batch.ids[:count].masked_fill(batch.mask[:count] == 0, -100)


def run(package, kind, batch, bias=False, target=None, given=None, upstream=1.0, **options):
    """The loss, its gradients and the metrics of the package's class on two pairs, or in KTO on all responses."""
    leaves = batch.leaves(bias)
    hidden = leaves["hidden"] if kind == "KTO" else leaves["hidden"][:4]
    first = (hidden, leaves["weight"]) if kind == "KTO" else (leaves["weight"], hidden)
    target = targets_of(batch, len(hidden)) if target is None else target
    given = dict(given or {})
    if kind == "KTO":
        given.setdefault("preference_labels", LABELS)
    if options.get("use_ref_model"):
        given |= {"ref_input": batch.hidden[: len(hidden)].flip(1), "ref_weight": batch.weight.flip(0)}
        given["ref_bias"] = batch.bias.flip(0) if bias else None
    loss, metrics = class_of(package, kind)(compiled=False, **options)(*first, target, leaves.get("bias"), **given)
    return loss.detach(), gradients(upstream * loss, leaves), [x.detach().float() for x in metrics]


def compare(kind, batch, **call):
    found, expected = (run(package, kind, batch, **call) for package in (ours, chunked))
    agree(found, expected)
    assert any(g.any() for g in found[1])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_signatures_are_ligers(kind):
    for name in ("__init__", "forward"):
        mine, theirs = (inspect.signature(getattr(class_of(package, kind), name)) for package in (ours, chunked))
        given = {p.name: p.default for p in mine.parameters.values() if p.name != "memory_budget"}
        assert list(given.items()) == [(p.name, p.default) for p in theirs.parameters.values()]


@pytest.mark.parametrize("loss_type", TYPES)
def test_dpo_losses_are_ligers(loss_type):
    smoothing = 0.2 if loss_type in ("robust", "exo_pair") else 0.0
    for reference, average, nll in SWITCHES:
        compare(
            "DPO",
            Batch(),
            bias=reference == average,  # each switch with and without
            upstream=0.7,
            beta=0.3,
            alpha=0.6,
            compute_nll_loss=nll,
            use_ref_model=reference,
            average_log_prob=average,
            loss_type=loss_type,
            label_smoothing=smoothing,
            discopop_tau=0.4,
        )


@pytest.mark.parametrize("bias", [False, True])
def test_losses_without_a_reference_are_ligers(bias):
    for smoothing, average, nll in SWITCHES:
        options = {"beta": 0.3, "alpha": 0.6, "label_smoothing": 0.2 * smoothing, "compute_nll_loss": nll}
        compare("CPO", Batch(), bias=bias, average_log_prob=average, **options)
        compare("SimPO", Batch(), bias=bias, gamma=0.4 * average, **options)
    for nll in (False, True):
        compare("ORPO", Batch(), bias=bias, beta=0.3, compute_nll_loss=nll, upstream=0.7)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_and_frozen_inputs_are_ligers(kind):
    options = {"use_ref_model": True} if kind in ("DPO", "KTO") else {}
    for frozen in ((), ("weight",), ("hidden",)):
        batch = Batch()
        batch.frozen = frozen
        found = compare(kind, batch, **options)
        agree(found, run(ours, kind, batch, memory_budget="2MiB", chunk_size=2, **options))
        with pytest.raises(BudgetTooSmall):
            run(ours, kind, batch, memory_budget="64KiB", **options)


def test_orpos_likelihood_has_targets_of_its_own():
    batch = Batch()
    prompt = targets_of(batch).clone()
    prompt[:3, 0] = -100  # the response's targets lack a token that the likelihood counts
    everywhere = batch.ids[:4]
    other = (batch.ids[:4] + 1) % batch.weight.shape[0]
    for nll_target in (targets_of(batch), everywhere, other):
        for bias in (False, True):
            compare("ORPO", batch, bias=bias, target=prompt, given={"nll_target": nll_target})
    agree(
        run(ours, "ORPO", batch, given={"nll_target": other}, compute_nll_loss=False),
        run(ours, "ORPO", batch, compute_nll_loss=False),
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_kto_is_ligers(bias, reference, average):
    for kl in (None, torch.tensor(0.7), torch.tensor([-0.4])):
        options = {"beta": 0.3, "use_ref_model": reference, "average_log_prob": average}
        compare("KTO", Batch(), bias=bias, given={"kl": kl}, upstream=0.7, **options)
    for labels in (torch.ones(5).bool(), torch.zeros(5).bool()):
        compare("KTO", Batch(), given={"preference_labels": labels})


def wide_logps(batch, leaves, rows):
    logp = torch.log_softmax(leaves["hidden"][rows] @ leaves["weight"].T, -1)
    return (logp.gather(-1, batch.ids[rows, :, None])[..., 0] * batch.mask[rows]).sum(-1)


def test_kto_with_a_kl_for_each_response():
    """Each response's own, as Liger documents (B,); its code adds up every response with every kl."""
    batch, kl = Batch(), torch.tensor([0.5, -0.3, 0.0, 1.1, 0.2])
    leaves = batch.leaves(False, torch.float64)
    shifted = 0.3 * (wide_logps(batch, leaves, slice(5)) - kl)
    expected = (1 - torch.sigmoid(torch.where(LABELS, shifted, -shifted))).mean()
    found = run(ours, "KTO", batch, given={"kl": kl}, beta=0.3)
    agree((found[0].double(), found[1]), (expected.detach(), gradients(expected, leaves)))
    theirs = run(chunked, "KTO", batch, given={"kl": kl}, beta=0.3)
    assert theirs[0] > 2 * found[0]
    agree(found[2], theirs[2])


def test_ipo_is_of_means():
    """The loss type that Liger names and refuses."""
    batch = Batch()
    leaves = batch.leaves(False, torch.float64)
    means = wide_logps(batch, leaves, slice(4)) / batch.mask[:4].sum(-1)
    expected = ((means[:2] - means[2:] - 1 / 0.6) ** 2).mean()
    exact = expected.detach(), gradients(expected, leaves)
    for average in (False, True):
        options = {"loss_type": "ipo", "beta": 0.3, "use_ref_model": False, "average_log_prob": average}
        found = run(ours, "DPO", batch, **options)
        agree((found[0].double(), found[1]), exact)
        agree(found[2][5:], [0.3 * means[:2].detach().float(), 0.3 * means[2:].detach().float()])


def test_the_sigmoid_is_the_oracles():
    batch = Batch()
    leaves = batch.leaves(False, torch.float64)
    logps = wide_logps(batch, leaves, slice(4))
    expected = -logsigmoid(0.3 * (logps[:2] - logps[2:])).mean()
    found = run(ours, "DPO", batch, beta=0.3, use_ref_model=False, label_smoothing=0.2)  # which it does not read
    agree((found[0].double(), found[1]), (expected.detach(), gradients(expected, leaves)))


def test_a_response_without_tokens_has_mean_0():
    """Where Liger's mean is NaN."""
    batch = Batch()
    target = batch.ids[:4].clone()
    target[0] = -100
    for kind in ("DPO", "CPO", "SimPO", "ORPO"):
        options = {"average_log_prob": True} if kind in ("DPO", "CPO") else {}
        options |= {"use_ref_model": False} if kind == "DPO" else {}
        found, theirs = (run(package, kind, batch, target=target, **options) for package in (ours, chunked))
        assert found[0].isfinite() and all(g.isfinite().all() for g in found[1]) and theirs[0].isnan()
        assert found[2][0][0] == 0


def test_orpo_of_a_certain_response_is_finite():
    """Its odds are infinite: Liger's loss of them is NaN."""
    batch = Batch()
    target = torch.full((4, 6), -100)
    target[:, 0] = torch.tensor([3, 3, 5, 5])
    batch.weight.zero_()
    batch.weight[3, 0] = 200.0
    batch.hidden[..., 0] = 1.0
    found, theirs = (run(package, "ORPO", batch, target=target, compute_nll_loss=False) for package in (ours, chunked))
    assert found[0].isfinite() and all(g.isfinite().all() for g in found[1])
    assert not (theirs[0].isfinite() and all(g.isfinite().all() for g in theirs[1]))


def test_metrics_are_detached_and_counts_are_checked():
    batch = Batch()
    for kind in KINDS:
        reference = {"use_ref_model": False} if kind == "DPO" else {}
        leaves = batch.leaves(False)
        loss_of = class_of(ours, kind)(**reference)
        if kind == "KTO":
            _, metrics = loss_of(leaves["hidden"], leaves["weight"], batch.ids, preference_labels=LABELS)
        else:
            _, metrics = loss_of(leaves["weight"], leaves["hidden"][:4], batch.ids[:4])
            with pytest.raises(ValueError, match="as many chosen as rejected"):
                loss_of(leaves["weight"], leaves["hidden"], batch.ids)
        assert not any(x.requires_grad for x in metrics)


def test_wrong_calls_are_refused():
    batch = Batch()
    for name in ("sigmiod", "Sigmoid", "", None):
        with pytest.raises(ValueError, match=f"loss_type must be one of sigmoid, hinge, .*, got {name!r}"):
            ours.LigerFusedLinearDPOLoss(loss_type=name)
    for options in ({"loss_type": "exo_pair"}, {"loss_type": "robust", "label_smoothing": 0.5}):
        with pytest.raises(ValueError, match="label_smoothing must be"):
            ours.LigerFusedLinearDPOLoss(**options)
    with pytest.raises(ValueError, match="beta must be"):
        ours.LigerFusedLinearKTOLoss(beta=0.0)
    with pytest.raises(ValueError, match="ref_input"):
        ours.LigerFusedLinearDPOLoss()(batch.weight, batch.hidden[:4], batch.ids[:4])
    loss_of = ours.LigerFusedLinearKTOLoss(use_ref_model=True)
    with pytest.raises(ValueError, match="ref_input"):
        loss_of(batch.hidden, batch.weight, batch.ids, preference_labels=LABELS)
    with pytest.raises(ValueError, match="preference_labels are needed"):
        ours.LigerFusedLinearKTOLoss()(batch.hidden, batch.weight, batch.ids)
    loss_of = ours.LigerFusedLinearKTOLoss()
    with pytest.raises(ValueError, match=r"preference_labels must have shape \(5,\)"):
        loss_of(batch.hidden, batch.weight, batch.ids, preference_labels=LABELS[:3])
    for kl in (torch.zeros(3), torch.zeros(5, 1)):
        with pytest.raises(ValueError, match=r"kl must have shape \(\), \(1,\) or \(5,\)"):
            loss_of(batch.hidden, batch.weight, batch.ids, preference_labels=LABELS, kl=kl)
    assert isinstance(ours.LigerFusedLinearDPOLoss().objective, fastrl.Preference)
