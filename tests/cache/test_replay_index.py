"""The replay index alone: cursors, new checkpoints and boundaries, told from counts of tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ghost_checks import ScriptedEngine, of_kind

from mamba_kernels import must_flush
from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams
from mamba_teach.cache import specs
from mamba_teach.cache.specs import MambaSpec, cdiv, make_layer_specs
from mamba_teach.events import PrefixHit, StateAccess
from mamba_teach.ghost import GhostError
from mamba_teach.runner.replay_index import ReplayCursor, ReplayIndex


def index_of(s: ScriptedEngine) -> ReplayIndex:
    assert s.index.replay is not None
    return s.index.replay


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(specs, "RING_CAPACITY", 6)
    return 6


def scripted(k: int = 2, mode: str = "none", layers: str = "MM", **config: Any) -> ScriptedEngine:
    return ScriptedEngine(layers, k, mamba_cache_mode=mode, spec_state="replay", **config)


def test_a_step_that_may_not_fit_writes_a_checkpoint() -> None:
    """Not one that does not fit: how much will be kept is not known when it begins."""
    for capacity in range(4, 20):
        for step in range(1, 5):
            flushes = [must_flush(p, step, capacity) for p in range(capacity + 1)]
            assert flushes == [p + step > capacity for p in range(capacity + 1)]
            assert not flushes[0] and flushes[capacity]


def test_the_cursor_of_a_request_step_by_step(small_ring: int) -> None:
    """A ring of 6 + 3 entries, drafts of which two, one and none are right."""
    s = scripted(block_size=16)
    rid = s.add(range(10), [(2, 2), (2, 1), (2, 1), (0, 0), (2, 2), (2, 2)])
    cursors = index_of(s).cursors
    expected = [
        ReplayCursor(0, 0, 0),  # the prompt leaves a state
        ReplayCursor(0, 0, 3),
        ReplayCursor(0, 0, 5),  # 3 + 3 fit into 6
        ReplayCursor(0, 5, 2),  # 5 + 3 do not: the state after these 5 is the checkpoint now
        ReplayCursor(0, 5, 3),
        ReplayCursor(0, 5, 6),
        ReplayCursor(0, (5 + 6) % 9, 3),  # full, and once around
    ]
    for cursor in expected:
        s.step()
        assert cursors[rid] == cursor
    s.to_the_end()
    s.add(range(20, 30))
    s.step()
    assert set(cursors) == {"r1"}


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_boundary_is_the_next_checkpoint(mode: str, small_ring: int) -> None:
    """Blocks of 4: from 9 tokens on, 3 are kept; the state after 12 is written into column 2."""
    s = scripted(mode=mode, block_size=4)
    rid = s.add(range(9), [(2, 2), (2, 2), (2, 0)])
    cursors = index_of(s).cursors
    while rid not in cursors or not s.engine.scheduler.running[0].is_decode:
        s.step()  # in "align" the prompt comes in two chunks, of 8 tokens and 1
        assert cursors[rid].pending == 0
    expected = [
        ReplayCursor(2, 3, 0),  # 12 tokens: nothing is pending behind a boundary
        ReplayCursor(2, 3, 3),  # 15: the checkpoint stays where it is
        ReplayCursor(3, 7, 0),  # 15 + 1 kept: pending were 3, so a step of 3 still fitted
    ]
    assert cursors[rid] == ReplayCursor(2, 0, 0)
    for cursor in expected:
        s.step()
        assert cursors[rid] == cursor


def test_several_boundaries_in_one_step(small_ring: int) -> None:
    s = scripted(k=5, mode="align", block_size=2)
    rid = s.add(range(5), [(5, 5)])
    s.step()
    s.step()  # the prompt, of 4 tokens and 1
    s.step()  # from 5 to 11 tokens, by way of 6, 8 and 10
    assert index_of(s).cursors[rid] == ReplayCursor(10 // 2 - 1, 5, 1)


@pytest.mark.parametrize("how", ["length", "abort", "preempt"])
def test_the_cursor_is_dropped_with_the_blocks(how: str) -> None:
    s = scripted(block_size=4, mode="all")
    other = s.add(range(5))
    rid = s.add(range(20, 30), [(2, 1), (2, 0)], max_tokens=4 if how == "length" else 20)
    for _ in range(3):
        s.step()
    assert set(index_of(s).cursors) == {other, rid}
    if how == "abort":
        s.engine.abort(rid)
    elif how == "preempt":
        s.engine.scheduler.preempt(s.engine.scheduler.running[1])
        only_one = replace(s.engine.config, max_num_seqs=1)
        s.engine.scheduler.config = only_one  # so that it is not let in again at once
    s.step()
    assert set(index_of(s).cursors) == {other}


def test_a_request_that_resumes_begins_at_its_hit_with_nothing_pending() -> None:
    """Thrown out and let in between two steps, behind a hit of 12 tokens; 3 were pending before."""
    s = scripted(block_size=4, mode="all")
    rid = s.add(range(10), [(2, 2), (2, 1)])
    for _ in range(3):
        s.step()
    request = s.engine.scheduler.running[0]
    assert (request.num_computed_tokens, request.num_tokens) == (15, 16)
    assert index_of(s).cursors[rid].pending == 3
    s.engine.scheduler.preempt(request)
    events = s.step()
    (hit,) = of_kind(events, PrefixHit)
    (access,) = of_kind(events, StateAccess)
    assert hit.num_tokens == 12 and access.read == hit.tables[0][2]
    assert index_of(s).cursors[rid] == ReplayCursor(3, 0, 0)
    s.to_the_end()


def test_a_cursor_left_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above are for: forgotten to forget, it sends the next step to a wrong state."""
    s = scripted(block_size=4, mode="all", max_num_seqs=1)
    rid = s.add(range(10), [(2, 2), (2, 1)])
    for _ in range(3):
        s.step()
    left_over = index_of(s).cursors[rid]
    s.engine.scheduler.preempt(s.engine.scheduler.running[0])
    s.add(range(50, 60), max_tokens=1)
    cleanup = ReplayIndex.cleanup
    monkeypatch.setattr(
        ReplayIndex, "cleanup", lambda self, ids: cleanup(self, [i for i in ids if i != rid])
    )
    s.engine.reset_prefix_cache()
    s.step()  # a prefill, which leaves a cursor of its own
    index_of(s).cursors[rid] = left_over
    with pytest.raises(GhostError):
        s.step()


