"""The ghost's layers: what a Mamba and an attention layer do, in hashes and tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mamba_kernels import ReplayRing
from mamba_teach.ghost.hashes import NO_TOKEN, GhostError, extend_hash
from mamba_teach.ghost.memory import GhostMemory
from mamba_teach.model.metadata import (
    AttentionCache,
    AttentionMetadata,
    MambaCache,
    MambaMetadata,
)


def run_mamba(
    memory: GhostMemory, layer: int, tokens: list[int], metadata: MambaMetadata, cache: MambaCache
) -> list[int]:
    windows = cache.conv[:, :, 0].view(torch.int32)  # (slots, W - 1 + k)
    states = cache.ssm[:, 0, 0].view(torch.int32)  # (slots, 2): count, hash
    seen: list[int] = []
    first_prefill = 0
    if (d := metadata.decode) is not None:
        starts = d.query_start_loc.tolist()
        first_prefill = len(starts) - 1
        accepted = [1] * first_prefill
        if d.num_accepted_tokens is not None:
            accepted = d.num_accepted_tokens.tolist()
        for r in range(first_prefill):
            if starts[r] == starts[r + 1]:
                continue  # padding
            a = accepted[r]
            own = tokens[starts[r] : starts[r + 1]]
            if cache.ring is None:
                state = memory.read_state(layer, r, int(d.ssm_src_slots[r, a - 1]), states)
            else:
                state = memory.read_replayed(layer, r, d, states, cache.ring, own)
            window = memory.read_window(layer, r, int(d.conv_src_slots[r]), windows, a - 1)
            for i, token in enumerate(own):
                state = (state[0] + 1, extend_hash(state[1], token))
                memory.known.setdefault(state, f"a text that {memory.who(r)} guessed")
                window.append(token)
                seen.append(state[1])
                if cache.ring is None:
                    memory.write(states, int(d.ssm_dst_slots[r, i]), state)
            memory.write(windows, int(d.conv_dst_slots[r]), window[1:])
    if (p := metadata.prefill) is not None:
        starts = [s + metadata.num_decode_tokens for s in p.query_start_loc.tolist()]
        kept: dict[tuple[int, int], list[int]] = {}
        for seq, end, slot in [] if p.checkpoints is None else p.checkpoints.tolist():
            kept.setdefault((seq, end), []).append(slot)
        for r in range(len(starts) - 1):
            state, window = (0, 0), [NO_TOKEN] * 3
            if p.has_initial_state[r]:
                slot = int(p.src_slots[r])
                state = memory.read_state(layer, first_prefill + r, slot, states)
                window = memory.read_window(layer, first_prefill + r, slot, windows, 0)
            elif memory.rows[first_prefill + r].num_computed:
                raise GhostError(f"{memory.who(first_prefill + r)} starts from zero half-way")
            for i, token in enumerate(tokens[starts[r] : starts[r + 1]], start=1):
                state = (state[0] + 1, extend_hash(state[1], token))
                window = [*window[1:], token]
                seen.append(state[1])
                for slot in kept.get((r, i), []):
                    memory.write(states, slot, state)
                    memory.write(windows, slot, window)
            memory.write(states, int(p.dst_slots[r]), state)
            memory.write(windows, int(p.dst_slots[r]), window)
    return seen


def run_attention(
    memory: GhostMemory,
    layer: int,
    tokens: list[int],
    metadata: AttentionMetadata,
    cache: AttentionCache,
) -> list[int]:
    keys = cache.key[:, :, 0, 0].view(torch.int32)  # (pages, block size)
    size = keys.shape[1]
    where = metadata.slot_mapping
    owned = where >= size  # page 0 is the null page
    keys[(where // size)[owned], (where % size)[owned]] = torch.tensor(tokens, dtype=torch.int32)[
        owned
    ]
    seen: list[int] = []
    for r in metadata.query_start_loc.diff().nonzero()[:, 0].tolist():  # the others are padding
        row = memory.rows[r]
        length = row.num_computed + row.num_tokens
        pages = metadata.block_table[r, : -(-length // size)]
        found = keys[pages].flatten()[:length].tolist()
        own = tokens[len(seen) :][: row.num_tokens]
        needed = row.request.tokens(0, row.num_computed) + own
        if found != needed:
            i = next(i for i in range(length) if found[i] != needed[i])
            raise GhostError(
                f"page {int(pages[i // size])} (layer {layer}) holds another token than "
                f"{memory.who(r)} has at position {i}"
            )
        value = memory.hashes_of(row.request)[row.num_computed]
        for token in own:
            value = extend_hash(value, token)
            seen.append(value)
    return seen


def materialize_states(
    memory: GhostMemory,
    layers: Sequence[tuple[torch.Tensor, ReplayRing]],
    *,
    src_slots: torch.Tensor,
    ring_rows: torch.Tensor,
    ring_starts: torch.Tensor,
    num_inputs: torch.Tensor,
    dst_slots: torch.Tensor,
) -> None:
    """As :func:`mamba_kernels.materialize_states`, for hashes."""
    for ssm, ring in layers:
        states = ssm[:, 0, 0].view(torch.int32)
        for i, slot in enumerate(src_slots.tolist()):
            count, value = states[slot].tolist()
            entries = ring.x[int(ring_rows[i]), :, 0, 0].view(torch.int32)
            done = 0
            for stop, dst in zip(num_inputs[i].tolist(), dst_slots[i].tolist(), strict=True):
                for j in range(done, stop):
                    token = int(entries[(int(ring_starts[i]) + j) % ring.length])
                    count, value = count + 1, extend_hash(value, token)
                done = max(done, stop)
                if dst:
                    memory.write(states, dst, (count, value))
