"""vLLM without a server: the trainer makes a vllm.LLM, whose engine runs in child processes of the trainer.

    [rollout]
    engine = "vllm"
    engine_options = { gpu_memory_utilization = 0.5 }     # any argument of vllm.LLM

On a GPU, which the two share, weights travel by vLLM's CUDA IPC, and on a CPU by a file in shared memory. Written
against vLLM 0.32, which must be installed in the trainer's environment.
"""

import copy
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import active_children, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from fastrl import SamplingMask
from fastrl.base.errors import UserError
from fastrl.training.config.sections import ModelConfig, RolloutConfig
from fastrl.training.config.settings import import_for
from fastrl.training.engines.completions import Drawn, checked
from fastrl.training.engines.protocol import Completion, EngineLost, Request, Sampling, Weights
from fastrl.training.engines.transfer import Transfer, make_transfer, write_weights
from fastrl.training.engines.vllm_params import sampling_params
from fastrl.training.engines.weights import PolicyWeights
from fastrl.training.models.policy import Policy

#: Arguments of vllm.LLM that follow from the config, and the fields that they follow from.
OWN_OPTIONS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "skip_tokenizer_init": "rollout.stop",
    "logprobs_mode": "rollout.temperature",
    "return_sampling_mask": "rollout.top_k",
    "enable_return_routed_experts": "rollout.keep_routing",
    "enable_sleep_mode": "rollout.sleep",
}
PATIENCE = 1.0  # seconds between looks at vLLM's processes
GPU_SHARE = 0.4  # of the GPU's memory, where engine_options say nothing: the trainer needs the rest


