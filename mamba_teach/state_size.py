"""How large is a state, and how many tokens must a block have so that one fits into a page?

Attention and Mamba layers share one pool of equal pages. A state has a fixed size, so the only thing
that can give way is the number of tokens in an attention page: it grows until the page is as large as
a state. For a large model that is thousands of tokens, and no prefix shorter than a block can ever be
hit. This calculator says beforehand, from a model's config alone, what an engine would derive::

    sizes = state_sizes(json.loads(Path("config.json").read_text()), num_speculative_tokens=3)
    sizes.state_bytes, sizes.token_bytes, sizes.block_size, sizes.vllm_block_size("all")

No torch in here, and no second formula: sizes come from the specs that the engine itself uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from mamba_teach.cache.specs import BLOCK_MULTIPLE, TensorSpec, cdiv, derived_block_size
from mamba_teach.config import DTYPE_BYTES, ModelConfig
from mamba_teach.model.checkpoint_config import config_from_json

MODES = ("none", "align", "all")


@dataclass(frozen=True)
class StateSizes:
    """What one layer of each kind keeps, in bytes, and the block that follows.

    Attributes:
        conv_bytes: of a Mamba layer's convolution window, ``W - 1 + k`` inputs; 0 without such layers.
        ssm_bytes: of its SSM state; 0 without such layers.
        token_bytes: of a token's key and value in an attention layer; 0 if the model has none.
        chunk_size: (Q) of the model; only vLLM's rule for "all" asks for it.
    """

    conv_bytes: int
    ssm_bytes: int
    token_bytes: int
    chunk_size: int

    @property
    def state_bytes(self) -> int:
        """Of all that a Mamba layer keeps for a position."""
        return self.conv_bytes + self.ssm_bytes

    @property
    def tokens_needed(self) -> int:
        """Fewest tokens whose keys and values take as many bytes as a state."""
        self._needs_attention()
        return cdiv(self.state_bytes, self.token_bytes)

    @property
    def block_size(self) -> int:
        """Tokens per block in this package, whatever the mode: the next multiple of 16."""
        self._needs_attention()
        return derived_block_size(self.state_bytes, self.token_bytes)

    @property
    def page_bytes(self) -> int:
        """Of a page of ``block_size`` tokens."""
        return self.block_size * self.token_bytes

    @property
    def padding_bytes(self) -> int:
        """What a state leaves empty in such a page."""
        return self.page_bytes - self.state_bytes

    def vllm_block_size(self, mode: str, kernel_block: int = BLOCK_MULTIPLE) -> int:
        """Tokens per block by vLLM's rule.

        "none" and "align" take the next multiple of ``kernel_block``, tokens that its attention kernel
        reads at once. "all" also wants whole chunks, since there a state is only taken between two
        chunks: the next multiple of both. (Here, a chunk can be made to end at any boundary.)

        Raises:
            ValueError: the mode is unknown.
        """
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: must be one of {', '.join(MODES)}")
        unit = lcm(kernel_block, self.chunk_size) if mode == "all" else kernel_block
        return cdiv(self.tokens_needed, unit) * unit

    def _needs_attention(self) -> None:
        if self.token_bytes == 0:
            raise ValueError(
                "a model without attention has no keys from which a block could follow"
            )


def state_sizes(
    model: ModelConfig | Mapping[str, Any],
    *,
    num_speculative_tokens: int = 0,
    dtype: str = "bfloat16",
    ssm_state_dtype: str = "float32",
) -> StateSizes:
    """Sizes for a model.

    Args:
        model: a config, or the parsed ``config.json`` of a checkpoint.
        num_speculative_tokens: (k) each adds an input to the convolution window.
        dtype: of convolution windows, keys and values.
        ssm_state_dtype: of SSM states.

    >>> from mamba_teach.config import ModelConfig
    >>> sizes = state_sizes(ModelConfig(
    ...     vocab_size=1, hidden_size=1, pattern="M*", mamba_num_heads=128, mamba_head_dim=64,
    ...     ssm_state_size=128, n_groups=8, num_attention_heads=64, num_key_value_heads=2,
    ...     head_dim=128))
    >>> sizes.state_bytes, sizes.token_bytes, sizes.block_size
    (4255744, 1024, 4160)
    """
    config = model if isinstance(model, ModelConfig) else config_from_json(model)
    window = config.conv_kernel - 1 + num_speculative_tokens
    heads, width, entries = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size
    has_mamba, has_attention = "M" in config.pattern, "*" in config.pattern
    key_bytes = config.num_key_value_heads * config.head_dim * DTYPE_BYTES[dtype]
    return StateSizes(
        conv_bytes=has_mamba * TensorSpec((window, config.conv_dim), dtype).num_bytes,
        ssm_bytes=has_mamba * TensorSpec((heads, width, entries), ssm_state_dtype).num_bytes,
        token_bytes=has_attention * 2 * key_bytes,
        chunk_size=config.chunk_size,
    )
