"""What each kernel must move at least, in bytes: the formulas of ``kernels/README.md``, as functions.

A memory-bound kernel is judged by one fraction: these bytes divided by its time, against the copy
bandwidth of the same device. A kernel that reads something twice gets no credit for the second
time. Letters are the README's: ``a`` bytes of an activation, ``s`` bytes of a number of the state.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """One Mamba2 mixer: heads, head dim, state, groups, conv width."""

    H: int
    P: int
    N: int
    G: int
    W: int = 4

    @property
    def C(self) -> int:
        """Channels of the convolution."""
        return self.H * self.P + 2 * self.G * self.N

    @property
    def HPN(self) -> int:
        """Numbers in the state of one layer of one sequence."""
        return self.H * self.P * self.N


NEMOTRON_H = {"P64": Sizes(128, 64, 128, 8), "P80": Sizes(128, 80, 128, 8)}


def conv_prefill(z: Sizes, L: int, K: int, a: int) -> int:
    """``L`` tokens in and out, and ``K`` windows kept."""
    return 2 * L * z.C * a + K * (z.W - 1) * z.C * a


def conv_update(z: Sizes, R: int, T: int, a: int) -> int:
    """``R`` rows of ``T`` tokens: tokens in and out, history in, window out; the weights once."""
    return R * (2 * T + (z.W - 1) + (z.W - 2 + T)) * z.C * a + z.C * (z.W + 1) * a


def state_update(z: Sizes, R: int, T: int, a: int, s: int) -> int:
    """One state in and ``T`` out a row, and the tokens' x, y, B, C and dt."""
    tokens = T * (2 * z.H * z.P + 2 * z.G * z.N + z.H) * a
    return R * ((1 + T) * z.HPN * s + tokens)


def ring_entry(z: Sizes, a: int) -> int:
    """One input of the replay ring: x, B, and per head a step size and its decay in fp32."""
    return (z.H * z.P + z.G * z.N) * a + 8 * z.H


def replay_update(z: Sizes, R: int, T: int, pending: int, flushed_rows: int, a: int, s: int) -> int:
    """One state a row in, one out a row that flushes; the tokens' x, y, B, C and dt; the ring's
    ``pending`` inputs (of all rows together) in, and the tokens' inputs out."""
    tokens = T * (2 * z.H * z.P + 2 * z.G * z.N + z.H) * a
    inputs = (pending + R * T) * ring_entry(z, a)
    return (R + flushed_rows) * z.HPN * s + R * tokens + inputs


def materialize(z: Sizes, M: int, states: int, inputs: int, layers: int, a: int, s: int) -> int:
    """Per layer ``M`` checkpoints and ``inputs`` entries of the ring in, ``states`` states out."""
    return layers * ((M + states) * z.HPN * s + inputs * ring_entry(z, a))


def gated_norm(z: Sizes, L: int, a: int) -> int:
    """x and the gate in, y out."""
    return 3 * L * z.H * z.P * a


def copy_states(z: Sizes, triples: int, layers: int, window_len: int, a: int, s: int) -> int:
    """A state and a window, read and written, per triple and layer.

    The README counts a window of ``W - 1`` inputs; a speculative one of ``W - 1 + k`` is longer.
    """
    return triples * layers * (2 * z.HPN * s + 2 * window_len * z.C * a)


def chunk_state(z: Sizes, L: int, c: int, a: int) -> int:
    """x, B, dt in; step sizes and two halves of the exponents out; a state of every chunk out."""
    return L * (z.H * z.P + z.G * z.N + z.H) * a + 12 * L * z.H + 4 * c * z.HPN


def pass_states(z: Sizes, R: int, c: int, K: int, s: int) -> int:
    """Every chunk's state in and out, ``R`` initial ones in, ``K`` kept ones out."""
    return 8 * c * z.HPN + (R + K) * z.HPN * s


def chunk_scan(z: Sizes, L: int, c: int, a: int) -> int:
    """x, B, C, steps and exponents in, every chunk's state in, y out."""
    return L * (2 * z.H * z.P + 2 * z.G * z.N) * a + 12 * L * z.H + 4 * c * z.HPN


def whole_scan(z: Sizes, L: int, R: int, c: int, K: int, a: int, s: int) -> int:
    """The three kernels of ``mamba_chunk_scan`` together."""
    return chunk_state(z, L, c, a) + pass_states(z, R, c, K, s) + chunk_scan(z, L, c, a)


def fused_scan(z: Sizes, L: int, R: int, K: int, a: int, s: int) -> int:
    """x, B, C, dt in and y out, ``R`` initial states in, ``K`` kept ones out; no state of a chunk.

    B and C count once: they are in the L2 cache when the other heads of their group ask for them.
    """
    return L * (2 * z.H * z.P + 2 * z.G * z.N + z.H) * a + (R + K) * z.HPN * s
