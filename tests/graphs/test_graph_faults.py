"""Faults that others have had with graphs, each as its smallest input.

Rows of padding that remember their last tenant; padded copies that are made and not used; buffers
that moved; printing in the middle of a capture. The yardstick is the engine of a pair without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from graphs.lockstep import Lockstep, drafts_of, graphs_of, recorded_graphs
from support.models import assert_says_what_cold_says, cold_tokens, random_prompt, toy_model

from mamba_teach import Engine, EngineConfig, SamplingParams
from mamba_teach.events import StepDispatched
from mamba_teach.model.metadata import AttentionMetadata, MambaMetadata
from mamba_teach.runner import model_runner
from mamba_teach.runner.graph_interface import GraphCaptureError, GraphReplayError
from mamba_teach.runner.step_metadata import StepInputs
from mamba_teach.spec_decode.scripted_proposer import ScriptedProposer

PATTERN = "M*M-"
MODEL = toy_model(PATTERN)


class Pair(Lockstep):
    """Two engines over the toy model with one graph size; looks at what each replay is given."""

    def __init__(self, size: int, k: int = 0, mode: str = "all", **changes: Any) -> None:
        self.texts: dict[str, list[int]] = {}
        self.inputs: list[StepInputs] = []
        script = drafts_of(self.texts, MODEL.config.vocab_size, full=1.0)

        def make(graphs: str) -> Engine:
            settings: dict[str, Any] = dict(
                max_model_len=64, max_num_batched_tokens=4 * (1 + k) + 32, max_num_seqs=4, device="cpu",
                block_size=16, mamba_cache_mode=mode, num_speculative_tokens=k, graphs=graphs,
                graph_capture_sizes=(size,) if graphs == "record" else None,
            )  # fmt: skip
            proposer = ScriptedProposer(script) if k else None
            return Engine(MODEL, EngineConfig(**(settings | changes)), proposer=proposer)

        super().__init__(make)
        graphs = graphs_of(self.graphs)
        run = graphs.run

        def watched(size: int, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
            self.inputs.append(inputs)
            check_padding(inputs, len(inputs.sample_positions) // (1 + k), size, 1 + k)
            for output in (graphs.steps[size].hidden, graphs.steps[size].logits):
                output.fill_(torch.nan)  # what the replay does not write shows
            return run(size, inputs)

        graphs.run = watched  # type: ignore[method-assign]

    def arrive(self, length: int, max_tokens: int, seed: int) -> str:
        prompt = random_prompt(length, seed)
        request_id = self.add(prompt, SamplingParams(max_tokens=max_tokens))
        self.texts[request_id] = [*prompt, *cold_tokens(MODEL, tuple(prompt), 30, 64)]
        return request_id

    def abort_request(self, request_id: str) -> None:
        for engine in (self.eager, self.graphs):
            engine.abort(request_id)

    def dispatched(self) -> list[StepDispatched]:
        return [event for event in self.graphs.events if isinstance(event, StepDispatched)]

    def check_texts(self) -> None:
        for request_id, tokens in self.done.items():
            text = self.texts[request_id]
            prompt = text[: len(text) - 30]
            assert_says_what_cold_says(MODEL, prompt, tokens, 64)


def check_padding(inputs: StepInputs, real: int, padded: int, width: int) -> None:
    """``real`` rows of ``width`` tokens, and behind them nothing that could be anybody's."""
    ends = [width * min(row, real) for row in range(padded + 1)]
    mamba = [m for m in inputs.metadata if isinstance(m, MambaMetadata)]
    attention = [m for m in inputs.metadata if isinstance(m, AttentionMetadata)]
    assert mamba and attention
    for of_mamba in mamba:
        decode = of_mamba.decode
        assert of_mamba.prefill is None and decode is not None
        assert of_mamba.num_decode_tokens == padded * width
        assert decode.query_start_loc.tolist() == ends
        slots = (
            decode.conv_src_slots,
            decode.conv_dst_slots,
            decode.ssm_src_slots,
            decode.ssm_dst_slots,
        )
        for of_row in slots:
            assert len(of_row) == padded
            assert (of_row[:real] > 0).all() and not of_row[real:].any()
        if decode.num_accepted_tokens is not None:
            assert decode.num_accepted_tokens[real:].tolist() == [1] * (padded - real)
    for of_attention in attention:
        assert of_attention.query_start_loc.tolist() == ends
        assert (of_attention.seq_lens[:real] > 0).all() and not of_attention.seq_lens[real:].any()
        assert not of_attention.block_table[real:].any()
        assert not of_attention.slot_mapping[real * width :].any()
    assert not inputs.token_ids[real * width :].any()


# Padding rows keep the last tenant's metadata ------------------------------------------------------


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_rows_of_padding_forget_who_was_there(mode: str, k: int) -> None:
    """Four requests decode; two leave; two others leave in mid-prompt, 6 of 10 tokens computed."""
    width = 1 + k
    pair = Pair(4, k, mode, max_num_batched_tokens=2 * width + 6, poison=True)
    ids = [pair.arrive(3, 30, seed) for seed in range(4)]
    for _ in range(5):
        pair.step()
    assert pair.dispatched()[-1].reason == f"4 decode rows of {width} tokens in 4 rows"
    pair.abort_request(ids[3])
    pair.abort_request(ids[1])
    for seed in (5, 6):
        late = pair.arrive(10, 5, seed)
        pair.step()
        (request,) = [r for r in pair.graphs.scheduler.running if r.request_id == late]
        assert request.num_computed_tokens == 6
        pair.abort_request(late)
    before = len(pair.inputs)
    pair.step()
    assert len(pair.inputs) == before + 1
    assert (
        pair.dispatched()[-1].reason
        == f"2 decode rows of {width} tokens in 4 rows, 2 of them padding"
    )
    pair.to_the_end()
    assert set(pair.done) == {ids[0], ids[2]}
    pair.check_texts()


