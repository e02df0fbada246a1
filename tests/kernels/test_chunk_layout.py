"""``build_chunk_layout``: the worked example, the rules, and a plain loop that follows them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_kernels import ChunkLayout, build_chunk_layout


def build(
    lengths: list[int], computed: list[int], chunk_size: int, ends: list[tuple[int, int]] | None = None
) -> ChunkLayout:
    rows = None if ends is None else torch.tensor([[s, e, 9] for s, e in ends]).reshape(-1, 3).int()
    offsets = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    return build_chunk_layout(offsets, torch.tensor(computed).reshape(-1), chunk_size, rows)


def test_the_worked_example() -> None:
    """Rows (n=6, q=13) and (n=0, q=5) with Q=4, as worked out by hand in vLLM's terms."""
    layout = build([13, 5], [6, 0], 4)
    assert layout.cu_chunk_seqlens.tolist() == [0, 2, 6, 10, 13, 17, 18]
    assert layout.seq_idx.tolist() == [0, 0, 0, 0, 1, 1]
    assert layout.last_chunk_indices.tolist() == [3, 5]
    assert layout.chunk_rank.tolist() == [0, 1, 2, 3, 0, 1]
    assert layout.cu_seq_chunks.tolist() == [0, 4, 6]
    assert (layout.num_chunks, layout.num_seqs, layout.num_tokens) == (6, 2, 18)
    assert (layout.longest_chunk, layout.max_chunks_per_seq) == (4, 4)


def test_checkpoints_end_chunks_and_may_share_a_place() -> None:
    layout = build([13, 5], [6, 0], 4, [(1, 3), (0, 6), (0, 7), (1, 3), (0, 13)])
    #                 on the grid: after 2, 6, 10, 13 | 17, 18; forced: 6 (already there), 7, 16
    assert layout.cu_chunk_seqlens.tolist() == [0, 2, 6, 7, 10, 13, 16, 17, 18]
    assert layout.checkpoint_chunks.tolist() == [5, 1, 2, 5, 4]
    assert layout.checkpoint_order.tolist() == [1, 2, 4, 0, 3]
    assert layout.cu_checkpoints.tolist() == [0, 0, 1, 2, 2, 3, 5, 5, 5]


def test_nothing_to_do() -> None:
    layout = build([0, 0], [7, 0], 8)
    assert (layout.num_chunks, layout.longest_chunk, layout.max_chunks_per_seq) == (0, 0, 0)
    assert layout.cu_chunk_seqlens.tolist() == [0] and layout.last_chunk_indices.tolist() == [-1, -1]
    assert layout.cu_seq_chunks.tolist() == [0, 0, 0]
    assert build([], [], 8).num_chunks == 0


Batch = tuple[list[int], list[int], int, list[tuple[int, int]]]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.integers(0, 40), max_size=6))
    computed = [draw(st.integers(0, 100)) for _ in lengths]
    places = [(s, e) for s, length in enumerate(lengths) for e in range(1, length + 1)]
    ends = draw(st.lists(st.sampled_from(places), max_size=8)) if places else []
    return lengths, computed, draw(st.sampled_from([1, 3, 8, 12, 16, 64])), ends


@settings(max_examples=300)
@given(batches())
def test_equals_a_loop_over_tokens(batch: Batch) -> None:
    """The rules, token by token: a chunk ends at a multiple of Q, a checkpoint, the last token."""
    lengths, computed, chunk_size, ends = batch
    layout = build(lengths, computed, chunk_size, ends)

    chunk_ends, seqs, ranks, last, place = [], [], [], [-1] * len(lengths), 0
    for seq, (length, n) in enumerate(zip(lengths, computed)):
        for token in range(1, length + 1):
            place += 1
            if (n + token) % chunk_size == 0 or (seq, token) in ends or token == length:
                ranks.append(ranks[-1] + 1 if seqs and seqs[-1] == seq else 0)
                chunk_ends.append(place)
                seqs.append(seq)
                last[seq] = len(seqs) - 1
    assert layout.cu_chunk_seqlens.tolist() == [0, *chunk_ends]
    assert layout.seq_idx.tolist() == seqs and layout.chunk_rank.tolist() == ranks
    assert layout.last_chunk_indices.tolist() == last
    assert layout.num_tokens == sum(lengths)
    assert layout.longest_chunk == max(np.diff([0, *chunk_ends]), default=0) <= chunk_size
    assert layout.max_chunks_per_seq == max((r + 1 for r in ranks), default=0)
    for seq in range(len(lengths)):
        first, end = layout.cu_seq_chunks[seq : seq + 2].tolist()
        assert [i for i, s in enumerate(seqs) if s == seq] == list(range(first, end))

    starts = np.cumsum([0, *lengths])
    wanted = [chunk_ends.index(starts[seq] + end) for seq, end in ends]
    assert layout.checkpoint_chunks.tolist() == wanted
    for chunk in range(layout.num_chunks):
        first, end = layout.cu_checkpoints[chunk : chunk + 2].tolist()
        rows = layout.checkpoint_order[first:end].tolist()
        assert rows == [row for row, c in enumerate(wanted) if c == chunk]


def test_a_prompt_in_pieces_is_cut_like_the_prompt_at_once() -> None:
    whole = build([50], [0], 8).cu_chunk_seqlens.tolist()
    pieces, done = [0], 0
    for piece in (3, 20, 1, 26):
        pieces += [done + end for end in build([piece], [done], 8).cu_chunk_seqlens[1:].tolist()]
        done += piece
    assert set(whole) <= set(pieces)
    assert set(pieces) - set(whole) == {3, 23}  # only where a piece stops off the grid


def test_moving_keeps_everything_and_moves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = build([13, 5], [6, 0], 4, [(1, 3), (0, 6)])
    assert layout.to("cpu") is layout
    transfers = []
    move = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, *a, **k: (transfers.append(t), move(t, *a, **k))[1]
    )
    moved = layout.to("meta")  # the only other device on every machine; it forgets the numbers
    assert len(transfers) == 1
    for name, value in vars(layout).items():
        if isinstance(value, torch.Tensor):
            assert getattr(moved, name).device.type == "meta"
            assert getattr(moved, name).shape == value.shape
        else:
            assert getattr(moved, name) == value
    # The numbers: where a field lies in what was sent, on a multiple of 16 bytes.
    for name, value in vars(layout).items():
        if isinstance(value, torch.Tensor):
            offset = getattr(moved, name).storage_offset()
            assert offset % 2 == 0
            assert torch.equal(transfers[0][offset : offset + value.numel()], value)


@pytest.mark.parametrize("checkpoint", [(2, 1), (-1, 1), (0, 0), (0, 14), (1, 6)])
def test_a_checkpoint_outside_its_query_is_refused(checkpoint: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"\({checkpoint[0]}, {checkpoint[1]}, 9\).*between 1"):
        build([13, 5], [6, 0], 4, [(0, 1), checkpoint])


def test_a_chunk_holds_a_token() -> None:
    with pytest.raises(ValueError, match="chunk_size=0"):
        build([3], [0], 0)
