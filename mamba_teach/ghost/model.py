"""The ghost model itself: sizes, what it says next, what it guesses, and its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mamba_kernels.launch import launch
from mamba_teach.config import ModelConfig
from mamba_teach.ghost.hashes import extend_hash
from mamba_teach.ghost.kernel import GhostKernel
from mamba_teach.ghost.layers import materialize_states, run_attention, run_mamba
from mamba_teach.ghost.memory import GhostMemory
from mamba_teach.model.metadata import (
    AttentionCache,
    AttentionMetadata,
    LayerCache,
    LayerMetadata,
    MambaCache,
    MambaMetadata,
)
from mamba_teach.scheduler import ScheduledRow
from mamba_teach.spec_decode.proposer import DraftContext, DraftRow


class GhostModel:
    """A model whose states say what they are.

    Attributes:
        config: sizes, chosen so that a page of 4 tokens or more holds a state.
        supports_checkpoints: False makes the engine fall back to mode "align".
        draft_accuracy: how often each of its drafts is right.
    """

    name = "by the ghost itself"
    tokenizer = None
    device = torch.device("cpu")

    def __init__(
        self,
        layers: str = "MM*M",
        *,
        vocab_size: int = 97,
        supports_checkpoints: bool = True,
        draft_accuracy: float = 0.7,
    ) -> None:
        self.config = ModelConfig(
            vocab_size=vocab_size, hidden_size=1, pattern=layers, mamba_num_heads=1,
            mamba_head_dim=1, ssm_state_size=2, num_attention_heads=1, num_key_value_heads=1,
            head_dim=8,
        )  # fmt: skip
        self.supports_checkpoints = supports_checkpoints
        self.draft_accuracy = draft_accuracy
        self._kernel = GhostKernel(self._run)
        self._memory = GhostMemory()

    def place(self, device: torch.device, dtype: torch.dtype) -> GhostModel:
        """The ghost lives on the CPU, in integers."""
        return self

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What it says after ``prompt``: the closed form, without any engine."""
        value = 0
        for token in prompt:
            value = extend_hash(value, token)
        said = []
        for _ in range(num_tokens):
            said.append(self._next_token(value))
            value = extend_hash(value, said[-1])
        return said

    def propose(self, rows: Sequence[DraftRow], context: DraftContext) -> list[list[int]]:
        """Drafts that are right with ``draft_accuracy``; the same ones for the same text."""
        drafts = []
        for row in rows:
            guesses: list[int] = []
            if row.max_drafts > 0:
                value = self._memory.hashes_of(row.request)[-1]
                for token in row.new_tokens:
                    value = extend_hash(value, token)
                for _ in range(row.max_drafts):
                    guess = self._next_token(value)
                    if value * 40_503 // 257 % 1000 >= 1000 * self.draft_accuracy:
                        guess = (guess + 1) % self.config.vocab_size
                    guesses.append(guess)
                    value = extend_hash(value, guess)
            drafts.append(guesses)
        return drafts

    @property
    def rows(self) -> Sequence[ScheduledRow]:
        """Of the step that runs, or ran last."""
        return self._memory.rows

    def watch_step(self, rows: Sequence[ScheduledRow]) -> None:
        """Learn who is in the batch, and so what every state must be."""
        self._memory.rows = rows
        for row in rows:
            self._memory.hashes_of(row.request)

    def __call__(
        self,
        input_ids: torch.Tensor,
        metadata: Sequence[LayerMetadata],
        caches: Sequence[LayerCache],
    ) -> torch.Tensor:
        """Hashes after every token, ``(T, layers that keep something)`` int64; 0 for padding."""
        kept = sum(of_layer is not None for of_layer in metadata)
        hashes = torch.empty(len(input_ids), kept, dtype=torch.int64)
        # Through the door of the kernels, so that a graph can record it like one of them.
        launch(self._kernel, (1,), hashes, input_ids, list(metadata), list(caches))
        return hashes

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """One-hot of the next token; layers that disagree spoil it."""
        token = self._next_token(hidden.sum(-1) // hidden.shape[-1])
        return (torch.arange(self.config.vocab_size) == token[:, None]).float()

    def _next_token(self, value: Any) -> Any:
        """The token after a prefix of this hash: of an int, or of a tensor of ints."""
        return value * 2_654_435_761 // 65_536 % self.config.vocab_size

    def _run(
        self,
        hashes: torch.Tensor,
        input_ids: torch.Tensor,
        metadata: Sequence[LayerMetadata],
        caches: Sequence[LayerCache],
    ) -> None:
        tokens = input_ids.tolist()
        column = 0
        for layer, (of_layer, cache) in enumerate(zip(metadata, caches, strict=True)):
            if isinstance(of_layer, MambaMetadata):
                assert isinstance(cache, MambaCache)
                seen = run_mamba(self._memory, layer, tokens, of_layer, cache)
            elif isinstance(of_layer, AttentionMetadata):
                assert isinstance(cache, AttentionCache)
                seen = run_attention(self._memory, layer, tokens, of_layer, cache)
            else:
                continue
            hashes[:, column] = torch.tensor(seen + [0] * (len(tokens) - len(seen)))
            column += 1

    def materialize_states(self, *args: Any, **kwargs: Any) -> None:
        """As :func:`mamba_kernels.materialize_states`, for hashes."""
        materialize_states(self._memory, *args, **kwargs)
