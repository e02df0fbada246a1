"""Columns: where in a block table row a Mamba state is, told from token counts alone.

``n`` tokens are computed before a step, ``seq_len`` after it, ``B`` is the block size. Column ``c``
covers tokens ``c * B .. (c + 1) * B - 1``; a state after ``n`` tokens lives in the column of its last
token. A step that checks drafts writes one state per token, to the column of its last token and to
the *scratch* columns behind it, in order. These functions take plain integers or integer tensors alike.
"""

from __future__ import annotations

from typing import Any

IntOrTensor = Any  # this module knows no torch


def last_computed_column(n: IntOrTensor, block_size: int) -> IntOrTensor:
    """Column of the state after ``n >= 1`` tokens: of token ``n - 1``.

    >>> [last_computed_column(n, 16) for n in (1, 15, 16, 17)]
    [0, 0, 0, 1]
    """
    return (n - 1) // block_size


def first_scheduled_column(n: IntOrTensor, block_size: int) -> IntOrTensor:
    """Column of the step's first token, number ``n``.

    >>> [first_scheduled_column(n, 16) for n in (0, 15, 16)]
    [0, 0, 1]
    """
    return n // block_size


def last_scheduled_column(seq_len: IntOrTensor, block_size: int) -> IntOrTensor:
    """Column of the step's last token, number ``seq_len - 1``.

    A step of tokens 13 .. 16 ends one column further than it began:

    >>> first_scheduled_column(13, 16), last_scheduled_column(17, 16)
    (0, 1)
    """
    return (seq_len - 1) // block_size


def boundaries(n: int, seq_len: int, block_size: int) -> range:
    """Multiples of ``block_size`` in ``(n, seq_len]``: the positions at which a block is complete.

    >>> list(boundaries(13, 17, 16)), list(boundaries(16, 20, 4)), list(boundaries(0, 3, 4))
    ([16], [20], [])
    """
    return range((n // block_size + 1) * block_size, seq_len + 1, block_size)
