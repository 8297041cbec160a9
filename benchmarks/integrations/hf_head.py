"""A Hugging Face model's own loss beside the one of its fused head: time, and peak temporary memory.

    python benchmarks/integrations/hf_head.py       # 8 sequences of 128 tokens, H 256, V 32768, two layers, float32

Forward and backward of the whole model, from labels to the gradients of all weights.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastrl.bench.measure import Outcome, Run, peak_temporary_bytes, time_runs
from fastrl.integrations.transformers import compute_loss_func, fused_lm_head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8x128x256x32768", help="sequences x tokens x hidden x vocabulary")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    batch, length, hidden, vocab = map(int, options.shape.split("x"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    model = fused_lm_head(LlamaForCausalLM(config)).train()
    ids = torch.randint(vocab, (batch, length))
    parameters = dict(model.named_parameters())

    def run(forward: Callable[[], Tensor]) -> Run:
        def call() -> Outcome:
            loss = forward()
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            return Outcome(loss.detach(), None, None, dict(zip(parameters, gradients, strict=True)))

        return Run(call)

    loss_func = compute_loss_func(model)
    contenders = {
        "transformers": run(lambda: model(input_ids=ids, labels=ids).loss),
        "return_token_stats=True": run(lambda: model(input_ids=ids, labels=ids, return_token_stats=True).loss),
        "compute_loss_func": run(lambda: loss_func(model(input_ids=ids), ids)),
    }
    print(
        f"torch {torch.__version__}, transformers {version('transformers')}, {options.shape}, float32, "
        f"{torch.get_num_threads()} threads"
    )
    expected = contenders["transformers"].call()
    for name, contender in contenders.items():
        milliseconds = 1000 * statistics.median(time_runs(contender, "cpu", options.repeats))
        peak = (peak_temporary_bytes(contender, "cpu") or 0) / 2**20
        found = contender.call()
        error = max(float((found.gradients[k] - g).abs().max() / g.abs().max()) for k, g in expected.gradients.items())
        print(f"{name:24} {milliseconds:7.0f} ms {peak:7.0f} MiB  gradients {error:.1e}")


if __name__ == "__main__":
    main()
