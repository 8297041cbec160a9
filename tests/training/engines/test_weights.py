"""What an engine gets of a policy, with adapters added as peft adds them, and where it meets the trainer for it."""

import resource
import signal
import socket
import sys
from types import ModuleType, SimpleNamespace

import peft
import pytest
import torch
from digit_models import add_noise
from safetensors.torch import load_file
from tiny_models import tiny_model

from fastrl.base.errors import UserError
from fastrl.training.engines import transfer
from fastrl.training.engines.weights import PolicyWeights

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
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


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("adapters", [False, True])
def test_a_bias_that_chooses_experts_is_sent_and_not_rounded(tmp_path, adapters):
    """It is no parameter but a buffer, which the checkpoint has in float32 whatever the type of the rest."""
    model = tiny_model("deepseek_v3", vocab_size=32, **DEEPSEEK)
    biases = {name: x.normal_() for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")}
    model.save_pretrained(tmp_path)
    if adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    found = dict(PolicyWeights(SimpleNamespace(model=model, has_adapters=adapters)).cast(torch.bfloat16))
    assert found.keys() == load_file(tmp_path / "model.safetensors").keys() and biases
    assert all(torch.equal(found[name], bias) for name, bias in biases.items())
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in found.items() if name not in biases)


def test_no_room_for_the_file_is_an_error_that_says_what_helps(tmp_path, monkeypatch):
    """A container has 64 MiB of shared memory unless it is given more. The limit here is one of a file's size."""
    monkeypatch.setattr(transfer, "SHARED_MEMORY", tmp_path)
    weights = PolicyWeights(SimpleNamespace(model=tiny_model("qwen3", vocab_size=32), has_adapters=False))
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        failure = pytest.raises(UserError, match=r"cannot write the weights for the engine: .*--shm-size")
        with failure, transfer.weights_file(weights, "localhost"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_the_port_of_the_meeting_is_nobody_elses(monkeypatch):
    """vLLM's sender takes a number, and listens on it as here (`StatelessProcessGroup.create` of vLLM 0.32)."""
    met = []

    def trainer_init(info, client, source):
        address = (info.master_address, info.master_port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        met.append((listener, address, info.world_size))
        return SimpleNamespace(send_weights=lambda: None)

    package = ModuleType("vllm.distributed.weight_transfer")
    package.WeightSource, package.ParamMeta = object, None
    package.WeightTransferTrainerFactory = SimpleNamespace(trainer_init=trainer_init)
    nccl = ModuleType("vllm.distributed.weight_transfer.nccl_engine")
    nccl.NCCLTrainerInitInfo = SimpleNamespace
    for module in (ModuleType("vllm"), ModuleType("vllm.distributed"), package, nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    weights = PolicyWeights(SimpleNamespace(model=tiny_model("qwen3", vocab_size=32), has_adapters=False))
    control = transfer.Control(SimpleNamespace(host="localhost"), timeout=1.0)
    way = transfer.VLLMTransfer("nccl", control, torch.float32, workers=2)
    way.send("w1", weights)
    ((listener, address, world_size),) = met
    assert address[0] == "127.0.0.1" and world_size == 3
    with listener, socket.create_connection(address, timeout=5):
        way.send("w2", weights)  # they have met
    assert len(met) == 1
