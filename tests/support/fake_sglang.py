"""A small HTTP server that plays SGLang 0.5: its routes, in the shapes of its answers, with completions of its own."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch
from digit_models import TOKENIZER
from safetensors.torch import load_file
from transformers import AutoTokenizer

LOGPROBS, SAMPLING_LOGPROBS = (-1.0, -2.0, -0.5), (-0.5, -1.0, -0.25)


@dataclass
class FakeSGLang:
    """A server on 127.0.0.1 whose completions are always [seed % 9 + 1, 5, EOS]."""

    options: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)  # other values for meta_info; None leaves a field out
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)  # status and JSON, by route
    calls: list[tuple[str, Any]] = field(default_factory=list)
    version: str = "default"
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    key: str | None = None  # that --api-key names

    def __post_init__(self) -> None:
        fake, self.lock, self.tokenizer = self, Lock(), AutoTokenizer.from_pretrained(TOKENIZER)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(None)

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body: Any) -> None:
                with fake.lock:
                    fake.calls.append((self.path, body))
                    status, found = fake.answers.get(self.path) or (200, fake.make(self.path, body))
                    if fake.key and self.path != "/health" and self.headers["Authorization"] != f"Bearer {fake.key}":
                        status, found = 401, {"error": "Unauthorized"}
                text = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                with suppress(ConnectionError):  # what is open after an error is dropped
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, *values: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def make(self, path: str, body: Any) -> Any:
        match path:
            case "/server_info":
                flags = {"enable_memory_saver": False, "enable_return_routed_experts": False}
                return {"model_path": "model", "context_length": None, "version": "0.5.9"} | flags | self.options
            case "/detokenize":
                return {"text": self.tokenizer.decode(body["tokens"])}
            case "/update_weights_from_disk":
                self.weights = load_file(Path(body["model_path"]) / "model.safetensors")
                self.version = body["weight_version"]
                return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
            case "/generate":
                return self.generate(body)
        return {"status": "ok"}

    def generate(self, body: Any) -> Any:
        ids = [body["sampling_params"]["sampling_seed"] % 9 + 1, 5, 0]
        meta: dict[str, Any] = {
            "id": "0f3c",
            "finish_reason": {"type": "stop", "matched": 0},
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.version,
            "completion_tokens": len(ids),
        }
        if body["return_logprob"]:
            meta["output_token_logprobs"] = [[p, i, None] for p, i in zip(LOGPROBS, ids, strict=True)]
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [[i, 11] for i in ids]
            meta["output_token_sampling_logprobs"] = list(SAMPLING_LOGPROBS)
        meta |= self.meta
        meta = {name: value for name, value in meta.items() if value is not None}
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def routes(self) -> list[str]:
        return [path for path, _ in self.calls]
