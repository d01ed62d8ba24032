"""How much of which draft a step verifies: whatever brings the most tokens per millisecond, nothing included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.speculation.cost import CostCurve

LEAST_SURVIVAL = 0.01
"""Draft tokens that are less likely to be reached are not looked at."""
_MARGIN = 1.05
"""By how much a step with drafts must be expected to beat one without."""
_KERNEL_ROWS = 4
"""Kernels work on rows in fours; fewer than four are a case of their own."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best that was found: so many draft tokens, at so many expected tokens per unit of time."""

    length: int
    rate: float


def best_length(
    survival: Sequence[float], n_rows: int, curve: CostCurve, *, most_cost: float, draft_cost: float = 0.0
) -> Best:
    """How many of one or several drafts' tokens to verify in a step that has `n_rows` rows anyway.

    `survival` is the probability of each draft token to become text, largest first. In the curve's unit, `draft_cost`
    is what it still takes to draft a token, and a step with drafts may not take more than `most_cost`.
    """
    expected = float(n_rows)
    best = Best(0, _MARGIN * expected / curve.cost(n_rows))
    for length, chance in enumerate(survival, start=1):
        expected += chance
        rows = n_rows + length
        if rows % _KERNEL_ROWS and rows > _KERNEL_ROWS and length < len(survival):
            continue
        cost = curve.cost(rows) + length * draft_cost
        if cost > most_cost:
            break
        if expected / cost > best.rate:
            best = Best(length, expected / cost)
    return best


def shared_lengths(
    survivals: Sequence[Sequence[float]], n_rows: int, most_tokens: int, curve: CostCurve, most_cost: float
) -> list[int]:
    """How many tokens of each request's draft to verify, where all are verified in one pass, `most_tokens` in all.

    The likeliest tokens of all drafts come first; as survival only falls along a draft, these are beginnings of drafts.
    """
    order = sorted((-chance, i) for i, survival in enumerate(survivals) for chance in survival)[:most_tokens]
    total = best_length([-chance for chance, _ in order], n_rows, curve, most_cost=most_cost).length
    lengths = [0] * len(survivals)
    for _, i in order[:total]:
        lengths[i] += 1
    return lengths
