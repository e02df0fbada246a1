"""Checkpoints: a folder with ``config.json``, ``model.safetensors`` and mostly ``tokenizer.json``.

The layout is that of transformers, which loads a folder saved here to the same logits (it has no
place for the MTP head and leaves ``mtp.*`` out). Folders that come from elsewhere differ in names
only: the trunk is called ``model``, ``backbone`` or nothing at all, the embedding is singular or
plural. So loading is renaming, then comparing, then copying, in this order: the shapes in the
files' headers are held against a model without storage, built from the config on torch's meta
device, and a checkpoint that does not fit is refused with one error before a large tensor exists.

One thing looks like a renaming and is none: files hold ``A_log``, and the recurrence wants
``A = -exp(A_log)``. The parameter stays ``A_log``, and the mixer computes ``A`` as it runs.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from mamba_teach.config import ModelConfig
from mamba_teach.model.checkpoint_config import config_from_json, config_to_json
from mamba_teach.model.checkpoint_tensors import (
    CheckpointError,
    compare,
    read_headers,
    read_json,
    read_tensors,
)
from mamba_teach.model.hybrid import KEPT_IN_FP32, HybridModel
from mamba_teach.model.tokenizer import load_tokenizer

__all__ = ["SHIPPED", "CheckpointError", "load_model", "save_model"]

SHIPPED = {"wordmath": Path(__file__).parents[1] / "wordmath" / "assets"}

WANTED = (
    "a checkpoint is a folder with config.json, model.safetensors (or the shards of "
    "model.safetensors.index.json) and, if prompts are to be text, tokenizer.json"
)


def load_model(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> HybridModel:
    """The model in ``folder``, ready to run, with its tokenizer as ``model.tokenizer``.

    Args:
        folder: a checkpoint (see above), or the name of a shipped one: ``"wordmath"``.
        device: where the weights go.
        dtype: floating-point type of the weights, whatever the files hold. ``A_log``, ``D`` and
            ``dt_bias`` are fp32 in every case.

    Raises:
        CheckpointError: no such checkpoint; a damaged file; a config that cannot be read; tensors
            that are missing, unknown or of another shape than the config says (all are listed).
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: weights are floating-point numbers")
    path = _resolve(folder)
    config = _read_config(path / "config.json")
    stored = read_headers(path)
    with torch.device("meta"):
        model = HybridModel(config)
    compare(path, stored, model)

    state = {}
    for name, tensor in read_tensors(stored):
        kept = torch.float32 if name.endswith(KEPT_IN_FP32) else dtype
        # A copy in every case: the file may be written anew while the model lives.
        state[name] = tensor.to(device, kept, copy=True)
    if config.tie_word_embeddings:
        embedding = state["model.embeddings.weight"]
        head = state.setdefault("lm_head.weight", embedding)
        if not torch.equal(head, embedding):
            raise CheckpointError(
                f"{path}: config.json ties lm_head to the embedding, and the file holds another "
                f"lm_head.weight; set tie_word_embeddings to false if that is the one to use"
            )
    model.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embeddings.weight
    try:
        model.tokenizer = load_tokenizer(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    _check_vocabulary(path, model)
    return model.eval()


def save_model(model: HybridModel, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Write ``model`` to ``folder``, where :func:`load_model` and transformers will find it.

    Args:
        model: of any device and dtype; not changed.
        folder: created if it is not there; files of the same names are replaced.
        tokenizer: goes beside the weights; None takes ``model.tokenizer``, which may be None too.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    raw = config_to_json(model.config)
    raw["dtype"] = str(model.lm_head.weight.dtype).removeprefix("torch.")
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            if raw["model_type"] == "mamba2":
                continue  # transformers ties this one by itself, and does not tie Nemotron-H
            tensor = tensor.clone()
        if name.startswith("model."):
            name = "backbone." + name.removeprefix("model.")
        tensors[name] = tensor.cpu().contiguous()
    # Renamed when complete: whoever interrupts this keeps the weights that were there before.
    partial = path / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    _write_json(path / "config.json", raw)
    shutil.copymode(path / "config.json", partial)  # safetensors 0.8 lets only the owner read
    os.replace(partial, path / "model.safetensors")
    tokenizer = model.tokenizer if tokenizer is None else tokenizer
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
        _write_json(path / "tokenizer_config.json", _tokenizer_settings(model.config, tokenizer))


# Finding and reading --------------------------------------------------------------------------


def _resolve(folder: str | Path) -> Path:
    path = SHIPPED.get(folder, Path(folder)) if isinstance(folder, str) else folder
    if not path.is_dir():
        raise CheckpointError(
            f"{str(folder)!r} is neither a folder nor a shipped checkpoint "
            f"({', '.join(SHIPPED)}); {WANTED}"
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json; {WANTED}")
    return path


def _read_config(path: Path) -> ModelConfig:
    raw = read_json(path)
    try:
        return config_from_json(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _write_json(path: Path, raw: dict[str, Any]) -> None:
    path.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _tokenizer_settings(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What ``transformers.AutoTokenizer`` wants to know besides ``tokenizer.json``."""
    eos = config.eos_token_ids[0] if config.eos_token_ids else None
    ids = {"bos_token": config.bos_token_id, "eos_token": eos, "pad_token": eos}
    tokens = {name: tokenizer.id_to_token(i) for name, i in ids.items() if i is not None}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in tokens.items() if token is not None},
    }


def _check_vocabulary(path: Path, model: HybridModel) -> None:
    """A tokenizer may know fewer tokens than the embedding has rows (padding), never more."""
    if model.tokenizer is None:
        return
    largest = max(model.tokenizer.get_vocab().values(), default=-1)
    if largest >= model.config.vocab_size:
        raise CheckpointError(
            f"{path}: tokenizer.json has token id {largest}, and the model ends at "
            f"{model.config.vocab_size - 1} (vocab_size={model.config.vocab_size})"
        )
