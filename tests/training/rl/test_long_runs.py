"""What long runs of large models need: adapters, checkpointed layers, narrow products, and the sampler's mismatch."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from digit_models import assert_gradient
from own_engine import generate
from rollouts import LENGTHS, PROMPTS, gradients, make_rollout, own_logprobs, play, prompts, with_critic
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

import fastrl
import fastrl.training.rl.run as running
import fastrl.training.rl.train as module
from fastrl.base.errors import UserError
from fastrl.integrations.transformers import SamplingMaskRecorder
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import rollout_logprobs
from fastrl.training.config.objective import reads_sampler
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.config.sections import ModelConfig
from fastrl.training.models.decoder import checkpointing
from fastrl.training.models.policy import load_policy, reference_of

GRPO = {"objective": {"name": "grpo", "presets": {}, "kl_coef": 0.1}}
FAST = {"schedule": "constant", "warmup_updates": 0, "lr": 1e-2}
ONE = {"training": {"steps": 3, "minibatches": 1}}


@pytest.fixture
def load(make_policy):
    """A policy of two llama layers with these fields of the model's table."""
    return lambda **table: make_policy(table, num_hidden_layers=2, initializer_range=0.5)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# --- adapters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_only_adapters_change_and_the_reference_is_the_model_without_them(make_config, packing):
    table = {"lora_rank": 2, "lora_alpha": 64}  # a large scale, to see something after three updates
    training = ONE["training"] | {"packing": packing}
    config = make_config(**GRPO, model=table, optimizer=FAST, training=training | {"steps": 1})
    run, (first,) = play(config)
    before = weights(run.models.policy.model)
    assert first["kl"] < 1e-9 and first["grad_norm"] > 0 and first["ratio_max"] == pytest.approx(1, abs=1e-6)
    assert not run.models.policy.head.weight.requires_grad and run.models.policy.head.weight.grad is None
    assert run.models.reference.model is run.models.policy.model
    run, steps = play(config.model_copy(update={"training": config.training.model_copy(update={"steps": 3})}))
    assert min(step["kl"] for step in steps[1:]) > 1e-3
    after = weights(run.models.policy.model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and all("lora_" in name for name in changed)
    assert {name for name, p in run.models.policy.model.named_parameters() if p.requires_grad} >= changed
    assert not any(p.requires_grad for name, p in run.models.policy.model.named_parameters() if "lora_" not in name)


def test_the_reference_of_adapters_is_the_model_from_before(load):
    """After the adapters have moved: the base model's own numbers, and the policy's are others."""
    base, adapted = load(), load(lora_rank=2)
    rollout = make_rollout(PROMPTS, LENGTHS)
    reference = reference_of(adapted)
    expected = rollout_logprobs(base, rollout, 1.0, MicroBatches(None))
    torch.testing.assert_close(rollout_logprobs(adapted, rollout, 1.0, MicroBatches(None)), expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        for parameter in adapted.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.ones_like(parameter))
    torch.testing.assert_close(
        rollout_logprobs(reference, rollout, 1.0, MicroBatches(42, True)), expected, rtol=0, atol=1e-5
    )
    assert not torch.allclose(rollout_logprobs(adapted, rollout, 1.0, MicroBatches(None)), expected, atol=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_of_the_embedding_unless_it_is_the_head_too(make_policy, tied):
    refused = pytest.raises(UserError, match=r"model\.lora_targets: .* uses its embedding as its head")
    with refused if tied else nullcontext():
        make_policy({"lora_rank": 2, "lora_targets": ["embed_tokens"]}, tie_word_embeddings=tied)


def test_a_checkpoint_of_adapters_loads_again(trained, tmp_path, spy):
    """By transformers' own from_pretrained, and as model.path of another run, which starts where the first ended."""
    trained("base", training={"steps": 1})
    base = tmp_path / "base" / "checkpoints" / "step-000001"
    location = {"config": None, "tokenizer": None}
    seen = spy(module, "update", lambda _, run, rollout: run.models.policy)
    config = trained(**ONE, optimizer=FAST, model=location | {"path": str(base), "lora_rank": 2})
    directory = config.logging.output_dir / "checkpoints" / "step-000003"
    assert (directory / "adapter_model.safetensors").is_file() and not (directory / "model.safetensors").exists()
    assert all("lora_" in name for name in load_file(directory / "adapter_model.safetensors"))

    rollout = make_rollout(PROMPTS, LENGTHS, sets=False)
    expected = rollout_logprobs(seen[-1], rollout, 1.0, MicroBatches(None))
    frozen = rollout_logprobs(replace(seen[-1], without_adapters=True), rollout, 1.0, MicroBatches(None))
    assert not torch.allclose(expected, frozen, atol=1e-3)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    logits = model(input_ids=rollout.input_ids[5:6, :5]).logits[0, -1].log_softmax(-1)  # the row with one token
    assert float(logits[rollout.targets[5, 0]].detach()) == pytest.approx(float(expected[5, 0]), abs=1e-5)
    again = load_policy(ModelConfig(path=str(directory)), torch.device("cpu"))
    torch.testing.assert_close(rollout_logprobs(again, rollout, 1.0, MicroBatches(None)), expected, rtol=0, atol=1e-5)

    # Of all weights: the adapters are a part of them now.
    trained("more", **ONE, model=location | {"path": str(directory)})
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "more" / "checkpoints" / "step-000003").state_dict()
    base_weights = again.model.state_dict()
    assert trained.keys() == base_weights.keys() and not any("lora_" in name for name in trained)
    assert not any(torch.equal(trained[name], base_weights[name]) for name in trained)
    # New adapters beside the merged ones, without which the reference is the model as it came.
    renewed = load_policy(ModelConfig(path=str(directory), lora_rank=2), torch.device("cpu"))
    reference = rollout_logprobs(replace(renewed, without_adapters=True), rollout, 1.0, MicroBatches(None))
    torch.testing.assert_close(reference, expected, rtol=0, atol=1e-5)


# --- checkpointed layers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [{}, {"lora_rank": 2}], ids=["whole", "lora"])
@pytest.mark.parametrize("packing", [False, True])
def test_checkpointed_layers_have_the_same_gradients_and_run_twice(load, bare_run, table, packing):
    counts, found = [], []
    for checkpointed in (False, True):
        policy = load(gradient_checkpointing=checkpointed, **table)
        rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS))
        run = bare_run(policy, fastrl.GRPO(kl_coef=0.1), micro_batch_tokens=40, packing=packing)
        parts = len(run.micro_batches.cut(rollout.shapes()))
        run = with_critic(run, None if table else "own")
        models = [policy.model, *([run.models.critic] if run.models.critic else [])]
        mlps = [m for model in models for name, m in model.named_modules() if name.endswith("mlp")]
        calls = []
        for mlp in mlps:
            mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        found.append(gradients(run, rollout)[0])
        counts.append(len(calls))
        assert not any(module.training for module in policy.model.modules())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)
    assert float(found[0].abs().max()) > 0
    assert counts[1] == 2 * counts[0] == 2 * parts * len(mlps) > 2 * len(mlps)