steps = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda d: (d[0], min(d))), max_size=12
)


@settings(max_examples=150)
@given(
    of_requests=st.lists(steps, min_size=1, max_size=4), mode=st.sampled_from(["none", "align", "all"]),
    block_size=st.sampled_from([1, 2, 4, 8]), k=st.integers(0, 5), capacity=st.integers(1, 16),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_cursors_follow_from_counts_of_tokens(
    of_requests: list[list[tuple[int, int]]], mode: str, block_size: int, k: int, capacity: int,
    seed: int,
) -> None:  # fmt: skip
    """After every step, of every request: where its checkpoint is, and how many tokens are in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specs, "RING_CAPACITY", capacity)
        if k == 0:
            s = ScriptedEngineWithoutDrafts(mode, block_size)
        else:
            s = scripted(k, mode, "MM", block_size=block_size)
    capacity, T = max(capacity, 1 + k), 1 + k
    random, index = Random(seed), index_of(s)
    assert (index.capacity, index.max_query_len, index.length) == (capacity, T, capacity + T)
    lengths = [random.randint(1, 12) for _ in of_requests]
    for i, script in enumerate(of_requests):
        s.add(range(20 * i, 20 * i + lengths[i]), script)
    held: dict[str, int] = {}  # request -> tokens in its checkpoint
    before: dict[str, int] = {}
    while s.engine.has_unfinished_requests():
        decoding = {r.request_id: r.is_decode for r in s.engine.scheduler.running}
        s.step()
        for request in s.engine.scheduler.running:
            rid, n = request.request_id, request.num_computed_tokens
            if not decoding.get(rid):
                held[rid] = n
            else:
                old = before[rid]
                if old - held[rid] + T > capacity:
                    held[rid] = old
                if mode != "none" and n // block_size > old // block_size:
                    held[rid] = n // block_size * block_size
            before[rid] = n
            cursor = index.cursors[rid]
            assert cursor.pending == n - held[rid] <= capacity
            (table, *_) = s.engine.cache.block_ids(rid)
            slot = table[cursor.column]
            state = s.engine.runner.caches[0].ssm[slot, 0, 0].view(torch.int32)  # type: ignore[union-attr]
            assert int(state[0]) == held[rid] and slot > 0


class ScriptedEngineWithoutDrafts(ScriptedEngine):
    """A :class:`ScriptedEngine` that nobody drafts for."""

    def __init__(self, mode: str, block_size: int) -> None:
        super().__init__("MM", 1, mamba_cache_mode=mode, block_size=block_size, spec_state="replay")
        config = replace(self.engine.config, num_speculative_tokens=0)
        self.engine = type(self.engine)(self.model, config)
        self.index = self.engine.runner.state_index


@pytest.mark.parametrize("spec_state", ["slots", "replay"])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_pool_of_one_request_lets_it_in_behind_a_hit(k: int, spec_state: str) -> None:
    """The block that is hit is the state that the first chunk reads, not one besides it."""
    config = dict(mamba_cache_mode="align", block_size=16, max_model_len=96, max_num_batched_tokens=41,
                  num_speculative_tokens=k, spec_state=spec_state, device="cpu")  # fmt: skip
    model, prompt = GhostModel("M"), list(range(20))
    most = Engine(model, EngineConfig(**config)).cache.max_blocks_for(96)  # type: ignore[arg-type]
    engine = Engine(model, EngineConfig(num_blocks=1 + most, **config))  # type: ignore[arg-type]
    engine.generate([prompt], SamplingParams(max_tokens=1))
    longer = [*prompt, *range(50, 85)]
    engine.add_request(longer, SamplingParams(max_tokens=4))
    said: list[int] = []
    for _ in range(20):
        for output in engine.step():
            said = list(output.token_ids)
    assert not engine.has_unfinished_requests(), "the request starves"
    assert said == model.continuation(longer, 4)
    assert any(isinstance(event, PrefixHit) for event in engine.events)


# Sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 3, 20])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_blocks_and_bytes_of_a_request(mode: str, k: int) -> None:
    """One state in "none"; the checkpoint, the running column and what drafts may pass in "align"."""
    model = GhostModel("M").config
    for size, length in [(4, 64), (16, 64), (8, 5)]:
        config = EngineConfig(
            num_speculative_tokens=k, spec_state="replay", block_size=size, max_model_len=length,
            max_num_batched_tokens=200,
        )  # fmt: skip
        spec = make_layer_specs(model, config, mode)[0]
        assert isinstance(spec, MambaSpec) and spec.ring is not None
        columns = 1 if mode == "none" else cdiv(length, size)
        blocks = {"none": 1, "align": min(2 + cdiv(k, size), columns), "all": columns}[mode]
        assert spec.num_speculative_blocks == 0 and spec.columns_for(length) == columns
        assert spec.max_blocks_for(length) == blocks
        # By hand: one head of one number, states of two, one group; aligned to 16 bytes.
        entries = max(16, 1 + k) + 1 + k
        assert (spec.ring.capacity, spec.ring.max_query_len) == (max(16, 1 + k), 1 + k)
        ring = sum(16 * cdiv(entries * numbers * 4, 16) for numbers in (1, 2, 1, 1))
        assert spec.ring.num_bytes == ring
        assert spec.max_memory_usage_bytes(length) == blocks * spec.page_size_bytes + ring


def test_rings_are_as_large_as_the_spec_says() -> None:
    s = scripted(k=3, max_num_seqs=5)
    (spec,) = {group.spec for group in s.engine.cache.groups}
    assert isinstance(spec, MambaSpec) and spec.ring is not None
    for cache in s.engine.runner.caches:
        ring = cache.ring  # type: ignore[union-attr]
        parts = (ring.x, ring.B, ring.dt, ring.log_decay)
        assert ring.length == 19 + 1 and ring.capacity == 16
        for part, of_spec in zip(parts, spec.ring.tensors, strict=True):
            assert part.shape == (1 + 5, *of_spec.shape)  # the null row is nobody's
    addresses = Counter(
        c.ring.x.data_ptr() for c in s.engine.runner.caches  # type: ignore[union-attr]
    )  # fmt: skip
    assert set(addresses.values()) == {1}, "rings belong to a layer, not to a position"
