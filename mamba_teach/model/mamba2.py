"""The Mamba2 mixer: project, convolve, scan, gate, project back.

Per token the mixer makes five things from its input: a gate, the signal ``x``, the input and output
maps ``B`` and ``C``, and a step size ``dt``. A short convolution mixes the neighbours of ``x``,
``B`` and ``C``; the scan carries a state of ``H x P x N`` numbers along the sequence; the gate says
how much of the result passes. This file is the plain part; the two kernels that touch the cached
state get slots from the step's metadata (see ``metadata.py``) and do the rest.

Sources: Mamba2 paper (section 7); parameter names and order as ``NemotronHForCausalLM``.
"""

from __future__ import annotations

import torch
from torch import nn

from mamba_kernels import (
    causal_conv1d_fn,
    causal_conv1d_update,
    mamba_chunk_scan,
    replay_state_update,
    rms_norm_gated,
    selective_state_update,
)
from mamba_teach.config import ModelConfig
from mamba_teach.model.linear import Linear
from mamba_teach.model.metadata import MambaCache, MambaMetadata


class DepthwiseConv(nn.Module):
    """Weights of the convolution, shaped ``(conv_dim, 1, W)`` as checkpoints have them."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None


class GatedNorm(nn.Module):
    """Weight of the gated norm, ``(d_inner,)``."""

    def __init__(self, d_inner: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_inner))


class Mamba2Mixer(nn.Module):
    """``(T, hidden) -> (T, hidden)``; reads and writes its cache by slots."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.mamba_num_heads
        # Rows of in_proj: gate d_inner | x d_inner | B G*N | C G*N | dt H
        self.split_sizes = [config.d_inner, config.conv_dim, heads]
        self.in_proj = Linear(config.hidden_size, sum(self.split_sizes), bias=config.use_bias)
        self.conv1d = DepthwiseConv(config.conv_dim, config.conv_kernel, config.use_conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.norm = GatedNorm(config.d_inner)
        self.out_proj = Linear(config.d_inner, config.hidden_size, bias=config.use_bias)

    def forward(
        self, hidden: torch.Tensor, metadata: MambaMetadata, cache: MambaCache
    ) -> torch.Tensor:
        """Mix ``hidden (T, hidden_size)``; mutates the destination slots of ``cache``."""
        gate, conv_input, dt = self.in_proj(hidden).split(self.split_sizes, dim=-1)
        split = metadata.num_decode_tokens  # decode rows first
        parts = []
        if metadata.decode is not None:
            parts.append(self._decode(conv_input[:split], dt[:split], metadata, cache))
        if metadata.prefill is not None:
            parts.append(self._prefill(conv_input[split:], dt[split:], metadata, cache))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)  # (T, H, P)
        y = rms_norm_gated(
            y.flatten(1),
            gate,
            self.norm.weight,
            eps=self.config.layer_norm_epsilon,
            group_size=self.config.norm_group_size,
        )
        return self.out_proj(y)

    def _decode(
        self, conv_input: torch.Tensor, dt: torch.Tensor, metadata: MambaMetadata, cache: MambaCache
    ) -> torch.Tensor:
        rows = metadata.decode
        assert rows is not None
        mixed = causal_conv1d_update(
            conv_input,
            self.conv1d.weight[:, 0],
            self.conv1d.bias,
            cache.conv,
            query_start_loc=rows.query_start_loc,
            src_slots=rows.conv_src_slots,
            dst_slots=rows.conv_dst_slots,
            num_accepted_tokens=rows.num_accepted_tokens,
        )
        x, B, C = self._split_heads(mixed)
        if cache.ring is not None:
            assert rows.ring_rows is not None
            assert rows.ring_starts is not None and rows.num_pending is not None
            return replay_state_update(
                x,
                dt,
                self.negative_rates(),
                B,
                C,
                self.D,
                self.dt_bias,
                cache.ssm,
                cache.ring,
                query_start_loc=rows.query_start_loc,
                src_slots=rows.ssm_src_slots[:, 0],
                dst_slots=rows.ssm_dst_slots[:, 0],
                ring_rows=rows.ring_rows,
                ring_starts=rows.ring_starts,
                num_pending=rows.num_pending,
                dt_limit=self.config.time_step_limit,
            )
        return selective_state_update(
            x,
            dt,
            self.negative_rates(),
            B,
            C,
            self.D,
            self.dt_bias,
            cache.ssm,
            query_start_loc=rows.query_start_loc,
            src_slots=rows.ssm_src_slots,
            dst_slots=rows.ssm_dst_slots,
            num_accepted_tokens=rows.num_accepted_tokens,
            dt_limit=self.config.time_step_limit,
        )

    def _prefill(
        self, conv_input: torch.Tensor, dt: torch.Tensor, metadata: MambaMetadata, cache: MambaCache
    ) -> torch.Tensor:
        rows = metadata.prefill
        assert rows is not None
        mixed = causal_conv1d_fn(
            conv_input,
            self.conv1d.weight[:, 0],
            self.conv1d.bias,
            cache.conv,
            query_start_loc=rows.query_start_loc,
            src_slots=rows.src_slots,
            dst_slots=rows.dst_slots,
            has_initial_state=rows.has_initial_state,
            checkpoints=rows.checkpoints,
        )
        x, B, C = self._split_heads(mixed)
        return mamba_chunk_scan(
            x,
            dt,
            self.negative_rates(),
            B,
            C,
            self.D,
            self.dt_bias,
            cache.ssm,
            query_start_loc=rows.query_start_loc,
            num_computed_tokens=rows.num_computed_tokens,
            chunk_size=rows.layout.chunk_size,
            src_slots=rows.src_slots,
            dst_slots=rows.dst_slots,
            has_initial_state=rows.has_initial_state,
            checkpoints=rows.checkpoints,
            dt_limit=self.config.time_step_limit,
            layout=rows.layout,
        )

    def negative_rates(self) -> torch.Tensor:
        """``A``, ``(H,)`` fp32: in 16 bits ``exp(A_log)`` would overflow for large heads."""
        return -torch.exp(self.A_log.float())

    def _split_heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        maps = c.n_groups * c.ssm_state_size
        x, B, C = mixed.split([c.d_inner, maps, maps], dim=-1)
        return (
            x.unflatten(-1, (c.mamba_num_heads, c.mamba_head_dim)),  # (T, H, P)
            B.unflatten(-1, (c.n_groups, c.ssm_state_size)),  # (T, G, N)
            C.unflatten(-1, (c.n_groups, c.ssm_state_size)),
        )
