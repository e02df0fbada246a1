"""Grouped-query attention over paged keys and values, without positional encoding.

Nemotron-H has few attention layers and gives them no positions: the Mamba layers around them know
the order. Keys and values of a request live in pages of ``block_size`` tokens that its block table
lists. Pages are gathered into one padded rectangle and torch's ``scaled_dot_product_attention`` does
the rest: attention is not what this project is about, so the plain way is the right one.

With long sequences on a CPU, where reading a page number costs nothing, rows attend one by one
instead (:func:`attend_by_row`): no rectangle, no mask over what is not there, and no copy where one
page holds all of a row's tokens.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from mamba_kernels.cpu_rows import row_by_row
from mamba_teach.config import ModelConfig
from mamba_teach.model.linear import Linear
from mamba_teach.model.metadata import AttentionCache, AttentionMetadata


class Attention(nn.Module):
    """``(T, hidden) -> (T, hidden)``; writes the step's keys and values into its cache."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        query_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = Linear(query_width, config.hidden_size, bias=False)

    def forward(
        self, hidden: torch.Tensor, metadata: AttentionMetadata, cache: AttentionCache | None
    ) -> torch.Tensor:
        """Attend from ``hidden (T, hidden_size)`` to everything its sequence has cached so far.

        Without a cache the step's own tokens are all there is.
        """
        q = self.q_proj(hidden).unflatten(-1, (self.heads, self.head_dim))  # (T, heads, d)
        k = self.k_proj(hidden).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(hidden).unflatten(-1, (self.kv_heads, self.head_dim))
        # A rectangle would have whole pages of each row.
        pages = -(-metadata.max_seq_len // cache.key.shape[1]) if cache is not None else 0
        if cache is not None and row_by_row(hidden, pages * cache.key[0].numel()):
            out = attend_by_row(q, k, v, metadata, cache)
        else:
            out = attend_in_a_rectangle(q, k, v, metadata, cache)
        return self.o_proj(out)


def attend_in_a_rectangle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: AttentionMetadata,
    cache: AttentionCache | None,
) -> torch.Tensor:
    """All rows at once, padded to the longest; no value is read on the host.

    Args:
        q: ``(T, heads, d)``.
        k, v: ``(T, kv_heads, d)``; written into the cache, which is **mutated**.

    Returns:
        ``(T, heads * d)``; 0 for tokens that belong to no row.
    """
    starts, lengths = metadata.query_start_loc[:-1], metadata.query_start_loc.diff()
    num_tokens, num_rows = len(q), len(starts)

    place = torch.arange(metadata.max_query_len, device=q.device)
    token = torch.minimum(starts[:, None] + place, metadata.query_start_loc[1:, None] - 1)
    token = token.clamp(min=0)  # (R, Lq): places past the end repeat the row's last token
    if cache is None:
        keys, values = k[token], v[token]  # (R, Lk, kv_heads, d)
    else:
        keys, values = _write_and_gather(k, v, metadata, cache)

    # Query place i of a row stands at position seq_len - length + i and sees itself and before.
    first = metadata.seq_lens - lengths
    position = torch.minimum(first[:, None] + place, metadata.seq_lens[:, None] - 1)
    visible = torch.arange(keys.shape[1], device=q.device) <= position[..., None]
    out = F.scaled_dot_product_attention(
        q[token].transpose(1, 2),
        keys.transpose(1, 2).to(q.dtype),
        values.transpose(1, 2).to(q.dtype),
        attn_mask=visible[:, None],  # (R, 1, Lq, Lk)
        enable_gqa=True,
    )  # (R, heads, Lq, d)
    # Back to packed tokens. Shapes must not depend on values, or no graph could hold this: each
    # token looks up its row and place, and what belongs to no row becomes 0.
    packed = torch.arange(num_tokens, device=q.device)
    row = torch.searchsorted(metadata.query_start_loc[1:], packed, right=True)
    belongs = row < num_rows
    row = row.clamp(max=num_rows - 1)
    at = (packed - starts[row]).clamp(min=0, max=metadata.max_query_len - 1)
    of_token = out.transpose(1, 2)[row, at].flatten(1)  # (T, heads * d)
    return torch.where(belongs[:, None], of_token, 0)


def attend_by_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: AttentionMetadata,
    cache: AttentionCache,
) -> torch.Tensor:
    """One row after the other, on a CPU. Arguments and result: :func:`attend_in_a_rectangle`."""
    block_size, kv_heads = cache.key.shape[1:3]
    starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    page, offset = metadata.slot_mapping // block_size, metadata.slot_mapping % block_size
    kept = page > 0  # padding has no page
    cache.key[page[kept], offset[kept]] = k[kept].to(cache.key.dtype)
    cache.value[page[kept], offset[kept]] = v[kept].to(cache.value.dtype)
    out = torch.zeros_like(q)
    for r, (start, end) in enumerate(pairwise(starts)):
        length, seq_len = end - start, seq_lens[r]
        if length == 0:
            continue
        pages = metadata.block_table[r, : -(-seq_len // block_size)].tolist()
        keys = _tokens_in(cache.key, pages, seq_len).to(q.dtype).transpose(0, 1)
        values = _tokens_in(cache.value, pages, seq_len).to(q.dtype).transpose(0, 1)
        if length == 1:  # sees everything: the heads that share keys are so many queries
            queries, visible, causal = q[start].unflatten(0, (kv_heads, -1)), None, False
        else:
            queries, visible, causal = q[start:end].transpose(0, 1), None, length == seq_len
        if length > 1 and not causal:  # query i stands at position seq_len - length + i
            position = torch.arange(seq_len - length, seq_len)
            visible = torch.arange(seq_len) <= position[:, None]  # (length, seq_len)
        of_row = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=visible, is_causal=causal,
            enable_gqa=queries.shape[0] != kv_heads,
        )[0]  # fmt: skip
        out[start:end] = of_row.flatten(0, 1)[None] if length == 1 else of_row.transpose(0, 1)
    return out.flatten(1)


def _tokens_in(pool: torch.Tensor, pages: list[int], num_tokens: int) -> torch.Tensor:
    """The first ``num_tokens`` tokens of a row's pages, ``(num_tokens, kv_heads, d)``."""
    if len(pages) == 1:
        return pool[pages[0], :num_tokens]  # a view
    return pool[pages].flatten(0, 1)[:num_tokens]


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
