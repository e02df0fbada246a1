"""Do caching and speculation change what the model says? 500 held-out problems in every combination.

    python benchmarks/accuracy_matrix.py                       a table; some five minutes on one core
    python benchmarks/accuracy_matrix.py --json results.json   and the numbers
    python benchmarks/accuracy_matrix.py --problems 20         a first look

The counterpart of the check that came with the original change to vLLM, where accuracy on GSM8K word
problems stood for "the states are right". Ours is stricter, as it can be: few-shot prompts, greedy, and
the tokens themselves are compared with those of the plainest configuration, caching off and no drafts.

Two ways of adding the same numbers agree to rounding, not to the bit, so where the two best tokens are
nearly equally likely either may come out, and all that follows differs. Where sequences part, both
tokens' logits are computed anew without any cache; if neither is further than ``NEAR_TIE`` below the
best, the difference is a *tie* and counted as such. Any other difference is an error: exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_report import table
from speculation import count, describe_machine  # (also finds a checkout that is not installed)

from mamba_teach import Engine, EngineConfig, HybridModel, load_model
from mamba_teach.model.metadata import uncached_step
from mamba_teach.wordmath.evaluate import Evaluation, evaluate
from mamba_teach.wordmath.problems import parse_answer

PROBLEMS = 500
NEAR_TIE = 1e-4

OFF: dict[str, Any] = {"enable_prefix_caching": False}
ALIGN: dict[str, Any] = {"mamba_cache_mode": "align"}
ALL: dict[str, Any] = {"mamba_cache_mode": "all"}
# What the table shows of a configuration, and what the engine is told. The first is the reference.
CONFIGURATIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"mode": mode, "k": k, "graphs": graphs},
        settings | {"num_speculative_tokens": k, "graphs": graphs},
    )
    for mode, settings in (("off", OFF), ("align", ALIGN), ("all", ALL))
    for k in (0, 3)
    for graphs in ("off", "record")
]

Logits = Callable[[Sequence[int]], torch.Tensor]


@dataclass(frozen=True)
class Comparison:
    """A configuration's outputs beside the reference's, in numbers of problems.

    Attributes:
        different_answers: the final numbers differ, or one has none.
        different_tokens: the token sequences differ, and not because of a tie.
        ties: the token sequences differ from a tie on.
    """

    different_answers: int
    different_tokens: int
    ties: int


def compare(reference: Evaluation, other: Evaluation, logits_after: Logits) -> Comparison:
    """Compare two evaluations of the same problems."""
    answers = tokens = ties = 0
    for expected, got in zip(reference.outputs, other.outputs, strict=True):
        answers += parse_answer(expected.text) != parse_answer(got.text)
        if expected.token_ids == got.token_ids:
            continue
        if is_tie(expected.prompt_token_ids, expected.token_ids, got.token_ids, logits_after):
            ties += 1
        else:
            tokens += 1
    return Comparison(answers, tokens, ties)


def is_tie(
    prompt: Sequence[int], expected: Sequence[int], got: Sequence[int], logits_after: Logits
) -> bool:
    """Whether rounding may decide between the first two tokens in which the outputs differ.

    Both have to be within :data:`NEAR_TIE` of the best logit. An output that merely ends early is no
    tie: no token stands against the other's.

    Args:
        prompt, expected, got: token ids; ``expected`` and ``got`` are not the same.
        logits_after: ``(vocab,)`` logits of the token that follows a text.
    """
    pairs = enumerate(zip(expected, got, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), None)
    if same is None:
        return False
    logits = logits_after([*prompt, *expected[:same]])
    rivals = logits[[expected[same], got[same]]]
    return bool(logits.max() - rivals.min() <= NEAR_TIE)


def uncached_logits(model: HybridModel) -> Logits:
    """Logits from a forward pass over the whole text, without engine, cache or drafts."""

    @torch.no_grad()
    def logits_after(token_ids: Sequence[int]) -> torch.Tensor:
        metadata, caches = uncached_step(model.config, [len(token_ids)])
        hidden = model(torch.tensor(token_ids), metadata, caches)  # (T, hidden)
        return model.compute_logits(hidden[-1:])[0]

    return logits_after


def line(shown: dict[str, Any], engine: Engine, evaluation: Evaluation) -> dict[str, Any]:
    """A configuration's line of the report, without the comparison."""
    outputs, counts = evaluation.outputs, count(engine)
    cached = sum(output.num_cached_tokens for output in outputs)
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        **shown,
        "accuracy": sum(evaluation.correct) / len(evaluation.correct),
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "hit_rate": round(cached / prompts, 4),
        "generated_tokens": sum(len(output.token_ids) for output in outputs),
        "steps": counts.steps,
        "verify_steps": counts.verify_steps,
        "tokens_per_verify_step": round(counts.tokens_per_verify_step, 4),
        "drafts_right": counts.drafts_right,
        "drafts_wrong": counts.drafts_wrong,
    }


def run_matrix(model: HybridModel, problems: int, *, progress: bool = True) -> list[dict[str, Any]]:
    """Serve the problems in every configuration; one line each."""
    logits_after = uncached_logits(model)
    reference: Evaluation | None = None
    lines = []
    for shown, settings in CONFIGURATIONS:
        if progress:
            print(", ".join(f"{name} {value}" for name, value in shown.items()), file=sys.stderr)
        engine = Engine(model, EngineConfig(device="cpu", **settings))
        evaluation = evaluate(engine, problems, progress=progress)
        reference = reference or evaluation
        comparison = compare(reference, evaluation, logits_after)
        lines.append(line(shown, engine, evaluation) | asdict(comparison))
    return lines


def render(lines: list[dict[str, Any]]) -> str:
    """The report as a table."""
    dimensions = list(CONFIGURATIONS[0][0])
    header = [
        *dimensions, "accuracy", "answers differ", "tokens differ", "ties", "hit rate", "steps",
        "tokens/verify step",
    ]  # fmt: skip
    rows = [
        [
            *(str(run[name]) for name in dimensions), f"{run['accuracy']:.1%}",
            str(run["different_answers"]), str(run["different_tokens"]), str(run["ties"]),
            f"{run['hit_rate']:.1%}", str(run["steps"]), f"{run['tokens_per_verify_step']:.2f}",
        ]
        for run in lines
    ]  # fmt: skip
    return table(header, rows)


def main(argv: list[str] | None = None) -> int:
    """0 if no configuration says anything else than the reference, ties apart."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args(argv)
    lines = run_matrix(load_model("wordmath"), args.problems)
    print(render(lines))
    if args.json:
        settings = {"problems": args.problems, "near_tie": NEAR_TIE}
        document = {"machine": describe_machine(), **settings, "runs": lines}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(run["different_tokens"] for run in lines))


if __name__ == "__main__":
    sys.exit(main())
