"""How often the tokens of a source were right: moving estimates per source and grade, of one request and of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_KEPT = 0.93
"""Weight that an observation of a request keeps when the next one of its kind comes: the last dozen or so count."""
_KEPT_OF_ALL = 0.995
_FIRST_WEIGHT = 6.0
"""What is assumed at first counts as so many observations."""
_GENERAL_WEIGHT = 4.0
"""What all requests brought counts as so many observations of this one."""
_FIRST_AVERAGE = 0.6
_ANY_GRADE = -1


class Acceptance:
    """Estimates of one request, over those of the engine's earlier ones (`general`), over what a source assumes."""

    def __init__(
        self, expected: Callable[[str, int], float] = lambda source, grade: 0.5, general: Acceptance | None = None
    ) -> None:
        self._expected = expected
        self._general = general
        self._seen: dict[tuple[str, int], tuple[float, float]] = {}
        """Right ones and all, weighted by age."""

    def chance(self, source: str, grade: int) -> float:
        """The probability that a token of this grade is right, if those before it were."""
        general = self._expected(source, grade) if self._general is None else self._general.chance(source, grade)
        return self._estimate((source, grade), general)

    def average(self, source: str) -> float:
        """The probability that a token of this source is right, whatever its grade."""
        general = _FIRST_AVERAGE if self._general is None else self._general.average(source)
        return self._estimate((source, _ANY_GRADE), general)

    def survival(self, source: str, grades: Sequence[int], least: float) -> list[float]:
        """For each token, the probability that it and all before it are right; ends where that falls below `least`."""
        chances: dict[int, float] = {}
        found = []
        survives = 1.0
        for grade in grades:
            chance = chances.get(grade)
            if chance is None:
                chance = chances[grade] = self.chance(source, grade)
            survives *= chance
            if survives < least:
                break
            found.append(survives)
        return found

    def observe(self, source: str, grade: int, right: bool) -> None:
        """A token of this grade, with all before it right, turned out to be right or wrong."""
        kept = _KEPT_OF_ALL if self._general is None else _KEPT
        for key in ((source, grade), (source, _ANY_GRADE)):
            hits, tries = self._seen.get(key, (0.0, 0.0))
            self._seen[key] = kept * hits + right, kept * tries + 1
        if self._general is not None:
            self._general.observe(source, grade, right)

    def _estimate(self, key: tuple[str, int], general: float) -> float:
        right, tries = self._seen.get(key, (0.0, 0.0))
        weight = _FIRST_WEIGHT if self._general is None else _GENERAL_WEIGHT
        return (right + weight * general) / (tries + weight)
