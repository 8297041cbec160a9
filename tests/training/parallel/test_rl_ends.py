"""However `fastrl train` on several processes ends: all of them do, one says why, and what was done is kept.

The runs of `started` are those of the command; others run in processes of pytest's own, where all ranks must give the
same summary, or refuse with the same words.
"""

from __future__ import annotations

import random
import resource
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import rank_runs
from rank_faults import at, bad_engine, bad_reward, enter, full, rank, signalled
from run_files import checkpoints, write_toml
from same_runs import assert_same_files, assert_same_steps, folder, metrics
from started import started

from fastrl.base.errors import UserError
from fastrl.training.data import sources
from fastrl.training.parallel import world
from fastrl.training.run.checksums import damage

STEPS = 3
SLOW = pytest.mark.slow
#: One micro-batch for each rank.
QUICK = {"minibatches": 1, "micro_batch_tokens": 400}


@pytest.fixture
def tables(rl_tables):
    """The tables of a short run, which saves at its end alone unless told otherwise."""

    def make(name, *, every=None, **more):
        made = rl_tables(name, **more)
        made["training"] |= QUICK | more.get("training", {})
        made["logging"]["checkpoint_every"] = every
        return made

    return make


def with_fault(fault, tables, resume):
    with fault():
        return rank_runs.train("train", tables, resume)


@pytest.fixture
def run_with(run_on):
    """run_with(fault, tables): the summary, or the words of the refusal, which all of two ranks give."""

    def run(fault, tables, resume=False, size=2):
        return run_on(size, with_fault, fault, tables, resume)

    return run


@pytest.fixture(scope="module")
def unbroken():
    """The runs that nothing has stopped, by what makes them differ."""
    return {}


@pytest.fixture
def whole(run_on, tables, unbroken, tmp_path_factory):
    """whole(...): the tables of a run on two ranks that nothing has stopped, the same for all tests."""

    def make(**more):
        if (key := repr(more)) not in unbroken:
            made = tables("whole", **more)
            made["logging"]["output_dir"] = str(tmp_path_factory.mktemp("whole") / "run")
            assert run_on(2, rank_runs.train, "train", made)["interrupted"] is None
            unbroken[key] = made
        return unbroken[key]

    return make


def assert_resumed(run_on, tables, expected, step, size=2, rounding=0.0):
    """The rest of the run after this step makes of it the expected one, to the bit unless said otherwise."""
    assert checkpoints(folder(tables))[-1] == f"step-{step:06d}"
    summary = run_on(size, rank_runs.train, "train", tables, True)
    assert (summary["resumed"], summary["steps"]) == (step, tables["training"]["steps"]), summary
    drop_others(tables, expected)
    assert_same_steps(tables, expected, tables["training"]["steps"], rounding)


def drop_others(tables, expected):
    """Remove the checkpoints that only a run that was stopped has."""
    for name in set(checkpoints(folder(tables))) - set(checkpoints(folder(expected))):
        shutil.rmtree(folder(tables) / "checkpoints" / name)


def lines_of(ended):
    """What was said on standard error, but for the warning that the tests' engine draws from no policy."""
    return [line for line in ended.errors.splitlines() if "mismatch/abs_log_ratio" not in line]


def assert_refused(ended, *words):
    """One line on standard error, from one process."""
    (line,) = lines_of(ended)
    assert line.startswith("fastrl: ") and all(word in line for word in words), line
    assert ended.statuses.count(2) == 1 and {*ended.statuses} <= {2, 1, -signal.SIGTERM}
    assert ended.seconds < 15


def assert_whole(run):
    """All checkpoints are as they were written."""
    saved = [x for x in (folder(run) / "checkpoints").iterdir() if x.name.startswith("step-")]
    assert saved and [damage(path) for path in saved] == [None] * len(saved)


def command(tables):
    return ["train", write_toml(folder(tables).with_suffix(".toml"), tables)]


def hint(tables, step):
    return f"saved in {folder(tables)}/checkpoints/step-{step:06d}; the same command with --resume goes on from there"


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_a_reward_that_raises_on_one_rank_says_so_in_one_line(tables, whole, run_on):
    run = tables("run")
    ended = started(command(run), 2, partial(enter, partial(bad_reward, 2, 1, "raises")))
    assert_refused(ended, "even_digits: raised ValueError: no answer (", ") on sample 8: prompt ", hint(run, 1))
    assert checkpoints(folder(run)) == ["step-000001"] and len(metrics(run)) == 1 + 1
    assert_resumed(run_on, run, whole(), 1)


