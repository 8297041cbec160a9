"""What the processes of `ranks` have imported, compiled and called before they are forked; one thread all the while."""

import gc
import importlib.util
import os
import threading

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():  # Triton reads its switch when a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

import fastrl  # noqa: E402

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    import interpreter

    interpreter.quicken()
if importlib.util.find_spec("transformers") is not None:
    import tqdm
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import fastrl.training.rl.train
    import fastrl.training.stages.dpo
    import fastrl.training.stages.reward_model
    import fastrl.training.stages.sft

    tqdm.tqdm.set_lock(threading.RLock())  # its own has a semaphore, which the end of a killed process leaves behind

for backend in ("torch", "cpp"):
    if fastrl.backends()[backend] != "available":
        continue
    with fastrl.use_backend(backend):
        hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
        targets = torch.arange(4)
        for objective in (fastrl.GRPO(kl_coef=0.0), fastrl.GSPO()):
            out = fastrl.linear_policy_loss(
                hidden, weight, targets, objective=objective, advantages=torch.ones(1), old_logprobs=torch.zeros(4)
            )
            out.loss.backward()

gc.collect()
gc.freeze()  # full collections of garbage in the processes need not look at what they share, nor copy it
