"""``python -m mamba_teach demo``: the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run what it asks for.

    Args:
        argv: the words after ``python -m mamba_teach``; None: those of this process.

    Raises:
        SystemExit: the words are not understood; usage and reason are printed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mamba_teach",
        description="A serving engine for hybrid Mamba2 models. See it work: %(prog)s demo",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser("demo", help="serve the shipped model on held-out word problems")
    demo.add_argument("--problems", type=_positive, default=32, metavar="N", help="default: 32")
    demo.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    demo.add_argument(
        "--board",
        type=_writable,
        metavar="FILE.html",
        help="also write a page that plays every step",
    )
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.error("which command? Try: python -m mamba_teach demo")

    import torch  # after parsing: --help need not wait for it

    from mamba_teach.demo import run_demo

    # A decode step of so small a model is a thousand tiny operations. Dividing each among threads
    # costs several times what it brings, and on a busy machine far more than that.
    torch.set_num_threads(1)
    run_demo(arguments.problems, arguments.json, arguments.board)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def _writable(text: str) -> Path:
    """The path, if a file can be written there: known before the run, not after it."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: may not be written")
    return path


if __name__ == "__main__":
    main()
