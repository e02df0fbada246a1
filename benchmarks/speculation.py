"""What does guessing ahead save, and what does it cost in memory traffic? Counted, not timed.

    python benchmarks/speculation.py                       a table; some minutes on one core
    python benchmarks/speculation.py --json results.json   and the numbers

The shipped wordmath model answers few-shot problems with 0 to 5 drafts per step in every cache mode;
at 3 drafts its MTP head is held against n-gram look-up. Everything is read off the event log.

**Verify step**: one request's decode row in one step, with or without drafts. It yields the drafts that
were right and one token more; how many tokens that makes is what speculation is about.

**State bytes** are what decoding moves of SSM states and convolution windows, by formula. In each Mamba
layer a row of ``q`` tokens reads one state and ``W - 1`` inputs, and writes ``q`` states and a window of
``W - 2 + q`` inputs. A boundary state that is copied to its own block reads and writes a state and what
a window of ``W - 1 + k`` inputs holds from the copied moment on, in as many layers as the model's
largest Mamba group has (one launch moves a block at all positions). Prefill is left out: drafts change
nothing there. So are weights, activations, keys and values.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]


import torch  # noqa: E402
from gpu_report import table  # noqa: E402
from tqdm import tqdm  # noqa: E402

from mamba_teach import Engine, EngineConfig, load_model  # noqa: E402
from mamba_teach.cache.specs import MambaSpec  # noqa: E402
from mamba_teach.config import DTYPE_BYTES  # noqa: E402
from mamba_teach.events import (  # noqa: E402
    DraftsVerified,
    RowScheduled,
    StateAccess,
    StateCopied,
    StepStarted,
    TokenSampled,
)
from mamba_teach.wordmath.evaluate import evaluate  # noqa: E402

MODES = ("none", "align", "all")
RUNS = [  # cache mode, drafts per step, who drafts; k = 0 comes first, the others are compared with it
    *((mode, k, "mtp" if k else None) for mode in MODES for k in range(6)),
    ("all", 3, "ngram"),
]
PROBLEMS = 64
BLOCK_SIZE = 64  # a page that holds the windows of k = 5, too: the derived size would grow with k


@dataclass(frozen=True)
class StateSize:
    """What one Mamba group keeps.

    Attributes:
        layers: of the group.
        state: bytes of an SSM state in one layer.
        entry: bytes of one input of a convolution window in one layer.
        history: inputs that a token needs besides itself, ``W - 1``.
        length: inputs that a window has room for, ``W - 1 + k``.
    """

    layers: int
    state: int
    entry: int
    history: int
    length: int

    @classmethod
    def of(cls, spec: MambaSpec, layers: int) -> StateSize:
        conv, ssm = spec.tensors  # (W - 1 + k, conv_dim), (H, P, N)
        return cls(
            layers=layers,
            state=prod(ssm.shape) * DTYPE_BYTES[ssm.dtype],
            entry=conv.shape[1] * DTYPE_BYTES[conv.dtype],
            history=conv.shape[0] - spec.num_speculative_blocks,
            length=conv.shape[0],
        )

    def row_bytes(self, num_tokens: int) -> int:
        """Read and written by a decode row of ``num_tokens`` tokens, in all layers of the group."""
        read = self.state + self.history * self.entry
        written = num_tokens * self.state + (self.history - 1 + num_tokens) * self.entry
        return self.layers * (read + written)

    def copy_bytes(self, offset: int, layers: int) -> int:
        """Read and written by a copy whose window begins at ``offset``, in ``layers`` layers."""
        return 2 * layers * (self.state + (self.length - offset) * self.entry)


@dataclass
class Counts:
    """What a log says of its verify steps.

    Attributes:
        steps: of the engine.
        verify_steps: decode rows.
        with_drafts: those of them that had drafts.
        tokens: that came of them (the token that ends a prefill is not among them).
        drafts_right: drafts that became tokens.
        drafts_wrong: all other drafts: wrong ones and those behind them, or behind the answer's end.
        row_bytes: state bytes that decode rows read and wrote.
        copies: boundary states that were copied, counted per group.
        copy_bytes: state bytes that copies read and wrote.
    """

    steps: int = 0
    verify_steps: int = 0
    with_drafts: int = 0
    tokens: int = 0
    drafts_right: int = 0
    drafts_wrong: int = 0
    row_bytes: int = 0
    copies: int = 0
    copy_bytes: int = 0

    @property
    def tokens_per_verify_step(self) -> float:
        return self.tokens / self.verify_steps if self.verify_steps else 0.0

    @property
    def state_bytes_per_token(self) -> float:
        return (self.row_bytes + self.copy_bytes) / self.tokens if self.tokens else 0.0


def count(engine: Engine) -> Counts:
    """Count over all that an engine has done."""
    sizes = {
        i: StateSize.of(group.spec, len(group.layers))
        for i, group in enumerate(engine.cache.groups)
        if isinstance(group.spec, MambaSpec)
    }
    most_layers = max((size.layers for size in sizes.values()), default=0)
    counts = Counts()
    decoding: dict[str, int] = {}  # of the step: request id -> tokens computed before it
    for event in engine.events:
        match event:
            case StepStarted():
                counts.steps += 1
                decoding.clear()
            case RowScheduled(request_id, "decode", num_computed, _):
                counts.verify_steps += 1
                decoding[request_id] = num_computed
            case StateAccess(request_id, group, _, writes) if request_id in decoding:
                counts.row_bytes += sizes[group].row_bytes(len(writes))
            case StateCopied(request_id, group, _, _, num_tokens):
                offset = num_tokens - decoding[request_id] - 1
                counts.copies += 1
                counts.copy_bytes += sizes[group].copy_bytes(offset, most_layers)
            case DraftsVerified(_, num_drafts, num_accepted):
                counts.with_drafts += 1
                counts.drafts_right += num_accepted
                counts.drafts_wrong += num_drafts - num_accepted
            case TokenSampled(request_id, _):
                counts.tokens += request_id in decoding
    return counts


def measure(model: Any, mode: str, k: int, method: str | None, problems: int) -> dict[str, Any]:
    """One run, as a line of the report."""
    config = EngineConfig(
        mamba_cache_mode=mode, block_size=BLOCK_SIZE, num_speculative_tokens=k,
        speculative_method=method, device="cpu",
    )  # fmt: skip
    engine = Engine(model, config)
    evaluate(engine, problems)
    counts = count(engine)
    return {
        "mode": mode,
        "k": k,
        "method": method,
        **asdict(counts),
        "tokens_per_verify_step": round(counts.tokens_per_verify_step, 4),
        "state_bytes_per_token": round(counts.state_bytes_per_token, 1),
    }


def with_savings(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs, each held against the run of its mode without drafts."""
    plain = {run["mode"]: run for run in runs if run["k"] == 0}
    lines = []
    for run in runs:
        steps, per_token = (plain[run["mode"]][key] for key in ("steps", "state_bytes_per_token"))
        ratio = round(run["state_bytes_per_token"] / per_token, 4)
        saved = {"steps_without_drafts": steps, "steps_saved": steps - run["steps"]}
        lines.append(run | saved | {"state_bytes_against_no_drafts": ratio})
    return lines


