"""Start a command's processes as torchrun does, and end them with one message.

`fastrl sft CONFIG --nproc 4` is `torchrun --standalone --nproc-per-node 4 -m fastrl sft CONFIG`, but for its exit
status, which is the command's, and for torchrun's own table of what failed.
"""

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fastrl.base.errors import UserError
from fastrl.base.terminal import say

#: Seconds that processes have to finish their step and save it, once they are told to stop.
LAST_STEP = 24 * 3600
#: Seconds that a process waits for torchrun to end it.
GRACE = 10


def launch(command_line: Sequence[str], processes: int) -> int:
    """Run `fastrl` with these arguments in so many processes of this machine; returns its exit status."""
    logging.disable(logging.ERROR)  # torchrun's own lines say nothing to who reads the command's
    os.environ.setdefault("OMP_NUM_THREADS", str(max(torch.get_num_threads() // processes, 1)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(LAST_STEP))
    if Path("/sys/class/net/lo").exists():  # gloo would look for the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=f"fastrl-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else a folder is left in the temporary ones
    )
    try:
        elastic_launch(config, sys.executable)("-m", "fastrl", *command_line)
    except SignalException as error:  # which the processes had too, and rank 0 has said what came of it
        return 128 + error.sigval
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, status in statuses.items():
            if status < 0 and -status != signal.SIGTERM:  # with which those that are left are ended
                say(f"rank {rank} was ended by {signal.Signals(-status).name}")
                return 128 - status
            if 2 < status < 128:  # which no command has: other code ended the process
                say(f"rank {rank} ended with status {status}")
        return max((status for status in statuses.values() if status > 0), default=128 + signal.SIGTERM)
    return 0


def on_rank(work: Callable[[], int]) -> int:
    """Do a command's work in one of the processes that torchrun started; returns its exit status, on rank 0.

    On the others it is 0, so that torchrun waits for what rank 0 has to say. Rank 0 alone prints, and where ranks
    raise, the first of them alone; for the others torchrun, which ends them once that one has ended, is waited for.
    """
    rank = int(os.environ["RANK"])
    try:
        if rank == 0:
            return work()
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            work()
        return 0
    except BaseException as error:
        if not _first_to_fail():
            if not _lost(error):  # else the other has ended
                time.sleep(GRACE)
            os._exit(1)
        if _lost(error):
            text = str(error) or type(error).__name__
            reason = re.sub(r"^\[.*?\] ", "", text).partition(". ")[0].splitlines()[0]
            raise UserError(
                f"rank {rank} has lost another rank: {reason}; --resume goes on from the newest checkpoint, if there "
                "is one"
            ) from error
        raise


def _first_to_fail() -> bool:
    """Whether no other rank has failed before; torchrun's own process keeps the count."""
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=10)
        )
        return store.add(f"fastrl/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", 1) == 1
    except (dist.DistError, RuntimeError):  # torchrun has ended too
        return True


def _lost(error: BaseException) -> bool:
    """Whether an error comes of another rank's end: gloo raises RuntimeError, NCCL an error of torch.distributed."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
