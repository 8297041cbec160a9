"""A model with a fused head: the same loss and gradients as its own forward, and numbers without logits."""

import copy
import runpy
import warnings
from types import SimpleNamespace

import pytest
import torch
from fused_heads import VOCAB, assert_gradients_close, gradients, make_batch, trainer_log
from places import EXAMPLES
from tiny_models import tiny_model
from vocabulary import target_stats, transformed

import fastrl.models.lm_head as module
from fastrl.bench.measure import Outcome, Run, peak_temporary_bytes
from fastrl.integrations.transformers import compute_loss_func, fused_lm_head, remove_fused_lm_head
from fastrl.models import lm_head

# What differs between their heads is the first thing that an adapter gets wrong.
MODELS = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 0.5},
    "gemma3_text": {"final_logit_softcapping": 0.5},
    "recurrent_gemma": {"logits_soft_cap": 0.5, "lru_width": 16, "num_hidden_layers": 3},
    "granite": {"logits_scaling": 4.0},
    "hyperclovax": {"logits_scaling": 2.0},
    "cohere": {"logit_scale": 0.25},
    "phi": {},  # a bias
    "phi3": {},
    "falcon_h1": {"lm_head_multiplier": 0.5, "mamba_chunk_size": 16},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "output_router_logits": True},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 16},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0},
}


def make(kind, **values):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_model(kind, vocab_size=VOCAB, head_dim=8, **(MODELS[kind] | values))
    with torch.no_grad():
        for parameter in model.parameters():  # biases start at 0, and small weights hide a missing softcap
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture
def batch():
    return make_batch()


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_are_the_models_own(batch, kind):
    model = make(kind)
    own = model(**batch)
    expected = gradients(model, own.loss)
    assert fused_lm_head(model) is model
    out = model(**batch, return_token_stats=True)
    assert out.logits is None
    torch.testing.assert_close(out.loss, own.loss, rtol=1e-5, atol=0)
    assert (getattr(own, "aux_loss", None) is not None) == ("output_router_logits" in MODELS[kind])
    torch.testing.assert_close(getattr(out, "aux_loss", None), getattr(own, "aux_loss", None))
    assert_gradients_close(gradients(model, out.loss), expected)


def test_numbers_are_aligned_with_labels(batch):
    model = make("gemma2")
    logits = model(**batch).logits[:, :-1].double()
    logprobs, entropy = target_stats(transformed(logits, temperature=0.7), batch["input_ids"][:, 1:])
    fused_lm_head(model, temperature=0.7, memory_budget="2MiB")
    out = model(**batch, return_token_stats=True)
    counted = batch["labels"] != -100
    counted[:, 0] = False
    assert not out.logprobs[~counted].any() and not out.entropy[~counted].any()
    counted = counted[:, 1:]
    torch.testing.assert_close(out.logprobs[:, 1:][counted].double(), logprobs[counted], rtol=0, atol=2e-6)
    torch.testing.assert_close(out.entropy[:, 1:][counted].double(), entropy[counted], rtol=0, atol=4e-6)

    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    again = model(batch["input_ids"], batch["attention_mask"], shift_labels=shifted, return_token_stats=True)
    torch.testing.assert_close(again.logprobs[:, :-1], out.logprobs[:, 1:], rtol=0, atol=0)
    total = model(**batch, num_items_in_batch=7, return_token_stats=True).loss
    torch.testing.assert_close(total, -out.logprobs.sum() / 7)


def test_a_bfloat16_head_may_have_float32_logits(batch):
    model = make("llama").bfloat16()
    states = []
    model.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    model(**batch)
    logits = states[0][:, :-1].double() @ model.get_output_embeddings().weight.double().T
    exact = torch.log_softmax(logits, -1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    counted = batch["labels"][:, 1:] != -100
    errors = []
    for logits_dtype in (torch.float32, None):
        out = fused_lm_head(model, logits_dtype=logits_dtype)(**batch, return_token_stats=True)
        errors.append((out.logprobs[:, 1:].double() - exact)[counted].abs().max())
    assert errors[0] < 1e-5 < 1e-4 < errors[1]
    with pytest.raises(TypeError, match=r"logits_dtype must be None or torch\.float32, got str"):
        fused_lm_head(model, logits_dtype="float32")


def test_a_batch_invariant_head_says_so_to_the_loss(batch, monkeypatch):
    given = []
    ours = lm_head.linear_token_logprobs
    monkeypatch.setattr(
        lm_head,
        "linear_token_logprobs",
        lambda *args, **options: given.append(options.get("batch_invariant", False)) or ours(*args, **options),
    )
    for batch_invariant in (True, False):
        fused_lm_head(make("llama"), batch_invariant=batch_invariant)(**batch, return_token_stats=True)
    assert given == [True, False]


def test_without_the_argument_nothing_changes_and_the_head_comes_off(batch):
    model = make("llama")
    before = model(**batch)
    greedy = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(batch["input_ids"], **greedy)
    fused_lm_head(fused_lm_head(model))
    after = model(**batch)
    assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss)
    assert torch.equal(model.generate(batch["input_ids"], **greedy), tokens)
    remove_fused_lm_head(model)
    assert "forward" not in vars(model)
    with pytest.raises(ValueError, match="no fused head to remove"):
        remove_fused_lm_head(model)
    with pytest.raises(ValueError, match="call fused_lm_head"):
        compute_loss_func(model)


