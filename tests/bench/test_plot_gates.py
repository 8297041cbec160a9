"""`fastrl plot-gates`: the weights it draws, how presets share panels, and what it says to a mistake."""

import math

import pytest
import torch

import fastrl
from fastrl.bench import plot_gates
from fastrl.cli import main
from fastrl.objectives.presets import any_numbers


def weight(name: str, ratio: float, advantage: float) -> float:
    return plot_gates.weights(any_numbers(name), torch.tensor([ratio], dtype=torch.float64), advantage).item()


def names(panel):
    return panel.texts[0].get_text().replace("\n", " ").split(", ")


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", fastrl.PRESETS)
def test_every_weight_is_one_on_policy(name, advantage):
    # Not by normalisation: the gradient itself is -A there.
    assert weight(name, 1.0, advantage) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(2.0, 1.0, 0.0), (0.5, 1.0, 0.5), (0.5, -1.0, 0.0), (2.0, -1.0, 2.0)]
)
def test_ppo_stops_where_the_clip_does(ratio, advantage, expected):
    assert weight("PPO", ratio, advantage) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("advantage", "tau"), [(1.0, 1.0), (-1.0, 1.05)])
def test_sapo_is_a_bell(advantage, tau):
    for ratio in (0.2, 0.9, 3.0, 8.0):
        assert weight("SAPO", ratio, advantage) == pytest.approx(ratio / math.cosh(tau * (ratio - 1) / 2) ** 2)


def test_dppo_stops_by_the_probability_which_cannot_exceed_one():
    old = plot_gates.OLD_PROBABILITY
    for advantage, change, expected in ((1.0, 0.16, 0.0), (1.0, 0.14, 1 + 0.14 / old), (-1.0, -0.16, 0.0)):
        assert weight("DPPO", 1 + change / old, advantage) == pytest.approx(expected)
    assert math.isnan(weight("DPPO", 1.01 / old, 1.0)) and weight("PPO", 1.01 / old, -1.0) > 1


def test_the_weight_does_not_depend_on_the_advantages_size_nor_on_other_terms():
    ratios = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    objective = fastrl.CISPO(
        kl=fastrl.KL("k3", 0.5), entropy_coef=0.1, off_policy_delta=0.1, rollout_correction=fastrl.RolloutCorrection()
    )
    assert plot_gates.weights(objective, ratios, -7.0).tolist() == pytest.approx([0.5, 1.0, 3.0])


def test_every_preset_is_named_once_and_its_panel_shows_its_own_weights():
    figure = plot_gates.figure(fastrl.PRESETS)
    named = [name for panel in figure.axes for name in names(panel)]
    assert sorted(named) == sorted([*fastrl.PRESETS, "DPPO (kl)"])
    for panel in figure.axes:
        positive, negative = (
            line for line in panel.lines if line.get_color() in (plot_gates.POSITIVE, plot_gates.NEGATIVE)
        )
        ratios = torch.as_tensor(positive.get_xdata())
        assert (ratios == 1.0).any()
        for name in names(panel):
            for line, advantage in ((positive, 1.0), (negative, -1.0)):
                objective = fastrl.DPPO("kl") if name == "DPPO (kl)" else any_numbers(name)
                expected = plot_gates.weights(objective, ratios, advantage)
                torch.testing.assert_close(torch.as_tensor(line.get_ydata()), expected, equal_nan=True)


def test_titles_are_no_wider_than_their_panels():
    """At any number of presets and of a gate's numbers; what is too long for a line takes two."""
    figure = plot_gates.figure(fastrl.PRESETS)
    figure.draw_without_rendering()
    for panel in figure.axes:
        box = panel.get_window_extent()
        for title in (panel.texts[0], panel._left_title):
            assert title.get_window_extent().x1 <= box.x1 + 1, title.get_text()


def test_presets_of_one_gate_share_a_panel_and_its_label_tells_the_gate():
    (panel, other) = plot_gates.figure(["PPO", "SAPO", "GRPO"]).axes
    assert panel.texts[0].get_text() == "PPO, GRPO"
    assert panel.get_title(loc="left") == "Clip(low=0.2, high=0.2)\ntoken ratio"
    assert other.get_title(loc="left") == "SoftGate(tau_pos=1, tau_neg=1.05)\ntoken ratio"


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_command_writes_what_the_suffix_says(suffix, magic, tmp_path, capsys):
    path = tmp_path / f"gates.{suffix}"
    assert main(["plot-gates", "--output", str(path), "--presets", "sapo, GRPO,drgrpo"]) == 0
    assert path.read_bytes().startswith(magic)
    assert capsys.readouterr().out.strip() == str(path)


def test_the_same_figure_is_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg"):
        assert main(["plot-gates", "--output", str(tmp_path / name), "--presets", "sapo"]) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    "name", [name for name in fastrl.PRESETS if not isinstance(any_numbers(name).gate, fastrl.NoGate)]
)
def test_a_page_can_have_the_figure_of_one_preset(name, tmp_path):
    path = tmp_path / f"{name.lower()}.svg"
    plot_gates.draw_one(name, path)
    text = path.read_text(encoding="utf-8")
    assert f">{name}<" in text and text.count("A &gt; 0") == 1  # in the legend
    assert len(text) < 30_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--presets", "sapo,sap"], ["--presets", "'sap'", "REINFORCE", "DeepSeekV32"]),
        (["--presets", ""], ["--presets", "''"]),
        (["--output", "gates.gif"], ["--output", "gates.gif", ".png, .svg, .pdf"]),
        (["--output", "nowhere/gates.png", "--presets", "ppo"], ["--output", "nowhere/gates.png"]),
    ],
)
def test_a_mistake_is_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plot-gates", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("fastrl.base.dependencies.find_spec", lambda name: None)
    assert main(["plot-gates"]) == 2
    assert "plot-gates needs packages that are not installed: pip install matplotlib\n" in capsys.readouterr().err
