"""TRL's DPO, KTO, CPO and ORPO trainers with and without fastrl: ten steps of each loss type, and of their options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest
import torch
from allocated import allocations
from tiny_models import tiny_model
from transformers import T5Config, T5ForConditionalGeneration
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl_cases import CLOSE, PROMPTS, assert_same_history, make_trainer

from fastrl.integrations import trl as fast_trl
from fastrl.integrations.trl import patches, preferences

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 10
COMPLETIONS = (" w7 w3", " w11 w12 w13", " w20", " w31 w30 w33 w37")
PAIRS = [
    prompt | {"chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in zip(PROMPTS, COMPLETIONS, COMPLETIONS[::-1], strict=True)
]
LABELLED = [
    prompt | {"completion": completion, "label": label}
    for prompt, completion, label in zip(PROMPTS, COMPLETIONS, (True, False, True, False), strict=True)
]
EVALUATED = {"eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 4}

DPO_TYPES = """
    sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop sft
    sigmoid_norm
""".split()  # noqa: SIM905
#: case -> trainer and options. The first of each trainer runs in the quick suite; DPO's has all loss types at once.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DPO, all loss types": (
        "DPO",
        {
            "loss_type": DPO_TYPES,
            "loss_weights": [0.2 + 0.1 * i for i in range(len(DPO_TYPES))],
            "label_smoothing": 0.1,
        },
    ),
    "KTO, kto": ("KTO", {"loss_type": "kto", "desirable_weight": 1.5}),
    "CPO, sigmoid": ("CPO", {"loss_type": "sigmoid", "label_smoothing": 0.1}),
    "ORPO": ("ORPO", {}),
}
QUICK = tuple(CASES)
CASES |= {f"DPO, {name}": ("DPO", {"loss_type": [name], "label_smoothing": 0.1}) for name in DPO_TYPES}
CASES |= {
    "DPO, forward_kl": ("DPO", {"f_divergence_type": "forward_kl"}),
    "DPO, js_divergence": ("DPO", {"f_divergence_type": "js_divergence", "loss_type": ["hinge"]}),
    "DPO, alpha_divergence": ("DPO", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3}),
    "DPO, ld_alpha": ("DPO", {"ld_alpha": 0.3}),
    "DPO, use_weighting": ("DPO", {"use_weighting": True, "loss_type": ["sigmoid", "ipo"]}),
    "DPO, precomputed reference": ("DPO", {"precompute_ref_log_probs": True}),
    "DPO, synchronized reference": ("DPO", {"sync_ref_model": True, "ref_model_sync_steps": 3}),
    "DPO, evaluated": ("DPO", {"eval_dataset": PAIRS, **EVALUATED}),
    "KTO, apo_zero_unpaired": ("KTO", {"loss_type": "apo_zero_unpaired"}),
    "KTO, precomputed reference": ("KTO", {"precompute_ref_log_probs": True}),
    "KTO, evaluated": ("KTO", {"eval_dataset": LABELLED, **EVALUATED}),
    "CPO, hinge": ("CPO", {"loss_type": "hinge"}),
    "CPO, ipo": ("CPO", {"loss_type": "ipo"}),
    "CPO, simpo": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "CPO, simpo and cross-entropy": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.5}),
    "CPO, alphapo": ("CPO", {"loss_type": "alphapo", "alpha": 0.2}),
    "CPO, accumulated": ("CPO", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "CPO, evaluated": ("CPO", {"eval_dataset": PAIRS, **EVALUATED}),
    "ORPO, evaluated": ("ORPO", {"eval_dataset": PAIRS, **EVALUATED}),
}
#: Heads with a scale and a softcap, and a mixture whose auxiliary loss is part of the loss.
MODELS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5},
    "gemma2": {"final_logit_softcapping": 1.5, "head_dim": 8},
    "phi": {},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
}


@pytest.fixture
def calls(watch: Callable[..., list[Any]]) -> dict[str, list[Any]]:
    """One entry per call of fastrl: by the head of DPO and KTO, or by the forward of CPO and ORPO."""
    head, forward = watch(patches, "linear_token_logprobs"), watch(preferences, "linear_token_logprobs")
    return {"DPO": head, "KTO": head, "CPO": forward, "ORPO": forward}


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    """Precomputed log-probabilities are computed by each trainer, and not read from the other's file."""
    datasets.disable_caching()
    yield
    datasets.enable_caching()


