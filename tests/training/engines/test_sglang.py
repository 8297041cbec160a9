"""The example of an engine for SGLang's server, against a small server that answers in the shapes of SGLang 0.5."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from digit_models import TOKENIZER, narrowed
from fake_sglang import LOGPROBS, SAMPLING_LOGPROBS, FakeSGLang
from places import EXAMPLES
from tiny_models import tiny_model

from fastrl.base.errors import UserError
from fastrl.rewards.loading import import_function
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.config.sections import ModelConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.protocol import EngineLost, EngineUnavailable, Request, Sampling
from fastrl.training.engines.sampler import CompletionSampler
from fastrl.training.engines.weights import PolicyWeights
from fastrl.training.models.policy import Policy, load_policy

FILE = EXAMPLES / "engines" / "sglang.py"
SGLangServer: Any = import_function(f"{FILE}:SGLangServer", "rollout.engine")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastrl.training.engines.sampler.PAUSE", 0.01)


@pytest.fixture
def server() -> Iterator[FakeSGLang]:
    fake = FakeSGLang()
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    config = narrowed(tmp_path_factory.mktemp("model"))
    return load_policy(ModelConfig(config=config, tokenizer=TOKENIZER), torch.device("cpu"))


def settings(server: FakeSGLang, **values: Any) -> RolloutConfig:
    fields = {"engine": f"{FILE}:make", "url": server.url, "max_new_tokens": 3, "num_generations": 2, "timeout": 5.0}
    return RolloutConfig(**fields | values)


def engine_of(server: FakeSGLang, policy: Policy, **values: Any) -> Any:
    """An engine whose server has the weights "w1"."""
    engine = SGLangServer(policy, settings(server, **values))
    engine.update_weights("w1", PolicyWeights(policy))
    return engine


def drawn(engine: Any, policy: Policy, *, greedy: bool = False) -> Any:
    """The completions of one request."""
    sampling = Sampling.of(engine.settings, policy.eos_token_ids, greedy, record=True)
    ((_, found),) = engine.generate([Request("a", [1, 2, 3, 4], 2, 3, seed=9)], sampling)
    return found


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_go_through_a_file_while_it_is_paused(server: FakeSGLang, policy: Policy) -> None:
    engine = engine_of(server, policy)
    checks = ["/health", "/server_info", "/detokenize"]
    update = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert server.routes() == checks + update
    expected = dict(policy.model.named_parameters())
    assert server.weights.keys() == expected.keys() and server.version == "w1"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in server.weights.items())
    folder = Path(server.calls[4][1]["model_path"])
    assert not folder.exists()  # nothing is left behind
    engine.update_weights("w2", PolicyWeights(policy))
    assert server.routes() == checks + 2 * update and server.version == "w2"


def test_what_a_killed_trainer_left_is_removed(
    server: FakeSGLang, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastrl.training.engines.transfer.SHARED_MEMORY", tmp_path)
    engine = engine_of(server, policy)
    folder = tmp_path / Path(server.calls[4][1]["model_path"]).name
    folder.mkdir()  # as if it had been killed while the server read
    os.utime(folder, (0, 0))
    engine.update_weights("w2", PolicyWeights(policy))
    assert not folder.exists()


def test_a_server_with_a_key(server: FakeSGLang, policy: Policy, tmp_path: Path) -> None:
    server.key = "s3cret-key"
    (tmp_path / "key").write_text("s3cret-key\n")
    assert len(drawn(engine_of(server, policy, api_key_file=tmp_path / "key"), policy)) == 2
    with pytest.raises(UserError, match=r"401: Unauthorized; rollout.api_key_file"):
        engine_of(server, policy)


def test_sleep_frees_all_memory(server: FakeSGLang, policy: Policy) -> None:
    server.options = {"enable_memory_saver": True}
    engine = engine_of(server, policy, sleep=True)
    engine.sleep()
    engine.wake_up()
    memory = [("/release_memory_occupation", {}), ("/resume_memory_occupation", {})]
    assert server.calls[-2:] == memory  # without tags: weights and cache


# --- completions ------------------------------------------------------------------------------------------------------


def test_a_request_for_each_completion(server: FakeSGLang, policy: Policy) -> None:
    """With seeds of its own: the same ones would give the same completion."""
    engine = engine_of(server, policy, temperature=0.7, stop=["12"])
    first, second = drawn(engine, policy)
    assert (first.token_ids, second.token_ids) == ([1, 5, 0], [2, 5, 0])
    assert first.logprobs == [-1.0, -2.0, -0.5] and first.ended and first.weights == "w1"
    assert first.sampling_mask is None and first.routed_experts is None
    bodies = sorted(
        (body for path, body in server.calls if path == "/generate"),
        key=lambda b: b["sampling_params"]["sampling_seed"],
    )
    params = {"max_new_tokens": 3, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1}
    for number, body in enumerate(bodies):
        assert body["input_ids"] == [1, 2, 3, 4] and "return_sampling_mask" not in body
        stops = {"stop": ["12"], "stop_token_ids": policy.eos_token_ids}
        expected = params | stops | {"sampling_seed": 9 + number}
        assert {name: body["sampling_params"][name] for name in expected} == expected


def test_truncation_has_the_logprobs_over_the_supports(server: FakeSGLang, policy: Policy) -> None:
    engine = engine_of(server, policy, top_k=4, top_p=0.9)
    first, _ = drawn(engine, policy)
    assert first.logprobs == list(SAMPLING_LOGPROBS)
    assert first.sampling_mask is not None and first.sampling_mask.offsets.tolist() == [0, 2, 4, 6]
    likeliest, _ = drawn(engine, policy, greedy=True)
    body = server.calls[-1][1]
    assert likeliest.logprobs is None and body["sampling_params"]["temperature"] == 0.0 and not body["return_logprob"]


def test_a_rollout(server: FakeSGLang, policy: Policy) -> None:
    sampler = CompletionSampler(SGLangServer(policy, settings(server)), policy, settings(server), seed=0)
    rollout = sampler.draw([Example("1", {}, [1, 2])] * 2 + [Example("3", {}, [3])] * 2)
    assert rollout.targets[:, 1:].tolist() == [[5, 0]] * 4 and rollout.ended.all()
    assert rollout.rollout_logprobs is not None and rollout.rollout_logprobs.tolist() == [list(LOGPROBS)] * 4


def test_routed_experts(server: FakeSGLang, policy: Policy) -> None:
    """The base64 of int32 (tokens - 1, layers, experts per token), reshaped by the policy's numbers."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 3}
    mixture = tiny_model("qwen3_moe", vocab_size=12, **sizes)
    values = numpy.arange(6 * 3 * 2, dtype="<i4").reshape(6, 3, 2)
    server.options = {"enable_return_routed_experts": True}
    server.meta = {"routed_experts": base64.b64encode(values.tobytes()).decode()}
    engine = engine_of(server, policy, keep_routing=True)
    engine.policy = replace(policy, model=mixture)
    first, _ = drawn(engine, policy)
    assert (first.routed_experts == values).all()
    assert server.calls[-1][1]["return_routed_experts"]
    server.meta = {"routed_experts": base64.b64encode(values.tobytes()[:-4]).decode()}
    with pytest.raises(UserError, match="routed experts that are not base64 of 3 layers"):
        drawn(engine, policy)
    server.meta = {}
    with pytest.raises(UserError, match="without routed experts; start it with --enable-return-routed-experts"):
        drawn(engine, policy)


