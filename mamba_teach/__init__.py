"""mamba_teach: how recurrent state is served, built up one readable piece at a time.

The names below are the public API. They are imported on first use, so that ``import mamba_teach`` is
instant and the parts that need no torch can be used without it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mamba_teach.config import EngineConfig, ModelConfig
    from mamba_teach.engine import Engine
    from mamba_teach.events import reduce
    from mamba_teach.ghost import GhostModel
    from mamba_teach.model.checkpoint import load_model, save_model
    from mamba_teach.model.hybrid import HybridModel
    from mamba_teach.request import RequestOutput, RequestRefused, SamplingParams

_HOME = {
    "Engine": "mamba_teach.engine",
    "EngineConfig": "mamba_teach.config",
    "GhostModel": "mamba_teach.ghost",
    "HybridModel": "mamba_teach.model.hybrid",
    "ModelConfig": "mamba_teach.config",
    "RequestOutput": "mamba_teach.request",
    "RequestRefused": "mamba_teach.request",
    "SamplingParams": "mamba_teach.request",
    "load_model": "mamba_teach.model.checkpoint",
    "reduce": "mamba_teach.events",
    "save_model": "mamba_teach.model.checkpoint",
}

__all__ = [
    "Engine",
    "EngineConfig",
    "GhostModel",
    "HybridModel",
    "ModelConfig",
    "RequestOutput",
    "RequestRefused",
    "SamplingParams",
    "load_model",
    "reduce",
    "save_model",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "__version__":
        return version("mamba_teach")
    raise AttributeError(f"module 'mamba_teach' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
