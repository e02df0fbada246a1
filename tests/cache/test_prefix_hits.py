"""Prefix hits: how long they are, that they are exact, and what is never found."""

from __future__ import annotations

import warnings

import pytest
import torch
from model.test_recurrence import Reference
from support.models import NEAR_TIE, greedy_gap, random_prompt, toy_model

from mamba_teach import Engine, EngineConfig, SamplingParams, load_model
from mamba_teach.cache.block_pool import BlockKey, BlockPool
from mamba_teach.cache.mode import resolve_cache_mode
from mamba_teach.cache.specs import MambaSpec, TensorSpec
from mamba_teach.events import BlocksAllocated
from mamba_teach.wordmath.evaluate import MAX_SOLUTION_TOKENS
from mamba_teach.wordmath.problems import held_out_problems
from mamba_teach.wordmath.prompts import few_shot_prompt

ONE = SamplingParams(max_tokens=1)


def engine_for(mode: str | None = "all", pattern: str = "M*M-", **settings: object) -> Engine:
    defaults: dict[str, object] = dict(
        max_model_len=128, max_num_batched_tokens=128, max_num_seqs=4, device="cpu", block_size=16,
        mamba_cache_mode=mode, poison=True,
    )  # fmt: skip
    return Engine(toy_model(pattern), EngineConfig(**(defaults | settings)))


def hit(engine: Engine, prompt: list[int], max_tokens: int = 8) -> int:
    """Serve a prompt, check every token, and return how much of it was cached."""
    output = engine.generate([prompt], SamplingParams(max_tokens=max_tokens))[0]
    assert greedy_gap(engine.model, prompt, list(output.token_ids)) <= NEAR_TIE
    return output.num_cached_tokens


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("budget", [128, 20, 5])
@pytest.mark.parametrize(
    ("length", "expected"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32)]
)
def test_the_same_prompt_twice(mode: str, budget: int, length: int, expected: int) -> None:
    # floor((n - 1) / 16) * 16: the last token is always computed, for its logits.
    engine = engine_for(mode, max_num_batched_tokens=budget)
    prompt = random_prompt(length, seed=length)
    assert hit(engine, prompt, max_tokens=1) == 0
    assert hit(engine, prompt, max_tokens=6) == expected


def test_mode_none_never_hits() -> None:
    engine = engine_for("none")
    prompt = random_prompt(60, seed=0)
    assert [hit(engine, prompt) for _ in range(3)] == [0, 0, 0]


def test_align_finds_only_what_a_chunk_end_kept() -> None:
    # A chunk of up to 128 tokens runs to the last boundary that a repetition can hit: 80 of 90.
    prompt = random_prompt(90, seed=1)
    other_tail = prompt[:70] + random_prompt(20, seed=2)
    align, all_ = engine_for("align"), engine_for("all")
    assert (hit(align, prompt), hit(all_, prompt)) == (0, 0)
    assert (hit(align, prompt), hit(all_, prompt)) == (80, 80)
    assert (hit(align, other_tail), hit(all_, other_tail)) == (0, 64)
    # With a budget of 40, chunks end at 32, 64, 80.
    small = engine_for("align", max_num_batched_tokens=40)
    assert [hit(small, prompt), hit(small, other_tail)] == [0, 64]


@pytest.mark.parametrize("mode", ["align", "all"])
def test_generated_text_is_hit_too(mode: str) -> None:
    # Decoding passes every boundary one token at a time, so in both modes every one is kept.
    engine = engine_for(mode)
    prompt = random_prompt(20, seed=3)
    output = engine.generate([prompt], SamplingParams(max_tokens=50))[0]
    turn = prompt + list(output.token_ids) + random_prompt(5, seed=4)
    assert hit(engine, turn) == 64  # of 69 computed tokens


