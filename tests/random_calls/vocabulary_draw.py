"""Random logits, or hidden states and a head, and all that turns them into log-probabilities: drawn, and exact."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from comparing import Comparison, NearBorder
from drawing import VOCABULARIES, Draw, Given, draw_mask, expanded, garbage, give, lay
from exact_vocabulary import EPS, UNIT, Gradient, Head, Settings, gradient, rounded, statistics
from torch import Tensor

import fastrl


class Vocabulary:
    """One call's vocabulary work: `arguments` are its first ones, `options` its keywords, `rows` what is exact."""

    def __init__(
        self,
        draw: Draw,
        shape: tuple[int, ...],
        *,
        linear: bool,
        inplace: bool = False,
        ignored: int | None = None,
        supports: bool = True,
    ) -> None:
        self.draw, self.shape, self.linear, self.inplace, self.ignored = draw, shape, linear, inplace, ignored
        self.supports = supports and ignored is None
        self.tokens = math.prod(shape)
        self.dtype = draw.dtype()
        most = max(20_000 // max(self.tokens, 1), 8)
        self.vocab = draw.choice([v for v in VOCABULARIES if v <= most])
        self.mask, mask_argument = draw_mask(draw, shape)
        targets = draw.integers(self.vocab, self.tokens)
        self.options: dict[str, Any] = {}
        self.padding = draw.choice((1, 3, 64)) if draw.often(0.2) else 0
        if self.padding:
            self.options["vocab_size"] = self.vocab
            draw.tell(padding=self.padding)
        if mask_argument is not None and ignored is None:
            self.options["mask"] = mask_argument
        self.targets = targets
        written = torch.where(self.mask, targets, -100 if ignored is None else ignored)
        self.arguments: list[Tensor] = [lay(draw, written.view(shape))]
        settings = self._settings()
        self.given: dict[str, Given] = {}
        self.head: Head | None = None
        x, error = self._linear() if linear else (self._logits(), torch.zeros(()))
        self.settings = settings
        error = error.expand_as(x)
        self.x, self.x_error = x, error
        self.rows = statistics(x, error, targets, self.mask, settings)
        self.times = 2
        draw.tell(dtype=self.dtype, vocab=self.vocab, shape=shape, gradients=[n for n in self.given if self.needs(n)])

    def padded(self, x: Tensor, dim: int, count: int) -> Tensor:
        """With `count` entries beyond the vocabulary, of numbers that must not be read."""
        shape = list(x.shape)
        shape[dim] = count
        return torch.cat((x, x.new_full(shape, self.draw.choice((0.0, 2.0, math.nan, math.inf)))), dim) if count else x

    def needs(self, name: str) -> bool:
        return self.given[name].leaf.requires_grad

    def _settings(self) -> Settings:
        draw, n = self.draw, self.tokens
        temperature = torch.ones(n, dtype=torch.float64)
        if draw.often(0.3):
            value = draw.scale(0.3, 3.0)
            temperature, self.options["temperature"] = temperature * value, value
        elif draw.often(0.25):
            temperature = (0.3 + 2 * draw.floats(n)).float().double()
            self.options["temperature"] = lay(draw, temperature.view(self.shape).float())
        scale, softcap = 1.0, None
        if draw.often(0.2):
            scale = self.options["logit_scale"] = draw.scale(0.1, 3.0)
        if draw.often(0.2):
            softcap = self.options["softcap"] = draw.choice((2.0, 10.0, 30.0))
        support = self._support() if self.supports and draw.often(0.2) else None
        draw.tell(**{k: v for k, v in self.options.items() if k in ("temperature", "logit_scale", "softcap")})
        return Settings(temperature, scale, softcap, support)

    def _support(self) -> Tensor:
        """Recorded sets with their targets in them; some rows without one."""
        draw, n, vocab = self.draw, self.tokens, self.vocab
        share = draw.choice((0.0, 0.01, 0.2, 0.9))
        kept = draw.floats(n, vocab) < share
        kept[torch.arange(n), self.targets] = True
        recorded = draw.floats(n) >= draw.choice((0.0, 0.3, 1.0))
        lists = [row.nonzero()[:, 0].tolist() if r else [] for row, r in zip(kept, recorded, strict=True)]
        draw.tell(sampling_mask=[len(ids) for ids in lists])
        self.options["sampling_mask"] = fastrl.SamplingMask.from_lists(lists)
        return kept | ~recorded[:, None]

    def _numbers(self, *shape: int) -> Tensor:
        """Logits of the size that models give, some rows confident, a few entries -inf."""
        draw = self.draw
        x = draw.normal(*shape) * draw.choice((0.1, 1.0, 4.0, 20.0))
        if draw.often(0.1):
            x += draw.choice((-500.0, 1000.0))
        place = (torch.arange(self.tokens), self.targets)
        if draw.often(0.2):
            x[place] += draw.choice((5.0, 15.0, 40.0))
        if draw.often(0.15):
            at_target = x[place].clone()
            x[draw.floats(*shape) < draw.choice((0.1, 0.95))] = -math.inf
            x[place] = at_target
            draw.tell(infinite=True)
        return x

    def _filled(self, rows: Tensor) -> Tensor:
        """Rows in the call's shape, now and then with garbage where the mask is 0."""
        filled = rows.view(*self.shape, rows.shape[1])
        if "mask" in self.options and self.draw.often(0.3):
            filled = garbage(self.draw, filled, self.mask[:, None].expand(rows.shape))
        return filled

    def _logits(self) -> Tensor:
        draw, shape = self.draw, (*self.shape, self.vocab)
        x = self._numbers(self.tokens, self.vocab).to(self.dtype).double()
        needed = draw.often(0.85)
        repeated = len(shape) > 2 and shape[0] > 0 and not self.inplace and not torch.isinf(x).any()
        if repeated and draw.often(0.07):
            value, given = expanded(draw, self.padded(x.view(shape), -1, self.padding), self.dtype, needed)
            x = value[..., : self.vocab].reshape(self.tokens, self.vocab)
        else:
            filled = self.padded(self._filled(x), -1, self.padding)
            given = give(draw, filled, self.dtype, needed, inplace=self.inplace)
            if self.inplace and (draw.often(0.5) or given.argument.is_leaf is False):
                given = Given(given.leaf, given.argument * 1, given.make)
        self.given["logits"] = given
        self.arguments = [given.argument, *self.arguments]
        if self.inplace:
            self.options["inplace"] = True
            draw.tell(inplace=True)
        return x

    def _linear(self) -> tuple[Tensor, Tensor]:
        draw, n, vocab = self.draw, self.tokens, self.vocab
        unrounded = draw.often(0.3)
        if unrounded:
            self.options["logits_dtype"] = torch.float32
        exact = draw.often(0.2 if self.dtype == torch.float32 or unrounded else 0.85)
        if exact:  # small integers times a power of two: sums of them are numbers of every dtype
            width = draw.choice((1, 2, 8, 16))
            hidden = draw.integers(7, n, width).double() - 3
            weight = (draw.integers(5, vocab, width).double() - 2) * draw.choice((1.0, 0.25))
            bias = (draw.integers(17, vocab).double() - 8) / 4
        else:
            width = draw.choice((1, 3, 8, 17, 32, 64))
            hidden = draw.normal(n, width)
            weight = draw.normal(vocab, width) * (draw.choice((0.5, 2.0, 6.0)) / math.sqrt(width))
            bias = draw.normal(vocab)
        hidden, weight, bias = (t.to(self.dtype).double() for t in (hidden, weight, bias))
        use_bias = draw.often(0.4)
        if use_bias and draw.often(0.1):
            banned = draw.floats(vocab) < 0.5
            banned[self.targets] = False
            bias = torch.where(banned, -math.inf, bias)
            draw.tell(infinite=True)
        draw.tell(width=width, exact=exact, bias=use_bias, logits_dtype=self.options.get("logits_dtype"))
        self.head = Head(hidden, weight, bias if use_bias else None, self.dtype, exact, unrounded)
        self.given["hidden"] = give(draw, self._filled(hidden), self.dtype, draw.often(0.8))
        self.given["weight"] = give(draw, self.padded(weight, 0, self.padding), self.dtype, draw.often(0.7))
        if use_bias:
            self.given["bias"] = give(draw, self.padded(bias, 0, self.padding), self.dtype, draw.often(0.7))
            self.options["bias"] = self.given["bias"].argument
        self.arguments = [self.given["hidden"].argument, self.given["weight"].argument, *self.arguments]
        return self.head.logits()

    @property
    def differentiable(self) -> bool:
        return any(self.needs(name) for name in self.given)

    def keep_only(self, mask: Tensor) -> None:
        """Fewer tokens count than were drawn: an ignored index that is a token too."""
        self.mask = mask
        for name in ("logp", "entropy", "logp_error", "entropy_error"):
            setattr(self.rows, name, torch.where(mask, getattr(self.rows, name), 0.0))

    def compare_rows(self, compare: Comparison, logprobs: Any, entropy: Any = None) -> None:
        """Statistics of the call against the exact ones."""
        rows, shape = self.rows, self.shape
        compare.close("logprobs", logprobs, rows.logp.view(shape), rows.logp_error.view(shape))
        if entropy is not None:
            compare.close("entropy", entropy, rows.entropy.view(shape), rows.entropy_error.view(shape))

    def slopes(self, c: Tensor, h: Tensor, c_error: Tensor, h_error: Tensor) -> Gradient:
        """dL/dlogits of each token's c and h."""
        return gradient(self.rows, c, h, c_error, h_error, self.mask)

    def compare_gradients(self, compare: Comparison, given: Gradient) -> None:
        """Each leaf's gradient against the exact one; a leaf without need has none."""
        if self.head is None:
            g = rounded(given, self.dtype, self.times)
            exact = {"logits": (g.value, g.error)}
        else:
            exact = self.head.gradients(given)
        if self.dtype == torch.float16 and any((v.abs() > 3e4).any() for v, _ in exact.values()):
            raise NearBorder("beyond float16")
        for name, (value, allowed) in exact.items():
            if name not in self.given:
                continue
            leaf = self.given[name].leaf
            if not leaf.requires_grad:
                compare.equal(f"{name}.grad is None", leaf.grad is None, True)
                continue
            if name != "hidden" and self.padding:  # exactly 0 there
                last = (0, self.padding) if name in ("logits", "bias") else (0, 0, 0, self.padding)
                value, allowed = (torch.nn.functional.pad(x, last) for x in (value, allowed))
            value, allowed = self.given[name].pulled(value, allowed)
            if leaf.grad is None:
                raise AssertionError(f"{name} got no gradient")
            compare.equal(f"{name}.grad's dtype", leaf.grad.dtype == self.dtype, True)
            allowed = allowed + 2 * (UNIT[self.dtype] if self.dtype != torch.float32 else EPS) * value.abs()
            compare.close(f"{name}.grad", leaf.grad, value, allowed)


def draw_backend(draw: Draw) -> AbstractContextManager[Any]:
    name = draw.choice((None, "cpp", "torch"))
    draw.tell(backend=name)
    return nullcontext() if name is None else fastrl.use_backend(name)
