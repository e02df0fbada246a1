"""Many requests leave nothing behind, and the counts that the benchmark prints are right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import cpu_requests

from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams

COUNTS = ("steps", "tokens", "cached_tokens", "blocks", "evicted", "free_blocks", "containers")


@pytest.mark.slow
def test_the_second_thousand_is_like_the_first() -> None:
    """A pool that is full of old blocks after a few hundred requests: from then on each thousand costs
    the same steps, blocks and evictions, and no container has one entry more than before."""
    first, second = cpu_requests.short_requests(2000, 1000)[-2:]
    assert first["free_blocks"] == cpu_requests.POOL_BLOCKS - 1
    assert first["evicted"] > 0 and first["cached_tokens"] > 0
    assert second["containers"] == first["containers"]
    for count in ("steps", "tokens", "cached_tokens", "blocks", "free_blocks"):
        assert second[count] == first[count], count
    # Blocks that were never used are gone by then: every block handed out evicts what it can.
    assert second["evicted"] - first["evicted"] <= cpu_requests.POOL_BLOCKS


@pytest.mark.parametrize("num_blocks", [64, 512])
def test_a_batch_is_like_the_one_before(num_blocks: int) -> None:
    """The same in small, also where requests are preempted for want of blocks."""
    lines = cpu_requests.short_requests(160, 40, num_blocks)
    assert all(line["free_blocks"] == num_blocks - 1 for line in lines)
    assert len({line["tokens"] for line in lines}) == 1
    for path, size in lines[-1]["containers"].items():
        known = path.endswith(("_block_of", "_key_of"))
        limit = num_blocks if known else lines[1]["containers"][path]
        assert size <= limit, path


def test_what_is_left_behind_is_seen() -> None:
    """A dict that forgets to forget, deep inside, shows in the sizes."""
    engine = Engine(GhostModel("M*"), EngineConfig(device="cpu", block_size=16))
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    before = cpu_requests.sizes_in(engine)
    engine.runner.state_index.mamba_state_idx["somebody"] = 3
    engine.cache.managers[0].tables["somebody"] = [1, 2]
    after = cpu_requests.sizes_in(engine)
    grown = {path for path in after if after[path] != before.get(path)}
    table = "engine.cache.managers[0].tables"
    assert grown == {table, f"{table}[0]", "engine.runner.state_index.mamba_state_idx"}


def test_a_shared_prefix_is_computed_once() -> None:
    """5 prompts of 160 tokens share 100, so 6 blocks of 16: the later 4 compute 64 tokens each."""
    found = cpu_requests.long_contexts(requests=5, prompt=160, shared=100, steps=2)
    assert found["prompt_tokens"] == 800
    assert found["computed_tokens"] + found["cached_tokens"] == 800
    assert list(found["ms_by_columns"]) == list(cpu_requests.COLUMNS)


def test_scheduling_covers_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_requests, "REQUESTS", (1, 3))
    lines = cpu_requests.scheduling(steps=2)
    assert [(line["requests"], line["columns"]) for line in lines] == [
        (r, c) for r in (1, 3) for c in cpu_requests.COLUMNS
    ]
