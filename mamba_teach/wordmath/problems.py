"""Word problems with worked answers, written by a program.

A large model learns arithmetic from the web; ours has two million parameters and a laptop, so it
needs a small world it can learn whole. Here ten little worlds (a market, a train, a pirate...) are
told in some two hundred words. In each, a number of things grows and shrinks until somebody asks
how many there are, and the solution writes every step down, `48+7=55;55-9=46 =46`, so that the
model never has to calculate more than one step in its head. Some sentences hold numbers that do not
matter ("The oven is 38 years old."), as life's do.

Everything is drawn from a `random.Random` with an integer seed, and a question belongs to the
training or to the held-out side by a checksum of its text: the two sides can never share a
question, whatever the seeds.
"""

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from mamba_teach.wordmath.themes import ANYBODY, MEN, THEMES, WOMEN

LARGEST = 999  # no number in a problem or its solution exceeds this
LARGEST_PRODUCT = 399  # products stay within reach of a tiny model
HELD_OUT_ONE_IN = 16  # share of all questions that training never sees


@dataclass(frozen=True)
class Problem:
    """A question in English, its worked solution (`48+7=55;55-9=46 =46`) and the final number."""

    question: str
    solution: str
    answer: int


class _Story:
    """One problem being written: its sentences, its steps, and the words for the placeholders."""

    def __init__(self, rng: random.Random, num_steps: int) -> None:
        self.rng = rng
        self.num_steps = num_steps
        self.theme = rng.choice(THEMES)
        self.noun = rng.choice(self.theme.nouns)
        self.names = rng.sample(WOMEN + MEN, 2)
        self.sentences: list[str] = []
        self.steps: list[str] = []
        self._told: set[str] = set()
        # After which sentence an aside stands: never first (it would open the story), never last,
        # since at least two sentences come before the question. Long stories go without.
        self._aside_after = rng.randint(1, 2) if num_steps < 4 and rng.random() < 0.44 else 0

    @property
    def is_about_a_person(self) -> bool:
        return bool(self.theme.holder)

    def steps_left(self) -> int:
        return self.num_steps - len(self.steps)

    def pick(self, kind: str) -> str:
        """A sentence of a kind (a field of `Theme`), one not yet used in this story if possible."""
        phrases = getattr(self.theme, kind)
        if self.is_about_a_person:
            phrases += getattr(ANYBODY, kind)
        phrase = self.rng.choice([p for p in phrases if p not in self._told] or phrases)
        self._told.add(phrase)
        return phrase

    def tell(self, phrase: str, n: int = 0, k: int = 0, name: str | None = None) -> None:
        """Add a sentence. With `name`, no pronoun is used: there are two people in the story."""
        hero = name or self.names[0]
        is_woman = hero in WOMEN
        after_aside = 0 < self._aside_after == len(self.sentences) - 1
        if name or after_aside or self.rng.random() < 0.3:  # else "The teacher is 40. She ..."
            who, whom, whose = hero, hero, f"{hero}'s"
        else:
            who, whom, whose = ("she", "her", "her") if is_woman else ("he", "him", "his")
        text = phrase.format(
            n=n, k=k, noun=self.noun, name=hero, other=self.names[1], holder=self.theme.holder,
            who=who, Who=who[0].upper() + who[1:], whom=whom, whose=whose,
            kin="uncle" if is_woman else "aunt",
        )  # fmt: skip
        self.sentences.append(text[0].upper() + text[1:])
        if len(self.sentences) == self._aside_after:
            self.sentences.append(self.pick("asides").format(n=self.rng.randint(21, 69)))

    def step(self, left: int, operator: str, right: int) -> int:
        """Write a step of the solution down and return its result."""
        results = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}
        self.steps.append(f"{left}{operator}{right}={results[operator]}")
        return results[operator]

    def number(self, low: int, high: int) -> int:
        """A number in [low, high]: mostly of two digits, now and then of one or of three."""
        first, last = self.rng.choices(((11, 99), (2, 9), (100, 400)), (76, 14, 10))[0]
        first, last = max(first, low), min(last, high)
        if first > last:  # the range has no number of that length
            first, last = low, min(high, low + 90)
        return self.rng.randint(first, last)

    def event(self, have: int, steps_left: int, limit: int, name: str | None = None) -> int:
        """Something happens to `have` things, in one step (or two, if allowed); the new number.

        What would leave the range, or would puzzle in a story of two, becomes a gain or a loss.
        """
        kinds = ("gain", "lose", "halve", "double", "triple", "packs")
        kind = self.rng.choices(kinds, (34, 34, 12, 7, 4, 9))[0]
        factor = {"double": 2, "triple": 3}.get(kind, 0)
        if factor and name is None and have * factor <= LARGEST_PRODUCT:
            self.tell(self.pick(kind))
            return self.step(have, "*", factor)
        if kind == "halve" and name is None and have % 2 == 0 and have >= 8:
            self.tell(self.pick(kind))
            return self.step(have, "/", 2)
        if kind == "packs" and steps_left >= 2 and have <= limit - 125:
            k, n = self.rng.randint(2, 5), self.rng.randint(3, 25)
            self.tell(self.pick(kind), n=n, k=k, name=name)
            return self.step(have, "+", self.step(k, "*", n))
        if (kind == "gain" or have < 8) and have <= limit - 20:
            n = self.number(2, limit - have)
            self.tell(self.pick("gain"), n=n, name=name)
            return self.step(have, "+", n)
        n = self.number(2, have - 3)  # at least three are left, so that plurals stay right
        self.tell(self.pick("lose"), n=n, name=name)
        return self.step(have, "-", n)

    def about_one(self) -> int:
        """A story with one quantity; its question may hold the last step. Returns the answer."""
        rng = self.rng
        # The longest stories start small and end plainly, so that no problem exceeds 150 tokens.
        is_long = self.num_steps == 5
        have = rng.randint(12, 99) if is_long or rng.random() < 0.78 else rng.randint(100, 480)
        most = have
        self.tell(self.pick("opening"), n=have)
        twists = ("", "room", "more", "price")
        twist = "" if is_long else rng.choices(twists, (50, 18, 18, 14))[0]
        while self.steps_left() > bool(twist):
            have = self.event(have, self.steps_left() - bool(twist), LARGEST)
            most = max(most, have)
        if twist == "price" and self.theme.price and have * 2 <= LARGEST_PRODUCT:
            k = rng.randint(2, min(5, LARGEST_PRODUCT // have))
            self.tell(self.pick(twist), k=k)
            return self.step(have, "*", k)
        if twist == "more" and have <= LARGEST - 20:
            n = self.number(2, LARGEST - have)
            self.tell(self.pick(twist), n=n)
            return self.step(have, "+", n)
        if twist == "room" and most <= LARGEST - 20:
            n = most + self.number(2, LARGEST - most)  # a pond of 50 frogs had room for 50
            self.tell(self.pick(twist), n=n)
            return self.step(n, "-", have)
        if self.steps_left():  # the twist did not fit: one more event instead
            have = self.event(have, 1, LARGEST)
        self.tell(self.pick("ask"))
        return have

    def about_two(self) -> int:
        """A story of two people, compared or added up in the end. Returns the answer."""
        rng = self.rng
        limit = LARGEST // 2  # for each, so that the sum stays in range
        first, second = self.names
        have = {first: rng.randint(12, 99) if rng.random() < 0.8 else rng.randint(100, 300)}
        self.tell(self.pick("opening"), n=have[first], name=first)
        kinds = ("has", "more", "fewer", "twice", "half")
        relation = rng.choices(kinds, (20, 32, 22, 13, 13))[0]
        if relation == "twice" and have[first] * 2 <= LARGEST_PRODUCT:
            self.tell(f"{second} has twice as many {{noun}} as {first}.")
            have[second] = self.step(have[first], "*", 2)
        elif relation == "half" and have[first] % 2 == 0:
            self.tell(f"{second} has half as many {{noun}} as {first}.")
            have[second] = self.step(have[first], "/", 2)
        elif relation in ("more", "fewer"):
            n = self.number(2, limit - have[first] if relation == "more" else have[first] - 3)
            self.tell(f"{second} has {{n}} {relation} {{noun}} than {first}.", n=n)
            have[second] = self.step(have[first], "+" if relation == "more" else "-", n)
        else:
            relation = "has"
            have[second] = self.number(11, 300)
            self.tell(f"{second} has {{n}} {{noun}}.", n=have[second])
        # With no event in between, "12 more than" must not be followed by "how many more".
        told_difference = relation in ("more", "fewer") and self.steps_left() == 1
        while self.steps_left() > 1:
            giver, taker = rng.sample(self.names, 2)
            gift = min(have[giver] - 3, limit - have[taker])
            if self.steps_left() > 2 and gift >= 5 and rng.random() < 0.5:
                n = self.number(2, gift)
                self.tell(f"{giver} gives {taker} {{n}} {{noun}}.", n=n)
                have[giver] = self.step(have[giver], "-", n)
                have[taker] = self.step(have[taker], "+", n)
            else:
                have[giver] = self.event(have[giver], self.steps_left() - 1, limit, name=giver)
        more, less = sorted(self.names, key=have.__getitem__, reverse=True)
        if have[more] > have[less] and not told_difference and rng.random() < 0.5:
            self.tell(f"How many more {{noun}} does {more} have than {less}?")
            return self.step(have[more], "-", have[less])
        self.tell(f"How many {{noun}} do {first} and {second} have together?")
        return self.step(have[first], "+", have[second])


def generate_problem(rng: random.Random) -> Problem:
    """Write one problem, on either side of the split: 2 to 5 steps, all numbers from 1 to 999."""
    story = _Story(rng, num_steps=rng.choices((2, 3, 4, 5), (67, 25, 6, 2))[0])
    in_pair = story.is_about_a_person and story.num_steps < 5 and rng.random() < 0.3
    answer = story.about_two() if in_pair else story.about_one()
    return Problem(" ".join(story.sentences), f"{';'.join(story.steps)} ={answer}", answer)


def is_held_out(question: str) -> bool:
    """Whether the question is on the evaluation side: a property of its text, on every machine."""
    return zlib.crc32(question.encode()) % HELD_OUT_ONE_IN == 0


def training_problems(seed: int) -> Iterator[Problem]:
    """Problems of the training side, forever. Equal integer seeds give equal streams."""
    rng = random.Random(seed)
    while True:
        problem = generate_problem(rng)
        if not is_held_out(problem.question):
            yield problem


def held_out_problems(count: int, seed: int = 0) -> list[Problem]:
    """The first `count` held-out problems of a seed, all different. ValueError if `count` < 0."""
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    rng = random.Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = generate_problem(rng)
        if is_held_out(problem.question):
            found.setdefault(problem.question, problem)
    return list(found.values())


def parse_answer(text: str) -> int | None:
    """The integer after the last ` =` of a generated solution, or None if there is none."""
    answers = re.findall(r" =(-?[0-9]+)", text)
    return int(answers[-1]) if answers else None


def check_solution(problem: Problem, text: str) -> bool:
    """Whether a generated solution ends in exactly the right answer; its steps are not judged."""
    return parse_answer(text) == problem.answer
