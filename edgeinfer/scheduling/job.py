"""A request as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """Tokens to run. `tokens` is prompt and answer so far; the KV cache holds the first `n_computed` of them.

    What is left is the next thing to run: the prompt's rest while prefilling, one token while decoding, everything that
    was lost after a preemption.
    """

    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    arrived_s: float
    priority: int = 0
    """Higher goes first."""
    deadline_s: float | None = None
    """On the clock of `arrived_s`."""
    n_computed: int = 0

    @property
    def remaining(self) -> int:
        """Tokens that are known but not in the KV cache."""
        return len(self.tokens) - self.n_computed

    @property
    def n_answered(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_tokens
