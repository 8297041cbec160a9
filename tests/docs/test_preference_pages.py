"""The preferences' pages: their formulas, numbers and TRL's names are those of the code."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import page_tables as pages
import pytest
import torch

import fastrl
from fastrl.objectives.preferences import _READS

LENGTHS = torch.tensor([4, 3, 6, 2]), torch.tensor([5, 4, 3, 7])
CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED = (
    torch.tensor(x, dtype=torch.double)
    for x in ([-12, -9, -30, -2.5], [-15, -8, -3, -60], [-13, -9.5, -12, -2], [-14, -9, -9, -11])
)
CONFIGS = {
    "DPOConfig": "trainer/dpo_config.py",
    "CPOConfig": "experimental/cpo/cpo_config.py",
    "ORPOConfig": "experimental/orpo/orpo_config.py",
    "KTOConfig": "trainer/kto_config.py",
}
every_preference = pytest.mark.parametrize("name", fastrl.PREFERENCES)


def loss_of(objective: fastrl.Preference, scale: float = 1.0) -> fastrl.PreferenceLoss:
    """Over the pairs above, each log-probability times a factor."""
    sums = [scale * x for x in (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)]
    lengths = {"chosen_lengths": LENGTHS[0], "rejected_lengths": LENGTHS[1]}
    return fastrl.preference_loss(*sums, objective=objective, **lengths)


def scores_of(objective: fastrl.Preference) -> list[torch.Tensor]:
    scores = [CHOSEN, REJECTED]
    if objective.reference:
        scores = [CHOSEN - REF_CHOSEN, REJECTED - REF_REJECTED]
    return [x / n for x, n in zip(scores, LENGTHS, strict=True)] if objective.average else scores


# --- the overview -----------------------------------------------------------------------------------------------------


def test_the_overview_has_every_preference_with_its_score_and_source():
    rows = pages.table(pages.page("preferences"), "preference")
    said = {pages.code(cells[0])[0]: cells for cells in rows}
    assert list(said) == list(fastrl.PREFERENCES)
    for name, (link, _, score, reference, source) in said.items():
        made = fastrl.PREFERENCES[name]()
        assert link == f"[`{name}`]({name.lower()}.md)"
        assert (score, reference) == ("mean" if made.average else "sum", "yes" if made.reference else "no")
        assert source in pages.page(name.lower()) and source in (fastrl.PREFERENCES[name].__doc__ or "")


def test_the_overview_has_every_option_with_its_default_and_its_readers():
    rows = pages.table(pages.section(pages.page("preferences"), "Options"), "field")
    made = fastrl.Preference()
    assert [cells[0] for cells in rows] == [
        f"`{name}`" for name in inspect.signature(fastrl.Preference).parameters if name != "formula"
    ]
    for field, default, meaning in rows:
        assert default == str(getattr(made, field.strip("`")))
        readers = [n for n, make in fastrl.PREFERENCES.items() if field.strip("`") in _READS[make().formula]]
        assert set(pages.code(meaning)) & set(fastrl.PREFERENCES) == set(readers)


@pytest.mark.parametrize("field", ["label_smoothing", "gamma", "tau"])
@every_preference
def test_a_preference_refuses_what_its_formula_does_not_read(name, field):
    make = fastrl.PREFERENCES[name]
    if field in _READS[make().formula]:
        make(**{field: 0.3})
    else:
        with pytest.raises(ValueError, match=field):
            make(**{field: 0.3})


# --- a page each ------------------------------------------------------------------------------------------------------


@every_preference
@pytest.mark.parametrize("fields", [{}, {"beta": 0.7}, {"label_smoothing": 0.2}, {"gamma": 0.4, "nll_coef": 0.3}])
def test_the_formula_is_the_function(name, fields):
    make = fastrl.PREFERENCES[name]
    objective = make(**{k: v for k, v in fields.items() if k in inspect.signature(make).parameters})
    (formula,) = pages.blocks(pages.section(pages.page(name.lower()), "Formula"), "text")
    s_w, s_l = scores_of(objective)
    beta, m = objective.beta, s_w - s_l
    symbols = {"s_w": s_w, "s_l": s_l, "m": m, "b": beta * m, "b_w": beta * s_w, "b_l": beta * s_l, "beta": beta}
    symbols |= {"e": objective.label_smoothing, "gamma": objective.gamma, "tau": objective.tau}
    symbols |= {"nll_coef": objective.nll_coef, "nll": -CHOSEN.sum() / LENGTHS[0].sum()}
    pages.close(pages.evaluated(formula, symbols)["loss"].mean(), loss_of(objective).loss)


def test_a_wrong_formula_is_found():
    b = torch.tensor([0.3, -2.0])
    assert not torch.allclose(pages.value_of("-ls(-b)", b=b), pages.value_of("-ls(b)", b=b))
    pages.close(pages.value_of("2 (b^2 - 1 / (2 b)) exp(b)", b=b), 2 * (b**2 - 1 / (2 * b)) * torch.exp(b))


@every_preference
def test_the_sections_are_there(name):
    headings = re.findall(r"^## (.*)$", pages.page(name.lower()), re.MULTILINE)
    assert headings == ["When to use it", "Formula", "Use", "Defaults", "With `fastrl dpo`"]


@pytest.mark.parametrize("name", [*map(str.lower, fastrl.PREFERENCES), "preferences", "kto", "reward_model"])
def test_the_examples_print_what_they_say(name):
    pages.check_printed_values(pages.page(name))


@every_preference
def test_the_config_is_the_default(name):
    (text,) = pages.blocks(pages.page(name.lower()), "toml")
    fields = dict(line.split(" = ") for line in text.splitlines()[1:])
    assert fields.pop("name") == f'"{name.lower()}"'
    for field, value in fields.items():
        assert float(value) == getattr(fastrl.PREFERENCES[name](), field)


# --- TRL --------------------------------------------------------------------------------------------------------------


@cache
def trl_defaults(config: str) -> dict[str, Any]:
    return pages.defaults(pages.trl(CONFIGS[config]), config)


def rows_of(name: str) -> tuple[str, str | None, list[list[str]]]:
    """TRL's config and loss type of a page, and the other rows of its table of defaults."""
    (objective, _, other, _), *rows = pages.table(pages.section(pages.page(name), "Defaults"), "parameter")
    assert objective == "objective"
    called = re.fullmatch(r"`(\w+)\((?:loss_type=\"(\w+)\")?\)`", other)
    assert called is not None, other
    return called[1], called[2], rows


