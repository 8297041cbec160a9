"""How weights reach vLLM's server: by vLLM's own transfer engines (NCCL, CUDA IPC), or by a file that its workers read.

The server chooses with --weight-transfer-config '{"backend": ...}': "nccl" between GPUs, "ipc" on a GPU that both use,
and "fastrl" for a file in shared memory or on a shared disk (`fastrl.integrations.vllm_weights`, which vLLM finds where
fastrl is installed beside it). The first two need vLLM in the trainer's environment too: its sender is used as it is.
"""

import base64
import fcntl
import os
import pickle
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fastrl.base.errors import UserError
from fastrl.training.config.settings import import_for
from fastrl.training.engines.http import Server
from fastrl.training.engines.protocol import EngineFailed, Weights

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "fastrl-weights-"


class Control:
    """The steps of a weight update on the server, by the names that vLLM's senders call them.

    Each may take `timeout` seconds.
    """

    def __init__(self, server: Server, timeout: float) -> None:
        self.server, self.timeout = server, timeout
        self.version: str | None = None  # of the weights that are sent, which vLLM's senders leave out

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        self.server.post(path, body, self.timeout)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        try:
            self._post("/start_weight_update")
        except EngineFailed as error:
            if "already active" not in str(error):
                raise
            # A trainer that was killed in the middle of an update left it open; all weights follow now.
            self._post("/finish_weight_update", {"weight_version": None})
            self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        handles = update_info.get("ipc_handles")
        if handles is not None:  # which JSON cannot hold; vLLM's own client sends them in this form
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            update_info = {**update_info, "ipc_handles": None, "ipc_handles_pickled": pickled}
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version or self.version})


def make_transfer(backend: str | None, control: Control, dtype: torch.dtype, workers: int) -> "Transfer":
    """The way that the server was started with.

    Raises UserError for a server that has none, one that is not known here, or one that several processes cannot use.
    """
    if backend == "fastrl":
        return FileTransfer(control, dtype)
    if backend == "ipc" and dist.is_initialized() and dist.get_world_size() > 1:  # its sender calls all of the group
        raise UserError(
            'rollout.url: the weight transfer backend "ipc" shares one process\'s GPU, and the trainer has '
            f'{dist.get_world_size()} processes; start the engine with "nccl" or "fastrl"'
        )
    if backend in ("nccl", "ipc"):
        return VLLMTransfer(backend, control, dtype, workers)
    what = "no way to take new weights" if backend is None else f"the weight transfer backend {backend!r}"
    raise UserError(
        f'rollout.url: the engine has {what}; start the engine with --weight-transfer-config \'{{"backend": "nccl"}}\' '
        '(between GPUs), "ipc" (on the trainer\'s GPU) or "fastrl" (a file; fastrl must be installed beside vLLM)'
    )


class FileTransfer:
    """A safetensors file, in shared memory for a server on this machine, else in the directory for temporary files."""

    def __init__(self, control: Control, dtype: torch.dtype) -> None:
        self.control, self.dtype = control, dtype
        control.init_weight_transfer_engine({})

    def send(self, version: str, weights: Weights) -> None:
        """Replace the server's weights, whose version is then this one."""
        with weights_file(weights.cast(self.dtype), self.control.server.host) as path:
            self.control.start_weight_update()
            self.control.update_weights({"path": str(path)})
            self.control.finish_weight_update(version)

    def close(self) -> None:
        """Nothing is left behind."""


@contextmanager
def weights_file(weights: Weights, host: str) -> Iterator[Path]:
    """The path of a safetensors file that a server on this host can read, in a directory of its own.

    Raises UserError if there is no room for it.
    """
    near = is_local(host) and SHARED_MEMORY.is_dir()
    parent = SHARED_MEMORY if near else Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
    with made as directory, _locked(directory):
        path = Path(directory) / "model.safetensors"
        try:
            save_file({name: tensor.cpu().contiguous() for name, tensor in weights}, path)
        except (OSError, SafetensorError) as error:
            hint = "; a container has as much shared memory as it is given (docker's --shm-size)" if near else ""
            raise UserError(f"{path}: cannot write the weights for the engine: {error}{hint}") from error
        yield path


@contextmanager
def _locked(directory: str | Path, options: int = 0) -> Iterator[None]:
    """The lock of a directory, which ends with its holder."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | options)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed trainers left, which may be as large as a model."""
    for directory in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or gone, or on a file system without locks
            if time.time() - directory.stat().st_mtime >= 60:  # one made a moment ago may not be locked yet
                with _locked(directory, fcntl.LOCK_NB):
                    shutil.rmtree(directory)


class VLLMTransfer:
    """vLLM's own sender, NCCL or CUDA IPC."""

    def __init__(self, backend: str, control: Control, dtype: torch.dtype, workers: int) -> None:
        import_for(f'An engine with the weight transfer backend "{backend}"', "vllm")
        self.backend, self.control, self.dtype, self.workers = backend, control, dtype, workers
        self.sender: Any = None

    def send(self, version: str, weights: Weights) -> None:
        """Replace the server's weights, whose version is then this one; the first time also meet its workers."""
        from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory

        class Source(WeightSource):
            """The policy's weights, as vLLM reads them."""

            def metadata(self) -> list[Any]:
                return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(cast)

        cast, self.control.version = weights.cast(self.dtype), version
        if self.sender is None:
            with self._meeting() as meeting:
                self.sender = WeightTransferTrainerFactory.trainer_init(meeting, client=self.control, source=Source())
        self.sender.source = Source()
        self.sender.send_weights()

    @contextmanager
    def _meeting(self) -> Iterator[Any]:
        """Where the trainer, rank 0, meets the workers."""
        if self.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            yield IPCTrainerInitInfo(rank=0, packed=True)
            return
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with _held_port(self.control.server.host) as (address, port):
            yield NCCLTrainerInitInfo(rank=0, world_size=1 + self.workers, master_address=address, master_port=port)

    def close(self) -> None:
        """Leave the group of the workers."""
        if self.sender is not None:
            self.sender.shutdown()


Transfer = FileTransfer | VLLMTransfer


def is_local(host: str) -> bool:
    """Whether a host is this machine by its loopback address."""
    return host in ("localhost", "::1") or host.startswith("127.")


@contextmanager
def _held_port(host: str) -> Iterator[tuple[str, int]]:
    """This machine's address as that host sees it, and a port that nobody else is given while vLLM's sender comes.

    The sender takes a number and no socket. It binds the port with SO_REUSEADDR, which Linux allows beside a socket
    that has the option too and does not listen; whoever asks for any port, or has not the option, does not get it.
    """
    address = "127.0.0.1"
    if not is_local(host):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only chooses the interface
            address = probe.getsockname()[0]
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        yield holder.getsockname()
