"""`fastrl report`: all of a run is in one file that loads nothing, and nothing of a run can break out of it."""

import base64
import hashlib
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from run_files import write_json_lines

import fastrl
from fastrl.base.errors import UserError
from fastrl.cli import main
from fastrl.report import panels as drawn
from fastrl.report import report
from fastrl.report.curves import Panel, decimate, draw_svg, smooth
from fastrl.report.frame import duration
from fastrl.report.metrics import NESTED, UNITS, direction
from fastrl.report.records import read_records, series

LOSSES = ("loss", "policy_loss", "value_loss", "pretraining_loss", "entropy", "kl", "approx_kl", "accuracy", "margin")
#: Section of the report -> metrics that belong in it.
SECTIONS = {
    "Reward and evaluation": ("reward", "reward_std", "eval/reward", "eval/exact_match", "eval/pass@4"),
    "Loss, entropy and KL": LOSSES,
    "Ratios and clipping": ("ratio_mean", "ratio_max", "clip_frac", "clip_frac_low", "clip_frac_high", "gate_mean"),
    "Lengths": ("length", "truncated", "tokens"),
    "Optimisation": ("grad_norm", "critic_grad_norm", "lr", "memory/peak_gib"),
    "Mismatch of rollout and training": ("mismatch/abs_log_ratio", "mismatch/k3"),
    "Time by phase": ("time/generate", "time/update", "time/loss_share", "time/step", "time/evaluation"),
    "Others": ("never_heard_of", "in$odd$<i>"),
}
NAMES = [name for names in SECTIONS.values() for name in names]
EVIL = '</td><script>alert("1")</script><img src="http://evil.example/x.png"> & \u2028 end'
VOID = {"meta", "br", "img", "path", "use", "rect"}