@pytest.mark.parametrize("name", [*fastrl.PREFERENCES, "KTO"])
def test_the_defaults_are_those_of_both_packages(name):
    make = fastrl.PREFERENCES.get(name, fastrl.kto_loss)
    parameters = inspect.signature(make).parameters.values()
    own = {p.name: p.default for p in parameters if p.default is not p.empty and p.name != "denominator"}
    config, _, rows = rows_of(name.lower())
    assert {row[0].strip("`") for row in rows} == set(own)
    for parameter, value, other, _ in rows:
        assert value == str(own[parameter.strip("`")])
        if other:
            said = re.fullmatch(r"`(\w+)` = (\S+)", other)
            assert said is not None, other
            assert float(said[2]) == trl_defaults(config)[said[1]]


@cache
def dpo_trainer() -> Any:
    return pages.trl("trainer/dpo_trainer.py")


def dpo_loss_of_trl(loss_type: str, objective: fastrl.Preference) -> torch.Tensor:
    """Each pair's loss, by the lines of TRL's trainer."""
    masks = [torch.arange(8) < n[:, None] for n in LENGTHS]
    ratios = CHOSEN - REF_CHOSEN, REJECTED - REF_REJECTED
    smoothing = objective.label_smoothing
    trainer = SimpleNamespace(
        beta=objective.beta, label_smoothing=smoothing, args=SimpleNamespace(discopop_tau=objective.tau)
    )
    body = pages.branch(dpo_trainer(), "loss_type", loss_type, "per_sequence_loss")
    return pages.run_branch(
        body,
        self=trainer,
        device="cpu",
        delta_score=ratios[0] - ratios[1],
        chosen_logratios=ratios[0],
        rejected_logratios=ratios[1],
        chosen_scores=ratios[0],
        rejected_scores=ratios[1],
        completion_mask=torch.cat(masks),
    )["per_sequence_loss"]


