"""A small HTTP server that plays vLLM 0.32: its routes, in the shapes and with the messages that a real one answers.

It draws with transformers and the weights that it was last given, so a trainer's log-probabilities equal its own up to
rounding. `test_vllm.py` holds its answers to a real server's.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import urlsplit

import numpy
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

GENERATE = "/inference/v1/generate"
RESET = object()  # close the connection without an answer


@dataclass(frozen=True)
class Reply:
    """An answer other than 200 with JSON."""

    status: int = 200
    body: Any = b""  # bytes, or what JSON holds
    length: int | None = None  # that the header promises, if it is not the body's


def failure(message: str, status: int = 500) -> Reply:
    """What vLLM answers for an exception."""
    kind = "InternalServerError" if status == 500 else "BadRequestError"
    return Reply(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})


def worker_failure(message: str) -> Reply:
    """The same for an exception in a worker."""
    return failure(
        f"Call to collective_rpc method failed: Worker failed with error '{message}', please check the stack trace "
        "above for the root cause"
    )


@dataclass
class FakeVLLM:
    """A server on 127.0.0.1. `options` are fields of its config, by the names of vLLM's own."""

    config: str  # a model's config.json
    tokenizer: str
    options: dict[str, Any] = field(default_factory=dict)
    backend: str | None = "fastrl"
    ignores_weights: bool = False
    calls: list[tuple[str, Any]] = field(default_factory=list)  # route and body, in the order of their arrival
    # By route: what to do instead of answering, given what makes the answer (its `args` are route and body). The next
    # of an iterator, or always.
    instead: dict[str, Callable[..., Any] | Iterator[Callable[..., Any]]] = field(default_factory=dict)
    port: int = 0
    key: str | None = None  # that --api-key names

    def __post_init__(self) -> None:
        self.lock, self.gone = Lock(), Event()
        self.text = _tokenizer(self.tokenizer)
        self.start()

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, with the weights of a checkpoint that is not the policy's."""
        self.model: Any = copy.deepcopy(_model(Path(self.config).read_text(), self.config))
        self.version, self.paused, self.updating, self.sleeping = "default", False, False, False
        self.connections: set[socket.socket] = set()
        self.gone.clear()
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Die: all connections are reset, and new ones refused."""
        if self.gone.is_set():
            return
        self.gone.set()
        self.http.shutdown()
        self.http.server_close()
        for connection in list(self.connections):
            with suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        """Die, and come back as it began."""
        self.stop()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def routes(self) -> list[str]:
        """The routes that were asked for, in order."""
        return [route for route, _ in self.calls]

    def asked(self) -> list[dict[str, Any]]:
        """The requests for completions, in order."""
        return [body for route, body in self.calls if route == GENERATE]

    # --- HTTP -------------------------------------------------------------------------------------------------------

    def _handler(fake) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                fake.connections.add(self.connection)

            def finish(self) -> None:
                fake.connections.discard(self.connection)
                with suppress(OSError):  # the other side has gone
                    super().finish()

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def _answer(self, body: Any) -> None:
                parts = urlsplit(self.path)
                with fake.lock:
                    fake.calls.append((parts.path, body))
                    action = fake.instead.get(parts.path)
                    if isinstance(action, Iterator):
                        action = next(action, None)

                make = partial(fake.answer, parts.path, body)
                if fake.key and parts.path == GENERATE and self.headers["Authorization"] != f"Bearer {fake.key}":
                    action = always(Reply(401, {"error": "Unauthorized"}))
                reply = make() if action is None else action(make)
                if reply is RESET or fake.gone.is_set():
                    self.close_connection = True
                    return
                if not isinstance(reply, Reply):
                    reply = Reply(200, reply)
                content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                with suppress(OSError):  # the other side has gone
                    self.send_response(reply.status)
                    self.send_header("content-length", str(reply.length or len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                self.close_connection |= reply.length is not None

        return Handler

    # --- vLLM -------------------------------------------------------------------------------------------------------

    def answer(self, route: str, body: Any) -> Any:
        """What vLLM answers."""
        match route:
            case "/health":
                return Reply()
            case "/server_info":
                return {"vllm_config": self._config(), "vllm_env": {}, "system_env": {}}
            case "/get_world_size":
                return {"world_size": 1}
            case "/is_sleeping":
                return {"is_sleeping": self.sleeping}
            case "/weight_info":
                return {"weight_version": self.version}
            case "/detokenize":
                return {"prompt": self.text.decode(body["tokens"])}
            case "/pause":
                self.paused = True
                return {"status": "paused"}
            case "/resume":
                self.paused = False
                return {"status": "resumed"}
            case "/sleep":
                self.sleeping = self.paused = True
                return {"status": "sleeping", "level": 2}
            case "/wake_up":
                self.sleeping = self.paused = False
                return {"status": "awake", "tags": None}
            case "/init_weight_transfer_engine":
                return {"message": "Weight transfer initialized"}
            case "/start_weight_update":
                if self.updating:
                    return worker_failure(
                        "start_weight_update called while a weight update is already active. Call finish_weight_update "
                        "first."
                    )
                self.updating = True
                return {"message": "Weight update started"}
            case "/update_weights":
                return self._update(body["update_info"]["path"])
            case "/finish_weight_update":
                if not self.updating:
                    return worker_failure("finish_weight_update called without a matching start_weight_update.")
                self.updating = False
                self.version = body["weight_version"] or self.version
                return {"message": "Weight update finished"}
            case "/inference/v1/generate":
                return self._generate(body)
        return Reply(404, {"detail": "Not Found"})

    def _config(self) -> dict[str, Any]:
        model = {
            "dtype": "torch.float32",
            "max_model_len": 64,
            "logprobs_mode": "processed_logprobs",
            "return_sampling_mask": False,
            "enable_sleep_mode": False,
        }
        auxiliary = {"enable_return_routed_experts": False}
        for name, value in self.options.items():
            (auxiliary if name in auxiliary else model)[name] = value
        transfer = None if self.backend is None else {"backend": self.backend}
        return {"model_config": model, "aux_output_config": auxiliary, "weight_transfer_config": transfer}

    def _update(self, path: str) -> Any:
        if not self.updating:
            return worker_failure("start_weight_update must be called before update_weights.")
        if self.sleeping:
            return worker_failure("its memory is not there")
        if not self.ignores_weights:
            with self.lock:
                missing = self.model.load_state_dict(load_file(path), strict=False).missing_keys
            assert set(missing) <= {"lm_head.weight"}, missing  # which may be tied
        return {"message": "Weights updated"}

    @torch.no_grad()
    def _generate(self, body: dict[str, Any]) -> Any:
        if self.paused or self.sleeping:
            return failure("the engine is paused")
        params, prompt = body["sampling_params"], body["token_ids"]
        with self.lock:
            rows, scores = self._draw(prompt, params)
        choices = [
            {"index": index, **self._choice(len(prompt), params, ids, row)}
            for index, (ids, row) in enumerate(zip(rows, scores, strict=True))
        ]
        return {
            "request_id": f"generate-tokens-{body['request_id']}",
            "model": "fake",
            "created": 1795457017,
            "usage": {},
            "choices": choices,
        }

    def _draw(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[list[int]], torch.Tensor]:
        """n rows of max_tokens ids, and the log-probabilities that they were drawn from, (n, max_tokens, V)."""
        generators = [torch.Generator().manual_seed(params["seed"] + index) for index in range(params["n"])]
        ids = torch.tensor([prompt] * params["n"])
        scores = []
        for _ in range(params["max_tokens"]):
            logits = self.model(ids).logits[:, -1].float()
            if params["temperature"]:
                logits = logits / params["temperature"]
            if params["top_k"]:
                least = logits.topk(params["top_k"]).values[:, -1:]
                logits = logits.where(logits >= least, -torch.inf)
            scores.append(logits.log_softmax(1))
            if params["temperature"]:
                rows = zip(scores[-1].exp(), generators, strict=True)
                drawn = torch.stack([torch.multinomial(row, 1, generator=generator) for row, generator in rows])
            else:
                drawn = logits.argmax(1, keepdim=True)
            ids = torch.cat([ids, drawn], 1)
        return ids[:, len(prompt) :].tolist(), torch.stack(scores, 1)

    def _choice(self, prompt: int, params: dict[str, Any], ids: list[int], scores: torch.Tensor) -> dict[str, Any]:
        """A completion in the answer's form, up to the token that ends it. `prompt` is the number of its tokens."""
        reason = "length"
        for count, token in enumerate(ids, 1):
            text = self.text.decode(ids[:count])
            if token in params["stop_token_ids"] or any(stop in text for stop in params["stop"]):
                ids, reason = ids[:count], "stop"
                break
        content, masks = [], []
        for token, row in zip(ids, scores, strict=False):
            entry = {"token_id": token, "logprob": float(row[token]), "rank": 1}
            content.append({**entry, "top_logprobs": [entry]})
            masks.append(row.isfinite().nonzero()[:, 0].tolist())
        experts = numpy.zeros((prompt + len(ids) - 1, 1, 2), dtype=numpy.uint8)
        experts[..., 1] = 1
        return {
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": ids,
            "routed_experts": _npy(experts) if self.options.get("enable_return_routed_experts") else None,
            "sampling_mask": masks if self.options.get("return_sampling_mask") else None,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
            "logprobs": {"content": content} if "logprobs" in params else None,
        }


@cache
def _model(text: str, path: str) -> Any:
    """A random one; `text` is the config's, which tells two of the same path apart."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).eval()


@cache
def _tokenizer(path: str) -> Any:
    return AutoTokenizer.from_pretrained(path)


def _npy(array: Any) -> str:
    file = io.BytesIO()
    numpy.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def first(*actions: Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    """These, one at each call (None: as usual), and then as usual."""
    return iter([action or (lambda make: make()) for action in actions])


def changed(**fields: Any) -> Callable[..., Any]:
    """An answer whose choices have these values instead: given, or a function of the choice."""

    def change(make: Callable[[], Any]) -> Any:
        answer = make()
        for choice in answer["choices"]:
            choice.update({name: value(choice) if callable(value) else value for name, value in fields.items()})
        return answer

    return change


def always(reply: Any) -> Callable[..., Any]:
    """The same answer at each call."""
    return lambda make: reply
