"""The word problems, their prompts and their tokenizer: what training and evaluation rely on."""

import random
import re
import zlib
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mamba_teach.wordmath.make_tokenizer import TOKENIZER_PATH, build_tokenizer
from mamba_teach.wordmath.problems import (
    LARGEST,
    LARGEST_PRODUCT,
    Problem,
    check_solution,
    generate_problem,
    held_out_problems,
    is_held_out,
    parse_answer,
    training_problems,
)
from mamba_teach.wordmath.prompts import (
    END_OF_TEXT,
    NUM_EXAMPLES,
    few_shot_preamble,
    few_shot_prompt,
    format_problem,
)

TOKENIZER = Tokenizer.from_file(str(TOKENIZER_PATH))
SEEDS = st.integers(0, 2**32)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@given(SEEDS)
def test_every_step_can_be_recomputed_from_the_question(seed: int) -> None:
    problem = generate_problem(random.Random(seed))
    known = {int(n) for n in re.findall(r"\d+", problem.question)}
    steps, answer = problem.solution.split(" =")
    assert 2 <= len(steps.split(";")) <= 5
    for step in steps.split(";"):
        left, operator, right, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", step).groups()
        left, right, result = int(left), int(right), int(result)
        assert left in known
        # Twice, half and triple are words; every other operand is a number somebody has read.
        assert right in known or (operator in "*/" and right in (2, 3))
        if operator == "/":
            assert right == 2 and left % 2 == 0
        if operator == "*":
            assert result <= LARGEST_PRODUCT
        calculate = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}
        assert result == calculate[operator]
        known.add(result)
    assert int(answer) == problem.answer == result
    assert all(1 <= n <= LARGEST for n in known)


@given(SEEDS)
def test_questions_are_clean_english(seed: int) -> None:
    question = generate_problem(random.Random(seed)).question
    sentences = re.split(r"(?<=[.?]) ", question)
    assert 3 <= len(sentences) <= 8
    assert question.endswith("?") and question.count("?") == 1
    assert all(re.fullmatch(r"[A-Z][A-Za-z0-9', ]*[.?]", sentence) for sentence in sentences)
    assert "  " not in question


def test_problems_are_distinct_and_short() -> None:
    problems = list(islice(training_problems(3), 4000))
    assert len({p.question for p in problems}) > 0.99 * len(problems)
    encodings = TOKENIZER.encode_batch([format_problem(p, with_solution=True) for p in problems])
    lengths = [len(encoding.ids) for encoding in encodings]
    assert max(lengths) <= 150
    assert 70 <= sum(lengths) / len(lengths) <= 85
    asides = sum(bool(re.search(r"\bis \d+ |weighs|stood", p.question)) for p in problems)
    assert 0.3 < asides / len(problems) < 0.5


def test_split_is_disjoint_and_about_one_in_sixteen() -> None:
    assert not any(is_held_out(p.question) for p in islice(training_problems(0), 2000))
    held_out = held_out_problems(200)
    assert len({p.question for p in held_out}) == 200
    assert all(is_held_out(p.question) for p in held_out)
    rng = random.Random(7)
    share = sum(is_held_out(generate_problem(rng).question) for _ in range(8000)) / 8000
    assert share == pytest.approx(1 / 16, abs=0.015)


def test_held_out_problems_edge_cases() -> None:
    assert held_out_problems(0) == []
    assert held_out_problems(20)[:10] == held_out_problems(10)
    assert held_out_problems(10, seed=1) != held_out_problems(10)
    with pytest.raises(ValueError, match="-1"):
        held_out_problems(-1)


def test_the_evaluation_set_never_changes() -> None:
    """Published accuracies are about these questions: change them, and retrain the checkpoint."""
    text = "\n".join(f"{p.question}\t{p.solution}" for p in held_out_problems(50))
    assert zlib.crc32(text.encode()) == 0xEE3CA504
    assert list(islice(training_problems(5), 20)) == list(islice(training_problems(5), 20))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 48+7=55;55-9=46 =46", 46),
        (" 48+7=55 =55<|end|>", 55),
        (" 1+1=2 =2 =3", 3),
        (" 48+7=55", None),
        ("", None),
        (" 48+7=55 =", None),
        (" 1-2=-1 =-1", -1),
    ],
)
def test_parse_answer(text: str, answer: int | None) -> None:
    assert parse_answer(text) == answer


def test_check_solution_wants_the_exact_answer() -> None:
    problem = Problem("How many?", "48+7=55;55-9=46 =46", 46)
    assert check_solution(problem, " " + problem.solution)
    assert check_solution(problem, " =46")
    assert not check_solution(problem, " 48+7=55;55-9=46 =460")
    assert not check_solution(problem, " 48+7=55;55-9=46")


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(ids(text), skip_special_tokens=False) == text


def test_special_token_is_zero_and_begins_a_text() -> None:
    assert TOKENIZER.token_to_id(END_OF_TEXT) == 0
    assert TOKENIZER.encode("hello").ids == [0, *ids("hello")]
    assert TOKENIZER.encode("").ids == [0]
    assert ids(f"a{END_OF_TEXT}b") == [*ids("a"), 0, *ids("b")]


def test_digits_and_signs_are_single_tokens_everywhere() -> None:
    vocabulary = TOKENIZER.get_vocab()
    assert len(vocabulary) == 768
    assert sum(bool(re.search("[0-9]", token)) for token in vocabulary) == 10
    for sign in "0123456789+-*/=; \n.?,:":
        assert len(ids(sign)) == 1
    text = " 480+7=487;487/1-9*2 =46"
    assert [TOKENIZER.decode([i]) for i in ids(text)] == list(text)


def test_nearly_all_words_are_single_tokens() -> None:
    words = [
        word
        for problem in islice(training_problems(4), 2000)
        for word in re.findall(r" [A-Za-z]+", " " + problem.question)
    ]
    assert len(set(words)) < 400
    assert sum(len(ids(word)) == 1 for word in words) > 0.99 * len(words)


@given(SEEDS)
def test_prompt_and_solution_meet_between_tokens(seed: int) -> None:
    problem = generate_problem(random.Random(seed))
    whole = format_problem(problem, with_solution=True)
    prompt = format_problem(problem, with_solution=False)
    assert whole.startswith(prompt) and prompt.endswith("A:")
    assert ids(prompt) + ids(whole[len(prompt) :]) == ids(whole)
    assert ids(whole)[-1] == 0
    few_shot = few_shot_prompt(problem)
    assert ids(few_shot_preamble()) + ids(prompt) == ids(few_shot)


def test_preamble_holds_eight_training_examples() -> None:
    assert 520 <= len(ids(few_shot_preamble())) <= 640
    examples = few_shot_preamble().split(END_OF_TEXT)
    assert examples.pop() == ""
    assert len(examples) == NUM_EXAMPLES
    for example in examples:
        question = re.fullmatch(r"Q: (.*)\nA: .* =\d+", example).group(1)
        assert not is_held_out(question)


def test_building_the_tokenizer_again_gives_the_same_one() -> None:
    assert build_tokenizer().to_str() == TOKENIZER.to_str()
    with pytest.raises(ValueError, match="257"):
        build_tokenizer(num_problems=1, vocab_size=256)
