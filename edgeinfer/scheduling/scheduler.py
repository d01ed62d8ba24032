"""Iteration-level batching: who is let in, whose tokens run in the next step, who has to give way.

The scheduler changes its two lists and nothing else: computing, copying and removing are its caller's, which tells it
how much of a request's tokens is there already (`Cached`) and how much room there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from edgeinfer.errors import OverloadError
from edgeinfer.scheduling.job import Job
from edgeinfer.scheduling.policy import (
    HEADROOM_TOKENS,
    MIN_SHARED_TOKENS,
    Limits,
    Pace,
    expected_tokens,
    level,
    prefill_budget,
    urgency,
)

J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True)
class Cached:
    """How many of a request's tokens are resident, and how many will be once the running requests are prefilled."""

    resident: int
    coming: int
    in_use: int
    """Those of the resident ones whose cells a running request holds: the others are among the free ones."""


class Scheduler(Generic[J]):
    """Requests that wait and requests that run."""

    def __init__(self, limits: Limits, pace: Pace) -> None:
        self.limits = limits
        self.pace = pace
        self.waiting: list[J] = []
        self.running: list[J] = []
        """In the order of admission."""

    @property
    def has_place(self) -> bool:
        """Whether another request may run."""
        return len(self.running) < self.limits.max_running

    def enqueue(self, job: J) -> None:
        """Let a request wait. Raises OverloadError when too many do."""
        if len(self.waiting) >= self.limits.max_waiting:
            raise OverloadError(
                f"{len(self.waiting)} requests are waiting, more are not taken", "send it again later, or fewer at once"
            )
        self.waiting.append(job)

    def choose(self, now_s: float, cached: Callable[[J], Cached], n_free: int) -> J | None:
        """The request to let in now, None when it has to wait. `n_free` cells are not held by a running request.

        By priority and deadline; among equals whoever finds most of its prompt computed, then the one that is likely
        done first. One that only lacks room is not overtaken. One whose prompt begins like another that is being
        computed waits for that, and takes it over.
        """
        if not self.waiting or not self.has_place:
            return None
        found = {id(job): cached(job) for job in self.waiting}

        def order(job: J) -> tuple[tuple[int, float], int, float]:
            resident = found[id(job)].resident
            work = len(job.tokens) - resident + expected_tokens(job, self.pace.answer_tokens)
            return urgency(job, now_s), -resident if resident >= MIN_SHARED_TOKENS else 0, work

        for job in sorted(self.waiting, key=order):
            known = found[id(job)]
            if known.coming >= known.resident + MIN_SHARED_TOKENS:
                continue
            return job if self._fits(job, known.in_use, n_free) else None
        return None

    def outranked(self, now_s: float) -> J | None:
        """The running request that must give its place to a waiting one of higher priority, if there is one.

        Only the given priority counts for the one that waits, so that two requests cannot take turns by ageing.
        """
        if self.has_place or not self.waiting:
            return None
        wanted = max(job.priority for job in self.waiting)
        if wanted <= min(job.priority for job in self.running):
            return None
        lowest = self.victim(now_s)
        return lowest if wanted > level(lowest, now_s) else None

    def lacks_room(self, n_free: int) -> bool:
        """Whether a running request must give way, because not even one token of every answer has room."""
        n_decoding = sum(job.remaining == 1 for job in self.running)
        return len(self.running) > 1 and n_free < max(1, n_decoding)

    def victim(self, now_s: float) -> J:
        """The running request that matters least: the lowest priority, then the one that came last."""
        lowest = min(enumerate(self.running), key=lambda at: (level(at[1], now_s), -at[1].arrived_s, -at[0]))
        return lowest[1]

    def start(self, job: J) -> None:
        """A waiting request runs."""
        self.waiting.remove(job)
        self.running.append(job)

    def suspend(self, job: J) -> None:
        """A running request waits again."""
        self.running.remove(job)
        self.waiting.insert(0, job)

    def forget(self, job: J) -> None:
        """A request has ended, wherever it was."""
        (self.running if job in self.running else self.waiting).remove(job)

    @property
    def decoding(self) -> list[J]:
        """The running requests whose next token is known: each has a row of every step."""
        return [job for job in self.running if job.remaining == 1]

    def rows(self, now_s: float, n_free: int, n_drafted: int = 0) -> list[tuple[J, int]]:
        """Whose tokens run now, and how many: one of every answer, then prompts in pieces, at most `n_free` in all.

        `n_drafted` rows of the step are drafts of those answers.
        """
        rows = [(job, 1) for job in self.decoding]
        if len(rows) == len(self.running):
            return rows
        prefilling = [job for job in self.running if job.remaining > 1]
        if len(prefilling) > 1:
            prefilling.sort(key=lambda job: urgency(job, now_s))
        budget = prefill_budget(self.limits, self.pace, len(rows), n_drafted, prefilling[0].n_computed)
        left = min(budget, n_free - len(rows) - n_drafted)
        for job in prefilling:
            length = min(job.remaining, left)
            if length <= 0:
                break
            rows.append((job, length))
            left -= length
        return rows

    def _fits(self, job: J, in_use: int, n_free: int) -> bool:
        """Whether the request has room beside what the running ones still have to compute. Alone it always has."""
        if not self.running:
            return True
        promised = sum(run.remaining + _headroom(run) for run in self.running)
        return len(job.tokens) - in_use + _headroom(job) + promised <= n_free


def _headroom(job: Job) -> int:
    return min(HEADROOM_TOKENS, job.max_tokens - job.n_answered)