def test_torch_compile_makes_one_graph(batch):
    model = fused_lm_head(make("phi"))
    expected = model(**batch, return_token_stats=True).loss
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch, return_token_stats=True).loss, expected)


def test_through_peft(batch):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("qwen3"), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    expected = gradients(model, model(**batch).loss)
    fused_lm_head(model)
    assert_gradients_close(gradients(model, model(**batch, return_token_stats=True).loss), expected)


def test_a_head_that_computes_something_else_is_refused(monkeypatch):
    model = make("llama")
    own = type(model).forward

    def forward(self, *args, **kwargs):
        output = own(self, *args, **kwargs)
        output.logits = output.logits.clamp(max=0.0)
        return output

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(ValueError, match="LlamaForCausalLM computes its logits in a way the fused losses do not know"):
        fused_lm_head(model)
    with torch.no_grad():
        model.model.norm.weight[0] = model.lm_head.weight[3, 0] = float("nan")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has weights that hold NaN or inf: .*weight and 1 more$"):
        fused_lm_head(model)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(TypeError, match="must have a linear output head, got Sequential"):
        fused_lm_head(model)
    with pytest.raises(ValueError, match="needs labels"):
        fused_lm_head(make("qwen2"))(torch.ones(1, 2, dtype=torch.long), return_token_stats=True)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_takes_the_same_steps_without_logits(tmp_path, watch, accumulation):
    model = make("qwen2")
    other = fused_lm_head(copy.deepcopy(model))
    calls = watch(module, "linear_cross_entropy")
    steps = {"steps": 5, "learning_rate": 1e-2, "accumulation": accumulation}
    expected = trainer_log(model, tmp_path, **steps)
    found = trainer_log(other, tmp_path, **steps, compute_loss_func=compute_loss_func(other))
    assert len(calls) == 5 * accumulation
    # Five steps of Adam carry roundings of 1e-7 on.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


def test_the_loss_function_keeps_the_budget_and_leaves_generate_alone(batch, watch):
    model = fused_lm_head(make("qwen2"), memory_budget="3MiB").train()
    loss = compute_loss_func(model)
    calls = watch(module, "linear_cross_entropy")
    tokens = {name: batch[name] for name in ("input_ids", "attention_mask")}
    found = loss(model(**tokens), batch["labels"])
    assert [given["memory_budget"] for given in calls] == ["3MiB"]
    expected = model(**batch)  # with labels the forward is the model's own
    torch.testing.assert_close(found, expected.loss)
    assert model.generate(**tokens, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 11)
    assert model.training
    with pytest.raises(ValueError, match=r"temperature 1, but the fused head 0\.5"):
        compute_loss_func(fused_lm_head(make("qwen2"), temperature=0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_of_evaluation_reads_logits_as_they_are(dtype):
    """The value of float64, and no float32 copy of the logits on the way to it."""
    loss = compute_loss_func(fused_lm_head(make("qwen2")))
    vocab = 1 << 16
    logits, labels = torch.randn(2, 65, vocab).to(dtype), torch.randint(vocab, (2, 65))
    labels[0, :9] = labels[1, 30:] = -100
    targets = labels[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].double().flatten(0, 1), targets)
    given = SimpleNamespace(logits=logits)
    for count in (None, 7, torch.tensor(7)):
        scale = 1 if count is None else (targets != -100).sum() / 7
        # Float32 sums: a log-probability is rounded to 1e-7 of it, and some 80 are added up.
        torch.testing.assert_close(loss(given, labels, count).double(), expected * scale, rtol=1e-6, atol=0)
    assert not loss(given, torch.full_like(labels, -100))

    peak = peak_temporary_bytes(Run(lambda: Outcome(loss(given, labels), None, None, {})), "cpu")
    if peak is None:
        pytest.skip("this system does not tell a process' peak memory")
    assert peak < targets.numel() * vocab  # a quarter of a float32 copy's bytes


def test_the_head_is_among_the_outputs_for_distributed_data_parallel(batch):
    model = fused_lm_head(make("phi")).train()  # a bias
    compute_loss_func(model)
    hidden, weight, bias, _ = model(input_ids=batch["input_ids"]).hidden_states
    assert hidden.shape == (2, 9, 16) and weight.shape == (VOCAB, 16) and bias.shape == (VOCAB,)
    assert weight.grad_fn is not None and bias.grad_fn is not None


def test_a_model_in_training_mode_is_no_other_model_and_wrong_options_are_named():
    model = make("phi", resid_pdrop=0.5, embd_pdrop=0.5).train()
    model.lm_head.eval()
    fused_lm_head(model)
    assert model.training and not model.lm_head.training
    for options, words in (({"temperature": 0.0}, "temperature"), ({"memory_budget": "much"}, "memory_budget")):
        with pytest.raises(ValueError, match=words):
            fused_lm_head(model, **options)


def test_the_plain_loop_learns():
    example = runpy.run_path(str(EXAMPLES / "plain_loop" / "loop.py"))
    history = example["train"](20)
    assert history[0] < 0.1 and history[-1] > 3 * history[0] + 0.05
