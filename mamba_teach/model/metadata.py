"""What a layer must be told about a step, besides its inputs.

The tokens of all requests travel packed in one ``(T, hidden)`` tensor, decode rows first. A Mamba2
layer then needs to know which slots to read and write; an attention layer needs the block tables.
Both are worked out once per step and group by ``mamba_teach.runner`` and handed to every layer of
the group. A layer never sees a block table column of a Mamba state: only slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from mamba_kernels import ChunkLayout, ReplayRing, build_chunk_layout
from mamba_teach.config import ModelConfig


@dataclass(frozen=True)
class MambaDecode:
    """Rows that compute their last sampled token and ``0 .. k`` drafts. ``D`` rows.

    Attributes:
        query_start_loc: ``(D + 1,)`` int32.
        conv_src_slots, conv_dst_slots: ``(D,)`` int32.
        ssm_src_slots, ssm_dst_slots: ``(D, 1 + k)`` int32; with replay ``(D, 1)``, the checkpoint and
            where a new one goes.
        num_accepted_tokens: ``(D,)`` int32, or None without speculation.
        ring_rows, ring_starts, num_pending: ``(D,)`` int32, with replay only.
    """

    query_start_loc: torch.Tensor
    conv_src_slots: torch.Tensor
    conv_dst_slots: torch.Tensor
    ssm_src_slots: torch.Tensor
    ssm_dst_slots: torch.Tensor
    num_accepted_tokens: torch.Tensor | None = None
    ring_rows: torch.Tensor | None = None
    ring_starts: torch.Tensor | None = None
    num_pending: torch.Tensor | None = None


@dataclass(frozen=True)
class MambaPrefill:
    """Rows that fold known tokens into their state. ``P`` rows; positions count from their first token.

    Attributes:
        query_start_loc: ``(P + 1,)`` int32.
        num_computed_tokens: ``(P,)`` int32.
        src_slots, dst_slots: ``(P,)`` int32.
        has_initial_state: ``(P,)`` bool.
        layout: the chunks of these rows.
        checkpoints: ``(C, 3)`` int32 or None.
    """

    query_start_loc: torch.Tensor
    num_computed_tokens: torch.Tensor
    src_slots: torch.Tensor
    dst_slots: torch.Tensor
    has_initial_state: torch.Tensor
    layout: ChunkLayout
    checkpoints: torch.Tensor | None = None


@dataclass(frozen=True)
class MambaMetadata:
    """One group's Mamba rows of a step: ``num_decode_tokens`` tokens of decode rows, then prefill."""

    num_decode_tokens: int
    decode: MambaDecode | None
    prefill: MambaPrefill | None


@dataclass(frozen=True)
class AttentionMetadata:
    """One group's attention rows of a step. ``R`` rows, ``T`` tokens.

    Attributes:
        query_start_loc: ``(R + 1,)`` int64.
        seq_lens: ``(R,)`` int64, tokens including this step's.
        block_table: ``(R, width)`` int64 page numbers.
        slot_mapping: ``(T,)`` int64, ``page * block_size + offset`` of every token's key and value.
        max_query_len, max_seq_len: host numbers that size the padded rectangles.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True)
class MambaCache:
    """One layer's states: ``conv (slots, W-1+k, conv_dim)`` and ``ssm (slots, H, P, N)``; strided.

    With replay also a ring of inputs per request.
    """

    conv: torch.Tensor
    ssm: torch.Tensor
    ring: ReplayRing | None = None

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What slots are numbers of."""
        return self.conv, self.ssm


@dataclass(frozen=True)
class AttentionCache:
    """One layer's keys and values, each ``(pages, block_size, kv_heads, head_dim)``, maybe strided."""

    key: torch.Tensor
    value: torch.Tensor

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What page numbers are numbers of."""
        return self.key, self.value


LayerMetadata = MambaMetadata | AttentionMetadata | None
LayerCache = MambaCache | AttentionCache | None


def uncached_step(
    config: ModelConfig, lengths: list[int], device: torch.device | str = "cpu", chunk_size: int = 64
) -> tuple[list[LayerMetadata], list[LayerCache]]:
    """Metadata and caches for whole sequences from scratch, where nothing is kept.

    This is how the model is trained, and how a notebook asks for the logits of a text without an
    engine: every row is a prefill from zero whose destination is the null slot. The caches hold the
    null slot alone.

    Args:
        config: of the model.
        lengths: tokens of each packed sequence.
        device: where the model lives.
        chunk_size: SSD chunk length.

    Returns:
        One metadata and one cache per layer, MTP layers included.
    """
    ends = torch.tensor([0, *accumulate(lengths)], device=device)
    rows = len(lengths)
    none = torch.zeros(rows, dtype=torch.int32, device=device)
    mamba = MambaMetadata(
        num_decode_tokens=0,
        decode=None,
        prefill=MambaPrefill(
            query_start_loc=ends.int(),
            num_computed_tokens=none,
            src_slots=none,
            dst_slots=none,
            has_initial_state=none.bool(),
            layout=build_chunk_layout(ends, none, chunk_size),
        ),
    )
    attention = AttentionMetadata(
        query_start_loc=ends,
        seq_lens=ends.diff(),
        block_table=ends.new_zeros(rows, 0),
        slot_mapping=ends.new_zeros(0),
        max_query_len=max(lengths, default=0),
        max_seq_len=max(lengths, default=0),
    )
    null_slot = MambaCache(
        conv=torch.zeros(1, config.conv_kernel - 1, config.conv_dim, device=device),
        ssm=torch.zeros(
            1, config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, device=device
        ),
    )
    kinds = config.pattern + config.mtp_pattern
    metadata: dict[str, LayerMetadata] = {"M": mamba, "*": attention, "-": None}
    caches: dict[str, LayerCache] = {"M": null_slot, "*": None, "-": None}
    return [metadata[kind] for kind in kinds], [caches[kind] for kind in kinds]
