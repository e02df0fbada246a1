"""What one layer keeps for a request, and how many blocks that takes.

An attention layer keeps keys and values of every token: ``block_size`` tokens fill a page, and a
request needs more pages as it grows. A Mamba2 layer keeps one state of fixed size, however long the
request: one page. Both kinds of page have the same number of bytes, so that one pool can hand the
same block ids to both.

Everything that must know how many blocks a request may take (the width of the block tables, the
check at the door, the derived pool size, the allocator) asks the same method of the spec,
``blocks_for``. Two formulas for one number is how such systems break.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mamba_teach.config import DTYPE_BYTES, EngineConfig, ModelConfig

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
        kind: "attention" or "mamba".
        block_size: tokens a block covers. For attention, those whose keys and values it holds; for
            Mamba all tokens of a request, for a state is the sum of them.
        tensors: (key, value) or (conv, ssm).
        page_size_bytes: bytes of a page, equal for all layers of an engine; what the tensors leave
            over is padding.
    """

    kind: str
    block_size: int
    tensors: tuple[TensorSpec, TensorSpec]
    page_size_bytes: int

    def __post_init__(self) -> None:
        content = sum(t.num_bytes for t in self.tensors)
        if content > self.page_size_bytes:
            raise ValueError(
                f"a {self.kind} block of {self.block_size} tokens holds {content} bytes, more than "
                f"the page of {self.page_size_bytes} bytes"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of ``num_tokens`` tokens holds in this layer's group."""
        return cdiv(num_tokens, self.block_size)


def make_layer_specs(model: ModelConfig, engine: EngineConfig) -> dict[int, LayerSpec]:
    """One spec per layer that keeps anything, by layer index.

    Raises:
        ValueError: ``block_size`` is given and its attention page cannot hold a Mamba state.
    """
    # The MTP head drafts only when speculation is configured; without it, its layers keep nothing.
    mamba_layers = [i for i, kind in enumerate(model.pattern) if kind == "M"]
    attention_layers = [i for i, kind in enumerate(model.pattern) if kind == "*"]
    state = (
        TensorSpec((model.conv_kernel - 1, model.conv_dim), engine.dtype),
        TensorSpec(
            (model.mamba_num_heads, model.mamba_head_dim, model.ssm_state_size),
            engine.ssm_state_dtype,
        ),
    )
    state_bytes = sum(t.num_bytes for t in state) if mamba_layers else 0
    block_size = engine.block_size or _derived_block_size(model, engine, state_bytes)
    keys = TensorSpec((block_size, model.num_key_value_heads, model.head_dim), engine.dtype)
    page = 2 * keys.num_bytes if attention_layers else state_bytes
    if page < state_bytes:
        raise ValueError(
            f"block_size={block_size}: an attention page of {page} bytes cannot hold a Mamba state "
            f"of {state_bytes} bytes; at least {_derived_block_size(model, engine, state_bytes)} "
            f"tokens are needed (None derives them)"
        )
    specs = {i: LayerSpec("mamba", engine.max_model_len, state, page) for i in mamba_layers}
    specs |= {i: LayerSpec("attention", block_size, (keys, keys), page) for i in attention_layers}
    return specs


def _derived_block_size(model: ModelConfig, engine: EngineConfig, state_bytes: int) -> int:
    """Smallest multiple of 16 tokens whose keys and values take at least ``state_bytes``."""
    token_bytes = 2 * model.num_key_value_heads * model.head_dim * DTYPE_BYTES[engine.dtype]
    return BLOCK_MULTIPLE * max(1, cdiv(state_bytes, BLOCK_MULTIPLE * token_bytes))


def cdiv(a: int, b: int) -> int:
    """Ceiling division of non-negative integers."""
    return -(-a // b)
