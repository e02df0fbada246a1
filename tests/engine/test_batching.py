"""A request cannot tell whether it is alone: batching, chunking, preemption change no token."""

from __future__ import annotations

from collections import Counter
from weakref import WeakKeyDictionary

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import NEAR_TIE, greedy_gap, random_prompt, toy_model

from mamba_teach import Engine, EngineConfig, SamplingParams, reduce
from mamba_teach.events import Board
from mamba_teach.request import Status

LONGEST = 96


def engine_for(pattern: str = "M*M-", **settings_: object) -> Engine:
    defaults: dict[str, object] = dict(
        max_model_len=LONGEST, max_num_batched_tokens=64, max_num_seqs=4, device="cpu"
    )
    return Engine(toy_model(pattern), EngineConfig(**(defaults | settings_)))


_boards: WeakKeyDictionary[Engine, tuple[int, Board]] = WeakKeyDictionary()


def board_of(engine: Engine) -> Board:
    """The board that follows from the log, folded on from where it was last asked for."""
    seen, board = _boards.get(engine, (0, Board()))
    reduce(engine.events[seen:], board)
    _boards[engine] = (len(engine.events), board)
    return board


def assert_consistent(engine: Engine) -> None:
    """Tables, reference counts, free list, hash index and event log tell one story."""
    pool = engine.cache.pool
    held = {r.request_id: engine.cache.block_ids(r.request_id) for r in engine.scheduler.running}
    owners = Counter(b for tables in held.values() for table in tables for b in table if b)
    assert {b: pool.num_owners(b) for b in owners} == owners, "reference counts are off"
    free = pool.free_order()
    assert sorted([*free, *owners]) == list(range(1, pool.num_blocks)), "a block leaks or is doubled"
    keys = {b: pool.key_of(b) for b in range(pool.num_blocks) if pool.key_of(b)}
    assert all(pool.lookup(key) == b for b, key in keys.items()), "the two indexes disagree"
    board = board_of(engine)
    assert {b: len(o) for b, o in board.owners.items()} == owners
    assert list(board.free) == free
    assert set(board.published) == set(keys)
    for request_id, tables in held.items():
        assert [board.rows[request_id].tables.get(g, []) for g in range(len(tables))] == tables
    for request in engine.scheduler.waiting:
        assert not any(engine.cache.block_ids(request.request_id))


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 70), st.integers(1, 8)),
        st.tuples(st.just("step"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("reset"), st.just(0), st.just(0)),
    ),
    min_size=2,
    max_size=14,
)


