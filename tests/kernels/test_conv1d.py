"""The convolution's two functions against the formula, on the pools of a server."""

from __future__ import annotations

import math
import sys
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_reference import Pool, assert_close, conv, f64, lazy_memory

from mamba_kernels import causal_conv1d_fn, causal_conv1d_update
from mamba_kernels.checks import debug_checks
from mamba_kernels.launch import count_launches
from mamba_kernels.tuning_table import TABLE

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interpreter)]
SMALL_BLOCKS = {
    "causal_conv1d_fn_kernel": [("any", {}, {"BLOCK_T": 4, "BLOCK_C": 16})],
    "causal_conv1d_update_kernel": [("any", {}, {"BLOCK_C": 16})],
}


class Batch:
    """Packed sequences, their pool and what they read and write."""

    def __init__(
        self, lengths: list[int], *, width: int = 4, k: int = 0, channels: int = 20, seed: int = 0,
        poison: float = math.nan, padding_tokens: int = 0, bias: bool = True,
        activation: str | None = "silu", slot_dtype: torch.dtype = torch.int32,
        dtype: torch.dtype = torch.float32, in_place: bool = False, skip: tuple[int, ...] = (),
        skip_slot: int = 0, checkpoints: list[tuple[int, int]] | None = None,
        fresh: tuple[int, ...] = (), forget: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        self.lengths, self.width, self.activation = lengths, width, activation
        rows, starts = len(lengths), np.cumsum([0, *lengths])
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32)
        # x is the middle of a projection: its rows are further apart than they are long.
        projection = torch.randn(int(starts[-1]) + padding_tokens, channels + 7, generator=g)
        self.x = projection.to(dtype)[:, 3 : 3 + channels]
        self.weight = torch.randn(channels, width, generator=g).to(dtype)
        self.bias = torch.randn(channels, generator=g).to(dtype) if bias else None

        self.window_len = width - 1 + k
        marks = checkpoints or []
        slots = torch.randperm(2 * rows + len(marks), generator=g) + 1
        self.src_slots = slots[:rows].to(slot_dtype)
        self.dst_slots = (slots[:rows] if in_place else slots[rows : 2 * rows]).to(slot_dtype)
        for row in skip:
            self.src_slots[row] = self.dst_slots[row] = skip_slot
        for row in forget:
            self.dst_slots[row] = skip_slot
        self.accepted = torch.randint(1, k + 2, (rows,), generator=g).to(slot_dtype)
        self.has_initial_state = torch.tensor([row not in fresh for row in range(rows)])
        self.checkpoints = None
        if checkpoints is not None:
            triples = [(*mark, int(slot)) for mark, slot in zip(marks, slots[2 * rows :])]
            self.checkpoints = torch.tensor(triples, dtype=slot_dtype).reshape(-1, 3)
        self.pool = Pool(len(slots) + 2, (self.window_len, channels), poison, dtype=dtype)
        # A fresh sequence's source slot is not its own: it stays poison.
        owned = [s for r, s in enumerate(self.src_slots.tolist()) if s > 0 and r not in fresh]
        self.pool.own(owned, g)

    def history(self, row: int, offset: int = 0) -> np.ndarray:
        slot = int(self.src_slots[row])
        if slot <= 0 or not self.has_initial_state[row]:
            return np.zeros((self.width - 1, self.x.shape[1]))
        return f64(self.pool.before(slot)[offset : offset + self.width - 1])

    def tokens(self, row: int) -> slice:
        return slice(int(self.query_start_loc[row]), int(self.query_start_loc[row + 1]))

    def assert_windows(self, windows: dict[int, np.ndarray]) -> None:
        """These slots begin with these windows, exactly; nothing else has changed."""
        for slot, window in windows.items():
            assert np.array_equal(f64(self.pool.state[slot, : len(window)]), window), f"slot {slot}"
        self.pool.assert_untouched({slot: window.size for slot, window in windows.items()})

    def update(self, backend: str, **changes: Any) -> torch.Tensor:
        arguments = dict(
            x=self.x, weight=self.weight, bias=self.bias, conv_state=self.pool.state,
            query_start_loc=self.query_start_loc, src_slots=self.src_slots,
            dst_slots=self.dst_slots, num_accepted_tokens=self.accepted,
            activation=self.activation, backend=backend,
        )  # fmt: skip
        return causal_conv1d_update(**(arguments | changes))

    def check_update(self, y: torch.Tensor, rtol: float = 1e-4) -> None:
        expected, windows = np.zeros(self.x.shape), {}
        bias = None if self.bias is None else f64(self.bias)
        for row, length in enumerate(self.lengths):
            if self.src_slots[row] <= 0 or length == 0:
                continue
            history = self.history(row, int(self.accepted[row]) - 1)
            x = f64(self.x[self.tokens(row)])
            expected[self.tokens(row)] = conv(history, x, f64(self.weight), bias, self.activation)
            if self.dst_slots[row] > 0:
                windows[int(self.dst_slots[row])] = np.concatenate([history[1:], x])
        assert_close(y, expected, "y", rtol)
        self.assert_windows(windows)

    def prefill(self, backend: str, **changes: Any) -> torch.Tensor:
        arguments = dict(
            x=self.x, weight=self.weight, bias=self.bias, conv_state=self.pool.state,
            query_start_loc=self.query_start_loc, src_slots=self.src_slots,
            dst_slots=self.dst_slots, has_initial_state=self.has_initial_state,
            checkpoints=self.checkpoints, activation=self.activation, backend=backend,
        )  # fmt: skip
        return causal_conv1d_fn(**(arguments | changes))

    def check_prefill(self, y: torch.Tensor, rtol: float = 1e-4) -> None:
        expected, windows = np.zeros(self.x.shape), {}
        bias = None if self.bias is None else f64(self.bias)
        for row, length in enumerate(self.lengths):
            history, x = self.history(row), f64(self.x[self.tokens(row)])
            expected[self.tokens(row)] = conv(history, x, f64(self.weight), bias, self.activation)
            inputs = np.concatenate([history, x])
            if length and self.dst_slots[row] > 0:
                windows[int(self.dst_slots[row])] = inputs[length:]
            for seq, end, slot in [] if self.checkpoints is None else self.checkpoints.tolist():
                if seq == row and slot > 0:
                    windows[slot] = inputs[end : end + self.width - 1]
        assert_close(y, expected, "y", rtol)
        self.assert_windows(windows)