def render(runs: list[dict[str, Any]]) -> str:
    """The report as a table; bytes in KiB per token that a decode row yielded."""
    header = [
        "mode", "k", "drafts by", "steps", "saved", "tokens/verify step", "right", "wrong", "copies",
        "KiB/token", "of k=0",
    ]  # fmt: skip
    rows = [
        [
            run["mode"], str(run["k"]), run["method"] or "nobody", str(run["steps"]),
            str(run["steps_saved"]), f"{run['tokens_per_verify_step']:.2f}",
            str(run["drafts_right"]), str(run["drafts_wrong"]), str(run["copies"]),
            f"{run['state_bytes_per_token'] / 1024:.1f}",
            f"{run['state_bytes_against_no_drafts']:.0%}",
        ]
        for run in runs
    ]  # fmt: skip
    return table(header, rows)


def describe_machine() -> dict[str, str]:
    """Where a run took place, for whoever reads the numbers later."""
    return {
        "device": "cpu",
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args(argv)
    model = load_model("wordmath")
    runs = with_savings(
        [measure(model, *run, args.problems) for run in tqdm(RUNS, desc="runs", unit="run")]
    )
    print(render(runs))
    if args.json:
        settings = {"problems": args.problems, "block_size": BLOCK_SIZE}
        document = {"machine": describe_machine(), **settings, "runs": runs}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