class Reader(HTMLParser):
    """The text, tags and attributes of a page; it fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.elements: list[list[tuple[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = "\n".join(self.words)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        self.elements.append(attrs)
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


def make_run(path):
    """A run of 40 steps with a number of everything, and samples of each fifth step."""
    numbers = [{"step": step, **dict.fromkeys(NAMES, step / 7)} for step in range(1, 41)]
    numbers[20]["grad_norm"] = None
    write_json_lines(path / "metrics.jsonl", numbers)
    samples = [
        {"step": step, "prompt": f"prompt-{step}", "completion": EVIL, "reward": None if step == 5 else 0.375}
        for step in range(0, 41, 5)
    ]
    samples.append({"step": 40, "prompt": [{"role": "user", "content": "<b>hi</b>"}], "completion": "ok", "reward": 1})
    write_json_lines(path / "samples.jsonl", samples)
    config = {
        "model": {"path": "someone/a-model", "config": None},
        "objective": {"name": "sapo", "presets": {"gspo": {"clip_low": 0.125}}},
        "reward": {"function": EVIL},
    }
    (path / "config.json").write_text(json.dumps(config))
    facts = {"started": "2026-11-28 09:00 UTC", "objective": "sapo", "model": "someone/a-model", "seed": "17"}
    (path / "facts.json").write_text(json.dumps(facts))
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


@pytest.fixture
def page(text):
    return Reader(text)


@pytest.fixture
def report_of(tmp_path):
    """The report of a run with these records."""

    def report_of(*records):
        write_json_lines(tmp_path / "metrics.jsonl", records)
        return report.write_report(tmp_path).read_text()

    return report_of


def test_the_page_shows_the_run(page):
    for name in NAMES:
        assert name in page.text
    assert "sapo · someone/a-model" in page.text
    assert "2026-11-28 09:00 UTC" in page.words and "17" in page.words
    assert "1 h 02 min" in page.text and "SIGTERM" in page.text and "1 to 40" in page.text
    assert "grad_norm (1 times)" in page.text
    assert "objective.presets.gspo.clip_low" in page.text and "0.125" in page.text
    assert "<b>hi</b>" in page.text


def test_samples_are_of_steps_spread_over_the_run(page):
    shown = [step for step in range(0, 41, 5) if f"prompt-{step}" in page.words]
    assert len(shown) == report.SAMPLED_STEPS
    assert {0, 40} <= set(shown)
    assert max(np.diff(shown)) == 10


def test_a_sample_says_what_was_expected_and_how_its_reward_came_about(report_of, tmp_path):
    shared = {"step": 1, "prompt": "6 x 7 =", "columns": {"answer": "42", "tests": "x" * 1000, "parts": [{"a": 1}]}}
    rows = [
        {
            "completion": "42",
            "reward": 0.75,
            "rewards": {"exact": 1.0, "style": None, "model": 0.5},
            "length_price": -0.5,
        },
        {"completion": "", "reward": None, "rewards": {"exact": None}, "steps": [[1, 0.25], [2, 1]]},
        {"completion": "43", "reward": 0, "rewards": {"exact": 0}},
    ]
    write_json_lines(tmp_path / "samples.jsonl", [shared | row for row in rows])
    reward = {"function": ["a.py:exact", "a.py:style"], "weights": [1.0, 3.0], "model": "m", "model_weight": 0.5}
    (tmp_path / "config.json").write_text(json.dumps({"reward": reward}))
    text = report_of({"step": 1})
    assert "reward <b>0.75</b>" in text and "= exact 1 + style none + model 0.5 × 0.5 + price of length -0.5<" in text
    assert "reward <b>none</b>" in text and "by exact; of steps 0.25, 1<" in text and "<em>empty</em>" in text
    words = Reader(text).words
    assert (
        words.count("6 x 7 =") == words.count("answer") == words.count("42") / 2 == 1
    )  # one prompt, three completions
    assert "and 400 more characters" in text and '[{"a": 1}]' in words


def test_nothing_of_the_run_becomes_markup_and_nothing_is_fetched(text, page):
    assert not {"img", "i<i>", "link", "iframe", "object", "image"} & page.tags
    assert EVIL in page.text
    (policy,) = (value for name, value in page.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for tag in ("style", "script"):  # the policy allows one of each, by its hash
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'" in policy
    for name, value in page.attributes:
        assert name not in ("src", "style") and not name.startswith("on")
        if name in ("href", "xlink:href"):
            assert value.startswith("#")
    assert "@import" not in text
    assert {f"url({part}" for part in ("h", "/", "'", '"')} & {text[i : i + 5] for i in range(len(text))} == set()


def test_ids_are_unique_and_every_reference_finds_its_own(page):
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 0
    assert {value[1:] for name, value in page.attributes if name == "xlink:href"} <= set(ids)


def test_every_metric_is_in_one_panel():
    sections = drawn.sections(NAMES)
    assert {title: sorted(itertools.chain(*groups)) for title, groups in sections.items()} == {
        title: sorted(names) for title, names in SECTIONS.items()
    }
    assert sections["Others"] == [("never_heard_of",), ("in$odd$<i>",)]
    assert sections["Time by phase"][1:] == [("time/loss_share",)]


def test_every_metric_that_is_named_is_one_that_something_writes():
    """In quotes somewhere else in the package; of a prefix, its beginning."""
    panels = {name for groups in drawn.SECTIONS.values() for group in groups for name in group}
    usual = (*drawn.ONES, *drawn.SETTINGS, *drawn.NEWS)
    named = panels.union(drawn.BACKGROUND, usual, *UNITS.values(), *drawn.PANELS.values())
    files = [path for path in Path(fastrl.__file__).parent.rglob("*.py") if path.parent.name != "report"]
    code = "".join(path.read_text() for path in files)
    assert [name for name in named if (f'"{name}' if name.endswith("/") else f'"{name}"') not in code] == []


def test_the_table_says_where_a_metric_was_best(report_of, tmp_path):
    values = [(1, 0.5, 3.0), (2, 0.875, 1.25), (3, 0.25, 2.0)]
    text = report_of(*[{"step": step, "accuracy": accuracy, "loss": loss} for step, accuracy, loss in values])
    assert "<td>accuracy</td><td>0.25</td><td>0.875 (highest, at step 2)</td>" in text
    assert "<td>loss</td><td>2</td><td>1.25 (lowest, at step 2)</td>" in text
    assert f"<title>{tmp_path.name}</title>" in text  # without a config


@pytest.mark.parametrize(
    ("name", "values", "usual"),
    [
        ("kl", (0.0, 1e-7), 0.0),
        ("kl", (0.0, 1e-4), None),
        ("kl", (0.0, None), None),
        ("ratio_max", (1.0, 1.0), 1.0),
        ("ratio_max", (0.0, 0.0), None),
        ("lr", (2e-6, 2e-6), 2e-6),
        ("lr", (0.0, 2e-7), None),
        ("without_variance", (1.0, 1.0), None),
        ("eval/exact_match", (0.0, 0.0), None),  # better is higher
        ("grad_norm", (0.0, 0.0), None),  # a finding
        ("time/reward", (0.0, 0.0), None),
    ],
)
def test_a_metric_that_keeps_its_usual_value_is_named_instead_of_drawn(name, values, usual, report_of):
    lines = series([{"step": step, name: value} for step, value in enumerate(values)])
    assert drawn.usual_value(name, [lines[name]]) == usual
    if name == "kl":  # beside one that is drawn, in the same panel and in another
        text = report_of(*[{"step": i, "kl": x, "clip_frac": x, "clip_frac_low": i} for i, x in enumerate(values)])
        named = "kept their usual value: kl (0)</p>" in text
        assert named == (usual == 0) == ('aria-label="kl, by step"' not in text)
        assert 'aria-label="clip_frac, clip_frac_low, by step"' in text


@pytest.mark.parametrize("steps", [[1], [1, 2], [1, 2, 3]])
def test_steps_are_whole_numbers_with_names_and_units_and_values_for_the_pointer(steps):
    lines = series([{"step": step, "entropy": 100.0 * step, "kl": None} for step in steps])
    page = Reader(draw_svg(Panel("entropy, kl", lines, "nats per token", key=True)))
    words = {word.strip() for word in page.words} - {""}
    assert {*map(str, steps), "step", "nats per token", "entropy", "kl"} <= words
    assert not [word for word in words if "." in word]
    plot = json.loads(dict(page.attributes)["data-plot"])
    assert plot["lines"] == [["entropy", steps, [100 * step for step in steps]], ["kl", [], []]]
    left, right, top, bottom = plot["box"]
    assert 0 < left < right < 316.8 and 0 < top < bottom < 194.4 and plot["x"][0] < 1 and plot["x"][1] > steps[-1]


def test_a_policys_surrogate_has_no_best(text):
    assert "<td>loss</td>" not in text and "<td>value_loss</td>" in text
    directions = {"eval/pass@4": 1, "time/reward": 0, "time/loss": 0, "length": 0, "loss": -1}
    directions |= {"mean_time/reward": 0, "mean_time/loss": 0, "time/imbalance": 0}
    assert {name: direction(name) for name in directions} == directions


def test_phases_are_shares_of_the_steps(report_of):
    times = {"time/generate": 3.0, "time/update": 5.0, "time/loss": 2.0, "time/step": 10.0, "time/loss_share": 0.2}
    times |= {"time/engine": 9.0, "time/tools": 1.0}
    text = report_of({"step": 1, **times, "time/evaluation": 7.0}, {"step": 2, **times})
    assert "<td>time/update</td><td>2</td><td>5</td><td>10.0</td><td>50.0%</td>" in text
    assert "<td>time/evaluation</td><td>1</td><td>7</td><td>7.0</td><td>35.0%</td>" in text
    # The loss is a part of the update, the engine draws during any phase, and evaluations lie beside the steps.
    assert [text.count(f"</svg>{name} ") for name in ("time/update", *NESTED)] == [1] + [0] * len(NESTED)
    assert "</svg>rest 20.0%" in text
    assert "time/loss_share" in Reader(text).words and "<td>time/loss_share" not in text  # a curve, and no phase


#: Steps of several ranks: of the 8 seconds, the update takes 6 of the slowest rank and 4 of an average one.
RANKS = {"time/reward": 1.0, "time/update": 6.0, "time/loss": 3.0, "time/step": 8.0, "memory/peak_gib": 20.0}
RANKS |= {"mean_time/reward": 0.5, "mean_time/update": 4.0, "mean_time/loss": 1.5, "mean_memory/peak_gib": 15.0}
RANKS |= {"time/imbalance": 2.5 / 8, "time/evaluation": 2.0, "mean_time/evaluation": 1.0}
ONE_RANK = {name: value for name, value in RANKS.items() if not name.startswith("mean_") and name != "time/imbalance"}


def plots(text):
    """What the pointer shows of each panel, by its title."""
    found = [dict(attributes) for attributes in Reader(text).elements if ("role", "img") in attributes]
    return {svg["aria-label"].removesuffix(", by step"): json.loads(svg["data-plot"]) for svg in found}


def test_the_slowest_rank_stands_beside_the_mean_of_all(report_of):
    text = report_of({"step": 1, **RANKS}, {"step": 2, **RANKS})
    assert "<th>slowest rank [s]</th><th>mean of ranks [s]</th>" in text and "<th>waiting</th>" in text
    for row in (
        "time/reward 2 1 0.5 2.0 12.5% 6.2%",
        "time/update 2 6 4 12.0 75.0% 25.0%",
        "time/loss 2 3 1.5 6.0 37.5% –",  # a part of the update
        "time/evaluation 2 2 1 4.0 25.0% –",  # beside the steps
        "time/step 2 8 – 16.0 100.0% 31.2%",
    ):
        assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in row.split())}</tr>" in text
    phases = "time/reward, time/update, time/loss, time/step, time/evaluation"
    drawn = plots(text)
    assert list(drawn) == ["memory/peak_gib", phases, "time/imbalance"]
    assert [plot["means"] for plot in drawn.values()] == [{"memory/peak_gib": [15, 15]}, {}, {}]
    assert "memory/peak_gib (dashed: mean of the ranks)" in Reader(text).words
    assert text.count("stroke-dasharray") == 1
    assert "mean_" not in text  # in no table, panel or list of what is not drawn


def test_one_process_has_no_mean_of_ranks(report_of):
    text = report_of({"step": 1, **ONE_RANK})
    assert "<td>time/update</td><td>1</td><td>6</td><td>6.0</td><td>75.0%</td></tr>" in text
    assert not [word for word in ("rank", "waiting", "dashed", "stroke-dasharray", "time/imbalance") if word in text]
    assert {str(plot["means"]) for plot in plots(text).values()} == {"{}"}


def test_a_run_resumed_with_more_processes_waits_only_then(report_of):
    text = report_of({"step": 1, **ONE_RANK}, {"step": 2, **RANKS})
    assert "<td>time/update</td><td>2</td><td>6</td><td>5</td><td>12.0</td><td>75.0%</td><td>12.5%</td>" in text
    assert plots(text)["memory/peak_gib"]["means"] == {"memory/peak_gib": [20, 15]}


def test_the_mean_of_ranks_is_dashed_beside_each_run(tmp_path):
    for name, record in (("one", ONE_RANK), ("several", RANKS)):
        (tmp_path / name).mkdir()
        write_json_lines(tmp_path / name / "metrics.jsonl", [{"step": step, **record} for step in (1, 2)])
    text = report.write_report(tmp_path / "one", tmp_path / "several", output=tmp_path / "both.html").read_text()
    drawn = plots(text)
    assert set(drawn) == ONE_RANK.keys() | {"time/imbalance"}
    assert drawn["time/update"]["lines"] == [["one", [1, 2], [6, 6]], ["several", [1, 2], [6, 6]]]
    assert {name: plot["means"] for name, plot in drawn.items()} == {
        name: {"several": [RANKS[f"mean_{name}"]] * 2} if f"mean_{name}" in RANKS else {} for name in drawn
    }
    assert (
        text.count("<th>records</th><th>mean [s]</th>") == text.count("<th>records</th><th>slowest rank [s]</th>") == 1
    )


@pytest.mark.parametrize("content", ["", '{"step": 1, "rew', '\n \r\n{"step": 1}\n'])
def test_a_run_that_has_only_begun(content, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(content)
    Reader(report.write_report(tmp_path).read_text())
    report.plot_curves(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_that_is_being_written_is_left_out(tmp_path, capsys):
    path, whole = tmp_path / "metrics.jsonl", {"step": 1, "reward": 0.5}
    path.write_bytes((json.dumps(whole) + '\n{"step": 41, "reward": "é').encode()[:-1])
    assert read_records(path) == [whole]
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("line", ['{"step": 41, "rew', '{"reward": 1}', "[1]", '{"step": "1"}'])
def test_a_line_that_cannot_be_read_is_named(name, line, run, capsys):
    path, whole = run / name, (run / name).read_text()
    number = len(whole.split("\n"))
    for following in ('{"step": 42}\n', ""):  # the last line too, if it is whole
        path.write_text(whole + line + "\n" + following)
        assert main(["report", str(run)]) == 2
        assert f"{path}:{number}: {'not valid JSON' * line.endswith('rew')}" in capsys.readouterr().err
        assert not (run / "report.html").exists()


def test_runs_are_drawn_over_each_other(tmp_path, capsys, monkeypatch):
    folders = [tmp_path / name / "run" for name in ("first", "second")]
    for i, folder in enumerate(folders):
        folder.mkdir(parents=True)
        numbers = [{"step": step, "reward": i + step, "kl": 0.0, "time/step": 1.0} for step in (1, 2)]
        write_json_lines(folder / "metrics.jsonl", [row | ({"only_here": 7.0} if i else {}) for row in numbers])
        write_json_lines(folder / "samples.jsonl", [{"step": 1, "prompt": f"<{i}", "completion": "", "reward": 0}])
        config = {"training": {"seed": i, "steps": 2}, **({"extra": 5} if i else {})}
        (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, folders)]) == 0
    assert capsys.readouterr().out == "compare.html\n"
    page = Reader(text := (tmp_path / "compare.html").read_text())
    assert "<td>training.seed</td><td>0</td><td>1</td>" in text and "<td>extra</td><td>–</td><td>5</td>" in text
    assert "training.steps" not in text and "kept their usual value: kl (0)" in text
    assert {"first/run", "second/run", "<0", "<1"} <= {word.strip() for word in page.words}
    plots = [json.loads(value)["lines"] for name, value in page.attributes if name == "data-plot"]
    assert [["first/run", [1, 2], [1, 2]], ["second/run", [1, 2], [2, 3]]] in plots
    assert [["first/run", [], []], ["second/run", [1, 2], [7, 7]]] in plots  # which keeps its colour
    assert not (folders[0] / "report.html").exists()


def test_what_cannot_be_compared_or_written(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    write_json_lines(run / "metrics.jsonl", [{"step": 1}])
    for arguments, told in (
        ([run, run], f"report: expected different runs, got {run}, {run}"),
        ([run] * 8, "report: expected at most 7 runs, one for each colour, got 8"),
        ([run, "--output", tmp_path / "no" / "x.html"], f"{tmp_path}/no/x.html: cannot write it: No such file"),
        ([run, "--output", tmp_path], f"{tmp_path}: cannot write it: Is a directory"),
    ):
        assert main(["report", *map(str, arguments)]) == 2
        assert told in capsys.readouterr().err
    assert not list(tmp_path.parent.glob("*.unfinished"))


def test_a_number_too_large_for_a_curve_is_left_out_of_it():
    assert math.isnan(series([{"step": 1, "loss": 10**400}])["loss"].values[0])


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
def test_only_long_curves_are_smoothed(steps, curves, report_of):
    text = report_of(*[{"step": step, "reward": math.sin(step)} for step in range(steps)])
    # Of a path that is one of the metric's, and no line of its key.
    assert text.count('stroke="var(--c0)"') == curves


def test_a_long_run_gives_a_small_file(report_of, tmp_path):
    noise = np.random.default_rng(0).normal(size=(10_000, 8)).tolist()
    names = ("reward", "loss", "entropy", "kl", "length", "grad_norm", "clip_frac", "something")
    write_json_lines(
        tmp_path / "samples.jsonl", [{"step": 1, "prompt": "x" * 50_000, "completion": "y", "reward": 0.0}] * 500
    )
    text = report_of(*[{"step": step, **dict(zip(names, row, strict=True))} for step, row in enumerate(noise)])
    assert len(text.encode()) < 1e6


@pytest.mark.parametrize(
    ("names", "titles"),
    [
        (("reward", "entropy", "clip_frac", "length", "loss"), list(drawn.PANELS)),
        (("loss", "lr", "time/step", "length", "accuracy"), ["completion length [tokens]", "loss", "accuracy"]),
        (("a", "b", "c", "d", "e"), ["a", "b", "c", "d"]),
        (("time/update", "time/imbalance", "mean_time/update", "mean_memory/peak_gib", "a"), ["a"]),
    ],
)
def test_curves_show_what_there_is(names, titles, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(report, "draw_png", lambda panels, picture: found.extend(panel.title for panel in panels))
    write_json_lines(tmp_path / "metrics.jsonl", [{"step": 1, **dict.fromkeys(names, 0.5)}])
    report.plot_curves(tmp_path)
    assert found == titles


def test_durations():
    texts = {0.25: "0.25 s", 59: "59 s", 61: "1 min 01 s", 3600: "1 h 00 min", 36_000_000: "10,000 h 00 min"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
