"""Drafts from what an answer is held to: what it leaves no choice about, and what the answer chose there before."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field

from edgeinfer.speculation.draft import Proposal
from edgeinfer.types import Constraint, Request

_FORCED, _BORDER, _NARROW = 0, 1, 2
_ORDERS = (12, 6, 3, 2, 1, 0)
"""How many tokens before a place have to be the same too, the longest first."""
# The acceptance of a token that the grammar forces; of the last one of such a text, which the model may write together
# with what follows; of one that stood before at a place with little choice, where others did as often, or rarely, or
# nothing else has, once, twice, or more often; and, for every order, of the same at a place with much choice.
_FIRST_EXPECTED = (0.95, 0.80, 0.40, 0.85, 0.88, 0.95, 0.97)
_EXPECTED_BY_ORDER = (
    (0.30, 0.90, 0.96, 0.97, 0.98),
    (0.30, 0.85, 0.93, 0.96, 0.97),
    (0.25, 0.80, 0.85, 0.93, 0.96),
    (0.20, 0.80, 0.80, 0.90, 0.96),
    (0.20, 0.75, 0.70, 0.85, 0.95),
    (0.10, 0.70, 0.50, 0.75, 0.90),
)
_EXPECTED = (*_FIRST_EXPECTED, *(chance for chances in _EXPECTED_BY_ORDER for chance in chances))
_KINDS = len(_EXPECTED_BY_ORDER[0])
_NARROW_BYTES = 6
"""A blank, a quotation mark, one of a few words: not what a string or a number goes on with."""
_MAX_CHOICES = 1 << 14  # a few megabytes for each answer
_LEAST_SURVIVAL = 0.1
"""Where the tokens of a proposal together are expected to be less likely than that, the next one is not looked for."""


@dataclass(slots=True)
class _Choices:
    """How often each token stood at a place."""

    counts: dict[int, int] = field(default_factory=dict)
    tries: int = 0
    likeliest: int = -1
    """The later one of two."""

    def add(self, token: int) -> None:
        self.tries += 1
        self.counts[token] = self.counts.get(token, 0) + 1
        if self.counts[token] >= self.counts.get(self.likeliest, 0):
            self.likeliest = token

    @property
    def kind(self) -> int:
        seen = self.counts[self.likeliest]
        others = self.tries - seen
        return min(seen, 3) + 1 if others == 0 else int(seen > 2 * others)


class Structure:
    """`draft.Source` over the constraints of requests; without one, it has nothing to say."""

    name = "grammar"
    is_free = True

    def expected(self, grade: int) -> float:
        """More where the grammar leaves no choice; the rest as lookup's."""
        return _EXPECTED[grade]

    def open(self, request: Request) -> StructureDraft | None:
        """Follow a request that is held to something."""
        if request.constraint is None:
            return None
        return StructureDraft(request.constraint, request.end_tokens)


class StructureDraft:
    """`draft.Draft` of one answer.

    Records of a list are written alike, so what the answer chose at a place of its grammar (a blank, how a text is cut
    into tokens, a common value) is likely to be chosen there again. What has not been there before is written as the
    tokenizer writes it, if the grammar forces it.
    """

    def __init__(self, constraint: Constraint, end_tokens: Container[int] = frozenset()) -> None:
        self._constraint = constraint.copy()
        self._end_tokens = end_tokens
        self._choices: dict[tuple[Hashable, tuple[int, ...]], _Choices] = {}
        self._before: tuple[int, ...] = ()
        """The last tokens of the text."""
        self._has_begun = False

    def observe(self, tokens: Sequence[int]) -> None:
        """The answer has grown. What the first call brings, the constraint has seen already."""
        for token in tokens if self._has_begun else ():
            place, before = self._constraint.place, self._before
            for order in _ORDERS:
                if order <= len(before):
                    self._choices_at((place, before[len(before) - order :])).add(token)
            self._constraint.accept(token)
            self._before = (*self._before, token)[-_ORDERS[0] :]
        if not self._has_begun:
            self._before = tuple(tokens[-_ORDERS[0] :])
            self._has_begun = True

    def _choices_at(self, key: tuple[Hashable, tuple[int, ...]]) -> _Choices:
        choices = self._choices.pop(key, None) or _Choices()
        if len(self._choices) >= _MAX_CHOICES:
            del self._choices[next(iter(self._choices))]
        self._choices[key] = choices  # the newest last
        return choices

    def propose(self, max_tokens: int) -> Proposal | None:
        """The likeliest continuation, as far as there is one."""
        ahead, before = self._constraint.copy(), self._before
        tokens: list[int] = []
        grades: list[int] = []
        survival = 1.0
        while len(tokens) < max_tokens and survival >= _LEAST_SURVIVAL and not ahead.is_complete:
            found = self._next(ahead, before)
            if not found:
                break
            for token, grade in found:
                if token in self._end_tokens or not ahead.allows(token):  # a place does not know what was counted
                    return _proposal(tokens, grades)
                ahead.accept(token)
                before = (*before, token)[-_ORDERS[0] :]
                tokens.append(token)
                grades.append(grade)
                survival *= _EXPECTED[grade]
        return _proposal(tokens, grades)

    def close(self) -> None:
        """Nothing is held outside Python."""

    def _next(self, ahead: Constraint, before: tuple[int, ...]) -> list[tuple[int, int]]:
        """The next tokens with their grades; none where nothing is known."""
        place = ahead.place
        if ahead.n_choices <= _NARROW_BYTES:
            known = self._choices.get((place, before[-1:])) or self._choices.get((place, ()))
            if known is not None:
                return [(known.likeliest, _NARROW + known.kind)]
            forced = ahead.forced()
            return [*((token, _FORCED) for token in forced[:-1]), *((token, _BORDER) for token in forced[-1:])]
        for number, order in enumerate(_ORDERS):
            known = self._choices.get((place, before[len(before) - order :])) if order <= len(before) else None
            if known is not None:
                return [(known.likeliest, len(_FIRST_EXPECTED) + number * _KINDS + known.kind)]
        return []


def _proposal(tokens: list[int], grades: list[int]) -> Proposal | None:
    return Proposal(Structure.name, tuple(tokens), tuple(grades)) if tokens else None
