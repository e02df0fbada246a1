"""Graphs on a real GPU: captured at all, replayed right, and how much time a replay saves.

The same problems are served three times on the device: eagerly, through CUDA graphs, and through the
recorder, which exists on a GPU, too. All three must say the same. Then a steady decode step of eight
requests is timed, eager and as a graph, whole engine steps with everything the host does in them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from gpu_engine import Comparison, compare_tokens, top2_gap_on_cpu

from mamba_teach import Engine, EngineConfig, SamplingParams
from mamba_teach.events import StepDispatched
from mamba_teach.model.checkpoint import load_model
from mamba_teach.wordmath.evaluate import evaluate
from mamba_teach.wordmath.problems import held_out_problems
from mamba_teach.wordmath.prompts import few_shot_prompt

MODES = ("none", "all")
DRAFTS = (0, 3)
WARM_STEPS, TIMED_STEPS = 5, 20


@dataclass(frozen=True)
class GraphReport:
    """What one kind of graph did.

    Attributes:
        kind: "cuda" or "record".
        comparison: its tokens against the eager engine's.
        graph_steps, steps: steps that ran as graphs, of all.
    """

    kind: str
    comparison: Comparison
    graph_steps: int
    steps: int

    @property
    def faults(self) -> tuple[str, ...]:
        none_used = () if self.graph_steps else (f"no step of {self.steps} ran as a graph",)
        return (*self.comparison.faults, *none_used)

    def __str__(self) -> str:
        return f"{self.kind}: {self.graph_steps}/{self.steps} steps as graphs, {self.comparison}"


def compare_graphs(
    mode: str, k: int, device: str, kinds: tuple[str, ...], problems: int = 32
) -> list[GraphReport]:
    """Serve problems eagerly and with every kind of graph; compare token by token."""
    reports, expected = [], None
    for kind in ("off", *kinds):
        engine = engine_with(mode, k, device, kind)
        outputs = evaluate(engine, problems).outputs
        texts = [output.token_ids for output in outputs]
        if expected is None:
            expected = texts
            continue
        prompts = [output.prompt_token_ids for output in outputs]
        comparison = compare_tokens(prompts, expected, texts, top2_gap_on_cpu())
        used = [event.path == "graph" for event in engine.events if isinstance(event, StepDispatched)]
        reports.append(GraphReport(kind, comparison, sum(used), len(used)))
    return reports


def step_milliseconds(mode: str, k: int, device: str, kind: str) -> float:
    """Median time of an engine step of eight decoding requests, host work included."""
    engine = engine_with(mode, k, device, kind)
    params = SamplingParams(max_tokens=(1 + k) * (WARM_STEPS + TIMED_STEPS + 10), ignore_eos=True)
    for problem in held_out_problems(8):
        engine.add_request(few_shot_prompt(problem), params)
    while any(not request.is_decode for request in engine.scheduler.running) or (
        engine.scheduler.waiting
    ):
        engine.step()
    times = []
    for i in range(WARM_STEPS + TIMED_STEPS):
        start = time.perf_counter()
        engine.step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        if i >= WARM_STEPS:
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def engine_with(mode: str, k: int, device: str, kind: str) -> Engine:
    config = EngineConfig(
        device=device, mamba_cache_mode=mode, num_speculative_tokens=k, graphs=kind
    )
    return Engine(load_model("wordmath"), config)


def check(mode: str, k: int, device: str, kinds: tuple[str, ...] = ("cuda", "record")) -> str:
    """All of it, in words.

    Raises:
        AssertionError: a graph said something else than the eager engine.
    """
    reports = compare_graphs(mode, k, device, kinds)
    for report in reports:
        assert not report.faults, f"{report.kind}: {report.faults}"
    times = {kind: step_milliseconds(mode, k, device, kind) for kind in ("off", *kinds[:1])}
    eager, graph = times["off"], times[kinds[0]]
    timed = f"a step of 8 requests: eager {eager:.2f} ms, {kinds[0]} {graph:.2f} ms"
    return "; ".join([*map(str, reports), f"{timed} (x{eager / graph:.2f})"])
