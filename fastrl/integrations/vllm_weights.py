"""A weight transfer engine for vLLM that reads a safetensors file: where there is no GPU, or no NCCL to the trainer.

vLLM finds it as a plugin (the entry point `vllm.general_plugins`) if fastrl is installed beside it, and uses it if
started with --weight-transfer-config '{"backend": "fastrl"}'. Every worker reads the file, which must be in shared
memory or on a disk that all of them see. Written against vLLM 0.32.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from torch import Tensor

__all__ = ["register"]


def register() -> None:
    """Add the backend "fastrl" to vLLM's registry; called by vLLM in each of its processes."""
    _end_with_parent()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if "fastrl" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("fastrl", __name__, "FileWeightTransferEngine")


def _end_with_parent() -> None:
    """End this process, if vLLM started it, when the one that did is killed: else it would keep its memory."""
    parent = multiprocessing.parent_process()
    if parent is None:  # a server's first process, or a trainer
        return

    def watch(sentinel: int) -> None:
        wait([sentinel])
        os._exit(1)  # the main thread is in a loop of vLLM's

    threading.Thread(target=watch, args=(parent.sentinel,), name="fastrl-parent", daemon=True).start()


def __getattr__(name: str) -> Any:
    # The class has vLLM's as its base, and this module is read without vLLM too.
    if name != "FileWeightTransferEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _make_engine()


def _make_engine() -> type[Any]:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        """Nothing to agree on."""

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        """A safetensors file with weights under the names of a checkpoint."""

        path: str

    class FileWeightTransferEngine(WeightTransferEngine):
        """Loads the weights of a safetensors file into the model, one at a time."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            self.expected = {name for name, _ in self.model.named_parameters()}  # a tied one once
            if self.device.type == "cpu":
                _unpack_experts(self.model)
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # Not the base's: it synchronises an accelerator, and there may be none.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: UpdateInfo) -> None:
            loaded = self.model.load_weights(_read(update_info.path))
            missing = set() if loaded is None else self.expected - loaded
            if missing and self.model_config.quantization is None:
                # As at vLLM's own start: what is not loaded would silently keep its old values.
                raise ValueError(f"{update_info.path}: without weights for {sorted(missing)[:4]}")

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                _pack_tied(self.model)

        def shutdown(self) -> None:
            pass

    return FileWeightTransferEngine


# vLLM 0.32 packs some weights for a CPU's kernels at its start alone: an update would leave old or unpacked ones.


def _unpack_experts(model: Any) -> None:
    """Have a mixture's kernels made anew, which packs the experts."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_tied(model: Any) -> None:
    """Pack a head that shares the embedding's weight, and so is not loaded itself."""
    own = {name for name, _ in model.named_parameters()}
    for name, _ in model.named_parameters(remove_duplicate=False):
        module = model.get_submodule(name.rpartition(".")[0])
        if name not in own and getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)


def _read(path: str) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a mapping
            yield name, file.get_tensor(name)
