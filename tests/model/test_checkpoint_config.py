"""``config.json`` in three dialects, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_teach.config import ModelConfig
from mamba_teach.model.checkpoint_config import config_from_json, config_to_json

# One small pure model, three times: two layers of width 24, inner width 48, 6 heads of 8.
STATE_SPACES = dict(
    d_model=24, n_layer=2, vocab_size=50, pad_vocab_size_multiple=16, tie_embeddings=False,
    d_intermediate=0, attn_layer_idx=[], attn_cfg={}, rms_norm=True,
    ssm_cfg=dict(layer="Mamba2", d_state=16, headdim=8, ngroups=2, chunk_size=32),
)  # fmt: skip
MAMBA2 = dict(
    model_type="mamba2", hidden_size=24, num_hidden_layers=2, vocab_size=64, num_heads=6,
    head_dim=8, state_size=16, n_groups=2, expand=2, conv_kernel=4, chunk_size=32,
)  # fmt: skip
NEMOTRON_H = dict(
    model_type="nemotron_h", hidden_size=24, layers_block_type=["linear_attention"] * 2,
    vocab_size=64, mamba_num_heads=6, mamba_head_dim=8, ssm_state_size=16, n_groups=2,
    conv_kernel=4, chunk_size=32,
)  # fmt: skip
DIALECTS = {"state-spaces": STATE_SPACES, "mamba2": MAMBA2, "nemotron_h": NEMOTRON_H}

HYBRID = NEMOTRON_H | dict(
    layers_block_type=["linear_attention", "full_attention", "mlp"], num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, intermediate_size=40,
)  # fmt: skip

THE_MODEL = ModelConfig(
    vocab_size=64, hidden_size=24, pattern="MM", mamba_num_heads=6, mamba_head_dim=8,
    ssm_state_size=16, n_groups=2, chunk_size=32,
)  # fmt: skip


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in names}


@pytest.mark.parametrize("raw", DIALECTS.values(), ids=DIALECTS.keys())
def test_three_dialects_say_the_same(raw: dict[str, Any]) -> None:
    assert config_from_json(raw) == THE_MODEL
    assert config_from_json(without(raw, "model_type")) == THE_MODEL


def test_original_names_win_over_a_wrong_model_type() -> None:
    assert config_from_json(STATE_SPACES | dict(model_type="mamba2")) == THE_MODEL


def test_a_published_state_spaces_file() -> None:
    """config.json of state-spaces/mamba2-130m; sizes as in the model's published tensors."""
    raw = """{"d_model": 768, "d_intermediate": 0, "n_layer": 24, "vocab_size": 50277,
        "ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": true,
        "residual_in_fp32": true, "fused_add_norm": true, "pad_vocab_size_multiple": 16,
        "tie_embeddings": true}"""
    config = config_from_json(json.loads(raw))
    assert (config.vocab_size, config.tie_word_embeddings) == (50288, True)
    assert (config.pattern, config.mamba_num_heads, config.conv_dim) == ("M" * 24, 24, 1792)
    assert config.d_inner + config.conv_dim + config.mamba_num_heads == 3352  # rows of in_proj


def test_neither_dialect_is_an_error_that_lists_what_is_missing() -> None:
    with pytest.raises(ValueError) as caught:
        config_from_json({"vocab_size": 64, "hidden_dim": 24, "depth": 2})
    for name in ("d_model", "n_layer", "hidden_size", "mamba_num_heads", "num_heads"):
        assert name in str(caught.value)
    with pytest.raises(ValueError, match="'llama'"):
        config_from_json({"model_type": "llama", "hidden_size": 24})


# n_groups is here although transformers has a default for it, which is 8.
OPTIONAL = ("model_type", "expand", "conv_kernel", "chunk_size", "num_key_value_heads")
REQUIRED = [
    *[(STATE_SPACES, name) for name in ("d_model", "n_layer", "vocab_size")],
    *[(MAMBA2, name) for name in without(MAMBA2, *OPTIONAL)],
    *[(HYBRID, name) for name in without(HYBRID, *OPTIONAL)],
]


@pytest.mark.parametrize(("raw", "name"), REQUIRED)
def test_no_size_has_a_silent_default(raw: dict[str, Any], name: str) -> None:
    for broken in (without(raw, name), raw | {name: None}):
        with pytest.raises(ValueError, match=rf"without .*\b{name}\b"):
            config_from_json(broken)


