"""Checkpoints: what loads, what is refused and how it is told, what comes back after saving."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model.stepper import Stepper, randomize
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from mamba_kernels import mamba_chunk_scan, selective_state_update
from mamba_teach.config import ModelConfig
from mamba_teach.model.checkpoint import SHIPPED, CheckpointError, load_model, save_model
from mamba_teach.model.checkpoint_config import config_from_json, config_to_json
from mamba_teach.model.hybrid import HybridModel

PURE = ModelConfig(
    vocab_size=48, hidden_size=24, pattern="MM", mamba_num_heads=2, mamba_head_dim=24,
    ssm_state_size=6, n_groups=2, chunk_size=8,
)  # fmt: skip
HYBRID = replace(
    PURE, pattern="M*-", mtp_pattern="*-", mamba_head_dim=10, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, intermediate_size=40,
)  # fmt: skip
IDS = [5, 3, 17, 40, 1, 0, 22, 9, 9, 30, 2, 11]


def built(config: ModelConfig, seed: int = 0) -> HybridModel:
    model = HybridModel(config)
    randomize(model, seed)
    return model


def logits(model: HybridModel) -> torch.Tensor:
    return Stepper(model).run(IDS, [5, 1, 6])


def saved(config: ModelConfig, folder: Path) -> Path:
    save_model(built(config), folder)
    return folder


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a saved folder, or drop them; `__` in a keyword stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for keyword, value in changes.items():
        name = keyword.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    return str(caught.value)


# Names and transforms ---------------------------------------------------------------------------


def write_by_name(folder: Path, prefix: str, embedding: str, raw: dict, tied: bool) -> None:
    """A checkpoint of PURE, its tensors named as somebody else names them."""
    tensors = {}
    for name, tensor in built(PURE).state_dict().items():
        if name.endswith("A_log"):
            tensor = torch.tensor([0.0, 1.0])
        if name == "lm_head.weight":
            if tied:
                continue
            tensor = torch.full_like(tensor, 3.0)
        if name.startswith("model."):
            name = prefix + name.removeprefix("model.").replace("embeddings", embedding)
        tensors[name] = tensor
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_names_in_circulation(tmp_path: Path, tied: bool) -> None:
    original = dict(
        d_model=24, n_layer=2, vocab_size=45, pad_vocab_size_multiple=16, tie_embeddings=tied,
        ssm_cfg=dict(layer="Mamba2", d_state=6, headdim=24, ngroups=2, chunk_size=8),
    )  # fmt: skip
    theirs = config_to_json(replace(PURE, tie_word_embeddings=tied))
    ways = [
        ("model.", "embeddings", theirs),
        ("backbone.", "embeddings", theirs),
        ("backbone.", "embedding", theirs),
        ("backbone.", "embedding", original),  # 45 tokens in an embedding of 48
        ("", "embedding", theirs),
        ("", "embeddings", theirs),
    ]
    seen = []
    for i, (prefix, embedding, raw) in enumerate(ways):
        write_by_name(tmp_path / str(i), prefix, embedding, raw, tied)
        model = load_model(tmp_path / str(i))
        rates = model.model.layers[1].mixer.negative_rates()
        torch.testing.assert_close(rates, torch.tensor([-1.0, -2.7182818]))
        if tied:
            assert model.lm_head.weight is model.model.embeddings.weight
        else:
            assert (model.lm_head.weight == 3).all()
            assert model.lm_head.weight.data_ptr() != model.model.embeddings.weight.data_ptr()
        seen.append(logits(model))
    assert seen[0].isfinite().all() and seen[0].std() > 0.1
    assert all(torch.equal(seen[0], other) for other in seen[1:])


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    tied = replace(HYBRID, tie_word_embeddings=True)  # transformers wants the head of this one
    model = load_model(saved(tied, tmp_path))
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    assert model.lm_head.weight is model.model.embeddings.weight
    assert model.num_parameters() == built(HYBRID).num_parameters() - 48 * 24

    change_tensors(tmp_path, lm_head__weight=torch.full((48, 24), 3.0))
    assert "ties lm_head" in refusal(tmp_path)
    change_config(tmp_path, tie_word_embeddings=False)
    assert (load_model(tmp_path).lm_head.weight == 3).all()


def test_an_untied_head_must_be_stored(tmp_path: Path) -> None:
    change_tensors(saved(PURE, tmp_path), lm_head__weight=None)
    assert "1 missing:\n    lm_head.weight (48, 24)" in refusal(tmp_path)


def test_two_names_for_one_tensor(tmp_path: Path) -> None:
    change_tensors(saved(PURE, tmp_path), model__embedding__weight=torch.zeros(48, 24))
    message = refusal(tmp_path)
    assert "backbone.embeddings.weight" in message and "model.embedding.weight" in message


# Tensors that are not the config's --------------------------------------------------------------


def test_all_faults_are_in_one_error(tmp_path: Path) -> None:
    change_tensors(
        saved(HYBRID, tmp_path),
        backbone__norm_f__weight=None,
        backbone__layers__7__norm__weight=torch.ones(24),
        backbone__layers__0__mixer__D=torch.ones(3),
        backbone__layers__0__mixer__dt_bias=torch.ones(2, dtype=torch.int32),
    )
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert "1 missing:\n    model.norm_f.weight (24,)" in message
    assert "1 unexpected:\n    backbone.layers.7.norm.weight (24,)" in message
    fault = "backbone.layers.0.mixer.D: (3,) in the file, (2,) in the config"
    assert f"1 of another shape:\n    {fault}" in message
    assert "1 not floating-point:\n    backbone.layers.0.mixer.dt_bias: I32" in message


# A size, another value of it, and a tensor that then has the wrong shape.
DERIVED = [
    ("mamba_head_dim", 12, "in_proj.weight: (66, 24) in the file, (74, 24) in the config"),
    ("mamba_num_heads", 4, "A_log: (2,) in the file, (4,) in the config"),
    ("ssm_state_size", 16, "conv1d.weight: (44, 1, 4) in the file, (84, 1, 4) in the config"),
    ("n_groups", 1, "conv1d.bias: (44,) in the file, (32,) in the config"),
    ("conv_kernel", 3, "conv1d.weight: (44, 1, 4) in the file, (44, 1, 3) in the config"),
    ("hidden_size", 32, "out_proj.weight: (24, 20) in the file, (32, 20) in the config"),
    ("vocab_size", 50, "lm_head.weight: (48, 24) in the file, (50, 24) in the config"),
    ("head_dim", 8, "q_proj.weight: (24, 24) in the file, (32, 24) in the config"),
    ("num_key_value_heads", 1, "k_proj.weight: (12, 24) in the file, (6, 24) in the config"),
    ("intermediate_size", 10, "up_proj.weight: (40, 24) in the file, (10, 24) in the config"),
]


@pytest.mark.parametrize(("size", "value", "words"), DERIVED, ids=[size for size, *_ in DERIVED])
def test_derived_sizes_are_held_against_the_tensors(
    size: str, value: int, words: str, tmp_path: Path
) -> None:
    change_config(saved(HYBRID, tmp_path), **{size: value})
    assert words in refusal(tmp_path)


def test_a_wrong_config_allocates_nothing(tmp_path: Path) -> None:
    """Its embedding alone would be 16 terabytes."""
    change_config(saved(HYBRID, tmp_path), vocab_size=10**9, hidden_size=4096)
    assert "(1000000000, 4096) in the config" in refusal(tmp_path)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    change_config(saved(PURE, tmp_path), num_hidden_layers=4)  # nine tensors in each layer
    message = refusal(tmp_path)
    assert "18 missing:" in message and "... and 8 more" in message
    assert len(message.splitlines()) == 13


def test_missing_and_unexpected_biases(tmp_path: Path) -> None:
    change_config(saved(PURE, tmp_path), use_bias=True, use_conv_bias=False)
    message = refusal(tmp_path)
    assert "4 missing" in message and "2 unexpected" in message


def test_a_in_place_of_a_log(tmp_path: Path) -> None:
    change_tensors(
        saved(PURE, tmp_path),
        backbone__layers__0__mixer__A_log=None,
        backbone__layers__0__mixer__A=torch.tensor([-1.0, -2.0]),
    )
    assert "A_log = log(-A)" in refusal(tmp_path)


def test_a_drafter_that_is_not_there(tmp_path: Path) -> None:
    saved(HYBRID, tmp_path)
    names = [n for n in load_file(tmp_path / "model.safetensors") if n.startswith("mtp.")]
    assert len(names) == 12
    change_tensors(tmp_path, **dict.fromkeys(names))
    assert "set num_nextn_predict_layers to 0" in refusal(tmp_path)
    change_config(tmp_path, num_nextn_predict_layers=0)
    model = load_model(tmp_path)
    assert model.mtp is None
    assert torch.equal(logits(model), logits(built(HYBRID)))


# Damaged folders --------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 4, 8, 200, -4096, -1])
def test_truncated_weights(kept: int, tmp_path: Path) -> None:
    path = saved(HYBRID, tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert str(path) in refusal(tmp_path)


def test_weights_with_a_tail_or_a_broken_header(tmp_path: Path) -> None:
    path = saved(HYBRID, tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole + b"tail", whole[:9] + b"!" + whole[10:], b"\xff" * 8 + whole[8:]):
        path.write_bytes(damaged)
        assert str(path) in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"a": \xff}', "null"])
def test_a_config_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    path = saved(PURE, tmp_path) / "config.json"
    path.write_bytes(text.encode("latin-1"))
    assert str(path) in refusal(tmp_path)


def test_a_config_that_is_refused_is_named(tmp_path: Path) -> None:
    change_config(saved(PURE, tmp_path), model_type="llama")
    assert str(tmp_path / "config.json") in refusal(tmp_path)


def test_a_folder_without_weights_or_with_a_pickle(tmp_path: Path) -> None:
    (saved(PURE, tmp_path) / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "weights_only=True" in refusal(tmp_path) and "save_file" in refusal(tmp_path)


def test_no_such_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("wordmoth", "a/b", Path("wordmath")):  # a Path is never a shipped name
        with pytest.raises(CheckpointError, match=r"\(wordmath\); a checkpoint is a folder with"):
            load_model(name)
    with pytest.raises(CheckpointError, match=r"no config.json; a checkpoint is a folder with"):
        load_model(tmp_path)


def test_the_shipped_names_are_folders_of_the_package() -> None:
    assert all((folder / "tokenizer.json").is_file() for folder in SHIPPED.values())


# Shards -----------------------------------------------------------------------------------------


def shard(folder: Path) -> dict[str, str]:
    """Cut a saved folder's weights into two files; the map of names to files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {name: names[i % 2] for i, name in enumerate(tensors)}
    for file in names:
        part = {name: tensors[name] for name, where in weight_map.items() if where == file}
        save_file(part, folder / file)
    write_index(folder, {"weight_map": weight_map})
    return weight_map


