"""`fastrl report`: all of a run is in one file that loads nothing, and nothing of a run can break out of it."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import fastrl
from fastrl.base.errors import UserError
from fastrl.cli import main
from fastrl.training.common import report
from fastrl.training.common.report_curves import UNITS, decimate, smooth
from fastrl.training.common.report_html import direction, duration

NAMES = (
    "reward",
    "reward_std",
    "length",
    "truncated",
    "loss",
    "policy_loss",
    "kl",
    "entropy",
    "ratio_mean",
    "ratio_max",
    "clip_frac",
    "clip_frac_low",
    "clip_frac_high",
    "gate_mean",
    "approx_kl",
    "tokens",
    "grad_norm",
    "lr",
    "eval/reward",
    "eval/exact_match",
    "eval/pass@4",
    "mismatch/abs_log_ratio",
    "mismatch/k3",
    "value_loss",
    "pretraining_loss",
    "critic_grad_norm",
    "time/generate",
    "time/update",
    "time/loss_share",
    "time/step",
    "time/evaluation",
    "memory/peak_gib",
    "accuracy",
    "margin",
    "never_heard_of",
    "in$odd$<i>",
)
EVIL = '</td><script>alert("1")</script><img src="http://evil.example/x.png"> & \u2028 end'
VOID = {"meta", "br", "img", "path", "use", "rect"}


class Reader(HTMLParser):
    """The text, tags and attributes of a page; it fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = "\n".join(self.words)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def make_run(path):
    """A run of 40 steps with a number of everything, and samples of each fifth step."""
    numbers = [{"step": step, **dict.fromkeys(NAMES, step / 7)} for step in range(1, 41)]
    numbers[20]["grad_norm"] = None
    (path / "metrics.jsonl").write_text(lines(*numbers))
    samples = [
        {"step": step, "prompt": f"prompt-{step}", "completion": EVIL, "reward": None if step == 5 else 0.375}
        for step in range(0, 41, 5)
    ]
    samples.append({"step": 40, "prompt": [{"role": "user", "content": "<b>hi</b>"}], "completion": "ok", "reward": 1})
    (path / "samples.jsonl").write_text(lines(*samples))
    config = {
        "model": {"path": "someone/a-model", "config": None},
        "objective": {"name": "sapo", "presets": {"gspo": {"clip_low": 0.125}}},
        "reward": {"function": EVIL},
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "summary.json").write_text(json.dumps({"steps": 40, "seconds": 3750.0, "interrupted": "SIGTERM"}))


