"""What the engine knows about a request while it works on it."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.runtime.recording import RecordingSampler
from edgeinfer.runtime.residency import Saved
from edgeinfer.scheduling.job import Job
from edgeinfer.types import FinishReason, Request, Sampler, Usage


@dataclass(slots=True, eq=False, kw_only=True)
class Generation(Job):
    """One request's state. The engine writes it; callers read it, also after the last event."""

    request: Request
    sampler: Sampler
    recorder: RecordingSampler | None = None
    """Where the sampler keeps the probabilities, if they were asked for."""
    seq_id: int | None = None
    """The sequence it owns; None while it waits."""
    cached_tokens: int | None = None
    """Prompt tokens that needed no computing when it was first admitted."""
    remembered: bool = False
    """Whether the prefix cache has been given its prompt."""
    swapped: Saved | None = None
    """Its part of the KV cache while it waits after a preemption."""
    prefilled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def submitted_s(self) -> float:
        """When it came."""
        return self.arrived_s

    @property
    def usage(self) -> Usage:
        """What it cost so far."""
        return Usage(self.prompt_tokens, self.cached_tokens or 0, self.n_answered)
