"""Replay moves fewer bytes than a state per token: counted in the kernels, then told from formulas.

The formulas of ``benchmarks/gpu_bytes.py`` are checked at sizes at which the interpreter can run the
kernels; at a real model's sizes only the formulas are used.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from kernels.memory_trace import Traffic, trace_memory

from mamba_kernels import (
    ReplayRing,
    materialize_states,
    must_flush,
    replay_state_update,
    selective_state_update,
)

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_bytes
from gpu_bytes import Sizes

TOY = Sizes(H=4, P=32, N=16, G=2)
CAPACITY, T = 16, 4
#: What is left out: weights and the tables of a step, a few numbers a row.
BIG = ("x", "dt", "B", "C", "state", "y", "ring_x", "ring_B", "ring_dt", "ring_decay")


def step_inputs(z: Sizes, R: int, T: int) -> dict[str, torch.Tensor]:
    """Each a tensor of its own, so that its addresses are nobody else's."""
    tokens = R * T
    return dict(
        x=torch.randn(tokens, z.H, z.P), dt=torch.randn(tokens, z.H), A=-torch.rand(z.H),
        B=torch.randn(tokens, z.G, z.N), C=torch.randn(tokens, z.G, z.N), D=torch.randn(z.H),
        dt_bias=torch.randn(z.H), query_start_loc=torch.arange(0, tokens + 1, T).int(),
    )  # fmt: skip


def pool(z: Sizes, slots: int) -> torch.Tensor:
    """States in pages that are larger than they are."""
    return torch.randn(slots, z.HPN + 24)[:, : z.HPN].unflatten(1, (z.H, z.P, z.N))


def ring_of(z: Sizes, rows: int) -> ReplayRing:
    length = CAPACITY + T
    shapes = [(z.H, z.P), (z.G, z.N), (z.H,), (z.H,)]
    return ReplayRing(*(torch.randn(rows, length, *shape) for shape in shapes), CAPACITY)


def total(traffic: Traffic, kernel: str) -> int:
    """And nothing is moved that the formulas do not know."""
    small = {"A", "D", "dt_bias", "query_start_loc", "src_slots", "dst_slots", "num_accepted",
             "ring_rows", "ring_starts", "num_pending"}  # fmt: skip
    assert traffic.arguments(kernel) <= {*BIG, *small}
    return traffic.moved(kernel, BIG)


@pytest.mark.interpreter
@pytest.mark.parametrize("tokens", [1, 4])
def test_slots_move_what_the_formula_says(tokens: int) -> None:
    R = 3
    slots = torch.randperm(2 * R * tokens).view(2, R, tokens).int() + 1
    with trace_memory() as traffic:
        selective_state_update(
            **step_inputs(TOY, R, tokens), ssm_state=pool(TOY, 2 * R * tokens + 1),
            src_slots=slots[0], dst_slots=slots[1], backend="triton",
            num_accepted_tokens=torch.full((R,), tokens, dtype=torch.int32),
        )  # fmt: skip
    kernel = "selective_state_update_kernel"
    assert total(traffic, kernel) == gpu_bytes.state_update(TOY, R, tokens, 4, 4)
    assert traffic.loaded[kernel, "state"] == R * TOY.HPN * 4
    assert traffic.stored[kernel, "state"] == R * tokens * TOY.HPN * 4


@pytest.mark.interpreter
@pytest.mark.parametrize("pending", [(0, 0, 0), (1, 12, 5), (13, 16, 0), (16, 16, 16)], ids=str)
@pytest.mark.parametrize("in_place", [True, False])
def test_replay_moves_what_the_formula_says(in_place: bool, pending: tuple[int, ...]) -> None:
    R = len(pending)
    src = torch.arange(1, R + 1).int()
    with trace_memory() as traffic:
        replay_state_update(
            **step_inputs(TOY, R, T), ssm_state=pool(TOY, 2 * R + 1), ring=ring_of(TOY, R + 1),
            src_slots=src, dst_slots=src if in_place else src + R, ring_rows=src,
            ring_starts=torch.tensor([19, 0, 7]).int(), num_pending=torch.tensor(pending).int(),
            backend="triton",
        )  # fmt: skip
    flushed = sum(p > CAPACITY - T for p in pending)
    kernel = "replay_state_update_kernel"
    expected = gpu_bytes.replay_update(TOY, R, T, sum(pending), flushed, 4, 4)
    assert total(traffic, kernel) == expected
    assert traffic.loaded[kernel, "state"] == R * TOY.HPN * 4
    assert traffic.stored.get((kernel, "state"), 0) == flushed * TOY.HPN * 4
    assert traffic.stored[kernel, "ring_x"] == R * T * TOY.H * TOY.P * 4


