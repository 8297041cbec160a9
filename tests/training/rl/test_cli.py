"""The command line: subcommands, exit codes, and one line for a mistake."""

import io
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from places import ROOT
from python import python

import fastrl.doctor
from fastrl.base import dependencies
from fastrl.base.errors import UserError
from fastrl.cli import COMMANDS, main
from fastrl.passes import blocks
from fastrl.training.config.settings import parse_command_line
from fastrl.training.config.train import Config


def test_train_runs_a_config_with_overrides(example, tmp_path, capsys):
    options = "--objective.name sapo --objective.tau_pos 2.0 --training.steps 1 --rollout.prompts_per_step 4"
    logging = ["--logging.output_dir", str(tmp_path), "--logging.tensorboard", "false"]
    assert main(["train", str(example / "config.toml"), *options.split(), *logging]) == 0
    output = capsys.readouterr().out
    assert "sapo: 1 steps" in output
    assert "eval/exact_match 0." in output
    assert (tmp_path / "summary.json").exists()


def test_a_path_that_utf_8_cannot_encode_is_printed(monkeypatch):
    def run(command, arguments):
        print(arguments[0])
        return 0

    written = io.BytesIO()
    monkeypatch.setattr("fastrl.cli._run", run)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="utf-8", write_through=True))
    assert main(["sample", "a\udcff.toml"]) == 0
    assert written.getvalue() == b"a\\udcff.toml\n"


def test_a_field_of_two_numbers_is_read_from_the_command_line(example):
    about = {"kind": Config, "command": "train"}
    rollout = {"engine": "vllm", "url": "http://127.0.0.1:1", "ahead": 1}
    options = {"advantages": {"ddof": 1}, "rollout": rollout, "rollout_correction": {"high": 3}}
    argv = [f"--{table}.{name}={value}" for table, fields in options.items() for name, value in fields.items()]
    config, _ = parse_command_line(argv=[str(example / "config.toml"), *argv], **about)
    assert (config.advantages.ddof, config.rollout.ahead) == (1, 1)


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text("[model]\npath = 'x'\n[rollout\n")
    assert main(["train", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"fastrl: {path}: not valid TOML: Expected ']' at the end of a table declaration (at line 3, column 9)\n"
    )


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("training.memory_budget", "foo", "such as '256MiB' or '1.5GB', got 'foo'\n"),
        ("training.threads", "99999999", "training.threads: Input should be less than or equal to 1024"),
        ("training.seed", "99999999999", "training.seed"),
        ("training.minibatches", "9999", "training.minibatches: expected at most the rollout's 1024 sequences"),
        ("optimizer.weight_decay", "inf", "optimizer.weight_decay"),
        ("reward.overlong_cache", "9", "reward.overlong_cache: expected at most rollout.max_new_tokens = 4"),
        ("rollout.dynamic_sampling_reward", "x", "means nothing without rollout.dynamic_sampling = true"),
        ("training.device", "meta", "training.device: cannot use 'meta'"),
        ("evaluation.k", "[]", "evaluation.k"),
    ],
)
def test_a_wrong_value_is_one_line(example, tmp_path, capsys, option, value, expected):
    arguments = ["train", str(example / "config.toml"), "--logging.output_dir", str(tmp_path / "run")]
    assert main([*arguments, f"--{option}", value]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "trian: no such command; did you mean train?; fastrl --help lists them"),
        (["--training.step=3"], "--training.step: no such option of fastrl train; did you mean --training.steps?"),
        (["--rollout.temperatur", "1"], "did you mean --rollout.temperature?"),
        (["--seed", "3"], "--seed: no such option of fastrl train; did you mean --training.seed?"),
        (["--objective.name", "grop"], ", got 'grop'; did you mean grpo?"),
        (["--objective.presets", '{"grpo": {"clip_hi": 1}}'], "clip_high, kl_coef"),
    ],
)
def test_a_misspelt_name_suggests_the_nearest(example, capsys, arguments, expected):
    assert main(arguments if arguments[0] == "trian" else ["train", str(example / "config.toml"), *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [("init --modle x", "--model"), ("plan --token 5", "--tokens"), ("report --zzz=x", None)],
)
def test_a_misspelt_option_of_a_command_without_a_config_does_too(arguments, suggested, capsys):
    assert main(arguments.split()) == 2
    option = arguments.split()[1].partition("=")[0]
    hint = "" if suggested is None else f"; did you mean {suggested}?"
    assert capsys.readouterr().err == f"fastrl: {option}: no such option of fastrl {arguments.split()[0]}{hint}\n"


def test_a_misspelt_field_of_a_file_suggests_the_nearest(example, tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text(f'base = "{example / "config.toml"}"\n[rollout]\ntopp = 1\n[trainig]\nsteps = 2\n')
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert "rollout.topp: unknown field (value 1); did you mean top_p?" in said
    assert "trainig: unknown field (value {'steps': 2}); did you mean training?" in said


def test_a_model_on_the_command_line_takes_the_place_of_the_files(example, tmp_path, capsys):
    base = str(example / "config.toml")
    config, _ = parse_command_line(Config, "train", [base, "--model.path", str(tmp_path)])
    assert (config.model.path, config.model.config, config.model.tokenizer) == (str(tmp_path), None, None)
    assert "--model.path takes the place of model.config and model.tokenizer in" in capsys.readouterr().err
    path = tmp_path / "config.toml"
    path.write_text(f'base = "{base}"\n[model]\npath = "."\n')
    config, _ = parse_command_line(Config, "train", [str(path), "--data.path", base])
    assert (config.model.path, config.model.config) == (str(tmp_path), None)
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="expected exactly one of path"):
        parse_command_line(Config, "train", [base, "--model.path", "x", "--model.config", "y"])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments):
    code = (
        f"import sys; from fastrl.cli import main; print(main({arguments}), {{'torch', 'pydantic'}} & set(sys.modules))"
    )
    assert python("-c", code, PYTHONPATH=str(ROOT)).endswith("0 set()\n")


