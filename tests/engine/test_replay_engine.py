"""Replay changes what is moved, and nothing else: tokens, states and blocks are those of slots.

The yardsticks: what a request says alone, without caching and without drafts; states computed from
scratch, which a checkpoint and its pending inputs must add up to. What is not pending is NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from engine.test_speculation import MODES, engine_for, script, step, text_of
from support.models import (
    NEAR_TIE,
    assert_says_what_cold_says,
    exact_states,
    greedy_gap,
    random_prompt,
)

from mamba_kernels.backend import override_backend
from mamba_kernels.checks import debug_checks
from mamba_kernels.launch import count_launches
from mamba_teach import Engine, EngineConfig, SamplingParams, load_model
from mamba_teach.cache.block_hash import first_parent, hash_block
from mamba_teach.cache.block_pool import BlockKey
from mamba_teach.cache.specs import MambaSpec
from mamba_teach.events import (
    BlockPublished,
    PrefixHit,
    RequestPreempted,
    RowScheduled,
    StateAccess,
    StepDispatched,
)
from mamba_teach.model.metadata import MambaCache
from mamba_teach.runner import model_runner
from mamba_teach.runner.replay_index import ReplayIndex
from mamba_teach.spec_decode.scripted_proposer import ScriptedProposer

seen: Counter[str] = Counter()  # of all scenarios


def index_of(engine: Engine) -> ReplayIndex:
    assert engine.runner.state_index.replay is not None
    return engine.runner.state_index.replay


def mamba_layers(engine: Engine) -> Iterator[tuple[int, int, MambaCache]]:
    """*(group, layer, cache)*"""
    for number, group in enumerate(engine.cache.groups):
        for layer in group.layers:
            if isinstance(cache := engine.runner.caches[layer], MambaCache):
                yield number, layer, cache


def ring_row_of(engine: Engine, request_id: str) -> int:
    return 1 + int(engine.runner.tables.rows([request_id]))


def poison_rings(engine: Engine) -> None:
    """NaN in every entry of every ring that is not pending."""
    for _, _, cache in mamba_layers(engine):
        ring = cache.ring
        assert ring is not None
        free = torch.ones(ring.x.shape[:2], dtype=torch.bool)
        for request in engine.scheduler.running:
            if (cursor := index_of(engine).cursors.get(request.request_id)) is not None:
                places = (cursor.start + torch.arange(cursor.pending)) % ring.length
                free[ring_row_of(engine, request.request_id), places] = False
        for part in (ring.x, ring.B, ring.dt, ring.log_decay):
            part[free] = torch.nan


def check_states(engine: Engine) -> None:
    """Of all that run: checkpoint, checkpoint and pending inputs, and window."""
    for request in engine.scheduler.running:
        rid, n = request.request_id, request.num_computed_tokens
        if n == 0:
            continue
        cursor = index_of(engine).cursors[rid]
        exact = exact_states(engine.model, tuple(request.tokens(0, n)))
        at_checkpoint = exact_states(engine.model, tuple(request.tokens(0, n - cursor.pending)))
        anchors = engine.runner.state_index
        column = anchors.mamba_state_idx.get(rid)
        offset = anchors.num_accepted_tokens.get(rid, 1) - 1
        for group, layer, cache in mamba_layers(engine):
            table, ring = engine.cache.block_ids(rid)[group], cache.ring
            assert ring is not None
            state = cache.ssm[table[cursor.column]].double()
            close(state, at_checkpoint[layer][1])
            groups = ring.B.shape[2]
            for i in range(cursor.pending):
                at = ring_row_of(engine, rid), (cursor.start + i) % ring.length
                x, B, dt, decay = (
                    t[at].double() for t in (ring.x, ring.B, ring.dt, ring.log_decay)
                )
                B = B.repeat_interleave(len(x) // groups, 0)
                added = dt[:, None, None] * x[:, :, None] * B[:, None, :]
                state = decay.exp()[:, None, None] * state + added
            close(state, exact[layer][1])
            size = engine.cache.groups[group].spec.block_size
            window = table[(n - 1) // size if column is None else column]
            close(cache.conv[window, offset : offset + 3], exact[layer][0])
            seen["pending inputs"] += cursor.pending


def check_published(engine: Engine, texts: dict[str, list[int]]) -> None:
    """Every published block of a Mamba group holds the states and windows of its prefix."""
    size = engine.cache.block_size
    for text in texts.values():
        parent = first_parent(None)
        for end in range(size, len(text) + 1, size):
            parent = hash_block(parent, text[end - size : end])
            for group, layer, cache in mamba_layers(engine):
                block = engine.cache.pool.lookup(BlockKey(parent, group))
                if block is not None:
                    window, state = exact_states(engine.model, tuple(text[:end]))[layer]
                    close(cache.ssm[block], state)
                    close(cache.conv[block, :3], window)
                    seen["published states"] += 1


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-4, atol=2e-5)


def count_checkpoints(engine: Engine) -> int:
    kinds, count = {}, 0
    for event in engine.events:
        if isinstance(event, RowScheduled):
            kinds[event.request_id] = event.kind
        elif isinstance(event, StateAccess) and kinds[event.request_id] == "decode":
            count += len(event.writes)
    return count


@pytest.mark.parametrize("graphs", ["off", "record"])
@pytest.mark.parametrize(("pattern", "size"), [("M*M-", 16), ("MM", 2)])
@pytest.mark.parametrize("k", [0, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_states_and_blocks_are_exact(
    mode: str, k: int, pattern: str, size: int, graphs: str
) -> None:
    """Six requests, three at a time, in pools that are too small for three; shared prefixes; drafts of
    any number; rows of the tables, and their rings, change hands."""
    family = random_prompt(40, seed=3)
    prompts = [family[: n // 2] + random_prompt(n - n // 2, seed=n) for n in (33, 5, 20, 34, 9, 16)]
    prompts[3] = family[:34]
    texts: dict[str, list[int]] = {}
    proposer = ScriptedProposer(script("uneven", texts)) if k else None
    settings: dict[str, Any] = dict(
        block_size=size, max_model_len=96, max_num_batched_tokens=40, max_num_seqs=3,
        spec_state="replay",
    )  # fmt: skip
    probe = engine_for(k, None, mode, pattern, **settings)
    most = probe.cache.max_blocks_for(80)
    if graphs == "record":
        settings |= {"graphs": graphs, "graph_capture_sizes": (2,)}
    settings["num_blocks"] = 1 + most + {"none": 1, "align": 3, "all": most // 2}[mode]
    engine = engine_for(k, proposer, mode, pattern, **settings)
    params = SamplingParams(max_tokens=28)
    wanted = [text_of(prompt, 28, pattern) for prompt in prompts]
    for text, prompt in zip(wanted, prompts):
        texts[engine.add_request(prompt, params)] = text
    done: dict[str, list[int]] = {}
    choice = Random(f"{mode} {k} {pattern}")
    while engine.has_unfinished_requests():
        poison_rings(engine)
        done |= step(engine)  # which also watches published pages and the books
        if engine.num_steps % 5 == 3:
            check_states(engine)
        if engine.num_steps in (9, 14) and engine.scheduler.running:
            engine.scheduler.preempt(choice.choice(engine.scheduler.running))
    for request_id, prompt in zip(texts, prompts):
        assert_says_what_cold_says(engine.model, prompt, done[request_id])
    check_published(engine, texts)
    assert set(index_of(engine).cursors) <= set(texts)
    seen.update(type(event).__name__ for event in engine.events)
    seen["checkpoints"] += count_checkpoints(engine)
    seen["graph steps"] += sum(
        isinstance(e, StepDispatched) and e.path == "graph" for e in engine.events
    )


def test_the_scenarios_met_everything() -> None:
    if not seen:
        pytest.skip("the scenarios did not run in this process")
    kinds = [t.__name__ for t in (PrefixHit, RequestPreempted, BlockPublished)]
    for kind in (*kinds, "checkpoints", "graph steps", "pending inputs", "published states"):
        assert seen[kind] >= 30, seen


@pytest.mark.parametrize("place", ["sample", "verify", "propose"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_fails_after_its_checkpoint_was_written_runs_again(
    mode: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new state is in place, the cursor not behind it: to go on would add inputs twice."""
    prompts = [random_prompt(n, seed=n) for n in (13, 20)]
    texts = {f"r{i}": text_of(prompt, 40) for i, prompt in enumerate(prompts)}
    engine = engine_for(2, ScriptedProposer(script("random", texts)), mode, spec_state="replay")
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=40))
    owner: Any = engine.runner.proposer if place == "propose" else model_runner
    works, failures, done = getattr(owner, place), 0, {}

    def fails_after_checkpoints(*arguments: Any) -> Any:
        flushed = any(isinstance(e, StateAccess) and e.writes for e in since_step_began(engine))
        if flushed and failures < 6 and engine.num_steps > 1 + 5 * failures:
            raise RuntimeError("fire")
        return works(*arguments)

    monkeypatch.setattr(owner, place, fails_after_checkpoints)
    while engine.has_unfinished_requests():
        try:
            poison_rings(engine)
            done |= step(engine)
        except RuntimeError as error:
            assert str(error) == "fire"
            failures += 1
        else:
            check_states(engine)
    assert failures >= 2
    for i, prompt in enumerate(prompts):
        assert_says_what_cold_says(engine.model, prompt, done[f"r{i}"])


