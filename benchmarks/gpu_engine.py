"""Does the engine say the same on the GPU as on the CPU? Greedy, fp32, the shipped wordmath model.

Two implementations of a model agree to rounding, not to the bit, so where the two best tokens are
nearly equally likely either may come out, and all that follows differs. Such a *near tie* (logits
within :data:`NEAR_TIE`, looked up on the CPU) is counted and allowed; the comparison of that problem
ends there. Any other difference is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gpu_cases  # noqa: F401  (finds the packages of a checkout that is not installed)
import torch

from mamba_teach import Engine, EngineConfig, SamplingParams
from mamba_teach.model.checkpoint import load_model
from mamba_teach.wordmath.evaluate import evaluate

MODES = ("none", "align", "all")
NEAR_TIE = 1e-3
PROBLEMS = 32


@dataclass(frozen=True)
class Comparison:
    """Problems compared, those that ended in a near tie, and the faults, in words."""

    problems: int
    near_ties: int
    faults: tuple[str, ...]

    def __str__(self) -> str:
        counts = f"{self.problems} problems, {self.near_ties} near ties, {len(self.faults)} faults"
        return "; ".join([counts, *self.faults[:3]])


def compare_engines(mode: str, device: str, problems: int = PROBLEMS) -> Comparison:
    """Serve the problems in a cache mode on the CPU and on ``device``; compare token by token."""
    outputs = []
    for where in ("cpu", device):
        engine = Engine(load_model("wordmath"), EngineConfig(device=where, mamba_cache_mode=mode))
        outputs.append(evaluate(engine, problems).outputs)
    prompts = [output.prompt_token_ids for output in outputs[0]]
    texts = [[output.token_ids for output in side] for side in outputs]
    return compare_tokens(prompts, *texts, top2_gap_on_cpu())


def compare_tokens(
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    actual: Sequence[Sequence[int]],
    gap_after: Callable[[Sequence[int]], float],
) -> Comparison:
    """Where outputs part, ask ``gap_after(tokens so far)`` how close the two best tokens were."""
    near_ties, faults = 0, []
    for number, (prompt, want, got) in enumerate(zip(prompts, expected, actual, strict=True)):
        if tuple(want) == tuple(got):
            continue
        pairs = zip(want, got)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(want), len(got)))
        gap = gap_after([*prompt, *want[:same]])
        if gap <= NEAR_TIE:
            near_ties += 1
        else:
            pair = f"{list(want[same : same + 1])} and {list(got[same : same + 1])}"
            faults.append(f"problem {number}, token {same}: {pair}, logits {gap:.2g} apart")
    return Comparison(len(prompts), near_ties, tuple(faults))


def top2_gap_on_cpu() -> Callable[[Sequence[int]], float]:
    """``gap(token_ids)``: how far apart the two best logits of the next token are."""
    model = load_model("wordmath")
    engine = Engine(model, EngineConfig(device="cpu", mamba_cache_mode="none"))
    compute, seen = model.compute_logits, []

    def remember(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute(hidden))
        return seen[-1]

    model.compute_logits = remember  # type: ignore[method-assign]

    def gap(token_ids: Sequence[int]) -> float:
        engine.generate([token_ids], SamplingParams(max_tokens=1))
        first, second = seen[-1][-1].topk(2).values.tolist()
        seen.clear()
        return first - second

    return gap
