"""Drafts change how many steps a text takes, and nothing else: not a token, not a state.

The first half replays faults that serving engines have had, each as its smallest input; the second
half mixes everything. The yardsticks: the tokens of a request served alone, without caching and
without drafts, and states computed from scratch.
"""

from __future__ import annotations

from collections import Counter
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
from mamba_teach.events import DraftsVerified, PrefixHit, RequestFinished, RowScheduled
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
        for tensor in vars(cache).values():
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


# Faults that others have had ------------------------------------------------------------------


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
@pytest.mark.parametrize("pattern", ["M*M-", "M*"])  # in "M*" the head's keys are a group of their own
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
                    evict(engine, blocks_of(engine, prompt, "attention")[place][gone])
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
    for _ in range(21):
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
def test_a_prompt_tail_beside_drafts_keeps_its_own_tokens_only(
    tail: int, mode: str, fill: float
) -> None:
    prompts = [random_prompt(20, seed=1), random_prompt(16 + tail, seed=2)]
    texts = {"r1": text_of(prompts[0], 30), "r2": text_of(prompts[1], 12)}
    states = []
    for shift in (0, 1, 2, 33):

        def guess(rid: str, tokens: list[int], most: int, shift: int = shift) -> list[int]:
            return [(token + shift) % VOCAB for token in texts[rid][len(tokens) :][:most]]

        engine = engine_for(2, ScriptedProposer(guess), mode, poison=fill != fill)
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
        for prompt, tokens in zip(prompts, (done["r1"], done["r2"])):
            assert_says_what_cold_says(engine.model, prompt, tokens)
    for varied in states[1:]:
        torch.testing.assert_close(varied, states[0], rtol=0, atol=1e-6)


# Everything at once ---------------------------------------------------------------------------

PROPOSERS = ["right", "wrong", "random", "uneven", "ngram", "mtp"]
LENGTHS = (40, 3, 37, 17, 33, 90)


def mixed_engine(k: int, mode: str, kind: str, pattern: str, tight: bool) -> tuple[Engine, dict]:
    """An engine whose settings follow from the case, and the texts its script knows."""
    size = 4 if pattern == "MM" else 16  # a step of 1 + k tokens may pass several boundaries of 4
    settings: dict[str, Any] = {"block_size": size, "max_num_batched_tokens": 100}
    texts: dict[str, list[int]] = {}
    proposer = ScriptedProposer(script(kind, texts)) if kind not in ("ngram", "mtp") else None
    if proposer is None:
        settings["speculative_method"] = kind
    arguments = (k, proposer, mode, pattern, {"mtp_pattern": "*-"} if kind == "mtp" else {})
    if tight:  # prompts come in chunks, and running requests throw each other out
        settings["max_num_batched_tokens"] = max(19, 4 * (1 + k))
        most = engine_for(*arguments, **settings).cache.max_blocks_for(110)
        settings["num_blocks"] = 1 + most + 2
    return engine_for(*arguments, **settings), texts


