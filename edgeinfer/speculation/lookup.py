"""Drafts from the text itself: what followed when its end stood there before, in the prompt or in the answer."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from edgeinfer.speculation.automaton import SuffixAutomaton
from edgeinfer.speculation.draft import Proposal
from edgeinfer.types import Request

_LENGTHS = (1, 2, 3, 4, 6, 9, 13, 21, 40)
"""Lengths of matches up to which one grade goes; longer ones share the last."""
# Acceptance by grade, where something else has followed the match, and where nothing else has.
# Measured on answers of Qwen2.5-Coder-0.5B and SmolLM2-135M (docs/speculation.md).
_EXPECTED = (
    0.3,
    0.5,
    0.45,
    0.6,
    0.6,
    0.7,
    0.7,
    0.8,
    0.75,
    0.85,
    0.8,
    0.9,
    0.85,
    0.95,
    0.9,
    0.95,
    0.95,
    0.97,
    0.97,
    0.98,
)


class Lookup:
    """`draft.Source` over a suffix automaton of each request's text."""

    name = "lookup"
    is_free = True

    def expected(self, grade: int) -> float:
        """From measured answers."""
        return _EXPECTED[grade]

    def open(self, request: Request) -> LookupDraft:
        """A request's own automaton."""
        return LookupDraft()


class LookupDraft:
    """`draft.Draft` of one text. A match of one token counts; a grade tells its length, and if it was unambiguous."""

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()

    def observe(self, tokens: Sequence[int]) -> None:
        """The text has grown."""
        self._automaton.extend(tokens)

    def propose(self, max_tokens: int) -> Proposal | None:
        """What followed the longest end of the text that stood in it before."""
        found = list(self._automaton.continuation(max_tokens))
        if not found:
            return None
        grades = tuple(2 * bisect.bisect_left(_LENGTHS, matched) + sure for _, matched, sure in found)
        return Proposal(Lookup.name, tuple(token for token, _, _ in found), grades)

    def close(self) -> None:
        """Nothing is held outside Python."""
