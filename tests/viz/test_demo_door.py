"""The command line says what is wrong in one line, before anything runs."""

from __future__ import annotations

import pytest

from mamba_teach.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which command? Try: python -m mamba_teach demo"),
        (["demo", "--board", "/nope/x.html"], "/nope"),
        (["demo", "--problems", "x"], "x"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]
