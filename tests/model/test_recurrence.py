"""The Mamba2 mixer against its own definition: one token at a time, in float64, with plain loops.

The reference below follows the formulas of the design page (section 3) line by line and shares
nothing with the package but the weights.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from model.stepper import Stepper, randomize

from mamba_teach.config import ModelConfig
from mamba_teach.model.hybrid import HybridModel

LENGTH = 37


class Reference:
    """One sequence's mixer: ``step`` takes a token's input and returns its output."""

    def __init__(self, config: ModelConfig, weights: dict[str, np.ndarray]) -> None:
        self.c, self.w = config, weights
        channels = config.mamba_num_heads * config.mamba_head_dim
        channels += 2 * config.n_groups * config.ssm_state_size
        self.window = np.zeros((config.conv_kernel - 1, channels))
        self.h = np.zeros((config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size))

    def linear(self, name: str, u: np.ndarray) -> np.ndarray:
        return self.w[f"{name}.weight"] @ u + self.w.get(f"{name}.bias", 0.0)

    def step(self, u: np.ndarray) -> np.ndarray:
        c, w = self.c, self.w
        H, P, N, G = c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, c.n_groups
        projected = self.linear("in_proj", u)
        gate, rest = projected[: H * P], projected[H * P :]
        conv_input, dt = rest[:-H], rest[-H:]

        seen = np.vstack([self.window, conv_input])  # oldest first
        self.window = seen[1:]
        mixed = np.zeros_like(conv_input)
        for channel in range(len(mixed)):
            for tap in range(c.conv_kernel):
                mixed[channel] += w["conv1d.weight"][channel, 0, tap] * seen[tap, channel]
        mixed = silu(mixed + w.get("conv1d.bias", 0.0))
        x = mixed[: H * P].reshape(H, P)
        B = mixed[H * P : H * P + G * N].reshape(G, N)
        C = mixed[H * P + G * N :].reshape(G, N)

        y = np.zeros((H, P))
        for head in range(H):
            group = head // (H // G)
            step = math.log1p(math.exp(dt[head] + w["dt_bias"][head]))
            step = min(max(step, c.time_step_limit[0]), c.time_step_limit[1])
            decay = math.exp(step * -math.exp(w["A_log"][head]))
            self.h[head] = decay * self.h[head] + step * np.outer(x[head], B[group])
            y[head] = self.h[head] @ C[group] + w["D"][head] * x[head]

        gated = y.reshape(-1) * silu(gate)
        width = H * P // G
        for group in range(G):
            part = gated[group * width : (group + 1) * width]
            part /= math.sqrt(np.mean(part**2) + c.layer_norm_epsilon)  # in place
        return self.linear("out_proj", gated * w["norm.weight"])


def silu(v: np.ndarray) -> np.ndarray:
    return v / (1.0 + np.exp(-v))


SIZES = ModelConfig(
    vocab_size=11, hidden_size=20, pattern="M", mamba_num_heads=6, mamba_head_dim=5,
    ssm_state_size=7, n_groups=2, conv_kernel=4, chunk_size=8,
)  # fmt: skip
CONFIGS = {
    "two groups": SIZES,
    "one group": replace(SIZES, n_groups=1),
    "a group per head": replace(SIZES, n_groups=6),
    "biases": replace(SIZES, use_bias=True),
    "no conv bias": replace(SIZES, use_conv_bias=False, n_groups=3),
    "finite limits": replace(SIZES, time_step_limit=(0.2, 0.5)),
    "lower limit": replace(SIZES, time_step_limit=(0.4, math.inf)),
    "heads of 3, states of 1": replace(SIZES, mamba_head_dim=3, ssm_state_size=1),
    "heads of 12, chunks of 5": replace(SIZES, mamba_head_dim=12, chunk_size=5),
    "one head, narrow conv": replace(SIZES, mamba_num_heads=1, n_groups=1, conv_kernel=2),
    "long chunks": replace(SIZES, chunk_size=64),
    "large epsilon": replace(SIZES, layer_norm_epsilon=0.3),
}


@pytest.mark.parametrize("splits", [[LENGTH], [1, 12, 3, 21], [6] + [1] * (LENGTH - 6)], ids=str)
@pytest.mark.parametrize("decode_ones", [False, True], ids=["prefill", "decode ones"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@torch.no_grad()
def test_mixer_is_the_recurrence(config: ModelConfig, decode_ones: bool, splits: list[int]) -> None:
    model = HybridModel(config)
    randomize(model, seed=3)
    mixer = model.model.layers[0].mixer
    inputs = torch.randn(LENGTH, config.hidden_size, generator=torch.Generator().manual_seed(1))

    reference = Reference(config, {k: v.double().numpy() for k, v in mixer.state_dict().items()})
    expected = np.stack([reference.step(u) for u in inputs.double().numpy()])

    stepper, outputs = Stepper(model), []
    for piece in inputs.split(splits):
        decode = [0] if decode_ones and len(piece) == 1 and stepper.computed[0] else []
        outputs.append(
            mixer(piece, stepper.mamba_metadata({0: len(piece)}, decode), stepper.caches[0])
        )
        stepper.computed[0] += len(piece)

    def close(ours: torch.Tensor, theirs: np.ndarray) -> None:
        assert 0.05 < theirs.std() < 50
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=2e-5)

    close(torch.cat(outputs), expected)
    close(stepper.caches[0].conv[1], reference.window)
    close(stepper.caches[0].ssm[1], reference.h)
    assert stepper.caches[0].ssm[0].isnan().all(), "the null slot was written"
