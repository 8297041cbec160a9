"""Reward functions in worker processes: every way in which a call ends, and that no process is left behind."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from doc_pages import page_of
from mistakes import error_of

from fastrl.base.errors import UserError
from fastrl.rewards import pool as worker_pool
from fastrl.rewards import worker as reward_worker
from fastrl.rewards.loading import load_reward
from fastrl.training.config.sampling import RewardConfig
from fastrl.training.data.examples import Example
from fastrl.training.rewards.scoring import RewardFunctions

pytestmark = pytest.mark.usefixtures("limited")

MINE = """
import asyncio, ctypes, os, random, subprocess, sys, threading, time

FIELD = bytes(16)  # in the place of the nonce

def leave_behind():
    process = subprocess.Popen(["sleep", "1000"])
    with open(__file__ + ".pids", "a") as file:
        file.write(f"{process.pid} ")

def act(text):
    if text == "loop":
        leave_behind()
        while True:
            pass
    if text == "locked":  # keeps the interpreter's lock, so that no thread could end it
        leave_behind()
        import re
        re.match("(a+)+$", "a" * 64 + "b")
    if text == "memory":
        bytearray(1 << 40)
    if text == "fork":
        raise OSError(12, "Cannot allocate memory")
    if text == "exit":
        leave_behind()
        os._exit(0)
    if text == "fault":
        ctypes.string_at(0)
    if text == "killed":
        os.kill(os.getpid(), 9)
    if text == "closed":
        os.closerange(3, 100)
        time.sleep(1000)
    if text == "daemon":  # a child that keeps all files open
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(1)
    if text.startswith("forged"):  # answers of its own, in all files that are open
        body = {"forged": b'{"result": 9.0}', "forged error": b'{"error": "mine"}', "forged noise": b"{"}[text]
        size = (1 << 60 if text == "forged noise" else len(body)).to_bytes(8, "little")
        for number in map(int, os.listdir("/dev/fd")):
            try:
                if number > 2:
                    os.write(number, size + FIELD + body)
            except OSError:
                pass
    if text == "wrong":
        raise KeyError(text)
    if text == "system exit":
        sys.exit(3)
    if text == "terminated":
        os.kill(os.getpid(), 15)
    return float(len(text))

def reward(prompts, completions, **columns):
    assert len(prompts) == len(completions) == 1
    return [act(completions[0])]

def negative(prompts, completions, **columns):
    return [act(completions[0]) - 3]

def known(prompts, completions, **columns):
    return [float(completions[0] in sys.modules)]

def drawn(prompts, completions, **columns):
    time.sleep(random.random() / 100)
    return [random.random()]

def process(prompts, completions, **columns):
    return [os.getpid()]

def told(prompts, completions, answer, other):
    chats = prompts == [[{"role": "user", "content": "?"}]], completions == [[{"role": "assistant", "content": "c"}]]
    return [float(all(chats) and answer == [{"a": 3}] and other == 7)]

def bad(prompts, completions, **columns):
    return [float("nan")] if completions == ["b"] else [None]

def steps(prompts, completions, **columns):
    act(completions[0])
    return [[(1, -2.0), (len(completions[0]), 1.0)]]

async def waiting(prompts, completions, **columns):
    await asyncio.sleep(0)
    if completions == ["for ever"]:
        await asyncio.sleep(1000)
    return [act(completions[0])]
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.fixture
def functions(mine):
    """The functions of that names, in workers."""
    made = []

    def functions(*names, workers=2, timeout=30.0, **options):
        sources = [name if "." in name else f"{mine}:{name}" for name in names]
        config = RewardConfig(function=sources, workers=workers, timeout=timeout, **options)
        made.append(RewardFunctions(config))
        return made[-1]

    yield functions
    for each in made:
        each.close()


@pytest.fixture
def function(functions):
    return lambda name, **options: functions(name, **options).outcome[0]


def examples(texts):
    return [Example(f"prompt {i}", {"answer": "5"}, [1], f"data:{i}") for i in range(len(texts))]