@pytest.mark.parametrize(
    ("kind", "step", "victim", "words"),
    [
        ("raises", 1, 1, ") on sample 8: prompt "),
        pytest.param("raises", 3, 0, ") on sample 3: prompt ", marks=SLOW),
        ("fewer", 2, 1, "expected 5 rewards, one per completion, got 4"),
    ],
)
def test_a_reward_that_fails_on_one_rank_ends_all(tables, run_with, kind, step, victim, words):
    run = tables("run")
    text = run_with(partial(bad_reward, step, victim, kind), run)
    assert words in text
    assert text.endswith(hint(run, step - 1)) == (step > 1)
    assert (folder(run) / "checkpoints").exists() == (step > 1)


@SLOW
def test_a_reward_that_fails_in_an_evaluation(tables, run_with, run_on):
    """The step before it is complete, and kept."""
    run = tables("run")
    text = run_with(partial(bad_reward, 2, 1, "evaluation"), run)
    assert ") on sample 2: prompt " in text and text.endswith(hint(run, 2))
    assert len(metrics(run)) == 1 + 2 and "eval/reward" not in metrics(run)[2]
    assert run_on(2, rank_runs.train, "train", run, True)["resumed"] == 2


# --- what differs between the ranks -----------------------------------------------------------------------------------


def differing(changes, tables):
    """A run whose config has these changes on rank 1."""
    if rank() == 1:
        tables = {name: table | changes.get(name, {}) for name, table in tables.items()}
    with patch.object(world, "versions", lambda: {"torch": f"2.{rank()}"} if "versions" in changes else {}):
        return rank_runs.train("train", tables)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout": {"num_generations": 4}}, "rollout.num_generations: expected the same on all processes, got 3 on"),
        ({"versions": {}}, "version of torch: expected the same on all processes, got '2.0' on rank 0 and '2.1' on"),
    ],
    ids=["config", "version"],
)
def test_what_differs_is_named(tables, run_on, changes, words):
    run = tables("run")
    assert run_on(2, differing, changes, run).startswith(words)
    assert not folder(run).exists()


def other_file(field, tables):
    """A run in which rank 1 finds another file behind the path of a field: its first line is the second one too."""
    table, name = field.split(".")
    path, opened = Path(tables[table][name]), Path.open
    cut, lines = path.with_suffix(f".{rank()}"), path.read_text().splitlines(keepends=True)
    cut.write_text("".join([lines[0]] * rank() + lines))

    def other(self, *arguments, **options):
        return opened(cut if self == path else self, *arguments, **options)

    with patch.object(Path, "open", other):
        return rank_runs.train("train", tables)


@pytest.mark.parametrize("field", ["data.path", "data.eval_path", "pretraining.path"])
def test_other_rows_on_one_rank(tables, run_on, tmp_path, field):
    text = tmp_path / "text.txt"
    text.write_text("0123456789" * 9)
    run = tables("run", pretraining={"path": str(text), "batch_size": 2, "length": 6})
    assert run_on(2, other_file, field, run).startswith(f"{field}: expected the same on all processes, got ")


def test_other_rows_of_a_stream_on_one_rank(tables, run_on):
    """Rank 0 alone draws prompts from it."""
    stream = {"data": {"streaming": True, "shuffle_buffer": 2}}
    run, expected = tables("run", **stream), tables("one", **stream)
    run_on(2, other_file, "data.path", run)
    run_on(1, rank_runs.train, "train", expected)
    assert_same_steps(run, expected, STEPS)


def without_the_data(number):
    def lines(path):
        raise UserError(f"{path}: no such file")

    if number == 1:
        sources._read_json_lines = lines


def test_a_file_that_one_rank_does_not_find(tables):
    assert_refused(started(command(tables("run")), 2, without_the_data), "prompts.jsonl: no such file")


def lost(path, read=sources._read_json_lines):
    """Rows of the prompts that end with an error after the fourth."""
    yield from list(read(path))[: 4 if path.name == "prompts.jsonl" else None]
    if path.name == "prompts.jsonl":
        raise UserError(f"{path}: the server does not answer")


def from_lost_stream(tables):
    with patch.object(sources, "_read_json_lines", lost):
        return rank_runs.train("train", tables)


def test_a_stream_that_fails_ends_all(tables, run_on):
    stream = {"data": {"streaming": True, "shuffle_buffer": 1}}
    run = tables("run", **stream)
    assert run_on(2, from_lost_stream, run).endswith(f"prompts.jsonl: the server does not answer; {hint(run, 1)}")


# --- few rows ---------------------------------------------------------------------------------------------------------


def no_reward(completions, **columns):
    return [None] * len(completions)


def equal_rewards(completions, **columns):
    return [0.5] * len(completions)


