"""The engine's summary: every setting that was derived, and why it is what it is."""

from __future__ import annotations

from dataclasses import dataclass

from mamba_teach.cache.manager import CacheManager
from mamba_teach.config import EngineConfig, ModelConfig


@dataclass(frozen=True)
class EngineSummary:
    """Lines of *(setting, value, reason)*; ``str()`` and notebooks show them as a table."""

    lines: tuple[tuple[str, str, str], ...]

    @classmethod
    def of(
        cls, model: ModelConfig, engine: EngineConfig, cache: CacheManager, device: str
    ) -> EngineSummary:
        """Summarise an engine."""
        groups, pool = cache.groups, cache.pool
        attention = [g.spec for g in groups if g.spec.kind == "attention"]
        mamba = [g.spec for g in groups if g.spec.kind == "mamba"]
        lines = [
            ("device", device, f"asked for {engine.device!r}"),
            ("dtype", engine.dtype, f"SSM states are {engine.ssm_state_dtype}"),
            ("layers", model.pattern, f"{len(groups)} groups: {', '.join(g.name for g in groups)}"),
            ("cache mode", "none", "one state per request and Mamba layer, advanced in place"),
        ]
        if attention:
            why = "as given" if engine.block_size else "a page must hold a Mamba state"
            lines.append(("block size", f"{attention[0].block_size} tokens", why))
        if mamba:
            state = sum(t.num_bytes for t in mamba[0].tensors)
            padding = mamba[0].page_size_bytes - state
            lines.append(("state", f"{state} bytes", f"per layer; its page has {padding} to spare"))
        page, positions = groups[0].spec.page_size_bytes, max(len(g.layers) for g in groups)
        longest = cache.blocks_for(engine.max_model_len)
        why = "as given" if engine.num_blocks else f"{engine.max_num_seqs} requests of {longest}"
        lines += [
            ("page", f"{page} bytes", f"times {positions} layers of a group"),
            ("blocks", f"{pool.num_blocks}", f"{why}, and the null block"),
            ("cache memory", f"{pool.num_blocks * page * positions / 1e6:.1f} MB", ""),
            ("blocks per request", f"{longest}", f"at max_model_len={engine.max_model_len}"),
            ("tokens per step", f"{engine.max_num_batched_tokens}", "longer prompts go in chunks"),
        ]
        return cls(tuple(lines))

    def __str__(self) -> str:
        name_width = max(len(name) for name, _, _ in self.lines)
        value_width = max(len(value) for _, value, _ in self.lines)
        return "\n".join(
            f"{name:<{name_width}}  {value:<{value_width}}  {why}".rstrip()
            for name, value, why in self.lines
        )

    __repr__ = __str__