def test_a_request_that_hits_does_not_write_what_it_hit() -> None:
    engine = engine_for()
    prompt = random_prompt(40, seed=5)
    hit(engine, prompt)
    pool = engine.cache.pool
    published = [b for b in range(pool.num_blocks) if pool.key_of(b)]
    before = bits_of(engine, published)
    for seed in range(4):
        assert hit(engine, prompt[:35] + random_prompt(30, seed=seed), max_tokens=3) == 32
    still = [b for b in published if pool.key_of(b)]
    assert still == published, "the pool is large enough to keep them"
    assert all(torch.equal(a, b) for a, b in zip(before, bits_of(engine, published)))


def bits_of(engine: Engine, blocks: list[int]) -> list[torch.Tensor]:
    """A copy of what every layer sees in these blocks, as integers: NaN equals itself."""
    return [
        tensor[blocks].clone().view(torch.int32)
        for cache in filter(None, engine.runner.caches)
        for tensor in cache.pools
    ]


def blocks_of(engine: Engine, prompt: list[int], group_kind: str) -> list[list[int]]:
    """Published blocks of a prompt's prefix, by group of a kind and column (0: not published)."""
    from mamba_teach.cache.block_hash import first_parent, hash_block

    hashes, parent = [], first_parent(None)
    for start in range(0, len(prompt) - 15, 16):
        parent = hash_block(parent, prompt[start : start + 16])
        hashes.append(parent)
    return [
        [engine.cache.pool.lookup(BlockKey(h, g)) or 0 for h in hashes]
        for g, group in enumerate(engine.cache.groups)
        if group.spec.kind == group_kind
    ]


def evict(engine: Engine, block: int) -> None:
    """Make the pool forget one block, as if it had been handed out again."""
    engine.cache.pool._forget(block)
    for cache in filter(None, engine.runner.caches):
        for tensor in cache.pools:
            tensor[block] = torch.nan


