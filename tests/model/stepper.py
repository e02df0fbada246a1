"""Steps of a model with hand-made caches: what the engine does, in the plainest way.

Sequence ``r`` owns slot ``r + 1`` of every Mamba layer and a run of pages of every attention layer.
A step takes some tokens of some sequences; rows named in ``decode`` go through the decode kernels
(one token each), all others through the prefill kernels. Nothing here comes from the engine, so a
test that compares the two compares two things. All memory starts as NaN: what is read before it was
written shows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate

import torch

from mamba_kernels import build_chunk_layout
from mamba_teach.model.hybrid import HybridModel
from mamba_teach.model.metadata import (
    AttentionCache,
    AttentionMetadata,
    LayerCache,
    LayerMetadata,
    MambaCache,
    MambaDecode,
    MambaMetadata,
    MambaPrefill,
)

PAGE = 16


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Stepper:
    """A model, its caches and how far each of its sequences has come."""

    def __init__(self, model: HybridModel, num_sequences: int = 1, max_len: int = 64) -> None:
        self.model, self.config = model, model.config
        self.pages_each = -(-max_len // PAGE)
        self.computed = [0] * num_sequences
        self.caches = [self._cache(kind, num_sequences) for kind in self.config.pattern]

    def _cache(self, kind: str, num_sequences: int) -> LayerCache:
        c = self.config
        if kind == "M":
            slots = num_sequences + 1
            return MambaCache(
                conv=torch.full((slots, c.conv_kernel - 1, c.conv_dim), torch.nan),
                ssm=torch.full(
                    (slots, c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size), torch.nan
                ),
            )
        if kind == "*":
            pages = 1 + num_sequences * self.pages_each
            shape = (pages, PAGE, c.num_key_value_heads, c.head_dim)
            return AttentionCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        return None

    @torch.no_grad()
    def step(
        self, tokens: Mapping[int, list[int]], decode: Collection[int] = ()
    ) -> dict[int, torch.Tensor]:
        """Logits ``(tokens, vocab)`` of each row; rows in ``decode`` have one token."""
        rows = [r for r in tokens if r in decode] + [r for r in tokens if r not in decode]
        sizes = {r: len(tokens[r]) for r in rows}
        by_kind: dict[str, LayerMetadata] = {
            "M": self.mamba_metadata(sizes, decode),
            "*": self.attention_metadata(sizes),
            "-": None,
        }
        ids = torch.tensor([i for r in rows for i in tokens[r]])
        hidden = self.model(ids, [by_kind[k] for k in self.config.pattern], self.caches)
        logits = self.model.compute_logits(hidden).split(list(sizes.values()))
        for r, size in sizes.items():
            self.computed[r] += size
        return dict(zip(rows, logits))

    def run(self, ids: list[int], splits: list[int], decode_ones: bool = False) -> torch.Tensor:
        """Logits ``(T, vocab)`` of sequence 0, fed in pieces of the given sizes.

        Pieces of one token behind the first piece are decode rows if ``decode_ones``.
        """
        logits = []
        for end, size in zip(accumulate(splits), splits):
            decode = [0] if decode_ones and size == 1 and self.computed[0] else []
            logits.append(self.step({0: ids[end - size : end]}, decode)[0])
        return torch.cat(logits)

    def mamba_metadata(
        self, sizes: Mapping[int, int], decode: Collection[int] = ()
    ) -> MambaMetadata:
        """For rows of these many tokens, decode rows first."""
        ones = [r for r in sizes if r in decode]
        rest = [r for r in sizes if r not in decode]
        assert all(sizes[r] == 1 and self.computed[r] for r in ones)
        slots = int32([r + 1 for r in ones])
        of_decode = MambaDecode(
            query_start_loc=torch.arange(len(ones) + 1, dtype=torch.int32),
            conv_src_slots=slots,
            conv_dst_slots=slots,
            ssm_src_slots=slots[:, None],
            ssm_dst_slots=slots[:, None],
        )
        starts = int32([0, *accumulate(sizes[r] for r in rest)])
        computed = int32([self.computed[r] for r in rest])
        slots = int32([r + 1 for r in rest])
        of_prefill = MambaPrefill(
            query_start_loc=starts,
            num_computed_tokens=computed,
            src_slots=slots,
            dst_slots=slots,
            has_initial_state=computed > 0,
            layout=build_chunk_layout(starts, computed, self.config.chunk_size),
        )
        return MambaMetadata(
            num_decode_tokens=len(ones),
            decode=of_decode if ones else None,
            prefill=of_prefill if rest else None,
        )

    def attention_metadata(self, sizes: Mapping[int, int]) -> AttentionMetadata:
        """For rows of these many tokens, in this order."""
        lengths = list(sizes.values())
        seq_lens = [self.computed[r] + n for r, n in sizes.items()]
        first_page = [1 + r * self.pages_each for r in sizes]
        slot_mapping = [
            page * PAGE + position
            for r, page, end in zip(sizes, first_page, seq_lens)
            for position in range(self.computed[r], end)
        ]
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, *accumulate(lengths)]),
            seq_lens=torch.tensor(seq_lens),
            block_table=torch.tensor(first_page)[:, None] + torch.arange(self.pages_each),
            slot_mapping=torch.tensor(slot_mapping),
            max_query_len=max(lengths),
            max_seq_len=max(seq_lens),
        )


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights under which every parameter matters and logits have a spread of about 1.

    Works on models of this package and of transformers alike; mutates ``model``.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(tensor: torch.Tensor, low: float, high: float) -> None:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)

    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            uniform(p, -1.5, 1.5)  # A from -0.2 to -4.5
        elif name.endswith("dt_bias"):
            uniform(p, -3.0, 1.0)  # dt from 0.05 to 1.3
        elif name.endswith(("D", "bias")) or p.dim() == 1:
            uniform(p, 0.5, 1.5)
        elif "conv1d" in name:
            uniform(p, -0.8, 0.8)
        elif "embedding" in name:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)  # small, since it may be tied
        else:
            p.copy_(torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5)
