"""`fastrl train` on several processes with a server: who asks it for what, and when it is lost, or stays away."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import digit_rewards
import pytest
import rank_runs
import torch
from digit_models import TOKENIZER
from fake_sglang import FakeSGLang
from fake_vllm import GENERATE, RESET, FakeVLLM, changed, first
from places import EXAMPLES
from run_files import checkpoints, records, write_toml
from safetensors.torch import load_file
from same_runs import assert_same_steps, folder
from started import started

ROUNDING = 1e-5  # float32 of the fake's sequences one at a time against a padded batch
STEPS, PROMPTS, HELD_OUT = 3, 4, 3  # of a run, of a step and of an evaluation: requests
UPDATE = "/finish_weight_update"
ENGINE = "fastrl.training.engines.vllm_server.VLLMServer"
SGLANG = f"{EXAMPLES / 'engines' / 'sglang.py'}:make"
UNEVALUATED = {"data": {"eval_path": None}, "evaluation": {"every": None}}


@pytest.fixture
def make_server(rl_tables):
    """Start a server of a run's model; the keyword arguments are its fields."""
    made = []

    def make(**fields):
        made.append(FakeVLLM(rl_tables("unused")["model"]["config"], TOKENIZER, **fields))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def server_tables(rl_tables):
    """The tables of a run of one minibatch with that server; keyword arguments are tables that override it."""

    def make(server, name="run", **tables):
        rollout = {"engine": "vllm", "url": server.url, "prompts_per_step": PROMPTS, "num_generations": 2}
        rollout |= {"max_new_tokens": 6, "timeout": 20.0} | tables.pop("rollout", {})
        return rl_tables(name, rollout=rollout, **({"training": {"minibatches": 1}} | tables))

    return make


def train(tables, *arguments):
    """A run of these ranks that tries again at once, in which rank 0 alone gives an engine its weights."""
    with ExitStack() as stack:
        stack.enter_context(patch("fastrl.training.engines.sampler.PAUSE", 0.01))
        for name in ("update_weights", "sleep", "wake_up") if rank_runs.rank() else ():
            error = AssertionError(f"rank {rank_runs.rank()} calls {name}")
            stack.enter_context(patch(f"{ENGINE}.{name}", side_effect=error))
        return rank_runs.train("train", tables, *arguments)


def play(run_on, size, tables):
    """Run it to its end."""
    summary = run_on(size, train, tables)
    assert not isinstance(summary, str), summary
    assert summary["steps"] == STEPS


def updates(server):
    """The versions of the weights that a server was given."""
    return [body["weight_version"] for route, body in server.calls if route == UPDATE]


def drawn(server):
    """Prompt and seed of what was asked for, in an order of its own."""
    return sorted((tuple(body["token_ids"]), body["sampling_params"]["seed"]) for body in server.asked())


def names(server):
    """How often each request was asked for, by its number in the run."""
    return Counter(int(body["request_id"].rpartition("-")[2]) for body in server.asked())


KEY = "s3cret-key"
#: What a run with a server may have, and the server's fields.
RUNS = {
    "plain": ({}, {}),
    "ahead": ({"rollout": {"ahead": 1}, "rollout_correction": {"level": "token"}}, {}),
    "all in one": (
        {
            "rollout": {
                "sleep": True,
                "api_key_file": "KEY",
                "tools": f"{digit_rewards.__file__}:answer",
                "max_turns": 3,
                "max_new_tokens": 10,
            }
        },
        {"options": {"enable_sleep_mode": True}, "key": KEY},
    ),
    "fewer prompts than processes": ({"rollout": {"prompts_per_step": 1, "num_generations": 4}}, {}),
    "adapters": ({"model": {"lora_rank": 4}}, {}),
    "sampling masks": ({"rollout": {"top_k": 5}}, {"options": {"return_sampling_mask": True}}),
}
SLOW = ("adapters", "fewer prompts than processes", "sampling masks")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in RUNS])
def test_a_run_is_that_of_one_process(run_on, make_server, server_tables, tmp_path, name):
    """The same requests, each once, and weights that arrive once a step."""
    (tmp_path / "engine.key").write_text(KEY)
    tables, fields = RUNS[name]
    rollout = dict(tables.get("rollout", {}))
    rollout |= {"api_key_file": str(tmp_path / "engine.key")} if "api_key_file" in rollout else {}
    server = make_server(**fields)
    one, several = (server_tables(server, x, **(tables | {"rollout": rollout})) for x in ("one", "several"))
    play(run_on, 1, one)
    expected, given, routes = drawn(server), updates(server), server.routes()
    server.restart()  # it may be asleep
    server.calls.clear()
    play(run_on, 2, several)
    assert drawn(server) == expected
    assert len({body["request_id"] for body in server.asked()}) == len(expected)
    assert_same_steps(several, one, STEPS)
    metrics = records(folder(several))
    same = metrics[:1] if name == "ahead" else metrics  # the steps that were drawn with the policy as it is
    assert max(line["mismatch/abs_log_ratio"] for line in same) < ROUNDING
    assert [line["off_policy_steps"] for line in metrics] == ([0, 1, 1] if name == "ahead" else [0] * STEPS)
    # Before the first step and after each, and once more where it slept after an evaluation.
    assert len(updates(server)) == len(given) == STEPS + (3 if "sleep" in rollout else 1)
    assert len(set(updates(server))) == STEPS + 1
    order = {UPDATE, "/sleep", "/wake_up", "/pause", "/resume"}
    assert [x for x in server.routes() if x in order] == [x for x in routes if x in order]
    assert ("/sleep" in routes) == ("sleep" in rollout)
    assert all("time/tools" in line for line in metrics) == ("tools" in rollout)


