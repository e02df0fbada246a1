"""The name of a block: a hash over everything its content depends on.

Keys, values and states at some position depend on *all* tokens before it, so a block's hash is
chained: over its parent's hash and its own tokens. A salt goes into the first link; requests with
different salts never share a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ROOT = b"mamba_teach"


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block of ``token_ids`` behind ``parent``, 16 bytes."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


def first_parent(salt: str | None) -> bytes:
    """What stands before the first block of a request."""
    return ROOT if salt is None else blake2b(ROOT + salt.encode(), digest_size=16).digest()
