"""What it costs to train on truncated samples without the sampler's supports, on a policy that can be enumerated.

docs/keep_sampling_mask.md explains what is measured and why. This script prints its numbers and draws its figure:

    python examples/keep_sampling_mask/bias.py
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fastrl

VOCAB, STEPS = 64, 3
SHARPNESS = 1.7  # standard deviation of the logits
TOP_PS = (0.7, 0.8, 0.9, 0.95, 1.0)
SHOWN = 0.9  # the top-p whose convergence is drawn
CHUNK = 2**15  # sequences at a time
PICTURE = Path(__file__).parents[2] / "docs" / "keep_sampling_mask.png"

#: How a trainer may treat the same samples, and the colour of each in the figure.
MASKED, UNMASKED, RECOMPUTED = "sampling_mask", "no mask, sampler's old", "no mask, old recomputed"
COLORS = {MASKED: "#0868ac", UNMASKED: "#c1272d", RECOMPUTED: "#e08214"}


@dataclass(frozen=True)
class Batch:
    """N sequences that the sampler may draw."""

    tokens: Tensor  # (N, STEPS) int64
    contexts: Tensor  # (N, STEPS) int64: the row of the policy's table that each token was drawn with
    old_logprobs: Tensor  # (N, STEPS) float32, the sampler's: normalised over the support
    advantages: Tensor  # (N,) float32


class Sampler:
    """A bigram policy, as a table of logits, sampled at top-p; a sequence's reward is the sum of its tokens' values."""

    def __init__(self, table: Tensor, values: Tensor, top_p: float) -> None:
        self.table, self.values = table, values  # (VOCAB + 1, VOCAB), the last row for the first token; (VOCAB,)
        self.kept = nucleus(table, top_p)
        # What a rollout engine would record, here once per row of the table instead of once per token.
        self.sets = fastrl.SamplingMask.from_dense(self.kept)
        self.logprobs = table.masked_fill(~self.kept, -torch.inf).log_softmax(-1)
        tokens = torch.cartesian_prod(*[torch.arange(VOCAB)] * STEPS)
        drawable = self.logprobs[contexts_of(tokens), tokens].isfinite().all(1)
        self.tokens = tokens[drawable]
        self.probability = self.logprobs[contexts_of(self.tokens), self.tokens].double().sum(1).exp()  # (N,)
        rewards = values[self.tokens].double().sum(1)
        # Centred as a group's rewards are: advantages have mean 0 and variance 1 under the sampler.
        self.mean = float(self.probability @ rewards)
        self.std = float(self.probability @ (rewards - self.mean) ** 2) ** 0.5

    def batch(self, tokens: Tensor) -> Batch:
        """What a trainer gets for sequences (N, STEPS)."""
        contexts = contexts_of(tokens)
        advantages = (self.values[tokens].sum(1) - self.mean) / self.std
        return Batch(tokens, contexts, self.logprobs[contexts, tokens], advantages)

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Independent sequences."""
        steps, context = [], torch.full((count,), VOCAB)
        for _ in range(STEPS):
            context = torch.multinomial(self.logprobs[context].exp(), 1, generator=generator)[:, 0]
            steps.append(context)
        return self.batch(torch.stack(steps, 1))

    def true_gradient(self) -> Tensor:
        """The gradient of the mean advantage over the sampler's sequences, by enumeration and autograd: float64."""
        table = self.table.double().requires_grad_()
        logprobs = table.masked_fill(~self.kept, -torch.inf).log_softmax(-1)
        probability = logprobs[contexts_of(self.tokens), self.tokens].sum(1).exp()
        (gradient,) = torch.autograd.grad(probability @ self.batch(self.tokens).advantages.double(), table)
        return gradient

    def estimate(self, batch: Batch, trainer: str) -> Tensor:
        """The sum over a batch of the gradients that PPO's loss gives, as an ascent direction: float64."""
        table = self.table.clone().requires_grad_()
        loss = fastrl.logits_policy_loss(
            table[batch.contexts],
            batch.tokens,
            objective=fastrl.PPO(aggregate="seq-mean-token-sum"),
            advantages=batch.advantages,
            old_logprobs=None if trainer == RECOMPUTED else batch.old_logprobs,
            sampling_mask=self.sets.index(batch.contexts) if trainer == MASKED else None,
            denominator=1,
        ).loss
        (gradient,) = torch.autograd.grad(loss, table)
        return -gradient.double()

    def expected_estimate(self, trainer: str) -> Tensor:
        """What the mean of a trainer's gradients tends to: every sequence once, weighted by its probability."""
        total = torch.zeros(VOCAB + 1, VOCAB, dtype=torch.float64)
        for rows in torch.arange(len(self.tokens)).split(CHUNK):
            batch = self.batch(self.tokens[rows])
            weighted = batch.advantages * self.probability[rows].float()
            total += self.estimate(Batch(batch.tokens, batch.contexts, batch.old_logprobs, weighted), trainer)
        return total


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """The supports (..., V) of top-p: the likeliest entries, until they have at least this probability together."""
    probability, order = logits.softmax(-1).sort(-1, descending=True)
    before = probability.cumsum(-1) - probability
    kept = (before < top_p) | (top_p == 1)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def contexts_of(tokens: Tensor) -> Tensor:
    """The table's row for each token of sequences (N, STEPS): the token before it."""
    return torch.cat([torch.full_like(tokens[:, :1], VOCAB), tokens[:, :-1]], 1)


