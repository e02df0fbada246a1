"""Decode graphs: which steps they serve, what they are captured on, and what they launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import random_prompt, toy_model

from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams
from mamba_teach.events import StepDispatched
from mamba_teach.request import Request
from mamba_teach.runner.decode_graphs import DecodeGraphs, addresses_of, check_pool, default_sizes
from mamba_teach.runner.graph_interface import GraphReplayError
from mamba_teach.runner.graph_recorder import tensors_in
from mamba_teach.runner.persistent_buffer import PersistentBuffer
from mamba_teach.runner.step_metadata import StepMetadataBuilder
from mamba_teach.runner.step_rows import StepRows
from mamba_teach.scheduler import ScheduledRow

CPU = torch.device("cpu")
KERNELS_README = Path(__file__).parents[2] / "kernels" / "README.md"


def ghost_engine(layers: str = "MM*M", **settings_: Any) -> Engine:
    defaults: dict[str, Any] = dict(
        block_size=4, max_model_len=64, max_num_seqs=4, device="cpu", graphs="record", poison=True,
    )  # fmt: skip
    return Engine(GhostModel(layers), EngineConfig(**(defaults | settings_)))


def graphs_of(engine: Engine) -> DecodeGraphs:
    assert engine.runner.graphs is not None
    return engine.runner.graphs


# Which graph, and why ----------------------------------------------------------------------------


def row(number: int, num_tokens: int, is_decode: bool = True) -> ScheduledRow:
    request = Request(f"r{number}", (1, 2, 3), SamplingParams(), number, 0, 60)
    drafts = tuple(range(num_tokens - 1)) if is_decode else ()
    return ScheduledRow(request, 3, num_tokens, is_decode, True, drafts)


@pytest.mark.parametrize("k", [0, 2])
def test_uniform_decode_steps_get_the_smallest_graph_that_holds_them(k: int) -> None:
    graphs = graphs_of(
        ghost_engine(num_speculative_tokens=k, max_num_seqs=6, graph_capture_sizes=(5, 1, 3))
    )
    assert list(graphs.steps) == [5, 3, 1]  # in the order of capture, the largest first
    rows = [row(i, 1 + k) for i in range(6)]
    for count, size in ((1, 1), (2, 3), (3, 3), (4, 5), (5, 5)):
        dispatch = graphs.dispatch(rows[:count])
        assert dispatch.graph_size == size
        padding = f", {size - count} of them padding" if size > count else ""
        assert dispatch.reason == f"{count} decode rows of {1 + k} tokens in {size} rows{padding}"
    too_many = graphs.dispatch(rows)
    assert (too_many.graph_size, too_many.reason) == (None, "6 rows; the largest graph has 5")


@pytest.mark.parametrize("k", [0, 2])
def test_other_steps_run_eagerly_and_say_why(k: int) -> None:
    graphs = graphs_of(ghost_engine(num_speculative_tokens=k))
    decode, prefill = [row(0, 1 + k), row(1, 1 + k)], row(2, 1 + k, is_decode=False)
    for rows, reason in (
        ([*decode, prefill], "1 of 3 rows are prefills"),
        ([prefill], "1 of 1 rows are prefills"),  # however short it is
        ([*decode, row(3, 9, False), prefill], "2 of 4 rows are prefills"),
    ):
        dispatch = graphs.dispatch(rows)
        assert (dispatch.graph_size, dispatch.reason) == (None, reason)
    for fewer in range(1, 1 + k):  # not all drafts that there could be
        dispatch = graphs.dispatch([decode[0], row(7, fewer)])
        assert dispatch.graph_size is None
        assert dispatch.reason == f"r7 has {fewer} tokens; graphs want {1 + k}"


def test_the_log_says_how_each_step_was_run() -> None:
    engine = ghost_engine(graph_capture_sizes=(1, 4), max_num_batched_tokens=16)
    for length, output in ((5, 3), (6, 5), (19, 6)):
        engine.add_request(random_prompt(length, seed=length), SamplingParams(max_tokens=output))
    while engine.has_unfinished_requests():
        engine.step()
    events = [event for event in engine.events if isinstance(event, StepDispatched)]
    # Chunks of 5 + 6 + 5 tokens; two decodes and a chunk of 14; then three, two, and one decode.
    assert [event.path for event in events] == ["eager"] * 2 + ["graph"] * 5
    assert [event.graph_size for event in events] == [0, 0, 4, 4, 4, 1, 1]
    assert events[1].reason == "1 of 3 rows are prefills"
    assert events[2].reason == "3 decode rows of 1 tokens in 4 rows, 1 of them padding"


def test_default_sizes_end_at_the_most_there_can_be() -> None:
    assert default_sizes(1) == (1,)
    assert default_sizes(3) == (1, 2, 3)
    assert default_sizes(8) == (1, 2, 4, 8)
    assert default_sizes(21) == (1, 2, 4, 8, 16, 21)
    for most in range(1, 70):
        sizes = default_sizes(most)
        assert sizes[-1] == most and list(sizes) == sorted(set(sizes))


@pytest.mark.parametrize(("mode", "k"), [("none", 0), ("all", 2), ("align", 3)])
def test_a_pool_too_small_for_the_largest_graph_is_refused(mode: str, k: int) -> None:
    groups = ghost_engine(
        mamba_cache_mode=mode, num_speculative_tokens=k, graphs="off"
    ).cache.groups
    assert [group.spec.kind for group in groups].count("mamba") == 3
    each = 3 * (1 + k) + 1  # a state per token of a step in three Mamba groups, and a page
    check_pool([1, 2, 4], groups, 4 * each + 1)  # and the null block
    with pytest.raises(
        ValueError, match=rf"{4} requests .* {each} blocks.* {4 * each - 1}, .* 3 req"
    ):
        check_pool([4, 1], groups, 4 * each)
    with pytest.raises(ValueError, match=r"4 requests can never be used.*the pool has 5"):
        ghost_engine("M*", num_blocks=6, max_model_len=8, num_speculative_tokens=1, max_num_seqs=4)


# What they are captured on -----------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 2])
def test_a_moved_input_is_refused_by_name(k: int) -> None:
    engine = ghost_engine(num_speculative_tokens=k)
    graphs, metadata = graphs_of(engine), engine.runner.metadata
    for size, step in graphs.steps.items():
        assert step.addresses == addresses_of(metadata.padding(size))
    owners: list[Any] = [metadata, *metadata.attention.values()]
    owners += [builder.buffers for builder in metadata.mamba.values()]
    read = set(graphs.steps[2].addresses)
    buffers = [
        buffer
        for owner in owners
        for buffer in vars(owner).values()
        if isinstance(buffer, PersistentBuffer) and buffer.tensor.data_ptr() in read
    ]
    # Of three Mamba groups, of an attention group, and the tokens.
    assert len(buffers) == len(read) == 3 * (6 if k else 5) + 4 + 1
    for buffer in buffers:
        kept = buffer.tensor
        buffer.tensor = kept.clone()
        name = buffer.name.partition(" (")[0]
        with pytest.raises(GraphReplayError, match=rf"of 2 requests was captured: {name}"):
            graphs.run(2, metadata.padding(2))
        buffer.tensor = kept
    graphs.run(2, metadata.padding(2))


def test_larger_graphs_lend_their_memory_to_smaller_ones() -> None:
    """The largest is captured first, so the others add little more than what they return."""
    model = toy_model("M*M-")
    config = EngineConfig(max_model_len=32, max_num_seqs=4, device="cpu", graphs="record")

    def pool_of(sizes: tuple[int, ...]) -> Any:
        with_sizes = {**vars(config), "graph_capture_sizes": sizes}
        steps = graphs_of(Engine(model, EngineConfig(**with_sizes))).steps
        pools = {id(s.graph.pool): s.graph.pool for s in steps.values()}  # type: ignore[attr-defined]
        (pool,) = pools.values()
        return pool

    alone = pool_of((4,)).peak_bytes
    both = pool_of((2, 4)).peak_bytes
    returned = 2 * (32 + 64) * 4  # two rows of hidden states and logits
    assert both - alone <= 2 * returned
    assert both < alone + pool_of((2,)).peak_bytes / 2


def test_padding_of_a_step_is_counted_in_requests() -> None:
    """Two requests with two drafts in a graph of four: 12 tokens, 4 rows, whatever is asked first."""
    engine = ghost_engine(num_speculative_tokens=2)
    builder: StepMetadataBuilder = engine.runner.metadata
    inputs = builder.padding(4)
    assert inputs.token_ids.shape == (12,)
    for number, group in enumerate(engine.cache.groups):
        metadata: Any = inputs.metadata[group.layers[0]]
        if number in builder.mamba:
            assert metadata.num_decode_tokens == 12
            assert metadata.decode.query_start_loc.shape == (5,)
            assert metadata.decode.ssm_src_slots.shape == (4, 3)
            assert metadata.decode.num_accepted_tokens.shape == (4,)
        else:
            assert metadata.slot_mapping.shape == (12,) and metadata.seq_lens.shape == (4,)


# One plan for all groups ---------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
def test_a_shared_plan_says_what_each_group_would_say_itself(data: st.DataObject) -> None:
    """Columns are told from token counts by hand here, and looked up in each group's own table."""
    k, mode = (
        data.draw(st.sampled_from([0, 2, 3])),
        data.draw(st.sampled_from(["none", "align", "all"])),
    )
    engine = ghost_engine("MM*MM*M-", num_speculative_tokens=k, mamba_cache_mode=mode, graphs="off")
    builders = engine.runner.metadata.mamba
    assert len(builders) >= 2
    size = next(iter(builders.values())).spec.block_size
    num_decodes = data.draw(st.integers(1, 3))
    computed = [data.draw(st.integers(1, 40)) for _ in range(num_decodes)]
    computed += [data.draw(st.integers(0, 40)) for _ in range(4 - num_decodes)]
    lengths = [data.draw(st.integers(1, 1 + k)) for _ in range(num_decodes)]
    lengths += [data.draw(st.integers(1, 15)) for _ in range(4 - num_decodes)]
    anchors = counts = None
    if k:
        anchors = torch.tensor([data.draw(st.integers(-1, 60 // size)) for _ in range(4)]).int()
        counts = torch.tensor([data.draw(st.integers(1, 1 + k)) for _ in range(4)]).int()
    rows = StepRows(
        request_ids=list("abcd"),
        num_decodes=num_decodes,
        num_computed=torch.tensor(computed),
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0),
        table_rows=torch.tensor(data.draw(st.permutations(range(4)))),
        block_idx_last_scheduled_token_prev_step=anchors,
        num_accepted_tokens=counts,
    )
    plan = next(iter(builders.values())).plan(rows)
    for number, builder in builders.items():
        table = (
            torch.randperm(4 * engine.runner.tables.tables[number].shape[1]).int().view(4, -1) + 1
        )
        shared, of_shared = builder.update_block_table(plan, table)
        shared_bytes = [t.clone() for t in tensors_in(shared)]
        own, of_own = builder.build(table, rows)
        assert of_shared == of_own
        assert all(torch.equal(a, b) for a, b in zip(shared_bytes, tensors_in(own), strict=True))
        assert own.decode is not None
        for r in range(num_decodes):
            of_row = table[rows.table_rows[r]].tolist()
            read = (computed[r] - 1) // size
            if anchors is not None and anchors[r] >= 0:
                read = int(anchors[r])
            write = (computed[r] + lengths[r] - 1) // size
            assert own.decode.ssm_src_slots[r].tolist() == of_row[read : read + 1 + k]
            assert own.decode.ssm_dst_slots[r].tolist() == of_row[write : write + 1 + k]
            assert own.decode.conv_src_slots[r] == of_row[read]
            assert own.decode.conv_dst_slots[r] == of_row[write]
            assert (
                of_own[r].read == of_row[read + (int(counts[r]) - 1 if counts is not None else 0)]
            )
