"""The engine's summary: every setting that was derived, and why it is what it is."""

from __future__ import annotations

from dataclasses import dataclass

from mamba_teach.cache.coordinator import CacheCoordinator
from mamba_teach.cache.mode import CacheMode
from mamba_teach.cache.specs import MambaSpec
from mamba_teach.config import EngineConfig, ModelConfig

STATE_BLOCKS = {
    "none": "a state covers the whole request",
    "align": "a state is kept where a chunk ends on a multiple",
    "all": "a state is kept at every multiple",
}


@dataclass(frozen=True)
class GraphSummary:
    """How decode steps are launched.

    Attributes:
        kind: "off", "record" or "cuda".
        sizes: numbers of requests that graphs were captured for.
        launches: operations and kernels that the recorder saw in one step; 0 where nobody counted.
    """

    kind: str
    sizes: tuple[int, ...] = ()
    launches: int = 0

    @property
    def why(self) -> str:
        if not self.sizes:
            return "every operation is launched by Python"
        counted = f"; {self.launches} launches become 1" if self.launches else ""
        return f"decode steps of up to {', '.join(map(str, self.sizes))} requests{counted}"


@dataclass(frozen=True)
class EngineSummary:
    """Lines of *(setting, value, reason)*; ``str()`` and notebooks show them as a table."""

    lines: tuple[tuple[str, str, str], ...]

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        engine: EngineConfig,
        mode: CacheMode,
        cache: CacheCoordinator,
        device: str,
        drafter: str | None,
        graphs: GraphSummary,
    ) -> EngineSummary:
        """Summarise an engine; ``drafter`` says who guesses."""
        groups, pool = cache.groups, cache.pool
        by_kind = {group.spec.kind: group.spec for group in groups}
        attention, mamba = by_kind.get("attention"), by_kind.get("mamba")
        assert mamba is None or isinstance(mamba, MambaSpec)
        lines = [
            ("device", device, f"asked for {engine.device!r}"),
            ("dtype", engine.dtype, f"SSM states are {engine.ssm_state_dtype}"),
            ("layers", model.pattern, f"{len(groups)} groups: {', '.join(g.name for g in groups)}"),
            ("cache mode", mode.effective, f"asked for {mode.requested!r}; {mode.reason}"),
            ("drafts per step", f"{engine.num_speculative_tokens}", drafter or "no speculation"),
        ]
        if attention:
            why = "as given" if engine.block_size else "a page must hold a Mamba state"
            lines.append(("block size", f"{attention.block_size} tokens", why))
        if mamba:
            padding = mamba.page_size_bytes - mamba.content_bytes
            kept, k = mamba.max_blocks_for(engine.max_model_len), mamba.num_speculative_blocks
            scratch = f", {k} of them for drafts" if k else ""
            lines += [
                ("state", f"{mamba.content_bytes} bytes", f"per layer; {padding} bytes of padding"),
                ("state block", f"{mamba.block_size} tokens", STATE_BLOCKS[mode.effective]),
                ("states per request", f"{kept}", f"at most, in each Mamba group{scratch}"),
            ]
        if mamba and mamba.ring is not None:
            why = f"{mamba.ring.capacity} inputs per layer and request, and one step more"
            lines.append(("ring", f"{mamba.ring.num_bytes} bytes", why))
        page, positions = groups[0].spec.page_size_bytes, max(len(g.layers) for g in groups)
        longest = cache.max_blocks_for(engine.max_model_len)
        largest = sum(
            group.spec.max_memory_usage_bytes(engine.max_model_len) * positions for group in groups
        )
        why = "as given"
        if engine.num_blocks is None:
            why = f"for {engine.max_num_seqs} requests of {engine.max_model_len} tokens"
            why += ", and what they leave to the cache" if mode.caches_prefixes else ""
        lines += [
            ("page", f"{page} bytes", f"times {positions} layers of a group"),
            ("blocks", f"{pool.num_blocks}", f"{why}; one is the null block"),
            ("cache memory", f"{pool.num_blocks * page * positions / 1e6:.1f} MB", ""),
            ("blocks per request", f"{longest}", f"at max_model_len={engine.max_model_len}"),
            ("memory per request", f"{largest / 1e6:.1f} MB", "at most"),
            ("tokens per step", f"{engine.max_num_batched_tokens}", "longer prompts go in chunks"),
            ("graphs", graphs.kind, graphs.why),
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
