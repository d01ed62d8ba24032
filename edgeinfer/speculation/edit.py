"""Drafts for a text that is written again with changes: behind a change, the copy goes on where it was left.

After a change `Lookup` finds the place of the copy anew, by the one or two tokens that were written since, and those
stand in many places. Here the place is kept. And a change that was made before, a name for another, is made again where
the same stands in what is copied.
"""

from __future__ import annotations

import bisect
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from edgeinfer.speculation.draft import Proposal
from edgeinfer.types import Request

_ANCHOR_TOKENS = 3
"""So many tokens that stood in the text before make a place that is being copied."""
_LEAST_COPIED = 8
"""A text is written again, and not only like another, where so many tokens were copied before a change."""
_WINDOW_TOKENS = 24
"""A copy resumes within so many tokens behind the place of a change; a change that grows longer is none."""
_NEAR_TOKENS = 4
"""So long after a change its place counts; then what the last tokens match says it as well."""
_MOST_CHANGED = 6
"""Tokens of a change that is made again."""

_RUNS = (1, 2, 4, 8)
"""Tokens copied since the change up to which a grade goes."""
_RESUMED, _ONCE, _AGAIN, _REST = 1, 6, 7, 8
"""The first grade of a resumed copy; the first token of a change that was made once, or more often; its other tokens.
Grade 0 is what stands behind a token that has just been changed."""
# Measured on recorded answers (docs/speculation.md).
_EXPECTED = (0.39, 0.55, 0.78, 0.92, 0.80, 0.94, 0.12, 0.75, 0.50)


@dataclass(frozen=True, slots=True)
class _Change:
    """What was written for what, and how often."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    seen: int


class Edit:
    """`draft.Source` that follows the copying in each request's text."""

    name = "edit"
    is_free = True

    def expected(self, grade: int) -> float:
        """From measured answers."""
        return _EXPECTED[grade]

    def open(self, request: Request) -> EditDraft:
        """A request's own text."""
        return EditDraft(request.end_tokens)


class EditDraft:
    """`draft.Draft` of one text. It says something only just behind a change, or where a known change comes next."""

    def __init__(self, end_tokens: Container[int] = frozenset()) -> None:
        self._end_tokens = end_tokens
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        """Behind where the last tokens stood last."""
        self._place = -1
        """Of the text, what is copied next; -1: nothing."""
        self._run = 0
        """Tokens copied since the last change."""
        self._copied = 0
        """And before it."""
        self._origin = 0
        """Where the copy stood when the change began."""
        self._begun = 0
        """The place of the change's first token."""
        self._is_open = False
        """Whether what is written now belongs to a change."""
        self._changes: dict[int, _Change] = {}
        """By the first token that was replaced."""

    def observe(self, tokens: Sequence[int]) -> None:
        """The text has grown."""
        for token in tokens:
            self._append(token)

    def propose(self, max_tokens: int) -> Proposal | None:
        """What is copied next, with the changes that were made before; at most twice as long as the copy so far."""
        if self._place < 0 or max(self._run, self._copied) < _LEAST_COPIED:
            return None
        if self._is_open and len(self._text) - self._begun > 1:
            return None
        max_tokens = min(max_tokens, 2 * max(self._run, self._copied) + 1)
        found = []
        for token, grade in self._following():
            found.append((token, grade))
            if len(found) >= max_tokens or token in self._end_tokens:
                break
        is_near = self._copied > 0 and self._run < _NEAR_TOKENS
        if not found or not (is_near or any(grade >= _ONCE for _, grade in found)):
            return None
        tokens, grades = zip(*found, strict=True)
        return Proposal(Edit.name, tokens, grades)

    def close(self) -> None:
        """Nothing is held outside Python."""

    def _following(self) -> Iterator[tuple[int, int]]:
        """Tokens of the copy from its place on, each with its grade."""
        text = self._text
        place, run = (self._place + 1, 0) if self._is_open else (self._place, self._run)
        while place < len(text):
            change = self._changes.get(text[place]) if run else None
            if change is not None and tuple(text[place : place + len(change.old)]) == change.old:
                for i, token in enumerate(change.new):
                    yield token, _REST if i else (_AGAIN if change.seen > 1 else _ONCE)
                place += len(change.old)
            else:
                yield text[place], _RESUMED + bisect.bisect_left(_RUNS, run) if run else 0
                place += 1
            run += 1

    def _append(self, token: int) -> None:
        text = self._text
        text.append(token)
        if self._place >= 0:
            if not self._is_open and text[self._place] == token:
                self._place += 1
                self._run += 1
            else:
                self._resume()
        last = tuple(text[-_ANCHOR_TOKENS:])
        place = self._places.get(last, -1)
        self._places[last] = len(text)
        is_lost = self._place < 0 or (not self._is_open and max(self._run, self._copied) < _LEAST_COPIED)
        if place >= 0 and place != self._place and is_lost and self._run < _ANCHOR_TOKENS:
            self._place, self._run, self._copied, self._is_open = place, _ANCHOR_TOKENS, 0, False

    def _resume(self) -> None:
        """The last token is not what was to be copied: find what of the place of the change it may belong to."""
        text = self._text
        if not self._is_open and self._run > 1:  # the token that seemed to end the change before was its end
            self._copied, self._origin, self._begun = self._run, self._place, len(text) - 1
        n_written = len(text) - self._begun
        if n_written > _WINDOW_TOKENS:
            self._place, self._run, self._copied, self._is_open = -1, 0, 0, False
            return
        place, length = self._best_place(n_written)
        self._is_open = not length
        self._run = length
        self._place = place + 1 if length else self._origin
        if length:
            self._note(tuple(text[self._origin : place + 1 - length]), tuple(text[self._begun : len(text) - length]))

    def _best_place(self, n_written: int) -> tuple[int, int]:
        """Where behind the change's place most of the last tokens stand, the nearest of several; and how many do."""
        text, best, longest = self._text, -1, 0
        for place in range(self._origin, min(self._origin + _WINDOW_TOKENS, self._begun)):
            length = 0
            while length < min(n_written, place + 1 - self._origin) and text[place - length] == text[-1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
        return best, longest

    def _note(self, old: tuple[int, ...], new: tuple[int, ...]) -> None:
        """Keep a change, so that it can be made again."""
        if 0 < len(old) <= _MOST_CHANGED and len(new) <= _MOST_CHANGED:
            known = self._changes.get(old[0])
            seen = known.seen if known is not None and (known.old, known.new) == (old, new) else 0
            self._changes[old[0]] = _Change(old, new, seen + 1)
