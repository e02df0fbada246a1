"""Requests that can never be served are refused at the door, with the numbers; others go on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.models import random_prompt, toy_config, toy_model

from mamba_teach import Engine, EngineConfig, HybridModel, RequestRefused, SamplingParams
from mamba_teach.cache.block_pool import BlockPool
from mamba_teach.model.hybrid import initialize
from mamba_teach.runner.pages import allocate_pages


def engine_for(**settings: object) -> Engine:
    defaults: dict[str, object] = dict(max_model_len=64, max_num_seqs=4, device="cpu")
    return Engine(toy_model(), EngineConfig(**(defaults | settings)))


@pytest.mark.parametrize(
    ("prompt", "params", "numbers"),
    [
        ([], {}, ["empty"]),
        ([1] * 64, {}, ["64 tokens", "max_model_len=64", "63"]),
        ([1] * 1000, {}, ["1000 tokens"]),
        ([3, 64], {}, ["token 64", "position 1", "0 to 63"]),
        ([3, -1], {}, ["token -1", "position 1"]),
        ([3, 2.5], {}, ["2.5"]),
        ("a text", {}, ["no tokenizer"]),
    ],
)
def test_bad_prompts(prompt: object, params: dict, numbers: list[str]) -> None:
    engine = engine_for()
    other = engine.add_request([1, 2, 3], SamplingParams(max_tokens=3))
    with pytest.raises(RequestRefused) as refusal:
        engine.add_request(prompt, SamplingParams(**params))
    for number in numbers:
        assert number in str(refusal.value)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [o.request_id for o in outputs] == [other] * 3
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks - 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("max_tokens", -3), ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.5)],
)
def test_bad_sampling_params(field: str, value: float) -> None:
    with pytest.raises(RequestRefused, match=f"{field}={value}"):
        SamplingParams(**{field: value})


def test_generate_names_the_bad_prompt_and_starts_none() -> None:
    engine = engine_for()
    with pytest.raises(RequestRefused, match=r"prompt 1: .*empty"):
        engine.generate([[1, 2], [], [3]])
    assert not engine.has_unfinished_requests()
    assert engine.generate([[1, 2]], SamplingParams(max_tokens=2))[0].finish_reason == "length"


def test_an_interrupted_generate_leaves_a_clean_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2, 3], [4, 5]])
    assert not engine.has_unfinished_requests()
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks - 1
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids) == 4


def interrupted(schedule: object) -> list[int | None]:
    raise KeyboardInterrupt


def test_numpy_and_plain_integers_are_token_ids() -> None:
    engine = engine_for()
    plain, numpy_ids = engine.generate(
        [[7, 8, 9], list(np.array([7, 8, 9]))], SamplingParams(max_tokens=4)
    )
    assert plain.token_ids == numpy_ids.token_ids
    assert {type(token) for token in numpy_ids.prompt_token_ids} == {int}


def test_generate_does_not_swallow_the_outputs_of_others() -> None:
    engine = engine_for()
    engine.add_request([1, 2, 3])
    with pytest.raises(RuntimeError, match="1 unfinished requests"):
        engine.generate([[4]])


def engine_of_ten_blocks(num_blocks: int = 11) -> Engine:
    """Attention pages of 4 tokens; three Mamba layers that hold one page each."""
    config = toy_config("MM*M", mamba_num_heads=2, mamba_head_dim=8, ssm_state_size=8, n_groups=1)
    model = HybridModel(config)
    initialize(model)
    return Engine(
        model,
        EngineConfig(
            block_size=4, num_blocks=num_blocks, max_model_len=64, max_num_seqs=2, device="cpu",
            enable_prefix_caching=False,
        ),
    )


def test_a_request_that_can_never_fit_the_pool_is_refused_with_both_numbers() -> None:
    # Prompt 26 and 8 outputs: 33 computed tokens, 9 attention pages and 3 states, 12 in all.
    engine = engine_of_ten_blocks()
    assert [g.spec.block_size for g in engine.cache.groups if g.spec.kind == "attention"] == [4]
    with pytest.raises(RequestRefused, match="needs 12 blocks; the pool has 10"):
        engine.add_request(random_prompt(26, seed=0), SamplingParams(max_tokens=8))


@pytest.mark.parametrize("prompt_length", [1, 14, 26, 28])
def test_a_request_that_needs_exactly_the_pool_runs_to_its_end(prompt_length: int) -> None:
    # 7 attention pages of 4 tokens: 28 computed tokens, and the sampled one needs no place.
    engine = engine_of_ten_blocks()
    params = SamplingParams(max_tokens=29 - prompt_length)
    first = engine.add_request(random_prompt(prompt_length, seed=1), params)
    second = engine.add_request(random_prompt(prompt_length, seed=2), params)
    done = {}
    for _ in range(300):
        done |= {o.request_id: o for o in engine.step() if o.finish_reason}
    assert [len(done[r].token_ids) for r in (first, second)] == [params.max_tokens] * 2
    assert done[first].num_preemptions == 0
    assert done[second].num_preemptions <= 1, "sent back again and again"


def test_output_stops_at_the_longest_sequence() -> None:
    output = engine_for().generate([random_prompt(60, seed=0)], SamplingParams(max_tokens=64))[0]
    assert (len(output.token_ids), output.finish_reason) == (4, "length")


def test_end_token_stops_unless_ignored() -> None:
    prompt = random_prompt(12, seed=5)
    free = engine_for().generate([prompt], SamplingParams(max_tokens=12))[0].token_ids
    ending = free[5]
    stop_at = free.index(ending)
    model = HybridModel(toy_config(eos_token_ids=(ending,)))
    model.load_state_dict(toy_model().state_dict())
    engine = Engine(model, EngineConfig(max_model_len=64, device="cpu"))
    stopped, ignored = engine.generate(
        [prompt, prompt],
        [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, ignore_eos=True)],
    )
    assert (stopped.token_ids, stopped.finish_reason) == (free[: stop_at + 1], "stop")
    assert (ignored.token_ids, ignored.finish_reason) == (free, "length")


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_abort_in_every_phase_gives_everything_back(mode: str) -> None:
    engine = engine_for(
        num_blocks=13, max_num_seqs=2, max_num_batched_tokens=16, mamba_cache_mode=mode
    )
    full = engine.cache.pool.num_free
    prompt = random_prompt(40, seed=0)
    for _ in range(2):
        engine.reset_prefix_cache()  # the second round shall prefill as the first
        waiting = engine.add_request(prompt)  # waiting: no step yet
        engine.abort(waiting)
        assert engine.cache.pool.num_free == full
        prefilling = engine.add_request(prompt)  # mid-prefill: 16 of 40 tokens
        engine.step()
        assert engine.scheduler.running[0].num_computed_tokens == 16
        engine.abort(prefilling)
        assert engine.cache.pool.num_free == full
        decoding = engine.add_request(prompt)
        for _ in range(5):
            engine.step()
        assert engine.scheduler.running[0].is_decode
        engine.abort(decoding)
        assert engine.cache.pool.num_free == full
        preempted = engine.add_request(prompt)
        for _ in range(4):
            engine.step()
        engine.scheduler.preempt(engine.scheduler.running[0])
        assert engine.cache.pool.num_free == full
        engine.abort(preempted)
        engine.abort(preempted)  # twice is harmless, and so is a stranger
        engine.abort("nobody")
        assert engine.cache.pool.num_free == full
        assert not engine.has_unfinished_requests()
    # The pool is whole: it can be filled to the last block.
    blocks, _ = engine.cache.pool.allocate(full)
    assert len(set(blocks)) == full
    assert all(type(b) is int for b in blocks)


def test_double_free_raises() -> None:
    pool = BlockPool(4)
    blocks, _ = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match=f"block {blocks[0]} is freed but not in use"):
        pool.free(blocks[:1])
    with pytest.raises(RuntimeError, match="block 0"):
        pool.free([0])
    with pytest.raises(RuntimeError, match="4 blocks asked for, 3 free"):
        pool.allocate(4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 4}, "max_num_batched_tokens=3"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"num_blocks": 1}, "num_blocks=1"),
        ({"dtype": "float64"}, "float64"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_a_block_too_small_for_a_state_is_refused_with_the_size_that_would_do() -> None:
    with pytest.raises(ValueError, match=r"block_size=8: .* at least 16 tokens"):
        engine_for(block_size=8)


def test_a_cache_larger_than_memory_is_refused_with_its_size() -> None:
    groups = engine_for().cache.groups
    with pytest.raises(MemoryError, match=r"10000000000000000 blocks of .* GB; lower max_num_seqs"):
        allocate_pages(groups, 4, 10**16, torch.device("cpu"))


def test_a_text_where_a_list_belongs_is_refused() -> None:
    with pytest.raises(TypeError, match=r"one text, 'Q: hello'; pass a list"):
        engine_for().generate("Q: hello")
    with pytest.raises(TypeError, match=r"model='wordmath' is a name: Engine\(load_model"):
        Engine("wordmath")  # type: ignore[arg-type]


def test_a_pool_larger_than_memory_is_refused_before_anything_is_counted() -> None:
    with pytest.raises(MemoryError, match="10000000000000000 blocks"):
        Engine(toy_model("M*"), EngineConfig(num_blocks=10**16, device="cpu"))
