"""A hybrid Mamba2 model in one file, without an engine: what the engine is measured against.

Written for the benchmark, the way one writes a model to be read and used: torch only, one dense cache
per batch, whole prompts of one length, the chunked scan of the Mamba2 paper (listing 1), a state update
in place. No paging, no scheduler, no packed batches, and so none of their cost. It reads the same
folder (``config.json``, ``model.safetensors``, names of ``NemotronHForCausalLM``) and shares no code
with the engine.

    model = MinimalModel(folder)
    logits, cache = model.prefill(prompts, max_len)      # (R, L) -> (R, vocab)
    logits = model.decode(tokens, cache)                 # (R,) -> (R, vocab); cache is mutated
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

CHUNK = 64
KINDS = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}


@dataclass
class Cache:
    """Per layer: window ``(R, C, W)`` and state ``(R, H, P, N)``, or keys and values, or None."""

    layers: list[tuple[torch.Tensor, torch.Tensor] | None]
    length: int


class MinimalModel:
    """Prefill and decode of equally long rows."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.pattern = [KINDS[kind] for kind in config["layers_block_type"]]
        self.H, self.P = config["mamba_num_heads"], config["mamba_head_dim"]
        self.G, self.N = config["n_groups"], config["ssm_state_size"]
        self.width, self.eps = config["conv_kernel"], config["layer_norm_epsilon"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.inner = self.H * self.P
        self.channels = self.inner + 2 * self.G * self.N
        weights = load_file(folder / "model.safetensors")
        # The trunk is called "model" or "backbone".
        self.w = {
            name.split(".", 1)[1] if "layers" in name else name: w for name, w in weights.items()
        }
        self.embedding = next(w for name, w in weights.items() if "embedding" in name)
        self.final_norm = next(w for name, w in weights.items() if "norm_f" in name)
        self.head = weights.get("lm_head.weight", self.embedding)
        self.A = {
            i: -torch.exp(self.w[f"layers.{i}.mixer.A_log"].float())
            for i, kind in enumerate(self.pattern)
            if kind == "M"
        }

    @torch.inference_mode()
    def prefill(self, prompts: torch.Tensor, max_len: int) -> tuple[torch.Tensor, Cache]:
        """Logits behind whole prompts ``(R, L)``, and a cache with room for ``max_len`` tokens."""
        rows = len(prompts)
        kv = (rows, self.kv_heads, max_len, self.head_dim)
        layers = [
            {
                "M": lambda: (
                    torch.zeros(rows, self.channels, self.width),
                    torch.zeros(rows, self.H, self.P, self.N),
                ),
                "*": lambda: (torch.zeros(kv), torch.zeros(kv)),
                "-": lambda: None,
            }[kind]()
            for kind in self.pattern
        ]
        cache = Cache(layers, 0)
        return self._run(prompts, cache), cache

    @torch.inference_mode()
    def decode(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits behind one more token per row."""
        return self._run(tokens[:, None], cache)

    def _run(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        mixers = {"M": self._mamba, "*": self._attention, "-": self._mlp}
        hidden = F.embedding(tokens, self.embedding)
        for i, kind in enumerate(self.pattern):
            u = F.rms_norm(hidden, hidden.shape[-1:], self.w[f"layers.{i}.norm.weight"], self.eps)
            hidden = hidden + mixers[kind](u, i, cache)
        cache.length += tokens.shape[1]
        last = F.rms_norm(hidden[:, -1], hidden.shape[-1:], self.final_norm, self.eps)
        return F.linear(last, self.head)

    def _linear(self, u: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        prefix = f"layers.{layer}.mixer.{name}"
        return F.linear(u, self.w[f"{prefix}.weight"], self.w.get(f"{prefix}.bias"))

    def _mlp(self, u: torch.Tensor, layer: int, cache: Cache) -> torch.Tensor:
        return self._linear(F.relu(self._linear(u, layer, "up_proj")) ** 2, layer, "down_proj")

    def _attention(self, u: torch.Tensor, layer: int, cache: Cache) -> torch.Tensor:
        q, k, v = (
            self._linear(u, layer, f"{name}_proj")
            .unflatten(-1, (-1, self.head_dim))
            .transpose(1, 2)
            for name in "qkv"
        )  # (R, heads, L, d)
        keys, values = cache.layers[layer]
        start, end = cache.length, cache.length + u.shape[1]
        keys[:, :, start:end], values[:, :, start:end] = k, v
        out = F.scaled_dot_product_attention(
            q, keys[:, :, :end], values[:, :, :end], is_causal=u.shape[1] > 1, enable_gqa=True
        )
        return self._linear(out.transpose(1, 2).flatten(2), layer, "o_proj")

    def _mamba(self, u: torch.Tensor, layer: int, cache: Cache) -> torch.Tensor:
        window, state = cache.layers[layer]
        p = f"layers.{layer}.mixer."
        conv, bias = self.w[p + "conv1d.weight"], self.w[p + "conv1d.bias"]
        gate, xBC, dt = self._linear(u, layer, "in_proj").split(
            [self.inner, self.channels, self.H], -1
        )
        dt = F.softplus(dt + self.w[p + "dt_bias"])
        if u.shape[1] > 1:
            padded = F.pad(xBC.transpose(1, 2), (self.width - 1, 0))  # (R, C, W-1 + L)
            window.copy_(padded[..., -self.width :])
            xBC = F.silu(F.conv1d(padded, conv, bias, groups=self.channels).transpose(1, 2))
        else:
            window.copy_(window.roll(-1, -1))
            window[..., -1] = xBC[:, 0]
            xBC = F.silu((window * conv[:, 0]).sum(-1) + bias)[:, None]
        x, B, C = xBC.split([self.inner, self.G * self.N, self.G * self.N], -1)
        x = x.unflatten(-1, (self.H, self.P))
        B, C = (
            m.unflatten(-1, (self.G, self.N)).repeat_interleave(self.H // self.G, 2) for m in (B, C)
        )
        scan = self._chunks if u.shape[1] > 1 else self._update
        y = scan(x, dt, self.A[layer], B, C, state) + self.w[p + "D"][:, None] * x
        y = y.flatten(2) * F.silu(gate)
        groups = y.unflatten(-1, (self.G, -1))
        y = (
            F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(2)
            * self.w[p + "norm.weight"]
        )
        return self._linear(y, layer, "out_proj")

    def _update(self, x, dt, A, B, C, state):  # type: ignore[no-untyped-def]
        """One token: x (R, 1, H, P), dt (R, 1, H), B and C (R, 1, H, N); state is mutated."""
        x, dt, B, C = x[:, 0], dt[:, 0], B[:, 0], C[:, 0]
        state.mul_(torch.exp(dt * A)[..., None, None])
        state.addcmul_((dt[..., None] * x)[..., None], B[:, :, None])
        return (state @ C[..., None])[..., 0][:, None]  # (R, 1, H, P)

    def _chunks(self, x, dt, A, B, C, state):  # type: ignore[no-untyped-def]
        """Whole prompts from state 0 (Mamba2 paper, listing 1); state is overwritten."""
        length = x.shape[1]
        pad = -length % CHUNK  # dt = 0 behind the end: decay 1, nothing added
        x, B, C = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x, B, C))
        dt = F.pad(dt, (0, 0, 0, pad))
        x, dt, B, C = (  # (R, c, H, Q, ...)
            t.unflatten(1, (-1, CHUNK)).transpose(2, 3) for t in (x * dt[..., None], dt, B, C)
        )
        cum = (dt * A[:, None]).cumsum(-1)  # (R, c, H, Q)
        decay = torch.exp((cum[..., :, None] - cum[..., None, :]).tril()).tril()
        y = ((C @ B.transpose(-1, -2)) * decay) @ x  # inside the chunks
        added = (x * torch.exp(cum[..., -1:] - cum)[..., None]).transpose(
            -1, -2
        ) @ B  # (R, c, H, P, N)
        kept = torch.exp(cum[..., -1])[..., None, None]
        before = torch.empty_like(added)
        h = torch.zeros_like(state)
        for c in range(added.shape[1]):
            before[:, c] = h
            h = kept[:, c] * h + added[:, c]
        state.copy_(h)
        y = y + (C @ before.transpose(-1, -2)) * torch.exp(cum)[..., None]
        return y.transpose(2, 3).flatten(1, 2)[:, :length]  # (R, L, H, P)