class VLLMProcess:
    """An engine without `rollout.url`. vLLM starts when it is first given weights."""

    def __init__(self, policy: Policy, settings: RolloutConfig, model: ModelConfig, longest: int | None = None) -> None:
        """`longest` is the length of prompt and completion that the engine must take; None leaves it to vLLM."""
        self.policy, self.settings, self.model, self.longest = policy, settings, model, longest
        for name in settings.engine_options.keys() & OWN_OPTIONS.keys():
            raise UserError(f"rollout.engine_options.{name}: is set by fastrl, from {OWN_OPTIONS[name]}")
        self.on_gpu = policy.device.type == "cuda"
        if settings.sleep and not self.on_gpu:
            raise UserError(f"rollout.sleep: frees a GPU's memory, but the policy is on {policy.device}")
        if self.on_gpu and policy.device.index not in (None, 0):
            raise UserError(
                f"training.device: vLLM in this process takes the first GPU that it sees, got {policy.device}; choose "
                'one with CUDA_VISIBLE_DEVICES and device = "cuda"'
            )
        import_for('rollout.engine = "vllm" without rollout.url', "vllm")
        self.llm: Any = None
        self.processes: list[BaseProcess] = []  # vLLM's, which it waits for
        self.transfer: Transfer | None = None
        self.folder: tempfile.TemporaryDirectory[str] | None = None  # with the model, if it has no other place

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """One call of vLLM for all requests, which come when the last one is there."""
        from vllm import SamplingParams

        truncates = self.settings.truncates
        prompts = [{"prompt_token_ids": list(request.token_ids)} for request in requests]

        def draw() -> Any:
            params = [SamplingParams(**sampling_params(request, sampling, truncates)) for request in requests]
            return self.llm.generate(prompts, params, use_tqdm=False)

        answers = self._ask("draw completions", draw, pickles=False)
        if len(answers) != len(requests):
            raise _wrong(f"with {len(answers)} answers to {len(requests)} prompts")
        for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            yield index, completions(answer, request, sampling)

    def update_weights(self, version: str, weights: Weights) -> None:
        """Replace vLLM's weights, and forget the cached states of the old ones. Starts vLLM if need be."""
        if self.llm is None:
            self._start()
        transfer = self.transfer
        assert transfer is not None

        def update() -> None:
            transfer.send(version, weights)
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("its prefix cache cannot be emptied, because something else is being drawn")

        self._ask("take the policy's weights", update)

    def sleep(self) -> None:
        """Free its memory; the weights are discarded, because `wake_up` is followed by new ones."""
        if self.llm is not None:
            self._ask("sleep", partial(self.llm.sleep, level=2))

    def wake_up(self) -> None:
        """Take the memory again."""
        if self.llm is not None:
            self._ask("wake up", self.llm.wake_up)

    def _start(self) -> None:
        """Make the LLM. Raises UserError for what vLLM does not accept."""
        import vllm

        if self.on_gpu:
            torch.cuda.empty_cache()
        try:
            options = self._options()
            others = active_children()
            with self._pickles():
                self.llm = self._run(partial(vllm.LLM, **options))
            self.processes = [process for process in active_children() if process not in others]
        except UserError:
            raise
        except Exception as error:  # whatever the parts of vLLM raise
            raise UserError(
                f"rollout.engine: vLLM cannot be started: {_line(error)}; its messages above may say more, and "
                "rollout.engine_options are its arguments"
            ) from error
        finally:
            if self.folder is not None:  # the tokenizer may be read later
                (Path(self.folder.name) / "model.safetensors").unlink(missing_ok=True)
        limit = self.llm.model_config.max_model_len
        if self.longest is not None and limit < self.longest:
            raise UserError(
                f"rollout.engine_options.max_model_len: this run has up to {self.longest} tokens of prompt and "
                f"completion, got {limit}"
            )
        backend, dtype = options["weight_transfer_config"]["backend"], self.llm.model_config.dtype
        make = partial(make_transfer, backend, LLMControl(self.llm), dtype, None, self.llm.get_world_size())
        self.transfer = self._ask("set up its transfer of weights", make)

    @contextmanager
    def _pickles(self) -> Iterator[None]:
        """On a GPU, allow vLLM the pickles in which CUDA IPC's handles go to its processes; it refuses them otherwise.

        Its processes inherit this when they are started, and keep it: their answers have another form then. The trainer
        needs it for those calls, and is without it else, as are the other processes that it starts.
        """
        name = "VLLM_ALLOW_INSECURE_SERIALIZATION"
        before = os.environ.get(name)
        if self.on_gpu:
            os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before

    def _options(self) -> dict[str, Any]:
        """The arguments of vllm.LLM."""
        settings, source = self.settings, self._source()
        return {
            "model": source,
            "tokenizer": self.model.tokenizer if self.model.tokenizer and self.folder is None else source,
            "trust_remote_code": self.model.trust_remote_code,
            "dtype": str(self.policy.dtype).removeprefix("torch."),
            "generation_config": "vllm",  # not the model's, which may penalise repetitions
            "logprobs_mode": "processed_logprobs",
            "return_sampling_mask": settings.truncates,
            "enable_return_routed_experts": settings.keep_routing,
            "enable_sleep_mode": settings.sleep,
            "weight_transfer_config": {"backend": "ipc" if self.on_gpu else "fastrl"},
            **({"gpu_memory_utilization": GPU_SHARE} if self.on_gpu else {}),
            **({} if self.longest is None else {"max_model_len": self.longest}),
            **settings.engine_options,
        }

    def _source(self) -> str:
        """Where vLLM finds the model: model.path, or a copy of the policy if that holds no whole model."""
        path = self.model.path
        if path is not None and not (Path(path) / "adapter_config.json").exists():
            return path
        self.folder = tempfile.TemporaryDirectory(prefix="fastrl-model-")
        model: Any = self.policy.model
        model = model.get_base_model() if self.policy.has_adapters else model
        config = copy.deepcopy(model.config)
        config.architectures, config.dtype = [type(model).__name__], self.policy.dtype
        config.save_pretrained(self.folder.name)
        self.policy.tokenizer.save_pretrained(self.folder.name)
        write_weights(Path(self.folder.name), PolicyWeights(self.policy, self.policy.dtype))
        return self.folder.name

    def _ask(self, what: str, call: Callable[[], Any], pickles: bool = True) -> Any:
        """The value of a call of vLLM, its exceptions as errors of ours. None is worth a second try.

        Drawing needs no `pickles`, and may go on in another thread while the trainer starts processes.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            with self._pickles() if pickles else nullcontext():
                return self._run(call)
        except UserError:
            raise
        except EngineDeadError as error:
            raise EngineLost(
                "rollout.engine: vLLM's process has died; its messages above may say why. If memory ran out, lower "
                "rollout.engine_options.gpu_memory_utilization (on a CPU kv_cache_memory_bytes), or max_num_seqs"
            ) from error
        except Exception as error:  # whatever the parts of vLLM raise
            raise UserError(f"rollout.engine: vLLM cannot {what}: {_line(error)}") from error

    def _run(self, call: Callable[[], Any]) -> Any:
        """The value of a call in a thread of its own: vLLM waits forever for what it asked a process that was killed.

        Nor can Ctrl-C be heard in that thread, or by a process that it starts: it is the trainer's, which ends its
        step first.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        answer: Future[Any] = Future()

        def work() -> None:
            resource_tracker.ensure_running()  # whose start would unblock the signal
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        Thread(target=work, name="fastrl-vllm", daemon=True).start()
        while not answer.done() and all(process.is_alive() for process in self.processes):
            wait([answer], timeout=PATIENCE)
        if not answer.done():
            raise EngineDeadError
        return answer.result()


class LLMControl:
    """The steps of a weight update of a vllm.LLM; see `transfer.Control`."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _wrong(problem: str) -> UserError:
    return UserError(f"rollout.engine: vLLM answered {problem}")


def completions(answer: Any, request: Request, sampling: Sampling) -> list[Completion]:
    """The completions in a RequestOutput of vLLM. Raises UserError if it lacks what was asked for."""
    if len(answer.outputs) != request.n:
        raise _wrong(f"with {len(answer.outputs)} completions of a prompt, expected {request.n}")
    found = []
    for output in sorted(answer.outputs, key=lambda output: output.index):
        ids = list(output.token_ids)
        logprobs = None
        if output.logprobs is not None and len(output.logprobs) == len(ids):
            pairs = zip(ids, output.logprobs, strict=True)
            logprobs = [(token, entry[token].logprob) for token, entry in pairs if token in entry]
        drawn = Drawn(
            ids,
            output.finish_reason,
            logprobs,
            partial(SamplingMask.from_vllm, output.sampling_mask),
            output.routed_experts,
            [span.version for span in output.weight_versions or []],
        )
        found.append(checked(drawn, request, sampling, _wrong))
    return found
