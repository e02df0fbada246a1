"""``copy_states`` against plain indexing of a copy, triple by triple."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_reference import Pool

import mamba_kernels
from mamba_kernels import copy_states
from mamba_kernels.checks import debug_checks
from mamba_kernels.launch import count_launches

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interpreter)]
Triple = tuple[int, int, int]


class Layers:
    """Pools of a few layers; ``expect(triples)`` is what they must look like afterwards."""

    def __init__(
        self, layers: int = 2, slots: int = 8, window: tuple[int, int] = (5, 6),
        ssm: tuple[int, ...] = (2, 3, 4), conv_dtype: torch.dtype = torch.float32,
        page_gap: int = 5, seed: int = 0,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        self.pools = [
            (
                Pool(slots, window, math.nan, page_gap, conv_dtype),
                Pool(slots, ssm, math.nan, page_gap),
            )
            for _ in range(layers)
        ]
        for pool in (pool for pair in self.pools for pool in pair):
            pool.own(range(1, slots), g)
        self.pairs = [(conv.state, ssm.state) for conv, ssm in self.pools]

    def check(
        self, triples: list[Triple], backend: str, dtype: torch.dtype = torch.int32,
        conv_sources: list[int] | None = None,
    ) -> None:  # fmt: skip
        expected = [(conv.raw.clone(), ssm.raw.clone()) for conv, ssm in self.pools]
        window_len, channels = self.pairs[0][0].shape[1:]
        for conv, ssm in expected:
            conv_size, ssm_size = window_len * channels, self.pairs[0][1][0].numel()
            # All reads come first: no triple may see what another has written.
            moves = [
                (dst, conv[c, offset * channels : conv_size].clone(), ssm[src, :ssm_size].clone(),
                 c > 0, src > 0)
                for (src, dst, offset), c in zip(triples, conv_sources or [t[0] for t in triples])
                if dst > 0
            ]  # fmt: skip
            for dst, window, state, has_window, has_state in moves:
                if has_window:
                    conv[dst, : len(window)] = window
                if has_state:
                    ssm[dst, :ssm_size] = state
        columns = torch.tensor(triples, dtype=dtype).reshape(-1, 3).T.contiguous()
        windows = None if conv_sources is None else torch.tensor(conv_sources, dtype=dtype)
        copy_states(self.pairs, *columns, conv_src_slots=windows, backend=backend)
        for layer, (pools, wanted) in enumerate(zip(self.pools, expected)):
            for kind, pool, raw in zip(("conv", "ssm"), pools, wanted):
                bits = {4: torch.int32, 2: torch.int16}[raw.element_size()]
                assert torch.equal(pool.raw.view(bits), raw.view(bits)), f"layer {layer}, {kind}"


@st.composite
def triples(draw: st.DrawFn, slots: int = 8, window_len: int = 5) -> list[Triple]:
    """Distinct destinations; a source is never the destination of an earlier triple."""
    destinations = draw(st.lists(st.integers(-1, slots - 1), max_size=5,
                                 unique_by=lambda d: d if d > 0 else object()))  # fmt: skip
    result: list[Triple] = []
    for i, dst in enumerate(destinations):
        allowed = [s for s in range(-1, slots) if s <= 0 or s not in destinations[:i]]
        src = draw(st.sampled_from([*allowed, dst]))
        result.append((src, dst, draw(st.integers(0, window_len - 1))))
    return result


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(
    triples=triples(),
    slot_dtype=st.sampled_from([torch.int32, torch.int64]),
    conv_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    channels=st.sampled_from([6, 7, 16]),
    page_gap=st.sampled_from([0, 5, 8]),
)
def test_equals_plain_indexing(
    backend: str, triples: list[Triple], slot_dtype: torch.dtype, conv_dtype: torch.dtype,
    channels: int, page_gap: int,
) -> None:  # fmt: skip
    layers = Layers(window=(5, channels), conv_dtype=conv_dtype, page_gap=page_gap)
    layers.check(triples, backend, slot_dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shifting_in_place(backend: str) -> None:
    """The live block is its own boundary block: its window moves to the front, its state stays."""
    for offset in range(5):
        Layers().check([(3, 3, offset)], backend)
    layers = Layers()
    window = layers.pairs[0][0][3, :, 0].tolist()
    layers.check([(3, 3, 2)], backend)
    assert layers.pairs[0][0][3, :, 0].tolist() == [*window[2:], window[3], window[4]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_and_windows_from_different_slots(backend: str) -> None:
    """Tokens 14 .. 18 of a verify step, B = 8: the states are in slots 3 .. 6, one window in 3."""
    Layers().check([(4, 1, 1), (0, 2, 2)], backend, conv_sources=[3, 3])
    Layers().check([(5, 3, 2)], backend, conv_sources=[3])  # the live block: its window shifts
    Layers().check([(5, 2, 2), (6, 7, 1)], backend, conv_sources=[0, -1])  # states only


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_later_triple_may_overwrite_an_earlier_source(backend: str) -> None:
    """B = 4, tokens 4 .. 8 in one step: column 1 first has the state after 4, then that after 8."""
    Layers().check([(2, 1, 0), (6, 2, 4)], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_moves_nothing(backend: str) -> None:
    layers = Layers()
    layers.check([(0, 3, 1), (3, 0, 1), (-1, 4, 1), (4, -1, 1), (0, 0, 0)], backend)
    for pool in (pool for pair in layers.pools for pool in pair):
        pool.assert_untouched()


@pytest.mark.interpreter
def test_more_triples_than_one_look() -> None:
    """A program looks at 128 triples at once, and walks only those with something to do."""
    padding = [(0, 0, 0)] * 130
    Layers(layers=1).check([*padding, (2, 3, 1), *padding, (4, 5, 0)], "triton")


@pytest.mark.interpreter
def test_states_larger_than_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    from mamba_kernels.tuning_table import TABLE

    monkeypatch.setitem(TABLE, "copy_states_kernel", [("any", {}, {"BLOCK_WORDS": 4})])
    layers = Layers(window=(5, 16), ssm=(2, 3, 8), page_gap=8)
    layers.check([(2, 3, 1), (4, 4, 2), (5, 2, 0)], "triton")


@pytest.mark.interpreter
def test_one_launch_for_all_layers() -> None:
    layers = Layers(layers=5)
    slots = torch.tensor([1, 2], dtype=torch.int32)
    with count_launches() as count:
        copy_states(layers.pairs, slots, slots, slots * 0, backend="triton")
        copy_states(layers.pairs, slots[:0], slots[:0], slots[:0], backend="triton")
        copy_states([], slots, slots, slots, backend="triton")
    assert count.by_kernel == {"copy_states_kernel": 1}


IN_ORDER = """
import importlib, triton
from mamba_kernels import backend
from triton.backends.compiler import GPUTarget
for module in ("copy_states", "state_update_triton"):
    for case in importlib.import_module("mamba_kernels." + module).aot_cases()[:1]:
        for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
            code = triton.compile(case.source(), target=target, options=case.options()).asm["ttgir"]
            state = [line for line in code.splitlines()
                     if "tt.load" in line or "tt.store" in line or "convert_layout" in line]
            print(module, *state, sep="\\n")
