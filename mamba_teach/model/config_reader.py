"""Reading a ``config.json`` carefully: every value with its type, every missing name in one error.

Somebody else wrote the file, perhaps for another program. A wrong type is named where it is met;
what is missing is collected, so that the error tells the whole story at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mamba_teach.config import ModelConfig

# Pattern characters and what transformers calls such a layer, the present name first.
LAYER_NAMES = {
    "M": ("linear_attention", "mamba"),
    "*": ("full_attention", "attention"),
    "-": ("mlp",),
    "E": ("moe",),
}


class ConfigReader:
    """Takes values out of a JSON object, checks their types and remembers which were missing.

    Methods take the names under which a value may stand; the first that is there and not null
    counts. An absent value without a ``default`` is reported by :meth:`check`, with all the others.

    Args:
        raw: the object.
        what: what it is, for errors: "a Mamba2 config".
        prefix: goes before every name in errors, for an object inside the file's.
    """

    def __init__(self, raw: Mapping[str, Any], what: str, prefix: str = "") -> None:
        self.raw, self.what, self.prefix = raw, what, prefix
        self.missing: list[str] = []
        self.allow("quantization_config", None)

    def check(self) -> None:
        """Raises ValueError with the names of all that was missing so far."""
        if self.missing:
            raise ValueError(f"{self.what} without {', '.join(self.missing)}")

    def config(self, **sizes: Any) -> ModelConfig:
        """The finished config, unless something was missing."""
        self.check()
        return ModelConfig(**sizes)

    def allow(self, name: str, *values: Any) -> None:
        """Refuse any other value of a setting that this package does not implement."""
        seen = self.raw.get(name)
        if seen is not None and seen not in values:
            allowed = " or ".join(repr(v) for v in values)
            raise ValueError(f"{self.prefix}{name}={seen!r}: supported is {allowed}")

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        value = self._value(names, default, int, least)
        if value < least:
            raise ValueError(f"{self.prefix}{names[-1]}={value}: must be at least {least}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        return self._value(names, default, (int, float), 1.0)

    def flag(self, *names: str, default: bool) -> bool:
        return self._value(names, default, bool, default)

    def limit(self, *names: str) -> tuple[float, float]:
        """The clamp on dt, ``(lower, upper)``; null and absent mean none."""
        pair = self._value(names, [0.0, math.inf], (list, tuple), [0.0, math.inf])
        # Infinity is written as itself, which is not JSON, or in transformers' way.
        infinity = {"__float__": "Infinity"}
        ends = [math.inf if end == infinity else end for end in pair]
        if len(ends) != 2 or not all(isinstance(end, int | float) for end in ends):
            raise ValueError(f"{self.prefix}{names[-1]}={pair!r}: must be two numbers")
        return float(ends[0]), float(ends[1])

    def pattern(self, *names: str) -> str:
        """A pattern string, from one or from a list of layer names."""
        layers = self._value(names, None, (str, list), "M")
        if isinstance(layers, str):
            return layers
        kind_of = {name: kind for kind, known in LAYER_NAMES.items() for name in known}
        for i, name in enumerate(layers):
            if name not in kind_of:
                raise ValueError(
                    f"layer {i} is {name!r}; known are {', '.join(map(repr, kind_of))}"
                )
        return "".join(kind_of[name] for name in layers)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of them or null, as a tuple."""
        ids = self._value((name,), [], (int, list), [])
        ids = [ids] if isinstance(ids, int) else ids
        if not all(isinstance(i, int) for i in ids):
            raise ValueError(f"{name}={ids!r}: token ids are integers")
        return tuple(ids)

    def shared_names(self) -> dict[str, Any]:
        """What transformers' two dialects call by the same name."""
        bos = self.token_ids("bos_token_id")
        return {
            "use_bias": self.flag("use_bias", default=False),
            "layer_norm_epsilon": self.number("layer_norm_epsilon", default=1e-5),
            "tie_word_embeddings": self.flag("tie_word_embeddings", default=False),
            "bos_token_id": bos[0] if bos else None,
            "eos_token_ids": self.token_ids("eos_token_id"),
        }

    def _value(self, names: tuple[str, ...], default: Any, types: Any, placeholder: Any) -> Any:
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            is_flag = isinstance(value, bool)  # which Python also takes for an int
            if is_flag != (types is bool) or not isinstance(value, types):
                raise ValueError(f"{self.prefix}{name}={value!r}: wrong type")
            return value
        if default is None:
            self.missing.append(self.prefix + " or ".join(names))
            return placeholder
        return default
