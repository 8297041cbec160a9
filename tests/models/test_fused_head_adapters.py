"""PEFT's adapters on the output head: the model's own loss and gradients, whichever adapters are on."""

import peft
import pytest
import torch
from fused_heads import VOCAB, assert_gradients_close, gradients, make_batch
from tiny_models import tiny_model

from fastrl.integrations.transformers import LMHead, compute_loss_func, fused_lm_head
from fastrl.losses.low_rank import low_rank_token_logprobs

LORA = {"r": 3, "lora_alpha": 12, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False}


def make(kind="qwen3", values=None, **options):
    torch.manual_seed(0)
    base = tiny_model(kind, vocab_size=VOCAB, head_dim=8, initializer_range=0.3, **(values or {}))
    return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **(LORA | options))).eval()


def agree(model, batch, rtol=1e-4, of_largest=1e-5):
    """The fused losses against the model's own; returns the names of what has a gradient."""
    own = model(**batch).loss
    expected = gradients(model, own)
    fused_lm_head(model)
    loss_of = compute_loss_func(model)
    out = model(**batch, return_token_stats=True)
    found = [(out.loss, gradients(model, out.loss))]
    modes = {module: module.training for module in model.modules()}
    model.get_base_model().training = True  # without dropout
    tokens = {name: x for name, x in batch.items() if name != "labels"}
    loss = loss_of(model(**tokens), batch["labels"])
    found.append((loss, gradients(model, loss)))
    for module, training in modes.items():
        module.training = training
    for loss, values in found:
        torch.testing.assert_close(loss, own, rtol=rtol, atol=0)
        assert_gradients_close(values, expected, rtol, of_largest)
    return list(expected)


CASES = {
    "plain": {},
    "rank-stabilized": {"use_rslora": True},
    "with a bias": {"lora_bias": True},
    "the head alone": {"target_modules": ["lm_head"]},
    "dropout, off": {"lora_dropout": 0.5},
    "biases of the model are trained": {"bias": "all", "kind": "phi", "target_modules": ["lm_head"]},
    "tied": {"values": {"tie_word_embeddings": True}},
    "scale": {"kind": "granite", "values": {"logits_scaling": 4.0}},
    "softcap": {"kind": "gemma2", "values": {"final_logit_softcapping": 0.5}},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_pefts(name):
    found = agree(make(**CASES[name]), make_batch())
    assert any("lm_head.lora_A" in x for x in found) and any("lm_head.lora_B" in x for x in found)


@pytest.mark.filterwarnings("ignore")
def test_a_copy_of_the_head_is_trained_whole():
    for values in ({}, {"tie_word_embeddings": True}):
        model, batch = make(values=values, target_modules=["q_proj"], modules_to_save=["lm_head"]), make_batch()
        assert any("lm_head.modules_to_save" in x for x in agree(model, batch))
        with torch.no_grad():
            model.get_output_embeddings().modules_to_save["default"].weight.add_(1.0)
        with model.disable_adapter(), torch.no_grad():
            torch.testing.assert_close(model(**batch, return_token_stats=True).loss, model(**batch).loss)


def test_which_adapters_are_on_is_asked_in_every_forward():
    model, batch = make(), make_batch()
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", **(LORA | {"r": 2})))
    fused_lm_head(model)

    def losses():
        with torch.no_grad():
            own, out = model(**batch), model(**batch, return_token_stats=True)
        torch.testing.assert_close(out.loss, own.loss, rtol=1e-5, atol=0)
        return out.loss.item()

    found = [losses()]
    model.set_adapter("other")
    found.append(losses())
    model.base_model.set_adapter(["default", "other"])
    found.append(losses())
    with model.disable_adapter():
        found.append(losses())
    assert len({round(x, 4) for x in found}) == 4
    assert not LMHead.of(fused_lm_head(make("qwen2", target_modules=["q_proj"])).get_base_model()).adapters
    with pytest.raises(TypeError, match="has a LoRA adapter, which is not computed here"):
        LMHead.of(model.get_base_model())
    model.merge_adapter()
    assert losses() == pytest.approx(found[2], rel=1e-5) and not LMHead.of(model.get_base_model()).adapters
    with model.disable_adapter():
        assert losses() == pytest.approx(found[3], rel=1e-5)


class Dropped(torch.nn.Module):
    """Dropout that leaves out the same entries in every forward."""

    def forward(self, x):
        return 2 * x * (torch.arange(x.shape[-1]) % 2)


def test_dropout_is_on_the_adapters_product_alone():
    model, batch = make(target_modules=["lm_head"], lora_dropout=0.5), make_batch()
    head = model.get_output_embeddings()
    head.lora_dropout["default"] = Dropped()
    gradient = agree(model, batch)
    assert any("lora_A" in name for name in gradient) and not head.lora_A["default"].weight.grad[:, ::2].any()


def test_other_adapters_are_refused():
    with pytest.raises(TypeError, match="must be plain LoRA, got Dora"):
        fused_lm_head(make(use_dora=True))
    base = tiny_model("qwen3", vocab_size=VOCAB, head_dim=8)
    config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["lm_head"], feedforward_modules=[])
    with pytest.raises(TypeError, match="adapter of a kind that is not supported"):
        fused_lm_head(peft.get_peft_model(base, config))


