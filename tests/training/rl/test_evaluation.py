"""Scores on held-out prompts: greedy means, pass@k and maj@k, and that looking changes nothing."""

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mistakes import error_of
from run_files import records, repeatable, write_toml

import fastrl.training.rl.evaluation as module
from fastrl.cli import main
from fastrl.rewards.calls import RewardFunction
from fastrl.training.config.train import EvaluationConfig
from fastrl.training.data.examples import Example
from fastrl.training.parallel.world import ALONE
from fastrl.training.rewards.scoring import Rewards
from fastrl.training.rl.evaluation import evaluate, majority_at_k, pass_at_k
from fastrl.training.rl.train import train


@pytest.mark.parametrize("count", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_that_solve(count):
    for right in range(count + 1):
        solved = [i < right for i in range(count)]
        for k in range(1, count + 1):
            subsets = list(itertools.combinations(solved, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(solved, k) == pytest.approx(expected, abs=1e-12), (count, right, k)
            assert pass_at_k(solved[::-1], k) == pass_at_k(solved, k)
    assert pass_at_k([False] * 999 + [True], 500) == pytest.approx(0.5)  # binomials of 300 digits


@pytest.mark.parametrize(
    ("texts", "k", "expected"),
    [
        (["a", "b", "b"], 3, "b"),
        (["a", "b", "b"], 2, "a"),  # the first k alone, and of equally frequent ones the first
        (["b", "a", "a", "b"], 4, "b"),
        ([" a", "b", "a\n", "b ", "a"], 5, "a"),  # without the space around them
        (["a"], 1, "a"),
        (["", "a", " "], 3, ""),
    ],
)
def test_maj_at_k_asks_the_most_frequent_of_the_first_k(texts, k, expected):
    for right in ("a", "b", ""):
        solved = [text.strip() == right for text in texts]
        assert majority_at_k(texts, solved, k) == (right == expected)


# --- evaluate -------------------------------------------------------------------------------------------------------

GREEDY = ["4", "5", "6"]
SAMPLES = [["1", "4", "4", "2"], ["5", "1", "2", "3"], ["7", "7", "8", "9"]]


def right(prompts, completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def shy(prompts, completions, answer):
    """No score for a "5", and 2 for what is right."""
    return [None if c == "5" else 2.0 * (c == a) for c, a in zip(completions, answer, strict=True)]


@pytest.fixture
def run(monkeypatch):
    """Three prompts with the answers 4, 5, 6, the completions above, and the calls of generate."""
    calls = []

    def completions(examples, *, greedy=False):
        calls.append((len(examples), greedy))
        return GREEDY if greedy else list(itertools.chain(*SAMPLES))

    monkeypatch.setattr(module, "completion_texts", lambda policy, texts, world: texts)
    metrics = {f.__name__: RewardFunction(f, f.__name__, "") for f in (right, shy)}
    evaluation = EvaluationConfig(metrics=["right", "shy"], samples=4, k=(1, 2, 4))
    return SimpleNamespace(
        config=SimpleNamespace(
            rollout=None, evaluation=evaluation, training=SimpleNamespace(seed=0), distillation=None
        ),
        models=SimpleNamespace(policy=SimpleNamespace(device=torch.device("cpu"))),
        world=ALONE,
        data=SimpleNamespace(
            rollouts=SimpleNamespace(evaluate=completions),
            held_out=[Example("?", {"answer": answer}, [1]) for answer in "456"],
        ),
        rewards=Rewards([(metrics["right"], 10.0), (metrics["shy"], 1.0)]),
        functions=SimpleNamespace(metrics=list(metrics.values())),
        calls=calls,
    )


def test_every_metric_has_its_greedy_mean_and_its_scores_at_k(run):
    numbers = evaluate(run)
    assert run.calls == [(3, True), (12, False)]
    expected = {"eval/reward": (12 + 10 + 12) / 3, "eval/right": 1.0, "eval/shy": (2 + 2) / 2}
    right_of = {"right": [2, 1, 0], "shy": [2, 0, 0]}  # of four samples; None solves nothing
    first = {"right": ([0, 1, 0], [0, 1, 0], [1, 1, 0]), "shy": ([0, 0, 0], [0, 0, 0], [1, 0, 0])}
    for name, counts in right_of.items():
        for k, majority in zip((1, 2, 4), first[name], strict=True):
            passes = [1 - math.comb(4 - c, k) / math.comb(4, k) for c in counts]
            expected |= {f"eval/{name}/pass@{k}": sum(passes) / 3, f"eval/{name}/maj@{k}": sum(majority) / 3}
    assert numbers.keys() == expected.keys()
    for name, value in expected.items():
        assert numbers[name] == pytest.approx(value), name


def test_without_samples_there_is_greedy_decoding_alone(run):
    run.config.evaluation = EvaluationConfig()
    assert set(evaluate(run)) == {"eval/reward", "eval/right", "eval/shy"}
    assert run.calls == [(3, True)]


def test_no_score_at_all_is_nan(run):
    nothing = RewardFunction(lambda prompts, completions, answer: [None] * len(prompts), "nothing", "")
    run.functions.metrics, run.rewards = [nothing], Rewards([(nothing, 1.0)])
    numbers = evaluate(run)
    assert math.isnan(numbers["eval/reward"]) and math.isnan(numbers["eval/nothing"])
    assert numbers["eval/nothing/pass@4"] == numbers["eval/nothing/maj@4"] == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_without_what_the_reward_takes_are_found_at_the_start(
    make_config, tmp_path, write_reward, capsys, workers
):
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"prompt": "1="}) + "\n")
    named = {
        "data": {"eval_path": str(path)},
        "reward": {"function": write_reward("return [0.0] * len(prompts)"), "workers": workers},
    }
    source = named["reward"]["function"]
    assert error_of(train, make_config(**named)) == (
        f"{source}: cannot be called with the columns of {path}:1, none: missing a required argument: 'answer'"
    )
    given = named | {"reward": named["reward"] | {"arguments": {"reward": {"answer": "1"}}}}
    metric = str(tmp_path / "metric.py")
    Path(metric).write_text("def length(prompts, completions):\n    return [float(len(c)) for c in completions]\n")
    train(make_config(**given, training={"steps": 1}, evaluation={"metrics": [f"{metric}:length"]}))
    assert "fastrl: warning: data.eval_path: no column answer, which data.path has\n" in capsys.readouterr().err


def test_looking_does_not_change_what_is_learnt(trained, tmp_path, example, spy):
    """Sampled completions of the evaluation come from random numbers of its own, the same ones each time."""
    (tmp_path / "eval.jsonl").write_text("".join((example / "eval.jsonl").open().readlines()[:3]))
    seen = spy(module, "completion_texts", lambda texts, *_: texts)
    # Too small a rate to change a sample: evaluations that draw the same numbers then see the same.
    tables = {"data": {"eval_path": str(tmp_path / "eval.jsonl")}, "optimizer": {"lr": 1e-12}, "training": {"steps": 3}}

    never = repeatable(trained("never", **tables, evaluation={"every": None, "samples": 0}))
    often = repeatable(trained("often", **tables, evaluation={"every": 1, "samples": 8, "k": [1, 8]}))
    learnt = [{k: v for k, v in record.items() if not k.startswith("eval/")} for record in (*never, *often)]
    assert learnt[:3] == learnt[3:] and len(often) == 3
    sampled = [texts for texts in seen if len(texts) == 3 * 8]
    # Before the first step and after each.
    assert len(sampled) == 4 and all(texts == sampled[0] for texts in sampled) and len(set(sampled[0])) > 1
    assert all({"eval/exact_match/pass@8", "eval/exact_match/maj@1"} <= set(record) for record in often)


def test_nor_does_a_reward_that_draws_random_numbers_in_an_evaluation(trained, write_reward):
    body = "import random, numpy, torch\n"
    body += "return [random.random() + numpy.random.rand() + float(torch.rand(())) for _ in prompts]"
    tables = {"reward": {"function": write_reward(body)}, "training": {"steps": 3}}

    def rewards(every):
        evaluation = {"every": every, "metrics": []}
        return [record["reward"] for record in records(trained(f"every-{every}", **tables, evaluation=evaluation))]

    assert rewards(1) == rewards(3)


def test_a_run_whose_evaluation_scores_nothing_still_ends_well(make_config, write_reward, tmp_path, capsys):
    metrics = [write_reward("return [None] * len(prompts)", "nothing")]
    config = make_config(training={"steps": 1}, evaluation={"metrics": metrics})
    assert main(["train", write_toml(tmp_path / "config.toml", config.model_dump(mode="json"))]) == 0
    assert "eval/nothing" not in capsys.readouterr().out.splitlines()[-2]
