"""A real server, vLLM 0.32 on a CPU: what the tests against recorded answers rest on. Run with -m engine.

Measured with these models of two layers: mean |log ratio| 6e-7 to 1.1e-6 in float32 (largest 8e-6), 0.020 to 0.027 in
bfloat16 (largest 0.15); with weights that are a step of the test's size too old, 0.6 to 1.9.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from fake_vllm import GENERATE, FakeVLLM
from real_vllm import INSTALLED, RealVLLM, write_model
from run_files import checkpoints, records, write_toml

from fastrl.base.errors import UserError
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import Rollout, rollout_logprobs
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.config.sections import ModelConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.protocol import Weights
from fastrl.training.engines.sampler import CompletionSampler
from fastrl.training.engines.transfer import FileTransfer
from fastrl.training.engines.vllm_server import VLLMServer
from fastrl.training.models.policy import Policy, load_policy

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not INSTALLED.exists(), reason="vLLM is not installed: make engine"),
]

ROUNDING = {"float32": 1e-5, "bfloat16": 0.1}  # of the mean: ten and four times what was measured
OLD = 0.3  # half of the least that was measured with old weights
EXAMPLES = [Example("", {}, [1 + i, 2, 3, 4]) for i in range(8)]
ROWS = [example for example in EXAMPLES for _ in range(4)]
PATIENCE = 120  # seconds for a run of a few steps


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RealVLLM]]:
    """A server of a kind of model, started once."""
    servers: dict[tuple[str, str], RealVLLM] = {}

    def start(kind: str, dtype: str = "float32") -> RealVLLM:
        if (kind, dtype) not in servers:
            folder = tmp_path_factory.mktemp(kind)
            servers[kind, dtype] = RealVLLM(write_model(kind, folder / "model"), dtype, folder / "server.log")
            servers[kind, dtype].start()
            servers[kind, dtype].wait()
        return servers[kind, dtype]

    yield start
    for server in servers.values():
        server.kill()


def make_sampler(server: RealVLLM, dtype: str = "float32", **model: Any) -> CompletionSampler:
    policy = load_policy(ModelConfig(path=str(server.model), dtype=dtype, **model), torch.device("cpu"))
    settings = RolloutConfig(
        engine="vllm", url=server.url, num_generations=4, max_new_tokens=12, temperature=0.9, timeout=60
    )
    return CompletionSampler(VLLMServer(policy, settings, 16), policy, settings, seed=0)


def mismatch(policy: Policy, rollout: Rollout) -> float:
    """The mean |log ratio| of training and the engine, over tokens."""
    assert rollout.rollout_logprobs is not None
    ours = rollout_logprobs(policy, rollout, 0.9, MicroBatches(None))
    return float((ours - rollout.rollout_logprobs)[rollout.mask].abs().mean())


def train_a_little(policy: Policy) -> None:
    """Move what is trained, by about as much as it is."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


@pytest.mark.parametrize(
    ("kind", "dtype", "model"),
    [
        ("tied", "float32", {}),
        ("tied", "float32", {"lora_rank": 4}),
        ("experts", "float32", {}),
        ("untied", "bfloat16", {}),
    ],
    ids=["tied", "lora", "experts", "bfloat16"],
)
def test_log_probabilities_are_the_policys_after_each_update(start, kind, dtype, model):
    sampler = make_sampler(start(kind, dtype), dtype, **model)
    torch.manual_seed(0)
    for step in range(3):
        sampler.step = step
        rollout = sampler.draw(ROWS)
        assert mismatch(sampler.policy, rollout) < ROUNDING[dtype]
        train_a_little(sampler.policy)
        assert mismatch(sampler.policy, rollout) > OLD


def test_weights_that_do_not_arrive_show_in_the_mismatch(start, monkeypatch):
    """The server is told the version, and given nothing."""
    sampler = make_sampler(start("tied"))

    def send(transfer: FileTransfer, version: str, weights: Weights) -> None:
        sampler.engine.server.post("/update_weight_version", {"new_version": version})

    torch.manual_seed(0)
    sampler.draw(ROWS)
    train_a_little(sampler.policy)
    monkeypatch.setattr(FileTransfer, "send", send)
    sampler.step = 1
    assert mismatch(sampler.policy, sampler.draw(ROWS)) > OLD


