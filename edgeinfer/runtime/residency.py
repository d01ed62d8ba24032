"""What the KV cache holds: the radix tree and the backend's cells, kept equal.

Every change of the cache goes through here, so that what the tree says is resident is resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeinfer.cache.block import BLOCK_TOKENS
from edgeinfer.cache.radix import Match, RadixTree
from edgeinfer.errors import EdgeinferError
from edgeinfer.types import Backend, KVOp, PrefixCache, Tokens

_EVICTED_AT_ONCE = 64
"""Cells, so that a request that grows does not evict in every step."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The KV state of positions `[p0, p1)` of a request that was swapped out."""

    p0: int
    p1: int
    data: bytes


class Residency:
    """Sequences of the backend by their numbers: some in use, some kept to be reused, the rest free."""

    def __init__(self, backend: Backend, prefix_cache: PrefixCache | None = None) -> None:
        self._backend = backend
        self._prefix_cache = prefix_cache
        self._capacity = backend.n_ctx
        self._tree = RadixTree()
        capabilities = backend.capabilities
        self._shares = capabilities.can_share and capabilities.can_trim
        self._free = list(range(capabilities.max_sequences - 1, -1, -1))

    @property
    def n_free(self) -> int:
        """Cells that no request in use holds."""
        return self._capacity - self._tree.n_referenced

    @property
    def has_sequence(self) -> bool:
        """Whether another request can have a sequence."""
        return bool(self._free or self._tree.idle())

    @property
    def shares(self) -> bool:
        """Whether requests that run can have cells in common."""
        return self._shares

    def length(self, seq_id: int) -> int:
        """How many tokens a sequence holds."""
        return self._tree.length(seq_id)

    def resident(self, tokens: Sequence[int]) -> Match:
        """Which of the first tokens need not be computed. The last one always is, for its logits."""
        limit = len(tokens) - 1
        return self._tree.match(tokens, limit) if self._shares else self._tree.match_idle(tokens, limit)

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        """A sequence for a request and how many of its tokens are in it: shared, taken over, or from the store."""
        match = self.resident(tokens)
        seq_id, length = self._share(match)
        return seq_id, self._restore(seq_id, length, np.array(tokens[:-1], np.int32))

    def remember(self, seq_id: int, tokens: Tokens | Sequence[int]) -> None:
        """Let the prefix cache keep what a sequence begins with."""
        if self._prefix_cache is not None and len(tokens):
            self._prefix_cache.remember(self._backend, seq_id, np.asarray(tokens, np.int32))

    def computed(self, seq_id: int, tokens: Sequence[int]) -> None:
        """A pass has appended tokens to a sequence."""
        self._tree.extend(seq_id, tokens)

    def cut(self, seq_id: int, length: int) -> int:
        """Forget what a sequence holds from position `length` on, or all where that cannot be. Returns what is left.

        Removes without looking at the tree: after an abort the backend may hold more than was committed.
        """
        if length and not self._backend.apply(KVOp("remove", seq_id, seq_id, length, -1)):
            length = 0
        if length == 0 and not self._backend.apply(KVOp("remove", seq_id, seq_id, 0, -1)):
            raise EdgeinferError(f"the backend does not forget sequence {seq_id}")
        self._tree.cut(seq_id, length)
        return length

    def release(self, seq_id: int) -> None:
        """A request needs its sequence no longer: keep it to be reused, unless others hold all of it."""
        self._tree.release(seq_id)
        if self._tree.is_redundant(seq_id):
            self._close(seq_id)

    def reserve(self, n_cells: int) -> None:
        """Forget ends of kept sequences, used longest ago first, until so many cells are free or nothing is left."""
        while (missing := self._tree.n_cells + n_cells - self._capacity) > 0:
            eviction = self._tree.eviction(max(missing, _EVICTED_AT_ONCE))
            if eviction is None:
                return
            for seq_id in eviction.seq_ids:
                self.cut(seq_id, eviction.length)
            for seq_id in eviction.seq_ids:
                if self._tree.is_redundant(seq_id):
                    self._close(seq_id)

    def refused(self, n_cells: int) -> None:
        """The backend had no room for so many more cells: it holds fewer than it says."""
        self._capacity = min(self._capacity, self._tree.n_cells + n_cells - 1)

    def save(self, seq_id: int) -> Saved | None:
        """What a sequence alone holds; None where the memory cannot be saved."""
        p0, p1 = self._tree.shared_length(seq_id), self._tree.length(seq_id)
        data = self._backend.save_range(seq_id, p0, p1) if p1 > p0 else None
        return None if data is None else Saved(p0, p1, data)

    def load(self, seq_id: int, saved: Saved, tokens: Sequence[int]) -> int:
        """Put back what `save` took from a request with these tokens, if it fits on. Returns the sequence's length."""
        length = self._tree.length(seq_id)
        if not saved.p0 <= length < saved.p1:
            return length
        self.reserve(saved.p1 - saved.p0)  # a backend may load all of it beside the sequence first
        loaded = self._backend.load_range(seq_id, saved.p0, saved.p1, saved.data)
        self._tree.extend(seq_id, list(tokens[length:loaded]))
        return loaded

    def _restore(self, seq_id: int, length: int, wanted: Tokens) -> int:
        """Append what the prefix cache has beyond what a sequence holds of `wanted`; returns the sequence's length."""
        if self._prefix_cache is None or (stored := self._prefix_cache.match(wanted)) <= length:
            return length
        # Each block is loaded whole beside the sequence, which then shares as much of it as it wants.
        self.reserve(-(-stored // BLOCK_TOKENS) * BLOCK_TOKENS - length // BLOCK_TOKENS * BLOCK_TOKENS)
        restored = self._prefix_cache.restore(self._backend, seq_id, wanted, length)
        self._tree.extend(seq_id, wanted[length:restored].tolist())
        return restored

    def _share(self, match: Match) -> tuple[int, int]:
        """A sequence in use that begins with what was matched, without losing anything if that can be."""
        idle = self._tree.idle()
        source, length = match.seq_id, match.length
        if source is not None:
            whole = [seq_id for seq_id in idle if self._tree.length(seq_id) == length]
            owner = source if source in whole else next((s for s in whole if self._holds_same(s, source, length)), None)
            if owner is not None:
                self._tree.hold(owner)
                return owner, length
        if not self._free:
            victim = next((seq_id for seq_id in idle if seq_id != source), None)
            if victim is None:  # nothing but the source itself can be had
                assert source is not None
                self._tree.hold(source)
                return source, self.cut(source, length)
            self._close(victim)
        seq_id = self._free.pop()
        self._backend.apply(KVOp("remove", seq_id, seq_id, 0, -1))  # somebody may have used the backend without this
        if source is not None and self._backend.apply(KVOp("copy", source, seq_id, 0, length)):
            self._tree.open(seq_id, source, length)
            return seq_id, length
        self._tree.open(seq_id)
        return seq_id, 0

    def _holds_same(self, seq_id: int, source: int, length: int) -> bool:
        return self._tree.tokens(seq_id) == self._tree.tokens(source)[:length]

    def _close(self, seq_id: int) -> None:
        self.cut(seq_id, 0)
        self._tree.close(seq_id)
        self._free.append(seq_id)
