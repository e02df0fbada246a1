"""The MTP proposer: the model's own head guesses ``k`` tokens, one after the other.

The head's entry ``i`` joins token ``i`` with the hidden state of position ``i - 1`` and predicts token
``i + 1``. After a step both are known for every token that was computed and for the one behind it, so
the head runs over these in one pass, writes its keys and values, and its last output is the first
draft. For the second draft it takes that draft as the next token and its own output as the hidden
state, and so on.

Keys of such guessed entries are guesses, too: the next step's pass writes them again, with the model's
hidden states, before their block can be published. What is published is therefore made of tokens and
hidden states *inside* the prefix that the block's hash covers, and a prefix hit need not give up a
block for the drafter. Right after a hit the hidden state before the first own token is unknown and
taken as zero: that can cost a draft, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mamba_teach.spec_decode.proposer import DraftContext, DraftRow

UNKNOWN_HIDDEN = -1  # index of the zero row


class MTPProposer:
    """Drafts with ``model.mtp``; greedy."""

    name = "by the model's own MTP head"

    def __init__(self, model: Any) -> None:
        self.model = model
        trunk, head = len(model.config.pattern), len(model.config.mtp_pattern)
        self._layers = range(trunk, trunk + head)

    def propose(self, rows: Sequence[DraftRow], context: DraftContext) -> list[list[int]]:
        """See :class:`~mamba_teach.spec_decode.proposer.Proposer`; also brings the head's keys up to
        date for rows that get no drafts."""
        starts, lengths, tokens, sources = [], [], [], []
        for row in rows:
            first, stop = self._entries(row)
            starts.append(first)
            lengths.append(stop - first)
            tokens += row.tokens(first, stop)
            offset = row.first_position - row.num_computed
            known = row.num_computed  # hidden states exist from here on
            sources += [
                offset + i - 1 if i - 1 >= known else UNKNOWN_HIDDEN for i in range(first, stop)
            ]
        drafts: list[list[int]] = [[] for _ in rows]
        live = [r for r, length in enumerate(lengths) if length > 0]
        if not live:
            return drafts
        zero = torch.zeros_like(context.hidden[:1])
        previous = torch.cat([context.hidden, zero])[torch.tensor(sources, device=zero.device)]
        hidden = self._run(rows, live, starts, lengths, tokens, previous, context)
        ends = torch.tensor(lengths).cumsum(0) - 1
        drafting = [r for r in live if rows[r].max_drafts > 0]
        hidden = hidden[ends[drafting].to(hidden.device)]
        while drafting:
            guesses = self.model.compute_logits(hidden).argmax(-1).tolist()
            for r, guess in zip(drafting, guesses, strict=True):
                drafts[r].append(guess)
            going_on = [i for i, r in enumerate(drafting) if len(drafts[r]) < rows[r].max_drafts]
            drafting = [drafting[i] for i in going_on]
            if drafting:
                ahead = {r: rows[r].num_computed_after + len(drafts[r]) for r in drafting}
                hidden = self._run(
                    rows,
                    drafting,
                    [ahead.get(r, 0) for r in range(len(rows))],
                    [1] * len(rows),
                    [drafts[r][-1] for r in drafting],
                    hidden[going_on],
                    context,
                )
        return drafts

    def _entries(self, row: DraftRow) -> tuple[int, int]:
        """The row's entries to compute, ``first .. stop - 1``.

        Entry ``i`` needs the hidden state before it, so every step makes those behind its own tokens;
        a row that has just been admitted also makes its very first, from zero.
        """
        fresh = row.num_computed == row.request.num_hit_tokens
        first = row.num_computed + (0 if fresh else 1)
        # The last token of all is never computed, and has no place for keys.
        return first, min(row.num_computed_after + 1, row.request.max_computed_tokens)

    def _run(
        self,
        rows: Sequence[DraftRow],
        live: list[int],
        starts: list[int],
        lengths: list[int],
        tokens: list[int],
        previous_hidden: torch.Tensor,
        context: DraftContext,
    ) -> torch.Tensor:
        """One pass of the head over packed entries: hidden states ``(T, hidden)``."""
        metadata = context.plan_attention(
            [rows[r].request.request_id for r in live],
            [starts[r] for r in live],
            [lengths[r] for r in live],
        )
        embedded = self.model.model.embeddings(torch.tensor(tokens, device=previous_hidden.device))
        return self.model.mtp(
            embedded,
            previous_hidden,
            [metadata[layer] for layer in self._layers],
            [context.caches[layer] for layer in self._layers],
        )