# --- the two measurements ---------------------------------------------------------------------------------------------


def measure_ratios(sampler: Sampler, batch: Batch) -> dict[str, float]:
    """Importance ratios of a policy that has not changed since it sampled: all should be 1."""
    logits, sets = sampler.table[batch.contexts], sampler.sets.index(batch.contexts)
    found: dict[str, float] = {"kept entries": float(sets.lengths.double().mean())}
    for trainer, mask in ((MASKED, sets), (UNMASKED, None)):
        logprobs = fastrl.token_logprobs(logits, batch.tokens, sampling_mask=mask).logprobs
        ratios = (logprobs - batch.old_logprobs).double().exp()
        a_sequence = ratios.mean(1)  # tokens of one sequence are not independent, sequences are
        found[trainer] = float(a_sequence.mean())
        found[f"{trainer}, error"] = float(a_sequence.std() / len(ratios) ** 0.5)
        found[f"{trainer}, off"] = float((ratios - 1).abs().max())
        found[f"{trainer}, GSPO clips"] = gspo_clips(logits, batch, mask)
    occupancy = torch.zeros(VOCAB + 1, dtype=torch.float64)
    weights = sampler.probability[:, None].expand(-1, STEPS) / STEPS
    occupancy.index_add_(0, contexts_of(sampler.tokens).reshape(-1), weights.reshape(-1))
    kept_mass = (sampler.table.double().softmax(-1) * sampler.kept).sum(-1)
    found["kept mass"] = float(occupancy @ kept_mass)  # exact, and what the ratio without a mask must be
    return found


def gspo_clips(logits: Tensor, batch: Batch, mask: fastrl.SamplingMask | None) -> float:
    """The share of tokens that GSPO, which clips sequence ratios 3e-4 below 1, gives no gradient."""
    metrics = fastrl.logits_policy_loss(
        logits,
        batch.tokens,
        objective=fastrl.GSPO(),
        advantages=batch.advantages,
        old_logprobs=batch.old_logprobs,
        sampling_mask=mask,
    ).metrics
    return float(metrics["clip_frac"])


def measure_gradients(sampler: Sampler, samples: int, repeats: int, generator: torch.Generator) -> dict[str, Any]:
    """Errors of each trainer's mean gradient against the true one: in the limit, and after 2^k samples."""
    true = sampler.true_gradient()
    sizes = [2**k for k in range(8, samples.bit_length()) if 2**k <= samples]
    errors = {trainer: torch.zeros(repeats, len(sizes), dtype=torch.float64) for trainer in COLORS}
    for repeat in range(repeats):
        sums = {trainer: torch.zeros_like(true) for trainer in COLORS}
        for batch, drawn in draw_up_to(sampler, sizes, generator):
            for trainer, total in sums.items():
                total += sampler.estimate(batch, trainer)
                if drawn in sizes:
                    errors[trainer][repeat, sizes.index(drawn)] = distance(total / drawn, true)
    limits = {trainer: sampler.expected_estimate(trainer) for trainer in COLORS}
    return {
        "sizes": sizes,
        "errors": {trainer: values.square().mean(0).sqrt().tolist() for trainer, values in errors.items()},
        "bias": {trainer: distance(limit, true) for trainer, limit in limits.items()},
        "cosine": {trainer: cosine(limit, true) for trainer, limit in limits.items()},
    }


def draw_up_to(sampler: Sampler, sizes: list[int], generator: torch.Generator) -> Iterator[tuple[Batch, int]]:
    """Batches that end at each of the sizes, and the number of sequences drawn so far."""
    drawn = 0
    for size in sizes:
        while drawn < size:
            count = min(CHUNK, size - drawn)
            drawn += count
            yield sampler.draw(count, generator), drawn


def distance(found: Tensor, true: Tensor) -> float:
    """The length of the difference, relative to the true gradient's."""
    return float((found - true).norm() / true.norm())


def cosine(found: Tensor, true: Tensor) -> float:
    """The cosine of the angle between two gradients."""
    return float((found * true).sum() / found.norm() / true.norm())


# --- tables and figure ------------------------------------------------------------------------------------------------


