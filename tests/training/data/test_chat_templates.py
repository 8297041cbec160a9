"""What is trained of a chat's answer is what is sampled, token by token: ten templates, rebuilt in their structure."""

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from run_files import config_of, write_json_lines
from transformers import LlamaConfig, LlamaForCausalLM

from fastrl.base.errors import UserError
from fastrl.training.config.train import Config
from fastrl.training.data.prompts import PromptFormat
from fastrl.training.data.turn_end import turn_end
from fastrl.training.models.policy import _eos_token_ids
from fastrl.training.rl import train, update
from fastrl.training.stages import dpo, reward_model, sft
from fastrl.training.stages.rows import Reader


class Form(NamedTuple):
    """A chat template, and what it should make of the question "1?"."""

    special: list[str]  # EOS first
    template: str
    prompt: str
    end: str  # the token at which a turn ends
    written: Mapping[str, str] = MappingProxyType({})  # answers trained as another text than their own; "": refused


CHATML = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
_TURNS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ CONTENT }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
OPENED{% endif %}"""
_AFTER = "m.content.split('</think>')[-1].lstrip('\\n')"
#: Qwen3's: of the last answer the thought is written, empty if it has none.
_THOUGHT = (
    "{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.content.split('</think>')[0].removeprefix('<think>').strip('\\n') if '</think>' in m.content else '' }}\n"
    "</think>\n\n{{ " + _AFTER + " }}{% else %}{{ " + _AFTER + " }}{% endif %}"
)
_ASKED = "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
PLAIN, THOUGHT, ENDED = "two", "<think>\n1 + 1\n</think>\n\ntwo", "1 + 1\n</think>\n\ntwo"
FORMS = {
    "ChatML, base model": Form(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        _TURNS.replace("CONTENT", "m.content").replace("OPENED", ""),
        _ASKED,
        "<|im_end|>",
    ),
    "Llama 3": Form(
        ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "Gemma": Form(
        ["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<bos><start_of_turn>user\n1?<end_of_turn>\n<start_of_turn>model\n",
        "<end_of_turn>",
    ),
    "Phi": Form(
        ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"],
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        "<|user|>\n1?<|end|>\n<|assistant|>\n",
        "<|end|>",
    ),
    "Mistral": Form(
        ["</s>", "<s>", "[INST]", "[/INST]"],
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
        "<s>[INST] 1?[/INST]",
        "</s>",
        {PLAIN: " two", THOUGHT: f" {THOUGHT}", ENDED: f" {ENDED}"},
    ),
    "R1": Form(
        ["<|end_of_sentence|>", "<|begin_of_sentence|>", "<|User|>", "<|Assistant|>"],
        "<|begin_of_sentence|>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
        "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end_of_sentence|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
        "<|begin_of_sentence|><|User|>1?<|Assistant|><think>\n",
        "<|end_of_sentence|>",
        {PLAIN: "", THOUGHT: ENDED, ENDED: ENDED},
    ),
    "QwQ": Form(
        CHATML,
        _TURNS.replace("CONTENT", _AFTER).replace("OPENED", "<think>\n"),
        f"{_ASKED}<think>\n",
        "<|im_end|>",
        {PLAIN: "", THOUGHT: ENDED, ENDED: ENDED},
    ),
    "Qwen3": Form(
        CHATML,
        _TURNS.replace("{{ CONTENT }}", _THOUGHT).replace("OPENED", ""),
        _ASKED,
        "<|im_end|>",
        {PLAIN: "<think>\n\n</think>\n\ntwo", ENDED: THOUGHT},
    ),
    "Qwen3.5": Form(
        CHATML,
        _TURNS.replace("{{ CONTENT }}", _THOUGHT).replace("OPENED", "<think>\n"),
        f"{_ASKED}<think>\n",
        "<|im_end|>",
        {PLAIN: "\n</think>\n\ntwo", THOUGHT: ENDED, ENDED: ENDED},
    ),
    "GLM": Form(
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"],
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "[gMASK]<sop><|user|>\n1?<|assistant|>\n",
        "<|endoftext|>",
    ),
}
QUESTION = [{"role": "user", "content": "1?"}]


def made(name):
    form = FORMS[name]
    return form, byte_tokenizer(*form.special, chat_template=form.template)


@pytest.mark.parametrize("answer", [PLAIN, THOUGHT, ENDED], ids=["plain", "thought", "ended"])
@pytest.mark.parametrize("name", FORMS)
def test_what_is_trained_is_what_is_sampled(name, answer):
    form, tokenizer = made(name)
    prompts = PromptFormat(tokenizer)
    sampled = form.written.get(answer, answer)
    if not sampled:
        with pytest.raises(UserError, match=r"x: the chat template ends the prompt with '<think>\\n', .* got 'two'"):
            prompts.pair(QUESTION, answer, "x")
        return
    prompt_ids, ids = prompts.pair(QUESTION, answer, "x")
    assert tokenizer.decode(prompt_ids) == form.prompt and prompt_ids == prompts.token_ids(QUESTION, "x")
    own = tokenizer(sampled, add_special_tokens=False)["input_ids"]
    assert ids == [*own, tokenizer.convert_tokens_to_ids(form.end)], tokenizer.decode(ids)


@pytest.mark.parametrize("name", FORMS)
def test_rollouts_stop_where_training_data_do(name):
    form, tokenizer = made(name)
    end = tokenizer.convert_tokens_to_ids(form.end)
    assert turn_end(tokenizer) == (None if name == "GLM" else end)
    stops = _eos_token_ids(SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None)), tokenizer)
    assert stops[0] == 0 and end in stops


@pytest.mark.parametrize("name", FORMS)
def test_every_command_reads_rows_alike(name):
    _, tokenizer = made(name)
    answers = [THOUGHT, THOUGHT.replace("two", "three")]
    pairs = [PromptFormat(tokenizer).pair(QUESTION, answer, "x") for answer in answers]
    reader = Reader(PromptFormat(tokenizer), None)
    row = {"prompt": QUESTION, "completion": answers[0], "chosen": answers[0], "rejected": answers[1]}
    trained = sft.SFT.parse(reader, row, "x")
    assert (trained.prompt, trained.completion) == pairs[0]
    compared = dpo.PreferenceStage.parse(reader, row, "x")
    assert [(x.prompt, x.completion) for x in (compared.chosen, compared.rejected)] == pairs
    ranked = reward_model.parse(reader, {k: x for k, x in row.items() if k != "completion"}, "x")
    assert ranked.sequences == [prompt + ids for prompt, ids in pairs]


def talkative(folder, tokenizer, end):
    """A saved model that says `two` in any order, and ends its turn with one token in four, whatever was said."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    layer = model.model.layers[0]
    with torch.no_grad():
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, model.lm_head.weight):
            weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)  # hidden states are 1 everywhere
        model.lm_head.weight[:, 0] = -40.0
        model.lm_head.weight[[*tokenizer("two")["input_ids"], end], 0] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tables(folder, name):
    return {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl")},
        "training": {"device": "cpu", "threads": 1},
        "logging": {"output_dir": str(folder / name), "tensorboard": False},
    }


