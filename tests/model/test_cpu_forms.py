"""What the model does differently on a CPU: attention row by row, and another matrix library."""

from __future__ import annotations

import math

import pytest
import torch
from support.models import (
    assert_says_what_cold_says,
    assert_states_are_exact,
    random_prompt,
    toy_model,
)

from mamba_kernels import cpu_rows
from mamba_teach import Engine, EngineConfig, SamplingParams
from mamba_teach.model import attention, linear
from mamba_teach.model.attention import attend_by_row, attend_in_a_rectangle
from mamba_teach.model.metadata import AttentionCache, AttentionMetadata


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_by_row_equals_the_rectangle(kv_heads: int) -> None:
    """A decode row, a whole prompt, a later chunk, a chunk over three pages, and a row of padding."""
    g = torch.Generator().manual_seed(kv_heads)
    size, heads, d = 4, 6, 8
    lengths, seq_lens = [1, 4, 3, 5, 0], [9, 4, 7, 11, 0]
    tables = torch.tensor([[5, 2, 7], [1, 0, 0], [8, 3, 0], [4, 6, 9], [0, 0, 0]])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    slots = [
        int(tables[r, p // size]) * size + p % size
        for r, (q, n) in enumerate(zip(lengths, seq_lens))
        for p in range(n - q, n)
    ]
    metadata = AttentionMetadata(
        query_start_loc=starts, seq_lens=torch.tensor(seq_lens), block_table=tables,
        slot_mapping=torch.tensor([*slots, 0]), max_query_len=5, max_seq_len=11,
    )  # fmt: skip
    q = torch.randn(len(slots) + 1, heads, d, generator=g)  # a token behind the last row
    k, v = (torch.randn(len(slots) + 1, kv_heads, d, generator=g) for _ in range(2))
    pool = torch.full((2, 10, size, kv_heads, d), math.nan)
    for r, (n, length) in enumerate(zip(seq_lens, lengths)):
        for p in range(n - length):
            pool[:, tables[r, p // size], p % size] = torch.randn(2, kv_heads, d, generator=g)
    pools = [pool.clone(), pool.clone()]
    with torch.no_grad():
        mine, expected = (
            attend(q, k, v, metadata, AttentionCache(*pair))
            for attend, pair in zip((attend_by_row, attend_in_a_rectangle), pools)
        )
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    assert not mine[-1].any() and mine[:-1].isfinite().all()
    assert torch.equal(pools[0].nan_to_num(7.0), pools[1].nan_to_num(7.0))


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("k", [0, 3])
def test_an_engine_row_by_row_says_the_same(
    mode: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of an engine on the twins, and exact states, with hits, chunks and drafts."""
    model = toy_model()
    prompts = [random_prompt(n, seed=n) for n in (5, 17, 33)]
    prompts += [prompts[-1] + random_prompt(9, seed=1), prompts[-1] + random_prompt(4, seed=2)]
    for prompt in prompts:
        assert_says_what_cold_says(
            model, prompt, _served(model, prompt)
        )  # fills the yardstick's cache
    monkeypatch.setattr(cpu_rows, "WORTH_A_LOOP", 0)
    used = []
    monkeypatch.setattr(attention, "attend_by_row", lambda *a: used.append(1) or attend_by_row(*a))
    config = EngineConfig(
        mamba_cache_mode=mode, enable_prefix_caching=mode != "none", max_model_len=128,
        max_num_batched_tokens=24, num_speculative_tokens=k, device="cpu", max_num_seqs=3,
        speculative_method="ngram" if k else None,
    )  # fmt: skip
    engine = Engine(model, config)
    for prompt, output in zip(prompts, engine.generate(prompts, SamplingParams(max_tokens=20))):
        assert_says_what_cold_says(model, prompt, list(output.token_ids))
    assert used
    if k == 0:
        request_id = engine.add_request(prompts[3], SamplingParams(max_tokens=8))
        for _ in range(6):
            engine.step()
        request = engine.scheduler.running[0]
        computed = [*request.prompt_token_ids, *request.output_token_ids]
        assert_states_are_exact(engine, request_id, computed[: request.num_computed_tokens])


def _served(model: object, prompt: list[int]) -> list[int]:
    config = EngineConfig(enable_prefix_caching=False, max_model_len=128, device="cpu")
    return list(
        Engine(model, config).generate([prompt], SamplingParams(max_tokens=20))[0].token_ids
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_linear_is_linear(bias: bool, tokens: int) -> None:
    layer = linear.Linear(12, 5, bias=bias)
    assert list(layer.state_dict()) == list(torch.nn.Linear(12, 5, bias=bias).state_dict())
    x = torch.randn(tokens, 12, generator=torch.Generator().manual_seed(0))
    expected = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0.0)
    with torch.no_grad():
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(RuntimeError):
            layer(x.double())  # types are not mixed, as ever
        wide = layer.double()  # what oneDNN has no form for
        torch.testing.assert_close(wide(x.double()), expected)
    assert wide(x.double()).requires_grad


def test_linear_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = linear.Linear(12, 5), torch.ones(2, 12)
    with torch.no_grad():
        expected = layer(x)
        monkeypatch.setattr(linear, "HAS_ONEDNN", False)
        torch.testing.assert_close(layer(x), expected)
