"""The scripted proposer: drafts from a function, for tests and for stories that need a certain step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mamba_teach.spec_decode.proposer import DraftContext, DraftRow

Script = Callable[[str, list[int], int], Sequence[int]]


class ScriptedProposer:
    """Proposes what ``script(request_id, tokens, max_drafts)`` returns.

    Args:
        script: gets all known tokens of the request, new ones included, and how many drafts are
            welcome; what it returns beyond that is cut off.
    """

    name = "by a script"

    def __init__(self, script: Script) -> None:
        self.script = script

    def propose(self, rows: Sequence[DraftRow], context: DraftContext) -> list[list[int]]:
        """See :class:`~mamba_teach.spec_decode.proposer.Proposer`."""
        drafts = []
        for row in rows:
            wanted: Sequence[int] = ()
            if row.max_drafts > 0:
                tokens = row.tokens(0, row.num_tokens)
                wanted = self.script(row.request.request_id, tokens, row.max_drafts)
            drafts.append(list(wanted)[: row.max_drafts])
        return drafts