@settings(max_examples=100)
@given(
    script=operations,
    budget=st.integers(4, 40),
    spare_blocks=st.integers(0, 12),
    num_seqs=st.integers(1, 4),
    pattern=st.sampled_from(["M*M-", "MMM*", "MM", "*-"]),
    mode=st.sampled_from(["none", "align", "all"]),
    block_size=st.sampled_from([12, 16, 20]),
)
def test_any_history_gives_the_tokens_of_a_lone_request(
    script: list, budget: int, spare_blocks: int, num_seqs: int, pattern: str, mode: str,
    block_size: int,
) -> None:  # fmt: skip
    # What the longest request (77 tokens) may need in the smallest blocks, and a little more.
    num_blocks = {"none": 11, "align": 14, "all": 29}[mode] + spare_blocks
    engine = engine_for(
        pattern, max_num_batched_tokens=budget, num_blocks=num_blocks, max_num_seqs=num_seqs,
        mamba_cache_mode=mode, block_size=block_size, poison=True,
    )  # fmt: skip
    prompts: dict[str, tuple[list[int], int]] = {}
    done: dict[str, list[int]] = {}
    aborted: set[str] = set()

    def step() -> None:
        before = {r.request_id: r.num_tokens for r in engine.scheduler.running}
        for output in engine.step():
            if output.finish_reason:
                done[output.request_id] = list(output.token_ids)
        assert_consistent(engine)
        assert len(before) <= num_seqs

    for operation, number, extra in script:
        if operation == "add":
            family = random_prompt(60, seed=len(prompts) % 2)  # shared prefixes, of two families
            prompt = family[: number // 2] + random_prompt(number - number // 2, len(prompts))
            params = SamplingParams(max_tokens=extra)
            prompts[engine.add_request(prompt, params)] = (prompt, extra)
        elif operation == "step":
            for _ in range(number):
                step()
        elif operation == "reset":
            engine.reset_prefix_cache()
            assert_consistent(engine)
        elif prompts:
            victim = list(prompts)[number % len(prompts)]
            if victim not in done:
                aborted.add(victim)
            engine.abort(victim)
            assert_consistent(engine)
    for _ in range(2000):
        if not engine.has_unfinished_requests():
            break
        step()
    assert not engine.has_unfinished_requests(), "requests starve"
    assert engine.cache.pool.num_free == num_blocks - 1, "blocks leak"
    assert set(done) == set(prompts) - aborted
    for request_id, tokens in done.items():
        prompt, max_tokens = prompts[request_id]
        assert len(tokens) == max_tokens
        assert greedy_gap(toy_model(pattern), prompt, tokens) <= NEAR_TIE


def test_batched_tokens_equal_those_of_the_same_request_alone() -> None:
    prompts = [random_prompt(n, seed=n) for n in (1, 2, 3, 15, 16, 17, 40, 63, 64, 65)]
    params = SamplingParams(max_tokens=20)
    alone = [engine_for(max_num_seqs=1).generate([p], params)[0].token_ids for p in prompts]
    for mode, budget, num_blocks in [
        ("none", 512, None), ("none", 13, None), ("none", 7, 14),
        ("align", 512, None), ("align", 13, 14), ("all", 512, None), ("all", 13, 20),
    ]:  # fmt: skip
        engine = engine_for(
            max_num_batched_tokens=budget, num_blocks=num_blocks, mamba_cache_mode=mode
        )
        together = [o.token_ids for o in engine.generate(prompts, params)]
        assert together == alone


def test_preemption_happens_and_costs_only_time() -> None:
    prompts = [random_prompt(30, seed=i) for i in range(4)]
    params = SamplingParams(max_tokens=40)
    roomy = engine_for().generate(prompts, params)
    tight = engine_for(num_blocks=16, enable_prefix_caching=False).generate(prompts, params)
    assert sum(o.num_preemptions for o in roomy) == 0
    assert sum(o.num_preemptions for o in tight) > 0
    assert [o.token_ids for o in tight] == [o.token_ids for o in roomy]
    assert tight[0].num_preemptions == 0, "the oldest request never makes room"


def test_a_replay_is_a_prefill_and_samples_nothing_until_it_has_caught_up() -> None:
    # Prompt 10, 4 outputs, preempted, resumed with a budget of 12: chunks 0-12 and 12-14.
    prompt = random_prompt(10, seed=3)
    engine = engine_for(
        max_num_batched_tokens=12, max_num_seqs=2, enable_prefix_caching=False
    )
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=8))
    outputs = [engine.step()[0] for _ in range(4)]
    request = engine.scheduler.running[0]
    assert len(request.output_token_ids) == 4
    engine.scheduler.preempt(request)
    start = len(engine.events)
    assert engine.step() == []  # 12 of 14 known tokens: nothing to sample from
    outputs += engine.step()
    rows = [e for e in engine.events[start:] if type(e).__name__ == "RowScheduled"]
    assert [(r.kind, r.num_computed, r.num_tokens) for r in rows] == [
        ("prefill", 0, 12),
        ("prefill", 12, 2),
    ]
    while engine.has_unfinished_requests():
        outputs += engine.step()
    lengths = [len(o.token_ids) for o in outputs]
    assert lengths == [1, 2, 3, 4, 5, 6, 7, 8], "a token was repeated or lost"
    alone = engine_for().generate([prompt], SamplingParams(max_tokens=8))[0].token_ids
    assert outputs[-1].token_ids == alone
    assert outputs[-1].request_id == request_id


