"""A request keeps its row, whoever comes and goes around it; freed rows are cleared."""

from __future__ import annotations

import torch
from support.models import random_prompt, toy_config, toy_model

from mamba_teach import Engine, EngineConfig, SamplingParams
from mamba_teach.cache.coordinator import TableUpdates
from mamba_teach.cache.groups import make_groups
from mamba_teach.cache.specs import make_layer_specs
from mamba_teach.runner.block_table import BlockTables

CONFIG = EngineConfig(max_num_seqs=3, max_model_len=64)


def make_tables() -> BlockTables:
    groups = make_groups(make_layer_specs(toy_config("M*"), CONFIG, "none"))
    assert [g.name for g in groups] == ["mamba 0", "attention 0"]
    return BlockTables(groups, CONFIG.max_num_seqs, CONFIG.max_model_len)


def row_of(tables: BlockTables, request_id: str) -> list[list[int]]:
    row = int(tables.rows([request_id]))
    return [table[row].tolist() for table in tables.tables]


def writes(request_id: str, state: int, *pages: int) -> list[tuple[str, int, int, int]]:
    return [(request_id, 0, 0, state), *((request_id, 1, c, b) for c, b in enumerate(pages))]


def test_rows_stay_with_their_requests() -> None:
    tables = make_tables()
    tables.apply(TableUpdates([], writes("A", 1, 2) + writes("B", 3, 4, 5) + writes("C", 6, 7)))
    rows = {r: int(tables.rows([r])) for r in "ABC"}
    # A ends, D comes in its place, C grows, all in one step.
    tables.apply(TableUpdates(["A"], [("C", 1, 1, 8), *writes("D", 9, 10)]))
    assert {r: int(tables.rows([r])) for r in "BC"} == {r: rows[r] for r in "BC"}
    assert row_of(tables, "B") == [[3], [4, 5, 0, 0]]
    assert row_of(tables, "C") == [[6], [7, 8, 0, 0]]
    assert row_of(tables, "D") == [[9], [10, 0, 0, 0]]
    assert sorted(int(tables.rows([r])) for r in "BCD") == [0, 1, 2]


def test_a_freed_row_points_at_the_null_block() -> None:
    tables = make_tables()
    tables.apply(TableUpdates([], writes("A", 1, 2, 3)))
    tables.apply(TableUpdates(["A"]))
    assert all(int(table.count_nonzero()) == 0 for table in tables.tables)
    tables.apply(TableUpdates(["stranger"]))  # gone before it ever had a row


def test_width_is_what_the_longest_request_needs() -> None:
    tables = make_tables()
    assert [tuple(t.shape) for t in tables.tables] == [(3, 1), (3, 4)]  # 64 tokens: 4 pages of 16
    assert {t.dtype for t in tables.tables} == {torch.int32}


def test_a_resumed_request_keeps_its_rank() -> None:
    engine = Engine(toy_model(), EngineConfig(max_num_seqs=3, max_model_len=96, device="cpu"))
    ids = [engine.add_request(random_prompt(9, i), SamplingParams(max_tokens=20)) for i in range(3)]
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    engine.step()
    assert [r.request_id for r in engine.scheduler.running] == ids
    assert engine.scheduler.running[0].num_prefills == 2
