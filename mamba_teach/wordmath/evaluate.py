"""How often the served model is right: held-out problems through the engine, answers checked."""

from __future__ import annotations

from dataclasses import dataclass

from mamba_teach.engine import Engine
from mamba_teach.request import RequestOutput, SamplingParams
from mamba_teach.wordmath.problems import Problem, check_solution, held_out_problems
from mamba_teach.wordmath.prompts import few_shot_prompt, format_problem

MAX_SOLUTION_TOKENS = 96  # the longest solution of the generator has fewer


@dataclass(frozen=True)
class Evaluation:
    """Problems, what the engine answered, and which answers are right."""

    problems: list[Problem]
    outputs: list[RequestOutput]
    correct: list[bool]

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / len(self.correct)


def evaluate(
    engine: Engine, num_problems: int = 500, *, few_shot: bool = True, progress: bool = False
) -> Evaluation:
    """Serve held-out problems greedily and check the final numbers.

    Args:
        engine: with a wordmath model; its ``max_model_len`` must hold prompt and solution.
        num_problems: the first so many of the held-out list.
        few_shot: put the eight worked examples in front, as the demo does.
        progress: show a progress bar.
    """
    problems = held_out_problems(num_problems)
    prompts = [
        few_shot_prompt(p) if few_shot else format_problem(p, with_solution=False)
        for p in problems
    ]
    params = SamplingParams(max_tokens=MAX_SOLUTION_TOKENS)
    outputs = engine.generate(prompts, params, progress=progress)
    correct = [check_solution(p, o.text) for p, o in zip(problems, outputs, strict=True)]
    return Evaluation(problems, outputs, correct)
