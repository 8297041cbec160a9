"""Experience: rewards that are summed, missing, priced and filtered; groups sampled anew; every advantage estimator."""

import math
from dataclasses import replace

import pytest
import torch
from own_engine import generate
from random_calls import exact_advantages as exact
from rollouts import LENGTHS, PROMPTS, dense_log_p, make_rollout, naive_gae, own_logprobs, play
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, set_seed

import fastrl
import fastrl.training.rl.run as running
from fastrl.base.errors import UserError
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import join, rollout_logprobs
from fastrl.training.config.algorithm import AdvantagesConfig, KLConfig
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.data.examples import Example
from fastrl.training.rl.advantages import add_advantages
from fastrl.training.rl.controllers import AdaptiveKL
from fastrl.training.rl.experience import _shortened, collect

ROWS = 24  # six prompts of four completions each
REWARDS = """
calls = 0
def first(prompts, completions, answer):
    return [None if i % 4 in (0, 1) else float(i) for i in range(len(prompts))]
def second(prompts, completions, answer):
    return [None if i % 4 in (0, 2) else 10.0 for i in range(len(prompts))]
def half(prompts, completions, answer):  # every other group varies, and in later calls all of them do
    global calls
    calls += 1
    return [float(i % 4 == 1) * (i // 4 % 2 or calls > 1) for i in range(len(prompts))]
def steps(prompts, completions, answer):
    return [[(len(c), float(i))] if c else [] for i, c in enumerate(completions)]
def equal(prompts, completions, answer):
    return [1.0] * len(prompts)
def model(prompts, completions, answer):
    return [1.0] * len(prompts)
def rising(prompts, completions, answer):
    return [float(i % 4) for i in range(len(prompts))]
def falling(prompts, completions, answer):
    return [3.0 - i % 4 for i in range(len(prompts))]
def sums(prompts, completions, answer):
    return [0.1 + 0.2 if i % 2 else 0.3 for i in range(len(prompts))]
def below(prompts, completions, answer):
    return [float(i) - 0.5 for i in range(len(prompts))]
"""


@pytest.fixture
def configure(make_config, tmp_path):
    """A config with some of the functions above as rewards."""
    (tmp_path / "mine.py").write_text(REWARDS)

    def configure(*functions, reward=None, **tables):
        sources = [f"{tmp_path / 'mine.py'}:{name}" for name in functions]
        return make_config(reward={"function": sources, **(reward or {})}, **tables)

    return configure


@pytest.fixture
def collected(configure):
    """A first step's rollout, its numbers and the run."""

    def collected(*functions, **tables):
        set_seed(0)
        run, numbers = running.make_run(configure(*functions, **tables)), {}
        return collect(run, numbers)[0], numbers, run

    return collected


# --- rewards --------------------------------------------------------------------------------------------------------


