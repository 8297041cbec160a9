"""Liger's functions of preferences on fastrl: their signatures, and every option reaches the loss."""

import inspect

import pytest
import torch
from liger_cases import Batch, agree, gradients

pytest.importorskip("liger_kernel", reason="the extra 'bench' is not installed")
from liger_kernel.chunked_loss import functional as theirs

from fastrl.integrations import liger_functional as ours

#: Each option that changes the result, away from its default.
OPTIONS = {
    "ignore_index": 7,
    "beta": 0.3,
    "alpha": 0.6,
    "label_smoothing": 0.2,
    "gamma": 0.2,
    "discopop_tau": 0.4,
    "average_log_prob": True,
    "compiled": False,
    "chunk_size": 2,
}


def call(package, name, batch, **changes):
    leaves = batch.leaves(True)
    rows = 5 if name == "kto" else 4
    given = {
        "_input": leaves["hidden"][:rows],
        "weight": leaves["weight"],
        "bias": leaves["bias"],
        "target": batch.ids[:rows].masked_fill(batch.mask[:rows] == 0, changes.get("ignore_index", -100)),
        "preference_labels": torch.tensor([True, False, True, True, False]),
        "ref_input": batch.hidden[:rows].flip(1),
        "ref_weight": batch.weight.flip(0),
        "ref_bias": batch.bias.flip(0),
        "kl": torch.tensor(0.4),
        "nll_target": batch.ids[:rows],
        "compiled": False,
    } | changes
    signature = inspect.signature(getattr(ours, f"liger_fused_linear_{name}")).parameters
    # By position, which is all that Liger's can be called by.
    loss, metrics = getattr(package, f"liger_fused_linear_{name}")(
        *(given.get(p.name, p.default) for p in signature.values())
    )
    return loss.detach(), gradients(loss, leaves), [x.detach().float() for x in metrics]


@pytest.mark.parametrize("name", ["dpo", "cpo", "simpo", "orpo", "kto"])
def test_functions_are_ligers(name):
    mine = inspect.signature(getattr(ours, f"liger_fused_linear_{name}")).parameters
    forward = getattr(theirs, f"liger_fused_linear_{name}").__self__.forward
    _, *names = inspect.signature(forward).parameters.values()  # after ctx
    assert [(p.name, p.default) for p in mine.values()] == [(p.name, p.default) for p in names]

    batch = Batch()
    types = {"label_smoothing": "robust", "discopop_tau": "discopop"}
    agree(call(ours, name, batch), call(theirs, name, batch))
    switches = {p.name: not p.default for p in mine.values() if p.name in ("compute_nll_loss", "use_ref_model")}
    for option, value in ({o: v for o, v in OPTIONS.items() if o in mine} | switches).items():
        changes = {option: value}
        if name == "dpo" and option in types:
            changes["loss_type"] = types[option]
        if name == "dpo" and option == "alpha":
            changes["compute_nll_loss"] = True
        if name == "simpo" and option == "alpha":
            changes["compute_nll_loss"] = True
        agree(call(ours, name, batch, **changes), call(theirs, name, batch, **changes))
