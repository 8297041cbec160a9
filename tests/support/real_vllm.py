"""vLLM's server in a process of its own, from the environment that `make engine` makes, and tiny models for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from digit_models import TOKENIZER
from places import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

PYTHON = ROOT / ".venv-engine" / "bin" / "python"
INSTALLED = ROOT / ".venv-engine" / ".installed"
PATIENCE = 240.0  # seconds for a server to start, of which it needs 20 to 40 on two cores
KINDS = {
    "tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "untied": {"model_type": "qwen3", "tie_word_embeddings": False},
    "experts": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}


def write_model(kind: str, directory: Path) -> Path:
    """A random model with the digits' vocabulary, in sizes that vLLM's kernels for a CPU take (head_dim 32)."""
    values: dict[str, Any] = {
        "vocab_size": 12,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "initializer_range": 0.3,  # next tokens are far from uniform
    } | KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(directory)
    return directory


class RealVLLM:
    """A server on 127.0.0.1, in a process group of its own."""

    def __init__(self, model: Path, dtype: str, log: Path) -> None:
        self.model, self.dtype, self.log = model, dtype, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin to start; `wait` returns when it is there."""
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--model", str(self.model), "--dtype", self.dtype]
        options += ["--enforce-eager", "--max-model-len", "64", "--enable-scale-out"]
        options += ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "fastrl"}']
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *options],
                env=os.environ | settings | {"HF_HUB_OFFLINE": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers. Raises RuntimeError with the end of its log if it does not."""
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        self.kill()
        raise RuntimeError(f"{self.url} did not start: {self.log.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """kill -9 of all its processes."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None
