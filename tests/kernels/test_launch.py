"""The launch wrapper, the tuning table, and what every kernel's source must obey."""

from __future__ import annotations

import ast
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
import torch

import mamba_kernels
from mamba_kernels import causal_conv1d_fn, causal_conv1d_update, copy_states, rms_norm_gated
from mamba_kernels import launch as launching
from mamba_kernels.backend import jit, tl, triton_mode
from mamba_kernels.launch import (
    Launch,
    cdiv,
    collect_variants,
    count_launches,
    launch,
    next_power_of_2,
)
from mamba_kernels.tuning import config_for
from mamba_kernels.tuning_table import TABLE

SOURCES = sorted(Path(mamba_kernels.__file__).parent.glob("*.py"))
interpreter = pytest.mark.interpreter


@jit(do_not_specialize=["count"])
def add_kernel(x_ptr, count, stride, amount, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place * stride, mask=place < count, other=0.0).to(tl.float32)
    tl.store(x_ptr + place * stride, x + amount, mask=place < count)


@interpreter
def test_launch_runs_the_kernel_and_tells_the_observers() -> None:
    x, seen = torch.zeros(5), []
    launching.observers.append(seen.append)
    try:
        launch(add_kernel, (2,), x, 5, 1, 2.5, BLOCK=4)
    finally:
        launching.observers.remove(seen.append)
    assert x.tolist() == [2.5] * 5
    (event,) = seen
    assert (event.kernel_name, event.grid) == ("add_kernel", (2,))
    assert event.args[0] is x and event.kwargs == {"BLOCK": 4}
    event.run()  # what a recorder does at replay
    assert x.tolist() == [5.0] * 5


@interpreter
def test_a_grid_with_a_zero_is_no_launch() -> None:
    x = torch.zeros(4)
    with count_launches() as count:
        launch(add_kernel, (0,), x, 4, 1, 1.0, BLOCK=4)
        launch(add_kernel, (1, 0), x, 4, 1, 1.0, BLOCK=4)
        assert count.total == 0
        launch(add_kernel, (1,), x, 4, 1, 1.0, BLOCK=4)
        launch(add_kernel, (1,), x, 4, 1, 1.0, BLOCK=4)
    assert count.by_kernel == {"add_kernel": 2} and count.total == 2
    assert not launching.observers


@interpreter
def test_observers_leave_when_the_block_fails() -> None:
    with pytest.raises(RuntimeError, match="out"), count_launches(), collect_variants():
        raise RuntimeError("out")
    assert not launching.observers


def variants(*launches: dict[str, Any]) -> int:
    with collect_variants() as found:
        for change in launches:
            arguments = dict(x=torch.zeros(64), count=4, stride=1, amount=1.0, BLOCK=4) | change
            launch(add_kernel, (1,), arguments.pop("x"), *[arguments.pop(name) for name in
                   ("count", "stride", "amount")], **arguments)  # fmt: skip
    return len(found)


@interpreter
def test_variants_are_what_triton_compiles_separately() -> None:
    x = torch.zeros(64)
    assert variants({}, {}) == 1
    assert variants({}, {"BLOCK": 8}) == 2
    assert variants({}, {"num_warps": 8}) == 2
    assert variants({}, {"x": x.half()}) == 2
    assert variants({}, {"x": x[1:]}) == 2  # no longer a multiple of 16 bytes
    assert variants({}, {"stride": 2}, {"stride": 16}) == 3
    assert variants({"stride": 2}, {"stride": 3}) == 1
    assert variants({"count": 1}, {"count": 2}, {"count": 16}) == 1  # not specialised
    assert variants({"amount": 1.0}, {"amount": 16.0}) == 1


@interpreter
def test_batch_sizes_make_no_variants() -> None:
    """A capture at another number of rows or tokens must find its kernels compiled."""

    def step(rows: int, tokens_behind: int) -> None:
        x = torch.zeros(rows + tokens_behind, 16)
        loc, slots = torch.arange(rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        weight, conv, ssm = torch.zeros(16, 4), torch.zeros(4, 3, 16), torch.zeros(4, 2, 8, 4)
        rows_of = dict(query_start_loc=loc, src_slots=slots, dst_slots=slots, backend="triton")
        no_state = torch.zeros(rows, dtype=torch.bool)
        causal_conv1d_update(x, weight, None, conv, **rows_of)
        causal_conv1d_fn(x, weight, None, conv, has_initial_state=no_state, **rows_of)
        rms_norm_gated(x, x, weight[:, 0].contiguous(), eps=1.0, group_size=8, backend="triton")
        copy_states([(conv, ssm)], slots, slots, slots, backend="triton")
        table = dict(rows_of, src_slots=slots[:, None], dst_slots=slots[:, None])
        dt, B, per_head = torch.zeros(len(x), 2), torch.zeros(len(x), 1, 4), torch.zeros(2)
        mamba_kernels.selective_state_update(
            x.view(-1, 2, 8), dt, per_head, B, B, per_head, per_head, ssm, **table
        )

    with collect_variants() as found:
        step(1, 0)
        first = set(found)
        for rows, tokens_behind in ((2, 0), (16, 0), (15, 1), (3, 14)):
            step(rows, tokens_behind)
    assert len(first) == 5 and found == first


def test_powers_and_quotients() -> None:
    assert [next_power_of_2(n) for n in (1, 2, 3, 80, 128, 129)] == [1, 2, 4, 128, 128, 256]
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_tuning_takes_the_first_row_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        ("sm_90", {"head_dim": 64}, {"BLOCK": 1}),
        ("any", {"head_dim": 64, "state_bytes": 2}, {"BLOCK": 2}),
        ("any", {}, {"BLOCK": 3}),
    ]
    monkeypatch.setitem(TABLE, "some_kernel", rows)
    assert config_for("some_kernel", "sm_90", head_dim=64, state_bytes=2) == {"BLOCK": 1}
    assert config_for("some_kernel", "gfx942", head_dim=64, state_bytes=2) == {"BLOCK": 2}
    assert config_for("some_kernel", "sm_90", head_dim=80, state_bytes=2) == {"BLOCK": 3}
    config_for("some_kernel", "sm_80")["BLOCK"] = 99
    assert config_for("some_kernel", "sm_80") == {"BLOCK": 3}  # a fresh dict each time
    with pytest.raises(KeyError, match="kernel_name='no_kernel'"):
        config_for("no_kernel", "sm_90")


