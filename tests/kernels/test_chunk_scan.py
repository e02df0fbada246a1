"""``mamba_chunk_scan`` against the recurrence, on the pools of a server."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.prefill import Prefill, both
from support.kernel_reference import assert_close, f64, lazy_memory
from torch.utils._python_dispatch import TorchDispatchMode

from mamba_kernels import build_chunk_layout, chunk_scan, chunk_scan_launch
from mamba_kernels.backend import jit, tl
from mamba_kernels.chunk_scan_launch import FORMS
from mamba_kernels.chunk_scan_triton import state_after_tile
from mamba_kernels.launch import count_launches
from mamba_kernels.tuning_table import TABLE

EDGES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33]


@st.composite
def prefills(draw: st.DrawFn) -> Prefill:
    chunk_size = draw(st.sampled_from([8, 12, 40, 64, 5, 1]))
    some = st.sampled_from(EDGES if chunk_size > 5 else EDGES[:7])
    lengths = draw(st.lists(some, min_size=1, max_size=4))
    places = [(s, e) for s, length in enumerate(lengths) for e in range(1, length + 1)]
    ends = draw(st.lists(st.sampled_from(places), max_size=4)) if places else []
    heads = draw(st.sampled_from([2, 4]))
    rows = len(lengths)
    return Prefill(
        lengths, ends=ends, chunk_size=chunk_size, heads=heads,
        computed=draw(st.lists(st.integers(0, 100), min_size=rows, max_size=rows)),
        continues=draw(st.lists(st.booleans(), min_size=rows, max_size=rows)),
        groups=draw(st.sampled_from([1, 2, heads])), seed=draw(st.integers(0, 99)),
        state_size=draw(st.sampled_from([16, 5])), head_dim=draw(st.sampled_from([32, 6])),
        padding=draw(st.sampled_from([0, 3])), in_place=draw(st.booleans()),
        poison=draw(st.sampled_from([math.nan, 1e4])),
    )  # fmt: skip


@settings(max_examples=120)
@given(prefills())
def test_twin_equals_the_recurrence(prefill: Prefill) -> None:
    prefill.check(prefill.run("torch"))


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40)
@given(prefill=prefills())
def test_kernels_equal_the_recurrence(form: str, prefill: Prefill) -> None:
    prefill.check(prefill.run(form))


@both
@pytest.mark.parametrize("head_dim", [32, 64, 80])
@pytest.mark.parametrize("state_size, groups", [(16, 1), (64, 2), (128, 4)])
def test_sizes_of_real_models(backend: str, head_dim: int, state_size: int, groups: int) -> None:
    prefill = Prefill([17, 0, 20], chunk_size=16, computed=[3, 5, 0], ends=[(0, 16), (2, 7)], heads=4,
                      head_dim=head_dim, state_size=state_size, groups=groups)  # fmt: skip
    prefill.check(prefill.run(backend))


@both
@pytest.mark.parametrize("chunk_size", [50, 64, 128, 256])
def test_long_chunks_and_their_edges(backend: str, chunk_size: int) -> None:
    """One token around every edge of the kernels' tiles (64) and of the chunk."""
    for lengths in ([63, 64, 65], [chunk_size - 1, 1, chunk_size], [chunk_size + 1]):
        continues = [True] + [False] * (len(lengths) - 1)
        prefill = Prefill(lengths, chunk_size=chunk_size, continues=continues)
        prefill.check(prefill.run(backend))


