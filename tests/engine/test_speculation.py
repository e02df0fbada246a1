"""Drafts change how many steps a text takes, and nothing else: not a token, not a state.

Here are faults that serving engines have had, each as its smallest input, and what tests of speculation
share; ``test_speculative_requests.py`` mixes everything. The yardsticks: the tokens of a request served
alone, without caching and without drafts, and states computed from scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from random import Random
from typing import Any

import pytest
import torch
from cache.test_prefix_hits import bits_of, blocks_of, evict
from engine.test_batching import assert_consistent
from model.stepper import Stepper
from support.models import (
    assert_says_what_cold_says,
    assert_states_are_exact,
    cold_tokens,
    random_prompt,
    served_states,
    toy_model,
)

from mamba_teach import Engine, EngineConfig, SamplingParams
from mamba_teach.events import (
    BlockEvicted,
    DraftsVerified,
    PrefixHit,
    RowScheduled,
    StepDispatched,
)
from mamba_teach.runner import model_runner
from mamba_teach.spec_decode.proposer import Proposer
from mamba_teach.spec_decode.scripted_proposer import Script, ScriptedProposer

MODES = ["none", "align", "all"]
NAN, LARGE = float("nan"), 1e4  # NaN can hide behind a comparison; a large number cannot
VOCAB = 64


def engine_for(
    k: int,
    proposer: Proposer | None,
    mode: str = "all",
    pattern: str = "M*M-",
    model_changes: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Engine:
    defaults: dict[str, Any] = dict(
        max_model_len=128, max_num_batched_tokens=64, max_num_seqs=4, device="cpu", block_size=16,
        mamba_cache_mode=mode, num_speculative_tokens=k, poison=True,
    )  # fmt: skip
    model = toy_model(pattern, **(model_changes or {}))
    return Engine(model, EngineConfig(**(defaults | settings)), proposer=proposer)


def script(kind: str, texts: Mapping[str, list[int]]) -> Script:
    """Drafts of a kind, told from what each request is going to say (``texts``, prompt included)."""

    def guess(request_id: str, tokens: list[int], max_drafts: int) -> list[int]:
        right = texts[request_id][len(tokens) :][:max_drafts]
        random = Random(f"{request_id} {len(tokens)}")
        good = {"right": len(right), "wrong": 0}.get(kind, random.randint(0, len(right)))
        if kind == "uneven":  # of any number, the last one sometimes wrong
            return right[:good] if random.random() < 0.5 else [*right[:good][:-1], VOCAB - 1]
        return right[:good] + [(token + 1) % VOCAB for token in right[good:]]

    return guess


def text_of(prompt: list[int], max_tokens: int, pattern: str = "M*M-") -> list[int]:
    return [*prompt, *cold_tokens(toy_model(pattern), tuple(prompt), max_tokens)]


def step(engine: Engine, fill: float = NAN) -> dict[str, list[int]]:
    """Run a step with ``fill`` in every page that means nothing; published pages must survive it.

    Returns the tokens of requests that ended.
    """
    pool = engine.cache.pool
    keys = {b: pool.key_of(b) for b in range(pool.num_blocks)}
    rubbish = [b for b, key in keys.items() if key is None and pool.num_owners(b) == 0]
    for cache in filter(None, engine.runner.caches):
        for tensor in cache.pools:
            tensor[rubbish] = fill
    published = [b for b, key in keys.items() if key is not None]
    before, start = bits_of(engine, published), len(engine.events)
    outputs = engine.step()
    taken = {getattr(e, "block_id", 0) for e in engine.events[start:]}  # evicted, and used again
    for old, new in zip(before, bits_of(engine, published)):
        for i, block in enumerate(published):
            assert block in taken or torch.equal(old[i], new[i]), f"block {block} was overwritten"
    assert_consistent(engine)
    return {o.request_id: list(o.token_ids) for o in outputs if o.finish_reason}


def finish(engine: Engine, fill: float = NAN) -> dict[str, list[int]]:
    done: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        done |= step(engine, fill)
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks - 1, "blocks leak"
    return done


def check_running_states(engine: Engine) -> None:
    for request in engine.scheduler.running:
        tokens = request.tokens(0, request.num_computed_tokens)
        assert_states_are_exact(engine, request.request_id, tokens)


def rows_since(engine: Engine, start: int) -> dict[str, tuple[str, int, int]]:
    rows = [e for e in engine.events[start:] if isinstance(e, RowScheduled)]
    return {e.request_id: (e.kind, e.num_computed, e.num_tokens) for e in rows}


@pytest.mark.parametrize("fill", [NAN, LARGE])
@pytest.mark.parametrize("drafts", list(permutations([2, 0, 1])), ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_plain_and_draft_carrying_rows_in_one_batch(
    mode: str, drafts: tuple[int, ...], fill: float
) -> None:
    prompts = [random_prompt(n, seed=n) for n in (14, 15, 12, 5)]
    texts = {f"r{i}": text_of(prompt, 16) for i, prompt in enumerate(prompts)}

    def guess(request_id: str, tokens: list[int], max_drafts: int) -> list[int]:
        right = texts[request_id][len(tokens) :][:2]
        wanted = [right[0], (right[-1] + 1) % VOCAB]  # of two, the second is wrong
        return wanted[: drafts[int(request_id[1:])] if request_id != "r3" else 2]

    engine = engine_for(2, ScriptedProposer(guess), mode, poison=fill != fill)
    params = SamplingParams(max_tokens=16)
    for prompt in prompts[:3]:
        engine.add_request(prompt, params)
    step(engine, fill)
    engine.add_request(prompts[3], params)
    start = len(engine.events)
    done = step(engine, fill)
    rows = rows_since(engine, start)
    assert {r: row[2] for r, row in rows.items()} == {
        **{f"r{i}": 1 + drafts[i] for i in range(3)},
        "r3": 5,
    }
    assert [row[0] for row in rows.values()] == ["decode"] * 3 + ["prefill"]
    check_running_states(engine)
    while engine.has_unfinished_requests():
        done |= step(engine, fill)
    for i, prompt in enumerate(prompts):
        assert_says_what_cold_says(engine.model, prompt, done[f"r{i}"])


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize(
    "pattern", ["M*M-", "M*"]
)  # in "M*" the head's keys are a group of their own
def test_groups_agree_about_the_length_of_a_hit(pattern: str, mode: str) -> None:
    prompt = random_prompt(40, seed=40)
    longer = prompt + random_prompt(10, seed=41)
    probe = engine_for(2, None, mode, pattern, {"mtp_pattern": "*-"})
    attention = [g for g, group in enumerate(probe.cache.groups) if group.spec.kind == "attention"]
    assert len(attention) == {"M*M-": 1, "M*": 2}[pattern]
    for gone, expected in [(None, 32), (1, 16), (0, 0)]:
        for place in range(len(attention)):
            engine = engine_for(2, None, mode, pattern, {"mtp_pattern": "*-"})
            for text, cached in [(prompt, 0), (prompt, 32), (longer, expected)]:
                if text is longer and gone is not None:
                    block = blocks_of(engine, prompt, "attention")[place][gone]
                    evict(engine, block)
                    engine.events.append(BlockEvicted(block))
                    if mode == "align":  # a state was kept at 32 only
                        cached = 0
                request_id = engine.add_request(text, SamplingParams(max_tokens=12))
                start = len(engine.events)
                tokens = finish(engine)[request_id]
                assert_says_what_cold_says(engine.model, text, tokens)
                hits = [e for e in engine.events[start:] if isinstance(e, PrefixHit)]
                assert [e.num_tokens for e in hits] == ([cached] if cached else [])
                for e in hits:
                    assert {len(table) for table in e.tables} == {cached // 16}


@pytest.mark.parametrize("fill", [NAN, LARGE])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [13, 16, 30])
def test_a_drafter_that_is_always_wrong(length: int, mode: str, fill: float) -> None:
    prompt = random_prompt(length, seed=length)
    text = text_of(prompt, 21)
    proposer = ScriptedProposer(script("wrong", {"r0": text + [0, 0]}))
    engine = engine_for(2, proposer, mode, poison=fill != fill)
    engine.add_request(prompt, SamplingParams(max_tokens=24))
    while len(engine.scheduler.running[0].output_token_ids if engine.num_steps else ()) < 21:
        step(engine, fill)
        check_running_states(engine)  # as if only the row's first token had been there
    verified = [e for e in engine.events if isinstance(e, DraftsVerified)]
    assert verified == [DraftsVerified("r0", 2, 0)] * 20
    assert engine.scheduler.running[0].output_token_ids == text[length:]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["sample", "verify", "propose"])
def test_a_discarded_step_runs_again(
    place: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompt(n, seed=n) for n in (13, 20, 31)]
    texts = {f"r{i}": text_of(prompt, 20) for i, prompt in enumerate(prompts)}
    engine = engine_for(2, ScriptedProposer(script("random", texts)), mode)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=20))
    owner: Any = engine.runner.proposer if place == "propose" else model_runner
    works, calls = getattr(owner, place), 0

    def fails_sometimes(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (2, 3, 7):  # states and windows of the step are written by now
            raise RuntimeError("fire")
        return works(*arguments)

    monkeypatch.setattr(owner, place, fails_sometimes)
    done: dict[str, list[int]] = {}
    failures = 0
    while engine.has_unfinished_requests():
        try:
            done |= step(engine)
        except RuntimeError as error:
            assert str(error) == "fire"
            failures += 1
            assert_consistent(engine)
        else:
            check_running_states(engine)
    assert failures == 3
    for i, prompt in enumerate(prompts):
        assert_says_what_cold_says(engine.model, prompt, done[f"r{i}"])


@pytest.mark.parametrize("mode", MODES)
def test_many_tokens_over_a_filled_cache(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(7, seed=7)
    text = text_of(prompt, 7)[:13]
    single, split = Stepper(toy_model()), Stepper(toy_model())
    expected = single.run(text, [1] * 13, decode_ones=True)
    torch.testing.assert_close(split.run(text, [7, 5, 1]), expected, rtol=1e-4, atol=1e-4)

    recorded: list[torch.Tensor] = []
    sample = model_runner.sample

    def recording(logits: torch.Tensor, *rest: Any) -> Any:
        recorded.append(logits.clone())
        return sample(logits, *rest)

    monkeypatch.setattr(model_runner, "sample", recording)
    firsts = []
    for shift in (0, 1, 9):  # right drafts, and two sets of wrong ones
        recorded.clear()

        def guess(_: str, tokens: list[int], __: int, shift: int = shift) -> list[int]:
            right = text[len(tokens) : len(tokens) + 4] if len(tokens) == 8 else []
            return [(token + shift) % VOCAB for token in right]

        engine = engine_for(4, ScriptedProposer(guess), mode)
        request_id = engine.add_request(prompt, SamplingParams(max_tokens=20))
        for _ in range(3):
            step(engine)
        assert [len(logits) for logits in recorded] == [1, 5, 1]
        firsts.append(recorded[1][0])
        if shift == 0:
            torch.testing.assert_close(torch.cat(recorded), expected[6:], rtol=1e-4, atol=1e-4)
            for layer, states in served_states(engine, request_id, 13).items():
                cache = single.caches[layer]
                for ours, theirs in zip(states, (cache.conv[1], cache.ssm[1])):
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    for first in firsts[1:]:  # causality: the other four cannot be seen from here
        torch.testing.assert_close(first, firsts[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("fill", [NAN, LARGE])
@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("tail", [1, 5])
@pytest.mark.parametrize("graphs", ["off", "record"])  # a graph pads its rows to 1 + k tokens
def test_a_prompt_tail_beside_drafts_keeps_its_own_tokens_only(
    graphs: str, tail: int, mode: str, fill: float
) -> None:
    prompts = [random_prompt(20, seed=1), random_prompt(16 + tail, seed=2)]
    texts = {"r1": text_of(prompts[0], 30), "r2": text_of(prompts[1], 12)}
    states = []
    for shift in (0, 1, 33):

        def guess(rid: str, tokens: list[int], most: int, shift: int = shift) -> list[int]:
            return [(token + shift) % VOCAB for token in texts[rid][len(tokens) :][:most]]

        engine = engine_for(2, ScriptedProposer(guess), mode, graphs=graphs, poison=fill != fill)
        engine.generate([prompts[1]], SamplingParams(max_tokens=1))
        engine.add_request(prompts[0], SamplingParams(max_tokens=30))
        for _ in range(3):
            step(engine, fill)
        engine.add_request(prompts[1], SamplingParams(max_tokens=12))
        start = len(engine.events)
        done = step(engine, fill)
        rows = rows_since(engine, start)
        assert rows["r1"][2] == 3 and rows["r2"] == ("prefill", 16, tail)
        check_running_states(engine)
        found = served_states(engine, "r2", 16 + tail)
        states.append([t.clone() for pair in found.values() for t in pair])
        done |= finish(engine, fill)
        replayed = [e for e in engine.events if isinstance(e, StepDispatched) and e.path == "graph"]
        assert bool(replayed) == (graphs == "record")
        for prompt, tokens in zip(prompts, (done["r1"], done["r2"])):
            assert_says_what_cold_says(engine.model, prompt, tokens)
    for varied in states[1:]:
        torch.testing.assert_close(varied, states[0], rtol=0, atol=1e-6)
