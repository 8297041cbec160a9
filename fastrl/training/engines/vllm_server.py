"""vLLM's server, by its interface of tokens: /inference/v1/generate, and the routes that replace its weights.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --host 127.0.0.1 \
        --enable-scale-out --logprobs-mode processed_logprobs --weight-transfer-config '{"backend": "nccl"}'

Written against vLLM 0.32. How weights travel is the server's --weight-transfer-config, see `transfer`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fastrl import SamplingMask
from fastrl.base.errors import UserError
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.engines.completions import Drawn, check_tokenizer, checked
from fastrl.training.engines.http import HEALTH, KEY_HINT, Server
from fastrl.training.engines.protocol import Completion, EngineFailed, EngineUnavailable, Request, Sampling, Weights
from fastrl.training.engines.transfer import Control, Transfer, make_transfer
from fastrl.training.models.policy import Policy

GENERATE = "/inference/v1/generate"
HINTS: dict[tuple[str, int] | int, str] = {
    (GENERATE, 403): "start it with --enable-scale-out",
    (GENERATE, 404): "vLLM 0.32 or later has it, started with --enable-scale-out",
    ("/detokenize", 404): "start it without --skip-tokenizer-init and --tokens-only",
    401: KEY_HINT,
    404: "vLLM 0.32 or later has it, started with VLLM_SERVER_DEV_MODE=1 in its environment",
}


class VLLMServer:
    """An engine behind `rollout.url`."""

    def __init__(self, policy: Policy, settings: RolloutConfig, longest: int | None = None) -> None:
        """`longest` is the length of prompt and completion that the server must take."""
        assert settings.url is not None  # the config's check
        self.policy, self.settings, self.longest = policy, settings, longest
        self.server = Server(settings.url, "vLLM", HINTS, settings.api_key_file)
        self.transfer: Transfer | None = None  # to the server as it was when it was given
        self.given: str | None = None  # this version of the weights

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
            try:
                found = completions(answer, requests[index], sampling, self.server.url)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"rollout.url: {self.server.url} answered {GENERATE} in a form that vLLM 0.32 does not have "
                    f"({type(error).__name__}: {error})"
                ) from error
            yield index, found

    def update_weights(self, version: str, weights: Weights) -> None:
        """Stop the server's other work, replace its weights, and forget the cached states of the old ones."""
        try:
            if self.transfer is not None and self._version() != self.given:  # it was started anew, and knows none
                self._disconnect()
            if self.transfer is None:
                self.transfer = self._connect()
            self._post("/pause?mode=abort")
            self.transfer.send(version, weights)
            self._post("/resume")
            answered = self._version()
        except EngineUnavailable:
            self._disconnect()
            raise
        if answered != version:
            raise EngineFailed(
                f"vLLM at {self.server.url} has the weights {answered!r} after it was given {version!r}; another run "
                "may be using the same server, and each needs one of its own"
            )
        self.given = version

    def sleep(self) -> None:
        """Free its memory; the weights are discarded, because `wake_up` is followed by new ones."""
        self._post("/sleep?level=2&mode=abort")

    def wake_up(self) -> None:
        """Take the memory again."""
        self._post("/wake_up")

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self.server.post(path, body, self.settings.timeout)

    def _version(self) -> Any:
        """The version of the server's weights: the last that it was given."""
        return _field(self.server.get("/weight_info"), "weight_version")

    def _disconnect(self) -> None:
        if self.transfer is not None:
            self.transfer.close()
        self.transfer = self.given = None

    def _connect(self) -> Transfer:
        """Check that the server is the one that the run needs, and set up the way of its weights."""
        self.server.get(HEALTH)
        info = self.server.get("/server_info?config_format=json", timeout=60.0)  # it looks at its machine first
        config = _field(info, "vllm_config")
        model = _field(config, "model_config")
        if not isinstance(model, Mapping):
            raise UserError(f"rollout.url: {self.server.url} is no vLLM server: /server_info has no model_config")
        self._check({**model, **(_field(config, "aux_output_config") or {})})
        check_tokenizer(self.policy.tokenizer, self._decode, f"vLLM at {self.server.url}", "--model or --tokenizer")
        backend = _field(_field(config, "weight_transfer_config"), "backend")
        dtype = getattr(torch, str(model.get("dtype")).removeprefix("torch."), torch.float32)
        if _field(self.server.get("/is_sleeping"), "is_sleeping"):  # since a run that was killed
            self.wake_up()
        workers = int(_field(self.server.get("/get_world_size"), "world_size"))
        return make_transfer(backend, Control(self.server, self.settings.timeout), dtype, workers)

    def _decode(self, ids: list[int]) -> Any:
        return _field(self._post("/detokenize", {"tokens": ids}), "prompt")

    def _check(self, options: Mapping[str, Any]) -> None:
        """Raise UserError for an option of the server without which the rollout would be another one."""
        needed = {
            "logprobs_mode": ("processed_logprobs", "--logprobs-mode processed_logprobs", True),
            "return_sampling_mask": (True, "--return-sampling-mask", self.settings.truncates),
            "enable_return_routed_experts": (True, "--enable-return-routed-experts", self.settings.keep_routing),
            "enable_sleep_mode": (True, "--enable-sleep-mode", self.settings.sleep),
        }
        for name, (value, option, is_needed) in needed.items():
            if is_needed and name in options and options[name] != value:
                raise UserError(
                    f"rollout.url: vLLM at {self.server.url} runs with {name} = {options[name]!r}; start it with "
                    f"{option}"
                )
        room = options.get("max_model_len")
        if self.longest is not None and isinstance(room, int) and room < self.longest:
            raise UserError(
                f"rollout.url: vLLM at {self.server.url} takes {room} tokens of prompt and completion, and this run "
                f"has up to {self.longest}; start it with --max-model-len {self.longest}"
            )


def _field(answer: Any, name: str) -> Any:
    """A field of what should be an object; None if it is not, or lacks it."""
    return answer.get(name) if isinstance(answer, Mapping) else None


def sampling_params(request: Request, sampling: Sampling, records_supports: bool) -> dict[str, Any]:
    """The parameters of a request. All that truncates is given: a model's own generation config would fill the rest.

    With `records_supports` the server was started to record sampling masks, and refuses a temperature of 0.
    """
    greedy_by_top_k = records_supports and sampling.temperature == 0
    return {
        "n": request.n,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "temperature": 1.0 if greedy_by_top_k else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 1 if greedy_by_top_k else sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.eos_token_ids),
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        **({"logprobs": 0} if sampling.logprobs else {}),
    }


def completions(answer: Any, request: Request, sampling: Sampling, url: str) -> list[Completion]:
    """The completions in an answer of /inference/v1/generate. Raises UserError if it lacks what was asked for."""

    def wrong(problem: str) -> UserError:
        return UserError(f"rollout.url: vLLM at {url} answered {GENERATE} {problem}")

    choices = _field(answer, "choices")
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