def call(function, *texts):
    return function(examples(texts), list(texts))


def alive(pid):
    """Whether a process runs; one that nobody has waited for has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end_of(*pids):
    while any(alive(pid) for pid in pids):
        time.sleep(0.01)


def left_behind(mine):
    return [int(pid) for pid in Path(f"{mine}.pids").read_text().split()]


# --- calls ------------------------------------------------------------------------------------------------------------


def test_results_are_in_order_and_all_workers_take_part(function):
    reward, texts = function("reward"), ["x" * (i % 7) for i in range(300)]
    assert call(reward, *texts) == [float(i % 7) for i in range(300)]
    assert len(set(call(function("process", workers=3), *"a" * 60))) == 3
    assert reward([], []) == []


def test_what_does_not_fit_into_a_pipe(function):
    size = 3 << 20
    assert call(function("reward"), *(["x" * size] * 5)) == [size] * 5
    prompt = "p" * size
    assert prompt in error_of(function("reward"), [Example(prompt, {}, [1])], ["wrong"])


def test_it_is_told_what_a_function_in_this_process_is(functions):
    told = functions("told", arguments={"told": {"other": 7}}).outcome[0]
    rows = [Example([{"role": "user", "content": "?"}], {"answer": {"a": 3}, "other": 1}, [1])] * 2
    assert told(rows, ["c", "d"]) == [1.0, 0.0]
    assert load_reward(told.source, {"other": 7})(rows[:1], ["c"]) == [1.0]


def test_built_in_functions_and_metrics_run_there_too(mine):
    config = RewardConfig(
        function=["fastrl.rewards.exact", "fastrl.rewards.math"],
        workers=1,
        arguments={"regex": {"pattern": "b"}},
        steps=f"{mine}:steps",
    )
    functions = RewardFunctions(config, ["fastrl.rewards.regex", "fastrl.rewards.exact"])
    try:
        exact, mathematical = functions.outcome
        assert [x.name for x in functions.metrics] == ["regex", "exact"]
        assert call(exact, "5", r"\boxed{10/2}") == [1.0, 0.0] and call(mathematical, "5", r"\boxed{10/2}") == [
            1.0,
            1.0,
        ]
        assert call(functions.metrics[0], "ab", "c") == [1.0, 0.0]
        assert functions.steps.steps(examples("ab"), ["ab", "x"]) == [[(1, -2.0), (2, 1.0)], [(1, -2.0), (1, 1.0)]]
    finally:
        functions.close()


def test_an_async_function_is_awaited_there_too(function):
    waiting = function("waiting", timeout=1.0)
    assert call(waiting, "ab", "for ever", "c") == [2.0, 0.0, 1.0]
    assert "raised KeyError: 'wrong'" in error_of(call, waiting, "wrong")


@pytest.mark.parametrize("threads", [2])
def test_threads_take_turns(function, threads):
    reward, found = function("reward"), []
    calls = [threading.Thread(target=lambda i=i: found.append(call(reward, *["x" * i] * 20))) for i in range(threads)]
    for thread in calls:
        thread.start()
    for thread in calls:
        thread.join()
    assert sorted(found) == [[float(i)] * 20 for i in range(threads)]


def test_random_numbers_are_the_runs_and_not_the_workers(function):
    def draws(workers):
        random.seed(3)
        return call(function("drawn", workers=workers), *"a" * 20), random.random()

    first, second = draws(1), draws(3)
    assert first == second and len(set(first[0])) == 20


def test_a_worker_imports_neither_torch_nor_what_the_trainer_has(function):
    assert call(function("known"), "os", "torch", "numpy", "transformers", "pydantic") == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_a_worker_can_use_fastrl(mine, function):
    mine.write_text(MINE + "\nfrom fastrl import overlong_penalty\nfrom fastrl.rewards import exact\n")
    assert call(function("known", workers=1), "torch") == [1.0]


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("loop", "timeouts"),
        ("locked", "timeouts"),
        ("memory", "out_of_memory"),
        ("fork", "out_of_memory"),
        ("killed", "out_of_memory"),
        ("exit", "crashes"),
        ("fault", "crashes"),
        pytest.param("closed", "crashes", marks=pytest.mark.slow),
        ("daemon", "crashes"),
    ],
)
def test_a_call_that_fails_is_counted_and_the_others_go_on(functions, mine, text, failure):
    made = functions("reward", timeout=1.0 if failure == "timeouts" else 30.0, memory_limit="1GiB")
    assert call(made.outcome[0], "a", text, "bb", "ccc", text) == [1.0, 0.0, 2.0, 3.0, 0.0]
    assert made.failures("reward") == {f"reward/{name}": 2.0 * (name == failure) for name in worker_pool.FAILURES}
    assert call(made.outcome[0], "a") == [1.0] and not any(made.failures("reward").values())
    if Path(f"{mine}.pids").exists():
        assert len(left_behind(mine)) == 2
        end_of(*left_behind(mine))


@pytest.mark.parametrize("text", ["forged", "forged error", "forged noise"])
@pytest.mark.parametrize("field", [b"", bytes(16)], ids=["none", "guess"])
def test_an_answer_that_the_functions_code_writes_is_a_crash(functions, mine, text, field):
    """Without a nonce, and with a guess; not read for longer than that takes, nor as the answer to another call."""
    mine.write_text(MINE.replace("bytes(16)", repr(field)))
    made = functions("reward", workers=1)
    assert call(made.outcome[0], "a", text, "bb", text, "ccc") == [1.0, 0.0, 2.0, 0.0, 3.0]
    assert made.failures("reward") == {"reward/timeouts": 0.0, "reward/out_of_memory": 0.0, "reward/crashes": 2.0}


def test_an_answer_at_the_import_is_an_error(functions, mine):
    mine.write_text(MINE + '\nact("forged")\n')
    with pytest.raises(
        UserError, match=r"reward\.workers: a worker got an answer from its functions' own code while it"
    ):
        functions("reward")


def test_a_second_answer_is_not_that_of_the_next_call(functions, mine):
    """The first is taken: code in the same process can find the nonce, as the documentation says."""
    mine.write_text("""
