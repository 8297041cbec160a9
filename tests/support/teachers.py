"""Teachers for distillation: models with the example's vocabulary, as directories, and divergences by hand."""

import json

import torch
from digit_models import MODEL, TOKENIZER
from divergences import divergences
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def save_teacher(folder, tokenizer=TOKENIZER, seed=7, **values):
    """Write a random model, far from uniform and wider than the tests' policies; returns its directory as text."""
    torch.manual_seed(seed)
    values = MODEL | {"hidden_size": 24, "num_attention_heads": 3, "initializer_range": 0.5} | values
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return str(folder)


def rename_token(folder, old, new):
    """Give a token of a saved tokenizer another name."""
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    vocabulary = tree["model"]["vocab"]
    tree["model"]["vocab"] = {new if token == old else token: index for token, index in vocabulary.items()}
    path.write_text(json.dumps(tree))


def exact_divergence(log_p, log_q, kind, beta=0.5):
    """KL(q||p), KL(p||q), or beta KL(q||m) + (1 - beta) KL(p||m), of the last dimension; p is the student's."""
    return divergences(log_p, log_q, kind, beta)[0]  # they are normalised, so its log_softmax changes nothing


def with_tail(log_p, ids):
    """The log-probabilities of some entries, and of all others together."""
    kept = log_p.gather(-1, ids)
    others = torch.ones_like(log_p, dtype=torch.bool).scatter(-1, ids, False)
    rest = log_p.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([kept, rest], -1)