@pytest.fixture
def computed(monkeypatch):
    """Prompt and trained tokens of each row that a policy computes, and the sequences that a reward model scores."""
    found = {"rows": [], "sequences": []}

    def rows(compute):
        def spy(policy, batch, packing):
            for ids, used, trained in zip(batch.input_ids, batch.attention_mask, batch.mask, strict=True):
                prompt, completion = ids[: batch.prompt_length], ids[batch.prompt_length :]
                found["rows"].append((prompt[used[: batch.prompt_length]].tolist(), completion[trained].tolist()))
            return compute(policy, batch, packing)

        return spy

    def sequences(score):
        def spy(model, given, dtype):
            found["sequences"].extend(given)
            return score(model, given, dtype)

        return spy

    for module in (sft, dpo, update):
        monkeypatch.setattr(module, "hidden_states", rows(module.hidden_states))
    monkeypatch.setattr(reward_model, "score_sequences", sequences(reward_model.score_sequences))
    return found


@pytest.mark.parametrize("name", FORMS)
def test_whole_runs(name, tmp_path, computed):
    """Of `train` on completions that the model ends itself, and of the others on answers to the same prompt."""
    form, tokenizer = made(name)
    end = tokenizer.convert_tokens_to_ids(form.end)
    talkative(tmp_path / "model", tokenizer, end)
    answers = [THOUGHT, THOUGHT.replace("two", "three")]
    row = {"prompt": QUESTION, "answer": "", "completion": answers[0], "chosen": answers[0], "rejected": answers[1]}
    write_json_lines(tmp_path / "rows.jsonl", [row])
    prompt = tokenizer(form.prompt, add_special_tokens=False)["input_ids"]

    rollout = {"prompts_per_step": 1, "num_generations": 8, "max_new_tokens": 64}
    more = {
        "rollout": rollout,
        "reward": {"function": "fastrl.rewards.length", "arguments": {"length": {"minimum": 4}}},
        "objective": {"name": "grpo"},
    }
    given = tables(tmp_path, "train") | more
    train.train(Config(**given | {"training": given["training"] | {"steps": 1}}))
    sampled, computed["rows"] = computed["rows"], []
    letters = set(tokenizer("two")["input_ids"])
    assert len(sampled) == 8
    for asked, said in sampled:
        assert asked == prompt and said[-1] == end and set(said[:-1]) <= letters

    written = form.written.get(THOUGHT, THOUGHT)
    own = tokenizer([written, written.replace("two", "three")], add_special_tokens=False)["input_ids"]
    pairs = [(prompt, [*ids, end]) for ids in own]
    for module, expected in ((sft, pairs[:1]), (dpo, pairs)):
        module.train(config_of(module)(**tables(tmp_path, module.__name__)))
        assert computed["rows"] == expected, module
        computed["rows"] = []
    reward_model.train(reward_model.RewardModelConfig(**tables(tmp_path, "reward")))
    assert computed["sequences"][:2] == [asked + said for asked, said in pairs]


def test_an_answer_that_holds_the_end_of_a_turn_ends_there():
    """As a completion would that sampled it."""
    _, tokenizer = made("Llama 3")
    _, ids = PromptFormat(tokenizer).pair(QUESTION, "one<|eot_id|>two", "x")
    assert tokenizer.decode(ids) == "one<|eot_id|>"


def test_a_tokenizer_without_a_template_or_with_one_that_fails_ends_turns_by_eos():
    assert turn_end(byte_tokenizer("</s>")) is None
    assert turn_end(byte_tokenizer("</s>", chat_template="{{ raise_exception('no') }}")) is None
    assert turn_end(byte_tokenizer("</s>", chat_template="{{ messages[-1].content }}!")) is None