def test_bfloat16_is_no_worse_than_pefts():
    """Gradients of a narrow model against those of its float64 copy, beside PEFT's own errors."""
    model, batch = make(), make_batch()
    exact = make().double()
    expected = gradients(exact, exact(**batch).loss)
    model = model.bfloat16()
    own = gradients(model, model(**batch).loss)
    out = fused_lm_head(model)(**batch, return_token_stats=True)
    found = gradients(model, out.loss)
    for name, value in expected.items():
        scale = value.abs().max()
        errors = [float((x[name].double() - value).abs().max() / scale) for x in (found, own)]
        assert errors[0] <= 2 * errors[1] + 1e-2, name


def test_a_float32_adapter_of_a_narrow_head_keeps_its_digits():
    """PEFT's default: with factors rounded to bfloat16 the gradients' errors would be three times PEFT's."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 32).bfloat16(), (torch.randn(3000, 32) / 6).bfloat16()
    factors = [torch.randn(512, 4).requires_grad_(), (0.1 * torch.randn(3000, 4)).requires_grad_()]
    targets = torch.randint(3000, (512,))
    stats = low_rank_token_logprobs(hidden, weight, targets, down=factors[0], up=factors[1])
    found = torch.autograd.grad(stats.logprobs.sum(), factors)

    def from_logits(logits):
        loss = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
        return torch.autograd.grad(loss, factors)

    down, up = factors
    own = from_logits((hidden @ weight.T + (down @ up.T).bfloat16()).float())
    exact = from_logits(hidden.double() @ weight.double().T + down.double() @ up.double().T)
    for x, y, z in zip(found, own, exact, strict=True):
        assert (x - z).abs().max() < 1.3 * (y - z).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("budget", [None, "8MiB"])
def test_the_products_against_float64(dtype, budget):
    """Both tilings of the vocabulary, with everything that may need a gradient."""
    torch.manual_seed(0)
    n, h, v, r = 37, 16, 501, 3
    inputs = [(0.5 * torch.randn(*shape)).to(dtype) for shape in ((n, h), (v, h), (v,))]
    inputs += [0.5 * torch.randn(*shape) for shape in ((n, r), (v, r))]
    hidden, weight, bias, down, up = (x.requires_grad_() for x in inputs)
    targets, mask = torch.randint(v, (n,)), torch.rand(n) > 0.3
    c, e = torch.randn(2, n)
    stats = low_rank_token_logprobs(
        hidden,
        weight,
        targets,
        down=down,
        up=up,
        bias=bias,
        mask=mask,
        temperature=0.7,
        logit_scale=0.5,
        softcap=3.0,
        memory_budget=budget,
    )
    found = torch.autograd.grad((stats.logprobs * c + stats.entropy * e).sum(), inputs)
    logits = hidden.double() @ weight.double().T + down.double() @ up.double().T + bias.double()
    logp = (3 * torch.tanh(logits / 6) / 0.7).log_softmax(-1)
    logprobs, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    exact = torch.autograd.grad(((logprobs * c + entropy * e) * mask).sum(), inputs)
    # Logits of size 4, and sums of some 500 terms, rounded to the dtype.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(stats.logprobs.double(), logprobs * mask, rtol=0, atol=8 * eps)
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=8 * eps * float(y.abs().max()))


def test_a_budget_that_is_too_small_names_one_that_works():
    arguments = (torch.randn(64, 16), torch.randn(5000, 16), torch.zeros(64, dtype=torch.long))
    factors = {"down": torch.randn(64, 2), "up": torch.randn(5000, 2, requires_grad=True)}
    with pytest.raises(ValueError, match="the smallest possible is") as error:
        low_rank_token_logprobs(*arguments, **factors, memory_budget=100_000)
    least = int(str(error.value).split("possible is ")[1].split()[0])
    stats = low_rank_token_logprobs(*arguments, **factors, memory_budget=least)
    stats.logprobs.sum().backward()
    with pytest.raises(ValueError, match="the smallest possible is"):
        low_rank_token_logprobs(*arguments, **factors, memory_budget=least - 1)


def test_a_head_with_adapters_is_not_batch_invariant_yet():
    with pytest.raises(NotImplementedError, match="not built yet for a head with LoRA adapters"):
        fused_lm_head(make(), batch_invariant=True)
