"""Which proposer an engine gets."""

from __future__ import annotations

from typing import Any

from mamba_teach.config import EngineConfig
from mamba_teach.spec_decode.mtp_proposer import MTPProposer
from mamba_teach.spec_decode.ngram_proposer import NgramProposer
from mamba_teach.spec_decode.proposer import Proposer


def uses_mtp_head(model: Any, config: EngineConfig) -> bool:
    """Whether the engine's drafts come from the model's own MTP head.

    Raises:
        ValueError: it is asked for, and the model has none.
    """
    if config.num_speculative_tokens == 0:
        return False
    has_head = bool(model.config.mtp_pattern)
    if config.speculative_method == "mtp" and not has_head:
        raise ValueError(
            "speculative_method='mtp': the model has no MTP head (its mtp_pattern is empty); "
            "'ngram' needs none"
        )
    return has_head and config.speculative_method != "ngram"


def make_proposer(model: Any, config: EngineConfig) -> Proposer | None:
    """The proposer of a config: None without speculation.

    A model that can ``propose`` by itself, as the ghost does, is asked before n-grams are.
    """
    if config.num_speculative_tokens == 0:
        return None
    if uses_mtp_head(model, config):
        return MTPProposer(model)
    if config.speculative_method is None and hasattr(model, "propose"):
        proposer: Proposer = model
        return proposer
    return NgramProposer()
