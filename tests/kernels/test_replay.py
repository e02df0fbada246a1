"""``replay_state_update`` and ``materialize_states`` against the recurrence, over many steps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.replay_server import Layer, Server, happened
from support.kernel_reference import assert_close

from mamba_kernels import must_flush, replay_state_update, selective_state_update
from mamba_kernels.launch import count_launches

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interpreter)]


@settings(max_examples=40)
@given(data=st.data())
def test_equals_the_recurrence_step_by_step(data: st.DataObject) -> None:
    draw = data.draw
    heads = draw(st.sampled_from([2, 4]), label="heads")
    server = Server(
        draw(st.integers(1, 3), label="requests"),
        draw(st.integers(4, 20), label="capacity"),
        draw(st.integers(0, 3), label="k"),
        heads=heads,
        head_dim=draw(st.sampled_from([8, 20, 32]), label="head_dim"),
        state_size=draw(st.sampled_from([6, 16]), label="state_size"),
        groups=draw(st.sampled_from([1, 2, heads]), label="groups"),
        seed=draw(st.integers(0, 99), label="seed"),
        dt_limit=draw(st.sampled_from([(0.0, math.inf), (0.05, 0.3)]), label="dt_limit"),
        slot_dtype=draw(st.sampled_from([torch.int32, torch.int64]), label="slot_dtype"),
        layers=draw(st.sampled_from([1, 2]), label="layers"),
    )  # fmt: skip
    server.serve("torch", steps=40)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("capacity", "k"), [(4, 3), (4, 0), (7, 1), (8, 2), (16, 3), (17, 0), (20, 3)]
)
def test_equals_the_recurrence_in_triton(capacity: int, k: int) -> None:
    Server(2, capacity, k, seed=capacity).serve("triton", steps=4 + 2 * capacity // (1 + k))


@pytest.mark.interpreter
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_several_tiles_groups_and_layers_in_triton(slot_dtype: torch.dtype) -> None:
    server = Server(
        2, 4, 1, heads=4, groups=2, head_dim=20, state_size=6, layers=2, dt_limit=(0.05, 0.3),
        slot_dtype=slot_dtype,
    )  # fmt: skip
    server.serve("triton", steps=6)


def test_everything_has_happened() -> None:
    # Runs after the servers, in the same process.
    if not happened:
        pytest.skip("no server ran in this process")
    kinds = ("in place", "elsewhere", "full", "wrapped", "rejected", "several boundaries",
             "source among them", "null among them")  # fmt: skip
    assert min(happened[kind] for kind in kinds) >= 20, happened


@pytest.mark.parametrize(("capacity", "k"), [(4, 3), (16, 3), (5, 0)])
def test_a_bfloat16_state_is_rounded_where_it_is_kept_and_nowhere_else(
    capacity: int, k: int
) -> None:
    """8 bits of mantissa in a checkpoint, but 24 in the steps between two of them. (The interpreter
    cannot store bf16.)"""
    server = Server(3, capacity, k, state_dtype=torch.bfloat16)
    server.serve("torch", steps=60, materializes=False)


def test_bfloat16_inputs() -> None:
    server = Server(2, 8, 2, dtype=torch.bfloat16, rtol=1e-2)
    server.serve("torch", steps=30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides_of_the_pool(backend: str) -> None:
    """State size and head dim in the other order, and every second page only."""
    server = Server(2, 4, 1)
    pool = server.layers[0].pool
    before = pool.state.clone()
    pool.raw = torch.full((len(before), 700), math.nan)
    pool.state = pool.raw[:, : 2 * 16 * 8].unflatten(1, (2, 16, 8)).transpose(2, 3)
    pool.state.copy_(before)
    pool.own([], server.layers[0].generator)
    server.serve(backend, steps=8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capacity", [4, 16])
def test_equals_a_state_per_token(backend: str, capacity: int) -> None:
    """The other kernel, on the same inputs: what one step leaves is what the next one reads."""
    k, T, generator = 3, 4, torch.Generator().manual_seed(capacity)
    layer = Layer(2, 3, capacity, k, generator, heads=2, head_dim=8, state_size=16, groups=1,
                  dtype=torch.float32, state_dtype=torch.float32)  # fmt: skip
    layer.pool.own([1], generator)
    slots = torch.full((1 + 2 * T, *layer.shape), math.nan)
    slots[1] = layer.pool.state[1]
    start = pending = 0
    src = torch.tensor([[1, 0, 0, 0]], dtype=torch.int32)
    one, accepted = torch.ones(1, dtype=torch.int32), 1
    for turn in range(12):
        length = 1 + turn % T
        rows = dict(query_start_loc=torch.tensor([0, length], dtype=torch.int32), backend=backend)
        dst = torch.arange(1, T + 1, dtype=torch.int32)[None] + T * ((turn + 1) % 2)
        inputs = layer.inputs(length)
        theirs = selective_state_update(
            **inputs, **rows, ssm_state=slots, src_slots=src, dst_slots=dst,
            num_accepted_tokens=one * accepted,
        )  # fmt: skip
        ours = replay_state_update(
            **inputs, **rows, ssm_state=layer.pool.state, ring=layer.ring, src_slots=one,
            dst_slots=one, ring_rows=one, ring_starts=one * start, num_pending=one * pending,
        )  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
        src, accepted = dst, 1 + turn % length
        if must_flush(pending, T, capacity):
            start, pending = (start + pending) % (capacity + T), 0
        pending += accepted


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_null_destination_keeps_nothing(backend: str) -> None:
    server = Server(1, 4, 1)
    for _ in range(3):
        server.step(backend, [1])
    layer, one = server.layers[0], torch.ones(1, dtype=torch.int32)
    assert server.pending == [3] and must_flush(3, 2, 4)
    layer.pool.own([], layer.generator)
    inputs = layer.inputs(2)
    y = replay_state_update(
        **inputs, ssm_state=layer.pool.state, ring=layer.ring, backend=backend,
        query_start_loc=torch.tensor([0, 2]), src_slots=one * server.slot[0], dst_slots=0 * one,
        ring_rows=one * server.ring_row[0], ring_starts=one * server.start[0], num_pending=3 * one,
    )  # fmt: skip
    expected, _ = server.reference(layer, inputs, slice(0, 2), layer.states[0][-1])
    assert_close(y, expected, "y")
    layer.pool.assert_untouched()


@pytest.mark.interpreter
def test_one_launch_each() -> None:
    server = Server(3, 4, 1, layers=3)
    with count_launches() as count:
        server.step("triton", [2, 0, 1])
    assert count.by_kernel == {"replay_state_update_kernel": 3}  # one per layer
    with count_launches() as count:
        server.materialize("triton")
    assert count.by_kernel == {"materialize_states_kernel": 1}
