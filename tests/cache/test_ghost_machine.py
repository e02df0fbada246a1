"""Everything that can happen to a cache, to a model that notices everything.

A Hypothesis state machine drives an engine over the ghost model: arrivals with shared, nested and
unrelated prefixes, steps under small budgets, aborts, forced preemption, cache resets, pools so small
that blocks are evicted all the time, and drafts: none or up to 5, from three kinds of proposers, right
and wrong, in blocks that hold fewer tokens than a step checks; a state per token or replayed inputs,
in rings that are full after a step or after many; eager steps or recorded graphs. The ghost checks every
read of a state, a window, a key or a pending input; the machine checks the books after every step, how
many blocks are held, and every published block against the prefix it stands for.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest
import torch
from engine.test_batching import assert_consistent
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.ghost_checks import PublishedStates, assert_few_blocks, drafts_with, watch_blocks

from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams, reduce
from mamba_teach.cache import specs
from mamba_teach.events import (
    BlockPublished,
    Event,
    PrefixHit,
    RowScheduled,
    StateAccess,
    StepDispatched,
)
from mamba_teach.ghost import GhostError
from mamba_teach.spec_decode.scripted_proposer import ScriptedProposer

LONGEST = 96
EXAMPLES = 5000 if settings.get_current_profile_name() == "long" else 440
happened: Counter[str] = Counter()  # steps, and events by kind, of all machines


class GhostMachine(RuleBasedStateMachine):
    """One engine, any history."""

    @initialize(
        mode=st.sampled_from(["none", "align", "all"]),
        block_size=st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
        layers=st.sampled_from(["MM*M", "M*", "MMM", "**", "MM*MM*M-"]),
        budget=st.integers(4, 60),
        seqs=st.integers(1, 4),
        spare=st.sampled_from([0, 0, 1, 2, 3, 5, 10, 20]),
        k=st.sampled_from([0, 1, 2, 3, 5]),
        drafter=st.sampled_from([0.0, 0.3, 0.7, 1.0, "script", "ngram"]),
        spec_state=st.sampled_from(["slots", "replay"]),
        capacity=st.sampled_from([1, 4, 7, 16]),
        graphs=st.sampled_from(["off", "record"]),
    )
    def start(
        self, mode: str, block_size: int, layers: str, budget: int, seqs: int, spare: int, k: int,
        drafter: float | str, spec_state: str, capacity: int, graphs: str,
    ) -> None:  # fmt: skip
        if "*" in layers:  # a page of 2 keys cannot hold the ghost's state and a wide window
            block_size = max(block_size, 3)
        # n-grams are found, and are right now and then, where there are few different tokens.
        self.vocab = 3 if drafter == "ngram" else 97
        accuracy = drafter if isinstance(drafter, float) else 0.0
        self.model = GhostModel(layers, vocab_size=self.vocab, draft_accuracy=accuracy)
        config = dict(
            mamba_cache_mode=mode, block_size=block_size, max_num_seqs=seqs, max_model_len=LONGEST,
            max_num_batched_tokens=max(budget, seqs * (1 + k)), num_speculative_tokens=k,
            speculative_method="ngram" if drafter == "ngram" else None, poison=True, device="cpu",
            spec_state=spec_state,
        )  # fmt: skip
        proposer = ScriptedProposer(self.uneven_drafts) if k and drafter == "script" else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(specs, "RING_CAPACITY", capacity)  # of a step at least
            probe = Engine(self.model, EngineConfig(**config))  # type: ignore[arg-type]
            most = probe.cache.max_blocks_for(LONGEST)
            if graphs == "record":  # of as many requests as can decode at once
                decoding = sum(g.spec.min_blocks_for_decode() for g in probe.cache.groups)
                config |= {"graphs": graphs}
                config |= {"graph_capture_sizes": (min(seqs, (most + spare) // decoding),)}
            config |= {"num_blocks": 1 + most + spare}
            self.engine = Engine(self.model, EngineConfig(**config), proposer=proposer)  # type: ignore[arg-type]
        watch_blocks(self.engine)
        self.prompts: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}
        self.published = PublishedStates(self.engine)

    def uneven_drafts(self, request_id: str, tokens: list[int], max_drafts: int) -> list[int]:
        """None to ``max_drafts``, none to all of them right; the same ones for the same text."""
        coming = self.expected[request_id][len(tokens) - len(self.prompts[request_id]) :]
        choice = random.Random(f"{request_id}, {len(tokens)}")
        count = choice.randint(0, max_drafts)
        return drafts_with(coming, count, choice.randint(0, count), self.vocab)

    @rule(
        family=st.integers(0, 2), own=st.sampled_from([0, 0, 1, 2, 5, 12, 20]),
        shared=st.integers(1, 60) | st.integers(1, 7).map(lambda i: 8 * i),  # often a whole block
        output=st.integers(1, 16), salt=st.sampled_from([None, None, None, "s"]),
    )  # fmt: skip
    def arrive(self, family: int, shared: int, own: int, output: int, salt: str | None) -> None:
        common = random.Random(family).choices(range(self.vocab), k=60)[:shared]
        prompt = common + random.Random(len(self.expected)).choices(range(self.vocab), k=own)
        request_id = self.engine.add_request(
            prompt, SamplingParams(max_tokens=output), cache_salt=salt
        )
        self.prompts[request_id] = prompt
        self.expected[request_id] = said = self.model.continuation(prompt, output)
        self.published.learn(prompt + said, salt)

    @rule(count=st.integers(1, 25))
    def step(self, count: int) -> None:
        for _ in range(count):
            had_work, start = self.engine.has_unfinished_requests(), len(self.engine.events)
            outputs = self.engine.step()
            kinds = Counter(type(event).__name__ for event in self.engine.events[start:])
            assert ("RowScheduled" in kinds) == had_work, "a step with work to do did none"
            happened["steps"] += had_work
            happened.update(kinds)
            self.count_graphs_and_checkpoints(self.engine.events[start:])
            for output in outputs:
                expected = self.expected[output.request_id][: len(output.token_ids)]
                assert list(output.token_ids) == expected
            assert_consistent(self.engine)
            assert_few_blocks(self.engine)
            self.published.check()

    def count_graphs_and_checkpoints(self, of_step: list[Event]) -> None:
        decodes = {
            e.request_id for e in of_step if isinstance(e, RowScheduled) and e.kind == "decode"
        }
        for event in of_step:
            happened["graph"] += isinstance(event, StepDispatched) and event.path == "graph"
            if self.engine.config.spec_state == "replay" and isinstance(event, StateAccess):
                happened["checkpoint"] += event.request_id in decodes and bool(event.writes)

    @rule(which=st.integers(0, 3))
    def abort(self, which: int) -> None:
        live = [*self.engine.scheduler.running, *self.engine.scheduler.waiting]
        if live:
            self.engine.abort(live[which % len(live)].request_id)

    @rule(which=st.integers(0, 3))
    def preempt(self, which: int) -> None:
        if running := self.engine.scheduler.running:
            self.engine.scheduler.preempt(running[which % len(running)])

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "engine"):
            assert_consistent(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_unfinished_requests():
                break
            self.step(1)
        assert not self.engine.has_unfinished_requests(), "requests starve"
        assert self.engine.cache.pool.num_free == self.engine.cache.pool.num_blocks - 1


GhostMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
)
TestGhostMachine = GhostMachine.TestCase


def test_the_machine_ran_long_enough() -> None:
    # Runs after the machine, in the same process.
    if not happened:
        pytest.skip("the state machine did not run in this process")
    assert happened["steps"] >= 10_000
    for kind in ("PrefixHit", "BlockEvicted", "RequestPreempted", "DraftsVerified", "StateCopied",
                 "graph", "checkpoint"):  # fmt: skip
        assert happened[kind] >= 100, happened


# The ghost itself ---------------------------------------------------------------------------


def ghost_engine(mode: str = "all", layers: str = "MM*M", **settings_: object) -> Engine:
    defaults: dict[str, object] = dict(
        block_size=4, max_model_len=LONGEST, max_num_seqs=4, mamba_cache_mode=mode, device="cpu"
    )
    return Engine(GhostModel(layers), EngineConfig(**(defaults | settings_)))


def test_a_swapped_slot_is_named() -> None:
    engine = ghost_engine("none")
    ids = [engine.add_request([i] * 12, SamplingParams(max_tokens=8)) for i in (1, 2)]
    engine.step()
    a, b = (engine.cache.block_ids(r)[0][0] for r in ids)
    states = engine.runner.caches[engine.cache.groups[0].layers[0]].ssm
    states[[a, b]] = states[[b, a]]
    message = rf"slot {a} .* the state after 12 tokens of r1; r0 needs its own after 12"
    with pytest.raises(GhostError, match=message):
        engine.step()


@pytest.mark.parametrize(("mode", "smallest"), [("align", 21), ("all", 57)])
def test_a_long_prompt_is_let_in_once(mode: str, smallest: int) -> None:
    """Chunks of 20 tokens pass 5 blocks at once; the pool is short while the first request runs."""
    lengths = []
    for num_blocks in range(smallest, smallest + 20):
        engine = ghost_engine(
            mode, num_blocks=num_blocks, max_num_batched_tokens=20, max_num_seqs=2
        )
        engine.add_request(list(range(29)), SamplingParams(max_tokens=3))  # it does not grow
        long = engine.add_request(list(range(40, 92)), SamplingParams(max_tokens=4))
        request = engine._requests[long]
        try:
            while engine.has_unfinished_requests():
                engine.step()
        finally:
            lengths.append(request.num_prefills)
        assert engine.model.continuation(list(range(40, 92)), 4) == request.output_token_ids
    assert max(lengths) == 1, lengths


def test_an_older_prefill_may_take_the_place_of_a_newer_decode() -> None:
    """The newer request's decode row is already planned when the older one, which resumes in chunks,
    finds the pool dry: the row has to leave the step."""
    withdrawn = 0
    params = SamplingParams(max_tokens=40)
    for num_blocks, steps in product(range(31, 40), range(20, 28)):
        engine = ghost_engine("all", "M*", num_blocks=num_blocks, max_num_batched_tokens=20)
        prompts = [list(range(20)), list(range(40, 60))]
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        for _ in range(steps):
            engine.step()
        if [r.request_id for r in engine.scheduler.running] != ids:
            continue  # the pool was too small for both from the start
        engine.reset_prefix_cache()  # so that the older one has to compute all of it again
        engine.scheduler.preempt(engine.scheduler.running[0])
        outputs = {}
        while engine.has_unfinished_requests():
            both = engine.scheduler.running[:] if len(engine.scheduler.running) == 2 else []
            outputs |= {o.request_id: o for o in engine.step() if o.finish_reason}
            withdrawn += bool(both) and both[1] in engine.scheduler.waiting
        for prompt, request_id in zip(prompts, ids):
            said = engine.model.continuation(prompt, params.max_tokens)
            assert list(outputs[request_id].token_ids) == said
    assert withdrawn, "the case did not occur"


def test_a_request_that_resumes_as_a_decode_stands_before_prefills() -> None:
    """All but its last sampled token is a hit, so it decodes at once, beside a prompt half-way."""
    engine = ghost_engine("all", max_num_batched_tokens=20, max_num_seqs=3)
    prompts = [list(range(6)), list(range(40, 70))]
    ids = [engine.add_request(prompts[0], SamplingParams(max_tokens=9))]
    engine.step()
    engine.step()
    ids.append(engine.add_request(prompts[1], SamplingParams(max_tokens=9)))
    engine.step()
    first = engine.scheduler.running[0]
    assert (first.num_tokens, first.num_computed_tokens) == (9, 8)  # two whole blocks of 4
    engine.scheduler.preempt(first)
    start, outputs = len(engine.events), {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in engine.step() if o.finish_reason}
    rows = [e for e in engine.events[start:] if isinstance(e, RowScheduled)][:2]
    assert [(r.request_id, r.kind, r.num_tokens) for r in rows] == [
        (ids[0], "decode", 1),
        (ids[1], "prefill", 11),
    ]
    for request_id, prompt in zip(ids, prompts):
        assert list(outputs[request_id].token_ids) == engine.model.continuation(prompt, 9)


def test_a_stale_state_is_named() -> None:
    engine = ghost_engine("none")
    request = engine.add_request([5] * 12, SamplingParams(max_tokens=8))
    engine.step()
    slot = engine.cache.block_ids(request)[0][0]
    state = engine.runner.caches[engine.cache.groups[0].layers[0]].ssm
    old = state[slot].clone()
    engine.step()
    state[slot] = old
    with pytest.raises(GhostError, match="after 12 tokens of r0; r0 needs its own after 13"):
        engine.step()


def test_an_empty_slot_is_named() -> None:
    engine = ghost_engine("none")
    request = engine.add_request([5] * 12, SamplingParams(max_tokens=8))
    engine.step()
    slot = engine.cache.block_ids(request)[0][0]
    engine.runner.caches[engine.cache.groups[0].layers[0]].ssm[slot] = torch.nan
    with pytest.raises(GhostError, match=rf"slot {slot} .* holds no state"):
        engine.step()


def test_a_lost_key_and_a_wrong_window_are_named() -> None:
    engine = ghost_engine("none")
    request = engine.add_request(list(range(12)), SamplingParams(max_tokens=8))
    engine.step()
    groups = {g.spec.kind: i for i, g in enumerate(engine.cache.groups)}
    page = engine.cache.block_ids(request)[groups["attention"]][1]
    layer = engine.cache.groups[groups["attention"]].layers[0]
    engine.runner.caches[layer].key[page, 2] = 0.0
    with pytest.raises(GhostError, match=rf"page {page} .* r0 has at position 6"):
        engine.step()


def test_the_closed_form_needs_no_engine() -> None:
    model = GhostModel("M")
    said = model.continuation([1, 2, 3], 4)
    assert model.continuation([1, 2, 3, *said[:2]], 2) == said[2:]
    assert model.continuation([1, 2, 4], 4) != said


def test_one_ghost_may_serve_two_engines() -> None:
    model = GhostModel("M*")
    for prompt in ([1, 2, 3], [4, 5]):
        engine = Engine(model, EngineConfig(block_size=4, max_model_len=LONGEST, device="cpu"))
        output = engine.generate([prompt], SamplingParams(max_tokens=5))[0]
        assert list(output.token_ids) == model.continuation(prompt, 5)


def test_hits_are_found_by_the_ghost_too() -> None:
    engine = ghost_engine("all")
    prompt = list(range(30))
    engine.generate([prompt], SamplingParams(max_tokens=3))
    output = engine.generate([prompt[:20] + [90] * 5], SamplingParams(max_tokens=3))[0]
    assert output.num_cached_tokens == 20
    assert any(isinstance(e, PrefixHit) for e in engine.events)
    assert any(isinstance(e, BlockPublished) for e in engine.events)
    assert reduce(engine.events).rows == {}
