"""Sampling keeps the distribution, and depends on seed and place alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.models import random_prompt, toy_model

from mamba_teach import Engine, EngineConfig, SamplingParams
from mamba_teach.runner.sampler import sample_one, uniform_draw


def engine_for(**settings: object) -> Engine:
    defaults: dict[str, object] = dict(max_model_len=96, max_num_seqs=4, device="cpu")
    return Engine(toy_model(), EngineConfig(**(defaults | settings)))


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 0.5, -1.0, 1.0])
    temperature, draws = 0.7, 20_000
    expected = torch.softmax(logits.double() / temperature, -1)
    params = SamplingParams(temperature=temperature)
    counts = Counter(
        sample_one(logits, params, (i + 0.5) / draws) for i in range(draws)
    )  # an even comb of numbers: the only error is that of its spacing
    for token, p in enumerate(expected.tolist()):
        assert counts[token] / draws == pytest.approx(p, abs=2 / draws)


@pytest.mark.parametrize(
    ("top_p", "allowed"), [(0.1, {0}), (0.6, {0}), (0.61, {0, 1}), (0.9, {0, 1}), (1.0, {0, 1, 2})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, allowed: set[int]) -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    params = SamplingParams(temperature=1.0, top_p=top_p)
    drawn = {sample_one(logits, params, (i + 0.5) / 500) for i in range(500)}
    assert drawn == allowed


def test_kept_probabilities_are_rescaled() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    params = SamplingParams(temperature=1.0, top_p=0.8)
    drawn = Counter(sample_one(logits, params, (i + 0.5) / 3000) for i in range(3000))
    assert drawn[0] / 3000 == pytest.approx(2 / 3, abs=1e-3)


def test_the_extremes_of_a_draw_are_tokens() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for draw in (0.0, 1.0 - 2**-53):
        assert 0 <= sample_one(logits, SamplingParams(temperature=1.0), draw) < 50


def test_draws_are_spread_evenly() -> None:
    draws = torch.tensor([uniform_draw(seed, i) for seed in range(20) for i in range(50)])
    assert float(draws.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(draws.std()) == pytest.approx(12**-0.5, abs=0.02)
    assert len(set(draws.tolist())) == 1000


def test_samples_do_not_depend_on_company_or_preemption() -> None:
    prompts = [random_prompt(30, seed=i) for i in range(4)]
    params = [SamplingParams(max_tokens=40, temperature=1.0, top_p=0.95, seed=i) for i in range(4)]
    alone = [engine_for().generate([p], q)[0].token_ids for p, q in zip(prompts, params)]
    tight = engine_for(num_blocks=16, max_num_batched_tokens=24).generate(prompts, params)
    assert sum(o.num_preemptions for o in tight) > 0
    assert [o.token_ids for o in tight] == alone
    again = engine_for().generate([prompts[0]], SamplingParams(40, 1.0, 0.95, seed=9))[0]
    assert again.token_ids != alone[0], "another seed, another text"


def test_a_tiny_temperature_is_greedy() -> None:
    prompt = random_prompt(20, seed=7)
    greedy = engine_for().generate([prompt], SamplingParams(max_tokens=15))[0]
    cold = engine_for().generate([prompt], SamplingParams(max_tokens=15, temperature=1e-3))[0]
    assert cold.token_ids == greedy.token_ids
