"""From logits to tokens.

Greedy is ``argmax``. Sampling draws one number per token, and that number depends on the request's
seed and on how many tokens it has sampled, and on nothing else: not on its neighbours in the batch,
not on the order of arrivals, and not on whether it was preempted and computed again on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mamba_teach.request import Request, SamplingParams


def sample(
    logits: torch.Tensor, requests: Sequence[Request], lengths: Sequence[int]
) -> list[list[int]]:
    """Tokens for every row.

    Args:
        logits: ``(sum(lengths), vocab)`` fp32, packed.
        requests: the rows' requests.
        lengths: logits of each row, behind its last known token and each of its drafts.
    """
    tokens = logits.argmax(-1).tolist()
    chosen, start = [], 0
    for request, length in zip(requests, lengths, strict=True):
        if request.params.temperature > 0:
            for i in range(length):
                draw = uniform_draw(request.seed, len(request.output_token_ids) + i)
                tokens[start + i] = sample_one(logits[start + i], request.params, draw)
        chosen.append(tokens[start : start + length])
        start += length
    return chosen


def sample_one(logits: torch.Tensor, params: SamplingParams, draw: float) -> int:
    """Temperature and top-p sampling of ``logits (vocab,)`` with a number in [0, 1)."""
    probabilities = torch.softmax(logits.double() / params.temperature, -1)
    ordered, token = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.where(before < params.top_p, ordered, 0)  # the first token is always kept
    reached = kept.cumsum(-1)
    place = torch.searchsorted(reached, draw * reached[-1], right=True)
    return int(token[place.clamp(max=int((kept > 0).sum()) - 1)])


def uniform_draw(seed: int, index: int) -> float:
    """The ``index``-th random number of a request, in [0, 1)."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)
    return torch.rand((), generator=generator, dtype=torch.float64).item()
