"""What one layer keeps for a request, and how many blocks that takes.

An attention layer keeps keys and values of every token: ``block_size`` tokens fill a page, and a
request needs more pages as it grows. A Mamba2 layer keeps a state of fixed size: one page holds the
sum of *all* tokens up to some position. How many such positions are kept at once is the cache mode:

* ``none``: one, the running state. A block covers the whole request.
* ``align``: two at most, the running state and the one before it while a step moves on.
* ``all``: one per ``block_size`` tokens, as long as nobody gives them back.

Speculation adds to each: a step that checks ``k`` drafts writes ``1 + k`` states, one after each
token, because nobody knows yet which of them will count.

Both kinds of page have the same number of bytes, so that one pool can hand the same block ids to both.

Everything that must know how many blocks a request may take (the width of the block tables, the
check at the door, the derived pool size, the summary) asks the same two methods of the spec,
``columns_for`` and ``max_blocks_for``. Two formulas for one number is how such systems break.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from mamba_teach.config import DTYPE_BYTES, EngineConfig, ModelConfig

RING_CAPACITY = 16  # inputs that can be pending with replay; what one matrix product takes
BLOCK_MULTIPLE = 16  # derived attention blocks are a multiple of this many tokens
ALIGNMENT = 16  # bytes; every tensor in a page starts on a multiple


@dataclass(frozen=True)
class TensorSpec:
    """One tensor inside a page."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes in the page, rounded up so that the next tensor is aligned."""
        return cdiv(prod(self.shape) * DTYPE_BYTES[self.dtype], ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class LayerSpec:
    """What a page of one layer holds. Layers with equal specs can share a group.

    Attributes:
        block_size: tokens a column of the block table stands for.
        tensors: (key, value) or (conv, ssm).
        page_size_bytes: bytes of a page, equal for all layers of an engine; what the tensors leave
            over is padding.
    """

    kind: ClassVar[str]
    block_size: int
    tensors: tuple[TensorSpec, TensorSpec]
    page_size_bytes: int

    def __post_init__(self) -> None:
        if self.content_bytes > self.page_size_bytes:
            raise ValueError(
                f"a {self.kind} block of {self.block_size} tokens holds {self.content_bytes} bytes, "
                f"more than the page of {self.page_size_bytes} bytes"
            )

    @property
    def content_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def columns_for(self, num_tokens: int) -> int:
        """Columns of the block table that a request of ``num_tokens`` tokens uses."""
        return cdiv(num_tokens, self.block_size)

    def max_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of ``num_tokens`` tokens holds at most, at any one time."""
        return self.columns_for(num_tokens)

    def min_blocks_for_decode(self) -> int:
        """Blocks that any request holds at least while it decodes."""
        return 1

    def max_memory_usage_bytes(self, num_tokens: int) -> int:
        """Bytes of one layer's pages that such a request holds at most."""
        return self.max_blocks_for(num_tokens) * self.page_size_bytes


@dataclass(frozen=True)
class AttentionSpec(LayerSpec):
    """Keys and values of ``block_size`` tokens per page."""

    kind: ClassVar[str] = "attention"


@dataclass(frozen=True)
class RingSpec:
    """Inputs that a layer keeps per request with ``spec_state="replay"``, besides its pages.

    Attributes:
        capacity: inputs that can be pending.
        max_query_len: tokens of the longest step, ``1 + k``; so many entries more there are.
        tensors: x, B, dt and log decay of one request.
    """

    capacity: int
    max_query_len: int
    tensors: tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec]

    @property
    def num_bytes(self) -> int:
        """Of one request in one layer."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class MambaSpec(LayerSpec):
    """One state per page.

    Attributes:
        mamba_cache_mode: "none", "align" or "all".
        num_speculative_blocks: scratch columns behind the last token's, one per draft token; none
            with replay.
        ring: with replay, what is kept instead.
    """

    kind: ClassVar[str] = "mamba"
    mamba_cache_mode: str
    num_speculative_blocks: int = 0
    ring: RingSpec | None = None

    def columns_for(self, num_tokens: int) -> int:
        return cdiv(num_tokens, self.block_size) + self.num_speculative_blocks

    def min_blocks_for_decode(self) -> int:
        return 1 + self.num_speculative_blocks

    def max_blocks_for(self, num_tokens: int) -> int:
        states = cdiv(num_tokens, self.block_size)
        # What a step reads, and every boundary that its 1 + k tokens can pass.
        passed = cdiv(1 + self.num_speculative_blocks, self.block_size)
        if self.ring is not None:  # the checkpoint, too, may be behind the running column
            passed = 1 + cdiv(self.ring.max_query_len - 1, self.block_size)
        kept = {"none": 1, "align": min(1 + passed, states), "all": states}[self.mamba_cache_mode]
        return kept + self.num_speculative_blocks

    def max_memory_usage_bytes(self, num_tokens: int) -> int:
        ring = 0 if self.ring is None else self.ring.num_bytes
        return super().max_memory_usage_bytes(num_tokens) + ring


def make_layer_specs(
    model: ModelConfig, engine: EngineConfig, mamba_cache_mode: str, *, mtp_drafts: bool = False
) -> dict[int, LayerSpec]:
    """One spec per layer that keeps anything, by layer index; the MTP head's behind the trunk's.

    Args:
        mtp_drafts: whether the MTP head guesses; if not, its layers keep nothing.

    Raises:
        ValueError: ``block_size`` is given and its attention page cannot hold a Mamba state.
    """
    pattern = model.pattern + (model.mtp_pattern if mtp_drafts else "")
    mamba_layers = [i for i, kind in enumerate(pattern) if kind == "M"]
    attention_layers = [i for i, kind in enumerate(pattern) if kind == "*"]
    k = engine.num_speculative_tokens
    state = (
        TensorSpec((model.conv_kernel - 1 + k, model.conv_dim), engine.dtype),
        TensorSpec(
            (model.mamba_num_heads, model.mamba_head_dim, model.ssm_state_size),
            engine.ssm_state_dtype,
        ),
    )
    state_bytes = sum(t.num_bytes for t in state) if mamba_layers else 0
    token_bytes = 2 * model.num_key_value_heads * model.head_dim * DTYPE_BYTES[engine.dtype]
    # Without attention nothing asks for equal pages, and the scan's own chunk is a good block.
    derived = derived_block_size(state_bytes, token_bytes) if attention_layers else model.chunk_size
    block_size = engine.block_size or derived
    keys = TensorSpec((block_size, model.num_key_value_heads, model.head_dim), engine.dtype)
    page = 2 * keys.num_bytes if attention_layers else state_bytes
    if page < state_bytes:
        raise ValueError(
            f"block_size={block_size}: an attention page of {page} bytes cannot hold a Mamba state "
            f"of {state_bytes} bytes; at least {derived} tokens are needed (None derives them)"
        )
    ring = make_ring_spec(model, engine) if engine.spec_state == "replay" else None
    state_block = engine.max_model_len if mamba_cache_mode == "none" else block_size
    specs: dict[int, LayerSpec] = {
        i: MambaSpec(state_block, state, page, mamba_cache_mode, 0 if ring else k, ring)
        for i in mamba_layers
    }
    specs |= {i: AttentionSpec(block_size, (keys, keys), page) for i in attention_layers}
    return specs


def make_ring_spec(model: ModelConfig, engine: EngineConfig) -> RingSpec:
    """The ring of a Mamba layer."""
    step = 1 + engine.num_speculative_tokens
    capacity = max(RING_CAPACITY, step)
    length, heads = capacity + step, model.mamba_num_heads
    return RingSpec(
        capacity,
        step,
        (
            TensorSpec((length, heads, model.mamba_head_dim), engine.dtype),
            TensorSpec((length, model.n_groups, model.ssm_state_size), engine.dtype),
            TensorSpec((length, heads), "float32"),
            TensorSpec((length, heads), "float32"),
        ),
    )


def derived_num_blocks(
    engine: EngineConfig, groups: Sequence[LayerSpec], caches_prefixes: bool
) -> int:
    """Blocks for ``max_num_seqs`` requests of ``max_model_len`` tokens, and the null block.

    With prefix caching there is room to keep what they leave behind, too: one block per column.

    Args:
        groups: the spec of every group.
    """
    longest = engine.max_model_len
    per_request = sum(
        spec.columns_for(longest) if caches_prefixes else spec.max_blocks_for(longest)
        for spec in groups
    )
    return 1 + engine.max_num_seqs * per_request


def derived_block_size(state_bytes: int, token_bytes: int) -> int:
    """Smallest multiple of 16 tokens whose keys and values take at least ``state_bytes``.

    Args:
        state_bytes: of one Mamba layer's state, conv window included.
        token_bytes: of one token's key and value in one attention layer.

    >>> derived_block_size(state_bytes=29_696, token_bytes=640)  # 46.4 tokens' worth
    48
    """
    return BLOCK_MULTIPLE * max(1, cdiv(state_bytes, BLOCK_MULTIPLE * token_bytes))


def cdiv(a: int, b: int) -> int:
    """Ceiling division of non-negative integers.

    >>> cdiv(16, 16), cdiv(17, 16)
    (1, 2)
    """
    return -(-a // b)
