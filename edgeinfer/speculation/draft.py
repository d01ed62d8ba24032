"""What a source of drafts is: the protocol between the engine and whatever guesses how a text goes on.

A source may be wrong, slow or broken: acceptance keeps the answer exactly what the model would have written without
it, and what a source raises or proposes beside the vocabulary costs it its turn, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgeinfer.options import MAX_DRAFT_TOKENS
from edgeinfer.types import Request

_LEAST_SHARE = 3
"""Tokens that a request's draft may have in a large batch, where longer ones hardly pay and asking for them costs."""


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A guess at the next tokens of a text, the nearest one first.

    It is deterministic: what a source finds likeliest, never a token that it draws. So a token is accepted while the
    model's own choice is the same, and that is exact.
    """

    source: str
    """The `name` of the source."""
    tokens: tuple[int, ...]
    grades: tuple[int, ...]
    """How sure the source is of each token, in whole numbers of its own choice from 0 to 63: the controller keeps a
    moving estimate of the acceptance for every source and grade. Lookup grades by the length of the match, a model
    by the probability that it gave the token."""


class Draft(Protocol):
    """What one source knows of one request's text. Calls come from one thread."""

    def observe(self, tokens: Sequence[int]) -> None:
        """The text has grown by these tokens for good; the first call brings the whole prompt (and what is written).

        What was proposed and is not among them was rejected: a source with a KV cache goes back to what it has in
        common with the text. It may put off costly work until `propose`.
        """
        ...

    def propose(self, max_tokens: int) -> Proposal | None:
        """Guess the next 1 to `max_tokens` tokens after all that was observed; None for no idea.

        Fewer are right where the source is no longer sure.
        """
        ...

    def close(self) -> None:
        """The request has ended: free what it holds. Called once."""
        ...


class Source(Protocol):
    """A way to guess, shared by all requests of an engine."""

    @property
    def name(self) -> str:
        """A short word for the user: `lookup`, `layers`, the name of a file."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether a proposal takes microseconds.

        A free source is asked in every step for all it has, and the controller shortens that. Of others the controller
        asks only as many tokens as are likely to pay, given the measured time of its proposals.
        """
        ...

    def expected(self, grade: int) -> float:
        """The acceptance to assume for a grade before anything was measured, from 0 to 1."""
        ...

    def open(self, request: Request) -> Draft | None:
        """Begin to follow a request; None where the source cannot (no sequence free, say).

        `request.params` tells a source that samples how the target does. The text comes by `Draft.observe`.
        """
        ...


def most_draft_tokens(n_answers: int) -> int:
    """Of each answer, in a step that has so many of them."""
    return max(_LEAST_SHARE, MAX_DRAFT_TOKENS // max(1, n_answers))