@pytest.fixture
def run(tmp_path):
    make_run(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The report of such a run."""
    path = tmp_path_factory.mktemp("run")
    make_run(path)
    return report.write_report(path).read_text()


def test_the_page_shows_the_run(run, capsys):
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = Reader((run / "report.html").read_text())
    for name in NAMES:
        assert name in page.text
    assert "sapo · a-model" in page.text
    assert "1 h 02 min" in page.text and "SIGTERM" in page.text and "1 to 40" in page.text
    assert "grad_norm (1 times)" in page.text
    assert "objective.presets.gspo.clip_low" in page.text and "0.125" in page.text
    assert "<b>hi</b>" in page.text
    assert not list(run.glob("*.unfinished"))


def test_samples_are_of_steps_spread_over_the_run(text):
    page = Reader(text)
    shown = [step for step in range(0, 41, 5) if f"prompt-{step}" in page.words]
    assert len(shown) == report.SAMPLED_STEPS
    assert {0, 40} <= set(shown)
    assert max(np.diff(shown)) == 10


def test_nothing_of_the_run_becomes_markup_and_nothing_is_fetched(text):
    page = Reader(text)
    assert not {"script", "img", "i<i>", "link", "iframe", "object", "image"} & page.tags
    assert EVIL in page.text
    for name, value in page.attributes:
        assert name != "src"
        if name in ("href", "xlink:href"):
            assert value.startswith("#")
    assert "@import" not in text
    assert {f"url({part}" for part in ("h", "/", "'", '"')} & {text[i : i + 5] for i in range(len(text))} == set()


def test_ids_are_unique_and_every_reference_finds_its_own(text):
    page = Reader(text)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 0
    assert {value[1:] for name, value in page.attributes if name == "xlink:href"} <= set(ids)


def test_every_metric_is_in_one_panel():
    found = report.series([{"step": 1, **dict.fromkeys(NAMES, 1.0)}])
    panels = [panel for panels in report.sections(found).values() for panel in panels]
    assert sorted(name for panel in panels for name in panel.lines) == sorted(NAMES)
    sections = {name: title for title, ps in report.sections(found).items() for panel in ps for name in panel.lines}
    assert sections["eval/pass@4"] == sections["eval/reward"] == "Reward and evaluation"
    assert sections["value_loss"] == sections["pretraining_loss"] == "Loss, entropy and KL"
    assert sections["critic_grad_norm"] == sections["memory/peak_gib"] == "Optimisation"
    assert {name for name, title in sections.items() if title == report.OTHERS} == {"never_heard_of", "in$odd$<i>"}
    (alone,) = (panel for panel in panels if "never_heard_of" in panel.lines)
    assert list(alone.lines) == ["never_heard_of"]


def test_every_metric_that_is_named_is_one_that_something_writes():
    """In quotes somewhere else in the package; of a prefix, its beginning."""
    panels = {name for groups in report.SECTIONS.values() for group in groups for name in group}
    named = panels.union(report.BACKGROUND, UNITS, *report.PANELS.values())
    files = [path for path in Path(fastrl.__file__).parent.rglob("*.py") if not path.name.startswith("report")]
    code = "".join(path.read_text() for path in files)
    assert [name for name in named if (f'"{name}' if name.endswith("/") else f'"{name}"') not in code] == []


def test_the_table_says_where_a_metric_was_best(tmp_path):
    values = [(1, 0.5, 3.0), (2, 0.875, 1.25), (3, 0.25, 2.0)]
    records = [{"step": step, "accuracy": accuracy, "loss": loss} for step, accuracy, loss in values]
    (tmp_path / "metrics.jsonl").write_text(lines(*records))
    text = report.write_report(tmp_path).read_text()
    assert "<td>accuracy</td><td>0.25</td><td>0.875</td><td>2</td><td>highest</td>" in text
    assert "<td>loss</td><td>2</td><td>1.25</td><td>2</td><td>lowest</td>" in text
    assert f"<title>{tmp_path.name}</title>" in text  # without a config


def test_a_policys_surrogate_has_no_best(text):
    assert "<td>loss</td>" not in text and "<td>value_loss</td>" in text
    assert [direction(name) for name in ("eval/pass@4", "time/reward", "time/loss", "length", "loss")] == [
        1,
        0,
        0,
        0,
        -1,
    ]


def test_phases_are_shares_of_the_steps(tmp_path):
    times = {"time/generate": 3.0, "time/update": 5.0, "time/loss": 2.0, "time/step": 10.0, "time/loss_share": 0.2}
    (tmp_path / "metrics.jsonl").write_text(lines({"step": 1, **times, "time/evaluation": 7.0}, {"step": 2, **times}))
    text = report.write_report(tmp_path).read_text()
    assert "<td>time/update</td><td>2</td><td>5</td><td>10.0</td><td>50.0%</td>" in text
    assert "<td>time/evaluation</td><td>1</td><td>7</td><td>7.0</td><td>35.0%</td>" in text
    # The loss is a part of the update, and evaluations lie beside the steps.
    assert [text.count(f"</i>{name} ") for name in ("time/update", "time/loss", "time/evaluation")] == [1, 0, 0]
    assert "</i>rest 20.0%" in text
    assert "time/loss_share" in Reader(text).words and "<td>time/loss_share" not in text  # a curve, and no phase


@pytest.mark.parametrize("content", ["", '{"step": 1, "rew', '\n \r\n{"step": 1}\n'])
def test_a_run_that_has_only_begun(content, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(content)
    Reader(report.write_report(tmp_path).read_text())
    report.plot_curves(report.read_records(tmp_path / "metrics.jsonl"), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_that_is_being_written_is_left_out(run):
    path = run / "metrics.jsonl"
    whole = report.read_records(path)
    with path.open("ab") as file:
        file.write('{"step": 41, "reward": "é'.encode()[:-1])
    assert report.read_records(path) == whole
    report.write_report(run)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("line", ['{"step": 41, "rew', '{"reward": 1}', "[1]", '{"step": "1"}'])
def test_a_line_that_cannot_be_read_is_named(name, line, run, capsys):
    path = run / name
    number = len(path.read_text().split("\n"))
    path.write_text(path.read_text() + line + "\n" + '{"step": 42}\n')
    assert main(["report", str(run)]) == 2
    assert f"{path}:{number}: " in capsys.readouterr().err
    assert not (run / "report.html").exists()


def test_a_whole_last_line_that_cannot_be_read_is_a_mistake(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "rew\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:41: not valid JSON"):
        report.write_report(run)


def test_a_number_too_large_for_a_curve_is_left_out_of_it():
    assert math.isnan(report.series([{"step": 1, "loss": 10**400}])["loss"].values[0])


def test_a_directory_without_a_run_and_a_broken_config_are_mistakes(run, tmp_path):
    with pytest.raises(UserError, match=r"nothing: expected a run's directory, but it holds no metrics\.jsonl"):
        report.write_report(tmp_path / "nothing")
    (run / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        report.write_report(run)


def test_without_matplotlib_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("fastrl.base.dependencies.find_spec", lambda name: None)
    assert main(["report", "runs/x"]) == 2
    assert "report needs packages that are not installed: pip install matplotlib\n" in capsys.readouterr().err


def test_thinning_keeps_both_ends_and_every_extreme():
    x = np.arange(10_000)
    y = np.random.default_rng(0).normal(size=len(x))
    y[1234], y[8765] = 50.0, -60.0
    thin_x, thin_y = decimate(x, y, 1000)
    assert 500 < len(thin_x) <= 1000
    assert thin_x[0] == 0 and thin_x[-1] == 9999 and (np.diff(thin_x) > 0).all()
    assert thin_y[thin_x == 1234] == 50.0 and thin_y[thin_x == 8765] == -60.0
    np.testing.assert_array_equal(thin_y, y[thin_x])
    short = decimate(x[:1000], y[:1000], 1000)
    np.testing.assert_array_equal(short[1], y[:1000])


def test_smoothing_keeps_constants_and_straight_lines_and_calms_noise():
    assert (smooth(np.full(1000, 23.4)) == 23.4).all()
    line = np.arange(1000.0)
    np.testing.assert_allclose(smooth(line)[10:-10], line[10:-10])
    noise = np.random.default_rng(0).normal(size=5000)
    assert smooth(noise).std() < 0.15


@pytest.mark.parametrize(("steps", "curves"), [(200, 1), (201, 2)])
def test_only_long_curves_are_smoothed(steps, curves, tmp_path):
    records = [{"step": step, "reward": math.sin(step)} for step in range(steps)]
    (tmp_path / "metrics.jsonl").write_text(lines(*records))
    # Of a path that is one of the metric's, and no line of its key.
    assert report.write_report(tmp_path).read_text().count("stroke: var(--c0)") == curves


def test_a_long_run_gives_a_small_file(tmp_path):
    noise = np.random.default_rng(0).normal(size=(10_000, 8)).tolist()
    names = ("reward", "loss", "entropy", "kl", "length", "grad_norm", "clip_frac", "something")
    records = ({"step": step, **dict(zip(names, row, strict=True))} for step, row in enumerate(noise))
    (tmp_path / "metrics.jsonl").write_text(lines(*records))
    sample = {"step": 1, "prompt": "x" * 50_000, "completion": "y", "reward": 0.0}
    (tmp_path / "samples.jsonl").write_text(lines(*[sample] * 500))
    assert report.write_report(tmp_path).stat().st_size < 1e6


@pytest.mark.parametrize(
    ("names", "titles"),
    [
        (("reward", "entropy", "clip_frac", "length", "loss"), list(report.PANELS)),
        (("loss", "lr", "time/step", "length", "accuracy"), ["completion length [tokens]", "loss", "accuracy"]),
        (("a", "b", "c", "d", "e"), ["a", "b", "c", "d"]),
    ],
)
def test_curves_show_what_there_is(names, titles, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "draw_png", lambda panels, picture: drawn.extend(panel.title for panel in panels))
    report.plot_curves([{"step": 1, **dict.fromkeys(names, 0.5)}], tmp_path / "curves.png")
    assert drawn == titles


def test_durations():
    assert [duration(seconds) for seconds in (0.25, 59, 61, 3600, 36_000_000)] == [
        "0.25 s",
        "59 s",
        "1 min 01 s",
        "1 h 00 min",
        "10,000 h 00 min",
    ]
