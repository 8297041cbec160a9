"""How weights reach vLLM: by its own transfer engines (NCCL, CUDA IPC), or by a file that its workers read.

The engine chooses with --weight-transfer-config '{"backend": ...}': "nccl" between GPUs, "ipc" on a GPU that both use,
and "fastrl" for a file in shared memory or on a shared disk (`fastrl.integrations.vllm_weights`, which vLLM finds where
fastrl is installed beside it). The first two need vLLM in the trainer's environment too: its sender is used as it is.
"""

import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fastrl.base.errors import UserError
from fastrl.training.config.settings import import_for
from fastrl.training.engines.protocol import Weights

HOW = (
    'start the engine with --weight-transfer-config \'{"backend": "nccl"}\' (between GPUs), "ipc" (on the trainer\'s '
    'GPU) or "fastrl" (a file; fastrl must be installed beside vLLM)'
)
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "fastrl-weights-"


class Control(Protocol):
    """vLLM's steps of a weight update, as its server and its in-process engine have them."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Transfer(Protocol):
    """A way for weights."""

    def send(self, version: str, weights: Weights) -> None:
        """Replace the engine's weights, whose version is then this one."""

    def close(self) -> None:
        """Remove what it left behind."""


def make_transfer(
    backend: str | None, control: Control, dtype: torch.dtype, host: str | None, workers: int
) -> Transfer:
    """The way that the engine was started with. `host` is None for an engine in this process.

    Raises UserError for an engine that has none, one that is not known here, or one that several processes cannot use.
    """
    if backend == "fastrl":
        return FileTransfer(control, dtype, host)
    if backend == "ipc" and dist.is_initialized() and dist.get_world_size() > 1:  # its sender calls all of the group
        raise UserError(
            'rollout.url: the weight transfer backend "ipc" shares one process\'s GPU, and the trainer has '
            f'{dist.get_world_size()} processes; start the engine with "nccl" or "fastrl"'
        )
    if backend in ("nccl", "ipc"):
        return VLLMTransfer(backend, control, dtype, host, workers)
    what = "no way to take new weights" if backend is None else f"the weight transfer backend {backend!r}"
    raise UserError(f"rollout.url: the engine has {what}; {HOW}")


class FileTransfer:
    """A safetensors file, in shared memory for an engine on this machine, else in the directory for temporary files."""

    def __init__(self, control: Control, dtype: torch.dtype, host: str | None) -> None:
        self.control, self.dtype, self.host = control, dtype, host
        control.init_weight_transfer_engine({})

    def send(self, version: str, weights: Weights) -> None:
        """Write the file, have it read, remove it."""
        with weights_file(weights.cast(self.dtype), self.host) as path:
            self.control.start_weight_update()
            self.control.update_weights({"path": str(path)})
            self.control.finish_weight_update(version)

    def close(self) -> None:
        """Nothing is left behind."""


@contextmanager
def weights_file(weights: Weights, host: str | None) -> Iterator[Path]:
    """The path of a file with the weights that an engine on this host (None: here) can read, in a directory of its own.

    Raises UserError if there is no room for it.
    """
    near = (host is None or is_local(host)) and SHARED_MEMORY.is_dir()
    parent = SHARED_MEMORY if near else Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as directory:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield write_weights(Path(directory), weights)
        finally:
            os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed trainers left, which may be as large as a model: the lock of a directory ends with its holder.

    One that was made a moment ago may not be locked yet.
    """
    for directory in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or gone, or on a file system without locks
            if time.time() - directory.stat().st_mtime < 60:
                continue
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(descriptor)


def write_weights(directory: Path, weights: Weights) -> Path:
    """`model.safetensors` in a directory. Raises UserError if there is no room for it."""
    path = directory / "model.safetensors"
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights}, path)
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        hint = "; a container has as much shared memory as it is given (docker's --shm-size)"
        shared = hint if directory.is_relative_to(SHARED_MEMORY) else ""
        raise UserError(f"{path}: cannot write the weights for the engine: {error}{shared}") from error
    return path


class VLLMTransfer:
    """vLLM's own sender, NCCL or CUDA IPC."""

    def __init__(self, backend: str, control: Control, dtype: torch.dtype, host: str | None, workers: int) -> None:
        import_for(f'An engine with the weight transfer backend "{backend}"', "vllm")
        self.backend, self.control, self.dtype, self.host, self.workers = backend, control, dtype, host, workers
        self.sender: Any = None

    def send(self, version: str, weights: Weights) -> None:
        """Send all weights; the first time also meet the engine's workers."""
        from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory

        class Source(WeightSource):
            """The policy's weights, as vLLM reads them."""

            def metadata(self) -> list[Any]:
                return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(cast)

        class Versioned:
            """The control, with the version that vLLM's senders leave out."""

            def __getattr__(_, name: str) -> Any:
                return getattr(control, name)

            def finish_weight_update(_, weight_version: str | None = None) -> None:
                control.finish_weight_update(version)

        cast, control = weights.cast(self.dtype), self.control
        if self.sender is None:
            with self._meeting() as meeting:
                self.sender = WeightTransferTrainerFactory.trainer_init(meeting, client=Versioned(), source=Source())
        self.sender.client, self.sender.source = Versioned(), Source()
        self.sender.send_weights()

    @contextmanager
    def _meeting(self) -> Iterator[Any]:
        """Where the trainer, rank 0, meets the workers."""
        if self.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            yield IPCTrainerInitInfo(rank=0, packed=True)
            return
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        address = _own_address(self.host)
        with _held_port(address) as port:
            yield NCCLTrainerInitInfo(rank=0, world_size=1 + self.workers, master_address=address, master_port=port)

    def close(self) -> None:
        """Leave the group of the workers."""
        if self.sender is not None:
            self.sender.shutdown()


def is_local(host: str) -> bool:
    """Whether a host is this machine by its loopback address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _own_address(host: str | None) -> str:
    """This machine's address as the engine's host sees it."""
    if host is None or is_local(host):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only chooses the interface
        return str(probe.getsockname()[0])


@contextmanager
def _held_port(address: str) -> Iterator[int]:
    """A free port of this address, which nobody else is given while vLLM's sender comes to listen on it.

    The sender takes a number and no socket. It binds the port with SO_REUSEADDR, which Linux allows beside a socket
    that has the option too and does not listen; whoever asks for any port, or has not the option, does not get it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        yield holder.getsockname()[1]
