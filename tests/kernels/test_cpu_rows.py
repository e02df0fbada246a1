"""Row by row on a CPU equals the torch twins: same results, same slots written, nothing else touched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mamba_kernels import (
    causal_conv1d_fn,
    causal_conv1d_update,
    cpu_rows,
    mamba_chunk_scan,
    selective_state_update,
)

H, P, N, G, W = 4, 8, 16, 2, 4


@pytest.fixture(autouse=True)
def small_states_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rows, "WORTH_A_LOOP", 0)


@pytest.fixture(params=range(6))
def g(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(request.param)


def rand(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g)


def pool(g: torch.Generator, slots: int, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """Slots that lie apart, as in pages; the null slot is NaN: whoever reads it shows it."""
    size = math.prod(shape)
    states = rand(g, slots, size + 5).to(dtype)[:, :size].unflatten(1, shape)
    states[0] = math.nan
    return states


def inputs(g: torch.Generator, lengths: list[int], padding: int) -> dict[str, Any]:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = int(starts[-1]) + padding
    widths = [H * P, G * N, G * N, 3]
    x, B, C, _ = rand(g, tokens, sum(widths)).split(widths, 1)  # views, as of one projection
    return dict(
        x=x.unflatten(1, (H, P)), B=B.unflatten(1, (G, N)), C=C.unflatten(1, (G, N)),
        dt=2 * rand(g, tokens, H), A=-3 * torch.rand(H, generator=g), D=rand(g, H),
        dt_bias=rand(g, H), query_start_loc=starts,
    )  # fmt: skip


@torch.no_grad()
def both(
    function: Any, state_name: str, state: torch.Tensor, monkeypatch: Any, **args: Any
) -> None:
    """Run by row and as the twin; compare results and whole pools, poison and gaps included."""
    forms = []
    for backend in (None, "torch"):
        mine = state.clone(memory_format=torch.preserve_format)
        y = function(**args, **{state_name: mine}, backend=backend)
        forms.append((y, mine))
    (y, mine), (expected, theirs) = forms
    assert y.dtype == expected.dtype and y.shape == expected.shape
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)
    tolerance = 2e-5 if state.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert mine[0].isnan().all(), "the null slot was written"
    changed = (theirs != state).flatten(1).any(1)  # NaN differs from itself
    same = ~changed
    assert torch.equal(mine[same], state[same]), "a slot that is nobody's was written"


def spy(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> list[Any]:
    """What the row-by-row form returned: it must have been used."""
    calls: list[Any] = []
    real = getattr(cpu_rows, name)

    def watched(*args: Any) -> Any:
        calls.append(real(*args))
        return calls[-1]

    monkeypatch.setattr(f"mamba_kernels.{module}.{name}", watched)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_update(
    g: torch.Generator, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 0 .. 1 + k tokens, null sources and destinations, padding behind the last row."""
    calls = spy(monkeypatch, "state_update", "state_update_by_row")
    for k in (0, 2):
        lengths = torch.randint(0, k + 2, (5,), generator=g).tolist()
        slots = 1 + torch.randperm(20 * (1 + k), generator=g).int()
        src, dst = (s.view(-1, 1 + k)[:5] for s in slots.chunk(2))
        dst[torch.rand(dst.shape, generator=g) < 0.2] = 0
        src[1] = 0
        both(
            selective_state_update, "ssm_state", pool(g, 64, H, P, N, dtype=dtype), monkeypatch,
            **inputs(g, lengths, padding=2), src_slots=src, dst_slots=dst, dt_limit=(0.01, 2.0),
            num_accepted_tokens=torch.randint(1, k + 2, (5,), generator=g).int(),
        )  # fmt: skip
    assert len(calls) == 2