def common(draw: Any) -> dict[str, Any]:
    return dict(
        width=draw(st.sampled_from([4, 4, 3, 2]), label="width"),
        channels=draw(st.sampled_from([5, 16, 40]), label="channels"),
        seed=draw(st.integers(0, 99), label="seed"),
        poison=draw(st.sampled_from([math.nan, 1e4]), label="poison"),
        padding_tokens=draw(st.sampled_from([0, 3, 9]), label="padding_tokens"),
        bias=draw(st.booleans(), label="bias"),
        activation=draw(st.sampled_from(["silu", None]), label="activation"),
        slot_dtype=draw(st.sampled_from([torch.int32, torch.int64]), label="slot_dtype"),
        in_place=draw(st.booleans(), label="in_place"),
        skip_slot=draw(st.sampled_from([0, -1]), label="skip_slot"),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(data=st.data())
def test_update_equals_the_formula(backend: str, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, 3), label="k")
    lengths = data.draw(st.lists(st.integers(0, 1 + k), min_size=1, max_size=4), label="lengths")
    skip = data.draw(st.sampled_from([(), (0,), (len(lengths) - 1,)]), label="skip")
    batch = Batch(lengths, k=k, skip=skip, **common(data.draw))
    with patch.dict(TABLE, SMALL_BLOCKS):
        batch.check_update(batch.update(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(data=st.data())
def test_prefill_equals_the_formula(backend: str, data: st.DataObject) -> None:
    draw = data.draw
    length = st.one_of(st.integers(0, 5), st.sampled_from([7, 8, 9, 19]))  # edges of tiles of 4
    lengths = draw(st.lists(length, min_size=1, max_size=4), label="lengths")
    places = [(row, end) for row, q in enumerate(lengths) for end in range(1, q + 1)]
    checkpoints = draw(st.none() | st.lists(st.sampled_from(places), max_size=4)
                       if places else st.none(), label="checkpoints")  # fmt: skip
    batch = Batch(
        lengths, checkpoints=checkpoints,
        fresh=draw(st.sampled_from([(), (0,), tuple(range(len(lengths)))]), label="fresh"),
        skip=draw(st.sampled_from([(), (0,), (len(lengths) - 1,)]), label="skip"),
        **common(draw),
    )  # fmt: skip
    with patch.dict(TABLE, SMALL_BLOCKS):
        batch.check_prefill(batch.prefill(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slot", [0, -1])
def test_a_null_destination_keeps_nothing(backend: str, slot: int) -> None:
    batch = Batch([2, 3, 1], k=2, forget=(0, 2), skip_slot=slot)
    batch.check_update(batch.update(backend))
    batch = Batch([2, 9, 1], forget=(0, 1), skip_slot=slot, checkpoints=[(0, 1), (1, 2), (1, 5)])
    batch.checkpoints[1:, 2] = slot
    batch.check_prefill(batch.prefill(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_place", [False, True])
def test_sequences_shorter_than_the_window(backend: str, in_place: bool) -> None:
    """With old state [a, b, c] and input d the window becomes [b, c, d]."""
    for fresh in ((), (0, 1, 2, 3)):
        batch = Batch([1, 2, 3, 4], in_place=in_place, fresh=fresh)
        batch.check_prefill(batch.prefill(backend))
    one = Batch([1], channels=1, in_place=in_place)
    src, dst = int(one.src_slots[0]), int(one.dst_slots[0])
    one.pool.state[src, :, 0] = torch.tensor([1.0, 2.0, 3.0])
    one.x[0, 0] = 4.0
    one.prefill(backend)
    assert one.pool.state[dst, :, 0].tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_drafts_is_read_at_an_offset(backend: str) -> None:
    """k = 2: the window [h2 h3 x0 d1 d2] serves each count of accepted tokens."""
    for accepted, first in ((1, 2.0), (2, 3.0), (3, 4.0)):
        batch = Batch([3], k=2, channels=1, activation=None, bias=False)
        batch.pool.state[int(batch.src_slots[0]), :, 0] = torch.tensor([2.0, 3.0, 4.0, 5.0, 6.0])
        batch.weight[:] = torch.tensor([1.0, 0.0, 0.0, 0.0])  # passes the oldest of four
        batch.accepted[0] = accepted
        assert batch.update(backend)[0].item() == first
        kept = batch.pool.state[int(batch.dst_slots[0]), :, 0].tolist()
        assert kept == [first + 1, first + 2, *batch.x[:, 0].tolist()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [[0, 5, 0, 4], [0, 0]])
@pytest.mark.parametrize("padding_tokens", [0, 7])
def test_empty_sequences(backend: str, lengths: list[int], padding_tokens: int) -> None:
    batch = Batch(lengths, padding_tokens=padding_tokens, checkpoints=[])
    batch.check_prefill(batch.prefill(backend))
    decode = Batch(lengths, padding_tokens=padding_tokens, k=4)
    decode.check_update(decode.update(backend))


@pytest.mark.interpreter
@pytest.mark.parametrize("count", [0, 4, -5, 1000])
def test_a_count_that_names_no_history_skips_the_row(count: int) -> None:
    """The kernel forms no address from it. (The torch twin, and debug_checks, raise.)"""
    batch = Batch([1, 2], k=2)
    batch.accepted[0] = count
    y = batch.update("triton")
    batch.src_slots[0] = batch.dst_slots[0] = 0
    batch.check_update(y)


@pytest.mark.interpreter
def test_the_all_empty_batch_is_no_launch() -> None:
    with count_launches() as count:
        Batch([0, 0]).prefill("triton")
        Batch([0, 0]).update("triton")
    assert count.total == 0
    with count_launches() as count:
        Batch([2, 40, 1], checkpoints=[(1, 32)]).prefill("triton")
        Batch([1, 1]).update("triton")
    assert count.by_kernel == {"causal_conv1d_fn_kernel": 1, "causal_conv1d_update_kernel": 1}


@pytest.mark.interpreter
def test_more_sequences_and_checkpoints_than_one_search_block() -> None:
    """A program looks for its sequence, and for early checkpoints, 128 at a time."""
    lengths = [1 + row % 2 for row in range(131)]
    lengths[65] = 9
    marks = [(65, 9)] * 127 + [(0, 1), (130, 1), (1, 2)]
    batch = Batch(lengths, channels=4, checkpoints=marks)
    batch.check_prefill(batch.prefill("triton"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_caches_may_want_the_same_checkpoint(backend: str) -> None:
    batch = Batch([9], checkpoints=[(0, 1), (0, 8), (0, 1), (0, 8)], in_place=True)
    batch.check_prefill(batch.prefill(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_on_top_of_its_own_history(backend: str) -> None:
    """A running state that completes its block: the window goes where the history came from, while
    the final window, behind a short query, still needs that history."""
    batch = Batch([2, 9, 1, 70], checkpoints=[(0, 1), (1, 6), (2, 1), (3, 2), (3, 40)])
    batch.checkpoints[:4, 2] = batch.src_slots
    batch.check_prefill(batch.prefill(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_of_sequences_changes_nothing(backend: str) -> None:
    batch = Batch([5, 6, 2], fresh=(0,))
    y = batch.prefill(backend)
    order = [2, 0, 1]
    lengths = [batch.lengths[row] for row in order]
    swapped = batch.prefill(
        backend, x=torch.cat([batch.x[batch.tokens(row)] for row in order]),
        query_start_loc=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
        src_slots=batch.src_slots[order], dst_slots=batch.dst_slots[order],
        has_initial_state=batch.has_initial_state[order],
    )  # fmt: skip
    assert torch.allclose(swapped, torch.cat([y[batch.tokens(row)] for row in order]), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pad", [-1, 0])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_pad_slot_is_no_address(backend: str, pad: int, dtype: torch.dtype) -> None:
    """Both 0 (null) and -1 mean "skip"; the null slot and the last one are NaN and stay it."""
    for prefill in (False, True):
        batch = Batch([1, 1, 1], slot_dtype=dtype, fresh=(2,) if prefill else ())
        batch.pool = Pool(3, (3, 20))
        batch.pool.own([1], torch.Generator().manual_seed(0))
        batch.src_slots[:] = torch.tensor([1, pad, pad])
        batch.dst_slots[:] = batch.src_slots
        if prefill:
            batch.checkpoints = torch.tensor([[0, 1, pad], [1, 1, pad]], dtype=dtype)
            batch.check_prefill(batch.prefill(backend))
        else:
            batch.check_update(batch.update(backend))


@pytest.mark.skipif(sys.platform == "win32", reason="needs memory that is committed when touched")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["update", "prefill"])
def test_offsets_beyond_32_bits(backend: str, name: str) -> None:
    """Slots 2^18 numbers apart (slot 8192 begins at 2^31), token rows 2^28 apart (row 8 does)."""
    pool = lazy_memory(8193 * 2**18).view(8193, 2**18)[:, :60].unflatten(1, (3, 20))
    tokens = lazy_memory(8 * 2**28 + 20).as_strided((9, 20), (2**28, 1))
    batch = Batch([1, 7, 1], fresh=(1,))
    content = torch.randn(20)
    tokens[0] = tokens[8] = content
    pool[1] = pool[8192] = batch.pool.before(int(batch.src_slots[0]))
    slots = torch.tensor([1, 0, 8192], dtype=torch.int32)
    extra = dict(checkpoints=torch.tensor([[1, 7, 8191]])) if name == "prefill" else {}
    if name == "update":
        extra = dict(num_accepted_tokens=None)
    extra |= dict(x=tokens, conv_state=pool, src_slots=slots, dst_slots=slots)
    y = getattr(batch, name)(backend, **extra)
    assert torch.allclose(y[0], y[8], atol=1e-6) and y[0].any()
    assert torch.equal(pool[1], pool[8192]) and torch.equal(pool[8192, 2], content)
    assert not pool[0].any() and not pool[2].any()


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["update", "prefill"])
def test_bfloat16_operands(name: str) -> None:
    """The interpreter computes rubbish with bf16 that was not upcast, and says nothing."""
    batch = Batch([3, 2], k=2, dtype=torch.bfloat16, checkpoints=[(0, 1)])
    y = getattr(batch, name)("triton")
    assert y.dtype == torch.bfloat16
    getattr(batch, f"check_{name}")(y, rtol=1e-2)


BAD = {
    "x": (lambda b: dict(x=b.x[:, :5].T), r"x has strides .*; the last one must be 1"),
    "weight": (lambda b: dict(weight=b.weight.T), r"weight has shape .* expected \(20, any\)"),
    "width": (lambda b: dict(weight=torch.zeros(20, 5)), "weight has width 5 .* 2, 3 or 4"),
    "bias": (lambda b: dict(bias=b.bias[:3]), r"bias has shape \(3,\); expected \(20,\)"),
    "state": (lambda b: dict(conv_state=b.pool.state[:, :2]), "conv_state keeps 2 .* least 3"),
    "layout": (lambda b: dict(conv_state=b.pool.state.mT), r"conv_state has .* \(any, any, 20\)"),
    "activation": (lambda b: dict(activation="relu"), "activation='relu'; expected 'silu'"),
    "initial": (lambda b: dict(has_initial_state=b.src_slots), "has_initial_state has dtype"),
    "marks": (lambda b: dict(checkpoints=torch.zeros(2, 2).int()), r"checkpoints .* \(any, 3\)"),
    "offsets": (lambda b: dict(query_start_loc=torch.zeros(0).int()), "query_start_loc is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_are_named(name: str) -> None:
    batch = Batch([5, 2])
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        batch.prefill("torch", **change(batch))


def test_debug_mode_reads_the_contents() -> None:
    batch = Batch([5, 2], k=1, checkpoints=[(0, 3)])
    for triple in ([0, 6, 1], [2, 1, 1], [0, 0, 1], [0, 1, 99]):
        with debug_checks(), pytest.raises(ValueError, match="checkpoints holds"):
            batch.prefill("torch", checkpoints=torch.tensor([triple]))
    with debug_checks(), pytest.raises(ValueError, match="a row of 5 tokens"):
        batch.update("torch")
    batch = Batch([1, 2], k=1)
    with debug_checks(), pytest.raises(ValueError, match="src_slots holds slot -1"):
        batch.update("torch", src_slots=torch.tensor([-1, 1]))
    with debug_checks(), pytest.raises(ValueError, match=r"num_accepted_tokens holds 3; .* 1 .. 2"):
        batch.update("torch", num_accepted_tokens=torch.tensor([3, 1]))