@pytest.mark.parametrize(
    ("gone", "expected"), [((32,), 16), ((16,), 32), ((16, 32), 0), ((), 32)]
)
def test_a_hit_is_what_every_group_can_supply(gone: tuple[int, ...], expected: int) -> None:
    # One attention and two Mamba groups. Attention has all of it; a Mamba state is missing.
    engine = engine_for()
    prompt = random_prompt(40, seed=6)
    hit(engine, prompt, max_tokens=1)
    states = blocks_of(engine, prompt, "mamba")
    assert len(states) == 2
    for position in gone:
        evict(engine, states[0][position // 16 - 1])  # in one of the two groups only
    assert hit(engine, prompt) == expected


def test_a_gap_in_attention_ends_the_hit_there() -> None:
    engine = engine_for()
    prompt = random_prompt(90, seed=7)
    hit(engine, prompt, max_tokens=1)
    evict(engine, blocks_of(engine, prompt, "attention")[0][2])
    assert hit(engine, prompt) == 32


def test_a_salt_separates() -> None:
    engine = engine_for()
    prompt = random_prompt(40, seed=8)
    cached = [
        engine.generate([prompt], ONE, cache_salt=salt)[0].num_cached_tokens
        for salt in (None, "a", "b", "a", None)
    ]
    assert cached == [0, 0, 0, 32, 32]


def test_an_evicted_block_is_not_found_under_its_old_hash() -> None:
    # Room for one request and little more: later prompts take the first one's blocks.
    engine = engine_for(num_blocks=10, pattern="M*", max_model_len=64)
    prompts = [random_prompt(33, seed=i) for i in range(5)]
    assert hit(engine, prompts[0], max_tokens=1) == 0
    assert hit(engine, prompts[0], max_tokens=1) == 32
    for prompt in prompts[1:]:
        assert hit(engine, prompt, max_tokens=1) == 0
        assert_indexes_are_inverse(engine.cache.pool)
    assert hit(engine, prompts[0]) == 0


def test_reset_while_a_request_runs() -> None:
    engine = engine_for()
    prompt = random_prompt(40, seed=9)
    running = engine.add_request(prompt, SamplingParams(max_tokens=30))
    for _ in range(10):
        engine.step()
    engine.reset_prefix_cache()
    assert_indexes_are_inverse(engine.cache.pool)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].request_id == running
    assert greedy_gap(engine.model, prompt, list(outputs[-1].token_ids)) <= NEAR_TIE
    assert hit(engine, prompt) == 0, "what was forgotten is not found again"


def assert_indexes_are_inverse(pool: BlockPool) -> None:
    keys = {b: pool.key_of(b) for b in range(pool.num_blocks) if pool.key_of(b)}
    assert len(set(keys.values())) == len(keys), "two blocks under one hash"
    assert all(pool.lookup(key) == b for b, key in keys.items())


def test_states_after_a_hit_equal_those_without(pattern: str = "M*M-") -> None:
    prompt = random_prompt(70, seed=10)
    params = SamplingParams(max_tokens=20)
    finals = []
    for warm in (False, True):
        engine = engine_for(pattern=pattern)
        if warm:
            assert hit(engine, prompt[:50] + random_prompt(9, seed=11), max_tokens=1) == 0
        request = engine.add_request(prompt, params)
        while not (rows := engine.scheduler.running) or rows[0].num_tokens < 85:
            engine.step()
        assert (rows[0].num_cached_tokens > 0) == warm
        slots = [table[-1] for table in engine.cache.block_ids(request)]
        finals.append(
            [
                tensor[slots[g]].clone()
                for g, group in enumerate(engine.cache.groups)
                if group.spec.kind == "mamba"
                for layer in group.layers
                for tensor in engine.runner.caches[layer].pools
            ]
        )
    for cold, warm_ in zip(*finals):
        torch.testing.assert_close(warm_, cold, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@torch.no_grad()
def test_the_final_state_is_the_float64_recurrence(mode: str) -> None:
    # Of the first layer, whose inputs are known without running the model: chunked, hit, decoded.
    engine = engine_for(mode, max_num_batched_tokens=23, pattern="M*M-")
    prompt = random_prompt(45, seed=13)
    hit(engine, prompt, max_tokens=2)
    request = engine.add_request(prompt, SamplingParams(max_tokens=30))
    while not (running := engine.scheduler.running) or running[0].num_computed_tokens < 70:
        engine.step()
    assert running[0].num_cached_tokens == (0 if mode == "none" else 32)
    layer = engine.model.model.layers[0]
    tokens = torch.tensor(running[0].tokens(0, running[0].num_computed_tokens))
    weights = {k: v.double().numpy() for k, v in layer.mixer.state_dict().items()}
    reference = Reference(engine.model.config, weights)
    for u in layer.norm(engine.model.model.embeddings(tokens)).double().numpy():
        reference.step(u)
    group = next(i for i, g in enumerate(engine.cache.groups) if 0 in g.layers)
    slot = engine.cache.block_ids(request)[group][-1]
    cache = engine.runner.caches[0]
    for ours, theirs in ((cache.ssm[slot], reference.h), (cache.conv[slot], reference.window)):
        torch.testing.assert_close(ours.double(), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


def test_wordmath_answers_are_the_same_in_every_mode() -> None:
    problems = held_out_problems(24)
    prompts = [few_shot_prompt(p) for p in problems]
    params = SamplingParams(max_tokens=MAX_SOLUTION_TOKENS)
    model = load_model("wordmath")
    outputs = {
        mode: Engine(model, EngineConfig(mamba_cache_mode=mode, device="cpu")).generate(
            prompts, params
        )
        for mode in ("none", "align", "all")
    }
    assert model.tokenizer is not None
    for i, prompt in enumerate(prompts):
        ids = model.tokenizer.encode(prompt).ids
        for mode, served in outputs.items():
            gap = greedy_gap(model, ids, list(served[i].token_ids))
            assert gap <= NEAR_TIE, f"{mode}: problem {i} has a token that is not the best"
    cached = {m: sum(o.num_cached_tokens for o in served) for m, served in outputs.items()}
    assert cached["none"] == 0 < cached["align"] <= cached["all"]


def is_poisoned(engine: Engine, block: int) -> bool:
    """Whether a block is NaN in every layer, to the last number."""
    return all(
        bool(tensor[block].isnan().all())
        for cache in filter(None, engine.runner.caches)
        for tensor in cache.pools
    )


def test_what_means_nothing_any_more_is_poisoned() -> None:
    engine = engine_for("all", pattern="M*")
    hit(engine, random_prompt(40, seed=14), max_tokens=1)
    pool = engine.cache.pool
    published = [b for b in range(1, pool.num_blocks) if pool.key_of(b)]
    used = {b for e in engine.events if isinstance(e, BlocksAllocated) for b in e.block_ids}
    given_up = used - set(published)  # the running state, and the page of the last tokens
    assert len(published) == 4 and len(given_up) == 2
    engine.add_request(random_prompt(3, seed=15), ONE)
    engine.step()  # poison falls before a step computes
    assert all(is_poisoned(engine, b) for b in given_up)
    assert not any(is_poisoned(engine, b) for b in published)
    engine.reset_prefix_cache()
    engine.add_request(random_prompt(3, seed=16), ONE)
    engine.step()
    assert all(is_poisoned(engine, b) for b in published)


# Modes and sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "supports_all", "effective", "reason"),
    [
        ({}, True, "all", "supports"),
        ({}, False, "align", "cannot"),
        ({"mamba_cache_mode": "all"}, False, "align", "cannot"),
        ({"mamba_cache_mode": "align"}, True, "align", "asked for"),
        ({"mamba_cache_mode": "none"}, True, "none", "asked for"),
        ({"enable_prefix_caching": False}, True, "none", "off"),
        ({"enable_prefix_caching": False, "mamba_cache_mode": "all"}, True, "none", "off"),
    ],
)
def test_mode_resolution(settings: dict, supports_all: bool, effective: str, reason: str) -> None:
    mode = resolve_cache_mode(EngineConfig(**settings), supports_all)
    assert mode.effective == effective
    assert reason in mode.reason
    assert mode.requested == settings.get("mamba_cache_mode")


@pytest.mark.parametrize(
    ("mode", "k", "max_len", "blocks"),
    [
        ("none", 2, 64, 3), ("align", 2, 64, 4), ("all", 2, 64, 6),
        ("none", 0, 64, 1), ("align", 0, 64, 2), ("all", 0, 64, 4), ("all", 2, 65, 7),
    ],
)  # fmt: skip
def test_blocks_per_request_include_the_drafts(mode: str, k: int, max_len: int, blocks: int) -> None:
    tensors = (TensorSpec((3, 8), "float32"), TensorSpec((2, 4, 4), "float32"))
    spec = MambaSpec(max_len if mode == "none" else 16, tensors, 4096, mode, k)
    assert spec.max_blocks_for(max_len) == blocks
    assert spec.columns_for(max_len) == -(-max_len // spec.block_size) + k


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("budget", [128, 23])
def test_no_request_ever_holds_more_than_the_estimate(mode: str, budget: int) -> None:
    engine = engine_for(mode, max_num_batched_tokens=budget)
    engine.add_request(random_prompt(50, seed=12), SamplingParams(max_tokens=78))
    most = [0] * len(engine.cache.groups)
    while engine.has_unfinished_requests():
        schedule_events = len(engine.events)
        engine.step()
        allocated = [
            e for e in engine.events[schedule_events:] if type(e).__name__ == "BlocksAllocated"
        ]
        for r in engine.scheduler.running:
            for g, table in enumerate(engine.cache.block_ids(r.request_id)):
                new = sum(len(e.block_ids) for e in allocated if e.group == g)
                most[g] = max(most[g], sum(map(bool, table)), new)
    for held, group in zip(most, engine.cache.groups):
        assert held <= group.spec.max_blocks_for(128)


def test_a_block_that_no_prompt_can_fill() -> None:
    with pytest.raises(ValueError, match=r"block_size=64: .*max_model_len=64"):
        engine_for(block_size=64, max_model_len=64)
    with pytest.warns(UserWarning, match="prefix caching will find nothing"):
        engine_for(block_size=None, max_model_len=16, max_num_batched_tokens=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine_for("none", block_size=64, max_model_len=64)