@both
def test_neither_order_nor_chunk_size_matters(backend: str) -> None:
    lengths, order = [40, 3, 27], [2, 0, 1]
    prefill = Prefill(lengths, chunk_size=8, computed=[5, 0, 11])
    y = prefill.run(backend)
    pieces = y.split(lengths)
    for chunk_size in (1000, 12):
        assert_close(prefill.run(backend, chunk_size=chunk_size), f64(y), "y", 1e-5)
    pack = lambda t: torch.cat([t.split(lengths)[i] for i in order])  # noqa: E731
    shuffled = prefill.run(
        backend, x=pack(prefill.x), dt=pack(prefill.dt), B=pack(prefill.B), C=pack(prefill.C),
        query_start_loc=torch.tensor([0, 27, 67, 70]), num_computed_tokens=prefill.computed[order],
        src_slots=prefill.src[order], dst_slots=prefill.dst[order],
    )  # fmt: skip
    assert_close(shuffled, f64(torch.cat([pieces[i] for i in order])), "y, shuffled", 1e-5)
    prefill.check(y)


@both
def test_a_prompt_in_pieces_equals_the_prompt_at_once(backend: str) -> None:
    whole = Prefill([60], chunk_size=8, continues=[False], seed=3)
    y = whole.run(backend)
    done, outputs, slot = 0, [], torch.tensor([2])
    for piece in (1, 20, 8, 31):
        part = slice(done, done + piece)
        outputs.append(whole.run(
            backend, x=whole.x[part], dt=whole.dt[part], B=whole.B[part], C=whole.C[part],
            query_start_loc=torch.tensor([0, piece]), num_computed_tokens=torch.tensor([done]),
            src_slots=slot, dst_slots=slot, has_initial_state=torch.tensor([done > 0]),
        ))  # fmt: skip
        done += piece
    assert_close(torch.cat(outputs), f64(y), "y", 1e-5)
    assert_close(whole.pool.state[2], f64(whole.pool.state[whole.dst[0]]), "state", 1e-5)


# --- shared/cases/kernels.md ---------------------------------------------------------------------


@both
@pytest.mark.parametrize("swap", [False, True])
def test_a_sequence_starts_in_the_middle_of_a_chunk(
    backend: str, swap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"BLOCK_I": 16, "BLOCK_J": 16, "BLOCK_P": 16, "num_warps": 1, "num_stages": 1}
    monkeypatch.setitem(TABLE, "chunk_scan_kernel", [("any", {}, config)])
    config = {"BLOCK_T": 16, "BLOCK_P": 16, "num_warps": 1, "num_stages": 1}
    monkeypatch.setitem(TABLE, "fused_scan_kernel", [("any", {}, config)])
    for lengths, chunk_size, continues in (([5, 6], 8, [False, True]), ([40, 100], 64, [True, True])):
        order = slice(None, None, -1 if swap else 1)
        prefill = Prefill(lengths[order], chunk_size=chunk_size, continues=continues[order])
        prefill.check(prefill.run(backend))


@both
def test_empty_sequences(backend: str) -> None:
    prefill = Prefill([0, 5, 0, 4], padding=7, computed=[3, 4, 8, 0])
    y = prefill.run(backend)
    prefill.check(y)
    rows = [1, 3]
    alone = prefill.run(
        backend, query_start_loc=torch.tensor([0, 5, 9]), src_slots=prefill.src[rows],
        num_computed_tokens=prefill.computed[rows], dst_slots=prefill.dst[rows],
        has_initial_state=prefill.continues[rows],
    )  # fmt: skip
    assert torch.equal(y, alone)


@both
def test_a_batch_of_nothing(backend: str) -> None:
    prefill = Prefill([0, 0], padding=4)
    with count_launches() as count:
        prefill.check(prefill.run(backend))
    assert count.total == 0


@both
def test_heads_read_their_own_group(backend: str) -> None:
    prefill = Prefill([1], heads=4, groups=2, continues=[False])
    prefill.B[:, 0], prefill.B[:, 1] = 1.0, 0.0
    prefill.run(backend)
    head_is_zero = (prefill.pool.state[prefill.dst[0]] == 0).flatten(1).all(1)
    assert head_is_zero.tolist() == [False, False, True, True]