def test_what_is_asked_for_is_drawn(start):
    sampler = make_sampler(start("tied"))
    first, again = (sampler.draw(ROWS) for _ in range(2))
    assert not torch.equal(first.targets, again.targets)
    assert all(len(set(map(tuple, first.targets[i : i + 4].tolist()))) > 1 for i in range(0, 32, 4))
    repeated = make_sampler(start("tied")).draw(ROWS)
    assert torch.equal(first.targets, repeated.targets)
    assert torch.equal(first.ended, ((first.targets == 0) & first.mask).any(1))
    greedy = sampler.draw(EXAMPLES, greedy=True, record=False)
    with torch.no_grad():
        logits = sampler.policy.model(greedy.input_ids, attention_mask=greedy.attention_mask.long()).logits
    likeliest = logits[:, greedy.prompt_length - 1 : -1].argmax(-1)
    assert torch.equal(likeliest[greedy.mask], greedy.targets[greedy.mask])


def test_stop_strings_end_a_completion_with_their_last_token(start):
    sampler = make_sampler(start("tied"))
    sampler.settings = sampler.settings.model_copy(update={"stop": ["3"]})
    rollout = sampler.draw(ROWS)
    three = sampler.policy.tokenizer.convert_tokens_to_ids("3")
    rows = [row[mask].tolist() for row, mask in zip(rollout.targets, rollout.mask, strict=True)]
    assert [row[-1] in (0, three) for row in rows] == rollout.ended.tolist()
    assert any(row[-1] == three for row in rows) and not any(three in row[:-1] for row in rows)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"top_k": 3}, "--return-sampling-mask"), ({"keep_routing": True}, "--enable-return-routed-experts")],
)
def test_what_the_server_was_not_started_for(start, settings, expected):
    sampler = make_sampler(start("tied"))
    sampler.engine.settings = sampler.settings.model_copy(update=settings)
    with pytest.raises(UserError, match=f"start it with {expected}"):
        sampler.draw(ROWS)


def test_an_update_that_a_killed_trainer_left_open(start):
    server = start("tied")
    for route in ("/pause?mode=abort", "/start_weight_update"):
        assert httpx.post(server.url + route, timeout=30).status_code == 200
    sampler = make_sampler(server)
    assert mismatch(sampler.policy, sampler.draw(ROWS)) < ROUNDING["float32"]