def test_everything_missing_is_in_one_error() -> None:
    with pytest.raises(ValueError, match="num_heads, head_dim, num_hidden_layers, vocab_size"):
        config_from_json(dict(model_type="mamba2", hidden_size=24, state_size=16, n_groups=2))


LAYERS = [
    (dict(layers_block_type=["mamba", "attention", "mlp"]), "M*-"),
    (dict(layers_block_type=None, hybrid_override_pattern="M*-M"), "M*-M"),
    (dict(layers_block_type=None, layer_types=["full_attention", "linear_attention"]), "*M"),
    (dict(hybrid_override_pattern="----"), "M*-"),  # the explicit list counts, as in transformers
]


@pytest.mark.parametrize(("changes", "pattern"), LAYERS)
def test_layers(changes: dict[str, Any], pattern: str) -> None:
    assert config_from_json(HYBRID | changes).pattern == pattern


DRAFTERS = [
    (dict(mtp_layers_block_type=["full_attention", "moe"]), ""),  # transformers writes this always
    (dict(num_nextn_predict_layers=0, mtp_hybrid_override_pattern="*E"), ""),
    (dict(num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*-"), "*-"),
    (dict(num_nextn_predict_layers=1, mtp_layers_block_type=["attention", "mlp"]), "*-"),
]


@pytest.mark.parametrize(("changes", "pattern"), DRAFTERS)
def test_a_drafter_exists_only_if_layers_are_counted(changes: dict, pattern: str) -> None:
    assert config_from_json(HYBRID | changes).mtp_pattern == pattern


def test_older_names() -> None:
    older = dict(
        mamba_n_groups=3, mamba_d_conv=3, mamba_chunk_size=16, mamba_conv_bias=False,
        mamba_dt_limit=[0.01, 1.0], attention_head_dim=6,
    )  # fmt: skip
    config = config_from_json(without(HYBRID, "head_dim") | older)
    assert (config.n_groups, config.conv_kernel, config.chunk_size) == (3, 3, 16)
    assert (config.use_conv_bias, config.head_dim) == (False, 6)
    assert config.time_step_limit == (0.01, 1.0)


def test_key_value_heads_are_as_many_as_heads_if_nobody_says() -> None:
    assert config_from_json(HYBRID | dict(num_key_value_heads=None)).num_key_value_heads == 4


LIMITS = [
    ("[0.0, Infinity]", (0.0, math.inf)),
    ('[0.01, {"__float__": "Infinity"}]', (0.01, math.inf)),
    ("[0.01, 1]", (0.01, 1.0)),
    ("null", (0.0, math.inf)),
]


@pytest.mark.parametrize(("text", "limit"), LIMITS)
def test_limit_on_dt(text: str, limit: tuple[float, float]) -> None:
    for raw in (MAMBA2, NEMOTRON_H):
        changes = dict(time_step_limit=json.loads(text), time_step_min=0.001, time_step_max=0.1)
        assert config_from_json(raw | changes).time_step_limit == limit
    ssm = STATE_SPACES["ssm_cfg"] | dict(dt_limit=json.loads(text), dt_min=0.001, dt_max=0.1)
    assert config_from_json(STATE_SPACES | dict(ssm_cfg=ssm)).time_step_limit == limit


@pytest.mark.parametrize(
    ("ids", "expected"), [(2, (2,)), ([2, 11], (2, 11)), (None, ()), (0, (0,))]
)
def test_end_tokens(ids: object, expected: tuple[int, ...]) -> None:
    assert config_from_json(MAMBA2 | dict(eos_token_id=ids)).eos_token_ids == expected


def ssm(**changes: object) -> dict[str, Any]:
    return dict(ssm_cfg=STATE_SPACES["ssm_cfg"] | changes)


REFUSED = [
    (HYBRID, dict(layers_block_type=["mamba", "moe"]), "'E', a mixture of experts"),
    (HYBRID, dict(layers_block_type=None, hybrid_override_pattern="ME"), "'E'"),
    (HYBRID, dict(layers_block_type=["mamba", "gru"]), "layer 1 is 'gru'"),
    (HYBRID, dict(num_nextn_predict_layers=2), "num_nextn_predict_layers=2.*0 or 1"),
    (HYBRID, dict(num_nextn_predict_layers=1), "without mtp_layers_block_type"),
    (HYBRID, dict(mlp_hidden_act="gelu"), "mlp_hidden_act='gelu'.*'relu2'"),
    (HYBRID, dict(mamba_hidden_act="relu"), "mamba_hidden_act='relu'.*'silu'"),
    (HYBRID, dict(attention_bias=True), "attention_bias=True"),
    (HYBRID, dict(sliding_window=4096), "sliding_window=4096"),
    (HYBRID, dict(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    (HYBRID, dict(n_groups=4), "n_groups=4 must divide mamba_num_heads=6"),
    (HYBRID, dict(hidden_size="24"), "hidden_size='24'"),
    (HYBRID, dict(hidden_size=24.0), "hidden_size=24.0"),
    (HYBRID, dict(use_bias=1), "use_bias=1"),
    (HYBRID, dict(vocab_size=True), "vocab_size=True"),
    (HYBRID, dict(time_step_limit=[0.1]), "time_step_limit=.0.1."),
    (HYBRID, dict(time_step_limit=[1.0, 0.1]), "lower < upper"),
    (HYBRID, dict(eos_token_id=["</s>"]), "eos_token_id"),
    (MAMBA2, dict(hidden_act="gelu"), "hidden_act='gelu'"),
    (MAMBA2, dict(rms_norm=False), "rms_norm=False"),
    (MAMBA2, dict(head_dim=4), "num_heads=6 times head_dim=4 is 24; expand=2 .* is 48"),
    (MAMBA2, dict(head_dim=0), "head_dim=0: must be at least 1"),
    (STATE_SPACES, dict(attn_layer_idx=[1]), r"attn_layer_idx=\[1\]"),
    (STATE_SPACES, dict(d_intermediate=64), "d_intermediate=64"),
    (STATE_SPACES, dict(rms_norm=False), "rms_norm=False"),
    (STATE_SPACES, dict(pad_vocab_size_multiple=0), "pad_vocab_size_multiple=0"),
    (STATE_SPACES, dict(ssm_cfg={}), "ssm_cfg.layer='Mamba1'"),
    (STATE_SPACES, ssm(layer="Mamba1"), "ssm_cfg.layer='Mamba1'"),
    (STATE_SPACES, ssm(norm_before_gate=True), "ssm_cfg.norm_before_gate=True"),
    (STATE_SPACES, ssm(rmsnorm=False), "ssm_cfg.rmsnorm=False"),
    (STATE_SPACES, ssm(D_has_hdim=True), "ssm_cfg.D_has_hdim=True"),
    (STATE_SPACES, ssm(headdim=10), "ssm_cfg.headdim=10 must divide .* 48"),
]


@pytest.mark.parametrize(("raw", "changes", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_refused_by_name(raw: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    config_from_json(raw)
    with pytest.raises(ValueError, match=words):
        config_from_json(raw | changes)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    size = st.integers(1, 9)
    groups, kv_heads = draw(size), draw(size)
    return ModelConfig(
        vocab_size=draw(size),
        hidden_size=draw(size),
        pattern=draw(st.text("M*-", min_size=1, max_size=5)),
        mtp_pattern=draw(st.text("*-", max_size=2)),
        mamba_num_heads=groups * draw(size),
        mamba_head_dim=draw(size),
        ssm_state_size=draw(size),
        n_groups=groups,
        conv_kernel=draw(size),
        chunk_size=draw(size),
        time_step_limit=draw(st.sampled_from([(0.0, math.inf), (0.01, math.inf), (0.5, 1.0)])),
        use_conv_bias=draw(st.booleans()),
        use_bias=draw(st.booleans()),
        num_attention_heads=kv_heads * draw(size),
        num_key_value_heads=kv_heads,
        head_dim=draw(size),
        intermediate_size=draw(size),
        mlp_bias=draw(st.booleans()),
        layer_norm_epsilon=draw(st.sampled_from([1e-5, 1e-6])),
        tie_word_embeddings=draw(st.booleans()),
        bos_token_id=draw(st.none() | st.integers(0, 9)),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
    )


@given(configs())
def test_what_we_write_we_read(config: ModelConfig) -> None:
    raw = config_to_json(config)
    text = json.dumps(raw, allow_nan=False)  # JSON that every program reads
    again = config_from_json(json.loads(text))
    if raw["model_type"] == "mamba2":  # has no place for sizes of layers that are not there
        names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        config, again = (
            ModelConfig(**without(vars(c), *names, "mlp_bias")) for c in (config, again)
        )
    assert again == config