def since_step_began(engine: Engine) -> list[Any]:
    for i in range(len(engine.events) - 1, -1, -1):
        if type(engine.events[i]).__name__ == "StepStarted":
            return engine.events[i:]
    return []


@pytest.mark.parametrize("graphs", ["off", "record"])
@pytest.mark.parametrize("mode", MODES)
def test_the_shipped_model_with_its_own_drafter(mode: str, graphs: str) -> None:
    model = load_model("wordmath")
    prompts = [
        "Q: Ann has 12 apples. She buys 5 more. How many apples does she have?\nA:",
        "Q: Tom has 30 pens and gives 4 of them to each of 3 friends. How many are left?\nA:",
    ]
    said = {}
    for spec_state, k in (("slots", 0), ("slots", 3), ("replay", 0), ("replay", 3)):
        config = EngineConfig(
            num_speculative_tokens=k, spec_state=spec_state, mamba_cache_mode=mode, device="cpu",
            max_num_seqs=2, graphs=graphs, graph_capture_sizes=(2,) if graphs == "record" else None,
            enable_prefix_caching=mode != "none",
        )  # fmt: skip
        outputs = Engine(model, config).generate(prompts, SamplingParams(max_tokens=40))
        said[spec_state, k] = [output.token_ids for output in outputs]
        assert (sum(output.num_accepted_drafts for output in outputs) > 0) == (k > 0)
    assert all(tokens == said["slots", 0] for tokens in said.values())