FEW = {
    "one prompt": {"rollout": {"prompts_per_step": 1, "num_generations": 2}},
    "one prompt, packed": {
        "rollout": {"engine": "transformers", "prompts_per_step": 1, "num_generations": 2},
        "training": {"packing": True},
    },
    "no reward": {"reward": {"function": f"{__file__}:no_reward"}, "kl": {"coef": 0.1}, "critic": {}}
    | {"objective": {"name": "ppo"}, "advantages": {"estimator": "gae"}},
    "nothing kept": {
        "reward": {"function": f"{__file__}:equal_rewards"},
        "rollout": {"dynamic_sampling": True, "max_refills": 1},
    },
}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("name", [x if x != "one prompt, packed" else pytest.param(x, marks=SLOW) for x in FEW])
def test_fewer_rows_than_ranks(tables, run_on, name, size):
    several, one = tables("several", **FEW[name]), tables("one", **FEW[name])
    for run, count in ((several, size), (one, 1)):
        assert run_on(count, rank_runs.train, "train", run)["steps"] == STEPS
    assert_same_steps(several, one, STEPS)


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victim", "ahead"), [(1, 0), *(pytest.param(*x, marks=SLOW) for x in ((0, 0), (0, 1), (1, 1)))]
)
def test_an_engine_that_one_rank_misses_once(tables, run_with, whole, victim, ahead):
    more = {"rollout": {"ahead": ahead}} | ({"rollout_correction": {"high": 3.0}} if ahead else {})
    run = tables("run", **more)
    assert run_with(partial(bad_engine, 2, victim, "once"), run)["steps"] == STEPS
    expected = whole(**more)
    if ahead:  # what was missing is drawn with newer weights, and says so
        assert metrics(run)[3].pop("off_policy_steps") < metrics(expected)[3].pop("off_policy_steps")
        return
    assert_same_steps(run, expected, STEPS, 0.0)


@pytest.mark.parametrize(
    ("kind", "victim", "words"),
    [
        ("gone", 0, "rollout.timeout: the engine does not answer; waited 0.5 s for it, then gave up; start it; "),
        pytest.param(
            "failing",
            1,
            "rollout.engine: the engine does not answer; that was 3 times in a row, though the engine ",
            marks=SLOW,
        ),
        ("wrong", 1, "rollout.engine: the engine returned token id 99, but the policy's ids end at "),
    ],
)
def test_an_engine_that_ends_the_run_of_all(tables, run_with, kind, victim, words):
    run = tables("run", rollout={"timeout": 0.5})
    text = run_with(partial(bad_engine, 2, victim, kind), run)
    assert text.startswith(words) and text.endswith(hint(run, 1))
    assert_whole(run)


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victim", "place"),
    [(1, "rollout"), *(pytest.param(*x, marks=SLOW) for x in ((0, "rollout"), (0, "update"), (1, "update")))],
)
def test_a_stop_signal_to_one_rank(tables, run_with, run_on, whole, victim, place):
    run = tables("run")
    summary = run_with(partial(at, place, 2, victim, partial(signalled, signal.SIGTERM)), run)
    assert (summary["steps"], summary["interrupted"]) == (2, "SIGTERM")
    # The last step of an unbroken run is evaluated, and this one was not the last.
    assert_resumed(run_on, run, whole(), 2)


def twice(number):
    for _ in range(2):
        signalled(number)


@SLOW
@pytest.mark.parametrize("victim", [0, 1])
def test_a_second_stop_signal_ends_the_run_at_once(tables, run_on, whole, victim):
    run = tables("run", every=1)
    ended = started(command(run), 2, partial(enter, partial(at, "update", 2, victim, partial(twice, signal.SIGTERM))))
    assert ended.statuses[victim] == -signal.SIGTERM and ended.seconds < 15
    assert all("has lost another rank: " in line for line in lines_of(ended))
    assert_whole(run)
    assert_resumed(run_on, run, whole(every=1), 1)


# --- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        (1, "update"),
        pytest.param(0, "save", marks=SLOW),
        *(pytest.param(*x, marks=SLOW) for x in ((0, "rollout"), (1, "rollout"), (0, "reward"), (1, "reward"))),
        *(pytest.param(*x, marks=SLOW) for x in ((0, "update"), (0, "evaluation"), (1, "evaluation"))),
    ],
)
def test_a_rank_that_is_killed(tables, run_on, whole, victim, place):
    run = tables("run", every=1)
    ended = started(command(run), 2, partial(enter, partial(at, place, 2, victim, partial(signalled, signal.SIGKILL))))
    assert ended.statuses[victim] == -signal.SIGKILL and ended.seconds < 15
    # The other may be ended before it notices; then torchrun alone says it.
    assert all(f"rank {1 - victim} has lost another rank: " in line for line in lines_of(ended))
    assert_whole(run)
    assert_resumed(run_on, run, whole(every=1), 1)


