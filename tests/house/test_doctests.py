"""Examples in docstrings are run."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = [
    "mamba_kernels.replay",
    "mamba_teach.cache.columns",
    "mamba_teach.cache.specs",
    "mamba_teach.spec_decode.ngram_proposer",
    "mamba_teach.spec_decode.rejection",
    "mamba_teach.state_size",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_say_what_they_claim(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.attempted > 0 and result.failed == 0
