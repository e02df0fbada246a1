"""Verification: which of the guessed tokens the model would have said itself.

A step computes the last sampled token and ``d`` drafts at once, so there are logits behind each of the
``1 + d``. The model chooses its own token behind each, exactly as it would without drafts. As long as
a draft *is* the token chosen in front of it, the text is the one that would have come anyway, and the
next choice counts too; the first choice that differs is still the model's own. So every step yields
the drafts that were right and one token more (the *bonus*).

For greedy decoding this is obvious. At a temperature it is rejection sampling (Leviathan et al. 2023,
Chen et al. 2023) for drafts that are proposed with certainty. There, a draft ``x`` is kept with its
probability ``p(x)``, and otherwise another token is drawn from ``p`` without ``x``. Drawing one token
from ``p`` and keeping the draft if it is that token does the same two things with the same
probabilities. And since the ``i``-th token of a request is drawn with the ``i``-th of its random
numbers, speculation changes not only nothing in the distribution, but nothing in the text (but where
two tokens are so equally likely that rounding decides between them).
"""

from __future__ import annotations

from collections.abc import Sequence


def verify(drafts: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """New tokens of a row: drafts that are right, and the token behind them.

    Args:
        drafts: ``d`` guesses.
        chosen: ``1 + d`` tokens, the model's own choice in place of each draft and behind the last.

    Returns:
        1 to ``1 + d`` tokens.

    >>> verify([7, 8, 9], [7, 8, 5, 4])  # the third draft is wrong, and 5 is the model's own
    [7, 8, 5]
    >>> verify([7, 8], [7, 8, 3])  # all right, and one more
    [7, 8, 3]
    >>> verify([], [6])
    [6]
    """
    kept = []
    for draft, token in zip(drafts, chosen, strict=False):
        kept.append(token)
        if draft != token:
            return kept
    return [*kept, chosen[len(drafts)]]