@pytest.mark.parametrize("kernel_name", TABLE)
def test_each_kernel_has_a_row_for_every_machine(kernel_name: str) -> None:
    for arch in ("sm_80", "sm_90", "sm_100", "gfx942", "interpret"):
        assert config_for(kernel_name, arch)
    assert TABLE[kernel_name][-1][:2] == ("any", {})
    arches = [arch for arch, _, _ in TABLE[kernel_name]]
    assert all(re.fullmatch(r"sm_\d+|gfx\w+|any|interpret", arch) for arch in arches)


# --- the source -------------------------------------------------------------------------------

#: Pointers to slots, offsets, counts, flags and addresses. All others point to operands.
INTEGERS = re.compile(
    r"(query_start_loc|\w*slots?|num_\w+|checkpoint\w*|has_initial_state|\w*table|offsets|\w*order"
    r"|cu_\w+|seq_idx|\w*chunks?|ring_(rows|starts))(_ptr)?"
)
#: Moves words, not numbers: dtypes do not matter to it.
MOVES_BITS = {"copy_states.py"}
#: Between the kernels of the scan: always float32, no caller chooses it.
SCRATCH = {
    "chunk_scan_triton.py": {"states_ptr", "hi_ptr", "lo_ptr", "dt_ptr"},
    "replay_triton.py": {"ring_dt_ptr", "ring_decay_ptr"},
}


def loads_without_upcast(source: str, scratch: Set[str] = frozenset()) -> list[str]:
    """``tl.load`` of an operand that is not turned into float32 on the spot."""
    bad = []
    tree = ast.parse(source)
    upcast = {
        id(node.func.value) for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to" and [ast.unparse(a) for a in node.args] == ["tl.float32"]
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
            pointer = node.args[0]
            while isinstance(pointer, ast.BinOp):  # the leftmost term of a sum
                pointer = pointer.left
            name = ast.unparse(pointer)
            exempt = INTEGERS.fullmatch(name) or name in scratch
            if not exempt and id(node) not in upcast:
                bad.append(f"line {node.lineno}: {ast.unparse(node)}")
    return bad


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_operands_become_float32_as_they_are_loaded(path: Path) -> None:
    """bf16 arithmetic is silently wrong under the interpreter, and rounds each step on a GPU."""
    if path.name not in MOVES_BITS:
        source, scratch = path.read_text(encoding="utf-8"), SCRATCH.get(path.name, set())
        assert loads_without_upcast(source, scratch) == []


def test_the_guard_sees_a_missing_upcast() -> None:
    good = "x = tl.load(x_ptr + i, mask=m).to(tl.float32)\nr = tl.load(src_slots_ptr + r)"
    assert loads_without_upcast(good) == []
    for bad in ("x = tl.load(x_ptr + i)", "x = tl.load(x_ptr + i).to(tl.bfloat16)",
                "h = tl.load(state_ptr + slot * stride)\nh = h.to(tl.float32)"):  # fmt: skip
        assert len(loads_without_upcast(bad)) == 1, bad


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_kernels_are_launched_through_the_wrapper_without_waiting(path: Path) -> None:
    """No ``kernel[grid](...)`` but in launch.py; no ``.item()`` where a kernel is launched."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            assert path.name == "launch.py", f"line {node.lineno}: {ast.unparse(node)}"
    if "launch(" not in ast.unparse(tree) or path.name == "launch.py":
        return
    for function in (n for n in tree.body if isinstance(n, ast.FunctionDef)):
        body = ast.unparse(function)
        if "launch(" in body:
            for sync in (".item()", ".tolist()", ".cpu()", ".nonzero()", "bool(", ".any()"):
                assert sync not in body, f"{function.name} has {sync}"


def test_the_interpreter_is_what_these_tests_ran() -> None:
    if not torch.cuda.is_available():
        assert triton_mode() in ("interpret", "absent")


def test_launch_is_a_frozen_record() -> None:
    event = Launch("k", (1,), (), {}, None)
    with pytest.raises(AttributeError):
        event.grid = (2,)  # type: ignore[misc]