def test_kinds_follow_from_meaning_not_from_length() -> None:
    engine = engine_for(max_num_batched_tokens=16, max_num_seqs=2)
    engine.add_request(random_prompt(17, seed=0), SamplingParams(max_tokens=3))
    for _ in range(4):
        engine.step()
    rows = [e for e in engine.events if type(e).__name__ == "RowScheduled"]
    assert [(r.kind, r.num_computed, r.num_tokens) for r in rows] == [
        ("prefill", 0, 16),
        ("prefill", 16, 1),  # one token, but of the prompt
        ("decode", 17, 1),
        ("decode", 18, 1),
    ]


def test_decode_rows_come_first_and_none_is_left_out() -> None:
    engine = engine_for(max_num_batched_tokens=8, max_num_seqs=4)
    for i in range(3):
        engine.add_request(random_prompt(5, seed=i), SamplingParams(max_tokens=30))
    for _ in range(4):
        engine.step()
    assert [r.is_decode for r in engine.scheduler.running] == [True] * 3
    engine.add_request(random_prompt(60, seed=9), SamplingParams(max_tokens=2))
    start = len(engine.events)
    engine.step()
    rows = [e for e in engine.events[start:] if type(e).__name__ == "RowScheduled"]
    assert [(r.kind, r.num_tokens) for r in rows] == [("decode", 1)] * 3 + [("prefill", 5)]


@pytest.mark.parametrize("fill", [float("nan"), 1e4])
def test_one_token_of_a_new_prompt_starts_from_zero_on_a_dirty_slot(fill: float) -> None:
    # Budget 17: A's prompt takes 16, so B's first chunk is a single token. Every page that nobody
    # owns is filled with rubbish before each step, the null page included.
    prompts = [random_prompt(16, seed=1), random_prompt(5, seed=2)]
    params = SamplingParams(max_tokens=6)
    engine = engine_for(max_num_batched_tokens=17, max_num_seqs=2)
    ids = [engine.add_request(p, params) for p in prompts]
    done = {}
    while engine.has_unfinished_requests():
        poison(engine, fill)
        done |= {o.request_id: o.token_ids for o in engine.step() if o.finish_reason}
    rows = [e for e in engine.events if type(e).__name__ == "RowScheduled"]
    assert (rows[1].kind, rows[1].num_tokens) == ("prefill", 1)
    alone = [engine_for().generate([p], params)[0].token_ids for p in prompts]
    assert [done[i] for i in ids] == alone


def poison(engine: Engine, fill: float) -> None:
    """Fill every page that nobody owns, the null page included."""
    owned = {
        block
        for request in engine.scheduler.running
        for table in engine.cache.block_ids(request.request_id)
        for block in table
    }
    unowned = [b for b in range(engine.cache.pool.num_blocks) if b not in owned]
    for layer_cache in filter(None, engine.runner.caches):
        for tensor in layer_cache.pools:
            tensor[unowned] = fill


def test_a_step_that_fails_half_way_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from mamba_teach.runner import model_runner

    prompts = [random_prompt(20, seed=i) for i in range(3)]
    params = SamplingParams(max_tokens=10)
    expected = [o.token_ids for o in engine_for().generate(prompts, params)]
    engine = engine_for()
    ids = [engine.add_request(p, params) for p in prompts]
    done = {}
    sample, calls = model_runner.sample, []

    def failing_sample(*arguments: object) -> list[int]:
        calls.append(arguments)
        if len(calls) in (2, 5):  # the states of the step are written by now
            raise RuntimeError("the sampler caught fire")
        return sample(*arguments)

    monkeypatch.setattr(model_runner, "sample", failing_sample)
    failures = 0
    while engine.has_unfinished_requests():
        try:
            done |= {o.request_id: o.token_ids for o in engine.step() if o.finish_reason}
        except RuntimeError as error:
            assert "caught fire" in str(error)
            failures += 1
        assert_consistent(engine)
    assert failures == 2
    assert [done[i] for i in ids] == expected


def test_finished_requests_are_forgotten() -> None:
    engine = engine_for()
    engine.generate([random_prompt(9, seed=0)] * 3, SamplingParams(max_tokens=2))
    assert engine.scheduler.running == []
    assert not engine.scheduler.waiting
    assert reduce(engine.events).rows == {}
    assert Status.FINISHED not in {r.status for r in engine.scheduler.running}
