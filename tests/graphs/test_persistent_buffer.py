"""Buffers that stay: what is in front, what is behind, and that nobody else has the same ones."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_teach import EngineConfig
from mamba_teach.cache.groups import CacheGroup, make_groups
from mamba_teach.cache.specs import make_layer_specs
from mamba_teach.ghost import GhostModel
from mamba_teach.model.metadata import LayerMetadata
from mamba_teach.runner.attention_metadata import AttentionMetadataBuilder
from mamba_teach.runner.decode_buffers import DecodeBuffers, ReplaySlots
from mamba_teach.runner.graph_recorder import tensors_in
from mamba_teach.runner.persistent_buffer import PersistentBuffer
from mamba_teach.runner.step_metadata import StepMetadataBuilder
from mamba_teach.runner.step_rows import StepRows

CPU = torch.device("cpu")


def buffer(*shape: int, padding: int = -1) -> PersistentBuffer:
    return PersistentBuffer("slots (mamba 0)", *shape, padding=padding, device=CPU)


def counting(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.int32).view(shape)


# One buffer -------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    columns=st.sampled_from([(), (1,), (3,)]),
    refills=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=6
    ),
)
def test_a_refill_leaves_nothing_of_the_last_one(
    columns: tuple[int, ...], refills: list[tuple[int, int, int]]
) -> None:
    """Values of any size in front; padding behind and beside them, all the way."""
    kept = buffer(4, *columns)
    address = kept.tensor.data_ptr()
    assert (kept.tensor == -1).all()
    for num_rows, width, more in refills:
        values = counting(num_rows, *(min(width, c) for c in columns))
        padded = min(4, num_rows + more)
        view = kept.refill(values, padded)
        expected = [[-1] * max(1, *columns, 1) for _ in range(4)]
        for r, row in enumerate(values.reshape(num_rows, -1).tolist() if num_rows else []):
            expected[r][: len(row)] = row
        assert kept.tensor.view(4, -1).tolist() == expected
        assert view.shape == (padded, *columns)
        assert kept.tensor.data_ptr() == address
        assert padded == 0 or view.data_ptr() == address


def test_without_a_number_of_rows_there_is_no_padding_to_see() -> None:
    kept = buffer(4)
    assert kept.refill(counting(3)).tolist() == [1, 2, 3]
    assert kept.tensor.tolist() == [1, 2, 3, -1]
    assert kept.refill(counting(1).long()).tolist() == [1]  # of another type
    assert kept.tensor.tolist() == [1, -1, -1, -1]


@pytest.mark.parametrize(
    ("shape", "num_rows"), [((5, 2), None), ((2, 4), None), ((2, 3), 5), ((3, 3), 2)]
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    shape: tuple[int, int], num_rows: int | None
) -> None:
    kept = buffer(4, 3)
    kept.refill(counting(2, 3))
    before = kept.tensor.clone()
    message = f"slots (mamba 0): values of shape {shape} for {num_rows or shape[0]} rows do not fit"
    with pytest.raises(ValueError, match=re.escape(message) + r".*\(4, 3\)"):
        kept.refill(counting(*shape), num_rows)
    assert torch.equal(kept.tensor, before)


# A Mamba group's buffers ------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 2])
def test_rows_of_padding_have_null_slots_no_tokens_and_a_count_of_one(k: int) -> None:
    buffers = DecodeBuffers("mamba 0", 4, k, 1 + k, CPU)
    first: list[int] = []
    for rows, padded in (
        (4, 4),
        (1, 4),
        (3, 4),
        (0, 2),
        (2, 2),
    ):  # a full one first, to leave traces
        starts = torch.arange(rows + 1, dtype=torch.int32) * (1 + k)
        src, dst = counting(rows, 1 + k) + 10, counting(rows, 1 + k) + 50
        counts = torch.full((rows,), 1 + k, dtype=torch.int32) if k else None
        decode = buffers.refill(starts, src, dst, counts, padded)
        rest = padded - rows
        assert decode.query_start_loc.tolist() == starts.tolist() + [rows * (1 + k)] * rest
        for slots, given_ in ((decode.ssm_src_slots, src), (decode.ssm_dst_slots, dst)):
            assert slots.tolist() == given_.tolist() + [[0] * (1 + k)] * rest
        assert decode.conv_src_slots.tolist() == src[:, 0].tolist() + [0] * rest
        assert decode.conv_dst_slots.tolist() == dst[:, 0].tolist() + [0] * rest
        if k:
            assert decode.num_accepted_tokens is not None
            assert decode.num_accepted_tokens.tolist() == [1 + k] * rows + [1] * rest
        else:
            assert decode.num_accepted_tokens is None
        assert all(tensor.dtype == torch.int32 for tensor in tensors_in(decode))
        addresses = [tensor.data_ptr() for tensor in tensors_in(decode)]
        first = first or addresses
        assert addresses == first
        # Behind what this step shows, too: the next graph may be larger.
        assert (buffers.ssm_dst_slots.tensor[rows:] == 0).all()


def test_with_replay_rows_of_padding_have_nothing_pending() -> None:
    buffers = DecodeBuffers("mamba 0", 4, 2, 1, CPU)
    for rows, padded in ((4, 4), (1, 3)):
        starts, slots = counting(rows + 1), counting(rows, 3)
        replay = ReplaySlots(*(counting(rows) + 10 * i for i in range(5)))
        decode = buffers.refill(starts, slots, slots, counting(rows), padded, replay)
        rest = [0] * (padded - rows)
        found = (decode.ssm_src_slots[:, 0], decode.ssm_dst_slots[:, 0],
                 decode.ring_rows, decode.ring_starts, decode.num_pending)  # fmt: skip
        for i, tensor in enumerate(found):
            assert tensor is not None
            assert tensor.tolist() == [10 * i + r + 1 for r in range(rows)] + rest
        assert decode.conv_src_slots.tolist() == slots[:, 0].tolist() + rest


def test_a_group_is_named_by_whoever_has_too_many_rows() -> None:
    buffers = DecodeBuffers("mamba 1", 2, 0, 1, CPU)
    starts, slots = counting(4), counting(3, 1)
    with pytest.raises(ValueError, match=r"query_start_loc \(mamba 1\).*\(4,\).*\(3,\)"):
        buffers.refill(starts, slots, slots, None)


# An attention group's ---------------------------------------------------------------------------


def of_rows(computed: list[int], length: int, table_rows: list[int]) -> StepRows:
    return StepRows(
        request_ids=[f"r{i}" for i in range(len(computed))],
        num_decodes=len(computed),
        num_computed=torch.tensor(computed),
        query_start_loc=torch.arange(len(computed) + 1) * length,
        table_rows=torch.tensor(table_rows),
    )


def groups_of(layers: str, config: EngineConfig) -> tuple[CacheGroup, ...]:
    return make_groups(make_layer_specs(GhostModel(layers).config, config, "all"))


@pytest.mark.parametrize("k", [0, 2])
def test_attention_rows_of_padding_see_nothing_and_write_nothing(k: int) -> None:
    config = EngineConfig(
        max_num_seqs=4, max_model_len=20, block_size=4, num_speculative_tokens=k, device="cpu"
    )
    group = next(g for g in groups_of("M*", config) if g.spec.kind == "attention")
    builder = AttentionMetadataBuilder(1, group, config, CPU)
    table = torch.arange(1, 21, dtype=torch.int32).view(4, 5)  # pages 1 .. 5 are row 0's
    width = 1 + k
    first: list[int] = []
    for computed, table_rows, padded in (
        ([16, 3, 9, 0], [0, 1, 2, 3], 4),  # long ones first, to leave traces
        ([5, 7], [3, 1], 4),
        ([2], [2], 2),
    ):
        rest = padded - len(computed)
        metadata = builder.build(table, of_rows(computed, width, table_rows), padded)
        ends = [width * (i + 1) for i in range(len(computed))]
        assert metadata.query_start_loc.tolist() == [0, *ends] + ends[-1:] * rest
        assert metadata.seq_lens.tolist() == [n + width for n in computed] + [0] * rest
        slots = [
            int(table[row, position // 4]) * 4 + position % 4
            for row, n in zip(table_rows, computed)
            for position in range(n, n + width)
        ]
        assert metadata.slot_mapping.tolist() == slots + [0] * width * rest
        assert metadata.block_table.shape == (padded, 5)  # of the longest sequence there may be
        for r, (row, n) in enumerate(zip(table_rows, computed)):
            needed = -(-(n + width) // 4)
            assert metadata.block_table[r, :needed].tolist() == table[row, :needed].tolist()
        assert not metadata.block_table[len(computed) :].any()
        assert (metadata.max_query_len, metadata.max_seq_len) == (width, 20)
        addresses = [tensor.data_ptr() for tensor in tensors_in(metadata)]
        first = first or addresses
        assert addresses == first
    nobody = builder.padding(3)
    assert nobody.query_start_loc.tolist() == [0] * 4 and nobody.seq_lens.tolist() == [0] * 3
    assert not nobody.block_table.any() and nobody.slot_mapping.tolist() == [0] * 3 * width
    assert [tensor.data_ptr() for tensor in tensors_in(nobody)] == first


# Groups and their memory ------------------------------------------------------------------------


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where all of its memory begins and ends."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("layers", ["MM*M", "MMM*", "MM*MM*M-", "**"])
def test_two_groups_never_share_memory(layers: str, k: int) -> None:
    config = EngineConfig(
        max_num_seqs=3, max_model_len=32, block_size=4, num_speculative_tokens=k, device="cpu"
    )
    groups = groups_of(layers, config)
    builder = StepMetadataBuilder(groups, len(layers), config, 64, CPU)
    inputs = builder.padding(3)
    of_group: list[LayerMetadata] = [inputs.metadata[group.layers[0]] for group in groups]
    spans = [[span(t) for t in tensors_in(m)] for m in [inputs.token_ids, *of_group]]
    assert all(spans)
    for one, other in combinations(spans, 2):
        for a, b in ((a, b) for a in one for b in other):
            assert a[1] <= b[0] or b[1] <= a[0]
    for group, metadata in zip(groups, of_group):  # and its layers are all told the same
        assert all(inputs.metadata[layer] is metadata for layer in group.layers)
