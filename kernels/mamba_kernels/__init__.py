"""The numerical core: Mamba2's convolution, scan, update and norm over a *paged* state cache.

Each function works on packed tokens (all sequences of a step in one ``(T, ...)`` tensor, cut by
``query_start_loc``) and on *slots*: row numbers of a state pool. A slot id says where a state is
read from or written to; which request it belongs to is not the kernels' business.

Slot 0 is the null slot. It is never read and never written, so padding can point at it.
"""

from mamba_kernels.chunk_layout import ChunkLayout, build_chunk_layout
from mamba_kernels.chunk_scan import mamba_chunk_scan
from mamba_kernels.conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_kernels.copy_states import copy_states
from mamba_kernels.gated_norm import rms_norm_gated
from mamba_kernels.replay import (
    ReplayRing,
    materialize_states,
    must_flush,
    replay_state_update,
)
from mamba_kernels.state_update import selective_state_update

NULL_SLOT = 0

__all__ = [
    "NULL_SLOT",
    "ChunkLayout",
    "ReplayRing",
    "build_chunk_layout",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "copy_states",
    "mamba_chunk_scan",
    "materialize_states",
    "must_flush",
    "replay_state_update",
    "rms_norm_gated",
    "selective_state_update",
]
