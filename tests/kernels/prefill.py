"""Prefill batches to scan, on the pools of a server, and what the plain recurrence says about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.kernel_reference import Pool, assert_close, f64, ssm

from mamba_kernels import mamba_chunk_scan
from mamba_kernels.chunk_scan_launch import FORMS, override_form

#: The torch twin, and the kernels in both of their forms.
BACKENDS = ["torch"] + [pytest.param(form, marks=pytest.mark.interpreter) for form in FORMS]
both = pytest.mark.parametrize("backend", BACKENDS)


class Prefill:
    """Packed prompts of the given lengths; slots are handed out in a shuffled order."""

    def __init__(
        self, lengths: Sequence[int], *, computed: Sequence[int] | None = None, chunk_size: int = 8,
        continues: Sequence[bool] | None = None, ends: Sequence[tuple[int, int]] = (),
        heads: int = 2, head_dim: int = 32, state_size: int = 16, groups: int = 1, seed: int = 0,
        poison: float = math.nan, padding: int = 0, in_place: bool = False,
        dtype: torch.dtype = torch.float32, pool_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        rows, self.lengths, self.chunk_size = len(lengths), list(lengths), chunk_size
        self.query_start_loc = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        self.computed = torch.tensor(
            [0] * rows if computed is None else computed, dtype=torch.int32
        )
        self.continues = torch.tensor([True] * rows if continues is None else continues)
        tokens = sum(lengths) + padding

        # x, B and C are views into one projection, as in the model.
        widths = [heads * head_dim, groups * state_size, groups * state_size, 3]
        x, B, C, _ = torch.randn(tokens, sum(widths), generator=g).to(dtype).split(widths, dim=1)
        self.x = x.unflatten(1, (heads, head_dim))
        self.B, self.C = (t.unflatten(1, (groups, state_size)) for t in (B, C))
        self.dt = (torch.randn(tokens, heads, generator=g) * 2 - 2).to(dtype)
        self.A = -torch.rand(heads, generator=g) * 4
        self.D, self.dt_bias = torch.randn(heads, generator=g), torch.randn(heads, generator=g)
        self.dt_limit = (0.0, math.inf)

        slots = (torch.randperm(2 * rows + len(ends), generator=g) + 1).int()
        self.src = slots[:rows].clone()
        self.dst = self.src.clone() if in_place else slots[rows : 2 * rows].clone()
        kept = [[seq, end, int(slot)] for (seq, end), slot in zip(ends, slots[2 * rows :])]
        self.checkpoints = torch.tensor(kept, dtype=torch.int32) if kept else None
        self.pool = Pool(len(slots) + 2, (heads, head_dim, state_size), poison, dtype=pool_dtype)
        self.pool.own(self.src[self.continues].tolist(), g)

    def run(self, backend: str, **changes: Any) -> torch.Tensor:
        """A backend, or one of the kernels' forms."""
        if backend in FORMS:
            with override_form(backend):
                return self.run("triton", **changes)
        arguments = dict(
            x=self.x, dt=self.dt, A=self.A, B=self.B, C=self.C, D=self.D, dt_bias=self.dt_bias,
            ssm_state=self.pool.state, query_start_loc=self.query_start_loc,
            num_computed_tokens=self.computed, chunk_size=self.chunk_size, src_slots=self.src,
            dst_slots=self.dst, has_initial_state=self.continues, checkpoints=self.checkpoints,
            dt_limit=self.dt_limit, backend=backend,
        )  # fmt: skip
        return mamba_chunk_scan(**(arguments | changes))

    def check(self, y: torch.Tensor, rtol: float = 1e-4) -> None:
        """Outputs, kept states, and that nothing else was written."""
        expected, written, size = np.zeros(self.x.shape), {}, self.pool.state[0].numel()
        for row, length in enumerate(self.lengths):
            if length == 0:
                continue
            start, src, dst = int(self.query_start_loc[row]), int(self.src[row]), int(self.dst[row])
            initial = np.zeros(self.pool.state.shape[1:])
            if self.continues[row] and src > 0:
                initial = f64(self.pool.before(src))
            x, dt, B, C = (
                f64(t[start : start + length]) for t in (self.x, self.dt, self.B, self.C)
            )
            A, D, bias = f64(self.A), f64(self.D), f64(self.dt_bias)
            expected[start : start + length], states = ssm(
                initial, x, dt, A, B, C, D, bias, self.dt_limit
            )
            kept = [] if self.checkpoints is None else self.checkpoints.tolist()
            for end, slot in [(length, dst)] + [(e, s) for seq, e, s in kept if seq == row]:
                if slot > 0:
                    written[slot] = size
                    assert_close(self.pool.state[slot], states[end - 1], f"row {row}, {end}", rtol)
        assert_close(y, expected, "y", rtol)
        assert not y[sum(self.lengths) :].any(), "padding"
        self.pool.assert_untouched(except_for=written)
