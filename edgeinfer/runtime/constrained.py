"""A sampler that is held to a constraint, at the price of one look at the token that it would have chosen anyway."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.types import Constraint, Sampler

_WIDE_BYTES = 33
"""Inside a string. Elsewhere so few tokens are allowed that it is cheap to find all of them."""
_MAX_REACH = 500
_LOOKED_AT, _LOOKED_AT_TOO = 4, 100
"""Times the tokens that are wanted, and some more."""


class ConstrainedSampler:
    """`types.Sampler` over another one.

    As in llama.cpp the other one chooses freely first. Where the constraint does not allow that token, it chooses
    again, among the allowed ones only. Its history is the true text either way.

    The second choice is the one that it would make of the whole row without what is not allowed. Where much is allowed
    and the sampler looks at the likeliest tokens only, those are looked for from the top, and no others.
    """

    def __init__(self, sampler: Sampler, constraint: Constraint) -> None:
        self._sampler = sampler
        self._constraint = constraint

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._sampler.seed

    @property
    def reach(self) -> int | None:
        """How many of the largest logits that are allowed the choice can depend on; None where all can matter."""
        return self._sampler.reach

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose an allowed token. Raises an EdgeinferError where there is none, or none that is not forbidden."""
        token = self._sampler.sample(logits)
        if self._constraint.allows(token):
            return token
        token = self._sampler.sample(self._only_allowed(logits))
        if not self._constraint.allows(token):
            raise UsageError("logit_bias or ignore_eos forbids all that the grammar allows", "drop one of them")
        return token

    def accept(self, token: int) -> None:
        """Add a token of the answer to the history."""
        self._sampler.accept(token)
        self._constraint.accept(token)

    def _only_allowed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits of allowed tokens, all that can matter to the sampler; of the other tokens -inf."""
        reach, constraint = self._sampler.reach, self._constraint
        if reach is not None and reach <= _MAX_REACH and constraint.n_choices >= _WIDE_BYTES:
            likeliest = self._likeliest(logits, reach)
            if likeliest is not None:
                return likeliest
        allowed = constraint.allowed()
        if not allowed.any():
            raise UnusableInputError(
                "no token of the vocabulary can go on with the answer as the grammar wants it", "allow other characters"
            )
        return np.where(allowed, logits, np.float32(-np.inf))

    def _likeliest(self, logits: NDArray[np.float32], reach: int) -> NDArray[np.float32] | None:
        """The logits of so many allowed tokens, the largest ones, and of those that are equal to the least of them.

        None where they are not among the tokens that are looked at.
        """
        n_looked_at = min(_LOOKED_AT * reach + _LOOKED_AT_TOO, len(logits))
        tokens = np.argpartition(logits, len(logits) - n_looked_at)[-n_looked_at:]
        tokens = tokens[np.argsort(-logits[tokens])]
        found = np.full_like(logits, -np.inf)
        n_found, least = 0, np.float32(np.inf)
        for token in self._constraint.allowed_of(tokens.tolist()):
            if n_found >= reach and logits[token] < least:
                return found
            found[token] = least = logits[token]
            n_found += 1
        return found if n_found >= reach and logits[tokens[-1]] < least else None