# --- bad input --------------------------------------------------------------------------------------------------------

WRONG = {
    "no logprobs": ({"output_token_logprobs": None}, "without a log-probability for each token"),
    "of other tokens": ({"output_token_logprobs": [[-1.0, 7, None]] * 3}, "without a log-probability for each token"),
    "no logprobs over supports": ({"output_token_sampling_logprobs": None}, "without a log-probability for each token"),
    "no mask": ({"output_token_sampling_mask": None}, "without a usable sampling mask"),
    "a short mask": ({"output_token_sampling_mask": [[1], [5]]}, "with 2 rows in a sampling mask of 3 tokens"),
}


FORMS: dict[str, Any] = {
    "numbers for lists": {"output_token_logprobs": [-1.0, -2.0, -0.5]},
    "a log-probability that is null": {"output_token_sampling_logprobs": [None] * 3},
    "a number for a list": {"output_token_logprobs": 3},
}


@pytest.mark.parametrize("case", FORMS)
def test_an_answer_in_another_form(server: FakeSGLang, policy: Policy, case: str) -> None:
    server.meta = FORMS[case]
    engine = engine_of(server, policy, top_k=4)
    with pytest.raises(UserError, match=rf"{server.url} answered /generate in a form that SGLang 0.5 does not have"):
        drawn(engine, policy)


