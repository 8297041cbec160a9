"""What a server may answer, and what a user is told to do about it, in one line."""

import base64
import itertools
import os
import pickle
import re
import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fake_vllm import GENERATE, RESET, Reply, always, changed, failure, first, worker_failure

from fastrl.base.errors import UserError
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import rollout_logprobs
from fastrl.training.data.examples import Example
from fastrl.training.engines import transfer
from fastrl.training.engines.protocol import EngineLost

EXAMPLES = [Example("", {}, [1 + i, 2, 3]) for i in range(6)]
ROWS = [example for example in EXAMPLES for _ in range(3)]


def mismatch(policy, rollout, temperature=1.0):
    """The largest difference of training's log-probabilities and the engine's."""
    ours = rollout_logprobs(policy, rollout, temperature, MicroBatches(None))
    return float((ours - rollout.rollout_logprobs)[rollout.mask].abs().max())


def fails(sampler, *expected, rows=ROWS[:3]):
    """Drawing fails with one line that has all of these in it."""
    with pytest.raises(UserError) as caught:
        sampler.draw(rows)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    for text in expected:
        assert text in message, message
    return caught.value


def test_completions_and_their_log_probabilities_are_the_policys(server, make_sampler, policy):
    """Float32: the fake's logits come of sequences one at a time, ours of a padded batch."""
    sampler = make_sampler(server.url, temperature=0.7)
    rollout = sampler.draw(ROWS)
    assert mismatch(policy, rollout, 0.7) < 1e-5
    assert rollout.ended is not None and 0 < int(rollout.ended.sum()) < len(ROWS)
    assert all(len(set(map(tuple, rollout.targets[i : i + 3].tolist()))) > 1 for i in range(0, 6, 3))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    sampler.step = 1
    assert mismatch(policy, sampler.draw(ROWS), 0.7) < 1e-5


def test_a_server_that_ignores_the_weights_shows_in_the_mismatch(make_server, make_sampler, policy):
    """The sampler alone cannot know: vLLM says the version that it was told."""
    sampler = make_sampler(make_server(ignores_weights=True).url)
    assert mismatch(policy, sampler.draw(ROWS)) > 0.1