@pytest.mark.interpreter
def test_on_the_triton_kernels() -> None:
    prompts = [random_prompt(n, seed=n) for n in (14, 5)]
    texts = {f"r{i}": text_of(prompt, 14) for i, prompt in enumerate(prompts)}
    with debug_checks(), override_backend("triton"), count_launches() as count:
        proposer = ScriptedProposer(script("uneven", texts))
        engine = engine_for(2, proposer, "align", spec_state="replay", max_num_seqs=2)
        outputs = engine.generate(prompts, SamplingParams(max_tokens=14))
    assert count.by_kernel["replay_state_update_kernel"] > 0
    assert count.by_kernel["materialize_states_kernel"] > 0
    assert "selective_state_update_kernel" not in count.by_kernel
    for prompt, output in zip(prompts, outputs):
        assert greedy_gap(engine.model, prompt, list(output.token_ids)) <= NEAR_TIE


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_the_summary_counts_rings_and_no_scratch_states(mode: str, k: int) -> None:
    slots, replay = (engine_for(k, None, mode, spec_state=s) for s in ("slots", "replay"))
    spec = next(g.spec for g in replay.cache.groups if isinstance(g.spec, MambaSpec))
    assert spec.ring is not None
    used = [c.ring for _, _, c in mamba_layers(replay) if c.ring is not None]
    parts = [t for ring in used for t in (ring.x, ring.B, ring.dt, ring.log_decay)]
    rows = 1 + replay.config.max_num_seqs
    assert sum(t.nbytes for t in parts) == rows * len(used) * spec.ring.num_bytes

    lines = {name: (value, why) for name, value, why in replay.summary().lines}
    states, why = lines["states per request"]
    assert int(states) == {"none": 1, "align": 2 + -(-k // 16), "all": 8}[mode]
    assert "for drafts" not in why, "with replay no state is kept for a draft"
    of_slots = {name: value for name, value, _ in slots.summary().lines}
    assert (lines["blocks per request"][0] == of_slots["blocks per request"]) == (k == 0)
    assert str(spec.ring.num_bytes) in str(replay.summary()), "nothing is said about the rings"
