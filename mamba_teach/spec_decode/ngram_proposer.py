"""The n-gram proposer: what followed the last time these words were said.

Looks for an earlier occurrence of the text's last few tokens in the text itself and proposes what
came behind it (Saxena 2023, "prompt lookup decoding"). Costs no model, and shines where a text repeats
its prompt. Where nothing is found there are no drafts, so steps with 0 to ``k`` of them mix in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from mamba_teach.spec_decode.proposer import DraftContext, DraftRow


class NgramProposer:
    """Looks up the longest of the last ``max_ngram`` to ``min_ngram`` tokens.

    >>> NgramProposer().continue_text([1, 2, 3, 4, 9, 2, 3], count=2)
    [4, 9]
    """

    name = "by n-grams: what followed the last time"

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram={min_ngram}, max_ngram={max_ngram}: need 1 <= min <= max")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def propose(self, rows: Sequence[DraftRow], context: DraftContext) -> list[list[int]]:
        """See :class:`~mamba_teach.spec_decode.proposer.Proposer`."""
        return [
            self.continue_text(row.tokens(0, row.num_tokens), row.max_drafts)
            if row.max_drafts > 0
            else []
            for row in rows
        ]

    def continue_text(self, tokens: list[int], count: int) -> list[int]:
        """Up to ``count`` tokens that followed the latest earlier occurrence of the text's end."""
        for size in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            pattern, last = tokens[-size:], tokens[-1]
            for end in range(len(tokens) - 1, size - 1, -1):
                if tokens[end - 1] == last and tokens[end - size : end] == pattern:
                    return tokens[end : end + count]
        return []
