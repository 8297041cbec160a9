"""training.batch_invariant: the ratio of a policy to itself is 1 where its decoder is batch-invariant too."""

import re

import pytest
import torch
from run_files import records
from teachers import save_teacher

from fastrl.planning import plans
from fastrl.training.rl.train import train

#: The micro-batches of the old log-probabilities are others than those of the updates.
TRAINING = {"steps": 1, "minibatches": 2, "micro_batch_tokens": 37, "threads": 1}


def linear(x, weight, bias=None):
    """Each row is a product of its own."""
    out = torch.cat([torch.mm(row, weight.t()) for row in x.reshape(-1, 1, x.shape[-1])])
    out = out.view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
    """Each query reads the keys that it may see, and nothing else is computed with them."""
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=value.dtype)
    groups = query.shape[1] // key.shape[1]
    for batch, head, place in torch.cartesian_prod(*map(torch.arange, query.shape[:3])).tolist():
        seen = torch.arange(key.shape[2])
        if attn_mask is not None:
            seen = seen[attn_mask.expand(*query.shape[:3], len(seen))[batch, head, place]]
        elif is_causal:
            seen = seen[: place + 1]
        keys, values = (x[batch, head // groups, seen] for x in (key, value))
        scores = (query[batch, head, place] * keys).sum(-1) * (scale or query.shape[-1] ** -0.5)
        weights = scores.float().softmax(0).to(values.dtype)
        out[batch, head, place] = (weights[:, None] * values).sum(0)
    return out


@pytest.fixture
def invariant_decoder(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)


def run(make_config, capsys, folder, **tables):
    """A run's metrics, and what its start says of the decoder, if anything."""
    config = make_config(folder, kl={"kind": "k3", "coef": 0.1}, **tables)
    train(config)
    (found,) = records(config)
    told = re.search(
        r"together the decoder gives two sequences (the same|other) bits \w+ alone", capsys.readouterr().err
    )
    return found, told and told[1]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_an_invariant_decoder_every_ratio_is_one(make_config, invariant_decoder, capsys, spy, packing, dtype):
    calls = spy(plans, "choose", lambda plan, call, *budget: call)
    for batch_invariant in (False, True):
        calls.clear()
        training = TRAINING | {"packing": packing, "batch_invariant": batch_invariant}
        tables = {"model": {"dtype": dtype}, "training": training}
        found, told = run(make_config, capsys, str(batch_invariant), **tables)
        assert told == ("the same" if batch_invariant else None)
        own = [call for call in calls if call.dtype == getattr(torch, dtype)]  # without those of the check of the head
        assert len(own) > 2 and {call.block > 0 for call in own} == {batch_invariant}
    assert found["ratio_not_one"] == 0


def test_another_decoder_is_told_of_and_its_ratios_are_counted(make_config, capsys, monkeypatch):
    """One whose layers depend on how much they are given."""
    honest = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *args: honest(x, *args) * (1 + x.numel() * 2**-24))
    found, told = run(make_config, capsys, "run", training=TRAINING | {"batch_invariant": True})
    assert told == "other"
    assert 0 < found["ratio_not_one"] <= found["tokens"]


def test_it_reaches_a_divergence_and_pretraining(make_config, tmp_path, spy):
    (tmp_path / "text.txt").write_text("0123456789=" * 200)
    tables = {
        "distillation": {"teacher": save_teacher(tmp_path / "teacher"), "form": "full", "policy_coef": 0.5},
        "pretraining": {"path": str(tmp_path / "text.txt"), "length": 16, "batch_size": 2},
    }
    calls = spy(plans, "choose", lambda plan, call, *budget: call)
    train(make_config(model={"dtype": "bfloat16"}, training=TRAINING | {"batch_invariant": True}, **tables))
    calls = [call for call in calls if call.dtype != torch.float32]
    assert all(call.block for call in calls if any(call.needs))
    assert any(call.teacher.hidden for call in calls if call.block)