def test_functions_are_summed_with_their_weights_over_what_is_not_none(collected):
    rollout, numbers, _ = collected("first", "second", reward={"weights": [2.0, -1.0]})
    kept = [i for i in range(ROWS) if i % 4]  # the others have no reward from either
    expected = [2.0 * i * (i % 4 > 1) - 10.0 * (i % 4 in (1, 3)) for i in kept]
    assert rollout.rewards.tolist() == expected and rollout.groups.tolist() == [i // 4 for i in kept]
    assert numbers["without_reward"] == 0.25
    assert numbers["reward/first"] == pytest.approx(sum(i for i in range(ROWS) if i % 4 > 1) / 12)
    assert numbers["reward/second"] == 10.0
    assert numbers["reward"] == pytest.approx(sum(expected) / 18)
    assert not {name for name in collected("first")[1] if name.startswith("reward/")}


def test_a_function_called_like_the_reward_model_is_refused(configure):
    """Its rewards would take the model's place in the sum."""
    with pytest.raises(UserError, match=r'reward\.function: .*"model"'):
        running.make_run(configure("model", reward={"model": "./somewhere"}))


def test_length_has_its_price(collected):
    rollout, numbers, _ = collected("equal", reward={"overlong_cache": 2})
    lengths = rollout.completion_mask.sum(1)
    assert rollout.rewards.tolist() == [{4: 0.0, 3: 0.5}.get(length, 1.0) for length in lengths.tolist()]
    assert len(set(rollout.rewards.tolist())) == 3
    assert numbers["reward"] == pytest.approx(float(rollout.rewards.mean()))


@pytest.mark.parametrize("of_steps", [False, True])
def test_a_sample_holds_what_its_reward_is_made_of(configure, tmp_path, of_steps):
    tables = {"reward": {"weights": [2.0, -1.0], "overlong_cache": 2}}
    if of_steps:
        tables = {"reward": {"steps": f"{tmp_path / 'mine.py'}:steps"}, "advantages": {"estimator": "process"}}
    _, samples = collect(running.make_run(configure("first", "second", logging={"samples": 6}, **tables)), {})
    assert len(samples) == 6
    for i, row in enumerate(samples):
        scores = {"first": float(i) if i % 4 > 1 else None, "second": None if i % 4 in (0, 2) else 10.0}
        assert row["rewards"] == scores and row["columns"] == {"answer": row["prompt"][2::-1]}
        weights = (1.0, 1.0) if of_steps else (2.0, -1.0)
        terms = [weight * x for weight, x in zip(weights, scores.values(), strict=True) if x is not None]
        assert row["reward"] == (sum(terms) + row.get("length_price", 0.0) if terms else None)
        if of_steps:
            assert row["steps"] == [(len(text), float(i)) for text in [row["completion"]] if text]
    assert of_steps or any(row["length_price"] for row in samples)
    long = _shortened({"tests": "x" * 2001, "many": [1] * 1000, "n": 5})
    assert long["tests"] == "x" * 2000 + " ..." and len(long["many"]) == 2004 and long["n"] == 5


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_completions_that_were_cut_off_do_not_count_but_their_rewards_do(collected, place):
    """With a KL in the reward too: a filtered row has no token that could carry its score, but a baseline has it."""
    tables = {"kl": {"place": place, "kind": "k1", "coef": 0.0}, "advantages": {"estimator": "rloo"}}
    rollout, numbers, _ = collected("first", reward={"overlong_filter": True}, **tables)
    ended = rollout.ended
    assert torch.equal(rollout.counted, ended) and 0 < int(ended.sum()) < len(ended)
    assert (rollout.mask.any(1) == ended).all() and numbers["truncated"] > 0
    expected = exact.leave_one_out(rollout.rewards.tolist(), rollout.groups.tolist())
    assert rollout.response_advantages.tolist() == pytest.approx(expected)


# --- dynamic sampling -----------------------------------------------------------------------------------------------


def test_groups_of_equal_rewards_are_sampled_anew(collected):
    rollout, numbers, run = collected("half", rollout={"dynamic_sampling": True, "batch_size": 5})
    assert numbers["refills"] == 1 and numbers["kept"] == ROWS / (ROWS + 3 * 4)
    assert len(rollout.input_ids) == ROWS
    found = [rollout.rewards[rollout.groups == group].tolist() for group in rollout.groups.unique()]
    assert len(found) == 6 and all(sorted(rewards) == [0, 0, 0, 1] for rewards in found)
    assert run.data.rollouts.prompts.drawn == 6 + 3  # no more than were missing
    assert numbers["without_reward"] == 0 and numbers["reward"] == (3 + 3) / (ROWS + 3 * 4)


@pytest.mark.parametrize(
    ("functions", "reward", "compared", "kept"),
    [
        (["equal"], {"overlong_cache": 2}, None, 0),  # only the price of length differs
        (["rising"], {"overlong_cache": 2}, None, 1),
        (["sums"], {}, None, 0),  # equal in float32
        (["equal", "rising"], {"weights": [1.0, 0.5]}, None, 1),
        (["equal", "rising"], {"weights": [1.0, 0.5]}, "equal", 0),
        (["equal", "rising"], {"weights": [1.0, 0.5]}, "rising", 1),
        (["rising", "falling"], {"weights": [1.0, 1.0]}, "falling", 1),  # their sums are equal
    ],
)
def test_what_was_earned_decides_which_groups_are_kept(collected, functions, reward, compared, kept):
    settings = {"dynamic_sampling": True, "max_refills": 0, "dynamic_sampling_reward": compared}
    _, numbers, _ = collected(*functions, reward=reward, rollout=settings)
    assert numbers["kept"] == kept and numbers["without_variance"] == 1 - kept


def test_the_reward_that_dynamic_sampling_compares_is_one_of_the_configs(configure):
    settings = {"dynamic_sampling": True, "dynamic_sampling_reward": "exact"}
    with pytest.raises(UserError, match="expected one of the rewards, rising, falling, got 'exact'"):
        configure("rising", "falling", rollout=settings)


@pytest.mark.parametrize("estimator", ["group", "rloo", "batch", "gae"])
@pytest.mark.parametrize("refills", [0, 2])
def test_where_nothing_varies_there_is_no_update_and_the_next_step_goes_on(configure, estimator, refills):
    tables = {"critic": {}} if estimator == "gae" else {}
    config = configure(
        "equal",
        rollout={"dynamic_sampling": True, "max_refills": refills},
        advantages={"estimator": estimator},
        kl={"place": "reward", "kind": "k1", "adaptive": "rlhf", "target": 1.0},
        training={"steps": 2, "packing": refills > 0, "micro_batch_tokens": 42, "minibatches": 2},
        **tables,
    )
    run, steps = play(config)
    assert run.data.rollouts.prompts.drawn == 2 * 6 * (1 + refills)
    for numbers in steps:
        assert numbers["refills"] == refills and numbers["kept"] == 0
        assert numbers["reward"] == 1 and "loss" not in numbers and numbers["kl_coef"] == pytest.approx(0.04)
        assert numbers["skipped_updates"] == 0 and math.isfinite(numbers["time/loss_share"])
    assert not run.optimizer.state


@pytest.mark.parametrize("routed", [False, True])
def test_joined_rollouts_keep_each_tokens_numbers(make_policy, routed):
    """Prompts of other lengths, with truncated sampling and routing: the parts' numbers, each by itself."""
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    policy = make_policy(**(mixture if routed else {}), initializer_range=0.7)
    settings = RolloutConfig(max_new_tokens=5, top_p=0.8, batch_size=2, keep_routing=routed)
    prompts = [[[3, 1]], [[4, 5, 6, 7, 1], [9, 1]], [[8, 2, 1], [5, 6, 1], [7, 1]]]
    parts = [generate(policy, [Example("", {}, ids) for ids in group], settings) for group in prompts]
    whole = join(parts)
    assert whole.prompt_length == 5 and len(whole.input_ids) == 6
    for packed in (False, True):
        each = [rollout_logprobs(policy, part, 1.0, MicroBatches(None, packed)) for part in parts]
        apart = torch.cat([torch.nn.functional.pad(x, (0, 5 - x.shape[1])) for x in each])
        found = rollout_logprobs(policy, whole, 1.0, MicroBatches(56, packed))
        torch.testing.assert_close(found, apart, rtol=0, atol=2e-6)
    torch.testing.assert_close(whole.rollout_logprobs, apart, rtol=0, atol=2e-6)
    assert (whole.routing is not None) == routed


# --- advantages -----------------------------------------------------------------------------------------------------


def test_decoupled_rewards_come_from_each_function_with_its_weight(collected):
    tables = {"reward": {"weights": [2.0, -1.0]}, "advantages": {"estimator": "decoupled", "ddof": 1}}
    rollout, _, _ = collected("first", "rising", **tables)
    first = [math.nan if i % 4 in (0, 1) else float(i) for i in range(ROWS)]
    rising = [float(i % 4) for i in range(ROWS)]
    assert torch.equal(rollout.parts.isnan(), torch.tensor([first, rising]).T.isnan())
    expected, _ = exact.decoupled([first, rising], rollout.groups.tolist(), [2.0, -1.0], "group", 1, 1e-6)
    assert rollout.response_advantages.tolist() == pytest.approx(expected, rel=1e-5)


def test_groups_whose_rewards_differ_only_apart_are_kept(collected):
    """Each sum is 3, but the two rewards differ."""
    tables = {"reward": {"weights": [1.0, 1.0]}, "rollout": {"dynamic_sampling": True, "max_refills": 1}}
    rollout, numbers, _ = collected("rising", "falling", advantages={"estimator": "decoupled"}, **tables)
    assert set(rollout.rewards.tolist()) == {3.0} and len(rollout.rewards) == ROWS
    assert numbers["kept"] == 1 and numbers["refills"] == 0 and numbers["without_variance"] == 0
    rollout, numbers, _ = collected("rising", "falling", **tables)
    assert numbers["kept"] == 0 and numbers["without_variance"] == 1


def test_a_mean_to_divide_by_is_not_negative(collected):
    rollout, _, _ = collected("rising", advantages={"estimator": "maxrl"})
    assert rollout.response_advantages.tolist() == pytest.approx([-1.0, -1 / 3, 1 / 3, 1.0] * 6)
    with pytest.raises(UserError, match=r'"maxrl" divides by the mean reward, so rewards must be >= 0; one is -0\.5'):
        collected("below", advantages={"estimator": "maxrl"})


@pytest.mark.parametrize("k", [None, 3])
def test_the_best_of_k_completions(collected, k):
    rollout, _, _ = collected("rising", advantages={"estimator": "pass_at_k", "k": k})
    # Of three: 2 is best of {0, 1, 2} alone by 1, in one of three subsets; 3 leads by 1, 1 and 2 in its three.
    expected = [0.0, 0.0, 0.0, 1.0] if k is None else [0.0, 0.0, 1 / 3, 4 / 3]
    assert rollout.response_advantages.tolist() == pytest.approx(expected * 6)


def test_completions_that_do_not_count_have_their_length_in_opos_baseline(collected):
    tables = {"reward": {"overlong_filter": True}, "advantages": {"estimator": "opo"}}
    rollout, numbers, _ = collected("rising", **tables)
    lengths = rollout.completion_mask.sum(1)
    assert numbers["truncated"] > 0 and len(set(lengths.tolist())) > 1
    columns = (rollout.rewards.tolist(), rollout.groups.tolist(), lengths.tolist())
    assert rollout.response_advantages.tolist() == pytest.approx(exact.length_weighted(*columns), abs=1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", [None, "reward"])
def test_a_token_baseline_is_of_the_policys_own_probabilities(collected, packed, place):
    kl = {} if place is None else {"kl": {"place": place, "kind": "k1", "coef": 0.5, "sync_every": 1}}
    training = {"packing": packed, "micro_batch_tokens": 70, "minibatches": 1}
    options = {"advantages": {"estimator": "optimal_token_baseline"}, "training": training, **kl}
    rollout, _, run = collected("rising", reward={"overlong_filter": True}, rollout={"temperature": 0.7}, **options)
    assert rollout.old_logprobs is None and rollout.response_advantages is None  # on-policy
    log_p, _ = dense_log_p(run.models.policy, rollout)
    log_p = (log_p / 0.7).log_softmax(-1)
    own = log_p.gather(-1, rollout.targets[..., None])[..., 0]
    last = rollout.mask & (rollout.mask.cumsum(1) == rollout.mask.sum(1, keepdim=True))
    rewards = rollout.rewards[:, None] * last
    if place is not None:  # the reference is the policy still: its k1 is 0
        assert (rollout.ref_logprobs - own)[rollout.mask].abs().max() < 1e-5
    columns = (x.tolist() for x in (rewards, own, (2 * log_p).logsumexp(-1), rollout.mask))
    expected = torch.tensor(exact.token_baseline(*columns, rollout.groups.tolist(), False), dtype=torch.float64)
    # The squares are over all 24 completions, with weights that differ: no plain mean.
    assert expected.abs().max() > 0.5 and len(set(rollout.mask.sum(1).tolist())) > 2
    torch.testing.assert_close(rollout.token_advantages.double(), expected, rtol=0, atol=1e-5)


@pytest.fixture
def advantages(policy, bare_run):
    def advantages(rollout, kl=None, steps=(), policy=policy, **settings):
        run = bare_run(policy, fastrl.GRPO())
        run.config.advantages = AdvantagesConfig(**settings)
        run.config.kl, run.loss.kl = kl, kl and AdaptiveKL(kl, policy.device)
        return add_advantages(run, rollout, list(steps))

    return advantages


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_leave_one_out(policy, advantages, beta):
    rollout = replace(own_logprobs(policy, make_rollout(PROMPTS, LENGTHS)), groups=torch.tensor([5, 0] * 3 + [0, 5]))
    found = advantages(rollout, KLConfig(place="reward", kind="k1", coef=beta), estimator="rloo").response_advantages
    price = ((rollout.old_logprobs - rollout.ref_logprobs) * rollout.mask).sum(1)
    expected = exact.leave_one_out((rollout.rewards - beta * price).tolist(), rollout.groups.tolist())
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_rewards_to_go_are_whitened_over_the_batch(policy, advantages):
    """REINFORCE++: the discounted sum of what follows, the KL's price at each token, then mean 0 and deviation 1."""
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, [True] * 7 + [False]))
    rollout = replace(rollout, old_values=None)
    kl = KLConfig(place="reward", kind="k2", coef=0.3)
    found = advantages(rollout, kl, estimator="batch", gamma=0.9).token_advantages
    columns = (rollout.rewards, rollout.old_logprobs, rollout.ref_logprobs)
    naive, _ = naive_gae(*columns, torch.zeros_like(found), rollout.mask, 0.3, "k2", 0.9, 1.0)
    counted = naive[rollout.mask]
    expected = ((naive - counted.mean()) / counted.std(correction=0)).where(rollout.mask, 0)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def words():
    """A tokenizer whose tokens have one to five characters: 0 <eos>, 1 "a", 2 "bcd", 3 "efghi" ..."""
    vocabulary = {word: i for i, word in enumerate(["<eos>", "a", "bcd", "efghi", "jk", ".", "lm", "n", "opq"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def utf8():
    """One byte per token: 0 is <eos>, and each byte has its own, so that other characters than ASCII have several."""
    alphabet = {letter: i for i, letter in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def rollout_of(rows):
    """Two groups of completions with these tokens, behind one token of prompt."""
    rollout = make_rollout([1] * len(rows), [len(row) for row in rows], sets=False)
    for row, tokens in enumerate(rows):
        rollout.input_ids[row, 1 : 1 + len(tokens)] = torch.tensor(tokens)
    return rollout


def test_step_rewards_fall_on_the_tokens_up_to_the_steps_end(policy, advantages):
    rows = [[2, 3, 5, 1, 4, 0], [1, 1, 0], [3, 3], [4, 2, 6]]  # "bcdefghi.ajk" and so on; two end without EOS
    steps = [[(9, 1.0), (12, -2.0)], [(2, 3.0)], [(4, 0.5), (10, 1.5), (1, 2.5)], []]
    # A step that ends inside a token, "efgh|i", ends with it.
    ends = [[2, 4], [1], [0, 1, 0], []]
    rollout, policy = rollout_of(rows), replace(policy, tokenizer=words())
    found = advantages(rollout, steps=steps, policy=policy, estimator="process", scale="none").token_advantages
    assert found.shape == rollout.targets.shape
    values = [[value for _, value in row] for row in steps]
    expected, _ = exact.process(values, ends, [0, 0, 1, 1], [len(row) for row in rows], "none", 0, 0.0)
    for row, wanted in enumerate(expected):
        assert found[row].tolist() == pytest.approx(wanted + [0.0] * (found.shape[1] - len(wanted)), abs=1e-6), row


def test_step_rewards_stay_with_their_completions(collected, tmp_path):
    """Where others are left out: of each group the last two have an outcome reward."""
    tables = {"steps": f"{tmp_path / 'mine.py'}:steps"}
    rollout, _, _ = collected("first", reward=tables, advantages={"estimator": "process", "scale": "none"})
    numbers = [i for i in range(ROWS) if i % 4 > 1]
    given = {i for row, i in enumerate(numbers) if rollout.targets[row, 0] != 0}  # an EOS alone has no text, no step
    assert len(given) > 6
    for row, i in enumerate(numbers):
        group = [j for j in given if j // 4 == i // 4]
        expected = i - sum(group) / len(group) if i in given else 0
        assert float(rollout.token_advantages[row, 0]) == pytest.approx(expected)


def test_a_step_ends_with_the_last_byte_of_its_last_character(policy, advantages):
    policy, text = replace(policy, tokenizer=utf8()), "2€ = …é!"
    row = [*policy.tokenizer(text)["input_ids"], 0]
    assert len(row) == len(text.encode()) + 1
    steps = [[(end, float(end)) for end in range(1, len(text) + 1)], [(1, 0.5)]]
    rollout = rollout_of([row, row])
    (found, _) = advantages(rollout, steps=steps, policy=policy, estimator="process", scale="none").token_advantages
    jumps = (found[:-1] - found[1:]).abs() > 1e-6
    assert jumps.nonzero()[:, 0].tolist() == [len(text[:end].encode()) - 1 for end in range(1, len(text) + 1)]
