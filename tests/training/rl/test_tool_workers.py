"""Tools in worker processes: what a call that fails leaves of its completion, and of the run."""

import os
import random
import signal

import pytest
from rollouts import play
from run_files import checkpoints, records

from fastrl.base.errors import UserError
from fastrl.training.batches.rollout import completion_texts
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.choice import make_sampler
from fastrl.training.rl.train import train

pytestmark = pytest.mark.usefixtures("limited")

# What a call does with a completion: the digit of its prompt says it.
TOOLS = """
import os, random, subprocess, time

def act(text, what):
    if what == "loop":
        subprocess.Popen(["sleep", "1000"])
        while True:
            pass
    if what == "memory":
        bytearray(1 << 40)
    if what == "exit":
        os._exit(0)
    if what == "wrong":
        raise KeyError(what)
    if what == "object":
        return object()
    if what == "random":
        return str(random.randrange(10**5))
    return None if what == "none" else "77"

def tools(prompts, completions, what, **columns):
    assert len(prompts) == len(completions) == len(what) == 1 and os.getpid() != TRAINER
    return [act(*pair) for pair in zip(completions, what)]
"""


@pytest.fixture
def draw(tmp_path, policy):
    """One completion for each of these, by what its tool's call does; the rollout, and the metrics of its tools."""
    (tmp_path / "mine.py").write_text(TOOLS.replace("TRAINER", str(os.getpid())))

    def draw(*what, **settings):
        fields = {"tools": f"{tmp_path}/mine.py:tools", "stop": list("0123456789="), "max_turns": 2}
        settings = RolloutConfig(**fields | {"max_new_tokens": 9, "tool_timeout": 1.0} | settings)
        examples = [Example("1", {"what": each}, [3], "f:1") for each in what]
        sampler = make_sampler(policy, settings, 0)
        asked = sampler.ask(examples)
        return sampler.finish(asked), asked.numbers

    return draw


FAILED = {"loop": "timeouts", "memory": "out_of_memory", "exit": "crashes"}


@pytest.mark.parametrize("what", FAILED)
def test_a_call_that_fails_ends_its_completion_and_no_other(draw, what):
    rollout, numbers = draw("none", what, "77", "77")
    tools = (rollout.completion_mask & ~rollout.drawn).sum(1).tolist()
    assert tools == [0, 0, 2, 2]
    assert rollout.ended[1] == rollout.ended[0]  # by its turn's end, so it is not filtered as one that was cut off
    counts = {f"tools/{name}": float(name == FAILED[what]) for name in ("timeouts", "out_of_memory", "crashes")}
    assert numbers.pop("time/tools") > 0 and numbers == counts


def test_what_goes_wrong_in_a_worker_is_told_with_its_sample(draw):
    with pytest.raises(
        UserError, match=r"mine\.py:tools: raised KeyError: 'wrong' \(.*\) on prompt '1' \(f:1\), compl"
    ):
        draw("77", "wrong")
    with pytest.raises(UserError, match=r"mine\.py:tools: answered with what JSON cannot hold: .*object"):
        draw("object")


def test_random_numbers_are_the_completions_and_not_the_runs(policy, draw):
    """So the number of workers changes none, and neither does what the trainer draws meanwhile."""
    random.seed(1)
    texts = []
    for count in (1, 3):
        texts.append(completion_texts(policy, draw(*["random"] * 6, tool_workers=count, max_new_tokens=12)[0]))
    assert texts[0] == texts[1] and len(set(texts[0])) == 6
    after = random.random()
    random.seed(1)
    assert after == random.random()


def test_random_numbers_without_workers_are_no_others_of_the_runs_either(draw, tmp_path):
    (tmp_path / "here.py").write_text(
        "import random\n"
        "def tools(prompts, completions, **columns):\n"
        "    return [str(random.randrange(10)) + str(random.randrange(10)) for _ in prompts]\n"
    )

    def drawn(seed, turns):
        random.seed(seed)
        options = {"tools": f"{tmp_path}/here.py:tools", "tool_workers": 0, "stop": ["1", "="], "max_turns": turns}
        return draw(*["a"] * 6, **options)[0].input_ids.tolist(), random.random()

    drawn(0, 1)  # imports the file, which takes a number too
    (first, after), (second, _), (unanswered, then) = drawn(1, 2), drawn(2, 2), drawn(1, 1)
    assert first == second != unanswered
    assert after == then == random.Random(1).random()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tools": "{}/none.py:f"}, r"none\.py: no such file \(rollout\.tools\)"),
        ({"tools": "{}/mine.py:f"}, r"mine\.py: has no function 'f'"),
        ({"tools": "{}/exits.py:f"}, r"rollout\.tool_workers: a worker ended with status 3 while it imported"),
    ],
)
def test_what_cannot_be_started_is_an_error_before_anything_is_sampled(draw, tmp_path, fields, expected):
    (tmp_path / "exits.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(UserError, match=expected):
        draw("77", **{name: value.format(tmp_path) for name, value in fields.items()})


def test_sigterm_in_a_call_that_never_ends_saves_the_step(make_config, tmp_path):
    (tmp_path / "mine.py").write_text(f"""
import os

def tools(prompts, completions, **columns):
    if not os.path.exists({str(tmp_path / "called")!r}):
        open({str(tmp_path / "called")!r}, "w").close()
        os.kill({os.getpid()}, {signal.SIGTERM})
        while True:
            pass
    return [None] * len(completions)
""")
    tables = {"rollout": {"tools": f"{tmp_path}/mine.py:tools", "tool_timeout": 1.0}, "training": {"steps": 5}}
    config = make_config(**tables)
    data = config.data.model_copy(update={"eval_path": None})  # an evaluation, before the step, would make the call
    config = config.model_copy(update={"data": data})
    train(config)
    (line,) = records(config)
    assert line["tools/timeouts"] == 1 and line["time/tools"] >= 1
    assert checkpoints(config) == ["step-000001"]


def test_an_evaluations_calls_are_not_a_steps(make_config, tmp_path):
    """Its greedy completions have no time/tools either."""
    (tmp_path / "mine.py").write_text("""
import os

def tools(prompts, completions, **columns):
    os._exit(1)
""")
    config = make_config(rollout={"tools": f"{tmp_path}/mine.py:tools"}, evaluation={"every": 1})
    run, numbers = play(config)
    run.data.rollouts.evaluate(run.data.held_out[:4], greedy=True)
    assert run.data.rollouts.completions.engine.numbers == {}
    assert all(0 < step["tools/crashes"] <= 24 for step in numbers)
