"""What the engine knows about a request while it works on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeinfer.errors import EdgeinferError
from edgeinfer.runtime.recording import RecordingSampler
from edgeinfer.runtime.residency import Saved
from edgeinfer.scheduling.job import Job
from edgeinfer.speculation.draft import Proposal
from edgeinfer.types import FinishReason, Request, Row, Sampler, Usage


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
    remembered: int = 0
    """How much of its prompt the prefix cache has been given."""
    drafted_tokens: int = 0
    """Draft tokens that were verified."""
    accepted_tokens: int = 0
    """Those of them that became text."""
    swapped: Saved | None = None
    """Its part of the KV cache while it waits after a preemption."""
    prefilled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: FinishReason | None = None
    error: EdgeinferError | None = None
    """Why no token could be chosen; the request has ended with it."""

    @property
    def submitted_s(self) -> float:
        """When it came."""
        return self.arrived_s

    @property
    def usage(self) -> Usage:
        """What it cost so far."""
        return Usage(
            self.prompt_tokens, self.cached_tokens or 0, self.n_answered, self.drafted_tokens, self.accepted_tokens
        )


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A request's part of a step: the next `length` tokens that are known, then perhaps a draft of what follows."""

    generation: Generation
    length: int
    draft: Proposal | None
    row: Row
    """Its logits begin where the known tokens end, for there the next one is chosen."""

    @classmethod
    def of(cls, generation: Generation, length: int, draft: Proposal | None) -> Share:
        """The share with its row."""
        start = generation.n_computed
        tokens = generation.tokens[start : start + length] + list(draft.tokens if draft else ())
        assert generation.seq_id is not None
        row = Row(generation.seq_id, np.array(tokens, np.int32), start, length - (length == generation.remaining))
        return cls(generation, length, draft, row)

    @property
    def drafted(self) -> tuple[int, ...]:
        """The tokens of the draft."""
        return self.draft.tokens if self.draft else ()
