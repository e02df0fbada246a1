"""What decode graphs launch on the Triton kernels: as little as promised, and nothing new."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_prompt, toy_model

from mamba_kernels.backend import override_backend
from mamba_kernels.launch import Variant, collect_variants, count_launches
from mamba_teach import Engine, EngineConfig, SamplingParams
from mamba_teach.events import StepDispatched
from mamba_teach.runner import model_runner
from mamba_teach.runner.decode_graphs import DecodeGraphs
from mamba_teach.runner.graph_interface import GraphCaptureError
from mamba_teach.runner.graph_recorder import RecordedGraph
from mamba_teach.spec_decode.scripted_proposer import ScriptedProposer

pytestmark = pytest.mark.interpreter
KERNELS_README = Path(__file__).parents[2] / "kernels" / "README.md"
PATTERN, MAMBA_LAYERS = "MM", 2


def launches_per_layer() -> int:
    """Of a decode or verify step, as the kernels' README promises."""
    text = KERNELS_README.read_text(encoding="utf-8")
    found = re.search(r"Launches per layer: \*\*(\d+)\*\* for decode", text)
    assert found is not None
    return int(found[1])


@contextmanager
def watched_variants() -> Iterator[dict[str, set[Variant]]]:
    """The variants that an engine made inside warms up, and those that its captures launch."""
    seen: dict[str, set[Variant]] = {"captured": set()}
    capture = RecordedGraph.capture

    def make(*args: Any) -> DecodeGraphs:
        seen["warmed"] = set(args[-1])
        return DecodeGraphs(*args)

    @contextmanager
    def observed(graph: RecordedGraph) -> Iterator[None]:
        with collect_variants() as variants, capture(graph):
            yield
        seen["captured"] |= variants

    with pytest.MonkeyPatch.context() as patch, override_backend("triton"):
        patch.setattr(model_runner, "DecodeGraphs", make)
        patch.setattr(RecordedGraph, "capture", observed)
        yield seen


@cache
def engine_with(k: int) -> tuple[Engine, dict[str, set[Variant]]]:
    """An engine with graphs of 1 and 3 requests, and the variants of its start-up."""
    config = EngineConfig(
        max_model_len=32, max_num_batched_tokens=64, max_num_seqs=4, device="cpu", block_size=16,
        num_speculative_tokens=k, graphs="record", graph_capture_sizes=(1, 3), poison=True,
    )  # fmt: skip
    with watched_variants() as seen:
        model = toy_model(PATTERN, mamba_num_heads=2, n_groups=1)
        proposer = ScriptedProposer(lambda request_id, tokens, most: [0] * most) if k else None
        return Engine(model, config, proposer=proposer), seen


@pytest.mark.parametrize("k", [0, 2])
def test_what_is_captured_was_warmed_up(k: int) -> None:
    _, variants = engine_with(k)
    names = {variant.kernel_name for variant in variants["captured"]}
    assert len(names) == launches_per_layer()
    assert variants["captured"] <= variants["warmed"]


@pytest.mark.parametrize("k", [0, 2])
def test_graphs_hold_as_many_launches_as_the_table_says(k: int) -> None:
    engine, _ = engine_with(k)
    assert engine.runner.graphs is not None
    assert sorted(engine.runner.graphs.steps) == [1, 3]
    for step in engine.runner.graphs.steps.values():
        assert isinstance(step.graph, RecordedGraph)
        kernels = [node.name for node in step.graph.nodes if node.kind == "kernel"]
        assert len(kernels) == MAMBA_LAYERS * launches_per_layer()


@pytest.mark.parametrize("k", [0, 2])
def test_steps_launch_as_much_and_compile_nothing(k: int) -> None:
    """One row in a graph; four rows, more than the largest graph has, one after the other."""
    engine, variants = engine_with(k)
    launches: dict[int, tuple[str, int]] = {}
    with override_backend("triton"), collect_variants() as used:
        for rows in (1, 4):
            params = SamplingParams(max_tokens=4 + 2 * k)
            ids = [engine.add_request(random_prompt(10 + i, seed=i), params) for i in range(rows)]
            engine.step()
            start = len(engine.events)
            with count_launches() as count:
                engine.step()
            (event,) = [e for e in engine.events[start:] if isinstance(e, StepDispatched)]
            launches[rows] = event.path, count.total
            engine.step()
            for request_id in ids:
                engine.abort(request_id)
    # A replay is no launch of ours.
    assert launches == {1: ("graph", 0), 4: ("eager", MAMBA_LAYERS * launches_per_layer())}
    of_decode = {variant.kernel_name for variant in variants["captured"]}
    new = {v for v in used if v.kernel_name in of_decode} - variants["warmed"]
    assert not new, f"compiled in the middle of a step: {new}"


def capture_again(k: int, warmed: set[Variant]) -> DecodeGraphs:
    runner = engine_with(k)[0].runner
    with override_backend("triton"), torch.inference_mode():
        return DecodeGraphs(
            "record",
            (2,),
            runner.model,
            runner.caches,
            runner.metadata,
            torch.device("cpu"),
            warmed,
        )


@pytest.mark.parametrize("k", [0, 2])
def test_each_variant_is_needed_and_named_where_it_is_missing(k: int) -> None:
    _, variants = engine_with(k)
    capture_again(k, variants["captured"])  # these are enough, for another number of requests, too
    for missing in variants["captured"]:
        message = rf"{missing.kernel_name} during capture: .*warm-up"
        with pytest.raises(GraphCaptureError, match=message):
            capture_again(k, variants["warmed"] - {missing})


def test_warming_up_without_drafts_is_not_enough_for_a_graph_with_drafts() -> None:
    _, plain = engine_with(0)
    with pytest.raises(GraphCaptureError, match="causal_conv1d_update_kernel during capture"):
        capture_again(2, plain["warmed"])
