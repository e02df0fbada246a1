"""Logs for the tests of pictures: real runs of the ghost model, and one written by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams
from mamba_teach.events import (
    BlockPublished,
    BlocksAllocated,
    EngineStarted,
    Event,
    RequestAdded,
    RowScheduled,
    StateAccess,
    StepStarted,
)

MODES = ("none", "align", "all")


@cache
def ghost_log(
    mode: str = "all", *, followers: int = 3, prompt: int = 14, **settings: Any
) -> tuple[Event, ...]:
    """One request, then ``followers`` that share its prompt, in a pool that is soon used up."""
    defaults: dict[str, Any] = dict(
        block_size=4, max_model_len=96, max_num_seqs=4, max_num_batched_tokens=24,
        mamba_cache_mode=mode, num_blocks=40, device="cpu",
    )  # fmt: skip
    engine = Engine(GhostModel("MM*M"), EngineConfig(**(defaults | settings)))
    shared = [token % 97 for token in range(prompt)]
    engine.generate([shared], SamplingParams(max_tokens=3))
    prompts = [shared + [50 + i] * (3 + i) for i in range(followers)]
    engine.generate(prompts, SamplingParams(max_tokens=6))
    return tuple(engine.events)


def by_hand() -> list[Event]:
    """Two steps of one request; blocks 1 to 3 are states, 4 to 6 keys, 7 to 15 free."""
    return [
        EngineStarted(16, ("mamba 0", "attention 0"), 4),
        RequestAdded("r0", 10),
        StepStarted(0),
        BlocksAllocated("r0", 0, (0, 1), (1, 2)),
        BlocksAllocated("r0", 1, (0, 1, 2), (4, 5, 6)),
        RowScheduled("r0", "prefill", 0, 6),
        StateAccess("r0", 0, None, ((1, 4), (2, 6))),
        BlockPublished("r0", 0, 0, 1),
        BlockPublished("r0", 1, 0, 4),
        StepStarted(1),
        BlocksAllocated("r0", 0, (2,), (3,)),
        RowScheduled("r0", "prefill", 6, 3),
        StateAccess("r0", 0, 2, ((2, 8), (3, 9))),
    ]
