"""How a problem becomes text for the model, and how eight worked problems become a shared prefix.

Training text is a stream of `Q: ...\\nA: ...<|end|>`. A prompt is the same text cut off after `A:`,
without the space that follows: a space before a digit is a token of its own (see `make_tokenizer`),
so the cut falls between tokens, and prompt tokens plus solution tokens are exactly the tokens of
the whole text.

The few-shot preamble is the same for every question. It teaches a trained model little; it is here
because it is what prefix caching lives on: hundreds of tokens that every request of an evaluation
shares.
"""

from functools import cache
from itertools import islice

from mamba_teach.wordmath.problems import Problem, training_problems

END_OF_TEXT = "<|end|>"  # the one special token, id 0: begins a text, ends every answer
NUM_EXAMPLES = 8
PREAMBLE_SEED = 294  # chosen for eight varied stories, 520 to 640 tokens in all


def format_problem(problem: Problem, with_solution: bool) -> str:
    """The text of a problem: all of it with `<|end|>`, or only the prompt, ending in `A:`."""
    prompt = f"Q: {problem.question}\nA:"
    return f"{prompt} {problem.solution}{END_OF_TEXT}" if with_solution else prompt


@cache
def few_shot_preamble() -> str:
    """Eight worked examples from the training side, each ended by `<|end|>`; always the same."""
    examples = islice(training_problems(PREAMBLE_SEED), NUM_EXAMPLES)
    return "".join(format_problem(example, with_solution=True) for example in examples)


def few_shot_prompt(problem: Problem) -> str:
    """The preamble, then the question, ending in `A:`."""
    return few_shot_preamble() + format_problem(problem, with_solution=False)