def model_of(kind: str) -> Any:
    """A model whose log-probabilities differ from token to token."""
    torch.manual_seed(0)
    return tiny_model(kind, vocab_size=64, initializer_range=0.3, **MODELS[kind])


def train(base: str, path: str, fast: bool, **options: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What a trainer logged in its steps, and by how much each of its weights moved.

    Plain gradient descent: with Adam, a gradient that is 0 up to rounding moves a weight as far as any other.
    """
    torch.manual_seed(5)  # an adapter's own first weights
    if "kind" in options:
        options["model"] = model_of(options.pop("kind"))
    settings = {"max_steps": STEPS, "optim": "sgd", "learning_rate": 0.1, "gradient_accumulation_steps": 1}
    rows = LABELLED if base == "KTO" else PAIRS
    if "eval_dataset" in options:
        options["eval_dataset"] = datasets.Dataset.from_list(options["eval_dataset"])
    if fast:
        fast_trl.enable(memory_budget="32MiB")
    try:
        trainer = make_trainer(base, path, rows, **(settings | options))
        before = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        trainer.train()
    finally:
        fast_trl.disable()
    after = dict(trainer.model.named_parameters())
    return trainer.state.log_history, {name: (after[name] - x).detach() for name, x in before.items()}


def compare(calls: dict[str, list[Any]], base: str, path: str, close: float = CLOSE["rel"], **options: Any) -> None:
    """Both trainers log the same numbers, and move every weight to the same place."""
    expected, moved = train(base, path, False, **options)
    assert not calls[base]
    found, ours = train(base, path, True, **options)
    assert len(calls[base]) >= STEPS
    assert_same_history(found, expected)
    # A step rounds a weight, of size 1 at most but for a few, by half of eps.
    rounding = STEPS * torch.finfo(torch.float32).eps
    furthest = max(x.abs().max() for x in moved.values())
    assert furthest > 1e-3
    for name, x in moved.items():
        assert (ours[name] - x).abs().max() <= close * furthest + rounding, name


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in QUICK else [pytest.mark.slow]) for x in CASES])
def test_ten_steps_are_the_same(path: str, calls: dict[str, list[Any]], name: str) -> None:
    base, options = CASES[name]
    compare(calls, base, path, **options)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["DPO", "KTO", "CPO", "ORPO"])
def test_adapters_are_the_same(path: str, calls: dict[str, list[Any]], base: str) -> None:
    """DPO and KTO take their reference from the model without its adapters; the head has no gradient."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    compare(calls, base, path, peft_config=config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("base", ["CPO", "ORPO"])
def test_other_heads_are_the_same(path: str, calls: dict[str, list[Any]], base: str, kind: str) -> None:
    compare(calls, base, path, kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["DPO", "KTO", "CPO", "ORPO"])
def test_autocast_is_as_exact(path: str, calls: dict[str, list[Any]], base: str) -> None:
    """In bfloat16, fastrl is no further from the steps in float32 than TRL, up to a factor of two."""
    exact, theirs = (train(base, path, False, bf16=bf16) for bf16 in (False, True))
    ours = train(base, path, True, bf16=True)
    assert calls[base]

    def error(run: Any, name: str) -> float:
        return max(abs(a[name] - b[name]) for a, b in zip(run[0][:-1], exact[0][:-1], strict=True))

    def furthest(run: Any) -> float:
        return max(float((x - exact[1][name]).abs().max()) for name, x in run[1].items())

    for name in ("loss", "logps/chosen", "logps/rejected", "rewards/chosen", "logits/chosen", "grad_norm"):
        assert error(ours, name) <= 2 * error(theirs, name), name
    assert furthest(ours) <= 2 * furthest(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["DPO", "KTO"])
def test_an_auxiliary_loss_is_kept(tmp_path: Any, calls: dict[str, list[Any]], base: str) -> None:
    model_of("qwen2_moe").save_pretrained(tmp_path)
    compare(calls, base, str(tmp_path), router_aux_loss_coef=0.5)


@pytest.mark.parametrize("base", ["CPO", "ORPO"])
def test_no_logits_are_formed(path: str, base: str) -> None:
    """With a vocabulary whose logits are larger than all else."""
    vocab = 1 << 14
    torch.manual_seed(0)
    trainer = make_trainer(base, path, PAIRS, model=tiny_model("qwen2", vocab_size=vocab, pad_token_id=0))
    batch = next(iter(trainer.get_train_dataloader()))

    def largest() -> int:
        step(trainer)  # the head is compared once
        return max(allocations(lambda: trainer.compute_loss(trainer.model, batch).backward()))

    theirs = largest()
    with fast_trl.enabled(memory_budget="3MiB"):
        ours = largest()
    logits = 4 * batch["chosen_input_ids"].shape[0] * batch["chosen_input_ids"].shape[1] * vocab  # of half the batch
    assert ours < logits <= theirs


def step(trainer: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss and metrics of the first batch."""
    batch = next(iter(trainer.get_train_dataloader()))
    loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch)
    return loss, metrics


class OwnLogits(CPOTrainer):
    """Reads the logits."""

    def get_batch_loss_metrics(self, model: Any, batch: Any, train_eval: Any = "train") -> Any:
        logits = self.concatenated_forward(model, batch)[2]
        return logits[:, -1].sum(), {}


def set_liger(trainer: Any) -> None:
    trainer.args.use_liger_kernel = True


def set_compile(trainer: Any) -> None:
    trainer.args.torch_compile = True


def double_logits(trainer: Any) -> None:
    trainer.model.lm_head.register_forward_hook(lambda module, inputs, output: 2 * output)


def shift_labels(trainer: Any) -> None:
    collator = trainer.data_collator

    def shifted(features: Any) -> Any:
        batch = collator(features)
        return batch | {"chosen_labels": batch["chosen_labels"] + (batch["chosen_labels"] != -100)}

    trainer.data_collator = shifted


@pytest.mark.parametrize(
    ("base", "kind", "change", "reason"),
    [
        ("CPO", None, set_liger, "use_liger_kernel is set"),
        ("ORPO", None, set_compile, "torch_compile is set"),
        ("CPO", None, double_logits, "Qwen2ForCausalLM computes its logits in a way the fused losses do not know"),
        ("ORPO", None, shift_labels, "the labels are not the input's tokens"),
        ("CPO", OwnLogits, None, "get_batch_loss_metrics is not CPOTrainer's own"),
    ],
)
def test_what_is_not_supported_is_trls(
    path: str,
    said: Callable[[], list[str]],
    base: str,
    kind: type | None,
    change: Callable[[Any], None] | None,
    reason: str,
) -> None:
    trainer = make_trainer(base, path, PAIRS, kind)
    if change:
        change(trainer)
    expected, metrics = step(trainer)
    with fast_trl.enabled():
        for _ in range(2):
            found, ours = step(trainer)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert ours == pytest.approx(metrics, rel=1e-5)
    (line,) = said()
    assert line.startswith(f"{base}Trainer forms TRL's own logits: {reason}")


def test_an_encoder_decoder_is_trls(path: str, said: Callable[[], list[str]]) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)).eval()
    trainer = make_trainer("CPO", path, PAIRS, model=model, max_completion_length=8)
    expected, _ = step(trainer)
    with fast_trl.enabled():
        found, _ = step(trainer)
    torch.testing.assert_close(found, expected)
    assert said() == ["CPOTrainer forms TRL's own logits: the model is an encoder-decoder"]


def test_another_trl_keeps_its_forward(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    def reads_more(self: Any, model: Any, batch: Any) -> Any:
        return self.new_option

    def takes_more(self: Any, model: Any, batch: Any, more: Any) -> Any:
        return more

    monkeypatch.setattr(CPOTrainer, "concatenated_forward", reads_more)
    monkeypatch.setattr(ORPOTrainer, "concatenated_forward", takes_more)
    with fast_trl.enabled():
        assert CPOTrainer.concatenated_forward is reads_more
        assert ORPOTrainer.concatenated_forward is takes_more
    assert said() == [
        "TRL's own CPOTrainer is used: its forward reads self.new_option, which is not known",
        "TRL's own ORPOTrainer is used: it is not laid out as in TRL 1.16.0",
    ]


def test_the_forwards_are_put_back(path: str) -> None:
    was = [(kind, vars(kind)["concatenated_forward"]) for kind in (CPOTrainer, ORPOTrainer)]
    trainer = make_trainer("CPO", path, PAIRS)
    forward = trainer.model.forward
    fast_trl.enable()
    fast_trl.enable(memory_budget="1GiB")
    assert all(vars(kind)["concatenated_forward"] is not own for kind, own in was)
    step(trainer)
    fast_trl.disable()
    assert all(vars(kind)["concatenated_forward"] is own for kind, own in was)
    assert trainer.model.forward == forward and "forward" not in vars(trainer.model)
