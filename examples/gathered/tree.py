"""Log-probabilities of a tree of completions: the shared prefix is computed once, and a branching row has several.

Completions of one prompt, or branches of a search, begin with the same tokens. A model that attends along the tree
gives one row of hidden states for each token of it. A row where the completions part has several next tokens; padded
with -1 they are the ids of one call, whose products are those of the tree's rows, not of all completions' rows.

    python examples/gathered/tree.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastrl

Tree = tuple[list[list[int]], list[list[int]]]


def tree_of(completions: list[list[int]]) -> Tree:
    """The nodes' children and the completions' paths.

    Node 0 is the end of the prompt, and every other one a token. `children[i]` are the tokens that follow node i;
    `paths[c][t]` is the node from which token t of completion c is predicted.
    """
    places: dict[tuple[int, ...], int] = {(): 0}
    children: list[list[int]] = [[]]
    paths = []
    for tokens in completions:
        path = []
        for t, token in enumerate(tokens):
            node = places[tuple(tokens[:t])]
            path.append(node)
            if tuple(tokens[: t + 1]) not in places:
                places[tuple(tokens[: t + 1])] = len(children)
                children[node].append(token)
                children.append([])
        paths.append(path)
    return children, paths


def tree_logprobs(hidden: Tensor, weight: Tensor, completions: list[list[int]]) -> list[Tensor]:
    """The log-probabilities of each completion's tokens, from one row of hidden states (H) for each node of the tree.

    hidden: (nodes, H), weight: (V, H).
    """
    children, paths = tree_of(completions)
    width = max(len(x) for x in children)
    ids = torch.tensor([x + [-1] * (width - len(x)) for x in children], device=hidden.device)
    logprobs = fastrl.linear_gathered_logprobs(hidden, weight, ids)
    return [
        torch.stack([logprobs[node, children[node].index(token)] for node, token in zip(path, tokens, strict=True)])
        for path, tokens in zip(paths, completions, strict=True)
    ]


def main(width: int = 32, vocab: int = 500) -> tuple[int, int]:
    """Three completions of 8 tokens that share 5, and two of these 6: how many rows the tree and they have."""
    torch.manual_seed(0)
    prefix = [7, 3, 3, 9, 1]
    completions = [[*prefix, 4, 8, 8], [*prefix, 4, 5, 2], [*prefix, 6, 6, 6]]
    children, _ = tree_of(completions)
    hidden = torch.randn(len(children), width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    for logprobs in tree_logprobs(hidden, weight, completions):
        logprobs.sum().backward(retain_graph=True)
    return sum(map(bool, children)), sum(map(len, completions))


if __name__ == "__main__":
    rows, tokens = main()
    print(f"{rows} rows for {tokens} tokens")
