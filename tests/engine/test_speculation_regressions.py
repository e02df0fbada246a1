"""Faults that speculation with a prefix cache once had, one test each, so that they stay away.

The first three are those of vLLM's pull request 41233, where each hid behind the one before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from support.ghost_checks import ScriptedEngine, of_kind

from mamba_teach import Engine, EngineConfig, GhostModel
from mamba_teach.cache.specs import MambaSpec
from mamba_teach.events import BlocksAllocated, RowScheduled, StateAccess
from mamba_teach.model.metadata import LayerCache, LayerMetadata, MambaDecode, MambaMetadata
from mamba_teach.runner import mamba_metadata

FIELDS = [
    "query_start_loc", "conv_src_slots", "conv_dst_slots", "ssm_src_slots", "ssm_dst_slots",
    "num_accepted_tokens",
]  # fmt: skip


class WatchedGhost(GhostModel):
    """A ghost that shows a test what its layers are told, just before they run."""

    watcher: Callable[[Sequence[LayerMetadata]], None] | None = None

    def __call__(
        self,
        input_ids: torch.Tensor,
        metadata: Sequence[LayerMetadata],
        caches: Sequence[LayerCache],
    ) -> torch.Tensor:
        if self.watcher is not None:
            self.watcher(metadata)
        return super().__call__(input_ids, metadata, caches)

    def decode_ids(self) -> list[str]:
        """Requests of the step's decode rows."""
        return [row.request.request_id for row in self.rows if row.is_decode]