def test_all_that_draws_is_asked_for(server, make_sampler):
    sampler = make_sampler(server.url, temperature=0.5, stop=["3"])
    rollout = sampler.draw(ROWS)
    asked = server.asked()
    assert sorted(body["token_ids"] for body in asked) == sorted(example.token_ids for example in EXAMPLES)
    assert len({body["request_id"] for body in asked}) == len({body["sampling_params"]["seed"] for body in asked}) == 6
    expected = {"n": 3, "max_tokens": 5, "temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0}
    expected |= {"stop": ["3"], "stop_token_ids": [0], "repetition_penalty": 1.0, "include_stop_str_in_output": True}
    for body in asked:
        assert expected.items() <= body["sampling_params"].items()
    three = sampler.policy.tokenizer.convert_tokens_to_ids("3")
    last = [int(row[mask][-1]) for row, mask in zip(rollout.targets, rollout.mask, strict=True)]
    ended = [token in (0, three) for token in last]
    assert rollout.ended.tolist() == ended and three in last


def test_the_same_seed_draws_the_same(server, make_sampler):
    first_time, again, others = (make_sampler(server.url) for _ in range(3))
    others.seed = 1
    drawn = [sampler.draw(ROWS).targets.tolist() for sampler in (first_time, again, others)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_evaluation_is_greedy_and_records_nothing(server, make_sampler, policy):
    sampler = make_sampler(server.url)
    rollout = sampler.draw(EXAMPLES, greedy=True, record=False)
    params = server.asked()[0]["sampling_params"]
    assert params["temperature"] == 0 and params["n"] == 1 and "logprobs" not in params
    assert rollout.rollout_logprobs is None
    with torch.no_grad():
        states = policy.model(rollout.input_ids, attention_mask=rollout.attention_mask.long()).logits
    likeliest = states[:, rollout.prompt_length - 1 : -1].argmax(-1)
    assert torch.equal(likeliest[rollout.mask], rollout.targets[rollout.mask])


def test_the_likeliest_tokens_of_a_server_that_records_masks(make_server, make_sampler):
    """It refuses a temperature of 0."""
    server = make_server(options={"return_sampling_mask": True})
    make_sampler(server.url, top_k=4, top_p=0.9, min_p=0.1).draw(EXAMPLES, greedy=True, record=False)
    for body in server.asked():
        assert {"temperature": 1.0, "top_k": 1}.items() <= body["sampling_params"].items()
        assert "logprobs" not in body["sampling_params"]


def test_sampling_masks_are_kept(make_server, make_sampler, policy):
    sampler = make_sampler(make_server(options={"return_sampling_mask": True}).url, top_k=3)
    rollout = sampler.draw(ROWS)
    assert rollout.sampling_mask is not None
    assert mismatch(policy, rollout) < 1e-5
    assert set(rollout.sampling_mask.offsets.diff()[rollout.mask.flatten()].tolist()) == {3}


def test_weights_are_sent_when_they_changed_and_removed(server, make_sampler):
    sampler = make_sampler(server.url)
    sampler.draw(ROWS)
    sampler.draw(ROWS)
    assert server.routes().count("/update_weights") == 1
    sampler.step = 1
    sampler.draw(ROWS)
    paths = [body["update_info"]["path"] for route, body in server.calls if route == "/update_weights"]
    assert len(paths) == 2 and not any(Path(path).parent.exists() for path in paths)
    order = [route for route in server.routes() if route not in ("/health", GENERATE)]
    assert order == [
        "/server_info", "/detokenize", "/is_sleeping", "/get_world_size", "/init_weight_transfer_engine",
        "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume", "/weight_info",
        "/weight_info",  # whether it is still the server that it was
        "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume", "/weight_info",
    ]  # fmt: skip


def test_a_thread_that_starts_late_draws_with_the_weights_of_its_start(server, make_sampler, monkeypatch):
    class Late:
        """A thread that runs when it is waited for."""

        def __init__(self, target, **options):
            self.join = target

        def start(self):
            pass

    monkeypatch.setattr("fastrl.training.engines.sampler.Thread", Late)
    sampler = make_sampler(server.url)
    draw = sampler.ask(ROWS)
    sampler.start(draw, {})
    sampler.step += 1  # the update is done before the thread begins
    assert not sampler.finish(draw).weights_step.any()


def test_what_a_killed_trainer_left_is_removed_and_no_more(server, make_sampler, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "SHARED_MEMORY", tmp_path)
    left, fresh, other = (tmp_path / name for name in ("fastrl-weights-left", "fastrl-weights-fresh", "other"))
    for directory in (left, fresh, other):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(bytes(8))
    os.utime(left, (0, 0))
    make_sampler(server.url).draw(ROWS)
    assert not left.exists() and fresh.exists() and other.exists()


def test_an_update_that_a_killed_trainer_left_open_is_ended(server, make_sampler, policy):
    server.updating = server.paused = True
    assert mismatch(policy, make_sampler(server.url).draw(ROWS)) < 1e-5
    routes = server.routes()
    begin = routes.index("/start_weight_update")
    assert routes[begin : begin + 5] == [
        "/start_weight_update", "/health", "/finish_weight_update", "/start_weight_update", "/update_weights"
    ]  # fmt: skip


def test_a_server_that_a_killed_trainer_left_asleep_is_woken(server, make_sampler, policy):
    server.sleeping = server.paused = True
    assert mismatch(policy, make_sampler(server.url).draw(ROWS)) < 1e-5


def test_sleep_wake_up_and_weights_in_this_order(make_server, make_sampler):
    server = make_server(options={"enable_sleep_mode": True})
    sampler = make_sampler(server.url, sleep=True)
    sampler.draw(ROWS)
    sampler.sleep()
    assert server.sleeping
    sampler.draw(ROWS)
    order = [route for route in server.routes() if route in ("/sleep", "/wake_up", "/update_weights", GENERATE)]
    assert order == ["/update_weights", *[GENERATE] * 6, "/sleep", "/wake_up", "/update_weights", *[GENERATE] * 6]


class Sender:
    """vLLM's IPC sender: it drives the client, and leaves out the version."""

    def __init__(self, info, client, source):
        self.client, self.source, self.sent = client, source, []
        assert (info.rank, info.packed) == (0, True)
        client.init_weight_transfer_engine({"packed": True})

    def send_weights(self):
        self.sent.append([(meta.name, meta.dtype, meta.shape) for meta in self.source.metadata()])
        self.client.start_weight_update()
        self.client.update_weights({"ipc_handles": {"GPU-0": ("handle",)}, "names": [name for name, _ in self.source]})
        self.client.finish_weight_update()


def test_sleep_and_ipc_on_a_shared_gpu(make_server, make_sampler, policy, monkeypatch):
    """Weights follow the wake-up under the policy's version, and their handles, which JSON cannot hold, as pickles."""
    package = ModuleType("vllm.distributed.weight_transfer")
    package.WeightSource = object
    package.ParamMeta = lambda name, dtype, shape: SimpleNamespace(name=name, dtype=dtype, shape=shape)
    package.WeightTransferTrainerFactory = SimpleNamespace(trainer_init=Sender)
    ipc = ModuleType("vllm.distributed.weight_transfer.ipc_engine")
    ipc.IPCTrainerInitInfo = SimpleNamespace
    for module in (ModuleType("vllm"), ModuleType("vllm.distributed"), package, ipc):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    server = make_server(backend="ipc", options={"enable_sleep_mode": True})
    server.instead["/update_weights"] = always({"message": "Weights updated"})
    sampler = make_sampler(server.url, sleep=True)
    versions = []
    for step in range(2):
        sampler.step = step
        sampler.draw(ROWS)
        versions.append(sampler.version)
        sampler.sleep()
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    drawn = [*update, *[GENERATE] * 6, "/sleep"]
    shown = {*update, GENERATE, "/sleep", "/wake_up", "/init_weight_transfer_engine"}
    order = [route for route in server.routes() if route in shown]
    assert order == ["/init_weight_transfer_engine", *drawn, "/wake_up", *drawn]
    bodies = [body for route, body in server.calls if route in update]
    assert [body["weight_version"] for body in bodies[2::3]] == versions
    expected = [(name, torch.float32, tuple(weight.shape)) for name, weight in policy.model.named_parameters()]
    assert sampler.engine.transfer.sender.sent == [expected, expected]
    for body in bodies[1::3]:
        info = body["update_info"]
        assert info["names"] == [name for name, _, _ in expected] and info["ipc_handles"] is None
        assert pickle.loads(base64.b64decode(info["ipc_handles_pickled"])) == {"GPU-0": ("handle",)}


# --- a server that goes, comes and fails -----------------------------------------------------------------------------


def test_no_server(make_sampler):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    error = fails(make_sampler(url, timeout=0.2), "rollout.timeout", url, "refused", "waited 0.2 s", "start it")
    assert isinstance(error, EngineLost)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "http://", "ftp://127.0.0.1", "http://127.0.0.1:99999", "http://h:p"]
)
def test_a_url_that_is_none(make_sampler, url):
    with pytest.raises(UserError, match=re.escape(f'rollout.url: expected "http://HOST:PORT", got {url!r}')):
        make_sampler(url)


