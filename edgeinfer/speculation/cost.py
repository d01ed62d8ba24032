"""What a pass over some rows takes, relative to a pass over one: assumed at first, learned from every step."""

from __future__ import annotations

import itertools
import math

# Rows and the time of a pass over them: Qwen2.5-0.5B Q4_K_M on two cores of a server (x86, AVX-512).
_ASSUMED = {1: 1.0, 2: 1.3, 3: 1.5, 4: 1.65, 8: 2.55, 12: 3.4, 16: 4.1, 24: 5.8, 32: 7.3, 48: 9.5, 64: 12.0, 128: 23.0}
_KERNEL_ROWS = 4
_KNOTS = tuple(_ASSUMED)
MAX_ROWS = _KNOTS[-1]
# Of the newest step: in the time of one row, if it was one or if it was more, and in the shape of the curve.
_UNIT_WEIGHT, _OTHER_UNIT_WEIGHT, _SHAPE_WEIGHT = 0.3, 0.1, 0.1
_FIRST_SHAPE_WEIGHT = 0.5
"""Of the first step near a part of the curve that is only assumed; of the second it is half that, then a third."""
_OUTLIER = 2.0
"""A step that took more than so many times what was expected, or less than that part, counts as if it had just that."""


class CostCurve:
    """The relative cost of 1 to `MAX_ROWS` rows; beyond, the last slope goes on.

    The speed of the machine changes, by its temperature and by what else runs; the shape of the curve hardly does. So
    the time of one row follows quickly, and the shape slowly.
    """

    def __init__(self, shape: dict[int, float] | None = None) -> None:
        known = {rows: max(1.0, cost) for rows, cost in (shape or {}).items() if rows > 1}  # one row is the unit
        self._at = {rows: known.get(rows, cost) for rows, cost in _ASSUMED.items()}
        self._seen = {rows: _FIRST_SHAPE_WEIGHT / _SHAPE_WEIGHT if rows in known else 0.0 for rows in _ASSUMED}
        """How many steps there were near it."""
        self.unit_s: float | None = None
        """Seconds of a pass over one row."""
        self._table: list[float] = []
        self._fill()

    @property
    def shape(self) -> dict[int, float]:
        """What was learned: the cost at some numbers of rows, for `CostCurve(shape)`."""
        return {rows: round(cost, 4) for rows, cost in self._at.items() if self._seen[rows]}

    def cost(self, rows: int) -> float:
        """What a pass over so many rows takes, where one row takes 1."""
        if rows <= MAX_ROWS:
            return self._table[rows]
        return self._table[MAX_ROWS] + (rows - MAX_ROWS) * (self._table[MAX_ROWS] - self._table[MAX_ROWS - 1])

    def seconds(self, rows: int) -> float:
        """How long a pass over so many rows takes; infinity before anything was seen."""
        return math.inf if self.unit_s is None else self.unit_s * self.cost(rows)

    def observe(self, rows: int, seconds: float) -> None:
        """A pass over so many rows took so long. Kernels work on rows in fours: what does not fit says little."""
        if not 1 <= rows <= MAX_ROWS or seconds <= 0 or (rows > _KERNEL_ROWS and rows % _KERNEL_ROWS):
            return
        if self.unit_s is None:
            self.unit_s = seconds / self.cost(rows)
            return
        ratio = min(max(seconds / (self.unit_s * self.cost(rows)), 1 / _OUTLIER), _OUTLIER)
        self.unit_s *= 1 + (_UNIT_WEIGHT if rows == 1 else _OTHER_UNIT_WEIGHT) * (ratio - 1)
        if rows > 1:
            self._bend(rows, ratio)

    def _bend(self, rows: int, ratio: float) -> None:
        """Change the curve at some rows towards `ratio` times what it is, the nearer knot more."""
        above = next(knot for knot in _KNOTS if knot >= rows)
        below = max(knot for knot in _KNOTS if knot <= rows)
        share = 1.0 if above == below else (rows - below) / (above - below)
        for knot, part in ((above, share), (below, 1 - share)):
            if knot > 1 and part > 0:
                weight = max(_SHAPE_WEIGHT, _FIRST_SHAPE_WEIGHT / (1 + self._seen[knot]))
                self._at[knot] = max(1.0, self._at[knot] * (1 + part * weight * (ratio - 1)))
                self._seen[knot] += part
        self._fill()

    def _fill(self) -> None:
        """The table of all rows.

        What was seen counts, also where more rows take less time: four fill a kernel that three leave a part of empty.
        Numbers of rows that were not seen take no less than fewer do.
        """
        costs: list[float] = []
        for rows, cost in self._at.items():
            costs.append(cost if self._seen[rows] or not costs else max(cost, costs[-1]))
        for i in range(len(costs) - 2, 0, -1):  # rows that fill kernels take no more than more rows that were seen
            if _KNOTS[i] % _KERNEL_ROWS == 0 and self._seen[_KNOTS[i + 1]]:
                costs[i] = min(costs[i], costs[i + 1])
        self._table = [0.0]
        for (below, above), (low, high) in zip(itertools.pairwise(_KNOTS), itertools.pairwise(costs), strict=True):
            self._table += [low + (high - low) * i / (above - below) for i in range(above - below)]
        self._table.append(costs[-1])