def test_a_reader_that_is_gone_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fastrl", "train", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, check=False, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RuntimeError("[x] DefaultCPUAllocator: can't allocate memory: 9 bytes\nmore"),
            "[x] DefaultCPUAllocator: can't",
        ),
        (MemoryError(), ""),
        (BrokenPipeError("to a worker"), None),
        (RuntimeError("a mistake of ours"), None),
    ],
)
def test_out_of_memory_is_one_line_and_other_errors_are_raised(monkeypatch, capsys, error, line):
    def raises(*_):
        raise error

    monkeypatch.setattr("fastrl.cli._run", raises)
    if line is None:
        with pytest.raises(type(error), match=str(error)):
            main(["plan"])
    else:
        assert main(["plan"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"fastrl: out of memory: {line}") and said.count("\n") == 1


def test_the_package_is_the_command():
    assert python("-m", "fastrl", "--version", PYTHONPATH=str(ROOT)) == f"fastrl {fastrl.__version__}\n"


def test_ctrl_c_during_the_imports_ends_in_one_line():
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "from fastrl.training.run.interruption import ending_at_once\n"
        "try:\n"
        "    with ending_at_once(): os.kill(os.getpid(), signal.SIGINT)\n"
        "except BaseException: print('swallowed')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fastrl: interrupted\n")


def test_a_mistake_in_a_config_is_found_before_transformers_is_imported(tmp_path):
    run = f"fastrl.cli.main(['sft', '{tmp_path}/x.toml'])"
    code = f"import sys, fastrl.cli; print({run}, 'transformers' in sys.modules)"
    assert python("-c", code, PYTHONPATH=str(ROOT)) == "2 False\n"


def test_train_without_its_packages_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(dependencies, "missing", lambda needs: ["tqdm", "pydantic_settings"])
    assert main(["train", "x.toml"]) == 2
    assert "not installed: pip install tqdm 'pydantic-settings>=2'\n" in capsys.readouterr().err


def test_plan_names_what_is_missing(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--tokens", "5"])
    assert "the following arguments are required: --hidden, --vocab" in capsys.readouterr().err


def test_doctor_names_versions_backends_and_compiler(capsys):
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    for word in ("torch", "triton", "transformers", "backends", "cpp", "compiler", "fastrl train"):
        assert word in output
    first, last = fastrl.doctor.TESTED["torch"]
    assert f"{torch.__version__} (tested: {first} to {last})" in output


def test_doctor_says_how_threads_wait(monkeypatch, capsys):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor"]) == 0
    assert "set OMP_WAIT_POLICY=PASSIVE before torch is imported" in capsys.readouterr().out
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert main(["doctor"]) == 0
    assert re.search(r"threads that wait +GOMP_SPINCOUNT=1000\n", capsys.readouterr().out)


def test_doctor_says_where_products_depend_on_their_rows(monkeypatch, capsys):
    """In a library that scales a row by something of the one before, with several threads."""
    monkeypatch.setattr(blocks, "_checked", set())
    assert main(["doctor"]) == 0
    assert len(re.findall(r"cpu, (?:float32|bfloat16) +holds with 1, 2.* threads", capsys.readouterr().out)) == 2
    monkeypatch.setattr(blocks, "_checked", set())
    honest, cores = torch.mm, torch.get_num_threads()

    def mm(a, b, *, out, **options):
        honest(a, b, out=out, **options)
        return out.mul_(1 + a.roll(1, 0)[:, :1] * (torch.get_num_threads() - 1))

    monkeypatch.setattr(torch, "mm", mm)
    assert main(["doctor"]) == 0
    told = r"cpu, float32 +fails with 2 threads: batch_invariant=True cannot be kept .* 512 rows over 512"
    assert re.search(told, capsys.readouterr().out)
    assert torch.get_num_threads() == cores


def test_doctor_says_what_is_missing_for_some_configs(monkeypatch, capsys):
    modules = {"datasets", "pyarrow", "math_verify", "httpx2", "vllm", "peft", "wandb"}
    monkeypatch.setattr(dependencies, "find_spec", lambda name: None if name in modules - {"peft"} else name)
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    for name in modules - {"peft"}:
        assert dependencies.REQUIREMENTS[name] in output
    assert "peft" not in output


def test_doctor_needs_no_extra():
    """A core install has torch and no more."""
    code = (
        "import sys\n"
        "for name in ('transformers', 'pydantic', 'pydantic_settings', 'matplotlib', 'tqdm', 'tabulate'):\n"
        "    sys.modules[name] = None\n"
        "import fastrl.cli\n"
        "sys.exit(fastrl.cli.main(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
