"""vLLM's sampling parameters, of its server and of its class LLM."""

from typing import Any

from fastrl.training.engines.protocol import Request, Sampling


def sampling_params(request: Request, sampling: Sampling, records_supports: bool) -> dict[str, Any]:
    """The parameters of a request. All that truncates is given: a model's own generation config would fill the rest.

    With `records_supports` the engine was started to record sampling masks, and refuses a temperature of 0.
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
