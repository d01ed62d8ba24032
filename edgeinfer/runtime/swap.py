"""A preempted request's part of the KV cache: kept in memory, where that is cheaper than computing it again."""

from __future__ import annotations

from collections.abc import Callable

from edgeinfer.runtime.request import Generation
from edgeinfer.runtime.residency import Residency, Saved
from edgeinfer.scheduling.policy import Pace

MAX_NBYTES = 1 << 30
"""Of all requests together; those beyond it are computed again."""


class Swap:
    """Saves and restores, and measures what that takes."""

    def __init__(self, residency: Residency, pace: Pace, clock: Callable[[], float]) -> None:
        self._residency = residency
        self._pace = pace
        self._clock = clock
        self._nbytes = 0

    def save(self, generation: Generation) -> None:
        """Before a request gives up its sequence."""
        if generation.seq_id is None or not self._pace.swaps() or self._nbytes >= MAX_NBYTES:
            return
        started_s = self._clock()
        saved = generation.swapped = self._residency.save(generation.seq_id)
        if saved is not None:
            self._nbytes += len(saved.data)
            self._pace.observe_swap(saved.p1 - saved.p0, self._clock() - started_s)

    def restore(self, generation: Generation) -> None:
        """Once a request has a sequence again: append what was saved, if it goes on where the sequence ends."""
        saved = self.drop(generation)
        if saved is not None and generation.seq_id is not None:
            started_s = self._clock()
            generation.n_computed = self._residency.load(generation.seq_id, saved, generation.tokens)
            self._pace.observe_swap(saved.p1 - saved.p0, self._clock() - started_s)

    def drop(self, generation: Generation) -> Saved | None:
        """Free what was saved, and give it back a last time."""
        saved, generation.swapped = generation.swapped, None
        if saved is not None:
            self._nbytes -= len(saved.data)
        return saved