@pytest.mark.parametrize("case", WRONG)
def test_what_was_asked_for_is_missing(server: FakeSGLang, policy: Policy, case: str) -> None:
    server.meta, message = WRONG[case]
    engine = engine_of(server, policy, top_k=4)
    with pytest.raises(UserError, match=rf"rollout.url: SGLang at {server.url} answered /generate {message}"):
        drawn(engine, policy)


def test_another_server(server: FakeSGLang, policy: Policy) -> None:
    server.answers = {"/server_info": (200, {"vllm_config": {}})}
    with pytest.raises(UserError, match="is no SGLang server"):
        engine_of(server, policy)
    server.answers = {"/server_info": (404, {"detail": "Not Found"})}
    with pytest.raises(UserError, match=r"Not Found; SGLang's later 0.5 versions have it"):
        engine_of(server, policy)
    server.answers = {"/detokenize": (200, {"text": "of another tokenizer"})}
    with pytest.raises(UserError, match=r"has another tokenizer .*of another tokenizer.*--tokenizer-path"):
        engine_of(server, policy)


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        ({}, {"sleep": True}, "runs without enable_memory_saver; start it with --enable-memory-saver"),
        ({}, {"keep_routing": True}, "start it with --enable-return-routed-experts"),
    ],
)
def test_options_of_the_server(
    server: FakeSGLang, policy: Policy, options: dict[str, Any], values: dict[str, Any], message: str
) -> None:
    server.options = options
    with pytest.raises(UserError, match=message):
        engine_of(server, policy, **values)


def test_weights_that_it_cannot_load(server: FakeSGLang, policy: Policy) -> None:
    """The server's own words."""
    answer = {"success": False, "message": "Failed to update weights: shapes differ", "num_paused_requests": 0}
    server.answers = {"/update_weights_from_disk": (400, answer)}
    with pytest.raises(UserError, match="400: Failed to update weights: shapes differ"):
        engine_of(server, policy)


def test_an_aborted_completion(server: FakeSGLang, policy: Policy) -> None:
    server.meta = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    engine = engine_of(server, policy)
    with pytest.raises(EngineUnavailable, match="finish_reason 'abort'"):
        drawn(engine, policy)


def test_a_server_that_was_started_anew_gets_the_weights_again(
    server: FakeSGLang, policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler = CompletionSampler(SGLangServer(policy, settings(server)), policy, settings(server), seed=0)
    sampler.draw([Example("1", {}, [1, 2])] * 2)
    server.version, server.calls = "default", []
    rollout = sampler.draw([Example("1", {}, [1, 2])] * 2)
    assert rollout.ended.all() and server.routes().count("/update_weights_from_disk") == 1
    assert "was drawn with the weights 'default'" in capsys.readouterr().err
    server.meta = {"weight_version": "of-another-run"}
    with pytest.raises(EngineLost, match=r"'of-another-run'.* another run may be using"):
        sampler.draw([Example("1", {}, [1, 2])] * 2)