import sys

def reward(prompts, completions, **columns):
    if completions == ["twice"]:
        frame = sys._getframe()
        while "nonce" not in frame.f_locals:
            frame = frame.f_back
        connection, nonce = frame.f_locals["connection"], frame.f_locals["nonce"]
        body = b'{"result": 9.0}'
        connection.sendall(len(body).to_bytes(8, "little") + nonce + body)
    return [float(len(completions[0]))]
""")
    made = functions("reward", workers=1)
    assert call(made.outcome[0], "twice", "a", "bb") == [9.0, 0.0, 2.0]


def test_a_failure_is_never_better_than_an_answer(functions):
    made = functions("negative", memory_limit="1GiB")
    assert call(made.outcome[0], "a", "exit", "abcd") == [-2.0, -2.0, 1.0]
    assert call(made.outcome[0], "exit", "abcd") == [0.0, 1.0]


def test_steps_that_fail_are_one_step(mine):
    functions = RewardFunctions(RewardConfig(model="m", steps=f"{mine}:steps", workers=2))
    try:
        assert functions.steps.steps(examples("ab"), ["exit", "abc"]) == [[(4, -2.0)], [(1, -2.0), (3, 1.0)]]
    finally:
        functions.close()


@pytest.mark.parametrize("name", ["reward", "waiting"])
@pytest.mark.parametrize(("text", "what"), [("wrong", "KeyError: 'wrong'"), ("system exit", "SystemExit: 3")])
def test_an_exception_names_the_sample_as_in_this_process(functions, mine, name, text, what):
    made = functions(name)
    texts = ["a"] * 5 + [text] + ["b"] * 5
    message = error_of(call, made.outcome[0], *texts)
    assert f"{mine}:{name}: raised {what} ({mine}:" in message
    assert message.endswith(f"on sample 5: prompt 'prompt 5' (data:5), completion {text!r}")
    assert call(made.outcome[0], "a") == [1.0]  # what was under way is not taken for its answer


def test_a_bad_result_names_the_sample_as_in_this_process(functions):
    message = error_of(call, functions("bad").outcome[0], "a", "a", "b")
    assert "mine.py:bad: reward 2 must be a finite number or None, got nan (float); its prompt is 'prompt 2'" in message


def test_the_code_that_the_documentation_runs(mine, functions):
    """A program that passes, one that fails, that never ends, that forks, and that fills the memory."""
    (source,) = (block.text for block in page_of("docs/rewards.md").of("python") if "import subprocess" in block.text)
    mine.write_text(source)
    made = functions("runs", timeout=2.0, memory_limit="512MiB")
    programs = ["x = 1", "x = 2", "x = 1\nwhile True: pass", "import os\nos.fork()\nos.wait()", "x = 'a' * 10**9"]
    texts = [f"I write\n```python\n{program}\n```" for program in programs]
    rows = [Example("?", {"test": "assert x == 1"}, [1])] * len(texts)
    assert made.outcome[0](rows, texts) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert made.failures("reward")["reward/timeouts"] == 1


def test_a_job_that_is_told_to_end_does_not_lose_its_workers(functions):
    """The trainer finishes its step after SIGTERM, which a manager sends to all processes."""
    made = functions("reward")
    assert call(made.outcome[0], "terminated") == [10.0] and not any(made.failures("reward").values())


def test_a_worker_that_ends_between_two_calls_is_replaced(functions):
    made = functions("process", workers=1)
    (pid,) = call(made.outcome[0], "a")
    os.kill(int(pid), signal.SIGKILL)
    end_of(int(pid))
    assert call(made.outcome[0], "a") != [pid] and not any(made.failures("reward").values())


# --- the start and the end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def reward(:\n", r"mine\.py:1: "),
        ("import nowhere\n", r"importing it raised ModuleNotFoundError.*nowhere.*mine\.py:1"),
        ("", "has no function 'reward'"),
        ("import os\nos._exit(5)\n", "a worker ended with status 5 while it imported"),
        ("import time\ntime.sleep(1000)\n", "took longer than 0.2 s"),
        ("x = bytearray(1 << 40)\n", "MemoryError"),
    ],
)
def test_what_cannot_be_imported_is_an_error_at_the_start(functions, mine, monkeypatch, body, expected):
    if "sleep" in body:
        monkeypatch.setattr(worker_pool, "_START", 0.2)
    mine.write_text(body)
    with pytest.raises(UserError, match=expected):
        functions("reward", memory_limit="1GiB")
    assert not children()


def test_a_limit_that_is_too_small_for_an_import_says_so(functions):
    with pytest.raises(UserError, match="memory"):
        functions("fastrl.rewards.math", memory_limit="32MiB")


def test_a_limit_of_more_than_there_can_be_is_none(function):
    assert call(function("known", memory_limit="9999999TiB"), "a")


def test_arguments_for_what_does_not_name_its_parameters(tmp_path):
    (tmp_path / "compiled.py").write_text("reward = int\n")
    with pytest.raises(UserError, match=r"reward\.arguments\.reward: .* does not say which parameters it has"):
        load_reward(f"{tmp_path}/compiled.py:reward", {"base": 2})


def test_a_closed_pool_starts_nothing(functions):
    made = functions("reward")
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        call(made.outcome[0], "a")
    assert not children()


def test_this_process_does_not_import_the_functions(mine, function):
    mine.write_text(f"import os\nassert os.getpid() != {os.getpid()}\n{MINE}")
    assert call(function("reward"), "a") == [1.0]


def children():
    own = str(os.getpid())
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    return [stat for stat in stats if stat.rpartition(")")[2].split()[1] == own and "rewards/worker" in cmdline(stat)]


def cmdline(stat):
    try:
        return Path(f"/proc/{stat.split()[0]}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("how", ["close", "collect"])
def test_the_end_of_a_pool_is_that_of_its_processes(functions, mine, how):
    mine.write_text(MINE + "\nleave_behind()\n")
    made = RewardFunctions(RewardConfig(function=f"{mine}:process", workers=2))
    pids = {int(pid) for pid in call(made.outcome[0], *"a" * 20)} | set(left_behind(mine))
    assert all(alive(pid) for pid in pids) and children()
    if how == "close":
        made.close()
    del made
    end_of(*pids)
    assert not children()


TRAINER = """
import os, runpy, signal, sys, threading, time
from types import SimpleNamespace
runpy.run_path(sys.argv[4])["_fastrl_without_torch"]()  # which this test does not need
from fastrl.rewards.pool import WorkerPool
from fastrl.rewards.pooled import PooledFunction

