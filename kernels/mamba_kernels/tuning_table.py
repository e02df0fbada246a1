"""Launch configurations: rows of (architecture, shape, configuration). Rewritten by `make tune`.

The first row whose architecture and shape fit is taken (see tuning.py). "interpret" is the CPU's
interpreter, whose cost is per program and hardly per element: there, blocks are wide.
"""

from __future__ import annotations

from typing import Any

# How many programs a kernel must have at least to keep a whole GPU busy: one for each of its
# multiprocessors. The interpreter runs one after another, and fewer are always better.
PROGRAMS_TO_FILL = (
    ("interpret", 1),
    ("sm_80", 108),
    ("sm_100", 148),
    ("gfx942", 304),
    ("any", 132),
)

TABLE: dict[str, list[tuple[str, dict[str, int], dict[str, Any]]]] = {
    "selective_state_update_kernel": [
        ("interpret", {}, {"BLOCK_P": 128, "num_warps": 1, "num_stages": 1}),
        ("any", {"state_bytes": 4}, {"BLOCK_P": 16, "num_warps": 4, "num_stages": 1}),
        ("any", {}, {"BLOCK_P": 16, "num_warps": 2, "num_stages": 1}),
    ],
    "causal_conv1d_update_kernel": [
        ("interpret", {}, {"BLOCK_C": 1024, "num_warps": 1, "num_stages": 1}),
        ("any", {}, {"BLOCK_C": 256, "num_warps": 2, "num_stages": 1}),
    ],
    "causal_conv1d_fn_kernel": [
        ("interpret", {}, {"BLOCK_T": 32, "BLOCK_C": 1024, "num_warps": 1, "num_stages": 1}),
        ("any", {}, {"BLOCK_T": 16, "BLOCK_C": 256, "num_warps": 8, "num_stages": 1}),
    ],
    "rms_norm_gated_kernel": [
        ("interpret", {}, {"BLOCK_ROWS": 16, "num_warps": 1, "num_stages": 1}),
        ("any", {"wide": 1}, {"BLOCK_ROWS": 1, "num_warps": 16, "num_stages": 1}),
        ("any", {}, {"BLOCK_ROWS": 1, "num_warps": 4, "num_stages": 1}),
    ],
    "copy_states_kernel": [
        ("interpret", {}, {"BLOCK_WORDS": 16384, "num_warps": 1, "num_stages": 1}),
        ("any", {}, {"BLOCK_WORDS": 2048, "num_warps": 8, "num_stages": 1}),
    ],
    "replay_state_update_kernel": [
        ("interpret", {}, {"BLOCK_P": 128, "num_warps": 1, "num_stages": 1}),
        ("any", {}, {"BLOCK_P": 16, "num_warps": 4, "num_stages": 1}),
    ],
    "materialize_states_kernel": [
        ("interpret", {}, {"BLOCK_P": 128, "num_warps": 1, "num_stages": 1}),
        ("any", {}, {"BLOCK_P": 16, "num_warps": 4, "num_stages": 1}),
    ],
    "chunk_state_kernel": [
        ("interpret", {}, {"BLOCK_T": 64, "BLOCK_P": 128, "num_warps": 1, "num_stages": 1}),
        ("any", {"dot_bytes": 4}, {"BLOCK_T": 32, "BLOCK_P": 32, "num_warps": 8, "num_stages": 1}),
        ("any", {"head_dim": 80}, {"BLOCK_T": 64, "BLOCK_P": 32, "num_warps": 4, "num_stages": 1}),
        ("any", {}, {"BLOCK_T": 64, "BLOCK_P": 64, "num_warps": 4, "num_stages": 1}),
    ],
    "fused_scan_kernel": [
        ("interpret", {}, {"BLOCK_T": 64, "BLOCK_P": 128, "num_warps": 1, "num_stages": 1}),
        ("any", {"dot_bytes": 4}, {"BLOCK_T": 16, "BLOCK_P": 32, "num_warps": 8, "num_stages": 1}),
        ("sm_80", {}, {"BLOCK_T": 32, "BLOCK_P": 16, "num_warps": 4, "num_stages": 1}),
        ("gfx942", {}, {"BLOCK_T": 32, "BLOCK_P": 32, "num_warps": 4, "num_stages": 1}),
        ("any", {}, {"BLOCK_T": 64, "BLOCK_P": 32, "num_warps": 4, "num_stages": 1}),
    ],
    "pass_states_kernel": [
        ("interpret", {}, {"BLOCK_P": 128, "num_warps": 1, "num_stages": 1}),
        ("any", {}, {"BLOCK_P": 8, "num_warps": 4, "num_stages": 1}),
    ],
    "chunk_scan_kernel": [
        (
            "interpret",
            {},
            {"BLOCK_I": 64, "BLOCK_J": 64, "BLOCK_P": 128, "num_warps": 1, "num_stages": 1},
        ),
        (
            "any",
            {"dot_bytes": 4},
            {"BLOCK_I": 16, "BLOCK_J": 32, "BLOCK_P": 64, "num_warps": 8, "num_stages": 1},
        ),
        (
            "sm_80",
            {"head_dim": 80},
            {"BLOCK_I": 32, "BLOCK_J": 32, "BLOCK_P": 128, "num_warps": 4, "num_stages": 1},
        ),
        (
            "gfx942",
            {},
            {"BLOCK_I": 64, "BLOCK_J": 32, "BLOCK_P": 64, "num_warps": 4, "num_stages": 1},
        ),
        (
            "any",
            {},
            {"BLOCK_I": 64, "BLOCK_J": 32, "BLOCK_P": 128, "num_warps": 4, "num_stages": 1},
        ),
    ],
}