def test_a_server_that_comes_late(server, make_sampler, monkeypatch):
    said = []

    def say(text):
        said.append(text)
        if len(said) == 1:
            server.start()

    monkeypatch.setattr("fastrl.training.engines.sampler.say", say)
    server.stop()
    rollout = make_sampler(server.url).draw(ROWS)
    assert len(rollout.input_ids) == len(ROWS)
    assert len(said) == 2 and "trying again for up to 5 s" in said[0] and said[1].endswith("going on")


def test_a_server_that_dies_in_the_middle_is_asked_for_the_rest_alone(server, make_sampler, policy, capfd):
    """It comes back with the weights of its checkpoint, so it gets the policy's again."""
    whole = make_sampler(server.url).draw(ROWS)
    server.calls.clear()
    sampler = make_sampler(server.url)
    draw, kept, restarted = sampler.ask(ROWS), [], threading.Event()
    all_four = threading.Barrier(4)  # none of their connections ends before the server does

    def dies(make):
        if all_four.wait(60) == 0:
            while len(draw.done) < 2:
                time.sleep(0.001)
            kept.extend(draw.requests[index].id for index in draw.done)
            server.restart()
            restarted.set()
        restarted.wait(60)
        return RESET

    server.instead[GENERATE] = first(None, None, *[dies] * 4)
    rollout = sampler.finish(draw)
    assert torch.equal(rollout.targets, whole.targets)
    assert mismatch(policy, rollout) < 1e-5
    asked = [body["request_id"] for body in server.asked()]
    assert len(kept) == 2 and all(asked.count(name) == 1 for name in kept)
    assert set(asked) == {request.id for request in draw.requests}
    assert server.routes().count("/update_weights") == 2
    assert "2 of 6 prompts have their completions" in capfd.readouterr().err


