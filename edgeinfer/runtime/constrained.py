"""A sampler that is held to a constraint, at the price of one look at the token that it would have chosen anyway."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.types import Constraint, Sampler


class ConstrainedSampler:
    """`types.Sampler` over another one.

    As in llama.cpp the other one chooses freely first. Where the constraint does not allow that token, it chooses
    again, among the allowed ones only. Its history is the true text either way.
    """

    def __init__(self, sampler: Sampler, constraint: Constraint) -> None:
        self._sampler = sampler
        self._constraint = constraint

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._sampler.seed

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose an allowed token. Raises an EdgeinferError where there is none, or none that is not forbidden."""
        token = self._sampler.sample(logits)
        if self._constraint.allows(token):
            return token
        allowed = self._constraint.allowed()
        if not allowed.any():
            raise UnusableInputError(
                "no token of the vocabulary can go on with the answer as the grammar wants it", "allow other characters"
            )
        token = self._sampler.sample(np.where(allowed, logits, np.float32(-np.inf)))
        if not allowed[token]:
            raise UsageError("logit_bias or ignore_eos forbids all that the grammar allows", "drop one of them")
        return token

    def accept(self, token: int) -> None:
        """Add a token of the answer to the history."""
        self._sampler.accept(token)
        self._constraint.accept(token)