def test_state_update_in_place(g: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = torch.tensor([[3], [1], [7]], dtype=torch.int32)
    both(
        selective_state_update, "ssm_state", pool(g, 9, H, P, N), monkeypatch,
        **inputs(g, [1, 1, 1], padding=0), src_slots=slots, dst_slots=slots,
    )  # fmt: skip


def test_conv_update(g: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token in every row; where the window is read does not depend on where it is written."""
    calls = spy(monkeypatch, "conv1d", "conv_update_single_tokens")
    channels, k = 6, 2
    args = dict(weight=rand(g, channels, W), bias=rand(g, channels))
    for src, accepted in (([4, 2, 9], [1, 3, 2]), ([4, 0, 9], [1, 1, 1])):
        both(
            causal_conv1d_update, "conv_state", pool(g, 12, W - 1 + k, channels), monkeypatch,
            x=rand(g, 3, channels), **args, query_start_loc=torch.arange(4).int(),
            src_slots=torch.tensor(src), dst_slots=torch.tensor([4, 5, 6]),
            num_accepted_tokens=torch.tensor(accepted),
        )  # fmt: skip
    assert calls[0] is not None and calls[1] is None  # a null source is the twin's


def test_conv_prefill(g: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short and long rows, none of a multiple of the piece; fresh, continued and null sources."""
    monkeypatch.setattr(cpu_rows, "CONV_TOKENS", 5)
    calls = spy(monkeypatch, "conv1d", "conv_by_row")
    lengths, channels = [1, 0, 13, 2, 7], 6
    for bias, activation in ((rand(g, channels), "silu"), (None, None)):
        both(
            causal_conv1d_fn, "conv_state", pool(g, 24, W - 1 + 1, channels), monkeypatch,
            x=rand(g, 26, channels), weight=rand(g, channels, W), bias=bias, activation=activation,
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
            src_slots=torch.tensor([1, 2, 3, 0, 5]), dst_slots=torch.tensor([6, 7, 8, 9, 0]),
            has_initial_state=torch.tensor([True, True, False, True, True]),
            checkpoints=torch.tensor([[2, 1, 10], [2, 12, 11], [4, 7, 12], [0, 1, 0]]),
        )  # fmt: skip
    assert len(calls) == 2


def test_chunk_scan(g: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spy(monkeypatch, "chunk_scan", "chunk_scan_by_row")
    lengths = [1, 0, 13, 2, 7]
    both(
        mamba_chunk_scan, "ssm_state", pool(g, 24, H, P, N), monkeypatch,
        **inputs(g, lengths, padding=3), num_computed_tokens=torch.tensor([5, 0, 0, 3, 9]),
        chunk_size=4, src_slots=torch.tensor([1, 2, 3, 0, 5]),
        dst_slots=torch.tensor([6, 7, 8, 9, 0]),
        has_initial_state=torch.tensor([True, True, False, True, True]),
        checkpoints=torch.tensor([[2, 1, 10], [2, 12, 11], [4, 7, 12], [0, 1, 0], [2, 12, 13]]),
        dt_limit=(0.01, 3.0),
    )  # fmt: skip
    assert len(calls) == 1


def test_a_token_that_forgets_everything_leaves_the_next_ones_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind ``dt A = -1e9`` a float32 sum is deaf; the recurrence in float64 is not."""
    args = inputs(torch.Generator().manual_seed(0), [6], padding=0)
    args["dt"][:] = 0.5
    args["dt"][2] = 1e9
    with torch.no_grad():
        y = mamba_chunk_scan(
            **args, ssm_state=torch.zeros(2, H, P, N), num_computed_tokens=torch.tensor([0]),
            chunk_size=8, src_slots=torch.tensor([0]), dst_slots=torch.tensor([1]),
            has_initial_state=torch.tensor([False]),
        )  # fmt: skip
    wide = {name: value.double() for name, value in args.items()}
    dt = torch.nn.functional.softplus(wide["dt"] + wide["dt_bias"])
    h = torch.zeros(H, P, N, dtype=torch.float64)
    for t in range(6):
        B, C = (wide[m][t].repeat_interleave(H // G, 0)[:, None] for m in "BC")
        h = torch.exp(dt[t] * wide["A"])[:, None, None] * h
        h = h + dt[t][:, None, None] * wide["x"][t][..., None] * B
        expected = (h * C).sum(-1) + wide["D"][:, None] * wide["x"][t]
        torch.testing.assert_close(y[t].double(), expected, rtol=1e-5, atol=1e-4)


def test_only_where_the_host_may_read() -> None:
    """Whoever records or differentiates gets code without branches on values."""
    x = torch.zeros(3)
    assert not cpu_rows.host_may_read(x)  # gradients are on
    with torch.no_grad():
        assert cpu_rows.host_may_read(x)
        assert not cpu_rows.host_may_read(x.to("meta"))
        with TorchDispatchMode():
            assert not cpu_rows.host_may_read(x)
        assert cpu_rows.row_by_row(x, 1)


def test_small_rows_are_left_to_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rows, "WORTH_A_LOOP", 100)
    with torch.no_grad():
        assert not cpu_rows.row_by_row(torch.zeros(3), 99)
        assert cpu_rows.row_by_row(torch.zeros(3), 100)


def test_a_pool_that_is_not_contiguous_inside_a_slot_takes_the_twin() -> None:
    """Any strides are allowed; going row by row wants a slot in one piece."""
    heads, width, entries = 4, 64, 128
    states = torch.randn(4, heads, entries, width).transpose(2, 3)
    x, B = torch.randn(1, heads, width), torch.randn(1, 1, entries)
    per_head, dt = torch.rand(heads), torch.randn(1, heads)
    rows = dict(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        src_slots=torch.tensor([[1]], dtype=torch.int32),
        dst_slots=torch.tensor([[2]], dtype=torch.int32),
    )
    results = []
    for backend in ("torch", None):
        state = states.clone(memory_format=torch.preserve_format)
        assert not state[0].is_contiguous()
        with torch.inference_mode():
            y = selective_state_update(
                x, dt, -per_head, B, B, per_head, per_head, state, backend=backend, **rows
            )
        results.append((y, state))
    assert all(torch.equal(a, b) for a, b in zip(*results))
