"""What a checkpoint's ``config.json`` says, in three dialects, as one :class:`ModelConfig`.

The same Mamba2 layer goes by three sets of names. transformers' Nemotron-H says ``ssm_state_size``,
transformers' Mamba2 says ``state_size``, and the original state-spaces code says ``d_state``, one
level down in ``ssm_cfg``. A reader that looks for one set, finds none of it and falls back to its
defaults builds a model of several billion parameters from a small file. So no size here that
decides the shape of a tensor has a default unless all of the dialect's files may leave it out: what
is missing is listed.

What would change the numbers and is not implemented (another activation, a sliding window, a gate
behind the norm) is refused by name. Settings of training and initialisation are skipped. The
run-time clamp on dt is ``time_step_limit`` and never ``time_step_min`` or ``time_step_max``: those
two only shape the random dt_bias that training starts from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mamba_teach.config import ModelConfig
from mamba_teach.model.config_reader import LAYER_NAMES, ConfigReader

# What each dialect is recognised by, where model_type does not say it.
DIALECTS = {
    "NemotronH (model_type 'nemotron_h')": (
        "hidden_size", "layers_block_type", "mamba_num_heads", "ssm_state_size",
    ),
    "Mamba2 (model_type 'mamba2')": (
        "hidden_size", "num_hidden_layers", "num_heads", "state_size",
    ),
    "state-spaces": ("d_model", "n_layer", "ssm_cfg"),
}  # fmt: skip


def config_from_json(raw: Mapping[str, Any]) -> ModelConfig:
    """Sizes of the model that a parsed ``config.json`` describes.

    Raises:
        ValueError: names are missing (all of them are listed), a value has the wrong type or
            contradicts another, or the file asks for something that is not implemented.
    """
    model_type = raw.get("model_type")
    if "d_model" in raw or "n_layer" in raw:  # nobody else uses these, whatever model_type says
        return _from_state_spaces(raw)
    if model_type == "nemotron_h":
        return _from_nemotron_h(raw)
    if model_type == "mamba2":
        return _from_mamba2(raw)
    if model_type is None and "mamba_num_heads" in raw:
        return _from_nemotron_h(raw)
    if model_type is None and "state_size" in raw and "num_heads" in raw:
        return _from_mamba2(raw)
    lacks = "; ".join(
        f"for {dialect} it lacks {', '.join(n for n in names if n not in raw) or 'only the type'}"
        for dialect, names in DIALECTS.items()
    )
    raise ValueError(f"model_type={model_type!r} is no dialect this package reads: {lacks}")


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` from which transformers builds the same model.

    A stack of Mamba2 layers whose inner width is a multiple of the hidden width becomes a
    ``Mamba2ForCausalLM``; everything else is a ``NemotronHForCausalLM``.
    """
    eos = list(config.eos_token_ids)
    low, high = map(float, config.time_step_limit)
    # JSON has no infinity; this is how transformers writes it.
    limit = [low, high if math.isfinite(high) else {"__float__": "Infinity"}]
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "n_groups": config.n_groups,
        "conv_kernel": config.conv_kernel,
        "chunk_size": config.chunk_size,
        "time_step_limit": limit,
        "use_conv_bias": config.use_conv_bias,
        "use_bias": config.use_bias,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "residual_in_fp32": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos if len(eos) > 1 else eos[0] if eos else None,
        "pad_token_id": eos[0] if eos else None,
    }
    kinds = set(config.pattern + config.mtp_pattern)
    if kinds == {"M"} and config.d_inner % config.hidden_size == 0:
        return common | {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "num_hidden_layers": len(config.pattern),
            "expand": config.d_inner // config.hidden_size,
            "num_heads": config.mamba_num_heads,
            "head_dim": config.mamba_head_dim,
            "state_size": config.ssm_state_size,
        }
    raw = common | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "layers_block_type": _block_types(config.pattern),
        "mamba_num_heads": config.mamba_num_heads,
        "mamba_head_dim": config.mamba_head_dim,
        "ssm_state_size": config.ssm_state_size,
        # A fault of transformers 5.24: NemotronHMamba2Mixer clamps dt to (time_step_min, inf), an
        # initialisation setting, instead of time_step_limit. Equal lower ends make it compute what
        # the model means; a finite upper end it cannot be told.
        "time_step_min": low,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "mlp_bias": config.mlp_bias,
        "num_nextn_predict_layers": 1 if config.mtp_pattern else 0,
    }
    if config.mtp_pattern:
        raw["mtp_layers_block_type"] = _block_types(config.mtp_pattern)
    return raw


# The three dialects ---------------------------------------------------------------------------


