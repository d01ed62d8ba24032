"""Spends a budget of bytes where it helps most: one of several options for each item, the sum of losses small.

Of each item only the options count that no other beats in both size and loss (its Pareto front). A multiplier μ, the
same for all items, says what a byte is worth: every item takes the option that makes loss + μ × bytes smallest, and the
smallest μ whose choice fits the budget is the one (Shoham and Gersho, "Efficient bit allocation for an arbitrary set of
quantizers", 1988). That is the best choice for the bytes it takes; what is left of the budget goes to the upgrades that
gain most per byte, one after the other.

An upgrade that is a large part of the budget can leave much of it over, because it just doesn't fit. So the options of
the few largest items are tried one by one, with the multiplier that then fits the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

N_LARGEST = 2
"""An embedding and a head."""


@dataclass(frozen=True, slots=True)
class Option:
    """What an item may become: its size, and what that loses, in any unit that adds up over the items."""

    nbytes: int
    loss: float


Items = Sequence[Sequence[Option]]


@dataclass(frozen=True, slots=True)
class _Step:
    """From one option on an item's hull to the next larger one."""

    worth: float
    """The loss that a byte saves."""
    item: int
    to: int
    nbytes: int


def smallest_nbytes(items: Items) -> int:
    """The bytes that all items have together at least."""
    return sum(min(option.nbytes for option in options) for options in items)


def allocate(items: Items, budget_nbytes: int) -> list[int]:
    """Which option each item takes, by its index, so that all together they have at most `budget_nbytes`.

    Raises ValueError when not even the smallest options do.
    """
    if smallest_nbytes(items) > budget_nbytes:
        raise ValueError(f"nothing fits {budget_nbytes} bytes")
    fronts = [_front(options) for options in items]
    largest = sorted(
        range(len(items)), key=lambda i: (items[i][fronts[i][0]].nbytes - items[i][fronts[i][-1]].nbytes, i)
    )
    largest = largest[:N_LARGEST]
    others = [item for item in range(len(items)) if item not in largest]
    # In this order a falling multiplier takes them.
    steps = sorted(
        (step for item in others for step in _steps(items[item], fronts[item], item)),
        key=lambda step: (-step.worth, step.item, step.nbytes),
    )
    spent = [0, *accumulate(step.nbytes for step in steps)]
    saved = [0.0, *accumulate(step.worth * step.nbytes for step in steps)]
    tried: list[tuple[float, list[int], int]] = []
    for picks in product(*(fronts[item] for item in largest)):
        chosen = [front[0] for front in fronts]
        for item, pick in zip(largest, picks, strict=True):
            chosen[item] = pick
        room = budget_nbytes - _total_nbytes(items, chosen)
        if room >= 0:
            count = bisect_right(spent, room) - 1
            rest = steps[count].worth * (room - spent[count]) if count < len(steps) else 0.0
            tried.append((_total_loss(items, chosen) - saved[count] - rest, chosen, count))
    best: list[int] = []
    for bound, chosen, count in sorted(tried, key=lambda trial: trial[0]):
        if best and bound >= _total_loss(items, best):
            break  # nor do the others lose less, whatever fills their rest
        for step in steps[:count]:
            chosen[step.item] = step.to
        _fill(items, fronts, others, chosen, budget_nbytes)
        if not best or _total_loss(items, chosen) < _total_loss(items, best):
            best = chosen
    return best


def _front(options: Sequence[Option]) -> list[int]:
    """The options that no other one beats, by size; their losses fall strictly."""
    front: list[int] = []
    for index in sorted(range(len(options)), key=lambda i: (options[i].nbytes, options[i].loss, i)):
        if not front or options[index].loss < options[front[-1]].loss:
            front.append(index)
    return front


def _steps(options: Sequence[Option], front: Sequence[int], item: int) -> list[_Step]:
    """The steps along the lower convex hull of a front: what some multiplier chooses."""
    hull: list[int] = []
    for index in front:
        while len(hull) > 1 and _worth(options, hull[-2], hull[-1]) <= _worth(options, hull[-2], index):
            hull.pop()
        hull.append(index)
    return [_Step(_worth(options, a, b), item, b, options[b].nbytes - options[a].nbytes) for a, b in pairwise(hull)]


def _worth(options: Sequence[Option], smaller: int, larger: int) -> float:
    """The loss that a byte saves between two options."""
    saved = options[smaller].loss - options[larger].loss
    return saved / (options[larger].nbytes - options[smaller].nbytes)


def _fill(
    items: Items, fronts: Sequence[Sequence[int]], others: Sequence[int], chosen: list[int], budget_nbytes: int
) -> None:
    """Make the upgrades of `others` that the rest of the budget has room for."""
    left = budget_nbytes - _total_nbytes(items, chosen)
    while True:
        upgrades = (
            (_worth(items[item], chosen[item], index), -item, index)
            for item in others
            for index in fronts[item]
            if 0 < items[item][index].nbytes - items[item][chosen[item]].nbytes <= left
        )
        best = max(upgrades, default=None)
        if best is None:
            return
        _, negative, index = best
        item = -negative
        left -= items[item][index].nbytes - items[item][chosen[item]].nbytes
        chosen[item] = index


def _total_nbytes(items: Items, chosen: Sequence[int]) -> int:
    return sum(options[index].nbytes for options, index in zip(items, chosen, strict=True))


def _total_loss(items: Items, chosen: Sequence[int]) -> float:
    return sum(options[index].loss for options, index in zip(items, chosen, strict=True))
