"""Proposers: who guesses, and what they are told.

A proposer is asked at the end of every step, about every row of it, and answers with 0 to ``k`` tokens
per row that might follow. It may be wrong about all of them; that costs time, never a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mamba_teach.model.metadata import LayerCache, LayerMetadata
from mamba_teach.request import Request


@dataclass(frozen=True)
class DraftRow:
    """What a proposer knows of a row when its step is done.

    Attributes:
        request: with the tokens known *before* the step.
        new_tokens: what the step sampled; empty if known tokens are left to compute.
        num_computed: tokens computed before the step.
        num_computed_after: and after it, drafts that were wrong not included.
        first_position: of the row's tokens in the packed step.
        max_drafts: how many guesses are welcome; 0 for a row that did not sample, or is about to end.
    """

    request: Request
    new_tokens: tuple[int, ...]
    num_computed: int
    num_computed_after: int
    first_position: int
    max_drafts: int

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens ``start .. stop - 1``, new ones included."""
        known = self.request.num_tokens
        return [
            *self.request.tokens(start, stop),
            *self.new_tokens[max(start - known, 0) : max(stop - known, 0)],
        ]

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens + len(self.new_tokens)


# (request ids, first positions, lengths) -> attention metadata by layer
AttentionPlanner = Callable[[list[str], list[int], list[int]], list[LayerMetadata]]


@dataclass(frozen=True)
class DraftContext:
    """What a proposer that is a neural network needs besides.

    Attributes:
        hidden: ``(T, hidden)`` final hidden states of the packed step.
        caches: one per layer, the MTP head's behind the trunk's; its keys and values are mutated.
        plan_attention: metadata for rows of the drafter's own.
    """

    hidden: torch.Tensor
    caches: Sequence[LayerCache]
    plan_attention: AttentionPlanner


class Proposer(Protocol):
    """Anything that guesses.

    Attributes:
        name: for people, in the engine's summary.
    """

    name: str

    def propose(self, rows: Sequence[DraftRow], context: DraftContext) -> list[list[int]]:
        """Up to ``row.max_drafts`` tokens per row, in the order of ``rows``."""