def _from_nemotron_h(raw: Mapping[str, Any]) -> ModelConfig:
    read = ConfigReader(raw, "a NemotronH config")
    read.allow("mamba_hidden_act", "silu", "swish")
    read.allow("mlp_hidden_act", "relu2")
    read.allow("attention_bias", False)
    read.allow("sliding_window", None)
    pattern = read.pattern("layers_block_type", "layer_types", "hybrid_override_pattern")
    read.allow("num_nextn_predict_layers", 0, 1)
    drafters = read.integer("num_nextn_predict_layers", default=0, least=0)
    mtp_pattern = ""
    if drafters:  # transformers writes mtp_layers_block_type even where there is no drafter
        mtp_pattern = read.pattern("mtp_layers_block_type", "mtp_hybrid_override_pattern")

    kinds = pattern + mtp_pattern
    # A size of layers that the model does not have may be absent.
    mamba, attention, mlp = (None if kind in kinds else 1 for kind in "M*-")
    heads = read.integer("num_attention_heads", default=attention)
    return read.config(
        pattern=pattern,
        mtp_pattern=mtp_pattern,
        hidden_size=read.integer("hidden_size"),
        vocab_size=read.integer("vocab_size"),
        mamba_num_heads=read.integer("mamba_num_heads", default=mamba),
        mamba_head_dim=read.integer("mamba_head_dim", default=mamba),
        ssm_state_size=read.integer("ssm_state_size", default=mamba),
        n_groups=read.integer("mamba_n_groups", "n_groups", default=mamba),
        conv_kernel=read.integer("mamba_d_conv", "conv_kernel", default=4),
        chunk_size=read.integer("mamba_chunk_size", "chunk_size", default=128),
        time_step_limit=read.limit("mamba_dt_limit", "time_step_limit"),
        use_conv_bias=read.flag("mamba_conv_bias", "use_conv_bias", default=True),
        num_attention_heads=heads,
        num_key_value_heads=read.integer("num_key_value_heads", default=heads),
        head_dim=read.integer("head_dim", "attention_head_dim", default=attention),
        intermediate_size=read.integer("intermediate_size", default=mlp),
        mlp_bias=read.flag("mlp_bias", default=False),
        **read.shared_names(),
    )


def _from_mamba2(raw: Mapping[str, Any]) -> ModelConfig:
    read = ConfigReader(raw, "a Mamba2 config")
    read.allow("hidden_act", "silu", "swish")
    read.allow("rms_norm", True)
    read.allow("norm_before_gate", False)
    hidden_size = read.integer("hidden_size")
    heads, head_dim = read.integer("num_heads"), read.integer("head_dim")
    config = read.config(
        pattern="M" * read.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        vocab_size=read.integer("vocab_size"),
        mamba_num_heads=heads,
        mamba_head_dim=head_dim,
        ssm_state_size=read.integer("state_size"),
        n_groups=read.integer("n_groups"),
        conv_kernel=read.integer("conv_kernel", default=4),
        chunk_size=read.integer("chunk_size", default=256),
        time_step_limit=read.limit("time_step_limit"),
        use_conv_bias=read.flag("use_conv_bias", default=True),
        **read.shared_names(),
    )
    expand = read.number("expand", default=heads * head_dim / hidden_size)
    if int(expand * hidden_size) != heads * head_dim:
        raise ValueError(
            f"num_heads={heads} times head_dim={head_dim} is {heads * head_dim}; expand={expand} "
            f"times hidden_size={hidden_size} is {int(expand * hidden_size)}: they must be equal"
        )
    return config


def _from_state_spaces(raw: Mapping[str, Any]) -> ModelConfig:
    read = ConfigReader(raw, "a state-spaces config")
    read.allow("d_intermediate", 0)
    read.allow("attn_layer_idx", [])
    read.allow("rms_norm", True)
    d_model, layers = read.integer("d_model"), read.integer("n_layer")
    vocab_size = read.integer("vocab_size")
    read.check()
    settings = raw.get("ssm_cfg") or {}
    if not isinstance(settings, Mapping):
        raise ValueError(f"ssm_cfg={settings!r}: must be an object")
    layer = settings.get("layer", "Mamba1")  # the original code's own default
    if layer != "Mamba2":
        raise ValueError(f"ssm_cfg.layer={layer!r}: supported is 'Mamba2'")
    # Settings inside ssm_cfg may all be absent: the original code defines what they are then.
    ssm = ConfigReader(settings, "a state-spaces config", prefix="ssm_cfg.")
    ssm.allow("rmsnorm", True)
    ssm.allow("norm_before_gate", False)
    ssm.allow("D_has_hdim", False)
    ssm.allow("d_ssm", None)
    head_dim = ssm.integer("headdim", default=64)
    d_inner = int(ssm.number("expand", default=2) * d_model)
    if d_inner % head_dim:
        raise ValueError(f"ssm_cfg.headdim={head_dim} must divide expand * d_model = {d_inner}")
    multiple = read.integer("pad_vocab_size_multiple", default=8)
    return read.config(
        pattern="M" * layers,
        hidden_size=d_model,
        vocab_size=-(-vocab_size // multiple) * multiple,
        mamba_num_heads=d_inner // head_dim,
        mamba_head_dim=head_dim,
        ssm_state_size=ssm.integer("d_state", default=128),
        n_groups=ssm.integer("ngroups", default=1),
        conv_kernel=ssm.integer("d_conv", default=4),
        chunk_size=ssm.integer("chunk_size", default=256),
        time_step_limit=ssm.limit("dt_limit"),
        use_conv_bias=ssm.flag("conv_bias", default=True),
        use_bias=ssm.flag("bias", default=False),
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=read.flag("tie_embeddings", default=True),
    )


def _block_types(pattern: str) -> list[str]:
    return [LAYER_NAMES[kind][0] for kind in pattern]
