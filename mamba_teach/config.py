"""Settings, checked when they are made: what a model is made of, and how an engine serves it.

A setting that cannot work is refused here, with its value and what would do, before a model is
loaded or a byte of cache is allocated. This module imports no torch: a configuration can be made,
compared and printed anywhere.

Models are described in the vocabulary of Nemotron-H (``NemotronHForCausalLM`` in transformers), where
a pattern string says what each layer is: ``M`` a Mamba2 mixer, ``*`` attention, ``-`` an MLP. A pure
Mamba2 model is the pattern ``"MMMM"``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LAYER_KINDS = {"M": "Mamba2 mixer", "*": "attention", "-": "MLP"}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a hybrid model. Letters in brackets are the papers'.

    Attributes:
        pattern: one character per layer, see :data:`LAYER_KINDS`.
        mamba_num_heads: (H) heads of a Mamba2 mixer.
        mamba_head_dim: (P) channels per head; the mixer's inner width is ``H * P``.
        ssm_state_size: (N) state entries per channel.
        n_groups: (G) groups of heads that share B and C, and groups of the gated norm.
        conv_kernel: (W) width of the causal convolution.
        chunk_size: (Q) tokens per SSD chunk; a cost setting.
        time_step_limit: clamp on dt after softplus. Not to be confused with the configs'
            ``time_step_min`` and ``time_step_max``, which only shape the initialisation.
        num_key_value_heads: attention heads that own keys and values (GQA).
        mtp_pattern: layers of the multi-token-prediction head, ``""`` for none.
        eos_token_ids: generation stops at any of these; empty never stops.
    """

    vocab_size: int
    hidden_size: int
    pattern: str
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    n_groups: int = 1
    conv_kernel: int = 4
    chunk_size: int = 128
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    use_conv_bias: bool = True
    use_bias: bool = False
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 1
    intermediate_size: int = 1
    mlp_bias: bool = False
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    mtp_pattern: str = ""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, pattern in (("pattern", self.pattern), ("mtp_pattern", self.mtp_pattern)):
            for i, kind in enumerate(pattern):
                if kind == "E":
                    raise ValueError(
                        f"{name}={pattern!r}: layer {i} is 'E', a mixture of experts, which is not "
                        f"supported; supported are {_kinds()}"
                    )
                if kind not in LAYER_KINDS:
                    raise ValueError(f"{name}={pattern!r}: layer {i} is {kind!r}; known are {_kinds()}")
        if not self.pattern:
            raise ValueError("pattern='': a model has at least one layer")
        if "M" in self.mtp_pattern:
            raise ValueError(
                f"mtp_pattern={self.mtp_pattern!r}: a drafter with a Mamba state of its own is not "
                f"supported; use '*' and '-'"
            )
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.mamba_num_heads % self.n_groups:
            raise ValueError(
                f"n_groups={self.n_groups} must divide mamba_num_heads={self.mamba_num_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        low, high = self.time_step_limit
        if not 0.0 <= low < high:
            raise ValueError(f"time_step_limit={self.time_step_limit}: needs 0 <= lower < upper")

    @property
    def d_inner(self) -> int:
        """Inner width of a mixer, ``H * P`` (and not ``expand * hidden_size``)."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C side by side."""
        return self.d_inner + 2 * self.n_groups * self.ssm_state_size

    @property
    def norm_group_size(self) -> int:
        """Channels that share one mean square in the gated norm."""
        return self.d_inner // self.n_groups

    def layers_of_kind(self, kind: str) -> list[int]:
        """Indices of the layers of a kind, the MTP head's behind the trunk's."""
        return [i for i, k in enumerate(self.pattern + self.mtp_pattern) if k == kind]


_POSITIVE = (
    "vocab_size", "hidden_size", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups",
    "conv_kernel", "chunk_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size",
)  # fmt: skip


def _kinds() -> str:
    return ", ".join(f"{k!r} ({name})" for k, name in LAYER_KINDS.items())


@dataclass(frozen=True)
class EngineConfig:
    """How an engine serves.

    Attributes:
        enable_prefix_caching: keep blocks of finished work and start new requests from them.
        mamba_cache_mode: which states are kept: "none", "align" (at chunk ends), "all" (at every
            block boundary), or None for the best the model supports.
        block_size: tokens per attention page, and in "align" and "all" per Mamba block. None derives
            the smallest multiple of 16 whose page holds a Mamba state, so that one pool of equal
            pages serves both.
        num_blocks: pages in the pool, the null page included. None derives what ``max_num_seqs``
            requests of ``max_model_len`` tokens need.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of a step; longer prompts are prefilled in chunks.
        max_model_len: longest sequence, prompt and output together.
        device: "cpu", "cuda", or "auto" for cuda where there is one.
        dtype: of activations, keys and values, and convolution windows.
        ssm_state_dtype: of SSM states. fp32 unless you know better: in 16 bits small updates vanish.
        num_speculative_tokens: (k) tokens to guess ahead per step and request, checked by the model
            in the same step. 0 generates one token at a time.
        speculative_method: who guesses: "mtp" (the model's own head), "ngram" (what followed the
            last time), or None for the head where the model has one.
        spec_state: what a decode step keeps: "slots" (a state per token) or "replay" (inputs, and a
            state now and then).
        graphs: how decode steps are launched: "off" (one operation after the other), "cuda" (captured
            once and replayed), "record" (likewise, by a recorder that runs anywhere), or "auto" for
            "cuda" where there is one and else "record".
        graph_capture_sizes: numbers of requests to capture a graph for. None derives them from
            ``max_num_seqs``.
        poison: fill blocks with NaN when their content stops meaning anything, so that whoever
            reads one shows it. For tests and for the curious.
    """

    enable_prefix_caching: bool = True
    mamba_cache_mode: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    max_model_len: int = 1024
    device: str = "auto"
    dtype: str = "float32"
    ssm_state_dtype: str = "float32"
    num_speculative_tokens: int = 0
    speculative_method: str | None = None
    spec_state: str = "slots"
    graphs: str = "off"
    graph_capture_sizes: tuple[int, ...] | None = None
    poison: bool = False

    def __post_init__(self) -> None:
        if self.mamba_cache_mode not in (None, "none", "align", "all"):
            raise ValueError(
                f"mamba_cache_mode={self.mamba_cache_mode!r}: must be 'none', 'align', 'all' or None"
            )
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens={self.num_speculative_tokens}: must be 0 or more")
        if self.speculative_method not in (None, "mtp", "ngram"):
            raise ValueError(
                f"speculative_method={self.speculative_method!r}: must be 'mtp', 'ngram' or None"
            )
        if self.spec_state not in ("slots", "replay"):
            raise ValueError(f"spec_state={self.spec_state!r}: must be 'slots' or 'replay'")
        if self.graphs not in ("off", "record", "cuda", "auto"):
            raise ValueError(f"graphs={self.graphs!r}: must be 'off', 'record', 'cuda' or 'auto'")
        for size in self.graph_capture_sizes or ():
            if not 1 <= size <= self.max_num_seqs:
                raise ValueError(
                    f"graph_capture_sizes holds {size}: sizes are numbers of requests, from 1 to "
                    f"max_num_seqs={self.max_num_seqs}"
                )
        needed = self.max_num_seqs * (1 + self.num_speculative_tokens)
        if self.max_num_batched_tokens < needed:
            drafts = ""
            if self.num_speculative_tokens:
                drafts = f" and num_speculative_tokens={self.num_speculative_tokens} drafts"
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than {needed}: each of "
                f"max_num_seqs={self.max_num_seqs} running requests needs a token{drafts} per step"
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
