"""vLLM without a server: what the trainer asks of vllm.LLM and makes of its answers, with a module that plays vllm.

The last test runs the real one, in the environment of `make engine`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from digit_models import TOKENIZER, narrowed
from places import ROOT
from run_files import records, write_toml
from safetensors.torch import load_file

from fastrl.base.errors import UserError
from fastrl.training.config.sections import ModelConfig, RolloutConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.protocol import Completion, EngineLost, EngineUnavailable, Request, Sampling
from fastrl.training.engines.sampler import CompletionSampler
from fastrl.training.engines.vllm_process import VLLMProcess
from fastrl.training.engines.weights import PolicyWeights
from fastrl.training.models.policy import Policy, load_policy


class EngineDeadError(Exception):
    """As vllm.v1.engine.exceptions has it."""


# The fields of vLLM 0.32's own classes that matter here.


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class SamplingMask:
    token_ids: list[list[int]]


@dataclass
class WeightVersionSpan:
    version: str
    start: int
    end: int


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Any
    cumulative_logprob: float | None
    logprobs: Any
    routed_experts: numpy.ndarray[Any, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    sampling_mask: SamplingMask | None = None
    weight_versions: list[WeightVersionSpan] | None = None


@dataclass
class FakeLLM:
    """Completions that are always the same, of the weights that it was given last."""

    options: dict[str, Any]
    calls: list[Any]
    version: str = "default"
    failure: Exception | None = None
    changes: dict[str, Any] = field(default_factory=dict)  # other values for the fields of its completions
    cached: bool = False
    pickles: list[tuple[str, str | None]] = field(default_factory=list)  # whether each call was allowed them
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtype = getattr(torch, self.options["dtype"])
        self.pickles.append(("make", os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION")))
        self.model_config = SimpleNamespace(dtype=dtype, max_model_len=self.options.get("max_model_len", 64))

    def called(self, name: str, *values: Any) -> None:
        self.calls.append((name, *values))
        self.pickles.append((name, os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION")))
        if self.failure is not None:
            raise self.failure

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.called("generate", prompts, params)
        return [SimpleNamespace(outputs=[self.draw(i, p) for i in reversed(range(p.n))]) for p in params]

    def draw(self, index: int, params: Any) -> CompletionOutput:
        ids = (3 + index, 5, 0)
        logprobs = None if params.logprobs is None else [{i: Logprob(-0.5 * i), 11: Logprob(-9.0)} for i in ids]
        spans = [WeightVersionSpan(self.version, 0, 3)]
        mask = SamplingMask([[i, 11] for i in ids]) if self.options["return_sampling_mask"] else None
        experts = numpy.zeros((6, 2, 2), dtype=numpy.uint8)
        output = CompletionOutput(index, "", ids, None, logprobs, experts, "stop", None, mask, spans)
        for name, value in self.changes.items():
            setattr(output, name, value)
        return output

    def get_world_size(self) -> int:
        return 1

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.called("init", request["init_info"])

    def start_weight_update(self) -> None:
        self.called("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        self.called("update", sorted(request["update_info"]))
        if "path" in request["update_info"]:
            self.weights = load_file(request["update_info"]["path"])

    def finish_weight_update(self, version: str | None = None) -> None:
        self.called("finish")
        self.version = version or self.version
        self.cached = True

    def reset_prefix_cache(self) -> bool:
        self.called("reset")
        self.cached = False
        return True

    def sleep(self, level: int) -> None:
        self.called("sleep", level)

    def wake_up(self) -> None:
        self.called("wake_up")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module in vllm's place; `made` are its LLMs."""
    made: list[FakeLLM] = []

    def make(**options: Any) -> FakeLLM:
        made.append(FakeLLM(options, []))
        return made[-1]

    module: Any = types.ModuleType("vllm")
    module.LLM, module.made = make, made
    module.SamplingParams = lambda **values: SimpleNamespace(**{"logprobs": None} | values)
    exceptions: Any = types.ModuleType("vllm.v1.engine.exceptions")
    exceptions.EngineDeadError = EngineDeadError
    modules = {"vllm": module, "vllm.v1.engine.exceptions": exceptions}
    for name, value in modules.items() | {(n, types.ModuleType(n)) for n in ("vllm.v1", "vllm.v1.engine")}:
        monkeypatch.setitem(sys.modules, name, value)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(config=narrowed(tmp_path_factory.mktemp("model")), tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def policy(model: ModelConfig) -> Policy:
    return load_policy(model, torch.device("cpu"))


def settings(**values: Any) -> RolloutConfig:
    return RolloutConfig(**{"engine": "vllm", "max_new_tokens": 3, "num_generations": 2, "timeout": 5.0} | values)


def drawn(engine: VLLMProcess, policy: Policy, rollout: RolloutConfig, **changes: Any) -> list[Completion]:
    """The completions of a request to an engine that has the weights "w1"."""
    engine.update_weights("w1", PolicyWeights(policy))
    engine.llm.changes = changes
    sampling = Sampling.of(rollout, policy.eos_token_ids, greedy=False, record=True)
    ((index, found),) = engine.generate([Request("a", [1, 2, 3, 4], 2, 3, seed=7)], sampling)
    assert index == 0
    return list(found)


# --- what vLLM is asked -----------------------------------------------------------------------------------------------


def test_what_vllm_is_started_with(vllm: Any, policy: Policy, model: ModelConfig) -> None:
    """A model from scratch is saved for it; its weights file is gone when it has started."""
    rollout = settings(top_k=4, keep_routing=True, engine_options={"max_num_seqs": 8, "dtype": "bfloat16"})
    engine = VLLMProcess(policy, rollout, model, longest=12)
    assert vllm.made == []  # before the first weights
    engine.update_weights("w1", PolicyWeights(policy))
    (llm,) = vllm.made
    folder = llm.options.pop("model")
    assert llm.options == {
        "tokenizer": folder,
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "return_sampling_mask": True,
        "enable_return_routed_experts": True,
        "enable_sleep_mode": False,
        "weight_transfer_config": {"backend": "fastrl"},
        "max_model_len": 12,
        "max_num_seqs": 8,
    }
    names = {path.name for path in Path(folder).iterdir()}
    assert {"config.json", "tokenizer.json"} <= names and "model.safetensors" not in names
    assert json.loads((Path(folder) / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_a_local_model_is_read_where_it_is(
    vllm: Any, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(path=str(tmp_path))
    engine = VLLMProcess(policy, settings(), config)
    engine.update_weights("w1", PolicyWeights(policy))
    assert vllm.made[0].options["model"] == vllm.made[0].options["tokenizer"] == str(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")  # vLLM would look for the base
    engine = VLLMProcess(policy, settings(), config)
    engine.update_weights("w1", PolicyWeights(policy))
    assert vllm.made[1].options["model"] != str(tmp_path)


def test_weights_arrive_before_the_cache_is_emptied(vllm: Any, policy: Policy, model: ModelConfig) -> None:
    engine = VLLMProcess(policy, settings(), model)
    engine.update_weights("w1", PolicyWeights(policy))
    (llm,) = vllm.made
    assert [name for name, *_ in llm.calls] == ["init", "start", "update", "finish", "reset"]
    assert llm.version == "w1" and not llm.cached
    expected = dict(policy.model.named_parameters())
    assert llm.weights.keys() == expected.keys()
    for name, tensor in llm.weights.items():
        assert torch.equal(tensor, expected[name])


def test_parameters_of_a_request(vllm: Any, policy: Policy, model: ModelConfig) -> None:
    rollout = settings(top_k=4, top_p=0.9, min_p=0.1, temperature=0.7, stop=["12"])
    engine = VLLMProcess(policy, rollout, model)
    drawn(engine, policy, rollout)
    greedy = Sampling.of(rollout, policy.eos_token_ids, greedy=True, record=True)
    list(engine.generate([Request("b", [1], 1, 3, seed=8)], greedy))
    (_, prompts, (params,)), (_, _, (likeliest,)) = [call for call in engine.llm.calls if call[0] == "generate"]
    assert prompts == [{"prompt_token_ids": [1, 2, 3, 4]}]
    asked = {"n": 2, "seed": 7, "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 4, "min_p": 0.1}
    assert asked.items() <= vars(params).items() and params.logprobs == 0
    assert params.stop == ["12"] and params.stop_token_ids == policy.eos_token_ids
    assert params.include_stop_str_in_output and not params.skip_special_tokens
    # An engine that records masks refuses a temperature of 0.
    assert (likeliest.temperature, likeliest.top_k, likeliest.logprobs) == (1.0, 1, None)


# --- what it answers --------------------------------------------------------------------------------------------------


def test_completions_of_vllms_classes(vllm: Any, policy: Policy, model: ModelConfig) -> None:
    rollout = settings(top_k=4, keep_routing=True)
    first, second = drawn(VLLMProcess(policy, rollout, model), policy, rollout)
    assert (first.token_ids, second.token_ids) == ([3, 5, 0], [4, 5, 0])  # in the order of their index
    assert first.logprobs == [-1.5, -2.5, 0.0] and first.ended and first.weights == "w1"
    assert first.sampling_mask is not None and first.sampling_mask.offsets.tolist() == [0, 2, 4, 6]
    assert first.routed_experts.shape == (6, 2, 2)


WRONG = {
    "more tokens than asked for": ({"token_ids": (1, 2, 3, 4)}, "with 4 token ids in a completion, expected 1 to 3"),
    "no logprobs": ({"logprobs": None}, "without a log-probability for each token"),
    "a logprob of another token": ({"logprobs": [{9: Logprob(0.0)}] * 3}, "without a log-probability for each token"),
    "no mask": ({"sampling_mask": None}, "without a usable sampling mask"),
    "a short mask": ({"sampling_mask": SamplingMask([[3], [5]])}, "with 2 rows in a sampling mask of 3 tokens"),
    "no experts": ({"routed_experts": None}, "without routed experts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_was_asked_for_is_missing(vllm: Any, policy: Policy, model: ModelConfig, case: str) -> None:
    changes, message = WRONG[case]
    rollout = settings(top_k=4, keep_routing=True)
    with pytest.raises(UserError, match=message):
        drawn(VLLMProcess(policy, rollout, model), policy, rollout, **changes)


def test_an_aborted_completion_is_asked_for_again(vllm: Any, policy: Policy, model: ModelConfig) -> None:
    with pytest.raises(EngineUnavailable, match="abort"):
        drawn(VLLMProcess(policy, settings(), model), policy, settings(), finish_reason="abort")


def test_old_weights_are_noticed(vllm: Any, policy: Policy, model: ModelConfig) -> None:
    """The version of a completion is checked against the one that was sent."""
    engine = VLLMProcess(policy, settings(), model)
    sampler = CompletionSampler(engine, policy, settings(), seed=0)
    sampler.draw([Example("1", {}, [1, 2])] * 2)
    engine.llm.changes = {"weight_versions": [WeightVersionSpan("of-old", 0, 3)]}
    with pytest.raises(UserError, match="of-old"):
        sampler.draw([Example("1", {}, [1, 2])] * 2)


# --- its end ----------------------------------------------------------------------------------------------------------


def test_the_death_of_its_process(vllm: Any, policy: Policy, model: ModelConfig) -> None:
    engine = VLLMProcess(policy, settings(), model)
    engine.update_weights("w1", PolicyWeights(policy))
    engine.llm.failure = EngineDeadError()
    sampling = Sampling.of(settings(), policy.eos_token_ids, greedy=False, record=True)
    with pytest.raises(EngineLost, match=r"process has died.*gpu_memory_utilization"):
        list(engine.generate([Request("a", [1], 1, 3, seed=7)], sampling))
    with pytest.raises(EngineLost, match="process has died"):
        engine.update_weights("w2", PolicyWeights(policy))


def test_a_call_that_it_never_answers(
    vllm: Any, policy: Policy, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does not, if its process is killed in the middle of a draw."""
    monkeypatch.setattr("fastrl.training.engines.vllm_process.PATIENCE", 0.01)
    engine = VLLMProcess(policy, settings(), model)
    engine.update_weights("w1", PolicyWeights(policy))
    answered, alive = Event(), iter([True, True, False])
    engine.llm.generate = lambda *values, **names: answered.wait()
    engine.processes = [SimpleNamespace(is_alive=lambda: next(alive))]
    sampling = Sampling.of(settings(), policy.eos_token_ids, greedy=False, record=True)
    with pytest.raises(EngineLost, match="process has died"):
        list(engine.generate([Request("a", [1], 1, 3, seed=7)], sampling))
    answered.set()


def test_other_failures_say_what_was_asked(vllm: Any, policy: Policy, model: ModelConfig) -> None:
    engine = VLLMProcess(policy, settings(), model)
    engine.update_weights("w1", PolicyWeights(policy))
    engine.llm.failure = RuntimeError("no such\nparameter")
    with pytest.raises(UserError, match="vLLM cannot take the policy's weights: no such parameter"):
        engine.update_weights("w2", PolicyWeights(policy))
    engine.llm.failure = ValueError("max_tokens")
    sampling = Sampling.of(settings(), policy.eos_token_ids, greedy=False, record=True)
    with pytest.raises(UserError, match="vLLM cannot draw completions: max_tokens"):
        list(engine.generate([Request("a", [1], 1, 3, seed=7)], sampling))


def test_a_cache_in_use_is_refused(
    vllm: Any, policy: Policy, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of the old weights would be drawn on."""
    monkeypatch.setattr(FakeLLM, "reset_prefix_cache", lambda self: False)
    with pytest.raises(UserError, match="prefix cache cannot be emptied"):
        VLLMProcess(policy, settings(), model).update_weights("w1", PolicyWeights(policy))


# --- a GPU that both use ----------------------------------------------------------------------------------------------


class OnGPU(SimpleNamespace):
    """A policy that says that it is on a GPU."""


@pytest.fixture
def gpu(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    values = {name: getattr(policy, name) for name in ("model", "tokenizer", "eos_token_ids", "dtype", "has_adapters")}
    return OnGPU(device=torch.device("cuda"), **values)


@dataclass
class FakeSender:
    """vLLM's IPC sender: it drives the client and leaves out the version."""

    calls: list[Any]
    client: Any
    source: Any

    def send_weights(self) -> None:
        self.calls.append([(meta.name, meta.dtype, meta.shape) for meta in self.source.metadata()])
        self.client.start_weight_update()
        self.client.update_weights({"ipc_handles": {}, "names": [name for name, _ in self.source]})
        self.client.finish_weight_update()

    def shutdown(self) -> None: ...


def test_sleep_and_ipc_on_a_shared_gpu(
    vllm: Any, policy: Policy, gpu: Any, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is discarded while asleep, and weights follow the wake-up under the policy's version."""
    sent: list[Any] = []

    def trainer_init(info: Any, client: Any, source: Any) -> FakeSender:
        assert (info.rank, info.packed) == (0, True)
        client.init_weight_transfer_engine({"packed": True})
        return FakeSender(sent, client, source)

    transfer: Any = types.ModuleType("vllm.distributed.weight_transfer")
    transfer.WeightSource = object
    transfer.ParamMeta = lambda name, dtype, shape: SimpleNamespace(name=name, dtype=dtype, shape=shape)
    transfer.WeightTransferTrainerFactory = SimpleNamespace(trainer_init=trainer_init)
    ipc: Any = types.ModuleType("vllm.distributed.weight_transfer.ipc_engine")
    ipc.IPCTrainerInitInfo = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm.distributed", types.ModuleType("vllm.distributed"))
    monkeypatch.setitem(sys.modules, transfer.__name__, transfer)
    monkeypatch.setitem(sys.modules, ipc.__name__, ipc)

    engine = VLLMProcess(gpu, settings(sleep=True), model)
    engine.sleep()  # there is nothing yet that could
    engine.wake_up()
    engine.update_weights("w1", PolicyWeights(policy))
    engine.sleep()
    engine.wake_up()
    engine.update_weights("w2", PolicyWeights(policy))
    (llm,) = vllm.made
    assert llm.options["weight_transfer_config"] == {"backend": "ipc"} and llm.options["enable_sleep_mode"]
    assert llm.options["gpu_memory_utilization"] < 0.5  # the trainer needs the rest
    update = [("start",), ("update", ["ipc_handles", "names"]), ("finish",), ("reset",)]
    assert llm.calls == [("init", {"packed": True}), *update, ("sleep", 2), ("wake_up",), *update]
    assert llm.version == "w2"
    expected = [(name, torch.float32, tuple(p.shape)) for name, p in policy.model.named_parameters()]
    assert sent == [expected, expected]
    # Or the handles cannot go to its processes. Nothing else that the trainer starts has it.
    assert all(allowed == "1" for _, allowed in llm.pickles) and len(llm.pickles) == 12
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ
    list(engine.generate([Request("r", [1], 1, 3, 0)], Sampling(1.0, 1.0, 0, 0.0, (0,), (), False, False, False)))
    assert llm.pickles[-1] == ("generate", None)


def test_what_a_shared_gpu_cannot(vllm: Any, policy: Policy, gpu: Any, model: ModelConfig) -> None:
    with pytest.raises(UserError, match=r"rollout.sleep.*the policy is on cpu"):
        VLLMProcess(policy, settings(sleep=True), model)
    gpu.device = torch.device("cuda:1")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
        VLLMProcess(gpu, settings(), model)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_refused_before_vllm_is_started(vllm: Any, policy: Policy, model: ModelConfig) -> None:
    with pytest.raises(UserError, match=r"rollout.engine_options.logprobs_mode: is set by fastrl"):
        VLLMProcess(policy, settings(engine_options={"logprobs_mode": "raw_logprobs"}), model)


def test_vllm_is_not_installed(policy: Policy, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"without rollout.url needs vllm .*: pip install 'vllm>=0.32'"):
        VLLMProcess(policy, settings(), model)


def test_vllm_refuses_an_option(vllm: Any, policy: Policy, model: ModelConfig) -> None:
    def refuse(**options: Any) -> Any:
        raise TypeError("unexpected keyword argument 'max_seqs'")

    vllm.LLM = refuse
    engine = VLLMProcess(policy, settings(engine_options={"max_seqs": 1}), model)
    with pytest.raises(UserError, match=r"vLLM cannot be started: unexpected .*'max_seqs'; .*rollout.engine_options"):
        engine.update_weights("w1", PolicyWeights(policy))
    assert engine.folder is not None and not (Path(engine.folder.name) / "model.safetensors").exists()


def test_a_context_that_is_too_short(vllm: Any, policy: Policy, model: ModelConfig) -> None:
    engine = VLLMProcess(policy, settings(engine_options={"max_model_len": 6}), model, longest=9)
    with pytest.raises(UserError, match=r"engine_options.max_model_len: .* up to 9 tokens .* got 6"):
        engine.update_weights("w1", PolicyWeights(policy))


# --- the real one -----------------------------------------------------------------------------------------------------

ENGINE = ROOT / ".venv-engine" / "bin" / "fastrl"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(not ENGINE.exists(), reason="needs the environment of `make engine`")
@pytest.mark.parametrize("ahead", [0, 1])
def test_training_steps(tmp_path: Path, ahead: int) -> None:
    """The engine's log-probabilities equal the policy's before and after updates, or if drawn ahead, of old weights."""
    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = tmp_path / "config.toml"
    write_toml(
        config,
        {
            "base": str(ROOT / "examples" / "reverse_digits" / "config.toml"),
            "model": {"config": str(narrowed(tmp_path, **heads))},
            "rollout": {
                "engine": "vllm",
                "ahead": ahead,
                "prompts_per_step": 8,
                "engine_options": {"enforce_eager": True, "kv_cache_memory_bytes": 2**26},
            },
            "rollout_correction": {"level": "token"},
            "optimizer": {"lr": 0.05, "warmup_updates": 0},
            "training": {"steps": 3},
            "evaluation": {"every": 3},
            "logging": {"output_dir": str(tmp_path / "run"), "tensorboard": False},
        },
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [str(ENGINE), "train", str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [record["mismatch/abs_log_ratio"] for record in records(tmp_path / "run")]
    assert len(steps) == 3 and math.isfinite(sum(steps))
    assert steps[0] < 1e-5
    # An update changes the log-probabilities by far more than rounding: weights that do not arrive are seen.
    assert all(step > 1e-3 for step in steps[1:]) if ahead else all(step < 1e-5 for step in steps)
