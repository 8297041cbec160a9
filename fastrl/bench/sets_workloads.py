"""Which entries of the vocabulary a truncating sampler keeps, and who finds them."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
from torch import Tensor

import fastrl
from fastrl.bench.contenders import Contender, Outcome, Run
from fastrl.bench.workloads import Workload

TOP_P, TOP_K = 0.95, 50


def workloads(logits: Tensor) -> list[Workload]:
    """Top-p alone, top-k and top-p: of logits (N, V)."""
    size, rows = logits.numel(), logits.shape[0]
    found = []
    for name, top_k in ((f"top-p {TOP_P}", 0), (f"top-k {TOP_K}, top-p {TOP_P}", TOP_K)):
        contenders = [
            Contender("fastrl SamplingMask.from_logits", partial(_sets, logits, top_k), 4 * size, ours=True),
            Contender("transformers' warpers", partial(_warpers, logits, top_k), 40 * size),
        ]
        found.append(Workload(name, f"which entries of {rows} rows a sampler keeps", contenders, None))
    return found


def _sets(logits: Tensor, top_k: int) -> Run:
    def call() -> Outcome:
        fastrl.SamplingMask.from_logits(logits, top_p=TOP_P, top_k=top_k)
        return Outcome(None, None, None, {})

    return Run(call)


def _warpers(logits: Tensor, top_k: int) -> Run:
    transformers = import_module("transformers")
    warpers = [*([transformers.TopKLogitsWarper(top_k)] if top_k else []), transformers.TopPLogitsWarper(TOP_P)]
    wide = logits.float()  # as generate has them

    @torch.no_grad()
    def call() -> Outcome:
        scores = wide
        for warper in warpers:
            scores = warper(None, scores)
        return Outcome(None, None, None, {})

    return Run(call)
