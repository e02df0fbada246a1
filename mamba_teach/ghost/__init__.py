"""The ghost model: symbolic states instead of numbers, so that a wrong slot is an exact error.

A real model hides mistakes: a state that is slightly wrong gives slightly wrong logits, and mostly the
same token. The ghost's "SSM state" is a count of tokens and a rolling hash of *all* of them, its
"convolution window" is the last tokens themselves, its "keys" are tokens too. It runs the real
scheduler, cache, block tables and slot tensors, in the engine's own memory. Before it uses a state it
compares it with what the request must have had, and says exactly what it found:

    slot 7 (mamba 0) holds the state after 12 tokens of r0; r3 needs its own after 16

The next token is a function of the hash, so it depends on every token before it. Thousands of steps
take seconds: this is the model that the property tests run on.
"""

from mamba_teach.ghost.hashes import GhostError, extend_hash
from mamba_teach.ghost.kernel import GhostKernel
from mamba_teach.ghost.model import GhostModel

__all__ = ["GhostError", "GhostKernel", "GhostModel", "extend_hash"]