def test_a_restart_between_two_draws_of_the_same_weights(server, make_sampler, policy, capfd):
    sampler = make_sampler(server.url)
    sampler.draw(ROWS)
    server.restart()
    assert mismatch(policy, sampler.draw(ROWS)) < 1e-5
    assert "drawn with the weights 'default', expected" in capfd.readouterr().err


def test_a_restart_between_two_updates_meets_the_server_anew(server, make_sampler):
    sampler = make_sampler(server.url)
    sampler.draw(ROWS)
    server.restart()
    sampler.step = 1
    sampler.draw(ROWS)
    assert server.routes().count("/init_weight_transfer_engine") == 2


def test_a_server_that_fails_now_and_then(server, make_sampler):
    broken = always(failure("CUDA error"))
    server.instead = {GENERATE: first(None, broken, None, broken), "/update_weights": first(broken, broken)}
    assert len(make_sampler(server.url).draw(ROWS).input_ids) == len(ROWS)


@pytest.mark.parametrize("route", [GENERATE, "/update_weights", "/pause", "/server_info", "/weight_info"])
def test_a_server_that_always_fails(server, make_sampler, route):
    server.instead[route] = always(worker_failure("no kernel image"))
    fails(make_sampler(server.url), route, "500", "no kernel image", "3 times in a row", "its own log says more")


def test_a_dying_server_is_waited_for(server, make_sampler):
    """Its process answers for a moment longer than its engine lives: that is no failure of an engine that is well."""
    sampler, asked = make_sampler(server.url), itertools.count()
    sampler.draw(ROWS)
    server.instead = dict.fromkeys(
        ["/pause", "/health"], lambda make: failure("EngineDeadError") if next(asked) < 9 else make()
    )
    sampler.step = 1
    assert len(sampler.draw(ROWS).input_ids) == len(ROWS)
    assert next(asked) > 9


def test_a_silent_server(server, make_sampler, monkeypatch):
    """It takes connections, and answers nothing: not the completions, and not whether it is well."""
    monkeypatch.setattr("fastrl.training.engines.http.PATIENCE", 0.05)
    silence = threading.Event()

    def silent(make):
        silence.wait(20)
        return RESET

    sampler = make_sampler(server.url, timeout=0.3)
    sampler.draw(ROWS)
    server.instead = {GENERATE: silent, "/health": silent, "/pause": silent}
    fails(sampler, "rollout.timeout", server.url, "does not answer", "start it")
    silence.set()


def test_long_completions_are_waited_for(server, make_sampler, monkeypatch):
    """Longer than rollout.timeout: the server says that it is well."""
    monkeypatch.setattr("fastrl.training.engines.http.PATIENCE", 0.05)
    waited = threading.Event()

    def late(make):
        waited.wait(0.5)
        return make()

    sampler = make_sampler(server.url, timeout=0.2)
    server.instead[GENERATE] = late
    assert len(sampler.draw(ROWS).input_ids) == len(ROWS)


# --- answers that cannot be used -------------------------------------------------------------------------------------


def test_an_answer_that_stops_in_the_middle(server, make_sampler):
    """The connection ends before the answer: asked again."""
    server.instead[GENERATE] = first(always(Reply(200, b'{"choices": [{"ind', length=500)))
    assert len(make_sampler(server.url).draw(ROWS).input_ids) == len(ROWS)
    server.instead[GENERATE] = always(Reply(200, b'{"choices": [{"ind', length=500))
    fails(make_sampler(server.url), "does not answer", "3 times in a row")


