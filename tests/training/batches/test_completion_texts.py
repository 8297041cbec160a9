"""The text of a completion: tags of thoughts and tools are there, special tokens or not, and no other special token."""

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from fastrl.rewards import exact, format
from fastrl.training.batches.rollout import Rollout, completion_texts
from fastrl.training.data.examples import Example
from fastrl.training.engines.protocol import Completion, Request
from fastrl.training.engines.turns import Dialogue
from fastrl.training.models.policy import Policy
from fastrl.training.rl.advantages import _step_tensors

THOUGHT = ["<think>", "</think>"]
ENDS = ["</s>", "<|im_end|>"]  # the tokenizer's EOS, and a turn's that only the policy knows


def policy_of(tokenizer):
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ENDS]
    return Policy(torch.nn.Linear(1, 1), tokenizer, 1, ends, ends[0], torch.float32)


def bytes_of(tags, special):
    tokenizer = byte_tokenizer(*ENDS, "<|sep|>")
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    return tokenizer


def words_of(tags, special):
    """Words that begin with a space, as of SentencePiece, whose decoder drops the first one."""
    words = [*ENDS, "<|sep|>", "<unk>", *(f"▁{word}" for word in ("I", "guess", "42", "but", "é"))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens([*ENDS, "<|sep|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=ENDS[0], clean_up_tokenization_spaces=True)
    made.add_special_tokens({"additional_special_tokens": tags}) if special else made.add_tokens(tags)
    return made


def python_of(tags, special):
    tokenizer = ByT5Tokenizer(extra_ids=0, extra_special_tokens=[ENDS[1], "<|sep|>", *(tags if special else [])])
    tokenizer.add_tokens([] if special else tags)
    return tokenizer


def named_of(tags, special):
    """Special tokens by names of the model's own, `think_token`."""
    tokenizer = bytes_of(tags, special)
    tokenizer.backend_tokenizer.add_special_tokens(["<pad>"])
    named = {f"think{n}_token": tag for n, tag in enumerate(tags)} if special else {}
    names = {"eos_token": ENDS[0], "pad_token": "<pad>", "extra_special_tokens": named}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **names)


class ListsNoAddedTokens(ByT5Tokenizer):
    """As the tokenizers of mistral-common, which transformers loads for Mistral's models where it is installed."""

    def added_tokens_decoder(self):
        raise NotImplementedError


def mistral_of(tags, special):
    tokenizer = python_of(tags, special)
    tokenizer.__class__ = ListsNoAddedTokens
    return tokenizer


MAKERS = pytest.mark.parametrize("make", [bytes_of, words_of, python_of, named_of, mistral_of])
GUESS = "<think> I guess 42 but</think> é 42<|sep|> é<|im_end|></s>"


@MAKERS
def test_tags_that_are_special_tokens_read_as_those_that_are_none(make):
    texts = []
    for special in (True, False):
        tokenizer = make(THOUGHT, special)
        ids = tokenizer(GUESS, add_special_tokens=False)["input_ids"]
        assert {*tokenizer.convert_tokens_to_ids([*THOUGHT, *ENDS, "<|sep|>"])} <= {*ids}
        texts.append(policy_of(tokenizer).text(ids))
    assert texts[0] == texts[1]
    assert all(tag in texts[0] for tag in THOUGHT) and not any(end in texts[0] for end in [*ENDS, "<|sep|>"])


@MAKERS
def test_without_a_tag_the_text_is_what_the_tokenizer_decodes(make):
    tokenizer = make(THOUGHT, True)
    ids = tokenizer(GUESS.partition("</think>")[2], add_special_tokens=False)["input_ids"]
    for count in range(len(ids) + 1):  # some end in the middle of a character
        expected = tokenizer.decode(ids[:count], skip_special_tokens=True)
        assert policy_of(tokenizer).text(ids[:count]) == expected


TAGS = """<think> </think> <thinking> </thought> <reasoning> [THINK] [/THINK] <seed:think> ◁/think▷ <|channel|>
    <|begin_of_thought|> <|START_THINKING|> <tool_call> </tool_call> <tool_response> [TOOL_CALLS] [ARGS] [CALL_ID]
    <｜tool▁calls▁begin｜> <|python_tag|> <start_function_call> <TOOLCALL> <|START_ACTION|> <answer> </answer>
    <|begin_of_solution|>"""
OTHERS = """<s> <pad> <unk> <|endoftext|> <|im_start|> <|eot_id|> <|eom_id|> <end_of_turn> <|end|> <|return|> <|start|>
    [INST] [/INST] <|start_header_id|> <｜end▁of▁sentence｜> <|User|> <|assistant|> <|END_OF_TURN_TOKEN|>
    <|observation|> <|vision_start|> <|image_pad|> <fim_prefix> <|file_sep|> <|reserved_special_token_0|> <unused0>"""


def test_which_special_tokens_are_tags():
    tags, others = TAGS.split(), [*OTHERS.split(), "<tool_end>", "<no_answer>"]
    tokenizer = bytes_of(tags + others, True)
    tokenizer.pad_token = "<no_answer>"
    policy = policy_of(tokenizer)
    policy.eos_token_ids.append(tokenizer.convert_tokens_to_ids("<tool_end>"))

    def text(token):
        return policy.text([tokenizer.convert_tokens_to_ids(token)])

    assert [text(token) for token in tags] == tags
    assert {token: text(token) for token in others if text(token)} == {}


def test_rewards_see_a_thought_that_was_cut_off():
    tokenizer = bytes_of([*THOUGHT, "<answer>", "</answer>"], True)
    policy = policy_of(tokenizer)
    written = [r"<think>I guess \boxed{42} but", "<think>6 * 7</think><answer>42</answer></s>"]
    rows = [torch.tensor(ids) for ids in tokenizer(written)["input_ids"]]
    mask = pad_sequence([torch.ones_like(row).bool() for row in rows], batch_first=True)
    texts = completion_texts(policy, Rollout(pad_sequence(rows, batch_first=True), mask, 0))
    assert texts == [written[0], written[1].removesuffix("</s>")]
    assert exact(["", ""], texts, answer=["42", "42"]) == format(["", ""], texts) == [0.0, 1.0]


def test_the_ends_of_steps_count_the_characters_of_tags():
    tokenizer = bytes_of(THOUGHT, True)
    ids = tokenizer("<think>é</think>42</s>")["input_ids"]
    rollout = Rollout(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool), 0)
    text = "<think>é</think>42"
    steps = [(text.index("é") + 1, 1.0), (text.index("42"), 2.0), (len(text), 3.0)]
    assert _step_tensors(policy_of(tokenizer), rollout, [steps])[0].tolist() == [[2, 3, 5]]


def test_tools_see_tags_in_a_turn_and_in_a_chats_message():
    tokenizer = bytes_of(["<tool_call>", "</tool_call>"], True)
    policy, written = policy_of(tokenizer), "<tool_call>add</tool_call>"
    for prompt in ("1", [{"role": "user", "content": "1"}]):
        dialogue = Dialogue(Request("0", [9], 1, 99, 0, Example(prompt, {}, [9])), 0)
        dialogue.add_turn(Completion(tokenizer(f"{written}<|im_end|>")["input_ids"], True), policy)
        assert dialogue.text(policy) == written
        assert not dialogue.is_chat or dialogue.messages == [{"role": "assistant", "content": written}]


def test_a_special_token_that_is_an_empty_text():
    """As in a tokenizer_config.json with "eos_token": "", of a model whose config names the EOS."""
    tokenizer = bytes_of(THOUGHT, True)
    tokenizer.bos_token = ""
    tokens = [*tokenizer.encode("<think>a"), tokenizer.convert_tokens_to_ids(ENDS[0])]
    assert policy_of(tokenizer).text(tokens) == "<think>a"
