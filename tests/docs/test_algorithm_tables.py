"""The pages of advantages, KL estimators, aggregations and rollout corrections: each table is that of the code."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from functools import cache
from types import SimpleNamespace
from typing import Any, get_args

import page_tables as pages
import pytest
import torch
from peer_cases import folder_of
from places import EXAMPLES
from torch import Tensor

import fastrl
from fastrl.objectives.objective import AGGREGATIONS, CORRECTION_LEVELS, KL_FORMULAS

PAGES = ("advantages", "kl", "aggregation", "rollout_correction")
LOGP = torch.tensor([[-1.0, -2.5, -0.3, -4.0]], dtype=torch.double)
OLD = torch.tensor([[-1.2, -2.0, -0.3, -3.0]], dtype=torch.double)
REF = torch.tensor([[-0.9, -2.0, -1.5, -4.5]], dtype=torch.double)
KINDS = [kind for kind in KL_FORMULAS if kind != "none"]


def made(make: Any) -> fastrl.Objective:
    """A preset, with a number for what it has no default for."""
    parameters = inspect.signature(make).parameters.values()
    return make(**{p.name: 8 for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD})


MADE = {name: made(make) for name, make in fastrl.PRESETS.items()}


@pytest.mark.parametrize("name", PAGES)
def test_the_examples_print_what_they_say(name):
    pages.check_printed_values(pages.page(name))


@cache
def verl(path: str) -> Any:
    return pages.source(folder_of("verl") / path)


# --- KL estimators ----------------------------------------------------------------------------------------------------


def kl_row(kind: str) -> tuple[str, str]:
    rows = {row[0].strip("`"): row for row in pages.table(pages.page("kl"), "kind")}
    return tuple(cell.strip("`") for cell in rows[kind][1:3])


def test_every_estimator_has_a_row():
    assert [row[0] for row in pages.table(pages.page("kl"), "kind")] == [f"`{kind}`" for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_the_columns_are_an_estimators_value_and_derivative(kind):
    d = REF - LOGP
    names = {"logp": LOGP, "ref": REF, "d": d, "x": d.exp(), "r": (LOGP - OLD).exp()}
    value, derivative = (pages.value_of(formula, **names) for formula in kl_row(kind))
    logprobs = LOGP.clone().requires_grad_()
    objective = fastrl.REINFORCE(kl=fastrl.KL(kind, 1.0), aggregate="seq-mean-token-sum")
    out = fastrl.policy_loss(
        logprobs, objective=objective, advantages=torch.zeros(1), old_logprobs=OLD, ref_logprobs=REF
    )
    out.loss.backward()
    pages.close(torch.as_tensor(value).sum(), out.loss)
    pages.close(torch.as_tensor(derivative).double().expand_as(LOGP), logprobs.grad)


def expected_gradients() -> dict[str, Tensor]:
    """Kind -> the expected gradient in the logits of a policy over five entries, its tokens drawn from it."""
    logits, reference = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    logp, ref = logits.log_softmax(0), reference.log_softmax(0)
    found = {}
    for kind in KINDS:
        d, log_ratio = ref - logp, torch.zeros(5, dtype=torch.double)
        slope = KL_FORMULAS[kind][1](d, log_ratio, torch.ones_like(d), torch.ones_like(d))
        weight = logp.exp() * slope
        found[kind] = weight - logp.exp() * weight.sum()  # through the softmax
    for kind, (p, q) in {"of ref": (logp, ref), "of policy": (ref, logp)}.items():
        x = logits.clone().requires_grad_()
        new = x.log_softmax(0)
        p, q = (new if y is logp else y for y in (p, q))
        (found[kind],) = torch.autograd.grad((p.exp() * (p - q)).sum(), x)
    return found


def test_what_the_page_says_of_expected_gradients():
    found = expected_gradients()
    said = {row[0].strip("`"): row[3] for row in pages.table(pages.page("kl"), "kind")}
    pages.close(found["k1"], torch.zeros(5))
    assert "expected gradient is 0" in said["k1"]
    for kind in ("k2", "k1+", "k3+", "k3-unbiased"):
        pages.close(found[kind], found["of ref"])
    assert "is that of KL(policy, ref)" in said["k2"] and "is that of KL(ref, policy)" in said["k3"]
    pages.close(found["k3"], found["of policy"])


@pytest.mark.parametrize("kind", KINDS)
def test_beyond_the_clamp_there_is_no_derivative(kind):
    assert "clamped to +-20 (`max_log_ratio`), where the derivative is 0" in pages.page("kl")
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    objective = fastrl.REINFORCE(kl=fastrl.KL(kind, 1.0))
    far = {"old_logprobs": torch.tensor([[-31.0]]), "ref_logprobs": torch.tensor([[-31.0]])}
    fastrl.policy_loss(logprobs, objective=objective, advantages=torch.zeros(1), **far).loss.backward()
    assert logprobs.grad == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_of_an_estimator_is_the_kl_that_its_row_names(kind):
    policy, other = torch.randn(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.double).log_softmax(1)
    zeros = torch.zeros_like(policy)
    # Tokens of the old policy for the estimators that correct for it; old is also what old-new measures from.
    reads_old = kind.startswith("old-new") or kind == "k3-unbiased"
    old = torch.randn(5, generator=torch.Generator().manual_seed(2), dtype=torch.double).log_softmax(0)
    drawn, log_ratio = (old, policy - old) if reads_old else (policy, zeros)
    mean = (drawn.exp() * KL_FORMULAS[kind][0](other - policy, log_ratio)).sum()
    distributions = {"policy": policy, "ref": other, "old": old}
    said = {row[0].strip("`"): row[3] for row in pages.table(pages.page("kl"), "kind")}[kind]
    named = re.match(r"KL\((\w+), (\w+)\)", said)
    assert (named is None) == (kind in ("k2", "k1+", "k3+", "old-new-k2"))
    if named is not None:
        p, q = (distributions[name] for name in named.groups())
        pages.close(mean, (p.exp() * (p - q)).sum())


def test_the_presets_with_a_kl_term():
    rows = pages.table(pages.section(pages.page("kl"), "Presets with a KL term"), "preset")
    assert [row[0].strip("`") for row in rows] == [name for name, x in MADE.items() if x.kl is not None]
    for name, kind, coef in rows:
        term = MADE[name.strip("`")].kl
        assert pages.code(kind) == [term.kind] and ("weighted" in kind) == term.weighted
        parameters = inspect.signature(fastrl.PRESETS[name.strip("`")]).parameters.values()
        if re.fullmatch(r"[\d.]+", coef):
            assert float(coef) == term.coef
        elif coef == "an argument":
            assert [p.name for p in parameters if p.default is p.empty and "coef" in p.name]


def test_the_names_of_kl_estimators_elsewhere():
    rows = pages.table(pages.section(pages.page("kl"), "Names elsewhere"), "fastrl")
    config = pages.defaults(pages.trl("trainer/grpo_config.py"), "GRPOConfig")
    assert config["use_bias_correction_kl"] is True and config["beta"] == 0.0
    tree = verl("trainer/ppo/core_algos.py")
    forward = pages.function(tree, "kl_penalty_forward", {})
    penalty = pages.function(tree, "kl_penalty", {"kl_penalty_forward": forward})
    for ours, _, theirs in rows:
        names = pages.code(theirs)
        kinds = pages.code(ours) if len(pages.code(ours)) == len(names) else pages.code(ours) * len(names)
        for kind, name in zip(kinds, names, strict=True):
            logp = LOGP.clone().requires_grad_()
            value = penalty(logp, REF, name)
            value.sum().backward()
            symbols = {"d": REF - LOGP, "x": (REF - LOGP).exp()}
            said = [torch.as_tensor(pages.value_of(x, **symbols)).double() for x in kl_row(kind)]
            pages.close(value, said[0].expand_as(LOGP))
            pages.close(logp.grad, said[1].expand_as(LOGP))
    # TRL's lines: k3 of coef_1, and with it times the ratio.
    grpo = ast.unparse(pages.trl("trainer/grpo_trainer.py"))
    assert (
        "per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1"
        in grpo
    )
    assert "if self.args.use_bias_correction_kl:" in grpo and "per_token_kl = per_token_kl * coef_1" in grpo


# --- aggregations -----------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
PROMPTS = torch.tensor([0, 0, 1, 1])
COUNTS = MASK.sum(1)


def weights_of(aggregate: str, mask: Tensor = MASK, **options: Any) -> Tensor:
    """w of each token: the derivative of the loss of REINFORCE with advantages of -1."""
    logprobs = torch.zeros(mask.shape, requires_grad=True)
    objective = fastrl.REINFORCE(aggregate=aggregate, max_length=7)
    advantages = -torch.ones(len(mask))
    fastrl.policy_loss(
        logprobs, objective=objective, advantages=advantages, mask=mask, group_ids=PROMPTS, **options
    ).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad


def test_every_aggregation_has_a_row_with_its_weight():
    rows = pages.table(pages.section(pages.page("aggregation"), "Weights"), "aggregate")
    assert [row[0].strip("`") for row in rows] == list(AGGREGATIONS)
    of_prompt = torch.zeros(2, dtype=torch.long).index_add(0, PROMPTS, COUNTS)[PROMPTS]
    names = {"N": MASK.sum(), "G": 4, "P": 2, "T_i": COUNTS[:, None], "T_p": of_prompt[:, None], "max_length": 7}
    for aggregate, formula, _ in rows:
        weight = torch.as_tensor(pages.value_of(formula.strip("`"), **names))
        pages.close(weight * MASK, weights_of(aggregate.strip("`")))


def test_the_presets_of_each_aggregation():
    rows = pages.table(pages.section(pages.page("aggregation"), "Presets"), "aggregate")
    said = {preset: pages.code(row[0])[0] for row in rows for preset in pages.code(row[1])}
    assert said == {name: x.aggregate for name, x in MADE.items()}


def elsewhere(name: str) -> list[list[str]]:
    return pages.table(pages.section(pages.page(name), "Names elsewhere"), "fastrl")


def test_trls_loss_types_are_named_by_how_they_aggregate():
    tree = pages.trl("trainer/grpo_trainer.py")
    said = {
        code: row[0]
        for row in elsewhere("aggregation")
        for code in pages.code(row[1])
        if code != "max_completion_length"
    }
    losses = torch.randn(MASK.shape)
    for loss_type, ours in said.items():
        body = pages.branch(tree, "self.loss_type", loss_type, "policy_loss")
        trainer = SimpleNamespace(
            max_completion_length=7,
            current_gradient_accumulation_steps=1,
            accelerator=SimpleNamespace(num_processes=1),
            args=SimpleNamespace(steps_per_generation=1),
        )
        scope = {"self": trainer, "mode": "train", "per_token_loss": losses, "mask": MASK}
        scope["inputs"] = {"num_items_in_batch": MASK.sum()}
        found = pages.run_branch(body, **scope)["policy_loss"]
        pages.close(found, (losses * weights_of(pages.code(ours)[0])).sum())
    # The chain that ends in an error for a loss type that there is not.
    named = re.findall(r"self\.loss_type (?:==|in) (\[.*?\]|'\w+'):\n +(?:loss|normalizer) = ", ast.unparse(tree))
    assert set(said) == {name for text in named for name in re.findall(r"\w+", text)}
    assert pages.defaults(pages.trl("trainer/grpo_config.py"), "GRPOConfig")["loss_type"] == "dapo"


def test_verls_modes_are_named_by_how_they_aggregate():
    sums = SimpleNamespace(masked_sum=lambda x, mask: (x * mask).sum())
    aggregated = pages.function(verl("trainer/ppo/core_algos.py"), "agg_loss", {"verl_F": sums})
    losses = torch.randn(MASK.shape)
    modes = set()
    for ours, _, theirs in elsewhere("aggregation"):
        if not theirs:
            continue
        mode, *options = pages.code(theirs)
        modes.add(mode)
        found = aggregated(losses, MASK, mode, **dict.fromkeys(options, 7))
        denominator = {"denominator": 1.0} if "denominator of 1" in ours else {}
        pages.close(found, (losses * weights_of(pages.code(ours)[0], **denominator)).sum())
    source = ast.unparse(verl("workers/config/actor.py"))
    assert modes == set(ast.literal_eval(re.findall(r"valid_loss_agg_modes = (\[.*?\])", source)[0]))
    assert pages.defaults(verl("workers/config/actor.py"), "ActorConfig")["loss_agg_mode"] == "token-mean"
    # What the page says of responses without a token, and of the constant's default.
    empty = MASK & torch.tensor([[True], [True], [True], [False]])
    pages.close(aggregated(losses, empty, "seq-mean-token-sum"), (losses * empty).sum() / 3)
    pages.close(aggregated(losses, MASK, "seq-mean-token-sum-norm"), (losses * MASK).sum() / (4 * MASK.shape[1]))


# --- rollout correction -----------------------------------------------------------------------------------------------

ROLLOUT = torch.zeros(3, 4)
LOG_W = torch.tensor([[0.1, -1.5, 1.2, 0.0], [0.3, 0.2, 0.5, 0.3], [-0.1, -0.3, -0.2, -0.4]])
LOG_W_MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)


def correction_weights(correction: fastrl.RolloutCorrection) -> Tensor:
    """The weight of each token, by the gradient of a sum over tokens."""
    logprobs = torch.zeros(3, 4, requires_grad=True)
    objective = fastrl.REINFORCE(aggregate="seq-mean-token-sum", rollout_correction=correction)
    fastrl.policy_loss(
        logprobs,
        objective=objective,
        advantages=-torch.ones(3),
        mask=LOG_W_MASK,
        old_logprobs=LOG_W,
        rollout_logprobs=ROLLOUT,
        denominator=1.0,
    ).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad


def test_every_level_and_mode_has_its_row():
    text = pages.page("rollout_correction")
    assert [row[0].strip("`") for row in pages.table(text, "level")] == list(CORRECTION_LEVELS)
    modes = get_args(inspect.get_annotations(fastrl.RolloutCorrection, eval_str=True)["mode"])
    named = [row[0].strip("`") for row in pages.table(pages.section(text, "Modes"), "argument")]
    assert named == [*(f'mode="{mode}"' for mode in modes), "reject=(low, high)"]


def test_the_corrections_defaults():
    rows = pages.table(pages.page("rollout_correction"), "parameter")
    own = {p.name: p.default for p in inspect.signature(fastrl.RolloutCorrection).parameters.values()}
    assert {name.strip("`"): value.strip("`").strip('"') for name, value in rows} == {k: str(v) for k, v in own.items()}


def test_every_correction_metric_has_a_row():
    said = {name for row in pages.table(pages.page("rollout_correction"), "metric") for name in pages.code(row[0])}
    out = fastrl.policy_loss(
        torch.zeros(3, 4),
        objective=fastrl.PPO(rollout_correction=fastrl.RolloutCorrection()),
        advantages=torch.ones(3),
        old_logprobs=LOG_W,
        rollout_logprobs=ROLLOUT,
    )
    assert said == {name for name in out.metrics if name.startswith("rollout_")}


def settings(cell: str) -> dict[str, str]:
    return dict(re.fullmatch(r"(\w+)=\"(.*)\"", word).groups() for word in pages.code(cell) if "=" in word)  # type: ignore[union-attr]


TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def test_trls_modes_are_these_corrections():
    tree = pages.trl("trainer/grpo_trainer.py")
    (body,) = [
        x
        for x in ast.walk(tree)
        if isinstance(x, ast.If) and ast_starts(x, "mask = completion_mask if tool_mask is None")
    ]
    rows = [row for row in elsewhere("rollout_correction") if row[1]]
    assert {pages.code(row[1])[0] for row in rows} == set(TRL_MODES)
    for ours, theirs, _ in rows:
        (mode,) = pages.code(theirs)
        trainer = SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=0.5,
            vllm_importance_sampling_clip_max=2.0,
        )
        scope = {"self": trainer, "completion_mask": LOG_W_MASK.float(), "tool_mask": None}
        scope |= {"old_per_token_logps": LOG_W, "sampling_per_token_logps": ROLLOUT}
        found = pages.run_branch(ast.Module(body.body, []), **scope)["vllm_importance_sampling_ratio"]
        correction = fastrl.RolloutCorrection(**settings(ours), low=0.5, high=2.0)  # type: ignore[arg-type]
        pages.close(found.expand(3, 4) * LOG_W_MASK, correction_weights(correction))
    config = pages.defaults(pages.trl("trainer/grpo_config.py"), "GRPOConfig")
    (default,) = [pages.code(row[1])[0] for row in rows if "the default" in row[1]]
    assert config["vllm_importance_sampling_mode"] == default
    assert config["vllm_importance_sampling_correction"] is True
    assert config["vllm_importance_sampling_clip_min"] is None and config["vllm_importance_sampling_clip_max"] == 3.0


def ast_starts(node: Any, text: str) -> bool:
    """Whether the first statement of a branch begins with this text."""
    return ast.unparse(node.body[0]).startswith(text)


def masked_sum(x: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    return (x * mask).sum(axis) if axis is not None else (x * mask).sum()


def masked_mean(x: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    return masked_sum(x, mask, axis) / (mask.sum(axis) if axis is not None else mask.sum())


@cache
def verl_corrections() -> tuple[Any, Any]:
    """Its functions of weights and of rejection, of which the metrics are left out."""
    tree = verl("trainer/ppo/rollout_corr_helper.py")
    scope: dict[str, Any] = {
        "verl_F": SimpleNamespace(masked_sum=masked_sum, masked_mean=masked_mean),
        "compute_is_metrics": lambda **_: {},
        "compute_rs_metrics": lambda **_: {},
        "Optional": None,
    }
    for node in tree.body:
        target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        if isinstance(target, ast.Name):
            scope[target.id] = ast.literal_eval(node.value)
    for name in ("_parse_rollout_is_threshold", "_parse_rollout_rs_thresholds"):
        scope[name] = pages.function(tree, name, scope)
    names = ("compute_rollout_correction_weights", "compute_rollout_rejection_mask")
    weights, rejection = (pages.function(tree, name, scope) for name in names)
    return weights, rejection


def test_verls_options_are_these_corrections():
    weights, rejection = verl_corrections()
    mask = LOG_W_MASK.float()
    for ours, _, theirs in elsewhere("rollout_correction"):
        given, own = settings(theirs), settings(ours)
        if "rollout_is" in given:
            found, _ = weights(LOG_W, mask, **given)
            low, _, high = given["rollout_is_threshold"].rpartition("_")
            correction = fastrl.RolloutCorrection(**own, low=float(low or 0), high=float(high))  # type: ignore[arg-type]
            pages.close(found, correction_weights(correction))
        else:
            # verl bounds 1 / rho.
            found, _ = rejection(LOG_W, mask, **given, rollout_rs_threshold="0.8_2.5")
            correction = fastrl.RolloutCorrection(**own, high=float("inf"), reject=(1 / 2.5, 1 / 0.8))  # type: ignore[arg-type]
            pages.close(found, (correction_weights(correction) > 0).float())
            assert 0 < found.sum() < mask.sum()


# --- advantages -------------------------------------------------------------------------------------------------------


def advantage_rows() -> list[list[str]]:
    return pages.table(pages.page("advantages"), "function")


def test_every_advantage_and_estimator_has_a_row():
    functions = {name for row in advantage_rows() for name in pages.code(row[0])}
    assert {name for name in fastrl.__all__ if name.endswith("_advantages")} | {"gae"} <= functions
    config = pytest.importorskip("fastrl.training.config.train")
    known = get_args(config.AdvantagesConfig.model_fields["estimator"].annotation)
    assert sorted(pages.code(row[2])[0] for row in advantage_rows()) == sorted(known)


def test_what_an_estimator_reads_are_options():
    config = pytest.importorskip("fastrl.training.config.train")
    for row in advantage_rows():
        for name in pages.code(row[3]):
            if name == "[critic]":
                continue
            table, _, field = name.rpartition(".")
            owner = config.RewardConfig if table == "reward" else config.AdvantagesConfig
            assert field in owner.model_fields, name
            if table:
                continue
            described = config.AdvantagesConfig.model_fields[field].description or ""
            named = [x for x in ("group", "process", "decoupled", "pass_at_k", "batch", "gae") if x in described]
            if described.startswith("For "):
                assert pages.code(row[2])[0] in named


def test_each_section_names_a_recipe_of_its_estimator():
    for row in advantage_rows():
        (anchor,) = re.findall(r"\]\(#(.*?)\)", row[0])
        headings = re.findall(r"^## (.*)$", pages.page("advantages"), re.MULTILINE)
        (heading,) = [x for x in headings if x.lower().replace(" ", "-") == anchor]
        recipes = re.findall(r"\]\(\.\./\.\./examples/(.*?\.toml)\)", pages.section(pages.page("advantages"), heading))
        assert recipes, heading
        for recipe in recipes:
            assert estimator_of(recipe) == pages.code(row[2])[0], recipe


def estimator_of(recipe: str) -> str:
    """The estimator of a config, or of what it is based on."""
    path = EXAMPLES / recipe
    while True:
        tree = tomllib.loads(path.read_text())
        found = tree.get("advantages", {}).get("estimator")
        if found is not None or "base" not in tree:
            return found or "group"
        path = (path.parent / tree["base"]).resolve()


def test_the_formulas_of_advantages():
    """Those of the table that read one group's rewards alone."""
    rewards, lengths = torch.tensor([1.0, 0.25, 0.0, 0.5]), torch.tensor([3, 1, 4, 2])
    groups = torch.zeros(4, dtype=torch.long)
    said = {pages.code(row[0])[0]: pages.code(row[1]) for row in advantage_rows()}
    names = {"R": rewards, "mean": rewards.mean(), "std": rewards.std(correction=0), "eps": 1e-6, "length": lengths}
    names["sum"] = torch.sum
    for name, options in {"group": (), "maxrl": (), "opo": (lengths,)}.items():
        formula = said[f"{name}_advantages"][0]
        found = getattr(fastrl, f"{name}_advantages")(rewards, groups, *options)
        pages.close(pages.value_of(formula, **names), found)
    others = (rewards.sum() - rewards) / 3
    pages.close(fastrl.rloo_advantages(rewards, groups), rewards - others)
    best = torch.tensor([0.5, 0.0, 0.0, 0.0])
    pages.close(fastrl.pass_at_k_advantages(rewards, groups), best)