def report(results: dict[float, dict[str, Any]]) -> None:
    """Print the tables of docs/keep_sampling_mask.md."""
    print("Importance ratios of an unchanged policy: mean (+- standard error), largest |ratio - 1|; tokens GSPO clips")
    print("top-p   entries  probability   sampling_mask                             no mask")
    print("           kept         kept   mean - 1  largest  clipped   mean                 largest  clipped")
    for top_p, found in results.items():
        ratio = found["ratios"]
        off, clips = ([ratio[f"{trainer}, {what}"] for trainer in (MASKED, UNMASKED)] for what in ("off", "GSPO clips"))
        print(
            f" {top_p:4.2f}  {ratio['kept entries']:8.1f}  {ratio['kept mass']:11.5f}"
            f"   {ratio[MASKED] - 1:8.0e}  {off[0]:7.0e}  {clips[0]:7.1%}"
            f"   {ratio[UNMASKED]:.5f} +- {ratio[f'{UNMASKED}, error']:.5f}  {off[1]:7.3f}  {clips[1]:7.1%}"
        )
    columns = "".join(f"{trainer:>26}" for trainer in COLORS)
    print(f"\nThe expected gradient against the true one: relative error (cosine)\ntop-p {columns}")
    for top_p, found in results.items():
        bias, angle = found["gradients"]["bias"], found["gradients"]["cosine"]
        print(f" {top_p:4.2f} " + "".join(f"{f'{bias[t]:.1e} ({angle[t]:.4f})':>26}" for t in COLORS))
    shown = results[SHOWN]["gradients"]
    print(f"\nThe mean gradient of so many sequences at top-p {SHOWN} against the true one: relative error")
    print(f" sequences{columns}")
    for column, size in enumerate(shown["sizes"]):
        print(f"{size:10d}" + "".join(f"{shown['errors'][trainer][column]:26.4f}" for trainer in COLORS))


def draw(results: dict[float, dict[str, Any]], picture: Path) -> None:
    """Three panels: ratios and bias against top-p, errors against samples."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    ratios, errors, bias = figure.subplots(1, 3)
    top_ps = list(results)

    found = {name: [result["ratios"][name] for result in results.values()] for name in ("kept mass", UNMASKED, MASKED)}
    ratios.plot(top_ps, found["kept mass"], color="#222222", lw=1, label="kept probability, exact")
    for trainer in (UNMASKED, MASKED):
        ratios.plot(top_ps, found[trainer], "o", ms=6, color=COLORS[trainer], label=trainer)
    ratios.set(title="Mean importance ratio of an unchanged policy", xlabel="top-p", ylabel="mean ratio")

    shown = results[SHOWN]["gradients"]
    for trainer, color in COLORS.items():
        errors.loglog(shown["sizes"], shown["errors"][trainer], "o-", ms=4, color=color, label=trainer)
        if trainer != MASKED:
            errors.axhline(shown["bias"][trainer], color=color, ls="--", lw=1)
    first, sizes = shown["errors"][MASKED][0], shown["sizes"]
    slope = [first * (sizes[0] / size) ** 0.5 for size in sizes]
    errors.loglog(sizes, slope, ":", color="#222222", label="sequences$^{-1/2}$")
    errors.set(
        title=f"Error of the mean gradient, top-p {SHOWN}", xlabel="sequences", ylabel="relative error (dashed: limit)"
    )

    for trainer, color in COLORS.items():
        limits = [result["gradients"]["bias"][trainer] for result in results.values()]
        bias.plot(top_ps, limits, "o-", ms=4, color=color, label=trainer)
    bias.set(
        title="Bias of the gradient, exact", xlabel="top-p", ylabel="relative error with infinitely many sequences"
    )
    for axes in (ratios, errors, bias):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def main(arguments: Sequence[str] | None = None) -> dict[float, dict[str, Any]]:
    """Measure, print and draw; returns top-p -> {"ratios": ..., "gradients": ...}."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2**18, help="sequences drawn in a repeat (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=4, help="repeats that errors are averaged over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where the figure goes")
    options = parser.parse_args(arguments)

    generator = torch.Generator().manual_seed(options.seed)
    table = SHARPNESS * torch.randn(VOCAB + 1, VOCAB, generator=generator)
    values = torch.randn(VOCAB, generator=generator)
    results = {}
    for top_p in TOP_PS:
        sampler = Sampler(table, values, top_p)
        samples, repeats = (options.samples, options.repeats) if top_p == SHOWN else (0, 0)
        ratios = measure_ratios(sampler, sampler.draw(CHUNK, generator))
        results[top_p] = {"ratios": ratios, "gradients": measure_gradients(sampler, samples, repeats, generator)}
    report(results)
    draw(results, options.picture)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)  # small tensors: as fast as with more, and sums of the same order every time
    main()
