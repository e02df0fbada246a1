"""Grouped-query attention over paged keys and values, without positional encoding.

Nemotron-H has few attention layers and gives them no positions: the Mamba layers around them know
the order. Keys and values of a request live in pages of ``block_size`` tokens that its block table
lists. Pages are gathered into one padded rectangle and torch's ``scaled_dot_product_attention`` does
the rest: attention is not what this project is about, so the plain way is the right one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mamba_teach.config import ModelConfig
from mamba_teach.model.metadata import AttentionCache, AttentionMetadata


class Attention(nn.Module):
    """``(T, hidden) -> (T, hidden)``; writes the step's keys and values into its cache."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        query_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)

    def forward(
        self, hidden: torch.Tensor, metadata: AttentionMetadata, cache: AttentionCache | None
    ) -> torch.Tensor:
        """Attend from ``hidden (T, hidden_size)`` to everything its sequence has cached so far.

        Without a cache the step's own tokens are all there is.
        """
        q = self.q_proj(hidden).unflatten(-1, (self.heads, self.head_dim))  # (T, heads, d)
        k = self.k_proj(hidden).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(hidden).unflatten(-1, (self.kv_heads, self.head_dim))
        starts, lengths = metadata.query_start_loc[:-1], metadata.query_start_loc.diff()
        num_tokens, num_rows = len(hidden), len(starts)

        place = torch.arange(metadata.max_query_len, device=hidden.device)
        token = torch.minimum(starts[:, None] + place, metadata.query_start_loc[1:, None] - 1)
        token = token.clamp(min=0)  # (R, Lq): places past the end repeat the row's last token
        if cache is None:
            keys, values = k[token], v[token]  # (R, Lk, kv_heads, d)
        else:
            keys, values = _write_and_gather(k, v, metadata, cache)

        # Query place i of a row stands at position seq_len - length + i and sees itself and before.
        first = metadata.seq_lens - lengths
        position = torch.minimum(first[:, None] + place, metadata.seq_lens[:, None] - 1)
        visible = torch.arange(keys.shape[1], device=hidden.device) <= position[..., None]
        out = F.scaled_dot_product_attention(
            q[token].transpose(1, 2),
            keys.transpose(1, 2).to(q.dtype),
            values.transpose(1, 2).to(q.dtype),
            attn_mask=visible[:, None],  # (R, 1, Lq, Lk)
            enable_gqa=True,
        )  # (R, heads, Lq, d)
        # Back to packed tokens. Shapes must not depend on values, or no graph could hold this: each
        # token looks up its row and place, and what belongs to no row becomes 0.
        packed = torch.arange(num_tokens, device=hidden.device)
        row = torch.searchsorted(metadata.query_start_loc[1:], packed, right=True)
        belongs = row < num_rows
        row = row.clamp(max=num_rows - 1)
        at = (packed - starts[row]).clamp(min=0, max=metadata.max_query_len - 1)
        of_token = out.transpose(1, 2)[row, at].flatten(1)  # (T, heads * d)
        return self.o_proj(torch.where(belongs[:, None], of_token, 0))


def _write_and_gather(
    k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata, cache: AttentionCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store the step's keys and values, then read whole sequences: two ``(R, Lk, kv_heads, d)``."""
    block_size = cache.key.shape[1]
    page, offset = metadata.slot_mapping // block_size, metadata.slot_mapping % block_size
    kept = (page > 0)[:, None, None]  # padding writes the null page's content back to the null page
    for pool, new in ((cache.key, k), (cache.value, v)):
        pool[page, offset] = torch.where(kept, new.to(pool.dtype), pool[page, offset])
    columns = -(-metadata.max_seq_len // block_size)
    pages = metadata.block_table[:, :columns]
    # Null pages, and the unwritten end of the last one, may hold anything, NaN included; a masked
    # score hides a finite value only, so what no query may see is zeroed.
    written = torch.arange(columns * block_size, device=k.device) < metadata.seq_lens[:, None]
    keys, values = (
        torch.where(written[..., None, None], c[pages].flatten(1, 2), 0)
        for c in (cache.key, cache.value)
    )
    return keys, values
