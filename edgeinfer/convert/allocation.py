"""Spends a budget of bytes where it helps most: one of several options for each item, the sum of losses small.

Of each item only the options count that no other beats in both size and loss (its Pareto front). A multiplier μ, the
same for all items, says what a byte is worth: every item takes the option that makes loss + μ × bytes smallest, and the
smallest μ whose choice fits the budget is the one (Shoham and Gersho, "Efficient bit allocation for an arbitrary set of
quantizers", 1988). That is the best choice for the bytes it takes; what is left of the budget goes to the upgrades that
gain most per byte, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """What an item may become: its size, and what that loses, in any unit that adds up over the items."""

    nbytes: int
    loss: float


def reachable(items: Sequence[Sequence[Option]]) -> tuple[int, int]:
    """The bytes of the smallest and of the largest choice."""
    return sum(min(o.nbytes for o in options) for options in items), sum(
        max(o.nbytes for o in options) for options in items
    )


def allocate(items: Sequence[Sequence[Option]], budget_nbytes: int) -> list[int]:
    """Which option each item takes, by its index, so that all together they have at most `budget_nbytes`.

    Raises ValueError when not even the smallest options do.
    """
    if reachable(items)[0] > budget_nbytes:
        raise ValueError(f"not reachable with {budget_nbytes} bytes")
    fronts = [_front(options) for options in items]
    hulls = [_hull(options, front) for options, front in zip(items, fronts, strict=True)]
    chosen = _lagrange(items, hulls, budget_nbytes)
    return _filled(items, fronts, chosen, budget_nbytes)


def _front(options: Sequence[Option]) -> list[int]:
    """The options that no other one beats, by size; their losses fall strictly."""
    front: list[int] = []
    for index in sorted(range(len(options)), key=lambda i: (options[i].nbytes, options[i].loss, i)):
        if not front or options[index].loss < options[front[-1]].loss:
            front.append(index)
    return front


def _hull(options: Sequence[Option], front: Sequence[int]) -> list[int]:
    """The part of the front that some multiplier chooses: its lower convex hull."""
    hull: list[int] = []
    for index in front:
        while len(hull) > 1 and _worth(options, hull[-2], hull[-1]) <= _worth(options, hull[-2], index):
            hull.pop()
        hull.append(index)
    return hull


def _worth(options: Sequence[Option], smaller: int, larger: int) -> float:
    """The loss that a byte saves between two options."""
    saved = options[smaller].loss - options[larger].loss
    return saved / (options[larger].nbytes - options[smaller].nbytes)


def _lagrange(items: Sequence[Sequence[Option]], hulls: Sequence[Sequence[int]], budget_nbytes: int) -> list[int]:
    """The choice of the smallest multiplier that fits."""

    def choice(multiplier: float) -> list[int]:
        chosen = []
        for options, hull in zip(items, hulls, strict=True):
            steps = sum(_worth(options, a, b) > multiplier for a, b in zip(hull, hull[1:], strict=False))
            chosen.append(hull[steps])
        return chosen

    multipliers = sorted(
        {
            _worth(options, a, b)
            for options, hull in zip(items, hulls, strict=True)
            for a, b in zip(hull, hull[1:], strict=False)
        }
    )
    multipliers.insert(0, 0.0)
    low, high = 0, len(multipliers) - 1  # the largest one chooses the smallest options, which fit
    while low < high:
        middle = (low + high) // 2
        if _total_nbytes(items, choice(multipliers[middle])) <= budget_nbytes:
            high = middle
        else:
            low = middle + 1
    return choice(multipliers[high])


def _filled(
    items: Sequence[Sequence[Option]], fronts: Sequence[Sequence[int]], chosen: list[int], budget_nbytes: int
) -> list[int]:
    """The choice with the upgrades that the rest of the budget has room for."""
    left = budget_nbytes - _total_nbytes(items, chosen)
    while True:
        upgrades = (
            (_worth(options, chosen[item], index), -item, index)
            for item, (options, front) in enumerate(zip(items, fronts, strict=True))
            for index in front
            if 0 < options[index].nbytes - options[chosen[item]].nbytes <= left
        )
        best = max(upgrades, default=None)
        if best is None:
            return chosen
        _, negative, index = best
        item = -negative
        left -= items[item][index].nbytes - items[item][chosen[item]].nbytes
        chosen[item] = index


def _total_nbytes(items: Sequence[Sequence[Option]], chosen: Sequence[int]) -> int:
    return sum(options[index].nbytes for options, index in zip(items, chosen, strict=True))
