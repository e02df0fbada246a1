"""``python -m mamba_teach demo``: the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run what it asks for."""
    parser = argparse.ArgumentParser(prog="mamba_teach", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="serve the shipped model on held-out word problems")
    demo.add_argument("--problems", type=_positive, default=32, metavar="N", help="default: 32")
    demo.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    demo.add_argument(
        "--board", type=Path, metavar="FILE.html", help="also write a page that plays every step"
    )
    arguments = parser.parse_args(argv)

    from mamba_teach.demo import run_demo  # after parsing: --help need not wait for torch

    run_demo(arguments.problems, arguments.json, arguments.board)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


if __name__ == "__main__":
    main()