def write_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards(tmp_path: Path) -> None:
    weight_map = shard(saved(HYBRID, tmp_path))
    assert torch.equal(logits(load_model(tmp_path)), logits(built(HYBRID)))

    last = tmp_path / max(weight_map.values())
    last.rename(tmp_path / "elsewhere")
    assert last.name in refusal(tmp_path)


def test_a_damaged_index(tmp_path: Path) -> None:
    weight_map = shard(saved(HYBRID, tmp_path))
    for index in ([], {}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}):
        write_index(tmp_path, index)
        assert "model.safetensors.index.json" in refusal(tmp_path)
    write_index(tmp_path, {"weight_map": weight_map | {"x": "../elsewhere.safetensors"}})
    assert "'../elsewhere.safetensors' is not a file of this folder" in refusal(tmp_path)


# Types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_type_on_disk_becomes_the_wanted_one(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    save_model(built(HYBRID).to(stored), tmp_path)
    model = load_model(tmp_path, dtype=wanted)
    in_file = load_file(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        kept = name.rsplit(".")[-1] in ("A_log", "D", "dt_bias")
        assert tensor.dtype == (torch.float32 if kept else wanted), name
        original = in_file[name.replace("model.", "backbone.")]
        assert torch.equal(tensor, original.to(tensor.dtype)), name
    if wanted != torch.float16:  # no need to hold fp16 to the scale of these weights
        exact, rounded = logits(built(HYBRID)), logits(model)
        assert rounded.dtype == torch.float32
        assert (exact - rounded).abs().mean() < 0.05 * exact.std()


def test_weights_are_never_integers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"torch\.int8"):
        load_model(saved(PURE, tmp_path), dtype=torch.int8)


