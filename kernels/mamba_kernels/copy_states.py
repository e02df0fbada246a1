"""Moving states between slots: every layer's, in one launch.

When a speculative step fills a block of the cache, the state at the block's boundary lies in a
scratch slot and has to move to the block's own slot before the block can be published. That is a
short list of *(source slot, destination slot, window offset)* triples per step, the same for all
layers of a group, and two tensors per layer:

* the SSM state is copied whole: ``ssm_state[dst] = ssm_state[src]``;
* the conv window holds the inputs of several moments (see :mod:`mamba_kernels.conv1d`), and the
  wanted one begins at ``offset``. It moves to the front: ``conv_state[dst, :L - offset] =
  conv_state[conv_src, offset:]``; the last ``offset`` entries of the destination stay.

A verify step writes a state per token, each to its own slot, but one window for all of them, to the
first. So the two may come from different slots, and ``conv_src_slots`` says where the windows are.

Source and destination may be the same slot: then the window shifts in place, and nothing at all
happens if the offset is 0. A null (0) or negative source leaves its half of the destination as it is
(where states are kept in another way, only windows move); a null destination is padding.

The list is carried out in order. Destinations are distinct, and no triple reads what an *earlier*
one wrote, so "one after another" and "read all, then write all" are the same thing
(``debug_checks`` verifies it). A later one may overwrite what an earlier one has read: with
blocks of fewer tokens than a step, the step's first scratch slot is also the last block's own
slot.

States move as bits, not as numbers: dtypes do not matter, NaNs arrive intact.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mamba_kernels.backend import choose_backend, jit, tl
from mamba_kernels.checks import INT_DTYPES, check_slots, check_tensor, debug_enabled
from mamba_kernels.launch import AotCase, address_table, aot_case, cdiv, launch, next_power_of_2
from mamba_kernels.tuning import config_for

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


def copy_states(
    pairs: Pairs,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    window_offsets: torch.Tensor,
    *,
    conv_src_slots: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Copy states from slots to slots, in every layer.

    Args:
        pairs: ``(conv_state, ssm_state)`` of all layers: ``(slots, L, conv_dim)`` and
            ``(slots, H, P, N)``; shapes, dtypes and strides alike in all layers, contiguous inside
            a slot. **Mutated**: the destination slots.
        src_slots, dst_slots: ``(M,)`` int; a null source moves no state, a null destination nothing.
        window_offsets: ``(M,)`` int, ``0 .. L - 1``: where in the source's conv window the wanted
            history begins.
        conv_src_slots: ``(M,)`` int like ``src_slots``, where the windows are; None: in the same
            slots as the states.
        backend: force an implementation; None chooses by device.
    """
    if not pairs or src_slots.numel() == 0:
        return
    conv_src_slots = src_slots if conv_src_slots is None else conv_src_slots
    _check(pairs, src_slots, conv_src_slots, dst_slots, window_offsets)
    run = _copy_states_torch
    if choose_backend(pairs[0][0], backend) == "triton":
        run = _copy_states_triton
    run(pairs, src_slots, conv_src_slots, dst_slots, window_offsets)


def _check(
    pairs: Pairs, src_slots: torch.Tensor, conv_src_slots: torch.Tensor, dst_slots: torch.Tensor,
    window_offsets: torch.Tensor,
) -> None:  # fmt: skip
    for kind, (first, *others) in zip(("conv_state", "ssm_state"), zip(*pairs)):
        for layer, state in enumerate(others, start=1):
            same = (state.shape, state.stride(), state.dtype, state.device)
            if same != (first.shape, first.stride(), first.dtype, first.device):
                raise ValueError(
                    f"pairs[{layer}]: {kind} has shape {tuple(state.shape)}, strides "
                    f"{state.stride()}, {state.dtype} on {state.device}; expected those of layer "
                    f"0: {tuple(first.shape)}, {first.stride()}, {first.dtype} on {first.device}"
                )
        if first.shape[0] and not first[0].is_contiguous():
            raise ValueError(
                f"pairs: {kind} has strides {first.stride()} for shape {tuple(first.shape)}; "
                f"expected a slot to be contiguous (only the slot stride is free)"
            )
    conv_state, ssm_state = pairs[0]
    check_tensor("pairs[0][0] (conv_state)", conv_state, (ssm_state.shape[0], None, None))
    check_slots("src_slots", src_slots, (None,), conv_state)
    check_slots("conv_src_slots", conv_src_slots, src_slots.shape, conv_state)
    check_slots("dst_slots", dst_slots, src_slots.shape, conv_state)
    check_tensor("window_offsets", window_offsets, src_slots.shape, dtypes=INT_DTYPES,
                 like=conv_state, unit_stride=True)  # fmt: skip
    if debug_enabled():
        _check_contents(src_slots, conv_src_slots, dst_slots, window_offsets, conv_state.shape[1])


