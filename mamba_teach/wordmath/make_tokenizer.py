"""Make the tokenizer: byte-level BPE for a small world, in which every digit is a token.

Three choices matter, and all are made in the pre-tokenizer, the step that cuts text into pieces
which merges may not cross. A digit is always a piece of its own, so that arithmetic sees ten
symbols and never a `48` that looks nothing like `4` and `8`. Every sign (`+ - * / = ;`, and the
space before a number) is a piece too, so the spelling of a number does not depend on what stands
before it. A word takes its leading space with it and becomes one token. Underneath are all 256
bytes: any text can be encoded, and decodes back exactly.

Run `python -m mamba_teach.wordmath.make_tokenizer` to write `assets/tokenizer.json` again.
"""

from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mamba_teach.wordmath.problems import training_problems
from mamba_teach.wordmath.prompts import END_OF_TEXT, format_problem

TOKENIZER_PATH = Path(__file__).parent / "assets" / "tokenizer.json"
# The possessive, a word with its space, or any other character alone: a digit, a sign, a space...
PIECES = r"'s| ?\p{L}+|[^\p{L}]"


def build_tokenizer(num_problems: int = 20_000, vocab_size: int = 768, seed: int = 1) -> Tokenizer:
    """Train the tokenizer on `num_problems` generated problems of the training side.

    `vocab_size` counts the special token, the 256 bytes and the merges; ValueError below 257.
    `<|end|>` has id 0, is recognised in any text, and is put in front of every text unless it is
    encoded with `add_special_tokens=False`.
    """
    smallest = 1 + len(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    problems = islice(training_problems(seed), num_problems)
    texts = (format_problem(problem, with_solution=True) for problem in problems)
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A $B",
        special_tokens=[(END_OF_TEXT, 0)],
    )
    return tokenizer


def main() -> None:
    """Write the tokenizer to `TOKENIZER_PATH`."""
    tokenizer = build_tokenizer()
    TOKENIZER_PATH.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(TOKENIZER_PATH))
    print(f"wrote {TOKENIZER_PATH} ({tokenizer.get_vocab_size()} tokens)")


if __name__ == "__main__":
    main()
