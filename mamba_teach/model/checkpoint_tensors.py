"""The tensors in a checkpoint's files: where they are, what they are called, whether they fit.

A safetensors file begins with a header that lists every tensor's name, type and shape. Reading the
headers costs nothing, so a checkpoint is compared with the model it claims to be before anything is
allocated, and what is wrong is told in one error: which tensors are missing, which nobody knows,
which have another shape.

Names in circulation, for the same tensor::

    model.embeddings.weight     this package, and NemotronHForCausalLM in memory
    backbone.embeddings.weight  transformers' files
    backbone.embedding.weight   the original state-spaces files
    embeddings.weight           a trunk saved without its head
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")  # as safetensors calls them
LISTED = 10  # tensors that an error names per kind of fault


class CheckpointError(ValueError):
    """A folder that is no checkpoint, or one whose files are damaged or contradict each other."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as the file's header describes it; ``name`` is the file's own."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or a CheckpointError that names the file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no JSON, or no UTF-8
        raise CheckpointError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a JSON {type(raw).__name__}, not an object")
    return raw


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by the model's names for them; reads no values.

    Raises:
        CheckpointError: no weights, a damaged file, or two tensors that mean the same one.
    """
    stored: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    part = opened.get_slice(name)
                    tensor = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
                    twin = stored.setdefault(model_name(name), tensor)
                    if twin is not tensor:
                        raise CheckpointError(
                            f"{folder}: {twin.name} in {twin.file.name} and {name} in {file.name} "
                            f"are the same tensor of the model, {model_name(name)}"
                        )
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or not there: {error}") from error
    return stored


def model_name(name: str) -> str:
    """What :class:`HybridModel` calls the tensor that a file calls ``name``."""
    for prefix in ("model.", "backbone."):
        name = name.removeprefix(prefix)
    if name.startswith(("lm_head.", "mtp.")):
        return name
    if name.startswith("embedding."):
        name = "embeddings." + name.removeprefix("embedding.")
    return "model." + name


def read_tensors(stored: dict[str, StoredTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's names with the values, on the CPU; a value may be a view of its file."""
    for file in dict.fromkeys(tensor.file for tensor in stored.values()):
        with safe_open(file, framework="pt") as opened:
            for name, tensor in stored.items():
                if tensor.file == file:
                    yield name, opened.get_tensor(tensor.name)


def compare(folder: Path, stored: dict[str, StoredTensor], model: nn.Module) -> None:
    """Hold the headers against a model, which may be on the meta device.

    A tied ``lm_head.weight`` may be absent.

    Raises:
        CheckpointError: lists what is missing, unexpected or differs in shape, or is no float.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = len(dict(model.named_parameters())) < len(wanted)  # counts a shared parameter once
    optional = {"lm_head.weight"} if tied else set()
    missing = [name for name in wanted if name not in stored and name not in optional]
    unknown = [tensor for name, tensor in stored.items() if name not in wanted]
    known = [(name, tensor) for name, tensor in stored.items() if name in wanted]
    faults = {
        "missing": [f"{name} {wanted[name]}" for name in missing],
        "unexpected": [f"{tensor.name} {tensor.shape}" for tensor in unknown],
        "of another shape": [
            f"{tensor.name}: {tensor.shape} in the file, {wanted[name]} in the config"
            for name, tensor in known
            if tensor.shape != wanted[name]
        ],
        "not floating-point": [
            f"{tensor.name}: {tensor.dtype}"
            for _, tensor in known
            if tensor.dtype not in FLOAT_TYPES
        ],
    }
    if not any(faults.values()):
        return
    message = f"{folder}: the tensors are not those of config.json"
    for fault, lines in faults.items():
        if lines:
            rest = [f"... and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
            message += f"\n  {len(lines)} {fault}:" + "".join(
                f"\n    {line}" for line in lines[:LISTED] + rest
            )
    if any(tensor.name.endswith(".mixer.A") for tensor in unknown):
        message += "\n  The file stores A; a checkpoint stores A_log = log(-A)."
    if missing and all(name.startswith("mtp.") for name in missing):
        message += "\n  To load the model without a drafter, set num_nextn_predict_layers to 0."
    raise CheckpointError(message)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CheckpointError(f"{folder / INDEX} has no weight_map")
        for shard in shards.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{folder / INDEX}: {shard!r} is not a file of this folder")
        return [folder / shard for shard in sorted(set(shards.values()))]
    if (folder / "pytorch_model.bin").is_file():
        raise CheckpointError(
            f"{folder} holds pytorch_model.bin, a pickle, which can run any code when it is opened "
            f"and is not read here. If you trust it: state = torch.load('pytorch_model.bin', "
            f"weights_only=True), then clone every tensor, since tied ones share storage, and "
            f"safetensors.torch.save_file(state, '{WEIGHTS}')"
        )
    raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
