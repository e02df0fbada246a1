"""Many requests, on the ghost model: what a step costs besides the model, and whether anything grows.

The ghost's groups, tables and slots are those of a real hybrid model, its forward pass is left out of
the times, and a wrong slot is an error. Three questions:

* what does a step's bookkeeping cost with more requests, longer tables, longer contexts?
* is it the same for 64 requests of 4096 tokens that share a prefix, however wide the tables are?
* is it the same for the ten thousandth request as for the first, and is nothing left behind?
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from time import process_time
from typing import Any

import torch
from cpu_model import ROOT  # noqa: F401  (finds the packages of a checkout that is not installed)

from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams
from mamba_teach.events import BlockEvicted, BlocksAllocated, PrefixHit, RowScheduled, TokenSampled

LAYERS, BLOCK_SIZE = "MM*M", 16
REQUESTS, COLUMNS = (1, 8, 64), (320, 4096)
LONG_PROMPT, LONG_SHARED, LONG_REQUESTS = 4096, 3584, 64
POOL_BLOCKS, AT_ONCE = 512, 16
SLACK = 60  # tokens that the first to decode may say before the last one does


class TimedModel:
    """A model that counts its own seconds, so that they can be taken off a step's."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any) -> torch.Tensor:
        start = process_time()
        result = self.model(*args)
        self.seconds += process_time() - start
        return result


def engine_with(requests: int, columns: int, prompts: Sequence[list[int]], steps: int) -> Engine:
    """An engine that has read all prompts, and decodes from now on."""
    longest = max(map(len, prompts)) + steps + SLACK
    blocks = 2 + 4 * requests * (3 + -(-longest // BLOCK_SIZE))
    config = EngineConfig(
        block_size=BLOCK_SIZE, max_model_len=columns * BLOCK_SIZE, max_num_seqs=requests,
        max_num_batched_tokens=2048, num_blocks=blocks, device="cpu",
    )  # fmt: skip
    model = GhostModel(LAYERS)
    engine = Engine(model, config)
    engine.runner.model = TimedModel(model)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=steps + SLACK))
    while engine.scheduler.waiting or not all(r.is_decode for r in engine.scheduler.running):
        engine.step()
    return engine


def bookkeeping_ms(engine: Engine, steps: int) -> float:
    """Median CPU milliseconds of a decode step without its forward pass."""
    seconds = []
    model = engine.runner.model
    for _ in range(steps):
        start, before = process_time(), model.seconds
        engine.step()
        seconds.append(process_time() - start - (model.seconds - before))
    engine.events.clear()
    return 1e3 * statistics.median(seconds)


def scheduling(steps: int = 40) -> list[dict[str, Any]]:
    """The cost of a step by number of requests and width of the block tables."""
    lines = []
    for requests in REQUESTS:
        for columns in COLUMNS:
            prompts = [[i % 97, i // 97, *range(62)] for i in range(requests)]
            engine = engine_with(requests, columns, prompts, steps)
            cost = round(bookkeeping_ms(engine, steps), 3)
            lines.append({"requests": requests, "columns": columns, "ms": cost})
    return lines


def long_contexts(
    requests: int = LONG_REQUESTS,
    prompt: int = LONG_PROMPT,
    shared: int = LONG_SHARED,
    steps: int = 20,
) -> dict[str, Any]:
    """Requests with long prompts and one prefix: what is computed, and a step's cost by table width."""
    prefix = [(7 * i) % 97 for i in range(shared)]
    own = prompt - shared - 1
    prompts = [[*prefix, i, *((i + j) % 83 for j in range(own))] for i in range(requests)]
    costs, computed, cached = {}, 0, 0
    for columns in COLUMNS:
        engine = engine_with(requests, columns, prompts, steps)
        prefills = [e for e in engine.events if isinstance(e, RowScheduled) and e.kind == "prefill"]
        computed = sum(event.num_tokens for event in prefills)
        cached = sum(e.num_tokens for e in engine.events if isinstance(e, PrefixHit))
        costs[columns] = round(bookkeeping_ms(engine, steps), 3)
    narrow, wide = (costs[columns] for columns in COLUMNS)
    return {
        "requests": requests, "prompt": prompt, "shared": shared, "prompt_tokens": requests * prompt,
        "computed_tokens": computed, "cached_tokens": cached, "ms_by_columns": costs,
        "wide_over_narrow": round(wide / narrow, 3),
    }  # fmt: skip


def sizes_in(engine: Engine) -> dict[str, int]:
    """Entries of every container reachable from an engine's own objects, by path.

    Left out: the event log, which grows by design, and the model (a ghost remembers every state that
    anybody ever had, for its messages).
    """
    sizes: dict[str, int] = {}
    seen: set[int] = {id(engine.events), id(engine.model)}

    def visit(path: str, value: Any) -> None:
        if id(value) in seen:
            return
        if isinstance(value, (dict, list, set, deque)):
            seen.add(id(value))
            sizes[path] = len(value)
            items = value.values() if isinstance(value, Mapping) else value
            for i, item in enumerate(items):
                visit(f"{path}[{i}]", item)
        elif type(value).__module__.startswith("mamba_teach."):
            seen.add(id(value))
            for name, part in getattr(value, "__dict__", {}).items():
                visit(f"{path}.{name}", part)

    visit("engine", engine)
    return sizes


def short_requests(
    total: int, per_report: int, num_blocks: int = POOL_BLOCKS
) -> list[dict[str, Any]]:
    """Short requests through a small pool, a line per ``per_report`` of them.

    Every batch of a line has the same lengths and the same shared prefixes as that of any other line,
    and different tokens: the counts of one line must be those of the next. Ten requests in a row share a
    prefix of 32 tokens. Each line ends with an idle engine.
    """
    config = EngineConfig(
        block_size=BLOCK_SIZE, max_model_len=128, max_num_seqs=AT_ONCE, max_num_batched_tokens=256,
        num_blocks=num_blocks, num_speculative_tokens=2, device="cpu",
    )  # fmt: skip
    engine = Engine(GhostModel(LAYERS, draft_accuracy=1.0), config)
    engine.runner.model = TimedModel(engine.model)
    lines = []
    for first in range(0, total, per_report):
        start, before = process_time(), engine.runner.model.seconds
        steps = engine.num_steps
        for number in range(first, first + per_report):
            place = number - first
            family = number // 10
            prompt = [family % 97, family // 97, *range(30), place % 10, *range(place % 37)]
            engine.add_request(prompt, SamplingParams(max_tokens=4 + place % 13))
        while engine.has_unfinished_requests():
            engine.step()
        seconds = process_time() - start - (engine.runner.model.seconds - before)
        log = engine.events
        lines.append(
            {
                "requests": first + per_report,
                "steps": engine.num_steps - steps,
                "tokens": sum(isinstance(e, TokenSampled) for e in log),
                "cached_tokens": sum(e.num_tokens for e in log if isinstance(e, PrefixHit)),
                "blocks": sum(len(e.block_ids) for e in log if isinstance(e, BlocksAllocated)),
                "evicted": sum(isinstance(e, BlockEvicted) for e in log),
                "free_blocks": engine.cache.pool.num_free,
                "containers": sizes_in(engine),
                "bookkeeping_ms_per_request": round(1e3 * seconds / per_report, 3),
            }
        )
        engine.events.clear()
    return lines
