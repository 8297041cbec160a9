"""One micro-batch of a TRL trainer, loss and backward: as it is, with fastrl's `enable()`, and FastGRPOTrainer.

    python benchmarks/integrations/trl_loss.py [--trainer CPO] [--responses 8] [--tokens 128] [--hidden 512]
                                               [--vocab 32768]

Each runs in a process of its own, whose high-water mark beyond inputs, results and gradients is its temporary memory.
The model has one layer, so that what is measured is the head and the loss; the first line is the model alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

SMALL = "64MiB"
WAYS = ("model alone", "TRL", "enable()", "FastGRPOTrainer", f"FastGRPOTrainer, {SMALL}")


def trainer_of(way: str, options: argparse.Namespace, folder: str) -> Any:
    import datasets
    import tokenizers
    import torch
    import transformers
    import trl

    from fastrl.integrations.trl import FastGRPOTrainer

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.Qwen2ForCausalLM(config)
    model.model.embed_tokens.weight.requires_grad_(False)  # its gradient would be as large as the head's
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    if options.trainer != "GRPO":
        home = importlib.import_module(f"trl.experimental.{options.trainer.lower()}")
        return getattr(home, f"{options.trainer}Trainer")(
            model=model,
            args=getattr(home, f"{options.trainer}Config")(folder, use_cpu=True, bf16=False, report_to=[]),
            train_dataset=datasets.Dataset.from_list([{"prompt": "a", "chosen": "a", "rejected": "a"}]),
            processing_class=tokenizer,
        )
    args = trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=options.responses,
        num_generations=options.responses,
        max_completion_length=options.tokens,
        loss_type="grpo",
        beta=0.0,
    )
    fast = way.startswith("FastGRPOTrainer")
    kind = FastGRPOTrainer if fast else trl.GRPOTrainer
    return kind(
        **({"memory_budget": SMALL} if way.endswith(SMALL) else {}),
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}]),
        processing_class=tokenizer,
    )


def batch(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    g = torch.Generator().manual_seed(1)
    b, t = options.responses, options.tokens
    lengths = torch.randint(t // 2, t + 1, (b, 1), generator=g)
    return {
        "prompt_ids": torch.randint(3, options.vocab, (b, 16), generator=g),
        "prompt_mask": torch.ones(b, 16, dtype=torch.int64),
        "completion_ids": torch.randint(3, options.vocab, (b, t), generator=g),
        "completion_mask": (torch.arange(t) < lengths).long(),
        "advantages": torch.randn(b, generator=g),
        "old_per_token_logps": torch.log(torch.tensor(1 / options.vocab)) + 0.1 * torch.randn(b, t, generator=g),
        "num_items_in_batch": lengths.sum(),
    }


def pairs(options: argparse.Namespace) -> dict[str, Any]:
    """Half as many pairs as responses, with prompts of 16 tokens."""
    import torch

    g = torch.Generator().manual_seed(1)
    found = {}
    for name in ("chosen", "rejected"):
        lengths = torch.randint(options.tokens // 2, options.tokens + 1, (options.responses // 2, 1), generator=g)
        positions = torch.arange(16 + options.tokens)
        inside = positions < 16 + lengths
        ids = torch.randint(3, options.vocab, inside.shape, generator=g).where(inside, 0)
        found |= {f"{name}_input_ids": ids, f"{name}_attention_mask": inside.long()}
        found[f"{name}_labels"] = ids.where(inside & (positions >= 16), -100)
    return found


def processor_seconds(run: Any) -> float:
    """Of all threads together, which others that use the machine at the same time do not lengthen much."""
    run.restore()
    start = time.process_time()
    run.call()
    return time.process_time() - start


def measured(way: str, options: argparse.Namespace) -> dict[str, float]:
    from fastrl.bench.measure import Run, peak_temporary_bytes
    from fastrl.integrations import trl as fast_trl

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(way, options, folder)
        grpo = options.trainer == "GRPO"
        inputs, model = batch(options) if grpo else pairs(options), trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        if way == "enable()":
            fast_trl.enable()

        def call() -> Any:
            if way == "model alone":
                import torch

                names = ("prompt_ids", "completion_ids") if grpo else ("chosen_input_ids", "rejected_input_ids")
                ids = torch.cat([inputs[name] for name in names], 1 if grpo else 0)
                loss = model.model(input_ids=ids).last_hidden_state.sum()
            else:
                loss = (trainer._compute_loss if grpo else trainer.compute_loss)(model, inputs)
            loss.backward()
            return loss

        def restore() -> None:
            model.zero_grad(set_to_none=True)

        run = Run(call, restore)
        call()
        peak = peak_temporary_bytes(run, "cpu")
        return {
            "seconds": statistics.median(processor_seconds(run) for _ in range(options.repeats)),
            "bytes": float(peak or 0),
            "loss": float(call().detach()) if way != "model alone" else 0.0,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"responses": 8, "tokens": 128, "hidden": 512, "vocab": 32768, "repeats": 5}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--trainer", choices=("GRPO", "CPO", "ORPO"), default="GRPO")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(sys.stderr):
            found = measured(options.way, options)
        print(json.dumps(found))
        return
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0", "MALLOC_ARENA_MAX": "1"}
    print(f"{'':26}{'CPU ms':>10}{'MiB':>10}   loss")
    for way in WAYS if options.trainer == "GRPO" else WAYS[:3]:
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--way", way],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout)
        print(f"{way:26}{1e3 * found['seconds']:10.0f}{found['bytes'] / 2**20:10.0f}   {found['loss']:.7f}")


if __name__ == "__main__":
    main()