def start():
    global function
    function = PooledFunction(WorkerPool([(sys.argv[1], {})], 2, 100.0, None), 0, sys.argv[1])

thread = threading.Thread(target=start)  # whose end is not the workers'
thread.start()
thread.join()
example = SimpleNamespace(prompt="p", columns={}, source="", opened="")
print([int(pid) for pid in function([example] * 20, ["a"] * 20)], flush=True)
if sys.argv[2] == "busy":
    def kill():
        while len(open(sys.argv[5]).read().split()) < 6:  # one per import, and one per call
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=kill).start()
    loop = PooledFunction(WorkerPool([(sys.argv[3], {})], 2, 100.0, None), 0, sys.argv[3])
    loop([example] * 2, ["locked"] * 2)
if sys.argv[2] == "idle":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "raises":
    raise KeyError
"""


@pytest.mark.parametrize("how", ["idle", "busy", "exits", "raises"])
def test_no_worker_outlives_the_trainer(mine, how):
    """Killed with -9, while its workers wait for it or compute, or at its end; with the processes that they started."""
    mine.write_text(MINE + "\nleave_behind()\n")
    arguments = [sys.executable, "-c", TRAINER, f"{mine}:process", how, f"{mine}:reward", reward_worker.__file__]
    arguments.append(f"{mine}.pids")
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == {"idle": -9, "busy": -9, "exits": 0, "raises": 1}[how]
    pids = {int(pid) for pid in done.stdout.strip("[]\n").split(",")} | set(left_behind(mine))
    assert len(pids) == (8 if how == "busy" else 4)
    end_of(*pids)


# --- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "metrics", "expected"),
    [
        ({"function": "fastrl.rewards.math"}, [], r"needs reward\.workers"),
        ({"function": "fastrl.rewards.exact"}, ["fastrl.rewards.math"], r"needs reward\.workers"),
        ({"function": ["fastrl.rewards.exact", "other.py:exact"]}, [], "names that differ, got exact, exact"),
        ({"function": "other.py:timeouts"}, [], '"timeouts" is taken'),
        ({"function": "fastrl.rewards.exact"}, ["other.py:reward"], '"reward" is taken'),
        ({"function": "fastrl.rewards.exact", "arguments": {"regex": {}}}, [], r"reward\.arguments\.regex: .* exact"),
    ],
)
def test_configs_that_name_no_set_of_functions(options, metrics, expected):
    with pytest.raises(UserError, match=expected):
        RewardFunctions(RewardConfig(**options), metrics)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"timeout": 3}, "set workers too"),
        ({"memory_limit": "1GiB"}, "set workers too"),
        ({"workers": 1, "memory_limit": "much"}, "memory_limit\n.* the size must be a number of bytes"),
        ({"workers": 1, "timeout": 0}, "timeout"),
        ({"workers": -1}, "workers"),
    ],
)
def test_limits_that_mean_nothing(options, expected):
    with pytest.raises(ValueError, match=expected):
        RewardConfig(function="mine.py:reward", **options)


def test_a_file_with_workers_can_be_tried_without():
    RewardConfig(function="mine.py:reward", workers=0, timeout=3, memory_limit="1GiB")
