"""A small server for the replay kernels: it keeps cursors as the engine does, and checks every step.

Random numbers of tokens a step, random numbers of them kept, new checkpoints in place and elsewhere.
What the kernels may not read is NaN, always: the slots that nobody owns, the entries of the ring that
are not pending, rows that belong to nobody. The yardstick is the float64 recurrence, token by token from
the beginning.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from support.kernel_reference import TOLERANCE, Pool, assert_close, f64, ssm

from mamba_kernels import ReplayRing, materialize_states, must_flush, replay_state_update
from mamba_kernels.checks import debug_checks

happened: Counter[str] = Counter()  # what the steps of all servers met


class Layer:
    """Weights, states and inputs of a layer, and what its states should be."""

    def __init__(
        self, rows: int, slots: int, capacity: int, k: int, generator: torch.Generator, *,
        heads: int, head_dim: int, state_size: int, groups: int, dtype: torch.dtype,
        state_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.generator, self.dtype, self.groups = generator, dtype, groups
        self.shape = (heads, head_dim, state_size)
        self.A = -torch.rand(heads, generator=generator) * 0.5  # what is forgotten cannot be wrong
        self.D, self.dt_bias = self.randn(heads), self.randn(heads)
        self.pool = Pool(slots, self.shape, dtype=state_dtype)
        length = capacity + 1 + k

        def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((rows, length, *shape), math.nan, dtype=dtype)

        self.ring = ReplayRing(
            nan(heads, head_dim, dtype=dtype), nan(groups, state_size, dtype=dtype), nan(heads),
            nan(heads), capacity,
        )  # fmt: skip
        #: per request, float64, after 0, 1, .. of its pending inputs
        self.states: list[list[np.ndarray]] = []

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """x, B and C are views into one projection, as in the model."""
        heads, head_dim, state_size = self.shape
        widths = [heads * head_dim, self.groups * state_size, self.groups * state_size, 3]
        x, B, C, _ = self.randn(tokens, sum(widths)).split(widths, dim=1)
        B, C = (t.unflatten(1, (self.groups, state_size)) for t in (B, C))
        x, dt = x.unflatten(1, (heads, head_dim)), self.randn(tokens, heads) * 2 - 2
        return dict(x=x, dt=dt, A=self.A, B=B, C=C, D=self.D, dt_bias=self.dt_bias)

    def parts(self) -> list[torch.Tensor]:
        return [self.ring.x, self.ring.B, self.ring.dt, self.ring.log_decay]


class Server:
    """Requests that are served for a while: some slots and ring rows are theirs, most are not."""

    def __init__(
        self, requests: int = 3, capacity: int = 8, k: int = 2, *, seed: int = 0, layers: int = 1,
        heads: int = 2, head_dim: int = 8, state_size: int = 16, groups: int = 1,
        dtype: torch.dtype = torch.float32, state_dtype: torch.dtype = torch.float32,
        dt_limit: tuple[float, float] = (0.0, math.inf), slot_dtype: torch.dtype = torch.int32,
        rtol: float = TOLERANCE,
    ) -> None:  # fmt: skip
        self.random, generator = Random(seed), torch.Generator().manual_seed(seed)
        self.capacity, self.T, self.length = capacity, 1 + k, capacity + 1 + k
        self.dt_limit, self.slot_dtype, self.rtol = dt_limit, slot_dtype, rtol
        self.rounds = state_dtype != torch.float32
        num_slots = 3 * requests + 4
        self.layers = [
            Layer(
                requests + 3, num_slots, capacity, k, generator, heads=heads, head_dim=head_dim,
                state_size=state_size, groups=groups, dtype=dtype, state_dtype=state_dtype,
            )
            for _ in range(layers)
        ]  # fmt: skip
        slots = self.random.sample(range(1, num_slots), num_slots - 1)
        self.slot, self.free = slots[:requests], slots[requests:]
        self.ring_row = self.random.sample(range(1, requests + 3), requests)
        self.start = [self.random.randrange(self.length) for _ in range(requests)]
        self.pending = [0] * requests
        for layer in self.layers:
            layer.pool.own(self.slot, generator)
            layer.states = [[f64(layer.pool.state[slot])] for slot in self.slot]

    def ints(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=self.slot_dtype)

    def some_slot(self, request: int) -> int:
        """The request's own, or one that nobody has."""
        return self.random.choice([self.slot[request], self.random.choice(self.free)])

    def move(self, request: int, slot: int) -> None:
        """The request's checkpoint is now there; what it leaves behind is poison."""
        old = self.slot[request]
        if slot != old:
            self.free[self.free.index(slot)], self.slot[request] = old, slot
            for layer in self.layers:
                layer.pool.state[old] = math.nan

    def step(self, backend: str, lengths: Sequence[int], padding_tokens: int = 0) -> None:
        """A step of all requests and four rows that are padding, each in its way; checks it all."""
        requests = range(len(self.slot))
        dst = [self.some_slot(r) for r in requests]
        for i in requests:  # destinations are distinct
            if dst[i] in dst[:i]:
                dst[i] = self.slot[i]
        nobodys = next(slot for slot in self.free if slot not in dst)
        unused = sorted(set(range(1, len(self.slot) + 3)) - set(self.ring_row))
        # (request, length, source, destination, ring row, start, pending)
        rows = [
            (r, lengths[r], self.slot[r], dst[r], self.ring_row[r], self.start[r], self.pending[r])
            for r in requests
        ]
        rows += [
            (-1, 1, 0, nobodys, unused[0], 0, 1), (-1, self.T, nobodys, nobodys, 0, 0, self.capacity),
            (-1, 0, nobodys, nobodys, unused[1], 0, self.capacity), (-1, 0, 0, 0, 0, 0, 0),
        ]  # fmt: skip
        self.random.shuffle(rows)
        which, lengths_, *tables = (list(column) for column in zip(*rows))
        starts = np.cumsum([0, *lengths_])
        names = ("src_slots", "dst_slots", "ring_rows", "ring_starts", "num_pending")
        arguments: dict[str, Any] = {n: self.ints(t) for n, t in zip(names, tables)}
        arguments["query_start_loc"] = torch.tensor(starts, dtype=torch.int32)
        kept = [self.random.randint(1, n) if n else 0 for n in lengths]
        flushed = [
            lengths[r] > 0 and self.pending[r] + self.T > self.capacity for r in requests
        ]  # spelled out: `must_flush` is under test, too
        for layer in self.layers:
            inputs = layer.inputs(int(starts[-1]) + padding_tokens)
            before = [part.clone() for part in layer.parts()]
            layer.pool.own([], layer.generator)
            with debug_checks():
                y = replay_state_update(
                    **inputs, ssm_state=layer.pool.state, ring=layer.ring, dt_limit=self.dt_limit,
                    backend=backend, **arguments,
                )  # fmt: skip
            expected, new_states = np.zeros(y.shape), {}
            for i, r in enumerate(which):
                if r >= 0:
                    t = slice(starts[i], starts[i + 1])
                    expected[t], new_states[r] = self.reference(
                        layer, inputs, t, layer.states[r][-1]
                    )
                    self.check_entries(layer, r, inputs, t, before)
            assert_close(y, expected, "y", self.rtol)
            written = {dst[r]: layer.states[r][0].size for r in requests if flushed[r]}
            layer.pool.assert_untouched(written)
            for r in requests:
                if flushed[r]:
                    self.check_checkpoint(layer, r, dst[r])
                    if self.rounds:  # later steps begin from what was kept, this one did not
                        i = which.index(r)
                        t = slice(starts[i], starts[i + 1])
                        _, new_states[r] = self.reference(layer, inputs, t, layer.states[r][-1])
                layer.states[r] += new_states[r][: kept[r]]
            for old, new in zip(before, layer.parts()):  # entries of the step have been taken out
                assert torch.equal(bits(old), bits(new)), "an entry that is not the step's"
        for r in requests:
            self.advance(r, lengths[r], kept[r], flushed[r], dst[r])

    def advance(self, r: int, length: int, kept: int, flushed: bool, dst: int) -> None:
        if length:
            assert must_flush(self.pending[r], self.T, self.capacity) == flushed
        happened["in place" if dst == self.slot[r] else "elsewhere"] += flushed
        happened["full"] += self.pending[r] == self.capacity
        happened["rejected"] += kept < length
        if flushed:
            self.move(r, dst)
            self.start[r] = (self.start[r] + self.pending[r]) % self.length
            self.pending[r] = 0
        self.pending[r] += kept
        happened["wrapped"] += self.start[r] + self.pending[r] > self.length
        self.poison_ring(r)

    def check_checkpoint(self, layer: Layer, r: int, slot: int) -> None:
        """A new checkpoint holds the state after all pending inputs, which are no longer pending."""
        state, rtol = layer.pool.state[slot], 2.0**-8 if self.rounds else self.rtol
        assert_close(state, layer.states[r][-1], f"checkpoint of {r}", rtol)
        layer.states[r] = [f64(state) if self.rounds else layer.states[r][-1]]

    def poison_ring(self, r: int) -> None:
        """What is not pending is NaN."""
        for layer in self.layers:
            for part in layer.parts():
                for i in range(self.pending[r], self.length):
                    part[self.ring_row[r], (self.start[r] + i) % self.length] = math.nan

    def reference(
        self, layer: Layer, inputs: dict[str, torch.Tensor], t: slice, state: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        x, dt, B, C = (f64(inputs[name][t]) for name in ("x", "dt", "B", "C"))
        weights = f64(layer.D), f64(layer.dt_bias)
        return ssm(state, x, dt, f64(layer.A), B, C, *weights, self.dt_limit)

    def check_entries(
        self, layer: Layer, r: int, inputs: dict[str, torch.Tensor], t: slice,
        before: list[torch.Tensor],
    ) -> None:  # fmt: skip
        """The step's inputs are in the ring; ``before`` gets them, too."""
        raw = f64(inputs["dt"][t]) + f64(layer.dt_bias)
        dt = np.clip(np.logaddexp(0.0, raw), *self.dt_limit)
        for i in range(len(dt)):
            at = self.ring_row[r], (self.start[r] + self.pending[r] + i) % self.length
            x, B, steps, decay = (part[at] for part in layer.parts())
            assert torch.equal(x, inputs["x"][t][i]) and torch.equal(B, inputs["B"][t][i])
            assert np.allclose(f64(steps), dt[i], rtol=1e-5, atol=0)
            assert np.allclose(f64(decay), dt[i] * f64(layer.A), rtol=1e-5, atol=0)
            for old, new in zip(before, layer.parts()):
                old[at] = new[at]

    def materialize(self, backend: str) -> None:
        """States after some of the pending inputs, of all requests; their cursors move on."""
        requests = range(len(self.slot))
        states = min(3, self.capacity)
        inputs, dst = np.zeros(
            (2, len(self.slot) + 1, states), dtype=int
        )  # the last row is padding
        free = list(self.free)
        self.random.shuffle(free)
        for r in requests:
            wanted = self.random.randint(0, min(states, self.pending[r]))
            inputs[r, :wanted] = sorted(self.random.sample(range(1, self.pending[r] + 1), wanted))
            for s in range(wanted):
                kind = self.random.choice(["null", "free", "own"])
                if kind == "own" and self.slot[r] not in dst[r]:
                    dst[r, s] = self.slot[r]
                elif kind == "free" and free:
                    dst[r, s] = free.pop()
        for layer in self.layers:
            layer.pool.own([], layer.generator)
        with debug_checks():
            materialize_states(
                [(layer.pool.state, layer.ring) for layer in self.layers],
                src_slots=self.ints([*self.slot, 0]), ring_rows=self.ints([*self.ring_row, 0]),
                ring_starts=self.ints([*self.start, 0]), num_inputs=self.ints(inputs),
                dst_slots=self.ints(dst), backend=backend,
            )  # fmt: skip
        for layer in self.layers:
            for r in requests:
                for s in dst[r].nonzero()[0]:
                    expected, state = layer.states[r][inputs[r, s]], layer.pool.state[dst[r, s]]
                    assert_close(state, expected, f"state {s} of request {r}", self.rtol)
            size = layer.states[0][0].size
            layer.pool.assert_untouched({int(slot): size for slot in dst.flat if slot})
        for r in requests:
            kept = dst[r].nonzero()[0]
            happened["several boundaries"] += len(kept) > 1
            happened["source among them"] += self.slot[r] in dst[r]
            happened["null among them"] += len(kept) < (inputs[r] > 0).sum()
            for s in kept[:-1]:
                if dst[r, s] != self.slot[r]:
                    for layer in self.layers:
                        layer.pool.state[dst[r, s]] = math.nan
            if len(kept):
                added = int(inputs[r, kept[-1]])
                self.move(r, int(dst[r, kept[-1]]))
                self.start[r] = (self.start[r] + added) % self.length
                self.pending[r] -= added
                for layer in self.layers:
                    del layer.states[r][:added]
                self.poison_ring(r)

    def serve(self, backend: str, steps: int, materializes: bool = True) -> None:
        for _ in range(steps):
            longest = self.random.choice([self.T, self.T, 1])
            lengths = [self.random.randint(0, longest) for _ in self.slot]
            self.step(backend, lengths, padding_tokens=self.random.choice([0, 2]))
            if materializes and self.random.random() < 0.3:
                self.materialize(backend)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
