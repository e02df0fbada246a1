"""Warm-up: launch every kernel variant that serving can need, before anybody waits for it.

A Triton kernel is compiled at its first launch, once per *variant*: per combination of data types,
compile-time numbers, and whether a pointer is aligned to 16 bytes. In the middle of a step that is a
hiccup; in the middle of a CUDA-graph capture it is an error. So the runner runs a few tiny batches
through the model at start-up. All of them work on the null slot, which no kernel reads or writes:
what the cache holds is not touched.

What makes variants of a model's kernels: decode rows, prefill rows without and with checkpoints, and
prefill rows that stand behind an odd number of decode tokens, where the rows of a projection need not
begin on an aligned address. The scan has two forms, and few prefill rows may run one of them and many
the other (:func:`mamba_kernels.chunk_scan_launch.choose_form`), so there are batches of one row and of
as many as fill a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product

import torch

from mamba_kernels import build_chunk_layout
from mamba_kernels.tuning import programs_to_fill
from mamba_teach.cache.groups import CacheGroup
from mamba_teach.cache.specs import MambaSpec
from mamba_teach.model.metadata import (
    AttentionMetadata,
    LayerCache,
    LayerMetadata,
    MambaDecode,
    MambaMetadata,
    MambaPrefill,
)
from mamba_teach.runner.served_model import ServedModel

PREFILL_LENGTHS = (5, 8)  # rows that begin on an unaligned address, and on an aligned one


@torch.inference_mode()
def warm_up(
    model: ServedModel,
    groups: Sequence[CacheGroup],
    caches: Sequence[LayerCache],
    chunk_size: int,
    num_speculative_tokens: int = 0,
) -> None:
    """Run every kind of batch once, on the null slot.

    Args:
        model: on its device.
        groups: which layers are what.
        caches: the engine's own, because strides and types are part of a variant.
        chunk_size: SSD chunk length of the engine's prefills.
        num_speculative_tokens: drafts per step (k); with k > 0 decode rows read a count of accepted
            tokens and have 1 + k slots, which makes other variants of the decode kernels.
    """
    device = model.device
    fill = programs_to_fill()  # a row is at least one program of the scan (and the first is short)
    prefills = list(product((1,) if fill == 1 else (1, fill + 1), PREFILL_LENGTHS, (False, True)))
    for num_decodes in (0, 1, 2):
        for rows, length, with_checkpoints in ((0, 0, False), *prefills):
            lengths = [length, *[PREFILL_LENGTHS[-1]] * (rows - 1)] if rows else []
            num_tokens = num_decodes + sum(lengths)
            if num_tokens == 0:
                continue
            decode = _decode(num_decodes, num_speculative_tokens, uses_replay(groups), device)
            prefill = _prefill(lengths, with_checkpoints, chunk_size, device) if rows else None
            mamba = MambaMetadata(num_decodes, decode, prefill)
            attention = _attention([1] * num_decodes + lengths, device)
            metadata: list[LayerMetadata] = [None] * len(caches)
            used: list[LayerCache] = [None] * len(caches)  # attention gets none: it writes no page
            for group in groups:
                for layer in group.layers:
                    metadata[layer] = mamba if group.spec.kind == "mamba" else attention
                    used[layer] = caches[layer] if group.spec.kind == "mamba" else None
            model(torch.zeros(num_tokens, dtype=torch.long, device=device), metadata, used)


def uses_replay(groups: Sequence[CacheGroup]) -> bool:
    """Whether decode rows keep inputs instead of states."""
    return any(isinstance(g.spec, MambaSpec) and g.spec.ring is not None for g in groups)


def _decode(rows: int, k: int, replay: bool, device: torch.device) -> MambaDecode | None:
    """Decode rows of one token each, all on the null slot."""
    if rows == 0:
        return None
    null = torch.zeros(rows, 1 if replay else 1 + k, dtype=torch.int32, device=device)
    ring = {name: null[:, 0].clone() for name in ("ring_rows", "ring_starts", "num_pending")}
    return MambaDecode(
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device),
        conv_src_slots=null[:, 0].clone(),
        conv_dst_slots=null[:, 0].clone(),
        ssm_src_slots=null,
        ssm_dst_slots=null,
        num_accepted_tokens=torch.ones(rows, dtype=torch.int32, device=device) if k else None,
        **(ring if replay else {}),
    )


def _prefill(
    lengths: Sequence[int], with_checkpoints: bool, chunk_size: int, device: torch.device
) -> MambaPrefill:
    """Prefill rows that keep nothing."""
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    none = torch.zeros(len(lengths), dtype=torch.int32)
    null = torch.tensor([[0, lengths[0], 0]], dtype=torch.int32)
    checkpoints = null if with_checkpoints else None
    layout = build_chunk_layout(starts, none, chunk_size, checkpoints)
    return MambaPrefill(
        query_start_loc=starts.to(device),
        num_computed_tokens=none.to(device),
        src_slots=none.to(device),
        dst_slots=none.to(device),
        has_initial_state=none.bool().to(device),
        layout=layout.to(device),
        checkpoints=None if checkpoints is None else checkpoints.to(device),
    )


def _attention(query_lens: Sequence[int], device: torch.device) -> AttentionMetadata:
    """Attention runs on torch's kernels, which need no warming; without a cache it keeps nothing."""
    lengths = torch.tensor(query_lens, device=device)
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return AttentionMetadata(
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=starts.new_zeros(len(lengths), 0),
        slot_mapping=starts.new_zeros(0),
        max_query_len=int(lengths.max()),
        max_seq_len=int(lengths.max()),
    )
