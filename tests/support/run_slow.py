"""`make slow`: the slow tests of one share of twelve, bounded in time, and an engine's where they are needed.

    python tests/support/run_slow.py        # the share of this commit: the number of commits so far, modulo twelve
    python tests/support/run_slow.py 7      # that share
    python tests/support/run_slow.py all    # every test, without a bound

So consecutive commits run different shares, and any twelve of them all. What the change touches is what differs from
origin/main's last common commit, or on that branch itself from the commit before; its tests come first.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path, PurePath

from places import ROOT

SHARES = 12
#: Seconds after which no test begins. What has begun ends: half a minute for the slow tests, whose longest are in LONG,
#: and the five minutes of the countdown example for an engine's (on two idle cores).
LIMIT = 480
RANDOM_CALLS = 60  # seconds, of these
#: One of these at the end would also have a worker for itself.
LONG = (
    "tests/training/rl/test_long_context.py",
    "tests/random_calls",
    "tests/training/rl/test_kills.py",
    "tests/training/rl/test_reverse_digits.py",
    "tests/planning/test_budget.py",
)

ENGINES = "tests/training/engines"
PYTEST = (sys.executable, "-m", "pytest")
WORKERS = ("--numprocesses", "auto", "--maxprocesses", "8")
# Tests are dealt to the workers one by one, in their order; with worksteal each worker would begin elsewhere in it.
IN_ORDER = ("--dist", "load", "--maxschedchunk", "1")
# Tests of a server wait for it a good part of their time; those of a file share one.
ENGINE_WORKERS = ("--numprocesses", "2", "--dist", "loadfile")


def git(root: Path, *arguments: str) -> list[str] | None:
    """The lines that git prints; None where there is no git, no checkout, or not what was asked for."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def this_share(root: Path) -> int:
    """The number of commits, modulo the number of shares."""
    if (count := git(root, "rev-list", "--count", "HEAD")) is None:
        print("make slow: this is no git checkout, so the share is number 0")
        return 0
    return int(count[0]) % SHARES


def touched(root: Path) -> list[str]:
    """The folders, and files, of the tests of what the change touches."""
    head, base = git(root, "rev-parse", "HEAD"), git(root, "merge-base", "HEAD", "origin/main")
    changed = git(root, "diff", "--name-only", base[0] if base and base != head else "HEAD~1") or []
    return sorted({place for path in changed for place in tests_of(root, path)})


def tests_of(root: Path, path: str) -> list[str]:
    """Where the tests of a file of the project are: its folder in tests/, or the nearest above that there is."""
    match PurePath(path).parts:
        case ("kernels" | "csrc", *_):
            return ["tests/backend", "tests/kernels"]
        case ("tests", name):
            return [f"tests/{name}"] if name.startswith("test_") else []
        case ("fastrl" | "tests", *folders, _) if folders:
            found = Path("tests", *folders)
            while found != Path("tests") and not (root / found).is_dir():
                found = found.parent
            return [str(found)] if found != Path("tests") else []
        case _:
            return []


def call(*command: str) -> int:
    """Its exit status; that pytest found no test, which is its fifth, is no failure."""
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if status == 5 else status


def engine_tests(*options: str) -> list[str]:
    """The command that runs the tests of a real server, in an environment made here; none if there is none to run."""
    # Looking for them in all files takes as long as collecting the whole suite, which most shares need not wait for.
    files = [str(x) for x in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.engine" in x.read_text("utf-8")]
    command = [*PYTEST, "-m", "engine", *ENGINE_WORKERS, *options, *files]
    looked = subprocess.run([*command, "--collect-only", "-qq"], cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
    if looked.returncode == 5:
        return []
    if subprocess.run(["make", "engine"], cwd=ROOT, check=False).returncode:
        print("make slow: `make engine` failed, so the tests marked engine are left out", flush=True)
        return []
    return command


def main(share: str = "") -> int:
    """The exit status: not 0 if a test failed."""
    if share == "all":
        slow = call(*PYTEST, "-m", "slow and not engine", *WORKERS, "--dist", "worksteal", "--shadow-memory")
        engine = engine_tests()
        return (call(*engine) if engine else 0) or slow
    number = int(share) if share else this_share(ROOT)
    mine, first = f"--share={number}/{SHARES}", touched(ROOT)
    print(f"make slow: share {number} of {SHARES}, first {', '.join(first) or 'nothing in particular'}", flush=True)
    needed = any(Path(ENGINES).is_relative_to(path) or Path(path).is_relative_to(ENGINES) for path in first)
    engine = engine_tests(*(() if needed else (mine,)))
    slow = [*PYTEST, "-m", "slow and not engine", *WORKERS, *IN_ORDER, mine, "--shadow-memory"]
    slow += [f"--first={path}" for path in [*first, *LONG]] + [f"--random-calls-for={RANDOM_CALLS}"]
    began = time.monotonic()
    # On a busy machine one may leave no time for the other.
    statuses = [
        call(*command, f"--stop-after={max(0, LIMIT - time.monotonic() + began):.0f}")
        for command in ((engine, slow) if needed else (slow, engine))
        if command
    ]
    return int(any(statuses))  # that of one which was killed is negative


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
