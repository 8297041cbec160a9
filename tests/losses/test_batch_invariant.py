"""The same bits whatever the batch: rows of a pool in random company, order, padding, masks, budgets and threads."""

import random
from contextlib import contextmanager

import pytest
import torch

import fastrl
from fastrl.backend.choice import use_backend
from fastrl.passes import blocks
from fastrl.planning.budget import BudgetTooSmall

#: (H, V): of one slice of the vocabulary and of several, and large enough for the library to choose another kernel for
#: another number of rows.
SHAPES = [(64, 5000), (96, 777), (512, 4500)]
#: A block on a CPU, and a part of a second.
POOL = 600
#: Tokens of a response of a pair.
LONGEST = 10
OBJECTIVE = fastrl.GRPO(kl_coef=0.1, aggregate="token-mean")


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Pool:
    """Tokens with all that belongs to them, of which a call takes some."""

    def __init__(self, draw, dtype, shapes=SHAPES, size=POOL):
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        hidden, vocab = draw.choice(shapes)
        self.draw, self.vocab, self.size = draw, vocab, size

        def randn(*shape):
            return torch.randn(*shape, generator=generator)

        self.weight = (randn(vocab, hidden) * 0.3).to(dtype).requires_grad_(draw.random() < 0.5)
        self.bias = randn(vocab).to(dtype) if draw.random() < 0.3 else None
        self.teacher, self.teacher_weight = randn(size, 48).to(dtype), (randn(vocab, 48) * 0.3).to(dtype)
        self.targets = torch.randint(vocab, (size, 3), generator=generator)
        self.upstream, self.temperature = randn(size), 0.5 + torch.rand(size, generator=generator)
        self.old, self.ref, self.advantages = randn(size) * 0.1 - 8, randn(size) * 0.1 - 8, randn(size)
        self.hidden = randn(size, hidden).to(dtype)
        # Wide supports and narrow ones; some tokens have none.
        widths = [draw.choice([0, 1, 7, draw.randint(2, vocab // 10), vocab // 2]) for _ in range(size)]
        self.supports = [
            torch.unique(torch.cat([self.targets[i, :1], torch.randperm(vocab, generator=generator)[:width]]))
            if width
            else torch.empty(0, dtype=torch.int64)
            for i, width in enumerate(widths)
        ]
        self.options = {"softcap": draw.choice([None, None, 20.0]), "logits_dtype": draw.choice([None, torch.float32])}

    def results(self, kind, rows, batch_invariant=True):
        """{index of a token: its results, and the gradient of its hidden state} for these rows, -1 for padding."""
        draw, places = self.draw, torch.tensor(rows)
        valid, index = places >= 0, places.clamp_min(0)
        hidden = self.hidden[index].clone()
        hidden[~valid] = torch.nan if draw.random() < 0.5 else 0.0
        hidden.requires_grad_()
        needed = [hidden, *([self.weight] if self.weight.requires_grad else [])]
        mask = None if bool(valid.all()) and draw.random() < 0.5 else valid
        options = {"bias": self.bias, "mask": mask, "batch_invariant": batch_invariant, **self.options}
        options |= {"temperature": self.temperature[index]}

        def run(budget):
            """The results (N, ...), and the loss whose gradient is compared: by default their sum, weighted by row."""
            loss, *out = getattr(self, kind)(hidden, index, valid, options | {"memory_budget": budget})
            if loss is None:
                loss = sum((x.double().movedim(0, -1) * self.upstream[index]).sum() for x in out)
            return loss, out

        budget = None
        if draw.random() < 0.4:
            with pytest.raises(BudgetTooSmall) as refused:
                run(1)
            budget = refused.value.least + draw.choice([0, 1 << 20, 1 << 23])
        loss, out = run(budget)
        gradient, *_ = torch.autograd.grad(loss, needed)
        per_token = [*(x.detach() for x in out), gradient]
        return {int(i): [x[place] for x in per_token] for place, i in enumerate(rows) if i >= 0}

    def logprobs(self, hidden, index, valid, options):
        stats = fastrl.linear_token_logprobs(hidden, self.weight, self.targets[index, 0], entropy=True, **options)
        return None, stats.logprobs, stats.entropy

    def cross_entropy(self, hidden, index, valid, options):
        targets = self.targets[index, 0].where(valid, -100)
        options = {name: value for name, value in options.items() if name != "mask"}
        return None, fastrl.linear_cross_entropy(hidden, self.weight, targets, reduction="none", **options)

    def supported(self, hidden, index, valid, options):
        supports = [self.supports[i] if there else self.supports[i][:0] for i, there in zip(index, valid, strict=True)]
        mask = fastrl.SamplingMask.from_lists([x.tolist() for x in supports])
        return self.logprobs(hidden, index, valid, options | {"sampling_mask": mask})

    def gathered(self, hidden, index, valid, options):
        return None, fastrl.linear_gathered_logprobs(hidden, self.weight, self.targets[index], **options)

    def policy(self, hidden, index, valid, options):
        per_token = {"old_logprobs": self.old[index], "ref_logprobs": self.ref[index], "mask": valid}
        per_token |= {"advantages": self.advantages[index], "targets": self.targets[index, 0]}
        per_token |= {"temperature": self.temperature[index]}
        options = {name: value for name, value in options.items() if name not in per_token}
        if packed := self.draw.random() < 0.5:
            options |= {"cu_seqlens": self.cut(len(index))}
        else:
            hidden, per_token = hidden[None], {name: x[None] for name, x in per_token.items()}
        loss = fastrl.linear_policy_loss(
            hidden, self.weight, objective=OBJECTIVE, denominator=7.0, **options, **per_token
        )
        return loss.loss, *(x if packed else x[0] for x in (loss.logprobs, loss.entropy))

    def cut(self, total):
        """Where responses start that are packed without a gap."""
        starts = self.draw.sample(range(1, total), self.draw.randint(0, min(3, total - 1)))
        return torch.tensor([0, *sorted(starts), total], dtype=torch.int32)

    def divergence(self, hidden, index, valid, options):
        teacher = self.teacher[index], self.teacher_weight
        weights = self.upstream[index].abs()
        found = fastrl.linear_divergence(
            hidden, self.weight, *teacher, kind="jsd", beta=0.3, token_weights=weights, denominator=3.0, **options
        )
        return found.loss, found.per_token


class Responses(Pool):
    """Pairs of responses of LONGEST tokens, of which a call takes some."""

    def results(self, kind, pairs, batch_invariant=True):
        """{index of a pair: its log-probabilities, and the gradient of its hidden states} for these pairs."""
        # The chosen responses first, then the rejected ones; each of those ends a little earlier.
        tokens = torch.arange(POOL).view(-1, 2, LONGEST)[pairs].transpose(0, 1).flatten(0, 1)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[len(pairs) :, LONGEST - 3 :] = False
        hidden = self.hidden[tokens].clone().requires_grad_()
        given = {"hidden": hidden, "targets": self.targets[tokens, 0], "mask": mask, "denominator": 5.0}
        given |= {"ref_logprobs": self.old[tokens].sum(1), "batch_invariant": batch_invariant, **self.options}
        if kind == "kto":
            desirable = torch.arange(len(tokens)) < len(pairs)
            loss = fastrl.linear_kto_loss(weight=self.weight, bias=self.bias, desirable=desirable, kl=0.1, **given)
            logprobs = loss.logprobs
        else:
            loss = fastrl.linear_preference_loss(
                weight=self.weight, bias=self.bias, objective=fastrl.IPO(beta=0.1), **given
            )
            logprobs = torch.cat([loss.chosen_logprobs, loss.rejected_logprobs])
        gradient, *_ = torch.autograd.grad(loss.loss, [hidden, *([self.weight] if self.weight.requires_grad else [])])
        both = [x.detach().unflatten(0, (2, -1)) for x in (logprobs, gradient)]
        return {pair: [x[:, place] for x in both] for place, pair in enumerate(pairs)}


KINDS = ["logprobs", "cross_entropy", "supported", "gathered", "policy", "divergence"]


def company(draw, size):
    """Some tokens of a pool in random order, with padding between them."""
    count = draw.choice([1, 2, 7, draw.randint(3, size)])
    rows = draw.sample(range(size), count) + [-1] * draw.choice([0, 0, draw.randint(1, size // 2)])
    draw.shuffle(rows)
    return rows


def differences(seed, dtype, backend, kind, calls, batch_invariant=True, **sizes):
    """How many tokens of so many calls differ, in any bit of any result, from the same token in another call."""
    draw, found = random.Random(seed), 0
    pool = Pool(draw, dtype, **sizes)
    with use_backend(backend), threads(draw.choice([1, 2])):
        known = pool.results(kind, draw.sample(range(pool.size), pool.size), batch_invariant)
    for _ in range(calls - 1):
        with use_backend(backend), threads(draw.choice([1, 2])):
            results = pool.results(kind, company(draw, pool.size), batch_invariant)
        for token, values in results.items():
            found += not all(map(torch.equal, values, known[token]))
    return found


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_in_any_company(kind, dtype, backend):
    seed = random.randrange(10**6)
    assert differences(seed, dtype, backend, kind, calls=6) == 0, f"seed {seed}"


def test_long_rows_in_torch_do_not_depend_on_their_number():
    """torch adds up a row of more than 32768 entries in parts if it is alone."""
    draw = random.Random(seed := random.randrange(10**6))
    with use_backend("torch"), threads(2):
        pool = Pool(draw, torch.float32, [(8, 40_000)], 7)
        known = pool.results("divergence", range(7))
        for row in range(7):
            results = pool.results("divergence", [row])[row]
            assert all(map(torch.equal, results, known[row])), f"seed {seed}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["preference", "kto"])
def test_pairs_have_the_same_bits_in_any_company(kind, dtype):
    draw = random.Random(seed := random.randrange(10**6))
    pool, pairs = Responses(draw, dtype), range(POOL // LONGEST // 2)
    with use_backend("cpp"):
        known = pool.results(kind, [*pairs])
        for _ in range(5):
            results = pool.results(kind, draw.sample(pairs, draw.choice([1, 2, draw.randint(1, len(pairs))])))
            for pair, values in results.items():
                assert all(map(torch.equal, values, known[pair])), f"seed {seed}"


@pytest.mark.parametrize("calls", [3, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_in_tritons_interpreter(kind, calls):
    """Of few entries, because it takes milliseconds a row."""
    seed = random.randrange(10**6)
    assert differences(seed, torch.float32, "triton", kind, calls, shapes=[(8, 40)], size=20) == 0, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("share", range(10))
def test_five_thousand_calls(share):
    cases = [(k, d, b) for k in KINDS for d in (torch.float32, torch.bfloat16) for b in ("cpp", "torch")]
    for number in range(50):
        kind, dtype, backend = cases[(50 * share + number) % len(cases)]
        seed = random.randrange(10**6)
        assert differences(seed, dtype, backend, kind, calls=10) == 0, f"seed {seed}, {kind}, {dtype}, {backend}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_it_the_same_rows_differ(dtype):
    """So that the test above can fail."""
    assert sum(differences(seed, dtype, "cpp", "logprobs", 8, batch_invariant=False) for seed in range(6)) > 0


@pytest.mark.parametrize(
    ("backend", "sizes"), [("cpp", (300, 512, 4500)), ("torch", (300, 512, 4500)), ("triton", (12, 8, 20_000))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("objective", [fastrl.GRPO(kl_coef=0.0), fastrl.GSPO()], ids=["GRPO", "GSPO"])
def test_an_on_policy_ratio_is_one(objective, dtype, backend, sizes):
    """Old log-probabilities of all tokens without gradients, new ones of a few with a loss and some gradients."""
    generator, (total, width, vocab) = torch.Generator().manual_seed(1), sizes
    hidden, weight = (torch.randn(n, width, generator=generator).to(dtype) for n in (total, vocab))
    targets, few = torch.randint(vocab, (total,), generator=generator), slice(4, 9)
    with use_backend(backend):
        old = fastrl.linear_token_logprobs(hidden, weight, targets, entropy=True, batch_invariant=True)
        for needs in ((True, False), (False, True), (True, True)):
            states, head = (
                x.clone().requires_grad_(need) for x, need in zip((hidden[few], weight), needs, strict=True)
            )
            of_tokens = {"advantages": torch.ones(1), "old_logprobs": old.logprobs[few][None]}
            options = {"objective": objective, "batch_invariant": True, **of_tokens}
            found = fastrl.linear_policy_loss(states[None], head, targets[few][None], **options)
            assert torch.equal(found.logprobs[0], old.logprobs[few]) and torch.equal(found.entropy[0], old.entropy[few])
            assert found.metrics["ratio_mean"] == 1.0


def test_where_products_depend_on_their_rows_it_raises(monkeypatch):
    """A library that adds something of one row to the next."""
    monkeypatch.setattr(blocks, "_checked", set())
    honest = torch.mm

    def mm(a, b, *, out, **options):
        honest(a, b, out=out, **options)
        return out.add_(a.roll(1, 0)[:, :1])

    monkeypatch.setattr(torch, "mm", mm)
    arguments = torch.ones(3, 8), torch.ones(16, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"batch_invariant=True cannot be kept .* 512 rows over 8 x 16 in float32"):
        fastrl.linear_token_logprobs(*arguments, batch_invariant=True)
    fastrl.linear_token_logprobs(*arguments)


def test_what_is_refused():
    hidden, weight, targets = torch.ones(3, 8), torch.ones(1600, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(TypeError, match="batch_invariant must be a bool, got int"):
        fastrl.linear_token_logprobs(hidden, weight, targets, batch_invariant=1)
    with pytest.raises(BudgetTooSmall, match=r"3 tokens x 8 x 1600 .* batch-invariant in blocks of 512 rows: got 1000"):
        fastrl.linear_token_logprobs(hidden, weight, targets, batch_invariant=True, memory_budget=1000)
    half = hidden.half().requires_grad_()
    with pytest.raises(NotImplementedError, match="not built yet for gradients in float16"):
        fastrl.linear_token_logprobs(half, weight.half(), targets, batch_invariant=True)
