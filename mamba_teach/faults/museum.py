"""The museum: every exhibit, in the order of a tour.

It begins with the three bugs of vLLM issue 39809, each hidden by the one before it, goes on to those
that hid behind *them*, and then from room to room: rows and their memory, buffers and graphs,
sentinels and padding, the cache, the arithmetic.
"""

from __future__ import annotations

from mamba_teach.faults import (
    graph_buffers,
    numerics,
    publishing_and_hits,
    row_memory,
    sentinels_and_padding,
    tables_and_gathers,
)
from mamba_teach.faults.exhibit import Exhibit

EXHIBITS: tuple[Exhibit, ...] = (
    tables_and_gathers.TABLE_WITHOUT_SCRATCH,
    graph_buffers.BUFFERS_CUT_BY_TOKENS,
    tables_and_gathers.ONE_SLOT_GATHER,
    tables_and_gathers.ONE_TENSOR_FOR_BOTH,
    tables_and_gathers.INDEX_PAST_ALLOCATION,
    tables_and_gathers.WINDOW_THROUGH_WRONG_ANCHOR,
    publishing_and_hits.WRONG_STATE_PUBLISHED,
    publishing_and_hits.SPECULATION_MEANS_ALIGN,
    row_memory.COUNTS_PERMUTED_TWICE,
    row_memory.ANCHOR_OUTLIVES_BLOCKS,
    row_memory.SLOT_NOT_CLEARED,
    graph_buffers.GROUPS_SHARE_BUFFERS,
    graph_buffers.TAIL_CAPTURED,
    graph_buffers.STALE_ROW,
    graph_buffers.CAPTURED_TOO_NARROW,
    sentinels_and_padding.GUARD_FOR_OLD_SENTINEL,
    sentinels_and_padding.SENTINEL_REMAPPED,
    sentinels_and_padding.NULL_BLOCK_HANDED_OUT,
    sentinels_and_padding.PADDED_TAIL_FOLDED_IN,
    sentinels_and_padding.DECODE_BY_LENGTH,
    publishing_and_hits.PUBLISHED_AT_ALLOCATION,
    publishing_and_hits.SPARSE_HIT_TRIMMED,
    publishing_and_hits.CHECKPOINT_SHIFTED,
    numerics.DECAY_FROM_CHUNK_START,
)


def exhibit(name: str) -> Exhibit:
    """The exhibit of that name.

    Raises:
        KeyError: there is none; lists those that there are.
    """
    for candidate in EXHIBITS:
        if candidate.name == name:
            return candidate
    raise KeyError(f"no exhibit {name!r}; there are {', '.join(e.name for e in EXHIBITS)}")
