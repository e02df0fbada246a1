"""A request: what somebody asked for, and how far the engine is with it.

The engine's whole knowledge of a request's progress is three numbers: how many tokens are *known*
(prompt and sampled so far), how many are *computed* (folded into its states and keys), and how many
were in the prompt. Whether a step is a prefill or a decode follows from them, and from nothing else.
Drafts are guesses at tokens to come, and count as none of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class RequestRefused(ValueError):
    """A request that cannot be served; says which numbers stand in its way."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Attributes:
        max_tokens: tokens to generate at most.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_p: sample from the smallest set of tokens whose probabilities reach this sum.
        seed: of this request's own random numbers; None derives one from the request's number.
        ignore_eos: go on past the end-of-sequence token.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestRefused(f"max_tokens={self.max_tokens}: must be at least 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise RequestRefused(f"temperature={self.temperature}: must be 0 or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestRefused(f"top_p={self.top_p}: must be in (0, 1]")


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Request:
    """One request inside the engine. Mutated by the scheduler only.

    Attributes:
        arrival: number of the request, counting from 0; the engine's order of precedence.
        seed: of its random numbers.
        max_computed_tokens: tokens it may ever have computed; the last one is sampled only.
        cache_salt: requests with different salts never share a block.
        block_hashes: chained hashes of the full blocks of known tokens, filled by the cache.
        draft_token_ids: guesses to be checked in the next step.
        num_computed_tokens: tokens in the states and keys; 0 again after a preemption.
        num_hit_tokens: tokens it started behind when it was last admitted.
        num_cached_tokens: prompt tokens that a prefix hit spared, at the first admission.
        num_prefills: times the request was admitted; more than 1 after preemptions.
        num_drafted_tokens, num_accepted_drafts: guesses that were checked, and that were right.
        finish_reason: "stop" (end token), "length" (max_tokens or max_model_len) or "abort".
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0
    seed: int = 0
    max_computed_tokens: int = 2**31 - 1
    cache_salt: str | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_hit_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefills: int = 0
    num_preemptions: int = 0
    num_drafted_tokens: int = 0
    num_accepted_drafts: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt's and those sampled so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known token ids ``start .. stop - 1``."""
        prompt = self.num_prompt_tokens
        return [
            *self.prompt_token_ids[start:stop],
            *self.output_token_ids[max(start - prompt, 0) : max(stop - prompt, 0)],
        ]

    @property
    def is_decode(self) -> bool:
        """Whether all that is left to compute is the last sampled token.

        A one-token tail of a prompt is not a decode, however short: no token has been sampled yet.
        """
        return bool(self.output_token_ids) and self.num_computed_tokens == self.num_tokens - 1


@dataclass(frozen=True)
class RequestOutput:
    """What the caller gets, after every step and at the end.

    Attributes:
        finish_reason: None while the request runs.
        num_cached_tokens: prompt tokens that a prefix hit spared.
        num_preemptions: times it lost its memory and was computed again.
        num_drafted_tokens, num_accepted_drafts: guesses that were checked, and that were right.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    num_cached_tokens: int
    num_preemptions: int
    num_drafted_tokens: int = 0
    num_accepted_drafts: int = 0