def _check_contents(
    src_slots: torch.Tensor, conv_src_slots: torch.Tensor, dst_slots: torch.Tensor,
    window_offsets: torch.Tensor, window_len: int,
) -> None:  # fmt: skip
    written: set[int] = set()
    columns = (src_slots, conv_src_slots, dst_slots, window_offsets)
    for src, conv_src, dst, offset in zip(*(column.tolist() for column in columns)):
        if dst == 0 or src == conv_src == 0:
            continue
        if not 0 <= offset < window_len:
            raise ValueError(f"window_offsets holds {offset}; allowed: 0 .. {window_len - 1}")
        for name, slot in (("src_slots", src), ("conv_src_slots", conv_src)):
            if slot in written:
                raise ValueError(f"{name} holds {slot}, which an earlier triple has written")
        if dst in written:
            raise ValueError(f"dst_slots holds {dst} twice; destinations must be distinct")
        written.add(dst)


def _copy_states_torch(
    pairs: Pairs, src_slots: torch.Tensor, conv_src_slots: torch.Tensor, dst_slots: torch.Tensor,
    window_offsets: torch.Tensor,
) -> None:  # fmt: skip
    has_state, has_window = (src_slots > 0) & (dst_slots > 0), (conv_src_slots > 0) & (dst_slots > 0)
    src, dst = src_slots[has_state].long(), dst_slots[has_state].long()
    conv_src, conv_dst = conv_src_slots[has_window].long(), dst_slots[has_window].long()
    window_len = pairs[0][0].shape[1]
    entry = torch.arange(window_len, device=src.device)
    taken = window_offsets[has_window].long()[:, None] + entry  # (M', L)
    inside = (taken < window_len)[..., None]
    taken = taken.clamp(max=window_len - 1)
    for conv_state, ssm_state in pairs:
        # Indexing copies, so all is read before anything is written.
        moved = torch.where(inside, conv_state[conv_src[:, None], taken], conv_state[conv_dst])
        conv_state[conv_dst] = moved
        ssm_state[dst] = ssm_state[src]


# fmt: off
# ---------------------------------------------------------------------------------------------
# Triton
# ---------------------------------------------------------------------------------------------
# A kernel takes tensors one by one, and a model has dozens of layers. So it gets two small tables
# with the layers' addresses and makes pointers of them itself.
#
# A program owns a run of words of every slot of one layer (of the SSM state, or of the channels
# of the conv window) and goes through the list of triples with it. Whatever one triple reads and
# another writes, the same program does both, in order, at the same places of its tile: no race is
# possible without any synchronisation between programs. In most steps no triple is live, and a
# program finds out with one look at the list (a vector load), not by walking it.
#
# All moves are in words of 8 bytes where addresses and sizes allow it; then two neighbouring
# words are one 16-byte access of a thread.


@jit(do_not_specialize=["num_triples"])
def copy_states_kernel(
    conv_table_ptr, ssm_table_ptr, src_slots_ptr, conv_src_slots_ptr, dst_slots_ptr, offsets_ptr,
    num_triples,
    stride_conv_slot, stride_ssm_slot,
    WINDOW_LEN: tl.constexpr, CONV_WORDS: tl.constexpr, SSM_WORDS: tl.constexpr,
    WORD: tl.constexpr, ALIGNMENT: tl.constexpr, SSM_TILES: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, BLOCK_TRIPLES: tl.constexpr,
):
    tile, layer = tl.program_id(0), tl.program_id(1)
    is_conv = tile >= SSM_TILES
    table_ptr = tl.where(is_conv, conv_table_ptr, ssm_table_ptr)
    base = tl.load(table_ptr + layer).to(tl.pointer_type(WORD))
    base = tl.multiple_of(base, ALIGNMENT)

    for first in range(0, num_triples, BLOCK_TRIPLES):
        m = first + tl.arange(0, BLOCK_TRIPLES)
        m_mask = m < num_triples
        src_block = tl.load(src_slots_ptr + m, mask=m_mask, other=0)
        conv_src_block = tl.load(conv_src_slots_ptr + m, mask=m_mask, other=0)
        dst_block = tl.load(dst_slots_ptr + m, mask=m_mask, other=0)
        live = ((src_block > 0) | (conv_src_block > 0)) & (dst_block > 0)
        if tl.sum(live.to(tl.int32), axis=0) > 0:
            for i in range(first, tl.minimum(first + BLOCK_TRIPLES, num_triples)):
                src = tl.load(src_slots_ptr + i).to(tl.int64)
                conv_src = tl.load(conv_src_slots_ptr + i).to(tl.int64)
                dst = tl.load(dst_slots_ptr + i).to(tl.int64)
                offset = tl.load(offsets_ptr + i).to(tl.int64)
                if dst > 0:
                    if is_conv & (conv_src > 0):
                        # Entry by entry, front to back: an in-place shift never reads an entry
                        # that it has already overwritten.
                        word = (tile - SSM_TILES) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
                        for entry in range(0, WINDOW_LEN - offset):
                            value = tl.load(base + conv_src * stride_conv_slot
                                            + (entry + offset) * CONV_WORDS + word,
                                            mask=word < CONV_WORDS)
                            tl.store(base + dst * stride_conv_slot + entry * CONV_WORDS + word,
                                     value, mask=word < CONV_WORDS)
                    if (tile < SSM_TILES) & (src > 0):
                        word = tile * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
                        if src != dst:
                            value = tl.load(base + src * stride_ssm_slot + word,
                                            mask=word < SSM_WORDS)
                            tl.store(base + dst * stride_ssm_slot + word, value,
                                     mask=word < SSM_WORDS)