def end_at_random(metrics, size, seconds, victims, number):
    """Once the run has begun, that is when its metrics are no longer of this size, kill it after so many seconds."""

    def kill():
        while not metrics.exists() or metrics.stat().st_size == size:
            time.sleep(0.001)
        time.sleep(seconds)
        signalled(signal.SIGKILL)

    if number in victims:
        threading.Thread(target=kill, daemon=True).start()


@SLOW
@pytest.mark.parametrize("victims", [[(0, 1)], [(0,), (1,)]], ids=["all", "one"])
def test_twenty_kills_at_random_moments_change_no_metric(tables, whole, victims):
    """The moments are drawn anew each time; the seed is printed for a failure."""
    seed = random.randrange(10**6)
    print("seed", seed)
    draw, kills, steps = random.Random(seed), 0, 50
    more = {
        "kl": {"coef": 0.1, "adaptive": "schulman", "target": 1e-3, "sync_every": 3},
        "training": {"steps": steps, "minibatches": 2},
        "evaluation": {"every": 5},
        "logging": {"keep_checkpoints": 2},
    }
    run, expected = tables("run", every=1, **more), whole(every=1, **more)
    path = folder(run) / "metrics.jsonl"
    while kills < 20:
        size = path.stat().st_size if path.exists() else 0
        moment = partial(end_at_random, path, size, draw.uniform(0.0, 0.5), draw.choice(victims))
        ended = started([*command(run), "--resume"], 2, moment)
        assert -signal.SIGKILL in ended.statuses and ended.seconds < 15, ended
        kills += 1
        if any((folder(run) / "checkpoints").glob("step-*")):  # else the run begins anew
            assert_whole(run)
            # keep_checkpoints, one that was killed before it could be removed, and one that is not complete
            assert len(checkpoints(folder(run))) <= 4
    ended = started([*command(run), "--resume"], 2)
    assert ended.statuses == [0, 0], ended.errors
    assert_same_steps(run, expected, steps, 0.0)


# --- other numbers of ranks -------------------------------------------------------------------------------------------

MODELS = {"objective": {"name": "ppo"}, "advantages": {"estimator": "gae"}, "critic": {}}
MODELS |= {"kl": {"coef": 0.1, "sync_every": 2}, "training": {"steps": 4}}
MODELS |= {"data": {"streaming": True, "shuffle_buffer": 4}}


def stopped(tables, resume, step):
    """A run whose last rank gets a signal in this step."""
    victim = rank_runs.size() - 1
    with at("reward", step, victim, partial(signalled, signal.SIGTERM)):
        return rank_runs.train("train", tables, resume)


@pytest.mark.parametrize("sizes", [(1, 2), *(pytest.param(x, marks=SLOW) for x in ((2, 1), (2, 4, 1)))])
def test_other_numbers_of_ranks(tables, run_on, sizes):
    """With a critic, a reference that follows the policy, and prompts of which rank 0 alone has the position."""
    run, one = tables("run", **MODELS), tables("one", **MODELS)
    rank_runs.train("train", one)
    for step, size in enumerate(sizes[:-1], 1):
        summary = run_on(size, stopped, run, step > 1, step)
        assert (summary["resumed"], summary["steps"], summary["interrupted"]) == (step - 1, step, "SIGTERM"), summary
    summary = run_on(sizes[-1], rank_runs.train, "train", run, True)
    assert (summary["resumed"], summary["steps"]) == (len(sizes) - 1, 4), summary
    assert_same_files(run, one)
    drop_others(run, one)
    assert_same_steps(run, one, 4)


# --- full disks -------------------------------------------------------------------------------------------------------


@SLOW
def test_a_disk_that_is_full_for_a_record(tables, run_on, whole):
    """Neither the step's record nor its checkpoint can be written."""
    run = tables("run", every=1)
    fill = partial(full, f"{folder(run)}/metrics.jsonl")
    ended = started(command(run), 2, partial(enter, partial(at, "update", 2, 0, fill)))
    assert_refused(
        ended,
        "metrics.jsonl: cannot write step 2: [Errno 27] File too large; what is saved can be resumed; step 2: ",
        f"cannot save a checkpoint in {folder(run)}/checkpoints: ",
        f"; the last good checkpoint is {folder(run)}/checkpoints/step-000001",
    )
    assert_whole(run)
    assert_resumed(run_on, run, whole(every=1), 1)


@SLOW
def test_a_disk_that_is_full_for_a_checkpoint(tables):
    run = tables("run", every=1)
    ended = started(command(run), 2, partial(enter, partial(at, "update", 1, 0, no_large_file)))
    assert_refused(ended, "step 1: cannot save a checkpoint", "File too large", "there is no earlier one")
    assert checkpoints(folder(run)) == []


def no_large_file():
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
