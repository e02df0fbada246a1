"""The calculator's bytes and blocks, against vLLM's published rule and against our own engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mamba_teach
from mamba_teach import Engine, EngineConfig, GhostModel, ModelConfig, load_model
from mamba_teach.state_size import MODES, state_sizes

# Sizes of a large Nemotron-H: H=128, P=64, N=128, G=8, two KV heads of 128, chunks of 256.
NEMOTRON_H = dict(
    vocab_size=131072, hidden_size=8192, mamba_num_heads=128, mamba_head_dim=64,
    ssm_state_size=128, n_groups=8, chunk_size=256, num_attention_heads=64, num_key_value_heads=2,
    head_dim=128,
)  # fmt: skip

# k, bytes of a state, tokens needed, block in "none" and "align", block in "all". By hand:
# conv_dim = 128*64 + 2*8*128 = 10240 in bf16; 128*64*128 fp32; a token is 2*2*128 bf16 = 1024 bytes.
TABLE = [
    (0, 4_255_744, 4156, 4160, 4352),
    (1, 4_276_224, 4176, 4176, 4352),
    (3, 4_317_184, 4216, 4224, 4352),
    (5, 4_358_144, 4256, 4256, 4352),
]


@pytest.mark.parametrize(("k", "state", "needed", "block", "block_in_all"), TABLE)
def test_nemotron_h(k: int, state: int, needed: int, block: int, block_in_all: int) -> None:
    sizes = state_sizes(ModelConfig(pattern="M*M-", **NEMOTRON_H), num_speculative_tokens=k)
    assert sizes.conv_bytes == (3 + k) * 10240 * 2
    assert sizes.ssm_bytes == 4_194_304
    assert sizes.state_bytes == state
    assert sizes.token_bytes == 1024
    assert sizes.tokens_needed == needed
    assert sizes.block_size == sizes.vllm_block_size("none") == sizes.vllm_block_size("align")
    assert sizes.block_size == block
    assert sizes.vllm_block_size("all") == block_in_all
    assert sizes.page_bytes - sizes.padding_bytes == state
    assert 0 <= sizes.padding_bytes < 16 * 1024


def test_a_kernel_block_that_does_not_divide_the_chunk() -> None:
    # Chunks of 256 and kernel blocks of 96: multiples of 768.
    sizes = state_sizes(ModelConfig(pattern="M*", **NEMOTRON_H))
    assert sizes.vllm_block_size("all", kernel_block=96) == 4608
    assert sizes.vllm_block_size("align", kernel_block=96) == 4224
    with pytest.raises(ValueError, match="mode='some': must be one of none, align, all"):
        sizes.vllm_block_size("some")


def test_a_checkpoints_json() -> None:
    raw = {
        "model_type": "nemotron_h", "layers_block_type": ["mamba", "attention", "mlp"],
        "intermediate_size": 4, **NEMOTRON_H,
    }  # fmt: skip
    assert state_sizes(json.loads(json.dumps(raw)), num_speculative_tokens=3).block_size == 4224


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "dtype"), [("wordmath", "float32"), ("wordmath", "bfloat16"), ("ghost", "float32")]
)
def test_the_engine_derives_the_same(name: str, dtype: str, mode: str) -> None:
    model = GhostModel() if name == "ghost" else load_model(name)
    config = EngineConfig(mamba_cache_mode=mode, dtype=dtype, device="cpu", num_blocks=200)
    groups = Engine(model, config).cache.groups
    by_kind = {group.spec.kind: group.spec for group in groups}
    sizes = state_sizes(model.config, dtype=dtype)
    assert by_kind["attention"].block_size == sizes.block_size
    assert by_kind["mamba"].content_bytes == sizes.state_bytes
    assert by_kind["mamba"].page_size_bytes == sizes.page_bytes


def test_models_of_one_kind() -> None:
    pure = state_sizes(ModelConfig(pattern="MM", **NEMOTRON_H))
    assert (pure.state_bytes, pure.token_bytes) == (4_255_744, 0)
    with pytest.raises(ValueError, match="without attention"):
        _ = pure.block_size
    dense = state_sizes(ModelConfig(pattern="**", **NEMOTRON_H))
    assert (dense.state_bytes, dense.token_bytes, dense.block_size) == (0, 1024, 16)


def test_it_loads_no_torch() -> None:
    code = "import sys, mamba_teach.state_size; print('torch' in sys.modules)"
    root = str(Path(mamba_teach.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