@pytest.mark.parametrize("name", [name for name, make in fastrl.PREFERENCES.items() if make().reference])
def test_trls_dpo_loss_of_the_name_is_the_same(name):
    config, loss_type, _ = rows_of(name.lower())
    assert config == "DPOConfig" and loss_type is not None
    objective = fastrl.PREFERENCES[name]()
    pages.close(dpo_loss_of_trl(loss_type, objective), loss_of(objective).losses)


def test_trls_sigmoid_norm_is_dpo_of_means_and_sigmoid_reads_no_smoothing():
    assert 'loss_type="sigmoid_norm"' in pages.page("dpo")
    pages.close(dpo_loss_of_trl("sigmoid_norm", fastrl.DPO()), loss_of(fastrl.DPO(average=True)).losses)
    smoothed = dpo_loss_of_trl("sigmoid", fastrl.DPO(label_smoothing=0.3))
    pages.close(smoothed, loss_of(fastrl.DPO()).losses)
    trainer = ast.unparse(dpo_trainer())
    assert "'exo_pair' in self.loss_types and self.label_smoothing == 0.0" in trainer  # refused


@pytest.mark.parametrize(
    ("loss_type", "objective"),
    [
        ("sigmoid", fastrl.CPO()),
        ("simpo", fastrl.SimPO()),
        ("hinge", fastrl.Hinge(reference=False)),
        ("ipo", fastrl.IPO(reference=False)),
    ],
)
def test_trls_cpo_loss_of_the_name_is_the_same(loss_type, objective):
    tree = pages.trl("experimental/cpo/cpo_trainer.py")
    trainer = SimpleNamespace(
        alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
        loss_type=loss_type,
        beta=objective.beta,
        simpo_gamma=objective.gamma,
        label_smoothing=objective.label_smoothing,
    )
    source = ast.unparse(tree)
    means = "average_log_prob=self.loss_type in ['ipo', 'simpo']" in source
    assert means and "loss = losses.mean() + self.cpo_alpha * policy_nll_loss" in source
    losses, *_ = pages.function(tree, "cpo_loss", {})(trainer, *scores_of(objective))
    pages.close(losses, loss_of(objective).losses)


def test_what_the_pages_say_of_trls_cpo():
    for name in ("hinge", "ipo"):
        made = (
            f'`CPOConfig(loss_type="{name}")` is `{fastrl.PREFERENCES["Hinge" if name == "hinge" else "IPO"].__name__}'
        )
        assert f"TRL's {made}(reference=False, nll_coef=1.0)`" in " ".join(pages.page(name).split())
    assert trl_defaults("CPOConfig")["cpo_alpha"] == 1.0
    assert rows_of("simpo")[:2] == ("CPOConfig", "simpo") and rows_of("cpo")[:2] == ("CPOConfig", "sigmoid")


def test_trls_orpo_loss_is_the_same():
    tree = pages.trl("experimental/orpo/orpo_trainer.py")
    objective = fastrl.ORPO()
    trainer = SimpleNamespace(beta=objective.beta, accelerator=SimpleNamespace(device="cpu"))
    scope = {"log1mexp": lambda x: torch.log1p(-torch.exp(x))}
    losses, *_ = pages.function(tree, "odds_ratio_loss", scope)(trainer, *scores_of(objective))
    assert "loss = policy_nll_loss - losses.mean()" in ast.unparse(tree)
    pages.close(-losses, loss_of(objective).losses)
    assert rows_of("orpo")[:2] == ("ORPOConfig", None)


# --- KTO and reward models --------------------------------------------------------------------------------------------

DESIRABLE = torch.tensor([True, False, True, False])


def test_ktos_formula_is_the_function():
    formulas = pages.blocks(pages.section(pages.page("kto"), "Formula"), "text")[0].splitlines()
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.8}
    out = fastrl.kto_loss(CHOSEN, REF_CHOSEN, DESIRABLE, kl=torch.tensor([0.5, 0.3]), beta=0.3, **weights)
    names = {"logp": CHOSEN, "ref": REF_CHOSEN, "z": 0.4, "beta": 0.3, **weights}
    desirable, other = (pages.evaluated(formula, names)["loss"] for formula in formulas)
    pages.close(torch.where(DESIRABLE, desirable, other), out.losses)
    pages.close(out.kl, torch.tensor(0.4))
    assert fastrl.kto_loss(CHOSEN, REF_CHOSEN, DESIRABLE, kl=torch.tensor([-0.5, 0.3])).kl == 0


