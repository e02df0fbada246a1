"""The ghost model: symbolic states instead of numbers, so that a wrong slot is an exact error.

A real model hides mistakes: a state that is slightly wrong gives slightly wrong logits, and mostly the
same token. The ghost's "SSM state" is a count of tokens and a rolling hash of *all* of them, its
"convolution window" is the last tokens themselves, its "keys" are tokens too. It runs the real
scheduler, cache, block tables and slot tensors, in the engine's own memory. Before it uses a state it
compares it with what the request must have had, and says exactly what it found:

    slot 7 (mamba 0) holds the state after 12 tokens of r0; r3 needs its own after 16

The next token is a function of the hash, so it depends on every token before it. Thousands of steps
take seconds: this is the model that the property tests run on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mamba_kernels import ReplayRing, must_flush
from mamba_kernels.launch import launch
from mamba_teach.config import ModelConfig
from mamba_teach.model.metadata import (
    AttentionCache,
    AttentionMetadata,
    LayerCache,
    LayerMetadata,
    MambaCache,
    MambaDecode,
    MambaMetadata,
)
from mamba_teach.request import Request
from mamba_teach.scheduler import ScheduledRow
from mamba_teach.spec_decode.proposer import DraftContext, DraftRow

MODULUS = 2**31 - 1  # hashes fit an int32 entry of the pool
MULTIPLIER = 1_103_515_245
NO_TOKEN = -1  # in a window, before the first token


class GhostError(AssertionError):
    """A state, a window or a key is not what its reader needs."""


def extend_hash(value: int, token: int) -> int:
    """Rolling hash of a prefix and one more token."""
    return (value * MULTIPLIER + token + 1) % MODULUS


class GhostKernel:
    """A plain function that is launched like a kernel: ``kernel[grid](*args)``."""

    def __init__(self, run: Callable[..., None]) -> None:
        def ghost_kernel(*args: Any) -> None:
            run(*args)

        self.fn = ghost_kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.fn


class GhostModel:
    """A model whose states say what they are.

    Attributes:
        config: sizes, chosen so that a page of 4 tokens or more holds a state.
        supports_checkpoints: False makes the engine fall back to mode "align".
        draft_accuracy: how often each of its drafts is right.
    """

    name = "by the ghost itself"
    tokenizer = None
    device = torch.device("cpu")

    def __init__(
        self,
        layers: str = "MM*M",
        *,
        vocab_size: int = 97,
        supports_checkpoints: bool = True,
        draft_accuracy: float = 0.7,
    ) -> None:
        self.config = ModelConfig(
            vocab_size=vocab_size, hidden_size=1, pattern=layers, mamba_num_heads=1,
            mamba_head_dim=1, ssm_state_size=2, num_attention_heads=1, num_key_value_heads=1,
            head_dim=8,
        )  # fmt: skip
        self.supports_checkpoints = supports_checkpoints
        self.draft_accuracy = draft_accuracy
        self._kernel = GhostKernel(self._run)
        self._rows: Sequence[ScheduledRow] = ()
        self._prefix_hashes: dict[str, tuple[Request, list[int]]] = {}
        self._known: dict[tuple[int, int], str] = {(0, 0): "nothing"}

    def place(self, device: torch.device, dtype: torch.dtype) -> GhostModel:
        """The ghost lives on the CPU, in integers."""
        return self

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What it says after ``prompt``: the closed form, without any engine."""
        value = 0
        for token in prompt:
            value = extend_hash(value, token)
        said = []
        for _ in range(num_tokens):
            said.append(self._next_token(value))
            value = extend_hash(value, said[-1])
        return said

    def propose(self, rows: Sequence[DraftRow], context: DraftContext) -> list[list[int]]:
        """Drafts that are right with ``draft_accuracy``; the same ones for the same text."""
        drafts = []
        for row in rows:
            guesses: list[int] = []
            if row.max_drafts > 0:
                value = self._hashes_of(row.request)[-1]
                for token in row.new_tokens:
                    value = extend_hash(value, token)
                for _ in range(row.max_drafts):
                    guess = self._next_token(value)
                    if value * 40_503 // 257 % 1000 >= 1000 * self.draft_accuracy:
                        guess = (guess + 1) % self.config.vocab_size
                    guesses.append(guess)
                    value = extend_hash(value, guess)
            drafts.append(guesses)
        return drafts

    def watch_step(self, rows: Sequence[ScheduledRow]) -> None:
        """Learn who is in the batch, and so what every state must be."""
        self._rows = rows
        for row in rows:
            self._hashes_of(row.request)

    def _hashes_of(self, request: Request) -> list[int]:
        """Hashes of all prefixes of the request's known tokens, the empty one first."""
        known, hashes = self._prefix_hashes.get(request.request_id, (None, []))
        if known is not request:  # another engine's request of that name, perhaps
            hashes = [0]
            self._prefix_hashes[request.request_id] = request, hashes
        for token in request.tokens(len(hashes) - 1, request.num_tokens):
            hashes.append(extend_hash(hashes[-1], token))
            self._known.setdefault((len(hashes) - 1, hashes[-1]), request.request_id)
        return hashes

    def __call__(
        self,
        input_ids: torch.Tensor,
        metadata: Sequence[LayerMetadata],
        caches: Sequence[LayerCache],
    ) -> torch.Tensor:
        """Hashes after every token, ``(T, layers that keep something)`` int64; 0 for padding."""
        kept = sum(of_layer is not None for of_layer in metadata)
        hashes = torch.empty(len(input_ids), kept, dtype=torch.int64)
        # Through the door of the kernels, so that a graph can record it like one of them.
        launch(self._kernel, (1,), hashes, input_ids, list(metadata), list(caches))
        return hashes

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """One-hot of the next token; layers that disagree spoil it."""
        token = self._next_token(hidden.sum(-1) // hidden.shape[-1])
        return (torch.arange(self.config.vocab_size) == token[:, None]).float()

    def _next_token(self, value: Any) -> Any:
        """The token after a prefix of this hash: of an int, or of a tensor of ints."""
        return value * 2_654_435_761 // 65_536 % self.config.vocab_size

    def _run(
        self,
        hashes: torch.Tensor,
        input_ids: torch.Tensor,
        metadata: Sequence[LayerMetadata],
        caches: Sequence[LayerCache],
    ) -> None:
        tokens = input_ids.tolist()
        column = 0
        for layer, (of_layer, cache) in enumerate(zip(metadata, caches, strict=True)):
            if isinstance(of_layer, MambaMetadata):
                assert isinstance(cache, MambaCache)
                seen = self._mamba(layer, tokens, of_layer, cache)
            elif isinstance(of_layer, AttentionMetadata):
                assert isinstance(cache, AttentionCache)
                seen = self._attention(layer, tokens, of_layer, cache)
            else:
                continue
            hashes[:, column] = torch.tensor(seen + [0] * (len(tokens) - len(seen)))
            column += 1

    # Layers -------------------------------------------------------------------------------------

    def _mamba(
        self, layer: int, tokens: list[int], metadata: MambaMetadata, cache: MambaCache
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
                window = self._read_window(layer, r, int(d.conv_src_slots[r]), windows, a - 1)
                own = tokens[starts[r] : starts[r + 1]]
                if cache.ring is None:
                    state = self._read_state(layer, r, int(d.ssm_src_slots[r, a - 1]), states)
                else:
                    state = self._replay(layer, r, d, states, cache.ring, own)
                for i, token in enumerate(own):
                    state = (state[0] + 1, extend_hash(state[1], token))
                    self._known.setdefault(state, f"a text that {self._who(r)} guessed")
                    window.append(token)
                    seen.append(state[1])
                    if cache.ring is None:
                        self._write(states, int(d.ssm_dst_slots[r, i]), state)
                self._write(windows, int(d.conv_dst_slots[r]), window[1:])
        if (p := metadata.prefill) is not None:
            starts = [s + metadata.num_decode_tokens for s in p.query_start_loc.tolist()]
            kept: dict[tuple[int, int], list[int]] = {}
            for seq, end, slot in [] if p.checkpoints is None else p.checkpoints.tolist():
                kept.setdefault((seq, end), []).append(slot)
            for r in range(len(starts) - 1):
                state, window = (0, 0), [NO_TOKEN] * 3
                if p.has_initial_state[r]:
                    slot = int(p.src_slots[r])
                    state = self._read_state(layer, first_prefill + r, slot, states)
                    window = self._read_window(layer, first_prefill + r, slot, windows, 0)
                elif self._rows[first_prefill + r].num_computed:
                    raise GhostError(f"{self._who(first_prefill + r)} starts from zero half-way")
                for i, token in enumerate(tokens[starts[r] : starts[r + 1]], start=1):
                    state = (state[0] + 1, extend_hash(state[1], token))
                    window = [*window[1:], token]
                    seen.append(state[1])
                    for slot in kept.get((r, i), []):
                        self._write(states, slot, state)
                        self._write(windows, slot, window)
                self._write(states, int(p.dst_slots[r]), state)
                self._write(windows, int(p.dst_slots[r]), window)
        return seen

    def _attention(
        self, layer: int, tokens: list[int], metadata: AttentionMetadata, cache: AttentionCache
    ) -> list[int]:
        keys = cache.key[:, :, 0, 0].view(torch.int32)  # (pages, block size)
        size = keys.shape[1]
        where = metadata.slot_mapping
        owned = where >= size  # page 0 is the null page
        keys[(where // size)[owned], (where % size)[owned]] = torch.tensor(
            tokens, dtype=torch.int32
        )[owned]
        seen: list[int] = []
        for r in metadata.query_start_loc.diff().nonzero()[:, 0].tolist():  # the others are padding
            row = self._rows[r]
            length = row.num_computed + row.num_tokens
            pages = metadata.block_table[r, : -(-length // size)]
            found = keys[pages].flatten()[:length].tolist()
            own = tokens[len(seen) :][: row.num_tokens]
            needed = row.request.tokens(0, row.num_computed) + own
            if found != needed:
                i = next(i for i in range(length) if found[i] != needed[i])
                raise GhostError(
                    f"page {int(pages[i // size])} (layer {layer}) holds another token than "
                    f"{self._who(r)} has at position {i}"
                )
            value = self._hashes_of(row.request)[row.num_computed]
            for token in own:
                value = extend_hash(value, token)
                seen.append(value)
        return seen

    # States -------------------------------------------------------------------------------------

    def _replay(
        self,
        layer: int,
        row: int,
        rows: MambaDecode,
        states: torch.Tensor,
        ring: ReplayRing,
        own: list[int],
    ) -> tuple[int, int]:
        """The state before a row's tokens, from its checkpoint and pending inputs; appends its own."""
        assert rows.ring_rows is not None
        assert rows.ring_starts is not None and rows.num_pending is not None
        pending, start = int(rows.num_pending[row]), int(rows.ring_starts[row])
        entries = ring.x[int(rows.ring_rows[row]), :, 0, 0].view(torch.int32)
        n, request = self._rows[row].num_computed, self._rows[row].request
        state = self._read_state(
            layer, row, int(rows.ssm_src_slots[row, 0]), states, num_pending=pending
        )
        found = [int(entries[(start + i) % ring.length]) for i in range(pending)]
        needed = request.tokens(n - pending, n)
        if found != needed:
            raise GhostError(
                f"the ring of {self._who(row)} (layer {layer}) holds {found} behind token "
                f"{n - pending}; {needed} is needed"
            )
        for token in found:
            state = (state[0] + 1, extend_hash(state[1], token))
        if must_flush(pending, ring.max_query_len, ring.capacity):
            self._write(states, int(rows.ssm_dst_slots[row, 0]), state)
        for i, token in enumerate(own):
            entries[(start + pending + i) % ring.length] = token
        return state

    def materialize_states(
        self,
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
                        self._write(states, dst, (count, value))

    def _read_state(
        self, layer: int, row: int, slot: int, states: torch.Tensor, num_pending: int = 0
    ) -> tuple[int, int]:
        count, value = states[slot].tolist()
        n = self._rows[row].num_computed - num_pending
        if slot == 0:
            raise GhostError(f"{self._who(row)} reads the null slot (layer {layer})")
        _, hashes = self._prefix_hashes[self._rows[row].request.request_id]
        if (count, value) != (n, hashes[n]):
            owner = self._known.get((count, value))
            holds = f"the state after {count} tokens of {owner}" if owner else "no state"
            raise GhostError(
                f"slot {slot} (layer {layer}) holds {holds}; {self._who(row)} needs its own after {n}"
            )
        return count, value

    def _read_window(
        self, layer: int, row: int, slot: int, windows: torch.Tensor, offset: int
    ) -> list[int]:
        found = windows[slot, offset : offset + 3].tolist()
        n = self._rows[row].num_computed
        needed = [NO_TOKEN] * (3 - n) + self._rows[row].request.tokens(max(0, n - 3), n)
        if found != needed:
            raise GhostError(
                f"slot {slot} (layer {layer}) holds the window {found}; {self._who(row)} needs "
                f"{needed} after {n} tokens"
            )
        return found

    def _write(self, pool: torch.Tensor, slot: int, content: Sequence[int]) -> None:
        if slot == 0:
            raise GhostError("somebody writes the null slot")
        pool[slot, : len(content)] = torch.tensor(content, dtype=torch.int32)

    def _who(self, row: int) -> str:
        return self._rows[row].request.request_id