@pytest.mark.parametrize("k", [0, 2])
def test_the_row_of_a_finished_request_is_padding(k: int) -> None:
    """Rows of 1 + k and 0 tokens, after the request in row 1 has ended."""
    pair = Pair(2, k)
    pair.arrive(17, 25, seed=0)
    pair.arrive(20, 7, seed=1)
    pair.to_the_end()
    pair.check_texts()
    assert set(pair.replays[2]) == {1, 2}


# Padded copy made but the unpadded tensor used -----------------------------------------------------


@contextmanager
def mixer_outputs() -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Kind and output of every mixer that runs inside."""
    outputs: list[tuple[str, torch.Tensor]] = []

    def hook(kind: str) -> Callable[..., None]:
        return lambda module, args, output: outputs.append((kind, output))

    layers = zip(PATTERN, MODEL.model.layers, strict=True)
    handles = [layer.mixer.register_forward_hook(hook(kind)) for kind, layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("mode", ["none", "all"])
def test_one_graph_serves_three_one_and_four_rows(
    mode: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits: list[torch.Tensor] = []
    sample = model_runner.sample
    monkeypatch.setattr(
        model_runner,
        "sample",
        lambda given, *rest: logits.append(given.clone()) or sample(given, *rest),
    )
    with mixer_outputs() as outputs:
        pair = Pair(4, k, mode, poison=True)
    (graph,) = recorded_graphs(pair.graphs)
    captured = [(kind, out) for kind, out in outputs if graph.pool.owns(out.data_ptr())]
    assert "".join(kind for kind, _ in captured) == PATTERN

    def step(rows: int) -> None:
        logits.clear()
        pair.step()
        assert not pair.diverged
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
        if not pair.dispatched()[-1].graph_size:
            return
        served.append(rows)
        for kind, output in captured:
            assert not output.isnan().any()
            assert kind == "-" or not output[rows * (1 + k) :].any(), f"padding in {kind} is not 0"
            assert output[: rows * (1 + k)].any(1).all()

    served: list[int] = []
    ids = [pair.arrive(length, 30, seed=length) for length in (12, 15, 4)]
    for _ in range(4):
        step(3)
    for request_id in ids[:2]:
        pair.abort_request(request_id)
    for _ in range(2):
        step(1)
    for length in (9, 14, 16):  # they find other slots than those before them
        pair.arrive(length, 30, seed=length)
    for _ in range(3):
        step(4)
    assert {3, 1, 4} == set(served)
    addresses = {tuple(t.data_ptr() for t in _decode_tensors(inputs)) for inputs in pair.inputs}
    assert len(addresses) == 1, "a buffer has moved"


def _decode_tensors(inputs: StepInputs) -> list[torch.Tensor]:
    tensors = [inputs.token_ids]
    for metadata in inputs.metadata:
        if isinstance(metadata, MambaMetadata):
            tensors += [t for t in vars(metadata.decode).values() if t is not None]
        elif isinstance(metadata, AttentionMetadata):
            tensors += [t for t in vars(metadata).values() if isinstance(t, torch.Tensor)]
    return tensors


def test_a_buffer_that_moved_stops_the_step_and_loses_no_request() -> None:
    pair = Pair(4)
    pair.arrive(5, 10, seed=1)
    pair.step()
    pair.step()
    runner = pair.graphs.runner
    buffer = next(iter(runner.metadata.mamba.values())).buffers.ssm_dst_slots
    kept, buffer.tensor = buffer.tensor, buffer.tensor.clone()
    with pytest.raises(GraphReplayError, match="not where they were when the graph of"):
        pair.graphs.step()
    buffer.tensor = kept
    pair.diverged = True  # a prefill again in one of the two
    pair.to_the_end()
    pair.check_texts()
    assert len(pair.done) == 1


# Compile, tune or print inside capture ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("trace", "operation"),
    [
        (lambda output: print(output), "__repr__"),
        (lambda output: f"{output.abs().max():.3f}", "__format__"),
        (lambda output: output.isnan().any() and None, "host reads a value"),
        (lambda output: output[0].tolist(), "tolist"),
    ],
)
def test_a_trace_of_the_step_is_refused_during_capture(
    trace: Callable[[torch.Tensor], Any], operation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def trace_in_captures_too(module: Any, args: Any, output: torch.Tensor) -> None:
        trace(output)

    handle = MODEL.model.layers[2].register_forward_hook(trace_in_captures_too)
    try:
        Engine(MODEL, EngineConfig(max_model_len=32, device="cpu"))
        with pytest.raises(GraphCaptureError, match=rf"{operation}"):
            Engine(MODEL, EngineConfig(max_model_len=32, device="cpu", graphs="record"))
    finally:
        handle.remove()
    pair = Pair(1)
    pair.arrive(5, 4, seed=1)
    pair.to_the_end()
    pair.check_texts()
