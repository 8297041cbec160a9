"""vLLM's processes end with the one that started them, even if it is killed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import multiprocessing, time
from fastrl.integrations.vllm_weights import _end_with_parent

def engine():
    _end_with_parent()
    print("ready", flush=True)
    time.sleep(60)

_end_with_parent()  # of a process that nobody watches
multiprocessing.get_context("fork").Process(target=engine).start()
time.sleep(60)
"""


def test_an_engine_ends_with_a_killed_trainer() -> None:
    trainer = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
    trainer.kill()
    rest, _ = trainer.communicate(timeout=30)  # until the last process that can write has ended
    assert rest == ""