@pytest.mark.interpreter
def test_materializing_moves_what_the_formula_says() -> None:
    layers = [(pool(TOY, 9), ring_of(TOY, 4)) for _ in range(2)]
    more = {
        "state": [state for state, _ in layers],
        "ring_x": [ring.x for _, ring in layers], "ring_B": [ring.B for _, ring in layers],
        "ring_dt": [ring.dt for _, ring in layers],
        "ring_decay": [ring.log_decay for _, ring in layers],
    }  # fmt: skip
    with trace_memory(more) as traffic:
        materialize_states(
            layers, src_slots=torch.tensor([3, 0, 4]).int(), ring_rows=torch.tensor([1, 0, 3]).int(),
            ring_starts=torch.tensor([18, 0, 2]).int(),
            num_inputs=torch.tensor([[2, 6], [0, 0], [5, 0]]).int(),
            dst_slots=torch.tensor([[5, 6], [0, 0], [4, 0]]).int(), backend="triton",
        )  # fmt: skip
    expected = gpu_bytes.materialize(TOY, M=2, states=3, inputs=6 + 5, layers=2, a=4, s=4)
    assert traffic.moved("materialize_states_kernel", BIG) == expected


@pytest.mark.interpreter
def test_the_tracer_notices_foreign_addresses() -> None:
    inputs = step_inputs(TOY, 1, 1)
    memory = torch.zeros(4 * TOY.HPN)
    state = memory[: 2 * TOY.HPN].view(2, TOY.H, TOY.P, TOY.N)
    slots = torch.tensor([[1]]).int()
    with trace_memory():
        selective_state_update(**inputs, ssm_state=state, src_slots=slots, dst_slots=slots,
                               backend="triton")  # fmt: skip
    with pytest.raises(AssertionError, match="addresses are nobody's"), trace_memory():
        selective_state_update(**inputs, ssm_state=state, src_slots=slots, dst_slots=slots + 1,
                               backend="triton")  # fmt: skip


def bytes_of_a_run(z: Sizes, kept_rate: float, a: int, steps: int = 2000) -> tuple[int, int]:
    """Bytes that replay and slots move in ``steps`` verify steps of 128 rows of 4 tokens.

    Args:
        kept_rate: with which probability each draft is kept; behind one that is not, none is.
    """
    R, random = 128, Random(0)
    pending = [random.randrange(CAPACITY - T + 1) for _ in range(R)]  # rows have begun at any time
    replay = slots = 0
    for _ in range(steps):
        flushes = [must_flush(p, T, CAPACITY) for p in pending]
        replay += gpu_bytes.replay_update(z, R, T, sum(pending), sum(flushes), a, 4)
        slots += gpu_bytes.state_update(z, R, T, a, 4)
        for r, flushed in enumerate(flushes):
            kept = 1
            while kept < T and random.random() < kept_rate:
                kept += 1
            pending[r] = kept + (0 if flushed else pending[r])
    return replay, slots


@pytest.mark.parametrize(("kept_rate", "a"), list(product([1.0, 0.7], [4, 2])))
def test_replay_moves_at_most_three_tenths(kept_rate: float, a: int) -> None:
    """Nemotron-H's mixer: 128 heads of 64, state 128, 8 groups, states in fp32."""
    replay, slots = bytes_of_a_run(gpu_bytes.NEMOTRON_H["P64"], kept_rate, a, steps=300)
    assert 0.2 < replay / slots <= 0.3
    if kept_rate == 1.0:
        # Rows have 4, 8, 12, 16 inputs pending in turn, and flush at 16: a quarter of a state a step.
        tokens = 4 * (2 * 128 * 64 + 2 * 8 * 128 + 128) * a
        inputs = (10 + 4) * ((128 * 64 + 8 * 128) * a + 8 * 128)
        state = 128 * 64 * 128 * 4
        by_hand = (1.25 * state + tokens + inputs) / (5 * state + tokens)
        assert replay / slots == pytest.approx(by_hand, rel=0.01)
