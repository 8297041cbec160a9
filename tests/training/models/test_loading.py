"""Model directories that cannot be used: one message that names what is wrong, and never random weights."""

import json
import shutil

import mistakes
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from httpx2 import ConnectError, ReadTimeout, Request, Response
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from fastrl.base.errors import UserError
from fastrl.cli import main
from fastrl.training.config.sections import ModelConfig
from fastrl.training.config.settings import load_settings, looks_like_path
from fastrl.training.config.train import Config
from fastrl.training.models.differences import listed
from fastrl.training.models.loading import load_tokenizer, load_weights
from fastrl.training.models.policy import load_policy
from fastrl.training.rewards.model import RewardModel
from fastrl.training.rl.run import make_run

SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16}
CPU = torch.device("cpu")


@pytest.fixture
def saved(make_policy, tmp_path):
    """A saved model of two layers, as a directory."""

    def saved(name="saved", **values):
        policy = make_policy(model_type="qwen3", **SHAPE, **values)
        policy.model.save_pretrained(tmp_path / name)
        policy.tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return saved


def rewrite(path, change):
    """Change the tensors of a file of weights, a dict, in place."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def reconfigure(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def error_of(path, load=load_weights, **options):
    return mistakes.error_of(load, ModelConfig(path=str(path)), **options)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_that_are_missing_left_over_or_of_another_shape_are_listed(saved):
    path = saved()
    weights = path / "model.safetensors"
    rewrite(weights, lambda found: [found.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in range(2)])
    rewrite(weights, lambda found: found.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(1)}))
    rewrite(weights, lambda found: found.update({"model.norm.weight": torch.zeros(7)}))
    assert error_of(path) == (
        f"{path}: the weights are not those of the Qwen3ForCausalLM that its config describes\n"
        "  missing, and would start at random: model.layers.{0-1}.mlp.up_proj.weight\n"
        "  left over, without a place in the model: model.layers.7.mlp.up_proj.weight\n"
        "  another shape: model.norm.weight (7,), expected (32,)"
    )


def test_a_head_may_be_missing_only_where_it_is_tied(saved):
    path = saved("tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    load_weights(ModelConfig(path=str(path)))
    # What older releases of transformers left behind.
    rewrite(path / "model.safetensors", lambda found: found.update({"model.rotary_emb.inv_freq": torch.zeros(8)}))
    load_weights(ModelConfig(path=str(path)))
    path = saved("own", tie_word_embeddings=False)
    rewrite(path / "model.safetensors", lambda found: found.pop("lm_head.weight"))
    assert error_of(path).endswith("\n  missing, and would start at random: lm_head.weight")


@pytest.mark.parametrize("size", [10, 20])
def test_a_vocabulary_of_another_size_than_the_weights(saved, size):
    path = saved()
    reconfigure(path / "config.json", vocab_size=size)
    shapes = f"(12, 32), expected ({size}, 32); its config has vocab_size {size}"
    assert f"lm_head.weight, model.embed_tokens.weight {shapes}" in error_of(path)


@pytest.mark.parametrize("size", [0, -3, "x"])
def test_a_vocabulary_that_is_none(saved, size):
    path = saved()
    reconfigure(path / "config.json", vocab_size=size)
    assert "vocab_size" in (error := error_of(path)) and error.count("\n") == 0


def test_a_reward_models_head_may_be_new_but_not_its_decoder(saved):
    path = saved()
    options = {"kind": AutoModelForSequenceClassification, "num_labels": 1}
    model = load_weights(ModelConfig(path=str(path)), new_head=True, **options)
    assert "score.weight" in error_of(path, **options)  # where nothing says that it may be
    rewrite(path / "model.safetensors", lambda found: found.pop("model.norm.weight"))
    error = error_of(path, new_head=True, **options)
    assert error.endswith("\n  missing, and would start at random: model.norm.weight")
    model.save_pretrained(path)  # a classifier that is trained further has a head already
    rewrite(path / "model.safetensors", lambda found: found.pop("score.weight"))
    assert "score.weight" in error_of(path, new_head=True, **options)
    with pytest.raises(UserError, match=r"missing.*: score\.weight"):
        RewardModel.load(str(path), CPU)


def test_adapters_are_whole_and_so_is_their_base(saved, tmp_path):
    peft = pytest.importorskip("peft")
    base, path = saved(), tmp_path / "adapters"
    settings = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.get_peft_model(load_weights(ModelConfig(path=str(base))), settings).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / file, path)
    reconfigure(path / "adapter_config.json", base_model_name_or_path=str(base))
    policy = load_policy(ModelConfig(path=str(path)), CPU)
    assert not any("lora" in name for name in policy.model.state_dict())
    weights = path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    rewrite(weights, lambda found: found.pop("base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"))
    assert "missing, and would start at random: base_model.model.model.layers.1.mlp.up_proj.lora_A" in error_of(path)
    weights.write_bytes(whole[:200])
    assert "cannot load the adapters: adapter_model.safetensors: damaged, or not copied whole" in error_of(path)
    weights.write_bytes(whole)
    rewrite(base / "model.safetensors", lambda found: found.pop("model.norm.weight"))
    assert error_of(path).startswith(f"{base}: ") and "model.norm.weight" in error_of(path)
    reconfigure(path / "adapter_config.json", base_model_name_or_path=f"{base}-moved")
    assert error_of(path).endswith(f"base_model_name_or_path: no such directory, '{base}-moved'")


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 5, 200, -100])
def test_weights_that_are_cut_off(saved, keep):
    path = saved()
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    expected = f"{path}: cannot load the model: model.safetensors: damaged, or not copied whole ("
    assert error_of(path).startswith(expected)


def test_a_shard_that_is_cut_off_or_missing(saved, tmp_path):
    path = saved()
    load_weights(ModelConfig(path=str(path))).save_pretrained(path, max_shard_size="20KB")
    (path / "model.safetensors").unlink()
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 2
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[:-1])
    assert f": {shards[1].name}: damaged" in error_of(path)
    shards[1].unlink()
    assert shards[1].name in error_of(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_is_named(saved, file, text):
    path = saved()
    (path / file).write_text(text)
    error = error_of(path, load_tokenizer)
    assert error.startswith(f"{path / file}: ") and error.count("\n") == 0


def test_another_models_tokenizer_is_refused(saved, tmp_path):
    path = saved()
    byte_tokenizer("<eos>").save_pretrained(tmp_path / "tokenizer")
    config = ModelConfig(path=str(path), tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(
        UserError, match=r"/tokenizer: is not the tokenizer of .*, whose token '=' has the id 1, here 29"
    ):
        load_tokenizer(config)
    larger = load_tokenizer(ModelConfig(path=str(path)))
    larger.add_tokens(["<new>"])
    larger.save_pretrained(tmp_path / "larger")
    assert "<new>" in load_tokenizer(ModelConfig(path=str(path), tokenizer=str(tmp_path / "larger"))).get_vocab()


def test_files_that_are_not_there(saved):
    path = saved()
    (path / "tokenizer.json").unlink()
    assert "cannot load the tokenizer" in error_of(path, load_tokenizer)
    (path / "tokenizer_config.json").unlink()
    assert "holds no tokenizer; expected one of" in error_of(path, load_tokenizer)
    (path / "model.safetensors").unlink()
    assert "no file named model.safetensors" in error_of(path)
    (path / "config.json").unlink()
    assert "holds no model; expected a directory with config.json and weights" in error_of(path)


@pytest.mark.parametrize(
    ("command", "file", "field"),
    [
        ("train", "reverse_digits/config.toml", "model.path"),
        ("train", "reverse_digits/config.toml", "reward.model"),
        ("sft", "stages/sft.toml", "model.path"),
        ("dpo", "stages/dpo.toml", "model.path"),
        ("reward-model", "stages/reward_model.toml", "model.path"),
        ("sample", "stages/sample.toml", "model.path"),
    ],
)
def test_every_command_says_it(saved, example, tmp_path, capsys, command, file, field):
    path, output = saved(), tmp_path / "out"
    (path / "model.safetensors").write_bytes(b"half")
    place = "output.path" if command == "sample" else "logging.output_dir"
    given = {field: path, place: output, "training.device": "cpu"}
    if command in ("train", "sft") and field == "model.path":
        given["model.config"] = None
    if field == "reward.model":
        reconfigure(path / "config.json", architectures=["Qwen3ForSequenceClassification"])
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    assert main([command, str(example.parent / file), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"fastrl: {path}: cannot load the model: model.safetensors: damaged")
    assert not output.exists()


# --- where a model is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["./x", "../x", "~/x", "/x", "x/", "x/y/", "a/b/c", "here/x"])
def test_what_can_only_be_a_path(tmp_path, text):
    (tmp_path / "here").mkdir()
    assert looks_like_path(text, tmp_path)
    assert not any(looks_like_path(name, tmp_path) for name in ("gpt2", "owner/name", "owner/name-1.5B", "here"))


@pytest.mark.parametrize("field", ["model.path", "model.tokenizer", "reward.model"])
@pytest.mark.parametrize("text", ["./gone", "here/gone", "gone/"])
def test_a_path_where_nothing_is_says_so(example, tmp_path, monkeypatch, field, text):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    table, name = field.split(".")
    overrides = {"training": {"device": "cpu"}} | {table: {name: text}}
    if field == "model.path":
        overrides["model"]["config"] = None
    if field == "reward.model":
        overrides["reward"]["function"] = []
    config = load_settings(Config, example / "config.toml", overrides)
    assert mistakes.error_of(make_run, config) == f"{tmp_path / text}: no such directory"


def test_a_name_on_the_hub_is_still_one_and_says_that_it_is_no_directory(saved):
    error = error_of("owner/name")
    assert "owner/name: cannot load the model: no such directory, and as a name on the hub" in error
    path = saved() / "config.json"
    assert error_of(path) == f"{path}: expected a directory, got a file"
    assert error_of("") == "expected a directory or a name on the hub as a model, got ''"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (ConnectError("no name"), "no such directory, and the hub does not answer (ConnectError: no name)"),
        (ReadTimeout(""), "no such directory, and the hub does not answer (ReadTimeout)"),
        (
            RepositoryNotFoundError("401", response=Response(401, request=Request("GET", "x"))),
            "no such directory, and the hub has no such model, or not for you",
        ),
    ],
)
def test_the_hub_is_asked_once_and_nothing_is_tried_again(monkeypatch, capsys, tmp_path, answer, told):
    asked = []

    def info(self, name, timeout):
        asked.append(timeout)
        raise answer

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(HfApi, "model_info", info)
    name = f"owner/{type(answer).__name__}"
    assert error_of(name) == f"{name}: {told}"
    assert len(asked) == 1 and asked[0] <= 10
    assert capsys.readouterr().err == f"fastrl: {name}: no such directory; asking the hub\n"
    if isinstance(answer, ConnectError):  # what is cached needs no hub
        (tmp_path / "models--owner--cached").mkdir()
        assert "cannot load the" in error_of("owner/cached")
        assert capsys.readouterr().err.endswith(
            "the hub does not answer (ConnectError: no name); what is cached is used\n"
        )
        assert len(asked) == 2


def test_a_runs_folder_is_no_model_and_says_where_its_model_is(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / ".fastrl-run").touch()
    assert error_of(run) == f"{run}: expected a model's directory, got a run's; it holds no model yet"
    for step in (8, 12):
        (run / "checkpoints" / f"step-{step:06d}").mkdir()
    assert error_of(run) == f"{run}: expected a model's directory, got a run's; use {run}/checkpoints/step-000012"
    (run / "model").mkdir()
    assert error_of(run) == f"{run}: expected a model's directory, got a run's; use {run}/model"


def test_names_that_differ_in_numbers_are_put_together():
    names = [f"a.{i}.b.{j}.w" for i in (0, 1, 2, 5) for j in (3,)] + ["z", "a.0.c"]
    assert listed(names) == "a.0.c, a.{0-2,5}.b.3.w, z"
