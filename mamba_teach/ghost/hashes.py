"""The ghost's arithmetic: a prefix of tokens as one number."""

from __future__ import annotations

MODULUS = 2**31 - 1  # hashes fit an int32 entry of the pool
MULTIPLIER = 1_103_515_245
NO_TOKEN = -1  # in a window, before the first token


class GhostError(AssertionError):
    """A state, a window or a key is not what its reader needs."""


def extend_hash(value: int, token: int) -> int:
    """Rolling hash of a prefix and one more token."""
    return (value * MULTIPLIER + token + 1) % MODULUS