@both
@pytest.mark.parametrize("block", [20, 4, 24])
def test_block_boundaries_that_are_no_chunk_boundaries(backend: str, block: int) -> None:
    computed, lengths = [6, 0], [45, 21]
    ends = [
        (row, boundary - n)
        for row, (n, q) in enumerate(zip(computed, lengths))
        for boundary in range(n // block * block + block, n + q + 1, block)
    ]
    prefill = Prefill(lengths, computed=computed, ends=ends, chunk_size=8)
    prefill.check(prefill.run(backend))


@both
def test_one_boundary_kept_twice_and_null_slots_kept_never(backend: str) -> None:
    ends = [(0, 8), (0, 8), (1, 9), (0, 20), (1, 3), (0, 3)]
    prefill = Prefill([20, 9, 5], ends=ends)
    assert prefill.checkpoints is not None
    prefill.checkpoints[4, 2], prefill.checkpoints[5, 2] = 0, -1
    prefill.src[1], prefill.src[2] = 0, -1
    prefill.dst[1], prefill.dst[2] = -1, 0
    prefill.checkpoints[4, 2], prefill.dst[1], prefill.src[1] = 0, -1, 0  # type: ignore[index]
    prefill.check(prefill.run(backend))


@both
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_a_state_near_one_keeps_moving(backend: str, pool_dtype: torch.dtype) -> None:
    """1024 tokens add 2^-9 each; below a step of bf16, so sums must be float32 on the way."""
    prefill = Prefill([1024], chunk_size=128, heads=1, head_dim=16, pool_dtype=pool_dtype)
    prefill.A[:], prefill.dt_bias[:], prefill.dt[:] = -math.exp(-20), 0.0, math.log(math.e - 1)
    prefill.x[:], prefill.B[:], prefill.pool.state[prefill.src[0]] = 2.0**-9, 1.0, 1.0
    prefill.run(backend)
    state = prefill.pool.state[prefill.dst[0]].float()
    # Stored once at the end; the interpreter cuts bf16 off where hardware rounds.
    assert (state - 3.0).abs().max() < (1e-3 if pool_dtype == torch.float32 else 2.0**-5)


@both
@pytest.mark.parametrize("scale", [1e3, 3e9, 3e12])
def test_violent_decays(backend: str, scale: float) -> None:
    """A = -scale and dt = u^8: most tokens forget everything, some nearly nothing."""
    prefill = Prefill([256, 90], chunk_size=256, heads=1, head_dim=16, seed=4)
    u = torch.rand(prefill.dt.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    prefill.A[:], prefill.dt_bias[:] = -scale, 0.0
    prefill.dt = torch.log(torch.expm1(u**8)).float()
    prefill.check(prefill.run(backend))


@both
def test_bf16_inputs(backend: str) -> None:
    """Interpreted arithmetic on bf16 is garbage, so this also proves: upcast right after each load."""
    prefill = Prefill([20, 9], ends=[(0, 16)], dtype=torch.bfloat16, groups=2)
    y = prefill.run(backend)
    assert y.dtype == torch.bfloat16
    prefill.check(y, rtol=1e-2)


# --- decays that rounding has pushed above 1 -----------------------------------------------------


def _tampered(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """``cum (c, H, Q)`` with one pair too high by 100, and other inputs of the twin's stages."""
    g = torch.Generator().manual_seed(seed)
    dt = torch.rand(1, 1, 16, generator=g)
    cum = (-dt.double()).cumsum(-1)
    cum[..., 9] += 100
    x, B, C = (torch.randn(1, 1, 16, 16, generator=g) for _ in range(3))
    return cum, dt, x, B, C, torch.randn(1, 1, 16, 16, generator=g)


def _expected_stages(cum: np.ndarray, dt: np.ndarray, x: np.ndarray, B: np.ndarray, C: np.ndarray,
                     before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    weights = np.tril(np.exp(np.minimum(cum[:, None] - cum[None, :], 0))) * dt
    y = (C @ B.T * weights) @ x + np.exp(np.minimum(cum, 0))[:, None] * (C @ before.T)
    return y, (dt * np.exp(np.minimum(cum[-1] - cum, 0)) * x.T) @ B


def test_stages_of_the_twin_never_amplify() -> None:
    cum, dt, x, B, C, before = _tampered()
    y, added = _expected_stages(*(f64(t)[0, 0] for t in (cum, dt, x, B, C, before)))
    assert_close(chunk_scan.chunk_outputs(cum, dt, x, B, C, before)[0, 0], y, "y", 1e-5)
    assert_close(chunk_scan.added_states(cum, dt, x, B)[0, 0], added, "state", 1e-5)
    decays = chunk_scan.decay_matrix(cum)
    assert decays.min() >= 0 and decays.max() <= 1
    below = -torch.rand(1000) * 90
    assert torch.equal(chunk_scan.decay(below), torch.exp(below))  # bit for bit


@jit
def _tile_kernel(cum_ptr, total_ptr, dt_ptr, x_ptr, B_ptr, state_ptr):  # type: ignore[no-untyped-def]
    t = tl.arange(0, 16)
    row, column = t[:, None], t[None, :]
    state = state_after_tile(
        tl.load(state_ptr + row * 16 + column), tl.load(cum_ptr + t), tl.load(total_ptr),
        tl.load(dt_ptr + t), tl.load(x_ptr + column * 16 + row), tl.load(B_ptr + row * 16 + column),
        tl.float32, "ieee",
    )  # fmt: skip
    tl.store(state_ptr + row * 16 + column, state)


@pytest.mark.interpreter
def test_stages_of_the_kernels_never_amplify() -> None:
    cum, dt, x, B, C, before = _tampered()
    y, added = _expected_stages(*(f64(t)[0, 0] for t in (cum, dt, x, B, C, before)))

    state = torch.zeros(16, 16)
    _tile_kernel[(1,)](cum[0, 0], cum[0, 0, -1:].clone(), dt, x, B, state)
    assert_close(state, added, "added state", 1e-5)
    state, up = before[0, 0].clone(), torch.tensor([7.0], dtype=torch.float64)
    _tile_kernel[(1,)](cum[0, 0] * 0 + up, up, dt * 0, x, B, state)
    assert torch.equal(state, before[0, 0])  # a rise of e^7 would have been no decay at all

    layout = build_chunk_layout(torch.tensor([0, 16]), torch.tensor([0]), 16)
    hi = cum[0].float()
    between = chunk_scan_launch.Between(dt[0], hi, torch.zeros_like(hi), before.clone())
    tokens = [t[0].transpose(0, 1).contiguous() for t in (x, B, C)]
    actual = chunk_scan_launch.launch_chunk_scan(*tokens, torch.zeros(1), between, layout)
    assert_close(actual[:, 0], y, "y", 1e-5)

    hi[0, -1] = 100.0
    pool, one, none = torch.zeros(3, 1, 16, 16), torch.tensor([1]), torch.tensor([0])
    chunk_scan_launch.launch_pass_states(between, pool, layout, none, one, torch.tensor([False]), None)
    pool_again, two = pool.clone(), torch.tensor([2])
    between.states.zero_()
    chunk_scan_launch.launch_pass_states(between, pool, layout, one, two, torch.tensor([True]), None)
    assert torch.equal(pool[2], pool_again[1])  # decay 1, not e^100


# --- what the launch path must not do, what the call must refuse ---------------------------------


class _NoSync(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "masked_select")
        return func(*args, **(kwargs or {}))


@pytest.mark.interpreter
@pytest.mark.parametrize("form, launches", [("chunks", 3), ("fused", 1)])
@pytest.mark.parametrize("lengths", [[5], [5, 0, 30, 2, 11]])
def test_launches_and_no_sync(
    lengths: list[int], form: str, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Prefill(lengths, ends=[(0, 3), (0, 5)], padding=2)
    layout = build_chunk_layout(prefill.query_start_loc, prefill.computed, 8, prefill.checkpoints)
    launched = []
    monkeypatch.setattr(chunk_scan_launch, "launch", lambda kernel, *_, **__: launched.append(kernel))
    with _NoSync():
        prefill.run(form, layout=layout)
    assert len(launched) == launches


@both
def test_the_layout_may_be_brought_along(backend: str) -> None:
    prefill = Prefill([20, 9], ends=[(0, 11)], computed=[3, 0])
    layout = build_chunk_layout(prefill.query_start_loc, prefill.computed, 8, prefill.checkpoints)
    prefill.check(prefill.run(backend, layout=layout))


@both
def test_more_numbers_than_32_bits_can_count(backend: str) -> None:
    """Slot 8192 of 32 x 64 x 128 numbers starts at number 2^31; token 16 of x, too."""
    slot = 32 * 64 * 128
    pool = lazy_memory(8193 * slot).view(8193, 32, 64, 128)
    prefill = Prefill([18], heads=32, head_dim=64, state_size=128)
    x = lazy_memory(2**31 + 2**28).as_strided((18, 32, 64), (2**27, 64, 1))
    x.copy_(prefill.x)
    pool[1] = pool[8192] = prefill.pool.state[prefill.src[0]]
    outputs = [
        prefill.run(backend, x=x, ssm_state=pool, src_slots=slots, dst_slots=slots)
        for slots in (torch.tensor([1]), torch.tensor([8192], dtype=torch.int32))
    ]
    assert torch.equal(pool[1], pool[8192]) and torch.equal(*outputs)
    prefill.run(backend)
    assert torch.equal(pool[1], prefill.pool.state[prefill.dst[0]])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"dt_limit": (1.0, 0.5)}, "dt_limit"),
        ({"checkpoints": torch.tensor([[0, 21, 1]])}, r"checkpoint .*\(0, 21, 1\)"),
        ({"src_slots": torch.tensor([1])}, "src_slots"),
        ({"B": torch.zeros(29, 3, 16)}, "B has 3 groups|C has shape"),
        ({"ssm_state": torch.zeros(9, 2, 32, 17)}, "ssm_state"),
        ({"has_initial_state": torch.tensor([1, 1])}, "has_initial_state"),
        ({"layout": build_chunk_layout(torch.tensor([0, 29]), torch.tensor([0]), 8)}, "sequences = 1"),
        ({"layout": build_chunk_layout(torch.tensor([0, 20, 29]), torch.zeros(2), 4)}, "chunk_size = 4"),
        ({"layout": build_chunk_layout(torch.tensor([0, 20, 30]), torch.zeros(2), 8)}, "30 tokens"),
    ],
)
def test_refusals_name_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Prefill([20, 9]).run("torch", **changes)


def test_gradients_of_the_twin() -> None:
    """Training goes through the twin: its gradients against those of the plain recurrence."""
    prefill = Prefill([13, 6], chunk_size=4, groups=2, continues=[True, False])
    names = ["x", "dt", "B", "C", "A", "D", "dt_bias"]
    leaves = {n: getattr(prefill, n).clone().requires_grad_() for n in names}
    initial = prefill.pool.state[prefill.src[0]].double()
    prefill.run("torch", **leaves).square().sum().backward()

    plain = {n: leaf.detach().double().requires_grad_() for n, leaf in leaves.items()}
    loss = torch.zeros((), dtype=torch.float64)
    for start, length, h in ((0, 13, initial), (13, 6, torch.zeros_like(initial))):
        for t in range(start, start + length):
            dt = torch.nn.functional.softplus(plain["dt"][t] + plain["dt_bias"])[:, None, None]
            added = dt * plain["x"][t][:, :, None] * plain["B"][t][:, None, :]
            h = torch.exp(dt * plain["A"][:, None, None]) * h + added
            y = (h * plain["C"][t][:, None, :]).sum(-1) + plain["D"][:, None] * plain["x"][t]
            loss = loss + y.square().sum()
    loss.backward()
    for n in names:
        assert_close(leaves[n].grad, f64(plain[n].grad), f"gradient of {n}", 1e-4)  # type: ignore[arg-type]