CHOICE = {"token_ids": [1], "finish_reason": "length", "logprobs": {"content": [{"token_id": 1, "logprob": -1.0}]}}
ANSWERS = {
    "truncated": (Reply(200, b'{"choices": [{"ind'), "is no JSON", "is it a server of vLLM?"),
    "a page": (Reply(200, b"<html>"), "is no JSON", "is it a server of vLLM?"),
    "a list": ([], "with no completions of a prompt, expected 3"),
    "no choices": ({}, "with no completions of a prompt, expected 3"),
    "one choice": ({"choices": [CHOICE]}, "with 1 completions of a prompt, expected 3"),
    "choices of text": ({"choices": ["a", "b", "c"]}, "in a form that vLLM 0.32 does not have"),
    "not scaled out": (Reply(403, {"detail": "Forbidden"}), "403", "start it with --enable-scale-out"),
    "an older server": (Reply(404, {"detail": "Not Found"}), "404: Not Found", "vLLM 0.32 or later"),
    "a key": (Reply(401, {"error": "Unauthorized"}), "401: Unauthorized", "rollout.api_key_file"),
    "moved": (Reply(302, b""), "302"),
    "too long": (failure("the prompt is too long", 400), "400: the prompt is too long"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_none(server, make_sampler, name):
    reply, *expected = ANSWERS[name]
    server.instead[GENERATE] = always(reply)
    fails(make_sampler(server.url), "rollout.url", GENERATE, *expected)


CHOICES = {
    "empty": ({"token_ids": [], "logprobs": {"content": []}}, "with 0 token ids in a completion, expected 1 to 5"),
    "null": ({"token_ids": None}, "with None token ids"),
    "too many": ({"token_ids": [1] * 6}, "with 6 token ids in a completion, expected 1 to 5"),
    "texts": ({"token_ids": ["1"], "logprobs": {"content": [{"token_id": "1", "logprob": 0}]}}, "token id '1'"),
    "no log-probabilities": ({"logprobs": None}, "without a log-probability for each token"),
    "of other tokens": ({"logprobs": CHOICE["logprobs"], "token_ids": [2]}, "without a log-probability for each token"),
    "null log-probability": (
        {"token_ids": [1], "logprobs": {"content": [{"token_id": 1, "logprob": None}]}},
        "in a form that vLLM 0.32 does not have",
    ),
    "NaN": (
        {"token_ids": [1], "logprobs": {"content": [{"token_id": 1, "logprob": float("nan")}]}},
        "a log-probability that is not finite",
    ),
    "another vocabulary": (
        {"token_ids": [12], "logprobs": {"content": [{"token_id": 12, "logprob": -1.0}]}},
        "token id 12, but the policy's ids end at 11; start it with the policy's model and tokenizer",
    ),
    "old weights": (
        {"weight_versions": [{"version": "old", "start": 0, "end": 1}]},
        "drawn with the weights 'old', expected",
        "another run may be using the same engine",
    ),
    "two weights": (lambda version: {"weight_versions": [{"version": version}, {"version": "new"}]}, "+new', expected"),
    "aborted": ({"finish_reason": "abort"}, "ended a completion before its end", "3 times in a row"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_completion_that_cannot_be_used(server, make_sampler, name):
    fields, *expected = CHOICES[name]
    sampler = make_sampler(server.url)
    server.instead[GENERATE] = changed(**(fields(sampler.version) if callable(fields) else fields))
    fails(sampler, *expected)


def test_a_mask_that_is_null_or_short(make_server, make_sampler):
    server = make_server(options={"return_sampling_mask": True})
    server.instead[GENERATE] = changed(sampling_mask=None)
    fails(make_sampler(server.url, top_k=3), "sampling mask", "return_sampling_mask")
    server.instead[GENERATE] = changed(sampling_mask=lambda choice: choice["sampling_mask"] + [[1]])
    fails(make_sampler(server.url, top_k=3), "rows in a sampling mask of")


def test_experts_that_are_null(make_server, make_sampler):
    server = make_server(options={"enable_return_routed_experts": True})
    server.instead[GENERATE] = changed(routed_experts=None)
    fails(make_sampler(server.url, keep_routing=True), "without routed experts", "--enable-return-routed-experts")


def test_a_mask_without_its_token_or_of_unknown_ones(make_server, make_sampler):
    server = make_server(options={"return_sampling_mask": True})
    server.instead[GENERATE] = changed(
        sampling_mask=lambda choice: [[token + 1] for token in choice["token_ids"]]  # each row one token, another
    )
    fails(make_sampler(server.url, top_k=3), "a sampling mask without token", "start it with the policy's model")
    server.instead[GENERATE] = changed(sampling_mask=lambda choice: [[token, 99] for token in choice["token_ids"]])
    fails(make_sampler(server.url, top_k=3), "a sampling mask with unknown token ids")


def test_a_signal_is_heard_while_the_engine_is_away(make_sampler):
    sampler = make_sampler("http://127.0.0.1:9", timeout=600.0)
    sampler.signals = ["SIGTERM"]
    fails(sampler, "SIGTERM while waiting for the engine", "does not answer")


# --- a server that is not the one that the run needs -----------------------------------------------------------------

OPTIONS = {
    "raw": ({"logprobs_mode": "raw_logprobs"}, {}, "--logprobs-mode processed_logprobs"),
    "no masks": ({}, {"top_k": 3}, "--return-sampling-mask"),
    "no experts": ({}, {"keep_routing": True}, "--enable-return-routed-experts"),
    "no sleep": ({}, {"sleep": True}, "--enable-sleep-mode"),
    "short": ({"max_model_len": 10}, {"longest": 11}, "takes 10 tokens", "--max-model-len 11"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_the_server(make_server, make_sampler, name):
    options, settings, *expected = OPTIONS[name]
    fails(make_sampler(make_server(options=options).url, **settings), "rollout.url", "start it with", *expected)


@pytest.mark.parametrize("backend", [None, "sharded_rdt"])
def test_no_way_for_weights(make_server, make_sampler, backend):
    expected = "no way to take new weights" if backend is None else "'sharded_rdt'"
    fails(make_sampler(make_server(backend=backend).url), expected, "--weight-transfer-config")


def test_a_way_for_weights_that_needs_vllm_here(make_server, make_sampler):
    fails(make_sampler(make_server(backend="nccl").url), "nccl", "vllm")


def test_a_server_with_a_key(make_server, make_sampler, tmp_path):
    server, file = make_server(key="s3cret-key"), tmp_path / "key"
    file.write_text("s3cret-key\n")
    assert len(make_sampler(server.url, api_key_file=file).draw(ROWS).input_ids) == len(ROWS)
    fails(make_sampler(server.url), "401: Unauthorized", "rollout.api_key_file")
    file.write_text("another")
    fails(make_sampler(server.url, api_key_file=file), "401: Unauthorized", "rollout.api_key_file")


SERVERS = {
    "no dev mode": ({"/server_info": Reply(404, {"detail": "Not Found"})}, "VLLM_SERVER_DEV_MODE=1"),
    "not vLLM": ({"/health": Reply(404, b"nothing")}, "404: nothing", "vLLM 0.32 or later"),
    "another engine": ({"/server_info": {"model_path": "m"}}, "is no vLLM server", "/server_info has no model_config"),
    "a list": ({"/server_info": [1]}, "is no vLLM server"),
    "another tokenizer": ({"/detokenize": {"prompt": "abc"}}, "another tokenizer", "'abc' there", "--tokenizer"),
    "no tokenizer": ({"/detokenize": Reply(404, {"detail": "Not Found"})}, "--skip-tokenizer-init"),
    "other weights": ({"/weight_info": {"weight_version": "theirs"}}, "'theirs'", "another run", "3 times in a row"),
}


@pytest.mark.parametrize("name", SERVERS)
def test_another_server(server, make_sampler, name):
    replies, *expected = SERVERS[name]
    server.instead = {route: always(reply) for route, reply in replies.items()}
    fails(make_sampler(server.url), *expected)
