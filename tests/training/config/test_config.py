"""Configs: what is read, where paths point, who wins, and what a mistake says."""

import math

import pytest
from mistakes import error_of

import fastrl
from fastrl.base.errors import UserError
from fastrl.training.config.settings import load_settings, parse_command_line
from fastrl.training.config.stages import DPOConfig, RewardModelConfig, SFTConfig
from fastrl.training.config.train import Config

MINIMAL = """
[model]
path = "model"
[data]
path = "train.jsonl"
[reward]
function = "reward.py:reward"
[objective]
name = "grpo"
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "config.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def parse(path, *overrides):
    return parse_command_line(Config, "train", [str(path), *overrides])[0]


def test_the_command_line_overrides_the_file(write):
    path = write(MINIMAL + "kl_coef = 0.5\n[rollout]\ntemperature = 0.7\nmax_new_tokens = 9\n")
    options = "--rollout.temperature 0.9 --objective.name sapo --objective.tau_pos 2.0 --objective.kl_coef None"
    config = parse(path, *options.split(), "--logging.overwrite", "true")
    assert (config.rollout.temperature, config.rollout.max_new_tokens) == (0.9, 9)
    assert config.logging.overwrite
    assert config.objective.build() == fastrl.SAPO(tau_pos=2.0)


def test_every_preset_can_be_named_in_any_case(write):
    required = {
        "PPOKL": ["--objective.coef", "0.1"],
        "DrGRPO": ["--objective.max_length", "8"],
        "DeepSeekV32": ["--objective.kl_coef", "0.1", "--objective.off_policy_delta", "0.2"],
        "DRO": ["--objective.beta", "0.1"],
    }
    path = write(MINIMAL)
    for name in fastrl.PRESETS:
        for spelling in (name, name.lower()):
            config = parse(path, "--objective.name", spelling, *required.get(name, []))
            assert isinstance(config.objective.build(), fastrl.Objective)


def test_options_of_a_preset_beat_general_ones_and_the_command_line_beats_both(write):
    path = write(MINIMAL + "entropy_coef = 0.1\n[objective.presets.gspo]\nentropy_coef = 0.2\nclip_low = 0.3\n")
    assert parse(path).objective.build() == fastrl.GRPO(entropy_coef=0.1)
    gspo = ["--objective.name", "gspo"]
    assert parse(path, *gspo).objective.build() == fastrl.GSPO(entropy_coef=0.2, clip_low=0.3)
    overridden = parse(path, *gspo, "--objective.entropy_coef", "0.5").objective.build()
    assert overridden == fastrl.GSPO(entropy_coef=0.5, clip_low=0.3)


def test_paths_are_relative_to_the_file_and_on_the_command_line_to_the_working_directory(write, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    path = write(MINIMAL)
    assert load_settings(Config, path).data.path == str(tmp_path / "train.jsonl")
    assert load_settings(Config, path).reward.function == str(tmp_path / "reward.py:reward")
    assert parse(path, "--data.path", "other.jsonl").data.path == str(elsewhere / "other.jsonl")


def test_a_model_path_is_a_directory_if_there_is_one_and_else_a_hub_name(write, tmp_path):
    path = write(MINIMAL.replace('"model"', '"owner/name"'))
    assert load_settings(Config, path).model.path == "owner/name"
    (tmp_path / "owner/name").mkdir(parents=True)
    assert load_settings(Config, path).model.path == str(tmp_path / "owner/name")
    missing = write(MINIMAL.replace('"model"', '"./model"'))
    assert load_settings(Config, missing).model.path == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("[model\n", [], ["config.toml: not valid TOML", "line 1"]),
        (MINIMAL + "[rollout]\ntemperatur = 1\n", [], ["config.toml: rollout.temperatur: unknown field", "1"]),
        (MINIMAL + "[rolout]\nx = 1\n", [], ["config.toml: rolout: unknown field"]),
        (MINIMAL + "[rollout]\ntemperature = 0\n", [], ["config.toml: rollout.temperature", "greater than 0", "got 0"]),
        (MINIMAL, ["--rollout.temperature", "warm"], ["--rollout.temperature", "number", "got 'warm'"]),
        (MINIMAL, ["--reward.weights", "[1"], ["command line", "reward.weights"]),
        (MINIMAL, ["--reward.arguments", "a=1"], ["--reward.arguments: expected a table as JSON", "'a=1'"]),
        (MINIMAL.replace('path = "train.jsonl"', ""), [], ["config.toml: data.path: required"]),
        (MINIMAL.replace('path = "model"', ""), [], ["config.toml: model", "exactly one of path", "config"]),
        (MINIMAL.replace('path = "model"', 'config = "m"'), [], ["config.toml: model", "tokenizer"]),
        (MINIMAL.replace("grpo", "grop"), [], ["config.toml: objective", "expected one of", "grpo", "'grop'"]),
        (MINIMAL, ["--objective.name", "mine.py:f"], ["--objective.name", "function of yours", "custom_objective.md"]),
        (MINIMAL, ["--objective.name", "sap"], ["config.toml with --objective.name: objective", "got 'sap'"]),
        (MINIMAL + "clip = -1\n", [], ["config.toml: objective", "Clip.low", "-1"]),
        (MINIMAL + 'clip = "wide"\n', [], ["config.toml: objective.clip", "number", "'wide'"]),
        (MINIMAL + "tau_pos = 1\n", [], ["config.toml: objective", "tau_pos: grpo has no such option", "kl_coef"]),
        (MINIMAL + "tau = 1\n", [], ["config.toml: objective.tau: unknown field"]),
        (MINIMAL + "[objective.presets.sapo]\ntau = 1\n", [], ["presets.sapo.tau: sapo has no such option", "tau_pos"]),
        (MINIMAL + "[objective.presets.sap]\n", [], ["presets.sap: expected one of", "sapo"]),
        (MINIMAL + '[objective.presets.sapo]\ntau_pos = "a"\n', [], ["presets.sapo.tau_pos", "number", "'a'"]),
        (MINIMAL.replace("grpo", "drgrpo"), [], ["config.toml: objective", "max_length"]),
        (MINIMAL + "[evaluation]\nevery = 5\n", [], ["config.toml", "data.eval_path"]),
        (MINIMAL + "[rollout]\nnum_generations = 1\n", [], ["rollout.num_generations", "2", "got 1"]),
        (MINIMAL + "[optimizer]\nbetas = [0.9, 2.0]\n", [], ["config.toml: optimizer.betas: value 2: ", "1, got 2.0"]),
        (MINIMAL + "[rollout_correction]\nreject = 3\n", [], ["rollout_correction.reject: expected a list, got 3"]),
        (
            MINIMAL + "[rollout_correction]\nreject = [3, 1]\n",
            [],
            ["config.toml: rollout_correction: ", "reject[0] must"],
        ),
        (
            MINIMAL,
            ["--rollout_correction.low", "3"],
            ["config.toml with --rollout_correction.low: rollout_corr", "< high"],
        ),
        (MINIMAL, ["--rollout_correction.reject", "3"], ["--rollout_correction.reject: value 2: required"]),
        (MINIMAL, ["--rollout_correction.reject", "(3,9)"], ["--rollout_correction.reject: value 1: ", "got '(3'"]),
        ("model = 3\n" + MINIMAL.replace('[model]\npath = "model"\n', ""), [], ["model: expected a table, got 3"]),
    ],
)
def test_a_mistake_names_file_or_option_field_and_what_came(write, text, overrides, expected):
    error = error_of(parse, write(text), *overrides)
    assert [part for part in expected if part not in error] == []


def test_bounds_of_a_correction_are_a_list_in_a_file_and_on_the_command_line(write):
    table = "[rollout_correction]\nreject = [0.1, inf]\nhigh = inf\n"
    assert parse(write(MINIMAL + table)).rollout_correction.build() == fastrl.RolloutCorrection(
        high=math.inf, reject=(0.1, math.inf)
    )
    for text in ("0.5,4", "[0.5, 4]"):
        found = parse(write(MINIMAL + table), "--rollout_correction.reject", text).rollout_correction
        assert found.reject == (0.5, 4.0)


def test_every_mistake_is_told_at_once(write):
    path = write(MINIMAL + "[rollout]\ntemperature = 0\n[training]\nsteps = 0\n")
    with pytest.raises(UserError, match=r"rollout\.temperature(.|\n)*training\.steps"):
        load_settings(Config, path)


@pytest.mark.parametrize(
    ("kind", "adapters", "lr"),
    [
        (Config, None, 1e-6),
        (Config, 1, 1e-5),
        (SFTConfig, None, 1e-5),
        (SFTConfig, 1, 1e-4),
        (DPOConfig, None, 5e-7),
        (DPOConfig, 1, 5e-6),
        (RewardModelConfig, None, 1e-5),
    ],
)
def test_the_learning_rate_follows_the_command_and_adapters(kind, adapters, lr):
    tables = {"model": {"path": "a/b", "lora_rank": adapters}, "data": {"path": "rows.jsonl"}}
    if kind is Config:
        tables |= {"reward": {"function": "fastrl.rewards.exact"}, "objective": {"name": "grpo"}}
    assert kind.model_validate(tables).optimizer.lr == lr
    assert kind.model_validate(tables | {"optimizer": {"lr": 0.5}}).optimizer.lr == 0.5


def test_a_file_that_is_not_there(write, tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.toml: cannot read"):
        load_settings(Config, tmp_path / "nowhere.toml")
    path = write('base = "nowhere.toml"\n')
    with pytest.raises(
        UserError, match=r"nowhere\.toml: cannot read .*: No such file or directory \(the base of .*con"
    ):
        load_settings(Config, path)


@pytest.mark.parametrize("text", ["x = " + "[" * 100_000, "x = " + "1" * 5000, "\ufffd".encode("utf-16")])
def test_a_file_that_cannot_be_parsed(write, text):
    with pytest.raises(UserError, match=r"config\.toml: cannot read the config: "):
        load_settings(Config, write(text))


def test_a_run_does_not_replace_what_it_reads(make_config, tmp_path):
    source = tmp_path / "run" / "checkpoints" / "step-000001"
    with pytest.raises(UserError, match=r"model\.path: .* lies in logging\.output_dir"):
        make_config(model={"config": None, "tokenizer": None, "path": str(source)})


VLLM = {"engine": "vllm", "url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"rollout": {"top_p": 0.0}}, r"rollout\.top_p.*greater than 0, got 0\.0"),
        ({"rollout": {"top_p": 1.1}}, r"rollout\.top_p.*less than or equal to 1, got 1\.1"),
        ({"rollout": {"top_p": "nan"}}, r"rollout\.top_p.*got 'nan'"),
        ({"rollout": {**VLLM, "top_p": 0.9}}, r"rollout: top_k: vLLM records what .* set it"),
        ({"rollout": {**VLLM, "min_p": 0.1}}, r"rollout: top_k: vLLM records what .* set it"),
        ({"rollout": {"engine": "vllm"}}, r'rollout: url: required for engine = "vllm", .* start a server .* name it'),
        (
            {"rollout": {"url": "http://127.0.0.1:1"}},
            r"rollout: url: is for .* an engine of your own, got .*transformers",
        ),
        ({"rollout": {"api_key_file": "key"}}, r"rollout: api_key_file: is for a server, which url names"),
        ({"rollout": {"top_k": -1}}, r"rollout\.top_k.*greater than or equal to 0, got -1"),
        ({"rollout": {"top_k": 2.5}}, r"rollout\.top_k.*valid integer"),
        ({"rollout": {"min_p": -0.1}}, r"rollout\.min_p.*greater than or equal to 0, got -0\.1"),
        ({"rollout": {"min_p": 1.5}}, r"rollout\.min_p.*less than or equal to 1, got 1\.5"),
        ({"evaluation": {"samples": 2, "k": [1, 4]}}, r"k: expected at most evaluation\.samples = 2, got \(1, 4\)"),
        ({"evaluation": {"samples": -1}}, r"evaluation\.samples.*greater than or equal to 0"),
        ({"evaluation": {"samples": 2, "k": [0]}}, r"evaluation\.k.*greater than or equal to 1"),
        (  # a ranking over the minibatch
            {"objective": {"top_entropy_fraction": 0.2}, "training": {"micro_batch_tokens": 28}},
            r"objective\.top_entropy_fraction.*training\.micro_batch_tokens",
        ),
        (
            {"objective": {"name": "klcov"}, "training": {"micro_batch_tokens": 28}},
            r"objective\.name = 'klcov' ranks .*training\.micro_batch_tokens",
        ),
        # What an estimator of advantages cannot use.
        ({"advantages": {"k": 4}}, r'advantages.*k: is for estimator = "pass_at_k", got \'group\''),
        ({"advantages": {"estimator": "pass_at_k", "k": 1}}, r"advantages\.k.*greater than or equal to 2, got 1"),
        (
            {"advantages": {"estimator": "batch", "lam_alpha": 2.0}},
            r'lam_alpha: is for estimator = "gae", got \'batch\'',
        ),
        ({"advantages": {"lam_critic": 1.0}}, r'lam_critic: is for estimator = "gae"'),
        (
            {"advantages": {"estimator": "gae", "lam_alpha": 0.0}, "critic": {}},
            r"advantages\.lam_alpha.*greater than 0",
        ),
        (
            {"advantages": {"estimator": "decoupled"}, "reward": {"overlong_cache": 2}},
            r"reward\.overlong_cache: .*decoup",
        ),
        (
            {"advantages": {"estimator": "decoupled"}, "kl": {"place": "reward", "kind": "k1"}},
            r'kl\.place: .*advantages\.estimator = "decoupled"',
        ),
        (
            {"advantages": {"estimator": "maxrl"}, "kl": {"place": "reward", "kind": "k1"}},
            r'kl\.place: .*advantages\.estimator = "maxrl"',
        ),
        (
            {"advantages": {"estimator": "optimal_token_baseline"}, "rollout": {"top_k": 5}},
            r'"optimal_token_baseline" needs the whole vocabulary; leave rollout\.top_k',
        ),
        *(
            (
                {"advantages": {"estimator": name}, "rollout": {"num_generations": 1}},
                r"rollout\.num_generations: .*got 1",
            )
            for name in ("maxrl", "opo", "pass_at_k", "decoupled", "optimal_token_baseline")
        ),
        # Coefficients that could never move.
        ({"kl": {"kind": "old-new-k2"}, "training": {"minibatches": 1}}, "old-new-k2.*one update per rollout"),
        ({"kl": {"kind": "old-new"}, "training": {"minibatches": 1}}, "always 0 with one update per rollout"),
        ({"kl": {"coef": 0.0, "adaptive": "schulman", "target": 1.0}}, "cannot start from 0"),
        ({"entropy": {"target": 1.0}, "objective": {"entropy_coef": -1.0}}, "must be the positive coefficient"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(make_config, tables, expected):
    with pytest.raises(UserError, match=expected):
        make_config(**tables)
