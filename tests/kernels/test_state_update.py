"""``selective_state_update`` against the recurrence, on the pools of a server."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_reference import Pool, assert_close, f64, lazy_memory, ssm

from mamba_kernels import selective_state_update
from mamba_kernels.checks import debug_checks
from mamba_kernels.launch import count_launches

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interpreter)]


class Step:
    """One step over rows of the given lengths; slots are handed out in a shuffled order."""

    def __init__(
        self, lengths: list[int], *, k: int = 0, heads: int = 2, head_dim: int = 8,
        state_size: int = 16, groups: int = 1, seed: int = 0, poison: float = math.nan,
        padding_tokens: int = 0, dt_limit: tuple[float, float] = (0.0, math.inf),
        slot_dtype: torch.dtype = torch.int32, dtype: torch.dtype = torch.float32,
        in_place: bool = False, skip: tuple[int, ...] = (), skip_slot: int = 0,
        drop_destinations: bool = False, drop_slot: int = 0,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        self.lengths, self.dt_limit, self.skip = lengths, dt_limit, skip
        rows, width = len(lengths), 1 + k
        starts = np.cumsum([0, *lengths])
        tokens = int(starts[-1]) + padding_tokens
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g).to(dtype)

        # x, B and C are views into one projection, as in the model.
        widths = [heads * head_dim, groups * state_size, groups * state_size, 3]
        x, B, C, _ = randn(tokens, sum(widths)).split(widths, dim=1)
        self.x = x.unflatten(1, (heads, head_dim))
        self.B, self.C = (t.unflatten(1, (groups, state_size)) for t in (B, C))
        self.dt = randn(tokens, heads) * 2 - 2
        self.A = -torch.rand(heads, generator=g) * 4
        self.D, self.dt_bias = randn(heads), randn(heads)

        slots = (torch.randperm(2 * rows * width, generator=g) + 1).view(2, rows, width)
        self.src_slots = slots[0].to(slot_dtype)
        self.dst_slots = (slots[0] if in_place else slots[1]).to(slot_dtype)
        if drop_destinations:
            self.dst_slots[torch.rand(rows, width, generator=g) < 0.5] = drop_slot
        self.accepted = torch.randint(1, width + 1, (rows,), generator=g).to(slot_dtype)
        for row in skip:
            self.src_slots[row] = self.dst_slots[row] = skip_slot
        self.pool = Pool(2 * rows * width + 2, (heads, head_dim, state_size), poison)
        self.sources = [int(self.src_slots[r, a - 1]) for r, a in enumerate(self.accepted.tolist())]
        self.pool.own([s for s in self.sources if s > 0], g)

    def run(self, backend: str, **changes: Any) -> torch.Tensor:
        arguments = dict(
            x=self.x, dt=self.dt, A=self.A, B=self.B, C=self.C, D=self.D, dt_bias=self.dt_bias,
            ssm_state=self.pool.state, query_start_loc=self.query_start_loc,
            src_slots=self.src_slots, dst_slots=self.dst_slots, dt_limit=self.dt_limit,
            num_accepted_tokens=self.accepted, backend=backend,
        )  # fmt: skip
        return selective_state_update(**(arguments | changes))

    def check(self, y: torch.Tensor, rtol: float = 1e-4) -> None:
        expected = np.zeros(self.x.shape)
        written: dict[int, int] = {}
        A, D, bias = f64(self.A), f64(self.D), f64(self.dt_bias)
        for row, length in enumerate(self.lengths):
            if self.sources[row] <= 0 or length == 0:
                continue
            t = slice(int(self.query_start_loc[row]), int(self.query_start_loc[row + 1]))
            expected[t], states = ssm(
                f64(self.pool.before(self.sources[row])), f64(self.x[t]), f64(self.dt[t]), A,
                f64(self.B[t]), f64(self.C[t]), D, bias, self.dt_limit,
            )  # fmt: skip
            for i, state in enumerate(states):
                slot = int(self.dst_slots[row, i])
                if slot > 0:
                    what = f"state of row {row}, token {i}"
                    assert_close(self.pool.state[slot], state, what, rtol)
                    written[slot] = state.size
        assert_close(y, expected, "y", rtol)
        self.pool.assert_untouched(written)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30)
@given(data=st.data())
def test_equals_the_recurrence(backend: str, data: st.DataObject) -> None:
    draw = data.draw
    k = draw(st.integers(0, 3), label="k")
    lengths = draw(st.lists(st.integers(0, 1 + k), min_size=1, max_size=3), label="lengths")
    heads = draw(st.sampled_from([2, 4]), label="heads")
    step = Step(
        lengths, k=k, heads=heads,
        head_dim=draw(st.sampled_from([32, 64, 80]), label="head_dim"),
        state_size=draw(st.sampled_from([16, 64, 128]), label="state_size"),
        groups=draw(st.sampled_from([1, 2, heads]), label="groups"),
        seed=draw(st.integers(0, 99), label="seed"),
        poison=draw(st.sampled_from([math.nan, 1e4]), label="poison"),
        padding_tokens=draw(st.sampled_from([0, 3]), label="padding_tokens"),
        dt_limit=draw(st.sampled_from([(0.0, math.inf), (0.05, 0.3)]), label="dt_limit"),
        slot_dtype=draw(st.sampled_from([torch.int32, torch.int64]), label="slot_dtype"),
        in_place=draw(st.booleans(), label="in_place"),
        skip=draw(st.sampled_from([(), (0,), (len(lengths) - 1,)]), label="skip"),
        skip_slot=draw(st.sampled_from([0, -1]), label="skip_slot"),
        drop_destinations=draw(st.booleans(), label="drop_destinations"),
    )  # fmt: skip
    step.check(step.run(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_that_are_no_powers_of_two(backend: str) -> None:
    step = Step([1, 2], k=1, heads=3, groups=3, head_dim=10, state_size=6)
    step.check(step.run(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drop_slot", [0, -1])
def test_a_null_destination_keeps_nothing(backend: str, drop_slot: int) -> None:
    step = Step([1, 4, 3], k=3, drop_destinations=True, drop_slot=drop_slot)
    dropped = (step.dst_slots == drop_slot) & (torch.arange(4) < torch.tensor([[1], [4], [3]]))
    assert 0 < dropped.sum() < 8
    step.check(step.run(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_counts_means_one_everywhere(backend: str) -> None:
    step = Step([1, 1], k=0)
    step.check(step.run(backend, num_accepted_tokens=None))


@pytest.mark.parametrize("backend", BACKENDS)
def test_softplus_is_exact_for_small_and_large_steps(backend: str) -> None:
    """log(1 + exp(x)) as written is off by 8 % at -15, and overflows at 100."""
    step = Step([1, 1, 1, 1])
    step.dt[:] = torch.tensor([[-15.0], [-9.0], [19.9], [100.0]])
    step.dt_bias.zero_()
    step.pool.state.zero_()
    step.run(backend)
    for row, raw in enumerate(step.dt[:, 0].tolist()):
        # From a zero state, state = dt * x (outer) B.
        dt = np.logaddexp(0.0, raw)
        expected = dt * np.einsum("hp,n->hpn", f64(step.x[row]), f64(step.B[row, 0]))
        actual = f64(step.pool.state[int(step.dst_slots[row, 0])])
        assert np.allclose(actual, expected, rtol=1e-5, atol=0), raw


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pad", [-1, 0])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_pad_slot_is_no_address(backend: str, pad: int, dtype: torch.dtype) -> None:
    """Both 0 (null) and -1 mean "skip": neither slot 0 nor the last slot is touched."""
    pool = Pool(3, (2, 4, 8))
    step = Step([1, 1, 1], head_dim=4, state_size=8)
    step.pool = pool
    g = torch.Generator().manual_seed(1)
    pool.own([1], g)  # slots 0 and 2 (the last) stay NaN
    slots = torch.tensor([[1], [pad], [pad]], dtype=dtype)
    step.src_slots = step.dst_slots = slots
    step.sources = slots[:, 0].tolist()
    step.accepted.fill_(1)
    step.check(step.run(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_head_h_reads_group_h_over_heads_per_group(backend: str) -> None:
    step = Step([1], heads=4, groups=2)
    step.pool.state.zero_()
    step.B[:, 0], step.B[:, 1] = 1.0, 0.0
    step.run(backend)
    state = step.pool.state[int(step.dst_slots[0, 0])]
    assert state[:2].abs().amin() > 0 and not state[2:].any()


def accumulate(backend: str, dtype: torch.dtype, launches: int, tokens: int) -> float:
    """Add 2^-9 per token to a state of 1.0 that hardly decays (A_log = -20)."""
    state = torch.ones(2, 1, 1, 1, dtype=dtype)
    ones = torch.ones(tokens, 1, 1)
    raw_dt = torch.full((tokens, 1), math.log(math.e - 1))  # softplus of it is 1
    src, dst = torch.zeros(2, 1, tokens, dtype=torch.int32)
    src[0, 0] = dst[0, -1] = 1
    for _ in range(launches):
        selective_state_update(
            ones * 2**-9, raw_dt, torch.tensor([-math.exp(-20)]), ones, ones, torch.zeros(1),
            torch.zeros(1), state, query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
            src_slots=src, dst_slots=dst, backend=backend,
        )  # fmt: skip
    return state[1].item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_float32_state_keeps_small_increments(backend: str) -> None:
    launches = 16 if backend == "torch" else 4  # 1024 steps, or 256
    expected = 1.0 + launches * 64 / 512
    assert accumulate(backend, torch.float32, launches, 64) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_16_bit_state_stops_moving(backend: str) -> None:
    """Why the state is fp32: half a bf16 unit is lost at each store, and nothing ever arrives."""
    assert accumulate(backend, torch.bfloat16, 32, 1) == 1.0


@pytest.mark.skipif(sys.platform == "win32", reason="needs memory that is committed when touched")
@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_beyond_32_bits(backend: str) -> None:
    """32 heads of 64 x 128 are 2^18 numbers a slot, so slot 8192 begins at 2^31; token rows are
    2^28 apart, so row 8 does, too. Gigabytes, never used."""
    pool = lazy_memory(8193 * 2**18).view(8193, 2**18)
    state = pool[:, : 2 * 8 * 16].unflatten(1, (2, 8, 16))
    tokens = lazy_memory(8 * 2**28 + 48).as_strided((9, 48), (2**28, 1))
    tokens[0] = tokens[8] = torch.randn(48)
    step = Step([1, 7, 1], k=6)
    x, B, C = tokens.split([16, 16, 16], dim=1)
    state[1] = state[8192] = torch.randn(2, 8, 16)
    slots = torch.zeros(3, 7, dtype=torch.int32)
    slots[0], slots[2] = 1, 8192
    y = step.run(
        backend, x=x.unflatten(1, (2, 8)), B=B[:, None], C=C[:, None], dt=x[:, :2], ssm_state=state,
        src_slots=slots, dst_slots=slots, num_accepted_tokens=None,
    )  # fmt: skip
    assert torch.allclose(y[0], y[8], atol=1e-6) and y[0].any()
    assert torch.allclose(state[1], state[8192], atol=1e-6)
    assert not state[0].any() and not state[2].any() and not state[8191].any()


@pytest.mark.interpreter
def test_bfloat16_operands() -> None:
    """The interpreter computes rubbish with bf16 that was not upcast, and says nothing."""
    step = Step([2, 1], k=1, dtype=torch.bfloat16)
    y = step.run("triton")
    assert y.dtype == torch.bfloat16
    step.check(y, rtol=1e-2)


@pytest.mark.interpreter
def test_one_launch_even_with_empty_rows() -> None:
    step = Step([1, 0], k=1)
    with count_launches() as count:
        step.run("triton")
    assert count.by_kernel == {"selective_state_update_kernel": 1}


@pytest.mark.interpreter
@pytest.mark.parametrize("count", [0, 3, -5, 1000])
def test_a_count_that_names_no_source_skips_the_row(count: int) -> None:
    """The kernel forms no address from it. (The torch twin, and debug_checks, raise.)"""
    step = Step([1, 2], k=1)
    step.accepted[0], step.sources[0] = count, 0
    step.check(step.run("triton"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_but_padding(backend: str) -> None:
    for padding_tokens in (0, 2):
        step = Step([0, 0], k=1, padding_tokens=padding_tokens)
        step.check(step.run(backend))


BAD = {
    "x": (lambda s: dict(x=s.x[:, :, 0]), r"x has shape \(3, 2\); expected \(any, any, any\)"),
    "dt": (lambda s: dict(dt=s.dt[:1]), r"dt has shape \(1, 2\); expected \(3, 2\)"),
    "C": (lambda s: dict(C=s.C[..., :5]), r"C has shape .* expected \(3, 1, 16\)"),
    "groups": (lambda s: dict(B=s.B.repeat(1, 3, 1), C=s.C.repeat(1, 3, 1)), "B has 3 groups"),
    "A": (lambda s: dict(A=s.A.double()), "A has dtype torch.float64; allowed: float32"),
    "state": (lambda s: dict(ssm_state=s.pool.state[:, :1]), "ssm_state has shape"),
    "loc": (lambda s: dict(query_start_loc=s.query_start_loc.float()), "query_start_loc has dtype"),
    "src": (lambda s: dict(src_slots=s.src_slots[:, 0]), "src_slots has shape"),
    "dst": (lambda s: dict(dst_slots=s.dst_slots[:, :1]), r"dst_slots .* expected \(2, 2\)"),
    "count": (lambda s: dict(num_accepted_tokens=s.accepted[:1]), "num_accepted_tokens has shape"),
    "limit": (lambda s: dict(dt_limit=(0.1, 0.0)), r"dt_limit=\(0.1, 0.0\)"),
    "device": (lambda s: dict(D=s.D.to("meta")), "D is on meta; expected cpu"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_are_named(name: str) -> None:
    step = Step([1, 2], k=1)
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        step.run("torch", **change(step))


BAD_CONTENTS = {
    "src too large": (lambda s: s.src_slots.fill_(99), "src_slots holds slot 99; allowed: 1 .. 9"),
    "dst negative": (lambda s: s.dst_slots.fill_(-1), "dst_slots holds slot -1"),
    "count 0": (lambda s: s.accepted.fill_(0), "num_accepted_tokens holds 0; allowed: 1 .. 2"),
    "count 3": (lambda s: s.accepted.fill_(3), "num_accepted_tokens holds 3"),
    "offsets": (lambda s: s.query_start_loc.copy_(torch.tensor([0, 2, 1])), "query_start_loc = "),
    "row": (lambda s: s.query_start_loc.copy_(torch.tensor([0, 3, 3])), "a row of 3 tokens"),
}


@pytest.mark.parametrize("name", BAD_CONTENTS)
def test_debug_mode_reads_the_contents(name: str) -> None:
    step = Step([1, 2], k=1)
    change, message = BAD_CONTENTS[name]
    change(step)
    with debug_checks(), pytest.raises(ValueError, match=message):
        step.run("torch")
