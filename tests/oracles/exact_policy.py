"""The policy losses once more, in float64, a response at a time: what a loss, its metrics, c and h must be.

Written from the published formulas, not from the code under test: ratio levels, token weights and aggregations here,
gates and KL estimators in `exact_gates.py`. Wherever a formula decides something (clamped or not, above a threshold or
not) the distance to the border is kept in `Exact.borders`, so that who compares knows what rounding may turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from exact_gates import INFINITY, Gated, border, gated_terms, kl_term, with_slope
from torch import Tensor

import fastrl


@dataclass
class Batch:
    """What a policy loss reads beside log-probabilities, float64 (N,), flattened; masked entries may hold anything."""

    responses: list[list[int]]
    mask: Tensor
    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    rollout: Tensor | None = None
    token_weights: Tensor | None = None
    entropy_weights: Tensor | None = None
    threshold: float | None = None
    denominator: float | list[float] | None = None  # of the batch, or of each response
    groups: list[Any] | None = None  # the prompt of each response
    draws: Tensor | None = None  # Clip-Cov's: the smallest win

    @classmethod
    def padded(cls, mask: Tensor, *, denominator: float | None = None, **fields: Tensor) -> Batch:
        """Of fields (B, T), or one number per response (B, 1)."""
        rows = torch.arange(mask.numel()).view(mask.shape).tolist()
        flat = {name: value.expand(mask.shape).flatten().double() for name, value in fields.items()}
        return cls(rows, mask.flatten().bool(), denominator=denominator, **flat)

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())


@dataclass
class Exact:
    """Loss, its slopes and its metrics; magnitudes bound what a sum's rounding errors are relative to."""

    loss: Tensor
    c: Tensor
    h: Tensor
    metrics: dict[str, Tensor]
    c_magnitude: Tensor
    magnitudes: dict[str, Tensor]
    borders: list[Tensor] = field(default_factory=list)


def exact_policy(objective: Any, batch: Batch, logp: Tensor, entropy: Tensor | None) -> Exact:
    """The loss of (N,) float64 log-probabilities and entropies, its derivatives in them, and its metrics."""
    logp = logp.detach().clone().requires_grad_()
    entropy = None if entropy is None else entropy.detach().clone().requires_grad_()
    return _Evaluation(objective, batch, logp, entropy).result()


def exact_loss(objective: Any, batch: Batch, logp: Tensor, entropy: Tensor | None = None) -> Tensor:
    """The loss alone, with the graph of float64 log-probabilities and entropies, which may have any shape."""
    return _Evaluation(objective, batch, logp.flatten(), None if entropy is None else entropy.flatten()).loss


def token_losses(objective: Any, batch: Batch, logp: Tensor) -> Tensor:
    """What the aggregation weighs, each token's loss: with logp's graph and shape, 0 where the mask is."""
    evaluation = _Evaluation(objective, batch, logp.flatten(), None)
    each = sum(evaluation.parts.values()) / torch.where(batch.mask, evaluation.weights, 1.0)
    return each.view(logp.shape)


