"""vLLM's server, by its interface of tokens: /inference/v1/generate, and the routes that replace its weights.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --enable-scale-out \
        --logprobs-mode processed_logprobs --weight-transfer-config '{"backend": "nccl"}'

Written against vLLM 0.32. How weights travel is the server's --weight-transfer-config, see `transfer`.
"""

import base64
import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fastrl import SamplingMask
from fastrl.base.errors import UserError
from fastrl.training.common.policy import Policy
from fastrl.training.common.sections import RolloutConfig
from fastrl.training.engines.completions import Drawn, check_tokenizer, check_truncation, checked
from fastrl.training.engines.http import Server
from fastrl.training.engines.protocol import Completion, EngineUnavailable, Request, Sampling, Weights
from fastrl.training.engines.transfer import Transfer, make_transfer
from fastrl.training.engines.vllm_params import sampling_params

GENERATE = "/inference/v1/generate"
DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
HINTS = {
    (GENERATE, 403): "start the server with --enable-scale-out",
    (GENERATE, 404): "the server has no route for tokens; vLLM 0.32 or later has it",
    ("/server_info", 404): DEV_MODE,
    ("/pause", 404): DEV_MODE,
}


class VLLMServer:
    """An engine behind `rollout.url`."""

    def __init__(self, policy: Policy, settings: RolloutConfig, longest: int | None = None) -> None:
        """`longest` is the length of prompt and completion that the server must take."""
        assert settings.url is not None  # the config's check
        check_truncation(settings, "vLLM")
        self.policy, self.settings, self.longest = policy, settings, longest
        self.server = Server(settings.url, "vLLM", HINTS)
        self.transfer: Transfer | None = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """One call of the server for each request."""
        bodies = [
            {
                "request_id": request.id,
                "token_ids": list(request.token_ids),
                "sampling_params": sampling_params(request, sampling, self.settings.truncates),
            }
            for request in requests
        ]
        for index, answer in self.server.post_all(GENERATE, bodies, self.settings.timeout):
            yield index, completions(answer, requests[index], sampling, self.server.url)

    def update_weights(self, version: str, weights: Weights) -> None:
        """Stop the server's other work, replace its weights, and forget the cached states of the old ones."""
        if self.transfer is None:
            self.transfer = self._connect()
        try:
            self.server.post("/pause?mode=abort")
            self.transfer.send(version, weights)
            self.server.post("/resume")
            answered = self.server.get("/weight_info").get("weight_version")
        except EngineUnavailable:
            self.transfer.close()
            self.transfer = None  # a server that was started anew knows nothing of it
            raise
        if answered != version:
            raise UserError(
                f"rollout.url: vLLM at {self.server.url} has weights {answered!r} after it was given {version!r}; "
                "another run may be using the same server, and each needs one of its own"
            )

    def sleep(self) -> None:
        """Free its memory; the weights are discarded, because `wake_up` is followed by new ones."""
        self.server.post("/sleep?level=2&mode=abort")

    def wake_up(self) -> None:
        """Take the memory again."""
        self.server.post("/wake_up")

    def _connect(self) -> Transfer:
        """Check that the server is the one that the run needs, and set up the way of its weights."""
        self.server.get("/health")
        info = self.server.get("/server_info?config_format=json", timeout=60.0)
        config = info.get("vllm_config") if isinstance(info, Mapping) else None
        model = config.get("model_config") if isinstance(config, Mapping) else None
        if not isinstance(config, Mapping) or not isinstance(model, Mapping):
            raise UserError(f"rollout.url: {self.server.url} is no vLLM server: /server_info has no model_config")
        self._check(model)
        check_tokenizer(self.policy.tokenizer, self._decode, f"vLLM at {self.server.url}", "--model or --tokenizer")
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        dtype = getattr(torch, str(model.get("dtype")).removeprefix("torch."), torch.float32)
        workers = int(self.server.get("/get_world_size").get("world_size", 1))
        return make_transfer(backend, HTTPControl(self.server), dtype, self.server.host, workers)

    def _decode(self, ids: list[int]) -> Any:
        return self.server.post("/detokenize", {"tokens": ids}).get("prompt")

    def _check(self, model: Mapping[str, Any]) -> None:
        """Raise UserError for an option of the server without which the rollout would be another one."""
        needed = {
            "logprobs_mode": ("processed_logprobs", "--logprobs-mode processed_logprobs", True),
            "return_sampling_mask": (True, "--return-sampling-mask", self.settings.truncates),
            "enable_return_routed_experts": (True, "--enable-return-routed-experts", self.settings.keep_routing),
        }
        for name, (value, option, is_needed) in needed.items():
            if is_needed and name in model and model[name] != value:
                raise UserError(
                    f"rollout.url: vLLM at {self.server.url} runs with {name} = {model[name]!r}; start it with {option}"
                )
        room = model.get("max_model_len")
        if self.longest is not None and isinstance(room, int) and room < self.longest:
            raise UserError(
                f"rollout.url: vLLM at {self.server.url} takes {room} tokens of prompt and completion, and this run "
                f"has up to {self.longest}; start it with --max-model-len {self.longest}"
            )


class HTTPControl:
    """The steps of a weight update on a server; see `transfer.Control`."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.server.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.server.post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        handles = update_info.get("ipc_handles")
        if handles is not None:  # which JSON cannot hold; vLLM's own client sends them in this form
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            update_info = {**update_info, "ipc_handles": None, "ipc_handles_pickled": pickled}
        self.server.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.server.post("/finish_weight_update", {"weight_version": weight_version})


def completions(answer: Any, request: Request, sampling: Sampling, url: str) -> list[Completion]:
    """The completions in an answer of /inference/v1/generate. Raises UserError if it lacks what was asked for."""

    def wrong(problem: str) -> UserError:
        return UserError(f"rollout.url: vLLM at {url} answered {GENERATE} {problem}")

    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or len(choices) != request.n:
        count = len(choices) if isinstance(choices, list) else "no"
        raise wrong(f"with {count} completions of a prompt, expected {request.n}")
    found = []
    for choice in choices:
        content = (choice.get("logprobs") or {}).get("content")
        drawn = Drawn(
            choice.get("token_ids"),
            choice.get("finish_reason"),
            None if content is None else [(entry.get("token_id"), entry["logprob"]) for entry in content],
            partial(SamplingMask.from_vllm, choice.get("sampling_mask")),
            choice.get("routed_experts"),
            [span["version"] for span in choice.get("weight_versions") or []],
        )
        found.append(checked(drawn, request, sampling, wrong))
    return found