"""


@pytest.mark.aot
def test_each_thread_writes_where_it_has_read() -> None:
    """What makes working in place safe: loads and stores of states have one layout, so a thread
    meets only words that it moves itself, in program order. Looked up in the compiler's own code.
    """
    pytest.importorskip("triton", reason="needs the compiler")
    environment = os.environ | {
        "MAMBA_KERNELS_TRITON": "compile", "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(mamba_kernels.__file__).parents[1]), *filter(None, sys.path)]),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", IN_ORDER], env=environment, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    for block in re.split(r"^(?=copy_states|state_update)", done.stdout, flags=re.M)[1:]:
        kernel, *lines = block.splitlines()
        if kernel == "copy_states":
            assert not [line for line in lines if "convert_layout" in line]
        # The states: 2-dimensional tiles, or the words of copy_states.
        wanted = r"tensor<\d+x\d+x!tt.ptr<\w+>, (#\w+)>" if "update" in kernel else (
            r"tensor<\d+x!tt.ptr<i64>, (#\w+)>")  # fmt: skip
        layouts = {kind: set(re.findall(wanted, "\n".join(x for x in lines if kind in x)))
                   for kind in ("tt.load", "tt.store")}  # fmt: skip
        assert len(layouts["tt.load"]) == 1 and layouts["tt.load"] == layouts["tt.store"], block


def test_wrong_arguments_are_named() -> None:
    slots = torch.tensor([1, 2], dtype=torch.int32)
    pairs = Layers().pairs
    odd = [pairs[0], (pairs[1][0], pairs[1][1][:, :1])]
    with pytest.raises(ValueError, match=r"pairs\[1\]: ssm_state has shape .* those of layer 0"):
        copy_states(odd, slots, slots, slots)
    with pytest.raises(ValueError, match=r"pairs: conv_state has strides .* contiguous"):
        copy_states([(pairs[0][0].mT, pairs[0][1])], slots, slots, slots)
    with pytest.raises(ValueError, match=r"window_offsets has shape \(1,\); expected \(2,\)"):
        copy_states(pairs, slots, slots, slots[:1])
    with pytest.raises(ValueError, match=r"dst_slots has shape \(1,\); expected \(2,\)"):
        copy_states(pairs, slots, slots[:1], slots)


@pytest.mark.parametrize(
    ("triples", "message"),
    [
        ([(1, 2, 0), (3, 2, 0)], "dst_slots holds 2 twice"),
        ([(1, 2, 0), (2, 3, 0)], "src_slots holds 2, which an earlier triple has written"),
        ([(1, 2, 5)], "window_offsets holds 5; allowed: 0 .. 4"),
        ([(1, 8, 0)], "dst_slots holds slot 8; allowed: 1 .. 7"),
        ([(-1, 2, 0)], "src_slots holds slot -1"),
    ],
)
def test_debug_mode_reads_the_contents(triples: list[Triple], message: str) -> None:
    columns = torch.tensor(triples).T.contiguous()
    with debug_checks(), pytest.raises(ValueError, match=message):
        copy_states(Layers().pairs, *columns)
