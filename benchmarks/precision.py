"""Errors of every function that reads the vocabulary against float64: the tables of docs/precision.md.

    python benchmarks/precision.py --write
    TRITON_INTERPRET=1 python benchmarks/precision.py --backends triton --shape 16x32x512 --write

Inputs are random: logits have a standard deviation of 3, targets are uniform, old log-probabilities are off by 0.05 to
0.15 nats, one in twenty by more than the clip. Exact are the same operands in float64, by torch's own functions. Eager
is torch in the operands' dtype, as a trainer writes it. Of values the largest absolute error counts, in nats, of
gradients the largest of any input's, as a share of its largest entry.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl.bench import machine, plain, preference
from fastrl.bench.problems import Problem, linear_problem, logits_problem, normal_head

PAGE = Path(__file__).resolve().parents[1] / "docs" / "precision.md"
RESULTS = Path(__file__).parent / "results"
#: Whose tables the page has.
MACHINE = "epyc-2-cores"
DTYPES = ("float32", "bfloat16", "float16")
#: An error may be so much above eager torch's: a value's, relative to max(1, |exact|); a gradient's, by dtype.
VALUES, GRADIENTS = 4e-6, {"float32": 4e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}
OBJECTIVES = {"PPO": fastrl.PPO(clip=plain.CLIP), "GSPO": fastrl.GSPO(plain.CLIP, plain.CLIP)}
Errors = dict[str, tuple[float, float]]  # of value and gradient, by who computed them


class Case(NamedTuple):
    """A function of the package and the same in torch: of the inputs, and of their logits."""

    function: str
    of: str
    inputs: Sequence[Tensor]
    ours: Callable[..., Tensor]
    formula: Callable[[Tensor], Tensor]


def log_softmax(p: Problem, z: Tensor) -> Tensor:
    """Of logits (N, V), over recorded supports if there are any."""
    wide = z if z.dtype == torch.float64 else z.float()
    outside = None if p.tokens.sets is None else ~p.tokens.sets.to_dense(z.shape[-1])
    return torch.log_softmax(wide if outside is None else wide.masked_fill(outside, -1e30), -1)


def logprobs(p: Problem, z: Tensor) -> Tensor:
    """The targets' log-probabilities."""
    return log_softmax(p, z).gather(-1, p.tokens.targets[:, None])[:, 0]


def entropies(p: Problem, z: Tensor) -> Tensor:
    """The rows' entropies."""
    return -((log_p := log_softmax(p, z)).exp() * log_p).sum(-1)


def policy_loss(p: Problem, name: str, z: Tensor) -> Tensor:
    """PPO's or GSPO's loss."""
    logp, t = logprobs(p, z), p.tokens
    if name == "PPO":
        return plain.clipped_loss(logp, t.old.to(logp), t.advantages.to(logp), t.count)
    return plain.sequence_clipped_loss(t.padded(logp - t.old.to(logp)), t.per_response.to(logp))


def token_cases(p: Problem, inputs: Sequence[Tensor], note: str = "", **more: Any) -> Iterator[Case]:
    """Log-probabilities and policy losses, from logits or from hidden states and weight."""
    t, linear = p.tokens, "linear_" if len(inputs) == 2 else ""
    of = getattr(fastrl, f"{linear}token_logprobs")
    loss = getattr(fastrl, f"{linear or 'logits_'}policy_loss")
    more["sampling_mask"] = t.sets
    for i, formula in enumerate((logprobs, entropies)):
        name = ("log-probabilities", "entropies")[i] + note
        ours = lambda *x, i=i: of(*x, t.targets, entropy=True, **more)[i]  # noqa: E731
        yield Case(of.__name__, name, inputs, ours, lambda z, f=formula: f(p, z))
    for name, objective in OBJECTIVES.items():
        given = {"objective": objective, "advantages": t.per_response, "old_logprobs": t.padded(t.old), **more}
        ours = lambda x, *w, g=given: loss(t.padded(x), *w, t.padded(t.targets), **g).loss  # noqa: E731
        yield Case(loss.__name__, name + note, inputs, ours, lambda z, n=name: policy_loss(p, n, z))