def form(answer: Any) -> Any:
    """An answer's fields, and the types of what is in them."""
    if isinstance(answer, dict):
        return {name: form(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return form(answer[0]) if answer else []
    return type(answer).__name__


def test_the_server_that_plays_vllm_answers_like_it(start, tmp_path):
    real = start("tied")
    fake = FakeVLLM(str(real.model / "config.json"), str(real.model))
    body = {"n": 2, "seed": 1, "max_tokens": 4, "temperature": 1.0, "top_k": 0, "logprobs": 0}
    request = {"request_id": "a", "token_ids": [1, 2], "sampling_params": body | {"stop_token_ids": [0], "stop": []}}
    calls: list[tuple[str, dict[str, Any] | None]] = [
        ("/health", None),
        ("/server_info?config_format=json", None),
        ("/get_world_size", None),
        ("/is_sleeping", None),
        ("/weight_info", None),
        ("/detokenize", {"tokens": [1, 2, 0]}),
        (GENERATE, request),
        ("/pause?mode=abort", {}),
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/finish_weight_update", {"weight_version": None}),  # of none
        ("/start_weight_update", {}),
        ("/start_weight_update", {}),  # of one that is active
        ("/finish_weight_update", {"weight_version": "x"}),
        ("/resume", {}),
        ("/sleep?level=2&mode=abort", {}),
        ("/wake_up", {}),
        ("/nothing", None),
    ]
    try:
        for route, content in calls:
            answers = []
            for url in (real.url, fake.url):
                method = "GET" if content is None else "POST"
                answers.append(httpx.request(method, url + route, json=content, timeout=30))
            theirs, ours = answers
            assert ours.status_code == theirs.status_code, route
            if not theirs.content:
                assert not ours.content, route
            elif route.startswith("/server_info"):
                for table, fields in ours.json()["vllm_config"].items():
                    assert fields.items() <= theirs.json()["vllm_config"][table].items(), table
            elif theirs.status_code != 200:
                assert ours.json() == theirs.json(), route
            elif route == GENERATE:
                expected = form(theirs.json()["choices"])
                assert form(ours.json()["choices"]) == expected
                assert theirs.json()["choices"][0]["weight_versions"][0]["start"] == 0
            else:
                assert form(ours.json()) == form(theirs.json()), route
    finally:
        fake.stop()


# --- runs that are killed --------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, example: Path) -> Callable[[RealVLLM], list[str]]:
    """A run of twelve steps with a server, saved at each."""

    def command(server: RealVLLM) -> list[str]:
        tables = {
            "model": {"path": str(server.model)},
            "data": {"path": str(example / "train.jsonl")},
            "reward": {"function": f"{example / 'reward.py'}:reward"},
            "objective": {"name": "grpo"},
            "rollout": {
                "engine": "vllm", "url": server.url, "prompts_per_step": 8, "num_generations": 4, "max_new_tokens": 8,
                "timeout": 240.0,
            },
            "optimizer": {"lr": 1e-3},
            "training": {"steps": 12, "device": "cpu", "threads": 1},
            "logging": {"output_dir": str(tmp_path / "run"), "tensorboard": False, "checkpoint_every": 1},
        }  # fmt: skip
        return [sys.executable, "-m", "fastrl.cli", "train", write_toml(tmp_path / "config.toml", tables)]

    return command


def wait_for_steps(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    """Until metrics.jsonl has as many lines. Fails if the process ends before, or takes too long."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + PATIENCE
    while not metrics.exists() or metrics.read_text().count("\n") < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def launch() -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Start a command, which is killed at the end if it is still there."""
    started: list[subprocess.Popen[str]] = []

    def launch(command: list[str]) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.communicate()


def check_run(folder: Path) -> None:
    lines = records(folder)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(line["mismatch/abs_log_ratio"] < ROUNDING["float32"] for line in lines)
    assert "step-000012" in checkpoints(folder)


def test_a_run_that_draws_ahead_has_the_weights_before_its_update(start, command, launch, tmp_path):
    """An update changes the log-probabilities by far more than rounding."""
    options = ["--rollout.ahead", "1", "--rollout_correction.level", "token", "--optimizer.lr", "0.05"]
    process = launch([*command(start("tied")), *options, "--training.steps", "3"])
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    first, *others = [line["mismatch/abs_log_ratio"] for line in records(tmp_path / "run")]
    assert first < ROUNDING["float32"] and len(others) == 2 and min(others) > 1e-3


def test_kill_9_of_the_trainer_and_resume(start, command, launch, tmp_path):
    server, folder = start("tied"), tmp_path / "run"
    for turn, steps in enumerate((2, 6)):
        process = launch([*command(server), *(["--resume"] if turn else [])])
        wait_for_steps(process, folder, steps)
        time.sleep(0.05 * turn)
        process.kill()
        process.communicate()
    process = launch([*command(server), "--resume"])
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    check_run(folder)


def test_kill_9_of_the_server_is_waited_for(start, command, launch, tmp_path):
    """The last test, because it takes the server away."""
    server, folder = start("tied"), tmp_path / "run"
    process = launch(command(server))
    wait_for_steps(process, folder, 3)
    server.kill()
    server.start()
    server.wait()
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    check_run(folder)
    said = [line for line in err.splitlines() if line.startswith("fastrl: ")]
    assert any(re.search(r"does not answer .* trying again for up to \d+ s", line) for line in said), err
    assert said[-1] == "fastrl: the engine is there; going on"