# The clamp on dt --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [((0.0, math.inf), (6.144e-6, 2.12693)), ((0.01, 1.0), (0.01, 1.0))],
    ids=["no clamp", "clamped"],
)
def test_dt_is_clamped_by_its_limit_alone(
    limit: tuple[float, float], expected: tuple[float, float]
) -> None:
    """Bias, softplus, clamp, each once; the range that dt_bias was drawn from has no say."""
    raw = config_to_json(PURE) | dict(
        time_step_min=0.001, time_step_max=0.1, time_step_limit=list(limit)
    )
    config = config_from_json(raw)
    # With x = B = C = 1, D = 0 and no state before, y is dt.
    dt, dt_bias = torch.tensor([[-9.0, 5.0]]), torch.tensor([-3.0, -3.0])  # sums -12 and +2
    x, maps = torch.ones(1, 2, 1), torch.ones(1, 1, 1)
    common = (x, dt, -torch.ones(2), maps, maps, torch.zeros(2), dt_bias)
    one_row = torch.tensor([0, 1], dtype=torch.int32)
    zero, slot = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    prefill_state, decode_state = torch.zeros(2, 2, 2, 1, 1)
    prefill = mamba_chunk_scan(
        *common, prefill_state, query_start_loc=one_row, num_computed_tokens=zero, chunk_size=8,
        src_slots=slot, dst_slots=slot, has_initial_state=zero.bool(),
        dt_limit=config.time_step_limit,
    )  # fmt: skip
    decode = selective_state_update(
        *common, decode_state, query_start_loc=one_row, src_slots=slot[:, None],
        dst_slots=slot[:, None], dt_limit=config.time_step_limit,
    )  # fmt: skip
    reference = [min(max(math.log1p(math.exp(v)), limit[0]), limit[1]) for v in (-12.0, 2.0)]
    for y in (prefill, decode, prefill_state[1:], decode_state[1:]):
        assert y.flatten().tolist() == pytest.approx(reference, rel=1e-5)
        assert y.flatten().tolist() == pytest.approx(expected, rel=1e-4)