def test_the_flags_are_restored_after_an_error_and_sampling_keeps_its_cache(load, bare_run):
    policy = load(gradient_checkpointing=True)
    layers = [m for m in policy.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert len(layers) == 2

    def fail():
        with checkpointing(policy.model):
            assert all(layer.training for layer in layers)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert not any(layer.training for layer in layers)
    gradients(bare_run(policy, fastrl.GRPO()), own_logprobs(policy, make_rollout(PROMPTS, LENGTHS)))
    widths = []
    layers[0].mlp.register_forward_hook(lambda _, arguments, __: widths.append(arguments[0].shape[1]))
    rollout = generate(policy, prompts(6), RolloutConfig(max_new_tokens=5))
    assert widths == [rollout.prompt_length] + [1] * (len(widths) - 1) and len(widths) > 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_of_their_own_dropout_do_not_drop_out(make_config, write_model, checkpointing):
    """OPT's drop out by themselves, where they think that they are in training."""
    model = write_model(model_type="opt", ffn_dim=16, dropout=0.5, bos_token_id=0, pad_token_id=0)
    table = {"config": str(model), "gradient_checkpointing": checkpointing}
    _, (numbers,) = play(make_config(model=table, training={"steps": 1, "minibatches": 1}))
    assert numbers["mismatch/abs_log_ratio"] < 1e-6


# --- narrow products ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["group", "gae"])
def test_bfloat16_products_leave_weights_and_moments_in_float32(make_config, estimator):
    tables = {"critic": {}} if estimator == "gae" else {}
    config = make_config(
        **GRPO, **ONE, **tables, model={"dtype": "bfloat16"}, optimizer=FAST, advantages={"estimator": estimator}
    )
    run, steps = play(config)
    models = [run.models.policy.model, *([run.models.critic] if run.models.critic else [])]
    assert {p.dtype for model in models for p in model.parameters()} == {torch.float32}
    assert {v.dtype for state in run.optimizer.state.values() for v in state.values()} == {torch.float32}
    assert len(run.optimizer.state) == sum(len(list(model.parameters())) for model in models)
    assert all(numbers["skipped_updates"] == 0 and numbers["grad_norm"] > 0 for numbers in steps)
    assert steps[0]["kl"] < 1e-6  # policy and reference round alike
    # Not all weights are numbers that bfloat16 has.
    assert not torch.equal(run.models.policy.head.weight.bfloat16().float(), run.models.policy.head.weight)


# --- the sampler against the training path --------------------------------------------------------------------------


@pytest.mark.parametrize("table", [{}, {"top_p": 0.8}, {"temperature": 0.7, "batch_size": 5}])
def test_a_sampler_that_is_the_training_path_has_no_mismatch(make_config, table):
    config = make_config(**GRPO, training={"steps": 1, "minibatches": 2, "epochs": 2}, rollout=table)
    run, (numbers,) = play(config)
    # Of the first update alone: later ones are away from the sampler because they have learnt something.
    assert 0 <= numbers["mismatch/abs_log_ratio"] < 1e-6 and abs(numbers["mismatch/k3"]) < 1e-9
    assert numbers["approx_kl"] > 1e-9

    def shift(_, __, output):  # what generate samples from, one entry by one nat
        output.logits[..., 3] += 1
        return output

    run.models.policy.model.register_forward_hook(shift)
    numbers, _ = module.take_step(run)
    assert numbers["mismatch/abs_log_ratio"] > 0.05 and numbers["mismatch/k3"] > 0.005


def test_the_mismatch_is_the_mean_over_counted_tokens(load, bare_run):
    policy = load()
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, [True] * 7 + [False]))
    own = rollout_logprobs(policy, rollout, 1.0, MicroBatches(None))
    difference = (own - rollout.rollout_logprobs)[rollout.mask].double()
    for packing in (False, True):
        _, metrics = gradients(bare_run(policy, fastrl.GRPO(), micro_batch_tokens=42, packing=packing), rollout)
        assert float(metrics["mismatch/abs_log_ratio"]) == pytest.approx(float(difference.abs().mean()), rel=1e-4)
        k3 = float((difference.exp() - 1 - difference).mean())  # of KL(sampler || training), from the sampler's tokens
        assert float(metrics["mismatch/k3"]) == pytest.approx(k3, rel=1e-3)


