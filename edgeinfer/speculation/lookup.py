"""Drafts from the text itself: what followed when its end stood there before, in the prompt or in the answer."""

from __future__ import annotations

import bisect
from collections.abc import Container, Sequence

from edgeinfer.speculation.automaton import Guess, SuffixAutomaton
from edgeinfer.speculation.draft import Proposal
from edgeinfer.types import Request

_LENGTHS = (1, 2, 3, 5, 8, 16, 32)
"""Lengths of matches up to which a grade goes; longer ones share the last."""
# The acceptance of each length of match: where other tokens followed it as often, where they did rarely, and where
# nothing else has, in one, two, or more places. Measured on answers of Qwen2.5-Coder-0.5B (docs/speculation.md).
_EXPECTED = (
    (0.18, 0.80, 0.37, 0.40, 0.85),
    (0.20, 0.80, 0.56, 0.75, 0.95),
    (0.20, 0.80, 0.68, 0.88, 0.95),
    (0.30, 0.80, 0.78, 0.93, 0.97),
    (0.30, 0.80, 0.82, 0.96, 0.97),
    (0.30, 0.80, 0.90, 0.97, 0.98),
    (0.30, 0.90, 0.96, 0.98, 0.98),
    (0.30, 0.90, 0.98, 0.99, 0.99),
)
_KINDS = len(_EXPECTED[0])


class Lookup:
    """`draft.Source` over a suffix automaton of each request's text."""

    name = "lookup"
    is_free = True

    def expected(self, grade: int) -> float:
        """From measured answers."""
        return _EXPECTED[grade // _KINDS][grade % _KINDS]

    def open(self, request: Request) -> LookupDraft:
        """A request's own automaton."""
        return LookupDraft(request.end_tokens)


class LookupDraft:
    """`draft.Draft` of one text. A match of one token counts; the grades tell how long it is and what it is worth."""

    def __init__(self, end_tokens: Container[int] = frozenset()) -> None:
        self._automaton = SuffixAutomaton()
        self._end_tokens = end_tokens

    def observe(self, tokens: Sequence[int]) -> None:
        """The text has grown."""
        self._automaton.extend(tokens)

    def propose(self, max_tokens: int) -> Proposal | None:
        """What followed the longest end of the text that stood in it before; at most twice as long as that match.

        A copy that has gone on for long goes on for long; one that has just begun may end at any token.
        """
        found = []
        max_tokens = min(max_tokens, 2 * self._automaton.matched + 1)
        for guess in self._automaton.continuation(max_tokens):
            found.append(guess)
            if guess.token in self._end_tokens:
                break
        if not found:
            return None
        return Proposal(Lookup.name, tuple(guess.token for guess in found), tuple(map(grade_of, found)))

    def close(self) -> None:
        """Nothing is held outside Python."""


def grade_of(guess: Guess) -> int:
    """By the match's length, and within that by what followed it: always this token, or others too."""
    others = guess.tries - guess.seen
    kind = min(guess.seen, 3) + 1 if others == 0 else int(guess.seen > 2 * others)
    return _KINDS * bisect.bisect_left(_LENGTHS, guess.matched) + kind
