"""sanitize.cfg hides addresses, seconds and device names from nbval, and no result."""

from __future__ import annotations

import re
from configparser import RawConfigParser
from pathlib import Path

import pytest

CONFIG = RawConfigParser()
CONFIG.read(Path(__file__).with_name("sanitize.cfg"), encoding="utf-8")


def sanitize(text: str) -> str:
    for section in CONFIG.sections():
        text = re.sub(CONFIG[section]["regex"], CONFIG[section]["replace"], text)
    return text


def test_three_patterns_and_no_more() -> None:
    assert CONFIG.sections() == ["addresses", "seconds", "devices"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<Pool object at 0x7f3a5c01d2e0>", "<Pool object at ADDRESS>"),
        ("took 1.25 s", "took SECONDS"),
        ("took 12ms, 3 µs, 40 seconds", "took SECONDS, SECONDS, SECONDS"),
        ("device=cpu  kernels=torch  graphs=recorder\nnext", "DEVICE\nnext"),
        ("device=cpu, 16 blocks", "device=DEVICE, 16 blocks"),
        ("measured on NVIDIA H200", "measured on DEVICE"),
        ("tensor([7], device='cuda:0')", "tensor([7], device='DEVICE')"),
    ],
)
def test_hidden(before: str, after: str) -> None:
    assert sanitize(before) == after


@pytest.mark.parametrize(
    "text",
    [
        "slot 7 holds the state after 12 tokens of request A; 10 were needed",
        "0 wrong reads, 3 slots, 16 states, 18.5 KiB, 4x fewer bytes",
        "hash 0xff",
        "EngineConfig(device='auto', block_size=16)",
    ],
)
def test_left_alone(text: str) -> None:
    assert sanitize(text) == text
