"""``rms_norm_gated``: closed forms, the formula in float64, widths of all kinds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_reference import assert_close, f64, gated_norm

from mamba_kernels import rms_norm_gated
from mamba_kernels.launch import count_launches

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interpreter)]


def gate_with_silu(values: list[float]) -> torch.Tensor:
    """The positive gates whose SiLU is the given values (Newton's method in float64)."""
    target = torch.tensor(values, dtype=torch.float64)
    z = target.clone()
    for _ in range(50):
        s = torch.sigmoid(z)
        z = z - (z * s - target) / (s + z * s * (1 - s))
    return z.float()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inner", [32, 24])
def test_each_group_has_its_own_mean(backend: str, inner: int) -> None:
    """Half the channels 10, half 1: all 1 if grouped, 1.407 and 0.141 if not."""
    half = inner // 2
    x = torch.tensor([[10.0] * half + [1.0] * half])
    gate, weight = gate_with_silu([1.0] * inner)[None], torch.ones(inner)
    grouped = rms_norm_gated(x, gate, weight, eps=1e-12, group_size=half, backend=backend)
    assert torch.allclose(grouped, torch.ones(1, inner), atol=1e-6)
    whole = rms_norm_gated(x, gate, weight, eps=1e-12, group_size=inner, backend=backend)
    expected = x / math.sqrt(50.5)
    assert torch.allclose(whole, expected, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_first_or_norm_first(backend: str) -> None:
    x, weight, gate = torch.tensor([[2.0, 2.0]]), torch.ones(2), gate_with_silu([1.0, 3.0])[None]
    for norm_before_gate, expected in ((False, [0.4472136, 1.3416408]), (True, [1.0, 3.0])):
        y = rms_norm_gated(x, gate, weight, eps=1e-12, group_size=2,
                           norm_before_gate=norm_before_gate, backend=backend)  # fmt: skip
        assert torch.allclose(y, torch.tensor([expected]), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(
    tokens=st.sampled_from([0, 1, 3, 16, 17]),
    groups=st.sampled_from([1, 2, 5]),
    group_size=st.sampled_from([1, 3, 16, 20, 80]),
    norm_before_gate=st.booleans(),
    eps=st.sampled_from([1e-5, 0.5]),
    seed=st.integers(0, 99),
)
def test_equals_the_formula(
    backend: str, tokens: int, groups: int, group_size: int, norm_before_gate: bool, eps: float,
    seed: int,
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    inner = groups * group_size
    # The gate is the first part of a projection, x the output of the scan in a wider buffer.
    gate = torch.randn(tokens, 2 * inner + 3, generator=g)[:, :inner]
    x = torch.randn(tokens, inner + 1, generator=g)[:, :inner] * 3
    weight = torch.randn(inner, generator=g)
    y = rms_norm_gated(x, gate, weight, eps=eps, group_size=group_size,
                       norm_before_gate=norm_before_gate, backend=backend)  # fmt: skip
    expected = gated_norm(f64(x), f64(gate), f64(weight), eps, group_size, norm_before_gate)
    assert_close(y, expected, "y")


@pytest.mark.interpreter
def test_bfloat16_operands() -> None:
    """The interpreter computes rubbish with bf16 that was not upcast, and says nothing."""
    g = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 4, 40, generator=g).bfloat16()
    weight = torch.randn(40, generator=g).bfloat16()
    y = rms_norm_gated(x, gate, weight, eps=1e-5, group_size=20, backend="triton")
    assert y.dtype == torch.bfloat16
    assert_close(y, gated_norm(f64(x), f64(gate), f64(weight), 1e-5, 20, False), "y", rtol=1e-2)


@pytest.mark.interpreter
def test_one_launch() -> None:
    x, weight = torch.ones(3, 8), torch.ones(8)
    with count_launches() as count:
        rms_norm_gated(x, x, weight, eps=1e-12, group_size=2, backend="triton")
        rms_norm_gated(x[:0], x[:0], weight, eps=1e-12, group_size=2, backend="triton")
    assert count.by_kernel == {"rms_norm_gated_kernel": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(gate=torch.ones(3, 7)), r"gate has shape \(3, 7\); expected \(3, 8\)"),
        (dict(weight=torch.ones(1)), r"weight has shape \(1,\); expected \(8,\)"),
        (dict(group_size=3), "group_size=3 must divide d_inner=8"),
        (dict(group_size=0), "group_size=0 must divide"),
        (dict(x=torch.ones(3, 8).int()), "x has dtype torch.int32; allowed: float32, bfloat16"),
        (dict(x=torch.ones(8, 3).T), r"x has strides \(1, 3\); the last one must be 1"),
    ],
)
def test_wrong_arguments_are_named(change: dict, message: str) -> None:
    x, weight = torch.ones(3, 8), torch.ones(8)
    good = dict(x=x, gate=x, weight=weight, eps=0.0, group_size=4)
    backend = "triton" if "strides" in message else "torch"
    if backend == "triton":
        pytest.importorskip("triton", reason="strides matter to the Triton kernel only")
    with pytest.raises(ValueError, match=message):
        rms_norm_gated(**(good | change), backend=backend)