@pytest.mark.parametrize("pattern", ["M*M-", "MM"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_any_drafts_give_the_tokens_and_states_of_a_lone_request(
    k: int, mode: str, pattern: str
) -> None:
    family = random_prompt(90, seed=0)
    prompts = [family[: n // 2] + random_prompt(n - n // 2, seed=n) for n in LENGTHS]
    params = SamplingParams(max_tokens=18)
    seen: Counter[str] = Counter()
    kinds = PROPOSERS if pattern == "M*M-" else PROPOSERS[:-1]
    for i, kind in enumerate(2 * kinds):
        tight = i >= len(kinds)
        engine, texts = mixed_engine(k, mode, kind, pattern, tight)
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        for request_id, prompt in zip(ids, prompts):
            texts[request_id] = text_of(prompt, 18, pattern)
        done: dict[str, list[int]] = {}
        aborted = None
        while engine.has_unfinished_requests():
            before = {r.request_id: r for r in engine.scheduler.running}
            done |= step(engine)
            victim = engine.scheduler.running[1:2]
            if not aborted and victim and victim[0].draft_token_ids and engine.num_steps > 5:
                aborted = victim[0].request_id
                engine.abort(aborted)  # in the middle of a draft
            for request_id in done.keys() & before.keys():
                text = before[request_id].tokens(0, before[request_id].num_computed_tokens)
                assert_states_are_exact(engine, request_id, text)
        assert engine.cache.pool.num_free == engine.cache.pool.num_blocks - 1, "blocks leak"
        assert done.keys() == set(ids) - {aborted}
        for request_id, prompt in zip(ids, prompts):
            if request_id != aborted:
                assert_says_what_cold_says(engine.model, prompt, done[request_id])
        seen += Counter(type(e).__name__ for e in engine.events)
        seen["accepted"] += sum(getattr(e, "num_accepted", 0) for e in engine.events)
        seen["aborted"] += aborted is not None
    assert seen["accepted"] and seen["aborted"] and seen["RequestPreempted"]
    assert mode == "none" or seen["PrefixHit"] and seen["StateCopied"] and seen["BlockEvicted"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["right", "wrong", "uneven"])
def test_a_request_may_fill_the_model_length(kind: str, mode: str) -> None:
    # 32 tokens in blocks of 16 with 2 drafts: the last block is column 1, scratch columns are 2 and 3.
    prompts = [random_prompt(n, seed=n) for n in (20, 27, 31, 14)]
    texts = {f"r{i}": text_of(prompt, 20) for i, prompt in enumerate(prompts)}
    proposer = ScriptedProposer(script(kind, texts))
    engine = engine_for(2, proposer, mode, max_model_len=32)
    width = 4 if mode != "none" else 3
    groups = zip(engine.cache.groups, engine.runner.tables.tables)
    assert {t.shape[1] for g, t in groups if g.spec.kind == "mamba"} == {width}
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=64))
    done = finish(engine)
    for request_id, text in texts.items():
        tokens = done[request_id]
        length = len(prompts[int(request_id[1:])])
        assert len(tokens) == 32 - length
        assert_says_what_cold_says(engine.model, text[:length], tokens)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [3, 5])
def test_max_tokens_is_met_exactly(k: int, mode: str) -> None:
    prompt = random_prompt(14, seed=14)
    text = text_of(prompt, 20)
    for max_tokens in range(1, 12):
        engine = engine_for(k, ScriptedProposer(script("right", {"r0": text})), mode)
        output = engine.generate([prompt], SamplingParams(max_tokens=max_tokens))[0]
        assert output.finish_reason == "length"
        assert list(output.token_ids) == text[14 : 14 + max_tokens]
        # The first token comes with the prompt; then every step brings its drafts and one more, and
        # the last token is never a draft.
        assert output.num_drafted_tokens == output.num_accepted_drafts
        steps = -(-(max_tokens - 1) // (1 + k))
        assert output.num_accepted_drafts == max_tokens - 1 - steps
        assert engine.num_steps == 1 + steps


@pytest.mark.parametrize("mode", MODES)
def test_the_end_token_ends_a_request_among_accepted_drafts(mode: str) -> None:
    prompt = random_prompt(14, seed=14)
    text = text_of(prompt, 20)
    for place in range(1, 9):  # steps of 1, 4, 4, ... tokens: in front, in the middle, at the end
        end = text[14 + place]
        first = text.index(end, 14) - 14
        changes = {"eos_token_ids": (end,)}
        proposer = ScriptedProposer(script("right", {"r0": text, "r1": text}))
        engine = engine_for(3, proposer, mode, model_changes=changes)
        engine.add_request(prompt, SamplingParams(max_tokens=20))
        tokens = finish(engine)["r0"]  # which also counts the free blocks
        assert tokens == text[14 : 14 + first + 1]
        assert engine.events[-1] == RequestFinished("r0", "stop")
        verified = [e for e in engine.events if isinstance(e, DraftsVerified)]
        assert 1 + sum(1 + e.num_accepted for e in verified) == len(tokens)
        # What was published on the way is good for others.
        turn = prompt + tokens + random_prompt(9, seed=1)
        again = engine.generate([turn], SamplingParams(max_tokens=8, ignore_eos=True))[0]
        assert again.num_cached_tokens == (0 if mode == "none" else 16 * ((14 + first) // 16))
        assert_says_what_cold_says(toy_model(), turn, list(again.token_ids))


def test_counts_of_drafts() -> None:
    prompt = random_prompt(14, seed=14)
    text = text_of(prompt, 20)

    def one_of_two(_: str, tokens: list[int], most: int) -> list[int]:
        right = text[len(tokens) :][:2]
        return [right[0], (right[-1] + 1) % VOCAB][:most]

    engine = engine_for(2, ScriptedProposer(one_of_two))
    output = engine.generate([prompt], SamplingParams(max_tokens=9))[0]
    assert list(output.token_ids) == text[14:23]
    assert (output.num_drafted_tokens, output.num_accepted_drafts) == (8, 4)  # 1 + 4 steps of 2
    plain = engine_for(0, None).generate([prompt], SamplingParams(max_tokens=9))[0]
    assert (plain.num_drafted_tokens, plain.num_accepted_drafts) == (0, 0)


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens=-1"):
        EngineConfig(num_speculative_tokens=-1)
    with pytest.raises(ValueError, match="speculative_method='eagle'.*'mtp', 'ngram'"):
        EngineConfig(num_speculative_tokens=2, speculative_method="eagle")
    message = "max_num_batched_tokens=11 is less than 12.*max_num_seqs=4.*num_speculative_tokens=2"
    with pytest.raises(ValueError, match=message):
        EngineConfig(num_speculative_tokens=2, max_num_seqs=4, max_num_batched_tokens=11)
    EngineConfig(num_speculative_tokens=2, max_num_seqs=4, max_num_batched_tokens=12)
    with pytest.raises(ValueError, match="speculative_method='mtp'.*mtp_pattern"):
        engine_for(2, None, speculative_method="mtp")
    with pytest.raises(ValueError, match="num_speculative_tokens=0"):
        engine_for(0, ScriptedProposer(script("right", {})))
