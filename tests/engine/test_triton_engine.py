"""The whole engine on the Triton kernels (in the interpreter): same tokens, nothing compiled late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.models import NEAR_TIE, greedy_gap, random_prompt, toy_model

from mamba_kernels import tuning
from mamba_kernels.backend import override_backend
from mamba_kernels.checks import debug_checks
from mamba_kernels.chunk_scan_launch import override_form
from mamba_kernels.launch import collect_variants, count_launches
from mamba_teach import Engine, EngineConfig, SamplingParams
from mamba_teach.model.metadata import MambaCache, MambaDecode, MambaMetadata
from mamba_teach.runner.warmup import warm_up

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def slots_are_checked() -> Iterator[None]:
    """A kernel believes its slots; a wrong one in a test shall be an error, not a broken heap."""
    with debug_checks():
        yield


def engine_for(mode: str, **settings: object) -> Engine:
    defaults: dict[str, object] = dict(
        max_model_len=64, max_num_batched_tokens=24, max_num_seqs=3, device="cpu", poison=True,
        mamba_cache_mode=mode, block_size=16,
    )  # fmt: skip
    return Engine(toy_model("M*M-"), EngineConfig(**(defaults | settings)))


@pytest.mark.parametrize("mode", ["none", "all"])
def test_same_tokens_and_every_variant_was_warmed(mode: str) -> None:
    prompts = [random_prompt(n, seed=n) for n in (40, 1, 19)] + [random_prompt(40, seed=40)]
    with override_backend("triton"):
        with collect_variants() as warmed:
            engine = engine_for(mode)
        assert warmed
        with collect_variants() as used:
            outputs = engine.generate(prompts, SamplingParams(max_tokens=4))
    assert used <= warmed, f"compiled in the middle of a step: {used - warmed}"
    for prompt, output in zip(prompts, outputs):
        assert greedy_gap(engine.model, prompt, list(output.token_ids)) <= NEAR_TIE


def test_both_forms_of_the_scan_are_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy's scan has 4 programs a row; a GPU with 7 multiprocessors shall want two rows."""
    monkeypatch.setattr(tuning, "PROGRAMS_TO_FILL", (("any", 7),))
    with override_backend("triton"):
        with collect_variants() as warmed:
            engine = engine_for("all")
        for lengths, scans in (([20], "chunk_scan_kernel"), ([9, 9], "fused_scan_kernel")):
            for n in lengths:
                engine.add_request(random_prompt(n, seed=n), SamplingParams(max_tokens=1))
            with collect_variants() as used:
                engine.step()
            assert scans in {v.kernel_name for v in used}
            assert used <= warmed, f"compiled in the middle of a step: {used - warmed}"


def test_warm_up_touches_nothing() -> None:
    with override_backend("torch"):
        engine = engine_for("all")
    for cache in filter(None, engine.runner.caches):
        for tensor in cache.pools:
            tensor.fill_(torch.nan)
    before = [t.clone() for c in filter(None, engine.runner.caches) for t in c.pools]
    with override_backend("triton"), count_launches() as count:
        warm_up(engine.model, engine.cache.groups, engine.runner.caches, 64)
    after = [t for c in filter(None, engine.runner.caches) for t in c.pools]
    bits = [(a.view(torch.int32), b.clone().view(torch.int32)) for a, b in zip(before, after)]
    assert all(torch.equal(a, b) for a, b in bits)
    assert count.total > 0


@pytest.mark.parametrize("form, launches", [("fused", 3), ("chunks", 5)])
def test_launches_per_layer_are_those_of_the_table(form: str, launches: int) -> None:
    # kernels/README.md: 3 per Mamba layer for decode; 3 or 5 for prefill. The model has two of them.
    with override_backend("triton"), override_form(form):
        engine = engine_for("all", max_num_batched_tokens=64)
        engine.add_request(random_prompt(20, seed=1), SamplingParams(max_tokens=3))
        with count_launches() as prefill:
            engine.step()
        with count_launches() as decode:
            engine.step()
    assert prefill.total == 2 * launches
    assert decode.total == 2 * 3


def test_speculative_variants_are_warmed_too() -> None:
    k, model = 2, toy_model("M-")
    with override_backend("torch"):
        config = EngineConfig(num_blocks=9, enable_prefix_caching=False, device="cpu")
        engine = Engine(model, config)
    cache = engine.runner.caches[0]
    wide = MambaCache(cache.ssm.new_zeros(9, 3 + k, model.config.conv_dim), cache.ssm)
    slots = torch.arange(1, 1 + 2 * (1 + k), dtype=torch.int32).view(2, 1 + k)
    rows = MambaDecode(
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),  # 3 tokens, and 1
        conv_src_slots=slots[:, 0].clone(), conv_dst_slots=slots[:, 0].clone(),
        ssm_src_slots=slots, ssm_dst_slots=slots,
        num_accepted_tokens=torch.tensor([2, 1], dtype=torch.int32),
    )  # fmt: skip
    with override_backend("triton"), torch.inference_mode():
        with collect_variants() as warmed:
            warm_up(model, engine.cache.groups, [wide, None], 64, num_speculative_tokens=k)
        with collect_variants() as used:
            model(torch.tensor([1, 2, 3, 4]), [MambaMetadata(4, rows, None), None], [wide, None])
    assert used and used <= warmed
