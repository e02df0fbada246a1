"""Settings of the engine, checked when they are made.

A setting that cannot work is refused here, with its value and what would do, before a model is
loaded or a byte of cache is allocated. This module imports no torch: a configuration can be made,
compared and printed anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from mamba_teach.model.config import ModelConfig

__all__ = ["EngineConfig", "ModelConfig"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class EngineConfig:
    """How an engine serves.

    Attributes:
        block_size: tokens per attention page. None derives the smallest multiple of 16 whose page
            holds a Mamba state, so that one pool of equal pages serves both.
        num_blocks: pages in the pool, the null page included. None derives what ``max_num_seqs``
            requests of ``max_model_len`` tokens need.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of a step; longer prompts are prefilled in chunks.
        max_model_len: longest sequence, prompt and output together.
        device: "cpu", "cuda", or "auto" for cuda where there is one.
        dtype: of activations, keys and values, and convolution windows.
        ssm_state_dtype: of SSM states. fp32 unless you know better: in 16 bits small updates vanish.
    """

    block_size: int | None = None
    num_blocks: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    max_model_len: int = 1024
    device: str = "auto"
    dtype: str = "float32"
    ssm_state_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: every running request needs a token per step"
            )
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"block_size={self.block_size}: must be at least 1 token, or None")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ValueError(
                f"num_blocks={self.num_blocks}: must be at least 2 (block 0 is the null block), or None"
            )
        for name in ("dtype", "ssm_state_dtype"):
            if getattr(self, name) not in DTYPE_BYTES:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: must be one of {', '.join(DTYPE_BYTES)}"
                )
        if self.device not in ("auto", "cpu") and not self.device.startswith("cuda"):
            raise ValueError(f"device={self.device!r}: must be 'auto', 'cpu' or 'cuda'")
