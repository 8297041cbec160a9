"""Whole runs of `fastrl train` with a server: what it is asked for, and when it dies, stays away or comes back."""

import pytest
from fake_vllm import GENERATE, RESET, first
from run_files import checkpoints, records, repeatable

import fastrl.training.rl.train as module
from fastrl.base.errors import UserError

ROUNDING = 1e-5  # float32 of the fake's sequences one at a time against a padded batch
HELD_OUT = {(3, 4, 1), (5, 6, 1)}  # the tokens of `eval_rows`


@pytest.fixture
def eval_rows(write_rows):
    return str(write_rows([{"prompt": "12=", "answer": "21"}, {"prompt": "34=", "answer": "43"}]))


@pytest.fixture
def fail_at(monkeypatch):
    """Have the update of that step (1, 2, ...) fail, in the next run alone."""

    def fail(config, step, resume=False):
        update = module.update

        def failing(run, rollout):
            if run.step == step:
                if run.data.rollouts.begun is not None and run.data.rollouts.begun.thread is not None:
                    run.data.rollouts.begun.thread.join()  # the next batch has been drawn
                raise RuntimeError("mine")
            return update(run, rollout)

        with monkeypatch.context() as patch:
            patch.setattr(module, "update", failing)
            with pytest.raises(RuntimeError, match="mine"):
                module.train(config, resume=resume)

    return fail


def column(config, name):
    return [line[name] for line in records(config)]


def drawn(server):
    """Prompt and seed of what was asked for, in an order of its own."""
    return sorted((tuple(body["token_ids"]), body["sampling_params"]["seed"]) for body in server.asked())


def test_each_step_is_drawn_with_the_weights_of_the_last(server, make_config, eval_rows):
    config = make_config(server.url, data={"eval_path": eval_rows}, evaluation={"every": 3})
    module.train(config)
    assert max(column(config, "mismatch/abs_log_ratio")) < ROUNDING
    assert column(config, "off_policy_steps") == [0, 0, 0]
    assert all(0 < line["time/weights"] + line["time/engine"] < line["time/step"] for line in records(config))
    assert "eval/reward" in records(config)[-1]
    updates = [body["weight_version"] for route, body in server.calls if route == "/finish_weight_update"]
    assert len(set(updates)) == len(updates) == 4  # three steps, and the evaluation after the last
    greedy = [body for body in server.asked() if body["sampling_params"]["temperature"] == 0]
    assert len(greedy) == 2 * 2 and len(server.asked()) == 3 * 4 + 2 * 2


def test_what_a_run_writes_has_not_the_servers_key(make_server, make_config, tmp_path, capfd):
    server = make_server(key="s3cret-key")
    (tmp_path / "engine.key").write_text("s3cret-key\n")
    key = {"api_key_file": str(tmp_path / "engine.key")}
    config = make_config(server.url, rollout=key, logging={"checkpoint_every": 1, "tensorboard": True})
    module.train(config)
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any("engine.key" in path.read_text() for path in written if path.suffix in (".toml", ".json"))
    assert not [path for path in written if b"s3cret" in path.read_bytes()]
    assert "s3cret" not in "".join(capfd.readouterr())


def test_weights_that_do_not_arrive_show_in_the_mismatch(make_server, make_config):
    config = make_config(make_server(ignores_weights=True).url)
    module.train(config)
    assert min(column(config, "mismatch/abs_log_ratio")) > 1000 * ROUNDING


def test_the_policy_is_what_is_trained_whoever_draws(server, make_config):
    """The same run by a server and again by another gives the same numbers: all that is drawn is in the seeds."""
    one, two = make_config(server.url, "one"), make_config(server.url, "two")
    module.train(one)
    server.restart()
    module.train(two)
    assert repeatable(one) == repeatable(two)


def test_ahead_draws_a_step_with_the_weights_before_its_update(server, make_config):
    config = make_config(server.url, rollout={"ahead": 1})
    module.train(config)
    assert column(config, "off_policy_steps") == [0, 1, 1]
    assert column(config, "mismatch/abs_log_ratio")[0] < ROUNDING
    # The first two batches are drawn with the first weights, the third with those after the first step, and no fourth.
    shown = [route for route in server.routes() if route in ("/finish_weight_update", GENERATE)]
    assert shown == ["/finish_weight_update", *[GENERATE] * 8, "/finish_weight_update", *[GENERATE] * 4]
    assert len(set(drawn(server))) == 12


def test_a_resumed_run_ahead_draws_the_batch_in_flight_again_and_no_other(server, make_config, fail_at):
    tables = {"rollout": {"ahead": 1}, "logging": {"checkpoint_every": 1}}
    whole = make_config(server.url, "whole", **tables)
    module.train(whole)
    expected = drawn(server)
    server.calls.clear()
    config = make_config(server.url, **tables)
    fail_at(config, 2)
    assert checkpoints(config) == ["step-000001"]
    before = drawn(server)
    server.calls.clear()
    module.train(config, resume=True)
    after = drawn(server)
    in_flight = sorted(set(before) & set(after))
    # Steps 2 and 3 were drawn, and trained on in none.
    assert len(before) == 12 and len(after) == 8 and len(in_flight) == 8
    assert sorted(set(before) | set(after)) == expected
    assert column(config, "step") == [1, 2, 3]
    assert column(config, "off_policy_steps") == [0, 0, 1]


