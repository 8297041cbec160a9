"""An engine of one's own: SGLang's server, by its native HTTP API, /generate with token ids, and weights from a file.

    python -m sglang.launch_server --model-path MODEL --host 127.0.0.1
        [--enable-memory-saver]             # for rollout.sleep
        [--enable-return-routed-experts]    # for rollout.keep_routing

    [rollout]
    engine = "sglang.py:make"
    url = "http://127.0.0.1:30000"

Written against the public sources of SGLang 0.5 (August 2026) and tested against the shapes of their answers; no
SGLang was run. What they say, and what follows:

- `output_token_logprobs` are those after the temperature and before top-k, top-p and min-p, so where one of these
  truncates, `output_token_sampling_logprobs` are taken, which `return_sampling_mask` brings. SGLang wants a finite
  top_k for it. The server must not run with SGLANG_RETURN_ORIGINAL_LOGPROB, which leaves out the temperature.
- `sampling_seed` counts under --enable-deterministic-inference only, where completions with the same seed are the
  same: each completion is a request of its own.
- /update_weights_from_disk reads the safetensors files of a directory and gives them a version.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy

from fastrl import SamplingMask
from fastrl.base.errors import UserError
from fastrl.models.routing import routers_of
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.engines.completions import Drawn, check_tokenizer, checked
from fastrl.training.engines.http import KEY_HINT, Server
from fastrl.training.engines.protocol import Completion, EngineUnavailable, Request, Sampling, Weights
from fastrl.training.engines.transfer import weights_file
from fastrl.training.models.policy import Policy

GENERATE = "/generate"
HINTS: dict[tuple[str, int] | int, str] = {
    ("/server_info", 404): "SGLang's later 0.5 versions have it",
    ("/detokenize", 404): "SGLang's later 0.5 versions have it",
    401: KEY_HINT,
}


def make(policy: Policy, rollout: RolloutConfig) -> "SGLangServer":
    """The engine of a run."""
    return SGLangServer(policy, rollout)


class SGLangServer:
    """An engine behind `rollout.url`."""

    def __init__(self, policy: Policy, settings: RolloutConfig) -> None:
        if settings.url is None:
            raise UserError("rollout.url: required for SGLang's server, but not given")
        if settings.truncates and settings.top_k == 0:
            raise UserError("rollout.top_k: SGLang records what top_p and min_p leave only with it; set it, or none")
        self.policy, self.settings = policy, settings
        self.server = Server(settings.url, "SGLang", HINTS, settings.api_key_file)
        self.is_checked = False

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """One call of the server for each completion; a request is returned when all of its completions are there."""
        places = [(index, number) for index, request in enumerate(requests) for number in range(request.n)]
        bodies = [_body(requests[index], number, sampling) for index, number in places]
        found: list[dict[int, Completion]] = [{} for _ in requests]
        for place, answer in self.server.post_all(GENERATE, bodies, self.settings.timeout):
            index, number = places[place]
            try:
                found[index][number] = self._completion(answer, requests[index], sampling)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"rollout.url: {self.server.url} answered {GENERATE} in a form that SGLang 0.5 does not have "
                    f"({type(error).__name__}: {error})"
                ) from error
            if len(found[index]) == requests[index].n:
                yield index, [completion for _, completion in sorted(found[index].items())]

    def update_weights(self, version: str, weights: Weights) -> None:
        """Stop the server's other work, replace its weights, and forget the cached states of the old ones."""
        try:
            if not self.is_checked:
                self._check()
            self._post("/pause_generation", {"mode": "abort"})
            with weights_file(weights.cast(self.policy.dtype), self.server.host) as path:
                body = {"model_path": str(path.parent), "weight_version": version}
                self._post("/update_weights_from_disk", body)
            self._post("/continue_generation")
        except EngineUnavailable:
            self.is_checked = False  # another one may be started in its place
            raise

    def sleep(self) -> None:
        """Free its memory. It has nothing to do, because all requests of a step have come."""
        self._post("/release_memory_occupation")

    def wake_up(self) -> None:
        """Take the memory again."""
        self._post("/resume_memory_occupation")

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self.server.post(path, body, self.settings.timeout)

    def _check(self) -> None:
        """Raise UserError unless the server is the one that the run needs."""
        self.server.get("/health")
        options = self.server.get("/server_info")
        if not isinstance(options, Mapping) or "model_path" not in options:
            raise UserError(f"rollout.url: {self.server.url} is no SGLang server: /server_info has no model_path")
        needed = {
            "enable_memory_saver": ("--enable-memory-saver", self.settings.sleep),
            "enable_return_routed_experts": ("--enable-return-routed-experts", self.settings.keep_routing),
        }
        for name, (option, is_needed) in needed.items():
            if is_needed and not options.get(name):
                raise UserError(f"rollout.url: SGLang at {self.server.url} runs without {name}; start it with {option}")
        check_tokenizer(
            self.policy.tokenizer, self._decode, f"SGLang at {self.server.url}", "--model-path or --tokenizer-path"
        )
        self.is_checked = True

    def _decode(self, ids: list[int]) -> Any:
        answer = self._post("/detokenize", {"tokens": ids, "skip_special_tokens": False})
        return answer.get("text") if isinstance(answer, Mapping) else None

    def _completion(self, answer: Any, request: Request, sampling: Sampling) -> Completion:
        """The completion in an answer of /generate. Raises UserError if it lacks what was asked for."""

        def wrong(problem: str) -> UserError:
            return UserError(f"rollout.url: SGLang at {self.server.url} answered {GENERATE} {problem}")

        meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
        if not isinstance(meta, Mapping):
            raise wrong("without meta_info")
        version = meta.get("weight_version")
        reason, experts = meta.get("finish_reason"), meta.get("routed_experts")
        drawn = Drawn(
            answer.get("output_ids"),
            reason.get("type") if isinstance(reason, Mapping) else reason,
            _logprobs(answer, meta, sampling),
            partial(SamplingMask.from_lists, meta.get("output_token_sampling_mask")),
            None if experts is None else self._experts(experts, wrong),
            [] if version is None else [version],
        )
        return checked(drawn, request, sampling, wrong)

    def _experts(self, text: Any, wrong: Any) -> numpy.ndarray[Any, Any]:
        """The routed experts (tokens - 1, layers, experts per token) from the base64 of their int32 values."""
        (router, adapter), *_ = routers = routers_of(self.policy.model, None)
        chosen = adapter.sizes(router)[1]
        layers = self.policy.model.config.get_text_config().num_hidden_layers
        try:
            values = numpy.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
            return values.reshape(-1, layers, chosen)
        except (binascii.Error, TypeError, ValueError) as error:
            raise wrong(
                f"with routed experts that are not base64 of {layers} layers ({len(routers)} routers) with "
                f"{chosen} experts for each token ({error})"
            ) from error


def _body(request: Request, number: int, sampling: Sampling) -> dict[str, Any]:
    """The body for one of a request's completions. All that truncates is given, over the model's own defaults."""
    return {
        "input_ids": list(request.token_ids),
        "sampling_params": {
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(sampling.eos_token_ids),
            "stop": list(sampling.stop),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "sampling_seed": (request.seed + number) % 2**31,
        },
        "return_logprob": sampling.logprobs,
        **({"return_sampling_mask": True} if sampling.supports else {}),
        **({"return_routed_experts": True} if sampling.routing else {}),
    }


def _logprobs(answer: Mapping[str, Any], meta: Mapping[str, Any], sampling: Sampling) -> list[tuple[Any, float]] | None:
    """Each token with its log-probability under the distribution that it was drawn from, if they are there."""
    full = meta.get("output_token_logprobs")
    if full is None or not sampling.supports:
        return None if full is None else [(token, value) for value, token, *_ in full]
    over_supports = meta.get("output_token_sampling_logprobs")
    if over_supports is None or len(over_supports) != len(full):
        return None
    return [(token, value) for (_, token, *_), value in zip(full, over_supports, strict=True)]