def gathered_case(p: Problem, inputs: Sequence[Tensor], vocab: int) -> Case:
    """Four log-probabilities a row."""
    ids = torch.cat([p.tokens.targets[:, None], torch.randint(vocab, (p.tokens.count, 3))], 1)
    of = fastrl.linear_gathered_logprobs if len(inputs) == 2 else fastrl.gathered_logprobs
    return Case(of.__name__, "four a row", inputs, lambda *x: of(*x, ids), lambda z: log_softmax(p, z).gather(-1, ids))


def preference_cases(shape: tuple[int, int, int], dtype: torch.dtype) -> Iterator[Case]:
    """DPO, SimPO and KTO of eight responses."""
    p = preference.preference_problem(*shape, shape[0] // 8, dtype, "cpu")
    targets, ref = p.responses(p.policy.tokens.targets), p.responses(p.ref_logprobs).float()
    rest = (targets, torch.ones_like(targets), ref.double().sum(-1).float())
    of: dict[str, tuple[str, dict[str, Any]]] = {
        "linear_dpo_loss": ("DPO", {"beta": 0.1}),
        "linear_preference_loss": ("SimPO", {"objective": fastrl.SimPO(2.0, 1.0)}),
        "linear_kto_loss": ("KTO", {"desirable": torch.arange(8) < 4, "beta": 0.1, "kl": 0.2}),
    }
    for name, (loss, more) in of.items():
        (plainly,) = (x for x in preference.LOSSES if x.name == loss)
        ours = lambda x, w, n=name, m=more: getattr(fastrl, n)(p.responses(x), w, *rest, **m).loss  # noqa: E731
        inputs = tuple(p.policy.inputs.values())
        yield Case(name, loss, inputs, ours, lambda z, f=plainly: f.of(p.responses(logprobs(p.policy, z)), ref))


def divergence_cases(inputs: Sequence[Tensor]) -> Iterator[Case]:
    """From a teacher that is half as wide again."""
    x, w = inputs
    t = normal_head(len(x), x.shape[1] * 3 // 2, len(w), x.dtype, torch.Generator().manual_seed(1))
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        ours = lambda x, w, k=kind: fastrl.linear_divergence(x, w, *t, kind=k).loss  # noqa: E731
        teacher = lambda z: torch.nn.functional.linear(t[0].to(z), t[1].to(z))  # noqa: E731
        formula = lambda z, k=kind, q=teacher: plain.divergence(z, q(z), k, 0.5).mean()  # noqa: E731
        yield Case("linear_divergence", kind, inputs, ours, formula)


def cases(shape: tuple[int, int, int], dtype: torch.dtype) -> Iterator[Case]:
    """All cases of a dtype at tokens x hidden x vocabulary."""
    n, _, v = shape
    rows, head = logits_problem(n, v, dtype, "cpu"), linear_problem(*shape, dtype, "cpu")
    masked = linear_problem(*shape, dtype, "cpu", mean_set=8)
    z, inputs, of_masked = (tuple(p.inputs.values()) for p in (rows, head, masked))
    yield from token_cases(rows, z)
    yield gathered_case(rows, z, v)
    yield from token_cases(masked, (torch.nn.functional.linear(*of_masked),), ", sampling mask")
    yield from token_cases(head, inputs)
    if dtype != torch.float32:
        yield from token_cases(head, inputs, ", float32 logits", logits_dtype=torch.float32)
    yield gathered_case(head, inputs, v)
    yield from token_cases(masked, of_masked, ", sampling mask")
    ours = lambda x, w: fastrl.linear_cross_entropy(x, w, head.tokens.targets)  # noqa: E731
    yield Case("linear_cross_entropy", "mean", inputs, ours, lambda z: -logprobs(head, z).mean())
    yield from preference_cases(shape, dtype)
    yield from divergence_cases(inputs)


def differentiate(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The value and the gradients, for the same upstream gradient whoever computes it."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = function(*leaves)
    upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(2)) if value.dim() else torch.ones(())
    return [value.detach(), *torch.autograd.grad(value, leaves, upstream.to(value))]


def measured(case: Case, backends: Sequence[str]) -> tuple[Errors, list[str]]:
    """The case's errors, and the backends whose errors are above eager torch's by more than the margin, or NaN."""
    formula = case.formula if len(case.inputs) == 1 else plain.linear(case.formula)
    exact = differentiate(formula, [x.double() for x in case.inputs])

    def errors(function: Callable[..., Tensor]) -> tuple[float, float]:
        found = differentiate(function, case.inputs)
        value, *rest = ((a.double() - b).abs().max().item() for a, b in zip(found, exact, strict=True))
        return value, max(error / b.abs().max().item() for error, b in zip(rest, exact[1:], strict=True))

    by = {}
    for name in backends:
        with fastrl.use_backend(name):
            by[name] = errors(case.ours)
    by["eager"] = value, gradient = errors(formula)
    most = value + VALUES * max(1.0, exact[0].abs().max().item())
    more = gradient + GRADIENTS[str(case.inputs[0].dtype).removeprefix("torch.")]
    return by, [name for name in backends if not (by[name][0] <= most and by[name][1] <= more)]


def measure(shape: tuple[int, int, int], backends: Sequence[str], command: str) -> tuple[dict[str, Any], list[str]]:
    """Machine, versions, commit, command and the errors of each dtype's cases; and which are above the margin."""
    facts, wrong = machine.describe([]), []
    found: dict[str, Any] = {**facts, "command": command, "shape": shape, "errors": {}}
    for dtype in DTYPES:
        torch.manual_seed(0)
        rows = found["errors"][dtype] = []
        for case in cases(shape, getattr(torch, dtype)):
            errors, above = measured(case, backends)
            wrong += [f"{case.function}, {case.of}, {dtype}, {name}: {errors}" for name in above]
            rows.append({"function": case.function, "of": case.of, "errors": errors})
    return found, wrong


def folder(where: dict[str, Any]) -> str:
    """The name of a machine's folder of results, such as "epyc-2-cores"."""
    words = re.findall(r"\w+", where["cpu"].lower().replace("(r)", ""))
    return f"{words[1] if len(words) > 1 else 'cpu'}-{where['cpu_cores']}-cores"


def results(machine: str, backends: Sequence[str]) -> Path:
    """The file of these backends' errors on a machine."""
    return RESULTS / machine / f"precision-{'-'.join(backends)}.json"


def tables(found: dict[str, Any]) -> str:
    """Markdown of what was measured: the command, the conditions, and a table for each dtype."""
    where, versions, (n, h, v) = found["machine"], found["versions"], found["shape"]
    names = list(found["errors"][DTYPES[0]][0]["errors"])
    used = [f"{name} {versions[name]}" for name in ("python", "torch", *(x for x in names if x == "triton"))]
    on = f"{where['cpu']}, {where['cpu_cores']} cores; {', '.join(used)}; commit {found['commit']}; {found['date']}."
    text = [f"```sh\n{found['command']}\n```", f"{n} tokens, hidden {h}, vocabulary {v}; {on}"]
    head = ["function", "of", f"value: {names[0]}", *names[1:], f"gradient: {names[0]}", *names[1:]]
    for dtype, rows in found["errors"].items():
        lines = [head, ["---"] * len(head)]
        for row in rows:
            numbers = [f"{row['errors'][name][i]:.1e}" for i in (0, 1) for name in names]
            lines.append([f"`{row['function']}`", row["of"], *numbers])
        text += [f"**{dtype}**", "\n".join(f"| {' | '.join(cells)} |" for cells in lines)]
    return "\n\n".join(text)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="256x256x32768", help="tokens x hidden x vocabulary")
    parser.add_argument("--backends", nargs="+", default=["cpp", "torch"], choices=["cpp", "torch", "triton"])
    parser.add_argument(
        "--write",
        action="store_true",
        help="replace this machine's results of these backends, and their tables if the page is of this machine",
    )
    options = parser.parse_args(argv)
    n, h, v = map(int, options.shape.split("x"))
    interpreted = "TRITON_INTERPRET=1 " if os.environ.get("TRITON_INTERPRET") else ""
    command = interpreted + shlex.join(["python", "benchmarks/precision.py", *argv])
    found, wrong = measure((n, h, v), options.backends, command)
    print(tables(found), *(f"above the margin: {line}" for line in wrong), sep="\n")
    if options.write:
        path = results(folder(found["machine"]), options.backends)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        if path.parent.name != MACHINE:
            print(f"{path} is new; {PAGE} keeps the tables of {MACHINE}", file=sys.stderr)
            return int(bool(wrong))
        start = f"<!-- precision: {' '.join(options.backends)} -->"
        page = PAGE.read_text()
        assert start in page, f"{PAGE} has no {start}"
        new = f"{start}\n\n{tables(found)}\n\n"
        PAGE.write_text(re.sub(rf"{start}.*?(?=<!-- end -->)", lambda _: new, page, flags=re.S))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