# Saving -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("config", [PURE, HYBRID], ids=["pure", "hybrid"])
def test_what_was_saved_comes_back(config: ModelConfig, tied: bool, tmp_path: Path) -> None:
    model = built(replace(config, tie_word_embeddings=tied, eos_token_ids=(0, 7)))
    save_model(model, tmp_path / "new" / "folder")
    again = load_model(str(tmp_path / "new" / "folder"))
    assert again.config == model.config
    assert not again.training and again.tokenizer is None
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert all(p.requires_grad for p in again.parameters())
    files = sorted((tmp_path / "new" / "folder").iterdir())
    assert [file.name for file in files] == ["config.json", "model.safetensors"]
    assert files[0].stat().st_mode == files[1].stat().st_mode, "who may read one may read both"


def test_a_loaded_model_outlives_its_file(tmp_path: Path) -> None:
    model = load_model(saved(HYBRID, tmp_path))
    before = logits(model)
    save_model(built(HYBRID, seed=1), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert torch.equal(logits(model), before)


def test_tokenizer_travels_with_the_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="reads the folder, too")
    tokenizer = Tokenizer.from_file(str(SHIPPED["wordmath"] / "tokenizer.json"))
    config = replace(HYBRID, vocab_size=768, bos_token_id=0, eos_token_ids=(0,))
    save_model(built(config), tmp_path / "a", tokenizer)
    model = load_model(tmp_path / "a")
    assert model.tokenizer is not None and model.tokenizer.to_str() == tokenizer.to_str()
    assert not any("tokenizer" in name for name in model.state_dict())
    save_model(model, tmp_path / "b")  # its own tokenizer, without being told

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    text = "Q: Ann has 48 pens. How many?\nA: 1+2 =3<|end|>"
    assert theirs(text).input_ids == tokenizer.encode(text).ids
    assert theirs.decode(theirs(text).input_ids) == "<|end|>" + text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (0, 0)


def test_a_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    path = saved(HYBRID, tmp_path) / "tokenizer.json"
    Tokenizer.from_file(str(SHIPPED["wordmath"] / "tokenizer.json")).save(str(path))
    assert "token id 767, and the model ends at 47" in refusal(tmp_path)
    path.write_text('{"version": "1.0"')
    assert str(path) in refusal(tmp_path)