def decode_of(metadata: Sequence[LayerMetadata], layer: int) -> MambaDecode | None:
    of_layer = metadata[layer]
    assert isinstance(of_layer, MambaMetadata)
    return of_layer.decode


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_table_width_includes_num_speculative_blocks(mode: str) -> None:
    """Before, tables were cdiv(max_model_len, B) columns wide, and the last blocks' scratch columns
    lay beyond their end."""
    s = ScriptedEngine("MM*M", 2, mamba_cache_mode=mode, block_size=16, max_model_len=32)
    widths = {"none": 1 + 2, "align": 2 + 2, "all": 2 + 2}
    for group, table in zip(s.engine.cache.groups, s.engine.runner.tables.tables, strict=True):
        width = widths[mode] if isinstance(group.spec, MambaSpec) else 2
        assert table.shape == (4, width), group.name
    steps = [(2, 2), (2, 0), (2, 1), (2, 0), (2, 2), (2, 2)]
    for i in range(4):
        s.add(range(20 * i, 20 * i + 15 + i), steps[i:] + steps, max_tokens=17 - i)  # 32 in all
    columns: set[int] = set()
    last_columns: set[int] = set()
    while s.engine.has_unfinished_requests():
        events = s.step()
        slots = [b for access in of_kind(events, StateAccess) for b, _ in access.writes]
        assert len(set(slots)) == len(slots) and 0 not in slots, "two states in one slot"
        for event in of_kind(events, BlocksAllocated):
            if isinstance(s.engine.cache.groups[event.group].spec, MambaSpec):
                columns.update(event.columns)
        ends = [row.num_computed + row.num_tokens for row in of_kind(events, RowScheduled)]
        last_columns.update((end - 1) // 16 for end in ends)
    assert last_columns == {0, 1}
    assert columns == set(range(widths[mode]))


def test_index_buffers_are_padded_by_requests() -> None:
    """Before, buffers with a row per request were filled up to the number of tokens, which is 1 + k
    times as many, and did not reach."""
    k, seqs = 2, 4
    model = WatchedGhost("MM*M")
    s = ScriptedEngine("MM*M", k, model=model, block_size=16, max_num_seqs=seqs)
    batches = set()

    def watch(metadata: Sequence[LayerMetadata]) -> None:
        ids = model.decode_ids()
        for group, builder in s.engine.runner.metadata.mamba.items():
            decode = decode_of(metadata, s.engine.cache.groups[group].layers[0])
            if decode is None:
                continue
            starts = decode.query_start_loc.tolist()
            batches.add((len(ids), starts[-1]))
            assert len(starts) == len(ids) + 1
            buffers = builder.buffers
            assert buffers.query_start_loc.tensor.shape == (seqs + 1,)
            assert buffers.num_accepted_tokens is not None
            for field in FIELDS[1:]:
                buffer, given = getattr(buffers, field), getattr(decode, field)
                columns = (1 + k,) if field.startswith("ssm") else ()
                assert buffer.tensor.shape == (seqs, *columns)
                assert given.shape == (len(ids), *columns), "cut, or padded by something else"
                padding = 1 if field == "num_accepted_tokens" else 0
                assert (buffer.tensor[len(ids) :] == padding).all()
                if field.startswith("ssm"):
                    # What each request reads from and writes to is all there.
                    for r in range(len(ids)):
                        assert (given[r, : starts[r + 1] - starts[r]] > 0).all()

    model.watcher = watch
    for i, length in enumerate([8, 24, 50, 24]):  # they end one after the other
        s.add(range(20 * i, 20 * i + 10), [(2, i % 3)] * 25, max_tokens=length)
    s.to_the_end()
    assert (seqs, seqs * (1 + k)) in batches, "no full batch"
    assert {requests for requests, _ in batches} == set(range(1, seqs + 1))


def test_the_anchor_buffer_exists_exactly_when_speculation_is_configured() -> None:
    """Before, anchors were handed on only in steps that had drafts, so a step without any read where
    the number of tokens pointed to."""
    without = Engine(GhostModel("M"), EngineConfig(block_size=16, max_model_len=64, device="cpu"))
    assert without.runner.state_index.mamba_prev_last_scheduled_idx is None

    s = ScriptedEngine("M", k=3, block_size=16)
    buffer = s.index.mamba_prev_last_scheduled_idx
    assert buffer is not None
    assert (buffer.tensor.shape, buffer.tensor.dtype) == ((4,), torch.int32)
    assert buffer.tensor.tolist() == [-1] * 4
    rid = s.add(range(13), [(3, 1)])
    s.step()
    s.step()  # 4 tokens from 13 on, to column 1 and behind it; two are kept: 15, still in column 0
    (access,) = of_kind(s.step(), StateAccess)  # one token, no drafts
    assert len(access.writes) == 1
    assert s.asked == [{rid: (-1, 1)}, {rid: (0, 1)}, {rid: (1, 2)}]
    assert buffer.tensor.tolist() == [1, -1, -1, -1]
    s.to_the_end()
    assert len(s.asked) == len(of_kind(s.engine.events, RowScheduled)), "a step without anchors"
    assert s.index.mamba_prev_last_scheduled_idx is buffer


def test_updates_go_through_the_groups_own_persistent_buffer() -> None:
    """Before, all groups filled one buffer after another, and the layers of each read the last one's
    slots (or a step made new tensors, which a captured graph never looks at)."""
    k, size = 2, 4
    model = WatchedGhost("MMMM**")
    s = ScriptedEngine("MMMM**", k, model=model, block_size=size)
    groups = {i: g for i, g in enumerate(s.engine.cache.groups) if g.spec.kind == "mamba"}
    assert len(groups) == 2
    addresses: dict[tuple[int, str], set[int]] = defaultdict(set)
    batches = set()

    def watch(metadata: Sequence[LayerMetadata]) -> None:
        ids = model.decode_ids()
        rows = [row for row in model.rows if row.is_decode]
        batches.add(len(ids))
        for i, group in groups.items():
            given = {layer: decode_of(metadata, layer) for layer in group.layers}
            if (decode := given[group.layers[0]]) is None:
                continue
            assert all(other is decode for other in given.values())
            for field in FIELDS:
                addresses[i, field].add(getattr(decode, field).data_ptr())
            table = s.engine.runner.tables.tables[i][s.engine.runner.tables.rows(ids)]
            for r, row in enumerate(rows):
                anchor, count = s.asked[-1][ids[r]]
                source = anchor if anchor >= 0 else (row.num_computed - 1) // size
                target = (row.seq_len - 1) // size
                assert torch.equal(decode.ssm_src_slots[r], table[r, source : source + 1 + k])
                assert torch.equal(decode.ssm_dst_slots[r], table[r, target : target + 1 + k])
                assert decode.conv_src_slots[r] == table[r, source]
                assert decode.conv_dst_slots[r] == table[r, target]
                assert decode.num_accepted_tokens is not None
                assert decode.num_accepted_tokens[r] == count

    model.watcher = watch
    for i in range(4):
        s.add(range(20 * i, 20 * i + 5 + i), [(2, 2), (1, 0), (2, i % 3), (0, 0)] * 6, 10 + 8 * i)
    s.to_the_end()
    assert batches >= {1, 2, 3, 4}
    assert all(len(seen) == 1 for seen in addresses.values()), "a buffer moved"
    assert len(set.union(*addresses.values())) == len(FIELDS) * 2, "two groups share a buffer"


def test_source_and_destination_gathers_are_independent_tensors_of_1_plus_k_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, one gather served for reading and for writing, so a step read from the columns that it
    was about to write, even if the step before it had been in another block."""
    k = 3
    gathered: list[torch.Tensor] = []
    gather_slots = mamba_metadata.gather_slots

    def watched_gather(*args: torch.Tensor) -> torch.Tensor:
        gathered.append(gather_slots(*args))
        return gathered[-1]

    monkeypatch.setattr(mamba_metadata, "gather_slots", watched_gather)
    model = WatchedGhost("M")
    s = ScriptedEngine("M", k, model=model, block_size=16)
    told: list[tuple[list[int], list[int]]] = []

    def watch(metadata: Sequence[LayerMetadata]) -> None:
        assert [tuple(slots.shape) for slots in gathered] == [(1, 1 + k)] * 2
        assert storage(gathered[0]) != storage(gathered[1])
        gathered.clear()
        if (decode := decode_of(metadata, 0)) is None:
            return
        src, dst = decode.ssm_src_slots, decode.ssm_dst_slots
        slots = [src, dst, decode.conv_src_slots, decode.conv_dst_slots]
        assert len({storage(tensor) for tensor in slots}) == 4
        assert src.shape == dst.shape == (1, 1 + k)
        told.append((src[0].tolist(), dst[0].tolist()))

    model.watcher = watch
    rid = s.add(range(13), [(3, 0), (1, 0)])
    s.step()
    s.step()  # tokens 13 .. 16, to columns 1 .. 4; only token 13 is kept
    table = s.engine.cache.block_ids(rid)[0]
    assert told[-1] == (table[0:4], table[1:5])
    s.step()  # tokens 14 and 15: reads from column 1 on, writes from column 0 on
    assert told[-1] == (table[1:5], table[0:4])
    s.to_the_end()
