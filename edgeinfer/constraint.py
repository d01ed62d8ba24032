"""What an answer is held to, as the engine, its sampler and its drafts see it; part of `types`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """What an answer must look like, and how far it has got."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer is what it must be and nothing more may follow."""
        ...

    def allows(self, token: int) -> bool:
        """Whether the token may come next; an end token where the answer may end."""
        ...

    def allowed_of(self, tokens: Iterable[int]) -> Iterator[int]:
        """Those of some tokens that may come next, each looked at when it is asked for."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """All tokens that may come next, shape `(n_vocab,)`; costs far more than `allows`."""
        ...

    def accept(self, token: int) -> None:
        """The answer goes on with a token that is allowed."""
        ...

    def copy(self) -> Constraint:
        """One that stands where this one does, and goes on by itself."""
        ...

    @property
    def place(self) -> Hashable:
        """Where it stands in what the answer must look like, whatever is repeated there how often."""
        ...

    @property
    def n_choices(self) -> int:
        """How many bytes what comes next can begin with."""
        ...

    def forced(self) -> tuple[int, ...]:
        """The tokens of the text that must come next, cut as a tokenizer would; none where there is a choice.

        The model may cut it in other ways, and may write the last one together with what follows.
        """
        ...
