"""Small functions that several Triton kernels call on fp32 values."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from mamba_kernels.backend import jit, tl


@jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@jit
def softplus(x):
    """log(1 + exp(x)), and x itself above 20, as torch has it.

    Step sizes are often small: at x = -12, 1 + exp(x) in fp32 has lost all but a few bits of
    exp(x), and with them the relative accuracy of dt, hence of everything that enters the state.
    Kahan's correction gives them back: log(u) / (u - 1) is smooth in u, so an error that u and
    u - 1 share cancels.
    """
    e = tl.exp(tl.where(x > 20.0, 0.0, x))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@jit
def step_size(raw, bias, dt_min, dt_max):
    """clamp(softplus(raw + bias), dt_min, dt_max). Comparisons keep a NaN, as torch does."""
    dt = softplus(raw + bias)
    dt = tl.where(dt < dt_min, dt_min, dt)
    return tl.where(dt > dt_max, dt_max, dt)
