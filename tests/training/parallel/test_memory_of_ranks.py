"""What a rank holds of a model of 60 million parameters, and what it is expected to hold."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import rank_runs
import torch
from digit_models import EXAMPLE
from run_files import json_lines, write_json_lines
from torch.distributed.tensor import DTensor

import fastrl.training.stages.loop as loop

#: Of one process's parameters, gradients and moments, a rank's of four: a quarter, and what does not divide by four.
SHARE = 0.30


def storage_bytes(tensors):
    """What the storages of this rank's parts take, each once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}.values())


def train_and_measure(command, tables):
    """Bytes of an update's parameters, gradients and moments, and what was expected; the run saves nothing."""
    found, step, plan = {}, torch.optim.AdamW.step, loop.with_micro_batches

    def measured(optimizer, *args):
        parameters = optimizer.param_groups[0]["params"]
        found["parameters"] = storage_bytes(parameters)
        found["gradients"] = storage_bytes([p.grad for p in parameters])
        found["count"] = sum(p.numel() for p in parameters)
        result = step(optimizer, *args)
        found["moments"] = storage_bytes(
            state[x] for state in optimizer.state.values() for x in ("exp_avg", "exp_avg_sq")
        )
        return result

    def planned(*args, **kwargs):
        *rest, memory = plan(*args, **kwargs)
        found["weights expected"], found["updates expected"] = memory.weights, memory.updates
        return *rest, memory

    with (
        patch.object(torch.optim.AdamW, "step", measured),
        patch.object(loop, "with_micro_batches", planned),
        patch("fastrl.training.run.loop.write_checkpoint"),
        patch.object(loop, "save_model"),
    ):
        assert rank_runs.train(command, tables)["steps"] == 1
    return found


@pytest.mark.slow
def test_four_ranks_hold_a_quarter_each(processes, tables, tmp_path):
    sizes = {"vocab_size": 32768, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = tmp_path / "model.json"
    model.write_text(json.dumps(json.loads((EXAMPLE / "model.json").read_text()) | sizes))
    runs = [tables("sft", name, epochs=1, batch_size=4) for name in ("one", "several")]
    for run in runs:
        run["model"]["config"] = str(model)
        del run["data"]["eval_path"]
    rows = Path(runs[0]["data"]["path"])
    write_json_lines(rows, json_lines(rows)[:4])
    one = train_and_measure("sft", runs[0])
    several = processes(4).run(train_and_measure, "sft", runs[1], timeout=300)
    assert 60e6 < one["count"] < 62e6
    held = [sum(run[kind] for kind in ("parameters", "gradients", "moments")) for run in (one, *several)]
    shares = [bytes / held[0] for bytes in held[1:]]
    print(f"one process holds {held[0]:,} bytes, of which the ranks hold {shares}")
    for run in (one, *several):
        print(run)
        assert run["weights expected"] == run["parameters"]
        assert run["updates expected"] >= run["gradients"] + run["moments"]
    assert max(shares) <= SHARE
