"""What an engine gets of a policy with adapters: the checkpoint's names, with the adapters added as peft adds them."""

from types import SimpleNamespace

import peft
import pytest
import torch
from digit_models import add_noise
from tiny_models import tiny_model

from fastrl.training.engines.weights import PolicyWeights

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # peft's own, for mixtures
@pytest.mark.parametrize("targets", ["all-linear", ATTENTION], ids=["all", "attention"])
@pytest.mark.parametrize(("kind", "values"), [("qwen3", {}), ("qwen3_moe", MIXTURE), ("olmoe", MIXTURE)])
def test_adapters_are_merged_into_the_checkpoints_weights(kind, values, targets):
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=2, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model(kind, vocab_size=32, **values), settings)
    add_noise(0.1, model)  # adapters start from 0
    found = dict(PolicyWeights(SimpleNamespace(model=model, has_adapters=True)))
    merged = model.merge_and_unload()
    expected = dict(PolicyWeights(SimpleNamespace(model=merged, has_adapters=False)))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
