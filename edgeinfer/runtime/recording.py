"""A sampler that remembers how probable its tokens were to the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.types import Logprobs, Sampler

MAX_LOGPROBS = 100


class RecordingSampler:
    """`types.Sampler` over another one; `entries` are the tokens that it accepted, in order."""

    def __init__(self, sampler: Sampler, n_top: int) -> None:
        self._sampler = sampler
        self._n_top = n_top
        self._chosen: Logprobs | None = None
        self.entries: list[Logprobs] = []

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._sampler.seed

    @property
    def reach(self) -> int | None:
        """How many of the largest logits the choice can depend on; None where all can matter."""
        return self._sampler.reach

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from one row of logits."""
        token = self._sampler.sample(logits)
        self._chosen = logprobs_of(logits, token, self._n_top)
        return token

    def accept(self, token: int) -> None:
        """Add a token of the answer to the history, and what is known of it to the entries."""
        self._sampler.accept(token)
        if self._chosen is not None and self._chosen.token == token:
            self.entries.append(self._chosen)
        self._chosen = None


def logprobs_of(logits: NDArray[np.float32], token: int, n_top: int) -> Logprobs:
    """The log-probabilities of a token and of the `n_top` likeliest, of equal ones those with the lower ids."""
    scores = logits.astype(np.float64)
    highest = scores.max()
    total = highest + np.log(np.exp(scores - highest).sum())
    n_top = min(n_top, len(scores))
    likeliest = np.arange(0)
    if n_top:
        least = np.partition(scores, -n_top)[-n_top]
        candidates = np.flatnonzero(scores >= least)
        likeliest = candidates[np.argsort(-scores[candidates], kind="stable")[:n_top]]
    top = tuple((int(i), float(scores[i] - total)) for i in likeliest)
    return Logprobs(token, float(scores[token] - total), top)
