"""A model that cannot be trained is refused by one line, whatever its own code raises, and Llama 4's text is not."""

import json

import peft
import pytest
import torch
from digit_models import MODEL, TOKENIZER
from tiny_models import tiny_model

from fastrl.base.errors import UserError
from fastrl.integrations.transformers import fused_lm_head
from fastrl.training.config.sections import ModelConfig
from fastrl.training.models.decoder import decoder_states, left_pad
from fastrl.training.models.policy import load_policy

CPU = torch.device("cpu")
# Its keys and values have as many heads as its queries, so the mask of a batch with several sequences does not fit.
NARROW_KEYS = {
    "head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
}
REFUSED = {
    "roberta": ({}, r"RobertaForCausalLM cannot compute the logits of 8 tokens: TypeError: ne\(\) received an invalid"),
    "xmod": ({}, "XmodForCausalLM cannot compute the logits of 8 tokens: ValueError: Input language unknown"),
    "electra": ({}, "ElectraForCausalLM does not apply its output head to its decoder's last hidden states"),
    "roformer": ({}, "RoFormerForCausalLM computes its logits in a way the fused losses do not know"),
}


@pytest.fixture
def config_of(tmp_path):
    def write(kind, options=None, **values):
        path = tmp_path / "model.json"
        sizes = {"num_experts_per_tok": 1, "intermediate_size_mlp": 16, "num_local_experts": 2, "pad_token_id": None}
        path.write_text(json.dumps(MODEL | sizes | {"model_type": kind} | values))
        return ModelConfig(config=path, tokenizer=TOKENIZER, **(options or {}))

    return write


@pytest.mark.parametrize("kind", REFUSED)
def test_the_refusal_is_one_line_with_the_models_name(config_of, kind):
    values, reason = REFUSED[kind]
    config = config_of(kind, **values)
    with pytest.raises(UserError, match=f"^{config.config}: {reason}") as caught:
        load_policy(config, CPU)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=f"^{reason}"):
        fused_lm_head(tiny_model(kind, vocab_size=12, **values))


def test_a_batch_that_the_model_cannot_compute(config_of):
    config = config_of(
        "deepseek_v3", n_group=1, topk_group=1, n_routed_experts=2, moe_intermediate_size=8, **NARROW_KEYS
    )
    reason = "DeepseekV3Model cannot compute sequences in a batch: RuntimeError: The size of tensor a"
    with pytest.raises(UserError, match=f"^training.packing: {reason}") as caught:
        load_policy(config, CPU, packing=True)
    assert "\n" not in str(caught.value)


def test_a_model_with_several_decoders_of_text(config_of):
    with pytest.raises(UserError, match="cannot load the model: ") as caught:
        load_policy(config_of("musicgen"), CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("eos", ["0", [[0]], [0, 12], -5, 1.5, True])
def test_an_eos_that_is_no_id_of_the_model(config_of, tmp_path, eos):
    path = tmp_path / "saved"
    policy = load_policy(config_of("llama"), CPU)
    policy.model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UserError, match=r"saved: eos_token_id, .* expected ids from 0 to 11, got ") as caught:
        load_policy(ModelConfig(path=str(path)), CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a b", "x" * 300, "./" + "x" * 300])
def test_a_name_that_no_model_can_have(name):
    with pytest.raises(UserError, match=f"^{name}: .*no such directory") as caught:
        load_policy(ModelConfig(path=name, tokenizer=TOKENIZER), CPU)
    assert "\n" not in str(caught.value)


def test_what_is_no_causal_model_is_named():
    with pytest.raises(TypeError, match="Linear must have a linear output head, got NoneType"):
        fused_lm_head(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2, "lora_targets": ["q_proj"]}], ids=["whole", "adapters"])
def test_llama_4_has_the_decoder_that_it_does_not_name(config_of, options):
    policy = load_policy(config_of("llama4_text", options), CPU, packing=True)
    ids, mask = left_pad([[1, 2, 3, 4, 5], [3, 4]], 0, CPU)
    with torch.no_grad():
        states = decoder_states(policy.decoder, ids, mask)
        expected = policy.model(
            input_ids=ids, attention_mask=mask.long(), position_ids=(mask.cumsum(1) - 1).clamp_min(0)
        )
    torch.testing.assert_close((states @ policy.head.weight.T)[mask], expected.logits[mask])


def test_llama_4_inside_pefts_wrapper_has_a_fused_head():
    torch.manual_seed(0)
    model = tiny_model("llama4_text", vocab_size=12, head_dim=8, num_local_experts=2, intermediate_size_mlp=16)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = wrapped(input_ids=ids, labels=ids).loss
    out = fused_lm_head(wrapped)(input_ids=ids, labels=ids, return_token_stats=True)
    torch.testing.assert_close(out.loss, expected)
