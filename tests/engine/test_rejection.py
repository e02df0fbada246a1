"""Verification keeps what the model would have said: exactly, and in distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from engine.test_speculation import MODES, engine_for, script
from support.models import random_prompt

from mamba_teach import SamplingParams
from mamba_teach.runner.sampler import sample_one, uniform_draw
from mamba_teach.spec_decode.rejection import verify
from mamba_teach.spec_decode.scripted_proposer import ScriptedProposer

Verify = Callable[[Sequence[int], Sequence[int]], list[int]]


def test_small_cases() -> None:
    assert verify([], [7]) == [7]
    assert verify([5], [5, 6]) == [5, 6]
    assert verify([5], [4, 6]) == [4]
    assert verify([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert verify([1, 2, 3], [1, 9, 3, 4]) == [
        1,
        9,
    ]  # a draft behind a wrong one counts for nothing
    assert verify((1, 2), (1, 0, 2)) == [1, 0]


def test_every_case_over_two_tokens() -> None:
    for d in range(4):
        for drafts, chosen in product(product((0, 1), repeat=d), product((0, 1), repeat=d + 1)):
            right = max(m for m in range(d + 1) if drafts[:m] == chosen[:m])
            assert verify(drafts, chosen) == list(chosen[: right + 1])


def test_greedy_verification_is_greedy_decoding() -> None:
    # A "model" over two tokens is a table: what it says behind each text of up to 4 tokens.
    texts = [text for n in range(4) for text in product((0, 1), repeat=n)]
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        says = dict(zip(texts, torch.randint(2, (len(texts),), generator=generator).tolist()))
        alone: list[int] = []
        for _ in range(4):
            alone.append(says[tuple(alone)])
        for drafts in product((0, 1), repeat=3):
            kept = verify(drafts, [says[drafts[:i]] for i in range(4)])
            assert kept == alone[: len(kept)]


# In distribution ------------------------------------------------------------------------------

VOCAB, SEEDS = 5, 20_000
TABLE = 1.5 * torch.randn(1 + VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
# Logits of the first token, and of the second behind each first one.
FIRST, SECOND = TABLE[0], TABLE[1:]


def bad_drafter(seed: int) -> list[int]:
    """A guess that is as good as none, and does not look at the target's random numbers."""
    return [seed * seed % VOCAB]


def two_tokens(seed: int, params: SamplingParams, verify: Verify) -> tuple[int, int]:
    """The first two tokens of a request that checks one draft in its first step."""
    drafts = bad_drafter(seed)
    draws = [uniform_draw(seed, i) for i in range(2)]
    chosen = [
        sample_one(FIRST, params, draws[0]),
        sample_one(SECOND[drafts[0]], params, draws[1]),
    ]
    kept = verify(drafts, chosen)
    if len(kept) == 1:  # the next step
        kept = [*kept, sample_one(SECOND[kept[0]], params, draws[1])]
    return kept[0], kept[1]


def probabilities(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """Of a temperature and a top-p, from their definition."""
    p = torch.softmax(logits.double() / params.temperature, -1).tolist()
    kept, total = set(), 0.0
    for token in sorted(range(VOCAB), key=lambda t: -p[t]):
        if total < params.top_p:
            kept.add(token)
            total += p[token]
    return [p[token] / total if token in kept else 0.0 for token in range(VOCAB)]


def chi_square(params: SamplingParams, verify: Verify) -> tuple[float, int]:
    """Pearson's statistic of the pairs against their exact probabilities, and its freedom."""
    counts = Counter(two_tokens(seed, params, verify) for seed in range(SEEDS))
    first = probabilities(FIRST, params)
    expected = {
        (a, b): SEEDS * first[a] * p
        for a in range(VOCAB)
        for b, p in enumerate(probabilities(SECOND[a], params))
    }
    possible = [pair for pair, mean in expected.items() if mean > 0]
    impossible = sum(count for pair, count in counts.items() if pair not in possible)
    if impossible:
        return math.inf, len(possible) - 1
    statistic = sum((counts[p] - expected[p]) ** 2 / expected[p] for p in possible)
    return statistic, len(possible) - 1


def one_in_a_million(freedom: int) -> float:
    """A value that chi-square exceeds with a probability below 1e-6 (Wilson and Hilferty's cube)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4.9 * math.sqrt(spread)) ** 3


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_p=0.8),
]


@pytest.mark.parametrize("params", PARAMS, ids=["plain", "cool", "top-p"])
def test_drafts_do_not_bend_the_distribution(params: SamplingParams) -> None:
    statistic, freedom = chi_square(params, verify)
    assert statistic < one_in_a_million(freedom)


def test_a_wrong_rule_would_be_noticed() -> None:
    """Two rules that one may come up with bend it by far more than chance does."""
    coin = torch.Generator().manual_seed(1)

    def keeps_some(drafts: Sequence[int], chosen: Sequence[int]) -> list[int]:
        if float(torch.rand((), generator=coin)) < 0.2:  # a fixed rate, whatever the model says
            return [*drafts, chosen[-1]]
        return verify(drafts, chosen)

    def keeps_the_rest(drafts: Sequence[int], chosen: Sequence[int]) -> list[int]:
        return list(chosen)  # the second token was chosen behind the draft, not behind the first

    for wrong in (keeps_some, keeps_the_rest):
        statistic, freedom = chi_square(PARAMS[0], wrong)
        assert statistic > 2 * one_in_a_million(freedom)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["right", "wrong", "random", "ngram", "mtp"])
def test_sampled_texts_are_the_same_with_and_without_drafts(kind: str, mode: str) -> None:
    prompts = [random_prompt(n, seed=n) for n in (14, 31, 3, 40)]
    changes = {"mtp_pattern": "*-"} if kind == "mtp" else {}
    for seed in (0, 7, 1234):
        params = [SamplingParams(24, 0.8, 0.9, seed=seed + i) for i in range(len(prompts))]
        plain = engine_for(0, None, "none").generate(prompts, params)
        texts = {f"r{i}": [*prompts[i], *o.token_ids] for i, o in enumerate(plain)}
        proposer = ScriptedProposer(script(kind, texts)) if kind not in ("ngram", "mtp") else None
        method = None if proposer else kind
        engine = engine_for(3, proposer, mode, model_changes=changes, speculative_method=method)
        served = engine.generate(prompts, params)
        assert [o.token_ids for o in served] == [o.token_ids for o in plain]
        if kind in ("right", "random"):
            assert sum(o.num_accepted_drafts for o in served) > 0
    assert len({o.token_ids for o in plain}) == len(prompts)
