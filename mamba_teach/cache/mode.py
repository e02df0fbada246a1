"""Which cache mode an engine runs in, and why.

A reader of the summary should never wonder why prefix caching does nothing: the mode asked for, the
mode in force and the reason stand side by side.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from mamba_teach.config import EngineConfig


@dataclass(frozen=True)
class CacheMode:
    """The mode in force, and why.

    Attributes:
        requested: as given in the config; None leaves the choice to the engine.
        effective: "none", "align" or "all".
        reason: one sentence.
    """

    requested: str | None
    effective: str
    reason: str

    @property
    def caches_prefixes(self) -> bool:
        return self.effective != "none"


def resolve_cache_mode(config: EngineConfig, supports_all: bool) -> CacheMode:
    """Choose the mode. Speculation does not matter.

    Args:
        config: what was asked for.
        supports_all: whether the model's Mamba layers can write a state at every block boundary of
            a prefill chunk.
    """
    requested = config.mamba_cache_mode
    if not config.enable_prefix_caching:
        return CacheMode(requested, "none", "prefix caching is off")
    if requested == "none":
        return CacheMode(requested, "none", "asked for; without kept states no prefix can be hit")
    if requested == "align":
        return CacheMode(requested, "align", "asked for")
    if not supports_all:
        return CacheMode(requested, "align", "the model cannot write states inside a chunk")
    reason = "asked for" if requested else "prefix caching is on and the model supports it"
    return CacheMode(requested, "all", reason)


def check_block_size(config: EngineConfig, mode: CacheMode, block_size: int) -> None:
    """Refuse, or warn of, blocks so large that no prompt can ever fill one.

    Raises:
        ValueError: the block size was given. A derived one only warns: serving works, hits do not.
    """
    longest_hit = config.max_model_len - 2  # a prompt leaves room for a token, a hit leaves one
    if not mode.caches_prefixes or block_size <= longest_hit:
        return
    problem = (
        f"a block of {block_size} tokens can never be hit: with "
        f"max_model_len={config.max_model_len} a hit has at most {longest_hit} tokens"
    )
    if config.block_size is not None:
        raise ValueError(f"block_size={block_size}: {problem}")
    warnings.warn(f"prefix caching will find nothing: {problem}", stacklevel=3)
