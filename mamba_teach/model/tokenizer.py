"""The tokenizer of a checkpoint folder: ``tokenizer.json``, read by the tokenizers library.

A model computes on token ids; whoever wants text keeps the tokenizer beside it. Folders without one
are fine: prompts are then lists of ids.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer in ``folder``, or None if it holds none.

    Raises:
        ValueError: ``tokenizer.json`` is there and cannot be read.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
