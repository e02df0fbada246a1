"""Any drafts, any mode, any company: a request says what it would have said alone, and ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from engine.test_speculation import (
    MODES,
    VOCAB,
    engine_for,
    finish,
    script,
    step,
    text_of,
)
from support.models import (
    assert_says_what_cold_says,
    assert_states_are_exact,
    random_prompt,
    toy_model,
)

from mamba_teach import Engine, EngineConfig, SamplingParams
from mamba_teach.events import DraftsVerified, RequestFinished
from mamba_teach.spec_decode.scripted_proposer import ScriptedProposer

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
    for i, kind in enumerate(kinds):
        engine, texts = mixed_engine(k, mode, kind, pattern, tight=(i + k // 2) % 2 == 0)
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        for request_id, prompt in zip(ids, prompts):
            texts[request_id] = text_of(prompt, 18, pattern)
        done: dict[str, list[int]] = {}
        aborted = None
        while engine.has_unfinished_requests():
            before = {r.request_id: r for r in engine.scheduler.running}
            done |= step(engine)
            victim = engine.scheduler.running[1:2]
            if victim and victim[0].draft_token_ids:  # in the middle of a draft
                if not aborted and engine.num_steps > 5:
                    aborted = victim[0].request_id
                    engine.abort(aborted)
                elif engine.num_steps == 9:
                    engine.scheduler.preempt(victim[0])
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
    if mode != "none":
        assert seen["PrefixHit"] and seen["StateCopied"] and seen["BlockEvicted"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["right", "wrong", "uneven"])
@pytest.mark.parametrize("graphs", ["off", "record"])
def test_a_request_may_fill_the_model_length(graphs: str, kind: str, mode: str) -> None:
    # 32 tokens in blocks of 16 with 2 drafts: the last block is column 1, scratch columns are 2 and 3.
    prompts = [random_prompt(n, seed=n) for n in (20, 27, 31, 14)]
    texts = {f"r{i}": text_of(prompt, 20) for i, prompt in enumerate(prompts)}
    proposer = ScriptedProposer(script(kind, texts))
    engine = engine_for(2, proposer, mode, max_model_len=32, graphs=graphs)
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
    assert (output.num_drafted_tokens, output.num_accepted_drafts) == (7, 4)  # 2 2 2 1
    plain = engine_for(0, None).generate([prompt], SamplingParams(max_tokens=9))[0]
    assert (plain.num_drafted_tokens, plain.num_accepted_drafts) == (0, 0)


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens=-1"):
        EngineConfig(num_speculative_tokens=-1)
    with pytest.raises(ValueError, match=r"speculative_method='eagle'.*'mtp', 'ngram'"):
        EngineConfig(num_speculative_tokens=2, speculative_method="eagle")
    message = "max_num_batched_tokens=11 is less than 12.*max_num_seqs=4.*num_speculative_tokens=2"
    with pytest.raises(ValueError, match=message):
        EngineConfig(num_speculative_tokens=2, max_num_seqs=4, max_num_batched_tokens=11)
    EngineConfig(num_speculative_tokens=2, max_num_seqs=4, max_num_batched_tokens=12)
    with pytest.raises(ValueError, match=r"speculative_method='mtp'.*mtp_pattern"):
        engine_for(2, None, speculative_method="mtp")
    with pytest.raises(ValueError, match="num_speculative_tokens=0"):
        engine_for(0, ScriptedProposer(script("right", {})))