@pytest.mark.parametrize(
    ("level", "mode"), [("token", "truncate"), ("token", "mask"), ("sequence", "mask"), ("sequence-mean", "truncate")]
)
def test_a_correction_weighs_by_the_samplers_own_logprobs(load, bare_run, level, mode):
    """The gradient of advantages that were multiplied by naive weights; and without one the sampler is not read."""
    policy = load()
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS), noise=0.3)
    low, high = (0.95, 1.05) if level == "sequence-mean" else (0.8, 1.2)
    correction = fastrl.RolloutCorrection(level=level, mode=mode, low=low, high=high)
    difference = (rollout.old_logprobs - rollout.rollout_logprobs).where(rollout.mask, 0)
    log_rho = difference if level == "token" else difference.sum(1, keepdim=True).expand_as(difference)
    log_rho = log_rho / rollout.mask.sum(1, keepdim=True).clamp_min(1) if level == "sequence-mean" else log_rho
    rho = log_rho.exp()
    inside = (rho >= low) & (rho <= high)
    assert inside[rollout.mask].any() and not inside[rollout.mask].all()
    weight = rho.clamp(low, high) if mode == "truncate" else rho * inside
    advantages = rollout.response_advantages[:, None] * weight
    weighted = replace(rollout, token_advantages=advantages, response_advantages=None)
    plain, other = fastrl.DAPO(), replace(rollout, rollout_logprobs=rollout.rollout_logprobs + 1)
    for packing in (False, True):
        options = {"packing": packing, "micro_batch_tokens": 42}
        found, _ = gradients(bare_run(policy, plain.replace(rollout_correction=correction), **options), rollout)
        expected, _ = gradients(bare_run(policy, plain, **options), weighted)
        assert_gradient(found, expected, 3e-6, rtol=1e-4)
        unread = [gradients(bare_run(policy, plain, **options), batch)[0] for batch in (rollout, other)]
        assert torch.equal(*unread) and not torch.allclose(unread[0], found)


def test_a_run_with_a_correction_reads_what_the_recorder_saw(make_config, monkeypatch):
    """A sampler that never draws what it says: with every ratio above the bound of rejection nothing is learned."""
    table = {"low": 0.2, "high": 2.0, "reject": [0.5, 4.0]}
    config = make_config(objective={"name": "dapo"}, rollout_correction=table, training={"steps": 1, "minibatches": 1})
    run = running.make_run(config)
    first, _ = module.take_step(run)
    assert reads_sampler(run.loss.objective) and first["grad_norm"] > 0 and first["rollout_ess"] > 0.99
    told = SamplingMaskRecorder.logprobs
    monkeypatch.setattr(SamplingMaskRecorder, "logprobs", lambda *arguments: told(*arguments) - 5)
    numbers, _ = module.take_step(run)
    assert numbers["rollout_frac_rejected"] == 1 and numbers["rollout_weight_mean"] > 100
    assert numbers["policy_loss"] == 0 and numbers["mismatch/abs_log_ratio"] == pytest.approx(5, abs=1e-4)


# --- what a step takes ----------------------------------------------------------------------------------------------


def test_time_and_memory_of_a_step(make_config):
    _, steps = play(make_config(**GRPO, training={"steps": 2, "micro_batch_tokens": 70}))
    for numbers in steps:
        assert 0 < numbers["time/loss"] <= numbers["time/update"] < numbers["time/step"]
        assert numbers["time/loss_share"] == pytest.approx(numbers["time/loss"] / numbers["time/step"])
        parts = sum(numbers[f"time/{name}"] for name in ("generate", "reward", "logprobs", "update"))
        assert parts <= numbers["time/step"]
        assert 0.05 < numbers["memory/peak_gib"] < 64  # torch alone has more than the first
    assert steps[1]["memory/peak_gib"] >= steps[0]["memory/peak_gib"]