def test_a_server_that_is_lost_changes_no_number(run_on, make_server, server_tables):
    """For both ranks in the first step, and for one of them in each of the others; what it had sent is kept."""
    server = make_server()
    one, several = (server_tables(server, x) for x in ("one", "several"))
    play(run_on, 1, one)
    expected = drawn(server)
    server.calls.clear()
    steps = [HELD_OUT, HELD_OUT + PROMPTS, 2 * HELD_OUT + 2 * PROMPTS]  # the first request of each; rank 0 has two

    def restarts(make):
        server.restart()  # with weights that are not the policy's
        return RESET

    events = {
        steps[0] + 1: restarts,
        steps[1] + 3: lambda make: RESET,
        steps[2] + 3: changed(weight_versions=[{"version": "default", "start": 0, "end": 1}]),
    }

    def lost(make):
        _, body = make.args
        event = events.pop(int(body["request_id"].rpartition("-")[2]), None)
        return make() if event is None else event(make)

    server.instead[GENERATE] = lost
    play(run_on, 2, several)
    assert not events
    assert_same_steps(several, one, STEPS)
    assert {*drawn(server)} == {*expected}
    asked = names(server)
    # Rank 0 asks for nothing again that it has, while rank 1 does.
    assert [asked[step + i] for step in steps[1:] for i in (0, 1, 3)] == [1, 1, 2, 1, 1, 2]
    given = updates(server)
    assert len(set(given)) == STEPS + 1 and len(given) == STEPS + 1 + 3


@pytest.mark.slow
def test_a_server_that_is_gone_when_it_is_to_draw_ahead(run_on, make_server, server_tables):
    """The update does not wait for it on any rank, and the batch is drawn after it."""
    server = make_server()
    tables = server_tables(server, rollout={"ahead": 1}, rollout_correction={"level": "token"}, **UNEVALUATED)
    server.instead["/start_weight_update"] = first(None, lambda make: RESET)
    play(run_on, 2, tables)
    metrics = records(folder(tables))
    assert [line["off_policy_steps"] for line in metrics] == [0, 1, 0]
    assert max(line["mismatch/abs_log_ratio"] for line in metrics[::2]) < ROUNDING
    assert len(names(server)) == STEPS * PROMPTS and set(names(server).values()) == {1}


def test_an_answer_of_one_rank_that_is_wrong_ends_all(run_on, make_server, server_tables):
    """With the line of one process; the ranks' are compared by run_on."""
    server = make_server()
    tables = server_tables(server, logging={"checkpoint_every": None})

    def wrong(make):
        _, body = make.args
        return [] if body["request_id"].endswith(f"-{HELD_OUT + 2 * PROMPTS - 1}") else make()

    server.instead[GENERATE] = wrong
    message = run_on(2, train, tables)
    saved = folder(tables) / "checkpoints" / "step-000001"
    assert "with no completions of a prompt, expected 2; saved in" in message and str(saved) in message
    assert saved.exists() and "\n" not in message


def test_a_way_of_weights_that_needs_one_process(run_on, make_server, server_tables):
    """Its sender would wait for the other ranks, which do not call it."""
    message = run_on(2, train, server_tables(make_server(backend="ipc")))
    assert 'the weight transfer backend "ipc" shares one process\'s GPU, and the trainer has 2 processes' in message


def test_a_server_that_stays_away_ends_all_with_the_steps_kept(run_on, make_server, server_tables, tmp_path):
    server = make_server()
    tables = server_tables(server, rollout={"timeout": 0.3}, logging={"checkpoint_every": None}, **UNEVALUATED)

    def dies(make):
        server.stop()
        return RESET

    server.instead[GENERATE] = first(*[None] * 2 * PROMPTS, dies)  # in the third step
    ended = started(["train", write_toml(tmp_path / "config.toml", tables)], 2)
    assert ended.statuses.count(2) == 1 and {*ended.statuses} <= {2, 1, -15} and ended.seconds < 15
    *before, last = ended.errors.splitlines()
    assert ["prompts have their completions" in line for line in before] == [True, False], ended.errors
    assert "trying again for up to" in before[1]
    saved = folder(tables) / "checkpoints" / "step-000002"
    assert "waited 0.3 s for it" in last and str(saved) in last and "--resume goes on" in last
    assert checkpoints(folder(tables)) == [saved.name]
    server.start()
    resumed = train(tables, True)
    assert (resumed["resumed"], resumed["steps"]) == (2, STEPS), resumed
    assert len({*drawn(server)}) == STEPS * PROMPTS


@pytest.mark.slow
def test_sglang(run_on, server_tables):
    """Each completion is a request of its own; rank 0 alone gives the server its weights, at last those of the end."""
    server = FakeSGLang()
    one, several = (server_tables(server, x, rollout={"engine": SGLANG}) for x in ("one", "several"))
    found = []
    try:
        for size, tables in ((1, one), (2, several)):
            play(run_on, size, tables)
            asked = [str(body) for route, body in server.calls if route == "/generate"]
            found.append((sorted(asked), server.routes().count("/update_weights_from_disk")))
            server.calls.clear()
    finally:
        server.http.shutdown()
        server.http.server_close()
    assert found[0] == found[1] and found[1][1] == STEPS + 1
    assert_same_steps(several, one, STEPS)
    expected = load_file(folder(several) / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors")
    assert server.weights.keys() == expected.keys()
    for name, weight in server.weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0)
