"""Updates: metrics of several batches become one, and narrow products leave the weights alone."""

from dataclasses import replace

import pytest
import torch
from digit_models import OBJECTIVES
from rollouts import LENGTHS, PROMPTS, gradients, make_rollout, own_logprobs

from fastrl.training.config.sections import OptimizerConfig
from fastrl.training.rl.metrics import merge_metrics
from fastrl.training.run.optimizer import make_optimizer


def test_merging_weights_by_tokens():
    batches = [
        {"tokens": torch.tensor(1.0), "kl": torch.tensor(4.0), "ratio_max": torch.tensor(2.0)},
        {"tokens": torch.tensor(3.0), "kl": torch.tensor(0.0), "ratio_max": torch.tensor(1.0)},
    ]
    assert merge_metrics(batches, ("tokens",)) == {"tokens": 4.0, "kl": 1.0, "ratio_max": 2.0}
    assert merge_metrics([], ()) == {}


def test_merging_effective_sample_sizes():
    """Of the weights 1, 3 and 2, 2, 2, 6 together, whatever their cut; a batch without tokens changes nothing."""

    def batch(*weights):
        w = torch.tensor(weights)
        mean = w.mean() if weights else torch.tensor(0.0)
        ess = mean.square() / w.square().mean() if weights else torch.tensor(0.0)
        return {"tokens": torch.tensor(float(len(w))), "rollout_weight_mean": mean, "rollout_ess": ess}

    whole = float(batch(1.0, 3.0, 2.0, 2.0, 2.0, 6.0)["rollout_ess"])
    for parts in ([batch(1.0, 3.0), batch(2.0, 2.0, 2.0, 6.0)], [batch(1.0, 3.0, 2.0), batch(), batch(2.0, 2.0, 6.0)]):
        assert float(merge_metrics(parts, ("tokens",))["rollout_ess"]) == pytest.approx(whole)
    assert merge_metrics([batch()], ("tokens",))["rollout_ess"] == 0
    equal = [batch(*[1 + 1e-7 * i] * i) for i in range(1, 60)]
    assert 1 - 1e-6 < merge_metrics(equal, ("tokens",))["rollout_ess"] <= 1


def test_bfloat16_products_keep_float32_weights(make_policy, bare_run):
    """In bfloat16 weights a step of 1e-6 would round away; the products alone are narrow, and the gradient is close."""
    policy = make_policy()
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, sets=False))
    exact, _ = gradients(bare_run(policy, OBJECTIVES["token-mean"]), rollout)
    narrow, _ = gradients(bare_run(replace(policy, dtype=torch.bfloat16), OBJECTIVES["token-mean"]), rollout)
    assert policy.head.weight.dtype == narrow.dtype == torch.float32
    error = float((narrow - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1  # some layers' relative roundings of 2^-9; exactly equal would mean float32 products


@pytest.mark.parametrize("objective", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
def test_a_minibatch_is_averaged_over_its_own_tokens_sequences_and_prompts(make_policy, bare_run, objective):
    policy = make_policy()
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, sets=False))
    rows = torch.tensor([2, 0])
    of_rollout, _ = gradients(bare_run(policy, OBJECTIVES[objective], micro_batch_tokens=14), rollout, rows)
    alone, _ = gradients(bare_run(policy, OBJECTIVES[objective]), rollout.select(rows))
    assert alone.norm() > 0
    torch.testing.assert_close(of_rollout, alone, rtol=1e-4, atol=1e-6 * float(alone.abs().max()))


RATES = {
    "constant": [0.25, 0.5, 0.75, 1, 1, 1, 1, 1],
    "linear": [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25],
    "cosine": [0.25, 0.5, 0.75, 1, 1, 0.853553, 0.5, 0.146447],
}


@pytest.mark.parametrize("schedule", RATES)
@pytest.mark.parametrize(("warmup", "told"), [(4, False), (8, False), (9, True)])
def test_the_learning_rate_rises_from_above_0_and_a_warm_up_beyond_the_run_is_told(schedule, warmup, told, capsys):
    settings = OptimizerConfig(lr=0.5, schedule=schedule, warmup_updates=warmup)
    optimizer, scheduler = make_optimizer([([torch.ones(1, requires_grad=True)], settings.peak)], settings, 8)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"] / 0.5)
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(RATES[schedule] if warmup == 4 else [n / warmup for n in range(1, 9)], abs=1e-6)
    warning = "fastrl: warning: optimizer.warmup_updates is 9, but the run has 8 updates, so its learning rate ends at "
    assert capsys.readouterr().err == (f"{warning}0.889 of optimizer.lr\n" if told else "")
