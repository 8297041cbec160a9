"""A copy of a model with a fused head is a fused model of its own, however it was copied."""

import copy
import functools
import inspect
import io
import pickle
from types import MethodType

import pytest
import torch
from fused_heads import VOCAB, assert_gradients_close, gradients, make_batch
from routing_cases import EXPERTS, MODELS, seeded
from routing_cases import VOCAB as VOCABULARY
from tiny_models import tiny_model
from torch.optim.swa_utils import AveragedModel

from fastrl.integrations.routing import record_routing, replay_routing
from fastrl.integrations.transformers import compute_loss_func, fused_lm_head, record_sampling, remove_fused_lm_head


def make(tied=False):
    torch.manual_seed(0)
    return tiny_model("qwen3", vocab_size=VOCAB, head_dim=8, tie_word_embeddings=tied, initializer_range=0.3)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "AveragedModel": lambda model: AveragedModel(model).module,
    "a copy of a copy": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(model))),
}


def agrees(model, batch):
    """The fused loss and its gradients are those of the model's own forward with labels."""
    own = model(**batch)
    assert own.logits is not None
    expected = gradients(model, own.loss)
    out = model(**batch, return_token_stats=True)
    assert out.logits is None
    torch.testing.assert_close(out.loss, own.loss)
    assert_gradients_close(gradients(model, out.loss), expected)
    return own.loss.item()


def plain(model, batch):
    logits = model(**batch, return_token_stats=True).logits  # the argument is passed on, and nothing knows it
    assert logits is not None
    return logits


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_computes_with_its_own_weights(how, tied):
    model, batch = fused_lm_head(make(tied), temperature=1.0, memory_budget="3MiB"), make_batch()
    kind, signature = type(make()), inspect.signature(make().forward)
    other = COPIES[how](model)
    before = agrees(other, batch)
    change(model)
    model.zero_grad()
    assert agrees(other, batch) == before
    assert not any(x.grad is not None for x in model.parameters())
    assert agrees(model, batch) != before
    assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied
    for x in (model, other):
        assert isinstance(x, kind) and inspect.signature(x.forward) == signature and type(x).__name__ == kind.__name__

    remove_fused_lm_head(other)
    logits = plain(other, batch)
    agrees(model, batch)
    assert type(other) is kind and "forward" not in vars(other)
    agrees(fused_lm_head(other), batch)
    remove_fused_lm_head(model)
    plain(model, batch)
    remove_fused_lm_head(other)
    assert torch.equal(plain(other, batch), logits)


def test_a_replica_of_data_parallel_computes_with_its_own_weights():
    model, batch = fused_lm_head(make()), make_batch()
    other = model._replicate_for_data_parallel()
    other._modules = copy.deepcopy(model._modules)
    expected = model(**batch, return_token_stats=True).loss
    change(model)
    for options in ({}, {"return_token_stats": True}):
        torch.testing.assert_close(other(**batch, **options).loss, expected)


