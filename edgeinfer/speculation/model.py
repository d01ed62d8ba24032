"""Drafts by a model: a smaller one of the same vocabulary, a low-bit copy of the target, or some of its own layers.

It works over any `types.Backend` of its own, with a sequence for each request it follows. Its KV cache is behind the
text most of the time: what the text has gained is read when a proposal is wanted, and what was proposed in vain is cut
off then.
"""

from __future__ import annotations

import bisect
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgeinfer.speculation.draft import Proposal
from edgeinfer.types import Backend, KVOp, Logits, Refusal, Request, Row

MAX_READ_TOKENS = 64
"""What is read of a text at a time: a long prompt must not hold up the other requests of a step, nor an interrupt."""
_LEAST_SURVIVAL = 0.4
"""Where the tokens of a proposal together are less likely than that, the next one is not worth a pass."""
# Probabilities at which the next grade begins.
_GRADES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)


@dataclass(slots=True, eq=False)
class _Slot:
    """A sequence of the draft model, and the tokens that it holds; they stay when its request ends."""

    seq_id: int
    held: list[int] = field(default_factory=list)


class ModelSource:
    """`draft.Source` over a backend that nobody else uses; `n_vocab` is the target's."""

    is_free = False

    def __init__(self, name: str, backend: Backend, n_vocab: int) -> None:
        self.name = name
        self.backend = backend
        self.n_vocab = min(n_vocab, backend.n_vocab)
        self._idle = [_Slot(seq_id) for seq_id in range(backend.capabilities.max_sequences)]

    def expected(self, grade: int) -> float:
        """A little less than the probability that the draft model gives it."""
        edges = (0.0, *_GRADES, 1.0)
        return 0.95 * (edges[grade] + edges[grade + 1]) / 2

    def open(self, request: Request) -> ModelDraft | None:
        """Follow a request in the idle sequence that holds most of its prompt; None where all are in use."""
        self.backend.clear_abort()  # it was meant for requests that have ended since
        if not self._idle:
            return None
        tokens = request.tokens.tolist()
        slot = max(self._idle, key=lambda slot: (_n_same(slot.held, tokens), -len(slot.held)))
        self._idle.remove(slot)
        return ModelDraft(self, slot, request.end_tokens)

    def release(self, slot: _Slot) -> None:
        """A request has ended."""
        self._idle.append(slot)

    def extend(self, slot: _Slot, tokens: Sequence[int]) -> Logits | None:
        """Append tokens to a sequence; the logits after the last one, or None where that cannot be.

        Where the cache is full, what ended requests left in it makes room.
        """
        length = len(tokens)
        row = Row(slot.seq_id, np.array(tokens, np.int32), len(slot.held), length - 1)
        result = self.backend.forward([row])
        if result is Refusal.NO_ROOM and any(idle.held for idle in self._idle):
            for idle in self._idle:
                self.cut(idle, 0)
            result = self.backend.forward([row])
        if isinstance(result, Refusal):
            self.cut(slot, len(slot.held))
            return None
        slot.held += tokens
        last: Logits = result[-1]
        return last

    def cut(self, slot: _Slot, length: int) -> None:
        """Forget what a sequence holds from `length` on; all of it where the memory does not do that."""
        if not length or not self.backend.apply(KVOp("remove", slot.seq_id, slot.seq_id, length, -1)):
            length = 0
            self.backend.apply(KVOp("remove", slot.seq_id, slot.seq_id, 0, -1))
        del slot.held[length:]


class ModelDraft:
    """`draft.Draft` of one text: the draft model's likeliest tokens, graded by how likely it says they are."""

    def __init__(self, source: ModelSource, slot: _Slot, end_tokens: Container[int]) -> None:
        self._source = source
        self._slot = slot
        self._end_tokens = end_tokens
        self._text: list[int] = []
        self._n_read = 0
        """So many tokens of the text are known to be what the sequence begins with."""
        self._is_over = False

    def observe(self, tokens: Sequence[int]) -> None:
        """The text has grown; it is read when a proposal is wanted."""
        self._text += tokens

    def propose(self, max_tokens: int) -> Proposal | None:
        """The likeliest continuation. None while the text is still being read, and once the cache is full."""
        logits = None if self._is_over else self._read()
        if logits is None:
            return None
        tokens: list[int] = []
        grades: list[int] = []
        survival = 1.0
        while True:
            token, chance = _likeliest(logits[: self._source.n_vocab])
            tokens.append(token)
            grades.append(bisect.bisect_right(_GRADES, chance))
            survival *= chance
            if len(tokens) >= max_tokens or survival < _LEAST_SURVIVAL or token in self._end_tokens:
                break
            logits = self._source.extend(self._slot, [token])
            if logits is None:
                break
        return Proposal(self._source.name, tuple(tokens), tuple(grades))

    def close(self) -> None:
        """Let another request have the sequence."""
        self._is_over = True
        self._source.release(self._slot)

    def _read(self) -> Logits | None:
        """Take back what did not become text and read on, up to the text's end; its logits, None while short of it."""
        slot, text = self._slot, self._text
        self._n_read = _n_same(slot.held, text, min(self._n_read, len(slot.held)))
        length = min(self._n_read, len(text) - 1)  # the last token is read (again), for its logits
        if length < len(slot.held):
            self._source.cut(slot, length)
        start = len(slot.held)
        end = min(len(text), start + MAX_READ_TOKENS, start + self._source.backend.max_batch_tokens)
        logits = self._source.extend(slot, text[start:end])
        self._n_read = len(slot.held)
        if logits is None:
            self._source.cut(slot, 0)
            self._is_over = True
        return logits if end == len(text) else None


def _n_same(a: Sequence[int], b: Sequence[int], known: int = 0) -> int:
    """How many first tokens two texts have in common, `known` of them known already."""
    limit = min(len(a), len(b))
    same = known
    while same < limit and a[same] == b[same]:
        same += 1
    return same


def _likeliest(logits: NDArray[np.float32]) -> tuple[int, float]:
    """The likeliest token of a row of logits, and its probability."""
    token = int(logits.argmax())
    return token, 1 / float(np.exp(logits - logits[token]).sum())