_WORD_TYPES = {8: "int64", 4: "int32", 2: "int16", 1: "int8"}


def _copy_states_triton(
    pairs: Pairs, src_slots: torch.Tensor, conv_src_slots: torch.Tensor, dst_slots: torch.Tensor,
    window_offsets: torch.Tensor,
) -> None:
    conv_state, ssm_state = pairs[0]
    conv_addresses, ssm_addresses = (
        tuple(state.data_ptr() for state in states) for states in zip(*pairs)
    )
    entry_bytes = conv_state[0, 0].numel() * conv_state.element_size()
    ssm_bytes = ssm_state[0].numel() * ssm_state.element_size()
    conv_page = conv_state.stride(0) * conv_state.element_size()
    ssm_page = ssm_state.stride(0) * ssm_state.element_size()
    alignment = math.gcd(16, entry_bytes, ssm_bytes, conv_page, ssm_page,
                         *conv_addresses, *ssm_addresses)
    word = min(alignment, 8)
    config = config_for("copy_states_kernel")
    block = min(config.pop("BLOCK_WORDS"), next_power_of_2(max(entry_bytes, ssm_bytes) // word))
    ssm_tiles, conv_tiles = cdiv(ssm_bytes // word, block), cdiv(entry_bytes // word, block)
    launch(
        copy_states_kernel,
        (ssm_tiles + conv_tiles, len(pairs)),
        address_table(conv_addresses, conv_state.device),
        address_table(ssm_addresses, conv_state.device),
        src_slots, conv_src_slots, dst_slots, window_offsets, src_slots.numel(),
        conv_page // word, ssm_page // word,
        WINDOW_LEN=conv_state.shape[1], CONV_WORDS=entry_bytes // word, SSM_WORDS=ssm_bytes // word,
        WORD=getattr(tl, _WORD_TYPES[word]), ALIGNMENT=alignment, SSM_TILES=ssm_tiles,
        BLOCK_WORDS=block, BLOCK_TRIPLES=128, **config,
    )


def aot_cases() -> list[AotCase]:
    """Nemotron-H's states: 128 heads of 64 or 80, state 128, fp32; windows of 3 + 3 bf16 inputs."""
    cases = []
    for head_dim, conv_dim in ((64, 10240), (80, 12288)):
        config = config_for("copy_states_kernel", "sm_90")
        warps, stages = config.pop("num_warps"), config.pop("num_stages")
        conv_words, ssm_words = conv_dim * 2 // 8, 128 * head_dim * 128 * 4 // 8
        constexprs = dict(WINDOW_LEN=6, CONV_WORDS=conv_words, SSM_WORDS=ssm_words, WORD=tl.int64,
                          ALIGNMENT=16, SSM_TILES=cdiv(ssm_words, config["BLOCK_WORDS"]),
                          BLOCK_TRIPLES=128) | config
        pointers = {"conv_table_ptr": "*i64", "ssm_table_ptr": "*i64", "src_slots_ptr": "*i32",
                    "conv_src_slots_ptr": "*i32", "dst_slots_ptr": "*i32", "offsets_ptr": "*i32"}
        case = aot_case(copy_states_kernel, f"copy states P{head_dim}", pointers, constexprs,
                        num_warps=warps, num_stages=stages)
        cases.append(case)
    return cases
