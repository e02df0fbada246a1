"""The fused scan: what it moves, when it is chosen, and that it is the three kernels' equal.

That it computes the recurrence is tested beside the other forms, in ``test_chunk_scan.py``.
"""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from kernels.memory_trace import Traffic, trace_memory
from kernels.prefill import Prefill
from support.kernel_reference import assert_close, f64

from mamba_kernels import build_chunk_layout, chunk_scan_launch, mamba_chunk_scan, tuning
from mamba_kernels.chunk_scan_launch import FORMS, choose_form, override_form
from mamba_kernels.tuning_table import TABLE

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_bytes
from gpu_bytes import Sizes

NEMOTRON = gpu_bytes.NEMOTRON_H["P64"]
TOY = Sizes(H=4, P=32, N=16, G=2)
#: What the formulas leave out: weights, and the tables of a step, a few numbers a row or a chunk.
SMALL = {"A", "D", "dt_bias", "src_slots", "dst_slots", "has_initial_state", "checkpoints",
         "cu_seq_chunks", "cu_chunk_seqlens", "checkpoint_order", "cu_checkpoints"}  # fmt: skip


# --- bytes ---------------------------------------------------------------------------------------


def five_kernels(z: Sizes, L: int, Q: int, a: int) -> int:
    """Bytes of the reference implementation, kernel by kernel; chunk states and scores in fp32."""
    states, scores, per_head = 4 * (L // Q) * z.HPN, 4 * L * Q * z.G, 4 * L * z.H
    x, B = L * z.H * z.P * a, L * z.G * z.N * a
    cumulative_sums = L * z.H * a + 2 * per_head
    chunk_states = x + B + 2 * per_head + states
    passing = 2 * states
    products = 2 * B + scores
    outputs = scores + 2 * per_head + 2 * x + B + states
    return cumulative_sums + chunk_states + passing + products + outputs


@pytest.mark.parametrize("chunk_size, theirs", [(64, 2554), (128, 1562), (256, 1114)])
def test_at_most_half_of_what_five_kernels_move(chunk_size: int, theirs: int) -> None:
    """8192 tokens of Nemotron-H in bf16, the initial and the final state of a sequence included."""
    five = five_kernels(NEMOTRON, 8192, chunk_size, 2)
    assert round(five / 2**20) == theirs  # as kernels/README.md has it
    fused = gpu_bytes.fused_scan(NEMOTRON, 8192, 1, 1, 2, 4)
    assert fused == 8192 * (128 * (64 + 64 + 1) + 2 * 8 * 128) * 2 + 2 * 4 * 2**20
    assert round(fused / 2**20) == 298 and fused <= five / 2


def traffic_of(
    form: str, lengths: list[int], ends: list[tuple[int, int]], chunk_size: int
) -> Traffic:
    """What a scan of ``TOY`` moves; the second sequence starts from zero, the others from a slot."""
    z, tokens, rows = TOY, sum(lengths), len(lengths)
    slots = torch.arange(1, 2 * rows + len(ends) + 1).int()
    kept = [[seq, end, int(slot)] for (seq, end), slot in zip(ends, slots[2 * rows :])]
    pool = torch.randn(len(slots) + 1, z.HPN + 24)[:, : z.HPN].unflatten(1, (z.H, z.P, z.N))
    with override_form(form), trace_memory() as traffic:
        mamba_chunk_scan(
            torch.randn(tokens, z.H, z.P), torch.randn(tokens, z.H), -torch.rand(z.H),
            torch.randn(tokens, z.G, z.N), torch.randn(tokens, z.G, z.N), torch.randn(z.H),
            torch.randn(z.H), pool, chunk_size=chunk_size, backend="triton",
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
            num_computed_tokens=torch.zeros(rows, dtype=torch.int32),
            src_slots=slots[:rows].clone(), dst_slots=slots[rows : 2 * rows].clone(),
            has_initial_state=torch.arange(rows) != 1,
            checkpoints=torch.tensor(kept, dtype=torch.int32).view(-1, 3) if kept else None,
        )  # fmt: skip
    return traffic


@pytest.mark.interpreter
@pytest.mark.parametrize("block_p", [128, 16])
@pytest.mark.parametrize("ends", [[], [(0, 13), (0, 16), (1, 3), (0, 13)]], ids=["", "checkpoints"])
@pytest.mark.parametrize("chunk_size", [8, 64])
def test_the_kernel_moves_what_the_formula_says(
    chunk_size: int, ends: list[tuple[int, int]], block_p: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    z, lengths = TOY, [40, 9, 21]
    L, R, K = sum(lengths), 2, 3 + len(ends)
    config = {"BLOCK_T": 16, "BLOCK_P": block_p, "num_warps": 1, "num_stages": 1}
    monkeypatch.setitem(TABLE, "fused_scan_kernel", [("any", {}, config)])
    kernel, traffic = "fused_scan_kernel", traffic_of("fused", lengths, ends, chunk_size)
    assert traffic.moved(kernel, ["x", "raw_dt", "B", "C", "y", "pool"]) == gpu_bytes.fused_scan(
        z, L, R, K, 4, 4
    )
    assert traffic.loaded[kernel, "pool"] == R * z.HPN * 4
    assert traffic.stored[kernel, "pool"] == K * z.HPN * 4
    # And there is nothing else in memory that it could have put a state into.
    assert traffic.arguments(kernel) <= {"x", "raw_dt", "B", "C", "y", "pool", *SMALL}
    assert {name for _, name in traffic.stored} == {"y", "pool"}
    assert {of_kernel for of_kernel, _ in traffic.loaded} == {kernel}


@pytest.mark.interpreter
def test_three_kernels_move_what_their_formulas_say() -> None:
    z, lengths, chunk_size = TOY, [40, 8, 24], 8
    L, c, K = sum(lengths), sum(lengths) // chunk_size, len(lengths)
    traffic = traffic_of("chunks", lengths, [], chunk_size)
    per_token = ["x", "raw_dt", "B", "C", "y", "dt", "hi", "lo", "states", "pool"]
    state = traffic.moved("chunk_state_kernel", per_token)
    assert state == gpu_bytes.chunk_state(z, L, c, 4)
    # The decays of whole chunks are two numbers a chunk and head: not in the formula.
    passing = traffic.moved("pass_states_kernel", ["states", "pool"])
    assert passing == gpu_bytes.pass_states(z, 2, c, K, 4)
    scan = traffic.moved("chunk_scan_kernel", per_token)
    assert scan == gpu_bytes.chunk_scan(z, L, c, 4)
    assert state + passing + scan == gpu_bytes.whole_scan(z, L, 2, c, K, 4, 4)


# --- the same as the other forms -----------------------------------------------------------------


@pytest.mark.interpreter
@pytest.mark.parametrize("head_dim, groups", [(16, 4), (64, 1), (80, 2), (6, 2)])
@pytest.mark.parametrize("dt_limit", [(0.0, math.inf), (0.02, 0.3), (5.0, 900.0)], ids=str)
def test_forms_agree(head_dim: int, groups: int, dt_limit: tuple[float, float]) -> None:
    """On outputs and on every state that is kept; the last limit makes tokens forget all."""
    lengths, ends = [33, 0, 70, 1], [(0, 33), (2, 16), (2, 16), (2, 69), (3, 1)]
    of_form = []
    for form in ("torch", *FORMS):
        prefill = Prefill(
            lengths, computed=[5, 0, 16, 3], ends=ends, chunk_size=16, heads=4, head_dim=head_dim,
            groups=groups, continues=[True, True, False, True], in_place=True, padding=3,
        )  # fmt: skip
        prefill.dt_limit = dt_limit
        y = prefill.run(form)
        prefill.check(y)  # each against the recurrence, and that no other slot was touched
        of_form.append((y, torch.nan_to_num(prefill.pool.state, nan=7.0)))
    for y, states in of_form[1:]:
        assert_close(y, f64(of_form[0][0]), "y", 1e-5)
        assert_close(states, f64(of_form[0][1]), "states", 1e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("block_t", [16, 32])
def test_a_prompt_cut_on_the_grid_gives_the_same_bits(
    block_t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps lie on the sequence's own grid, so a cached prefix changes nothing at all."""
    config = {"BLOCK_T": block_t, "BLOCK_P": 32, "num_warps": 1, "num_stages": 1}
    monkeypatch.setitem(TABLE, "fused_scan_kernel", [("any", {}, config)])
    whole = Prefill([75], chunk_size=24, continues=[False], seed=3)
    y, slot, pieces = whole.run("fused"), torch.tensor([2]), []
    for start, end in pairwise([0, 24, 72, 75]):
        part = slice(start, end)
        pieces.append(whole.run(
            "fused", x=whole.x[part], dt=whole.dt[part], B=whole.B[part], C=whole.C[part],
            query_start_loc=torch.tensor([0, end - start]), src_slots=slot, dst_slots=slot,
            num_computed_tokens=torch.tensor([start]), has_initial_state=torch.tensor([start > 0]),
        ))  # fmt: skip
    assert torch.equal(torch.cat(pieces), y)
    assert torch.equal(whole.pool.state[2], whole.pool.state[int(whole.dst[0])])


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS)
def test_small_decays_behind_large_ones(form: str) -> None:
    """48 tokens forget everything, 104 each. At a sum of 5000, neighbouring fp32 numbers are 5e-4 apart,
    and the decays of the 16 tokens behind them must be right to 1e-6 for all that."""
    prefill = Prefill([64], chunk_size=64, heads=2, head_dim=16, seed=1)
    prefill.A[:], prefill.dt_bias[:] = -1.0, 0.0
    steps = torch.full((64, 2), 200.0)
    steps[48:] = torch.linspace(0.013, 0.3, 32).view(16, 2)
    prefill.dt = torch.log(torch.expm1(steps.double())).float()
    prefill.dt[:48] = 200.0
    prefill.x[:48] = 0.0  # so that all there is comes from the last 16
    prefill.check(prefill.run(form), rtol=1e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS)
def test_null_and_negative_slots_are_no_places(form: str) -> None:
    """The pool is a part of a larger one, so that slots 0 and -1 are somebody's."""
    prefill, before, kept_at = Prefill([9, 5, 7], chunk_size=8), 3, 4
    raw = prefill.pool.raw.clone()
    y = prefill.run(
        form, ssm_state=prefill.pool.state[before:], src_slots=torch.tensor([0, -1, 0]),
        dst_slots=torch.tensor([-1, 0, kept_at]),
        checkpoints=torch.tensor([[2, 4, -1], [0, 3, 0], [1, 5, -1]]),
    )  # fmt: skip
    from_zero = prefill.run("torch", has_initial_state=torch.tensor([False] * 3),
                            dst_slots=torch.tensor([0] * 3))  # fmt: skip
    assert_close(y, f64(from_zero), "y", 1e-5)
    changed = prefill.pool.raw.view(torch.int32) != raw.view(torch.int32)
    assert changed.any(1).nonzero()[:, 0].tolist() == [before + kept_at]


# --- which form ----------------------------------------------------------------------------------


def form_for(
    lengths: list[int], heads: int, head_dim: int = 64, state_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> str:  # fmt: skip
    """The choice for sequences in chunks of 128."""
    loc = torch.tensor([0, *lengths]).cumsum(0)
    layout = build_chunk_layout(loc, torch.zeros(len(lengths)), 128)
    x = torch.empty(1, heads, head_dim, dtype=dtype)
    return choose_form(layout, x, torch.empty(1, 1, state_size, dtype=dtype))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tuning, chunk_scan_launch):
        monkeypatch.setattr(module, "current_arch", lambda: "sm_90")


@pytest.mark.usefixtures("h200")
def test_one_prompt_of_a_large_model_is_fused() -> None:
    assert form_for([8192], heads=128) == "fused"  # 256 programs for 132 multiprocessors
    assert form_for([8192], heads=128, head_dim=80) == "fused"
    assert form_for([8192], heads=64) == "chunks"  # 128
    assert form_for([8192] * 2, heads=64) == "fused"


@pytest.mark.usefixtures("h200")
def test_short_sequences_beside_a_long_one_do_not_count_in_full() -> None:
    assert form_for([256] * 17, heads=4) == "fused"  # 17 x 4 x 2
    assert form_for([8192] + [5] * 16, heads=4) == "chunks"
    assert form_for([256] * 16 + [0] * 9, heads=4) == "chunks"


@pytest.mark.usefixtures("h200")
def test_rows_too_long_for_the_registers_are_not_fused() -> None:
    assert form_for([8192], heads=128, dtype=torch.float32) == "chunks"
    assert form_for([8192], heads=128, state_size=64, dtype=torch.float32) == "fused"
    assert form_for([8192], heads=128, state_size=256) == "chunks"
    with override_form("fused"):
        assert form_for([1], heads=1, dtype=torch.float32) == "fused"


def test_there_are_two_forms() -> None:
    with pytest.raises(ValueError, match=r"form='one'.*fused, chunks"), override_form("one"):
        pass