def test_a_resumed_run_is_the_run_that_was_not_interrupted(server, make_config, fail_at):
    whole = make_config(server.url, "whole", logging={"checkpoint_every": 1})
    module.train(whole)
    config = make_config(server.url, logging={"checkpoint_every": 1})
    fail_at(config, 3)
    module.train(config, resume=True)
    assert repeatable(config) == repeatable(whole)


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_evaluation_uses_up_no_seeds(server, make_config, eval_rows, fail_at, ahead):
    """How often a run is evaluated, and where it is resumed, changes nothing that it learns from."""
    tables = {"rollout": {"ahead": ahead}, "logging": {"checkpoint_every": 1}}
    module.train(make_config(server.url, "without", **tables))
    expected = drawn(server)
    server.calls.clear()
    evaluation = {"every": 1, "metrics": ["fastrl.rewards.exact"], "samples": 2, "k": [1]}
    config = make_config(server.url, data={"eval_path": eval_rows}, evaluation=evaluation, **tables)
    fail_at(config, 2)
    module.train(config, resume=True)
    assert {entry for entry in drawn(server) if entry[0] not in HELD_OUT} == set(expected)
    sampled = [body for body in server.asked() if tuple(body["token_ids"]) in HELD_OUT]
    sampled = [body["sampling_params"]["seed"] for body in sampled if body["sampling_params"]["temperature"] > 0]
    assert len(sampled) == 4 * 2 and len(set(sampled)) == 2  # the same each time, and before the first step


def test_a_run_goes_on_with_its_engine_in_another_place(make_server, make_config, fail_at):
    config = make_config(make_server().url, logging={"checkpoint_every": 1})
    fail_at(config, 2)
    other = make_server()
    module.train(make_config(other.url, rollout={"timeout": 30.0}, logging={"checkpoint_every": 1}), resume=True)
    assert column(config, "step") == [1, 2, 3] and len(other.asked()) == 2 * 4


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_server_that_stays_away_ends_the_run_with_all_kept(server, make_config, ahead):
    rollout = {"ahead": ahead, "timeout": 0.3}

    def dies(make):
        server.stop()
        return RESET

    whole = make_config(server.url, "whole", rollout=rollout | {"timeout": 20.0})
    module.train(whole)
    expected = drawn(server)
    server.calls.clear()
    config = make_config(server.url, rollout=rollout)
    server.instead[GENERATE] = first(*[None] * 8, dies)  # in the third of three batches
    with pytest.raises(UserError) as caught:
        module.train(config)
    message = str(caught.value)
    saved = config.logging.output_dir / "checkpoints" / "step-000002"
    assert "\n" not in message and "waited 0.3 s" in message and "--resume goes on" in message and str(saved) in message
    assert column(config, "step") == [1, 2]
    server.start()
    module.train(config, resume=True)
    assert column(config, "step") == [1, 2, 3]
    assert sorted(set(drawn(server))) == expected


def test_a_server_that_comes_back_changes_no_number(server, make_config, capfd):
    whole = make_config(server.url, "whole")
    module.train(whole)

    def restarts(make):
        server.restart()
        return RESET

    config = make_config(server.url)
    server.instead[GENERATE] = first(*[None] * 6, restarts)
    module.train(config)
    assert repeatable(config) == repeatable(whole)
    assert "prompts have their completions" in capfd.readouterr().err


@pytest.mark.parametrize("evaluated", [False, True])
def test_an_update_does_not_wait_for_a_server_that_is_to_draw_ahead(server, make_config, eval_rows, capfd, evaluated):
    tables = {"data": {"eval_path": eval_rows}, "evaluation": {"every": 2}} if evaluated else {}
    config = make_config(server.url, rollout={"ahead": 1}, **tables)
    server.instead["/start_weight_update"] = first(None, lambda make: RESET)
    module.train(config)
    # The third batch was to be drawn during the second update, and is drawn after it.
    assert column(config, "off_policy_steps") == [0, 1, 0]
    assert max(column(config, "mismatch/abs_log_ratio")[::2]) < ROUNDING
    assert len({entry for entry in drawn(server) if entry[0] not in HELD_OUT}) == 12
    assert "it is asked again after the update\nfastrl: the engine is there" in capfd.readouterr().err
    assert all(time > 0 for time in column(config, "time/weights"))


def test_a_server_that_stays_away_since_it_was_to_draw_ahead(server, make_config, fail_at):
    """The update before is done and kept, and nothing is drawn for it twice."""

    def dies(make):
        server.stop()
        return RESET

    config = make_config(server.url, rollout={"ahead": 1, "timeout": 0.3})
    server.instead["/start_weight_update"] = first(None, dies)
    with pytest.raises(UserError, match=r"waited 0.3 s .*saved in .*step-000002; .*--resume goes on"):
        module.train(config)
    assert column(config, "step") == [1, 2]
    server.start()
    module.train(config, resume=True)
    assert column(config, "step") == [1, 2, 3] and column(config, "off_policy_steps") == [0, 1, 0]
    assert len(drawn(server)) == len(set(drawn(server))) == 12


def test_what_is_wrong_with_a_batch_ahead_ends_the_run_with_all_kept(server, make_config):
    config = make_config(server.url, rollout={"ahead": 1})
    server.instead[GENERATE] = first(*[None] * 8, lambda make: [])
    with pytest.raises(UserError, match=r"with no completions of a prompt, expected 2; saved in .*step-000002"):
        module.train(config)