def test_a_copy_of_pefts_wrapper():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    model, batch = peft.get_peft_model(make(), settings), make_batch()
    fused_lm_head(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = agrees(other, batch)
        change(model)
        assert agrees(other, batch) == before
        remove_fused_lm_head(other)
        agrees(model, batch)


def with_hook(module, *args, **kwargs):
    """As accelerate's hooks: bound by functools.partial."""
    module.calls.append(None)
    return module.kind.forward(module, *args, **kwargs)


@pytest.mark.parametrize("bind", [MethodType, functools.partial])
def test_a_forward_that_the_model_had_of_its_own_goes_along(bind):
    model, batch = make(), make_batch()
    model.kind, model.calls = type(model), []
    own = bind(with_hook, model)
    model.forward = own
    expected = model(**batch).logits
    fused_lm_head(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    model.calls.clear()
    change(model)
    for other in copies:
        other.calls.clear()
        assert torch.equal(other(**batch).logits, expected)
        assert len(other.calls) == 1 and not model.calls
        remove_fused_lm_head(other)
        assert torch.equal(other(**batch).logits, expected)
        assert len(other.calls) == 2 and not model.calls
    remove_fused_lm_head(model)
    model(**batch)
    assert model.forward == own and len(model.calls) == 1


def test_the_trainers_loss_refuses_what_another_model_returned():
    """A Trainer may be given a copy and the original's loss, by which the original's head would be trained."""
    model, batch = fused_lm_head(make()).train(), make_batch()
    labels = batch.pop("labels")
    loss_of = compute_loss_func(model)
    other = copy.deepcopy(model)
    loss_of_other = compute_loss_func(other)
    for one, outputs in ((loss_of, other(**batch)), (loss_of_other, model(**batch))):
        with pytest.raises(
            ValueError, match="outputs must be of the model that compute_loss_func was given, got another"
        ):
            one(outputs, labels)
    model.eval(), other.eval()
    torch.testing.assert_close(loss_of(other(**batch), labels), loss_of_other(model(**batch), labels))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_trainers_loss_is_copied_whatever_its_model_became(copied):
    model, batch = fused_lm_head(make()).train(), make_batch()
    labels = batch.pop("labels")
    model.loss_of = loss_of = compute_loss_func(model)
    expected = loss_of(model(**batch), labels)
    other = copied(model)
    torch.testing.assert_close(other.loss_of(other(**batch), labels), expected)
    for change_head in (lambda: fused_lm_head(model, temperature=0.5), lambda: remove_fused_lm_head(model)):
        change_head()
        other = copied(model)
        torch.testing.assert_close(other.loss_of(other(**batch), labels), expected)


def test_the_trainers_loss_of_a_copy():
    model, batch = fused_lm_head(make()).train(), make_batch()
    labels = batch.pop("labels")
    both = model, compute_loss_func(model)
    copies = [copy.deepcopy(both), pickle.loads(pickle.dumps(both)), (x := copy.deepcopy(model), compute_loss_func(x))]
    expected = model(**batch, labels=labels).loss
    change(model)
    for other, loss_of in copies:
        loss = loss_of(other(**batch), labels)
        torch.testing.assert_close(loss, expected)
        assert gradients(other, loss).keys() == dict(other.named_parameters()).keys()


def test_accelerate_takes_its_wrapper_off_and_leaves_the_head():
    accelerate = pytest.importorskip("accelerate")
    model, batch = fused_lm_head(make()), make_batch()
    accelerate.state.AcceleratorState._reset_state(True)  # other tests' precision
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        prepared = accelerator.prepare_model(model)
        assert prepared(**batch, return_token_stats=True).logits is None
        agrees(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False), batch)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


def test_a_copy_made_while_something_is_recorded_or_replayed_is_left_alone():
    model = seeded(MODELS["qwen normalised"])
    tokens = torch.randint(VOCABULARY, (2, 4))
    sampling = {"max_new_tokens": 2, "do_sample": True, "pad_token_id": 0}
    expected = model(tokens).logits
    torch.manual_seed(0)
    drawn = model.generate(tokens, **sampling)
    with record_sampling(model) as sampler, record_routing(model) as recorder:
        model.generate(tokens, **sampling)
        recorded = recorder.routing(4)
        copies = [copy.deepcopy(model)]
        with replay_routing(model, (recorded + 1) % EXPERTS):
            copies.append(copy.deepcopy(model))
    with record_sampling(model), replay_routing(model, (recorded + 1) % EXPERTS):
        assert not torch.equal(model(tokens).logits, expected)
        copies.append(pickle.loads(pickle.dumps(model)))
    change(model)
    for other in copies:
        assert torch.equal(other(tokens).logits, expected)
        torch.manual_seed(0)
        assert torch.equal(other.generate(tokens, **sampling), drawn)
    assert torch.equal(recorder.routing(4), recorded) and len(sampler.sampling_mask().offsets) == 5
