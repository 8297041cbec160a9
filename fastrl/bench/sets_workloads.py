"""The support that a truncating sampler keeps, and the contenders that find it."""

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
    """Top-p alone, and top-k with top-p, on logits (N, V)."""
    size, rows = logits.numel(), logits.shape[0]
    result = []
    for name, top_k in ((f"top-p {TOP_P}", 0), (f"top-k {TOP_K}, top-p {TOP_P}", TOP_K)):
        contenders = [
            Contender("fastrl SamplingMask.from_logits", partial(_sets, logits, top_k), 4 * size, ours=True),
            Contender("transformers' warpers", partial(_warpers, logits, top_k), 40 * size),
        ]
        result.append(Workload(name, f"which entries of {rows} rows a sampler keeps", contenders, None))
    return result


def _sets(logits: Tensor, top_k: int) -> Run:
    def call() -> Outcome:
        fastrl.SamplingMask.from_logits(logits, top_p=TOP_P, top_k=top_k)
        return Outcome(None, None, None, {})

    return Run(call)


def _warpers(logits: Tensor, top_k: int) -> Run:
    transformers = import_module("transformers")
    warpers = [*([transformers.TopKLogitsWarper(top_k)] if top_k else []), transformers.TopPLogitsWarper(TOP_P)]
    wide = logits.float()  # like the scores in transformers' generate

    @torch.no_grad()
    def call() -> Outcome:
        scores = wide
        for warper in warpers:
            scores = warper(None, scores)
        return Outcome(None, None, None, {})

    return Run(call)
