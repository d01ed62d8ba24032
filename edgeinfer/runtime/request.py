"""What the engine knows about a request while it works on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeinfer.types import FinishReason, Request, Row, Sampler, Usage


@dataclass(slots=True, eq=False)
class Generation:
    """One request's state. The engine writes it; callers read it, also after the last event.

    `tokens` is prompt and answer so far; the KV cache holds the first `n_computed` of them. What is left is the next
    thing to run: the prompt's rest while prefilling, one token while decoding, everything after a preemption.
    """

    request: Request
    sampler: Sampler
    tokens: list[int]
    submitted_s: float
    seq_id: int | None = None
    """The sequence it owns; None while it waits."""
    n_computed: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were in the KV cache already when it was first admitted."""
    admitted: bool = False
    remembered: bool = False
    """Whether the prefix cache has been given its prompt."""
    prefilled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def prompt_tokens(self) -> int:
        """How many of `tokens` are the prompt."""
        return len(self.request.tokens)

    @property
    def completion_tokens(self) -> int:
        """How many of `tokens` are the answer."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens that are known but not in the KV cache."""
        return len(self.tokens) - self.n_computed

    @property
    def usage(self) -> Usage:
        """What it cost so far."""
        return Usage(self.prompt_tokens, self.cached_tokens, self.completion_tokens)


@dataclass(slots=True)
class Slot:
    """A sequence of the KV cache: `tokens[i]` is resident at position `i`, whoever computed it."""

    seq_id: int
    tokens: list[int] = field(default_factory=list)
    owner: Generation | None = None
    last_used: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The rows to run now, and whose they are, in the same order."""

    rows: tuple[Row, ...]
    generations: tuple[Generation, ...]
