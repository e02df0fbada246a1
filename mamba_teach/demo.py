"""The demo: the shipped model solves word problems in your terminal.

Every prompt is the same eight worked examples and a new question, so most of each prompt is shared.
What is printed comes from the engine's event log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mamba_kernels.backend import choose_backend
from mamba_teach.config import EngineConfig
from mamba_teach.engine import Engine
from mamba_teach.events import (
    Event,
    RequestFinished,
    RowScheduled,
    StepDispatched,
    StepStarted,
    TokenSampled,
    reduce,
)
from mamba_teach.model.checkpoint import load_model
from mamba_teach.viz.board_html import board_page
from mamba_teach.viz.board_text import render_board
from mamba_teach.wordmath.evaluate import Evaluation, evaluate

NUM_ANSWERS_SHOWN = 3
NUM_DRAFTS = 3


def run_demo(num_problems: int = 32, as_json: bool = False, board_file: Path | None = None) -> None:
    """Serve ``num_problems`` held-out problems; print a report, or one JSON object.

    Args:
        board_file: also write a page there that plays the block tables of the run.
    """
    config = EngineConfig(num_speculative_tokens=NUM_DRAFTS, graphs="auto")
    engine = Engine(load_model("wordmath"), config)
    if not as_json:
        print("mamba_teach serves a hybrid Mamba2 model:", ", ".join(mode_line(engine)))
        print(engine.summary(), end="\n\n")
    evaluation = evaluate(engine, num_problems, progress=not as_json)
    if as_json:
        print(json.dumps(report(engine, evaluation)))
    else:
        sys.stderr.flush()
        print_report(engine, evaluation)
    if board_file is not None:
        title = f"mamba_teach: {num_problems} word problems, step by step"
        board_file.write_text(board_page(engine.events, title), encoding="utf-8")
        print(f"\nThe block tables of every step: open {board_file} in a browser.", file=sys.stderr)


def mode_line(engine: Engine) -> list[str]:
    """Device, kernel backend and cache mode, for people."""
    facts = report_modes(engine)
    return [
        f"device {facts['device']}",
        f"kernels {facts['backend']}",
        f"cache mode {facts['cache_mode']}",
        f"graphs {facts['graphs']}",
    ]


def report_modes(engine: Engine) -> dict[str, str]:
    return {
        "cache_mode": engine.cache_mode.effective,
        "graphs": engine.runner.graph_kind,
        "device": engine.device.type,
        "backend": choose_backend(torch.empty(0, device=engine.device)),
    }


def report(engine: Engine, evaluation: Evaluation) -> dict[str, object]:
    """What ``--json`` prints. ``accepted_per_step`` is tokens per request and decode step."""
    outputs = evaluation.outputs
    return {
        "problems": len(outputs),
        "accuracy": round(evaluation.accuracy, 4),
        "generated_tokens": sum(len(o.token_ids) for o in outputs),
        "steps": engine.num_steps,
        "cached_tokens": sum(o.num_cached_tokens for o in outputs),
        "prompt_tokens": sum(len(o.prompt_token_ids) for o in outputs),
        "drafted_tokens": sum(o.num_drafted_tokens for o in outputs),
        "accepted_drafts": sum(o.num_accepted_drafts for o in outputs),
        "accepted_per_step": round(tokens_per_decode_row(engine.events), 3),
        "graph_steps": sum(
            isinstance(event, StepDispatched) and event.path == "graph" for event in engine.events
        ),
        "hit_rate": round(hit_rate(evaluation), 4),
        **report_modes(engine),
    }


def counted(number: int, noun: str) -> str:
    """"1 block", "2 blocks"."""
    return f"{number} {noun}" + "s" * (number != 1)


def hit_rate(evaluation: Evaluation) -> float:
    """Part of the prompt tokens that came from the prefix cache."""
    cached = sum(o.num_cached_tokens for o in evaluation.outputs)
    return cached / sum(len(o.prompt_token_ids) for o in evaluation.outputs)


def tokens_per_decode_row(log: Sequence[Event]) -> float:
    """Tokens sampled by decode rows, per decode row."""
    rows = tokens = 0
    decoding: set[str] = set()
    for event in log:
        match event:
            case StepStarted():
                decoding.clear()
            case RowScheduled(request_id, "decode"):
                decoding.add(request_id)
                rows += 1
            case TokenSampled(request_id):
                tokens += request_id in decoding
    return tokens / rows if rows else 0.0


def busiest_mixed_step(log: Sequence[Event]) -> int:
    """Length of the log's prefix that ends in the fullest step with prefill and decode rows."""
    best_end, best = 0, (False, 0)
    kinds: list[str] = []
    for end, event in enumerate(log, start=1):
        if isinstance(event, StepStarted):
            kinds = []
        elif isinstance(event, RowScheduled):
            kinds.append(event.kind)
            if (fullness := (len(set(kinds)) == 2, len(kinds))) > best:
                best_end, best = end, fullness
    return best_end


def print_report(engine: Engine, evaluation: Evaluation) -> None:
    """Some answers, the numbers, and the block tables at a busy step."""
    facts = report(engine, evaluation)
    shown = list(zip(evaluation.problems, evaluation.outputs, evaluation.correct, strict=True))
    for problem, output, correct in shown[:NUM_ANSWERS_SHOWN]:
        print(f"\nQ: {problem.question}\nA:{output.text}   [{'right' if correct else 'wrong'}]")
    print(
        f"\n{counted(len(evaluation.outputs), 'problem')}, accuracy {evaluation.accuracy:.1%}; "
        f"{facts['prompt_tokens']} prompt tokens ({facts['cached_tokens']} of them from the prefix "
        f"cache: a hit rate of {hit_rate(evaluation):.0%})\nand {facts['generated_tokens']} generated "
        f"in {facts['steps']} steps."
    )
    print(
        f"The model's own MTP head guesses {engine.config.num_speculative_tokens} tokens ahead: "
        f"{facts['accepted_drafts']} of {facts['drafted_tokens']} guesses were right, which makes\n"
        f"{facts['accepted_per_step']} tokens per request and step instead of 1. {facts['graph_steps']} "
        f"steps were uniform and ran as graphs."
    )
    end = busiest_mixed_step(engine.events)
    finished = sum(isinstance(event, RequestFinished) for event in engine.events[:end])
    print(f"\nThe block tables at a busy step ({finished} problems already answered):\n")
    board = reduce(engine.events[:end])
    print(render_board(board))
    shared = sum(len(owners) > 1 for owners in board.owners.values())
    print(
        f"\nOf a Mamba layer a request holds its running state, however long it is, and while it "
        f"guesses, one more state\nper guess; of attention it holds all of its tokens, in blocks of "
        f"{board.block_size}. {counted(shared, 'block')} have more than one owner:\nthe worked examples "
        f"that all prompts begin with."
    )