class _Evaluation:
    """Sums over responses."""

    def __init__(self, objective: Any, batch: Batch, logp: Tensor, entropy: Tensor | None) -> None:
        self.custom = None if isinstance(objective, fastrl.Objective) else objective
        if self.custom is not None:
            objective = fastrl.Objective(
                aggregate=getattr(objective, "aggregate", "token-mean"),
                max_length=getattr(objective, "max_length", None),
            )
        self.objective, self.batch, self.logp, self.entropy = objective, batch, logp, entropy
        self.old = logp.detach() if batch.old is None else batch.old
        self.borders: list[Tensor] = []
        terms = ("policy_loss", "kl", "entropy_term")
        # Of each token, with its weight.
        self.parts: dict[str, Tensor] = {name: torch.zeros_like(logp) for name in terms}
        self.magnitude = {name: torch.zeros((), dtype=torch.float64) for name in terms}
        self.weights, self.c_magnitude = torch.zeros_like(logp), torch.zeros_like(logp)
        names = ("kl", "entropy", "ratio", "gate", "approx_kl", "side", "clamped", "off_policy", "chosen")
        names += ("rho", "log_rho", "log_rho_terms", "rejected")
        self.token: dict[str, Tensor] = {name: torch.zeros_like(logp) for name in names}
        self.top = self._top_entropy()
        self.weight_of_future, self.pull = self._future(), torch.zeros_like(logp)
        self.chosen = self._chosen()
        self.losses = self._custom_losses() if self.custom is not None else None
        for number, response in enumerate(batch.responses):
            rows = [t for t in response if batch.mask[t]]
            if rows:
                self._add(rows, self._weight(number))

    @property
    def loss(self) -> Tensor:
        return sum(self.parts.values(), torch.zeros_like(self.logp)).sum()

    def _part(self, name: str, rows: list[int], terms: Tensor, magnitude: Tensor) -> None:
        """Terms of the loss, one per row, and what their rounding errors are relative to."""
        self.parts[name] = self.parts[name].index_add(0, torch.tensor(rows), terms)
        self.magnitude[name] = self.magnitude[name] + magnitude.detach().abs().sum()

    def _top_entropy(self) -> Tensor:
        """1 for the tokens that an entropy threshold or fraction leaves in."""
        ones = torch.ones_like(self.logp)
        fraction, threshold = self.objective.top_entropy_fraction, self.batch.threshold
        if (threshold is None and (fraction in (None, 1) or self.batch.tokens == 1)) or not self.batch.tokens:
            return ones
        assert self.entropy is not None
        entropy = self.entropy.detach()
        if threshold is None:
            counted = entropy[self.batch.mask]
            threshold = float(torch.quantile(counted, 1 - fraction))
            self.borders.append(counted.sort().values - threshold)
        else:
            self.borders.append(border(entropy - threshold, self.batch.mask))
        return (entropy >= threshold).double()

    def _future(self) -> Tensor:
        """FIPO's weight of each token: a double loop over each response."""
        rule, weights = self.objective.future_kl, torch.ones_like(self.logp.detach())
        if rule is None:
            return weights
        gamma = 2 ** (-1 / rule.half_life)
        for response in self.batch.responses:
            rows = [t for t in response if self.batch.mask[t]]
            raw = (self.logp[rows] - self.old[rows]).detach()
            limit = self.objective.max_log_ratio
            log = raw.clamp(-limit, limit)
            heard = log.clone()
            if rule.max_ratio is not None:
                self.borders.append(log - math.log(rule.max_ratio))
                heard = torch.where(log > math.log(rule.max_ratio), 0.0, log)
            for i, t in enumerate(rows):
                future = sum((gamma ** (k - i) * heard[k] for k in range(i, len(rows))), torch.zeros_like(heard[0]))
                weight = self._clamp(future, [t]).exp()
                weight = weight.clamp(rule.low, rule.high)
                if rule.safe_ratio is not None and self.batch.advantages[t] < 0:
                    self.borders.append(log[i] - math.log(rule.safe_ratio))
                    weight = weight.clamp(0.8, 1.0) if log[i] > math.log(rule.safe_ratio) else weight
                weights[t] = weight
        return weights

    def _chosen(self) -> Tensor:
        """The tokens of Clip-Cov or KL-Cov by the largest products, among those that the gate does not clip."""
        rule, chosen = self.objective.covariance, torch.zeros_like(self.batch.mask)
        rows = self.batch.mask.nonzero()[:, 0]
        if rule is None or not len(rows):
            return chosen
        number = max(int(rule.fraction * len(rows)), 1)
        rows = rows[self.logp.detach()[rows].isfinite()]
        a, b = self.batch.advantages[rows], self.logp.detach()[rows]
        product = (a - a.mean()) * (b - b.mean())
        if isinstance(rule, fastrl.CovarianceKL):
            ordered = product.sort(descending=True).values
            if number < len(rows):
                self.borders.append(ordered[number - 1] - ordered[number])
            chosen[rows[product.argsort(descending=True, stable=True)[:number]]] = True
            return chosen
        self.borders += [product - rule.low, product - rule.high]
        between = (product > rule.low) & (product < rule.high)
        clips = [self._clips(int(t)) for t in rows]
        candidates = [int(t) for t, inside, out in zip(rows, between, clips, strict=True) if inside and not out]
        if len(candidates) > number:
            assert self.batch.draws is not None, "which of them are drawn?"
            candidates = sorted(candidates, key=lambda t: float(self.batch.draws[t]))[:number]
        chosen[candidates] = True
        return chosen

    def _clips(self, t: int) -> bool:
        """Whether the gate clips this token."""
        response = next(r for r in self.batch.responses if t in r)
        rows = [u for u in response if self.batch.mask[u]]
        advantage = self.batch.advantages[rows]
        side, clamped, borders = self.token["side"].clone(), self.token["clamped"].clone(), []
        log, _ = self._level(rows, advantage)
        args = (log.detach(), self.logp[rows].detach(), advantage, self.token["side"][rows])
        gated = gated_terms(self.objective.gate, *args, torch.zeros_like(advantage).bool(), borders)
        self.token["side"], self.token["clamped"] = side, clamped
        self.borders += borders
        return bool(gated.side[rows.index(t)])

    def _custom_losses(self) -> Tensor:
        rows = self.batch.mask.nonzero()[:, 0]
        optional = (self.entropy, self.old, self.batch.ref, self.batch.rollout)
        logp, *others = [None if t is None else t[rows] for t in (self.logp, *optional)]
        context = fastrl.LossContext(logp, *others, torch.ones(len(rows), dtype=torch.bool), None)
        losses = self.custom(logp - self.old[rows], self.batch.advantages[rows], context)
        return torch.zeros_like(self.logp).index_add(0, rows, losses)

    def _weight(self, number: int) -> float:
        """The aggregation's weight of each token of a response."""
        kind, denominator, responses = self.objective.aggregate, self.batch.denominator, self.batch.responses
        if isinstance(denominator, list):
            denominator = denominator[number]
        if kind == "token-mean":
            return 1 / (self.batch.tokens if denominator is None else denominator)
        lengths = [int(self.batch.mask[response].sum()) for response in responses]
        if kind == "prompt-mean":
            groups = self.batch.groups
            own = sum(length for length, group in zip(lengths, groups, strict=True) if group == groups[number])
            return 1 / (own * (len(set(groups)) if denominator is None else denominator))
        tokens = lengths[number]
        responses = len(responses) if denominator is None else denominator
        length = {"seq-mean-token-mean": tokens, "seq-mean-token-sum": 1}.get(kind, self.objective.max_length)
        return 1 / (responses * length)

    def _clamp(self, log: Tensor, rows: list[int]) -> Tensor:
        """An exponent within its limits; no gradient passes where it was outside."""
        limit = self.objective.max_log_ratio
        self.borders.append(log.detach().abs() - limit)
        clamped = (log.detach().abs() > limit).double()
        self.token["clamped"][rows] = torch.maximum(self.token["clamped"][rows], clamped.expand(len(rows)))
        return log.clamp(-limit, limit)

    def _level(self, rows: list[int], advantage: Tensor) -> tuple[Tensor, float | Tensor]:
        """The logarithm of the ratio that the gate reads, one per token, and its slope in each token's logp."""
        objective, n = self.objective, len(rows)
        log_ratio = self.logp[rows] - self.old[rows]
        if objective.gate.reads_rollout and self.batch.rollout is not None:
            log_ratio = self.logp[rows] - self.batch.rollout[rows]
            if objective.ratio == "token":  # then all three differences count as exponents
                self._clamp(self.old[rows] - self.batch.rollout[rows], rows)
        if isinstance(objective.gate, fastrl.GammaWeight):
            log = log_ratio.sum()
            self.borders += [log.detach() - math.log(1e-8), log.detach() - 20.0]  # the gate's own
            return self._clamp(log, rows).expand(n), 0.0
        if isinstance(objective.gate, fastrl.GeometricMean):
            bound = objective.gate.clip
            high, low = (advantage > 0) & (log_ratio > bound), (advantage < 0) & (log_ratio < -bound)
            self.borders += [border(log_ratio - bound, advantage > 0), border(log_ratio + bound, advantage < 0)]
            clipped = torch.where(high, bound, torch.where(low, -bound, log_ratio))
            self.token["side"][rows] = high.double() - low.double()
            return self._clamp(clipped.mean(), rows).expand(n), (~(high | low)).double() / n
        if objective.ratio == "token":
            return self._clamp(log_ratio, rows), 1.0
        if objective.ratio == "sequence-product":
            return self._clamp(log_ratio.sum(), rows).expand(n), 1.0
        mean = self._clamp(log_ratio.mean(), rows)
        if objective.ratio == "sequence":
            return mean.expand(n), 1 / n
        logp = self.logp[rows]
        return mean.detach() + (logp - logp.detach()), 1.0

    def _token_weights(self, rows: list[int], advantage: Tensor) -> Tensor:
        """omega, detached."""
        objective, batch = self.objective, self.batch
        omega = self.top[rows] * self.weight_of_future[rows]
        if batch.token_weights is not None:
            omega = omega * batch.token_weights[rows]
        old = self.old[rows]
        if objective.off_policy_delta is not None:
            behind = old if batch.rollout is None else batch.rollout[rows]
            distance = (behind - self.logp[rows]).mean().detach() - objective.off_policy_delta
            self.borders.append(border(distance, (advantage < 0).any()))
            dropped = (advantage < 0) & (distance > 0)
            self.token["off_policy"][rows] = dropped.double()
            omega = torch.where(dropped, 0.0, omega)
        correction = objective.rollout_correction
        if correction is not None:
            log = old - batch.rollout[rows]
            reduced = {"token": lambda x: x, "sequence": Tensor.sum, "sequence-mean": Tensor.mean}[correction.level]
            # Terms of both signs may cancel in a response: its rounding errors are relative to these.
            self.token["log_rho_terms"][rows] = reduced(log.abs()).expand(len(rows))
            self.token["log_rho"][rows] = log = reduced(log).expand(len(rows))
            log = self._clamp(log, rows)
            bounds = (correction.low, correction.high)
            for bound in (*bounds, *(correction.reject or ())):
                self.borders.append(log - math.log(bound) if bound else torch.full_like(log, INFINITY))
            self.token["rho"][rows] = rho = log.exp()
            weight = rho.clamp(*bounds) if correction.mode == "truncate" else _inside(rho, bounds)
            if correction.reject is not None:
                weight = torch.where(_inside(rho, correction.reject) == 0, 0.0, weight)
            self.token["rejected"][rows] = (weight == 0).double()
            omega = omega * weight
        return omega.detach()

    def _add(self, rows: list[int], w: float) -> None:
        objective, batch = self.objective, self.batch
        advantage = batch.advantages[rows]
        if self.losses is not None:
            log = (self.logp[rows] - self.old[rows]).detach()
            unknown = torch.full_like(log, math.nan)
            gated, share = Gated(self.losses[rows], unknown, torch.zeros_like(log)), 1.0
        else:
            clamped = self.token["clamped"]
            others, clamped[rows] = clamped[rows], 0.0  # other exponents: they hold no ratio
            log, share = self._level(rows, advantage)
            held = (clamped[rows] > 0) & (objective.ratio != "sequence-token")
            clamped[rows] = torch.maximum(clamped[rows], others)
            gated = gated_terms(
                objective.gate, log, self.logp[rows], advantage, self.token["side"][rows], held, self.borders
            )
            self.token["side"][rows] = gated.side
            gated = self._by_covariance(rows, gated)
        self.weights[rows] = w
        omega = self._token_weights(rows, advantage) * w
        self._add_policy(rows, omega, gated, advantage, share)
        token_log = self.logp[rows] - self.old[rows]
        weighted = objective.kl is not None and objective.kl.weighted
        self._add_kl(rows, omega if weighted else w, log, token_log)
        if self.entropy is not None:
            weights = w if batch.entropy_weights is None else batch.entropy_weights[rows]
            term = float(objective.entropy_coef) * weights * self.entropy[rows]
            self._part("entropy_term", rows, -term, term)
            self.token["entropy"][rows] = self.entropy[rows].detach()
        if self.losses is None:
            token_log = self._clamp(token_log.detach(), rows)
        self.token["ratio"][rows] = log.detach().exp()
        self.token["gate"][rows] = gated.weight.detach()
        self.token["approx_kl"][rows] = torch.expm1(token_log) - token_log

    def _by_covariance(self, rows: list[int], gated: Gated) -> Gated:
        """The gate's loss as Clip-Cov or KL-Cov changes it."""
        rule, chosen = self.objective.covariance, self.chosen[rows]
        self.token["chosen"][rows] = chosen.double()
        if isinstance(rule, fastrl.CovarianceClip):
            return Gated(torch.where(chosen, 0.0, gated.value), torch.where(chosen, 0.0, gated.weight), gated.side)
        if rule is None:
            return gated
        raw, limit = self.logp[rows] - self.old[rows], self.objective.max_log_ratio
        if self.batch.old is not None:
            self.borders.append(border(raw, chosen))  # the slope jumps there
        distance = float(rule.coef) * raw.clamp(-limit, limit).abs()
        self.pull[rows] = abs(float(rule.coef)) * chosen.double()
        return Gated(gated.value + torch.where(chosen, distance, 0.0), gated.weight, gated.side)

    def _add_policy(
        self, rows: list[int], omega: Tensor, gated: Gated, advantage: Tensor, share: float | Tensor
    ) -> None:
        terms = omega * gated.value
        weight = gated.weight if self.losses is None else (self.logp[rows] - self.old[rows]).exp() + 1
        slope = (omega * weight * advantage).detach().abs() + omega.abs() * self.pull[rows]
        apart = omega * self.pull[rows] * (self.logp[rows] - self.old[rows])  # KL-Cov's term and the gate's may cancel
        magnitude = terms.abs() + apart.abs() if self.losses is None else terms.abs() + slope
        self._part("policy_loss", rows, terms, magnitude)
        shared = self.objective.ratio in ("sequence", "sequence-product")
        self.c_magnitude[rows] += (slope.sum() if shared else slope) * share + slope

    def _add_kl(self, rows: list[int], w: float | Tensor, log: Tensor, token_log: Tensor) -> None:
        kl = self.objective.kl
        if kl is None:
            return
        limit = self.objective.max_log_ratio
        token_log = token_log.clamp(-limit, limit)
        d = torch.zeros_like(token_log)
        if kl.needs_reference:
            d = self._clamp(self.batch.ref[rows] - self.logp[rows], rows)
        if kl.kind == "k3-unbiased" and kl.ratio == "objective" and self.objective.ratio != "token":
            ratio = log.exp()
        else:
            ratio = token_log.exp()
        value, slope, magnitude = kl_term(kl.kind, d, token_log, ratio)
        if kl.kind == "k3-unbiased" and (kl.ratio != "objective" or self.objective.ratio == "token"):
            # Through the token's own ratio and through d: r (logp - ref), where neither is clamped.
            free_d = (self.batch.ref[rows] - self.logp[rows]).abs() <= limit
            free = (self.logp[rows] - self.old[rows]).abs() <= limit
            apart = torch.where(free, value, 0.0) - torch.where(free_d, ratio * torch.expm1(d), 0.0)
            value = with_slope(value, torch.where(free & free_d, -ratio * d, apart), self.logp[rows])
        coef = float(kl.coef)
        self._part("kl", rows, coef * w * value, coef * w * magnitude)
        self.token["kl"][rows] = value.detach()
        if kl.kind == "k3-unbiased" and kl.ratio == "objective" and self.objective.ratio != "token":
            # The response's ratio has a share in every token's logp: two parts that do not make one.
            slope = ratio * torch.expm1(d).abs() + magnitude.mean()
        self.c_magnitude[rows] += abs(coef) * w * slope.detach()

    def result(self) -> Exact:
        loss = self.loss
        leaves = [self.logp] if self.entropy is None else [self.logp, self.entropy]
        c, h = torch.zeros(2, len(self.logp), dtype=torch.float64)
        if loss.requires_grad:
            c, *entropys = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            h = entropys[0] if entropys else h
        total = sum(self.magnitude.values(), torch.zeros((), dtype=torch.float64))
        metrics, magnitudes = self._metrics()
        magnitudes |= {"loss": total, "policy_loss": self.magnitude["policy_loss"]}
        return Exact(loss.detach(), c, h, metrics, self.c_magnitude, magnitudes, self.borders)

    def _metrics(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mask, n = self.batch.mask, max(self.batch.tokens, 1)
        token = {name: values[mask] for name, values in self.token.items()}
        token |= {"low": (token["side"] < 0).double(), "high": (token["side"] > 0).double()}
        mean = {name: values.sum() / n for name, values in token.items()}
        absolute = {name: values.abs().sum() / n for name, values in token.items()}
        metrics = {
            "policy_loss": self.parts["policy_loss"].detach().sum(),
            "kl": mean["kl"],
            "entropy": mean["entropy"],
            "ratio_mean": mean["ratio"],
            "gate_mean": mean["gate"],
            "approx_kl": mean["approx_kl"],
            "clip_frac_low": mean["low"],
            "clip_frac_high": mean["high"],
            "clip_frac": mean["low"] + mean["high"],
            "ratio_max": token["ratio"].max() if self.batch.tokens else torch.zeros((), dtype=torch.float64),
            "ratio_clamped": token["clamped"].sum(),
            "masked_off_policy": token["off_policy"].sum(),
            **({"chosen_by_covariance": token["chosen"].sum()} if self.objective.covariance is not None else {}),
            "tokens": torch.tensor(float(self.batch.tokens), dtype=torch.float64),
        }
        if self.objective.rollout_correction is not None:
            metrics |= self._of_raw_weights(token)
        scales = {name: metrics[name].abs() for name in metrics}
        scales |= {
            "kl": absolute["kl"],
            "approx_kl": mean["ratio"] + 1,
            "rollout_log_weight_mean": absolute["log_rho_terms"],
        }
        if "rollout_abs_log_weight_max" in metrics and self.batch.tokens:
            scales["rollout_abs_log_weight_max"] = token["log_rho_terms"].max()
        return metrics, scales

    def _of_raw_weights(self, token: dict[str, Tensor]) -> dict[str, Tensor]:
        correction, rho, n = self.objective.rollout_correction, token["rho"], max(self.batch.tokens, 1)
        zero, raw = torch.zeros((), dtype=torch.float64), token["log_rho"].exp()
        return {
            "rollout_weight_mean": raw.sum() / n,
            "rollout_ess": raw.sum() ** 2 / (n * (raw**2).sum()) if self.batch.tokens else zero,
            "rollout_frac_low": (rho < correction.low).double().sum() / n,
            "rollout_frac_high": (rho > correction.high).double().sum() / n,
            "rollout_frac_rejected": token["rejected"].sum() / n,
            "rollout_log_weight_mean": token["log_rho"].sum() / n,  # calls here have none beyond 30
            "rollout_abs_log_weight_max": token["log_rho"].abs().max() if self.batch.tokens else zero,
        }


def _inside(rho: Tensor, bounds: tuple[float, float]) -> Tensor:
    """rho, or 0 outside the bounds."""
    return torch.where((rho >= bounds[0]) & (rho <= bounds[1]), rho, 0.0)