@pytest.mark.parametrize(("loss_type", "kl"), [("kto", 0.4), ("apo_zero_unpaired", None)])
def test_trls_kto_loss_of_the_name_is_the_same(loss_type, kl):
    tree = pages.trl("trainer/kto_trainer.py")
    ours = fastrl.kto_loss(CHOSEN, REF_CHOSEN, DESIRABLE, kl=kl, beta=0.3).losses
    for kind, chosen in (("chosen", DESIRABLE), ("rejected", ~DESIRABLE)):
        body = pages.branch(tree, "self.loss_type", loss_type, f"{kind}_losses")
        ratios = {f"{kind}_logratios": (CHOSEN - REF_CHOSEN)[chosen]}
        found = pages.run_branch(body, self=SimpleNamespace(beta=0.3), kl=kl, **ratios)[f"{kind}_losses"]
        pages.close(found, ours[chosen])
    assert loss_type in pages.page("kto")


def test_the_reward_models_formula_is_the_function_and_trls():
    (formula,) = pages.blocks(pages.section(pages.page("reward_model"), "Formula"), "text")
    scores = torch.tensor([1.2, 0.3, -0.5, 0.8, 0.9])
    ranks, prompts = torch.tensor([1, 2, 3, 2, 1]), torch.tensor([0, 0, 0, 1, 1])
    better, worse = torch.tensor([0, 0, 1, 4]), torch.tensor([1, 2, 2, 3])
    losses = pages.evaluated(formula, {"s_w": scores[better], "s_l": scores[worse]})["loss"]
    pages.close((losses[:3].mean() + losses[3]) / 2, fastrl.reward_model_loss(scores, ranks, prompts))
    trainer = ast.unparse(pages.trl("trainer/reward_trainer.py"))
    assert "-nn.functional.logsigmoid(rewards_chosen - rewards_rejected - inputs['margin']).mean()" in trainer
    assert "center_rewards_coefficient * torch.mean((rewards_chosen + rewards_rejected) ** 2)" in trainer
    assert pages.defaults(pages.trl("trainer/reward_config.py"), "RewardConfig")["center_rewards_coefficient"] is None


# --- numbers in the text ----------------------------------------------------------------------------------------------


def slopes(objective: fastrl.Preference, b: list[float]) -> list[float]:
    """The loss' derivative in b."""
    x = torch.tensor(b, dtype=torch.double, requires_grad=True)
    (found,) = torch.autograd.grad(objective.losses(x / objective.beta, torch.zeros_like(x)).sum(), x)
    return found.tolist()


def test_discopop_rises_where_its_page_says():
    assert "it rises for b from -0.12 to 0.07," in " ".join(pages.page("discopop").split())
    signs = [x > 0 for x in slopes(fastrl.DiscoPOP(), [-0.125, -0.115, 0.0, 0.065, 0.075])]
    assert signs == [False, True, True, True, False]


def test_exo_has_its_minimum_where_its_page_says():
    assert "`log((1 - e) / e)`: 6.9 for" in pages.page("exopair")
    below, above = slopes(fastrl.EXOPair(), [6.85, 6.95])
    assert below < 0 < above


def test_robust_dpo_falls_as_its_page_says():
    assert "`-e b / (1 - 2 e)`" in pages.page("robustdpo")
    b, e = torch.tensor([50.0], dtype=torch.double), 0.1
    loss = fastrl.RobustDPO(beta=1.0, label_smoothing=e).losses(b, torch.zeros(1).double())
    pages.close(loss, -e * b / (1 - 2 * e))


def test_bco_is_at_least_dpo():
    assert "upper bound" in pages.page("bcopair")
    assert bool((loss_of(fastrl.BCOPair()).losses >= loss_of(fastrl.DPO()).losses).all())
