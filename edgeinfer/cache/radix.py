"""A radix tree of the tokens that sequences hold in a unified KV cache.

A node is a run of cells: `tokens` at positions `start, start + 1, …`, held by every sequence in `sequences`. A sequence
is a path from the root, and whoever holds a node holds all above it. So what two sequences share is one node, and the
lengths of all nodes together are the cells in use. Two sequences that computed the same tokens side by side hold two
copies: two children of one node may begin with the same token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FIRST_SLICE = 16


@dataclass(frozen=True, slots=True)
class Match:
    """The first `length` tokens of what was asked for are held by `seq_id` (None when `length` is 0)."""

    length: int
    seq_id: int | None
    in_use: int = 0
    """So many of them are held by a sequence in use."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Cutting these sequences to `length` frees cells that nobody computes on."""

    seq_ids: tuple[int, ...]
    length: int


@dataclass(slots=True, eq=False)
class _Node:
    start: int
    tokens: list[int]
    parent: _Node | None
    children: list[_Node]
    sequences: set[int]
    references: int = 0
    """How many of `sequences` are in use."""
    last_used: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True)
class _Path:
    """A sequence: it ends where `leaf` ends."""

    leaf: _Node
    in_use: bool


class RadixTree:
    """Sequences by their numbers. One in use grows; one that is not waits to be shared, taken over or evicted."""

    def __init__(self) -> None:
        self._root = _Node(0, [], None, [], set())
        self._paths: dict[int, _Path] = {}
        self._ticks = 0
        self._n_cells = 0
        self._n_referenced = 0

    @property
    def n_cells(self) -> int:
        """Cells in use."""
        return self._n_cells

    @property
    def n_referenced(self) -> int:
        """Those of them that a sequence in use holds."""
        return self._n_referenced

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._paths

    def length(self, seq_id: int) -> int:
        """How many tokens a sequence holds."""
        return self._paths[seq_id].leaf.end

    def tokens(self, seq_id: int) -> list[int]:
        """The tokens of a sequence."""
        pieces = [node.tokens for node in self._up(self._paths[seq_id].leaf)]
        return [token for piece in reversed(pieces) for token in piece]

    def idle(self) -> list[int]:
        """The sequences that are not in use, the one that was used longest ago first."""
        idle = [seq_id for seq_id, path in self._paths.items() if not path.in_use]
        return sorted(idle, key=lambda seq_id: self._paths[seq_id].leaf.last_used)

    def match(self, tokens: Sequence[int], limit: int) -> Match:
        """The longest beginning of `tokens[:limit]` that some sequence holds."""
        best, best_length = None, 0
        branches = [self._root]
        while branches:
            node = branches.pop()
            depth = node.end
            if depth >= limit:
                continue
            first = tokens[depth]
            for child in node.children:
                if child.tokens[0] != first:
                    continue
                length = depth + common_length(child.tokens, tokens, depth, limit)
                if length > best_length:
                    best, best_length = child, length
                if length == child.end:
                    branches.append(child)
        if best is None:
            return Match(0, None)
        in_use = next((min(node.end, best_length) for node in self._up(best) if node.references), 0)
        return Match(best_length, next(iter(best.sequences)), in_use)

    def match_idle(self, tokens: Sequence[int], limit: int) -> Match:
        """The longest sequence, not in use, that is as a whole a beginning of `tokens[:limit]`."""
        best = Match(0, None)
        for seq_id, path in self._paths.items():
            length = path.leaf.end
            if not path.in_use and best.length < length <= limit and self.tokens(seq_id) == list(tokens[:length]):
                best = Match(length, seq_id)
        return best

    def open(self, seq_id: int, source: int | None = None, length: int = 0) -> None:
        """Begin a sequence, in use, that shares the first `length` tokens of `source`."""
        assert seq_id not in self._paths
        leaf = self._root
        if source is not None and length:
            leaf = self._boundary(source, length)
        self._ticks += 1
        for node in self._up(leaf):
            node.sequences.add(seq_id)
        self._paths[seq_id] = _Path(leaf, in_use=False)
        self.hold(seq_id)

    def hold(self, seq_id: int) -> None:
        """Take a sequence into use."""
        path = self._paths[seq_id]
        assert not path.in_use
        path.in_use = True
        self._ticks += 1
        for node in self._up(path.leaf):
            node.references += 1
            node.last_used = self._ticks
            if node.references == 1:
                self._n_referenced += len(node.tokens)

    def release(self, seq_id: int) -> None:
        """Keep a sequence only to be reused."""
        path = self._paths[seq_id]
        assert path.in_use
        path.in_use = False
        self._ticks += 1
        for node in self._up(path.leaf):
            node.last_used = self._ticks
            self._dereference(node)

    def extend(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Tokens that were computed at the end of a sequence in use."""
        if not tokens:
            return
        path = self._paths[seq_id]
        assert path.in_use
        self._ticks += 1
        leaf = path.leaf
        if leaf.parent is not None and not leaf.children and len(leaf.sequences) == 1:
            leaf.tokens.extend(tokens)
        else:
            child = _Node(leaf.end, list(tokens), leaf, [], {seq_id}, references=1)
            leaf.children.append(child)
            path.leaf = leaf = child
        leaf.last_used = self._ticks
        self._n_cells += len(tokens)
        self._n_referenced += len(tokens)

    def cut(self, seq_id: int, length: int) -> None:
        """Forget what a sequence holds from position `length` on."""
        path = self._paths[seq_id]
        if length >= path.leaf.end:
            return
        kept = self._boundary(seq_id, length) if length else self._root
        node = path.leaf
        while node is not kept:
            parent = node.parent
            assert parent is not None
            node.sequences.remove(seq_id)
            if path.in_use:
                self._dereference(node)
            if not node.sequences:
                parent.children.remove(node)
                self._n_cells -= len(node.tokens)
            node = parent
        path.leaf = kept

    def close(self, seq_id: int) -> None:
        """Forget a sequence."""
        self.cut(seq_id, 0)
        del self._paths[seq_id]

    def is_redundant(self, seq_id: int) -> bool:
        """Whether forgetting the sequence frees nothing: it is empty, or another one holds the same cells."""
        leaf = self._paths[seq_id].leaf
        return leaf is self._root or len(leaf.sequences) > 1

    def shared_length(self, seq_id: int) -> int:
        """How much of a sequence in use another one in use holds too."""
        return max((node.end for node in self._up(self._paths[seq_id].leaf) if node.references > 1), default=0)

    def eviction(self, n_cells: int) -> Eviction | None:
        """What to forget first: the end of what nobody used for longest, up to `n_cells`. None if all is in use."""
        unused = [node for node in self._nodes() if not node.children and not node.references]
        if not unused:
            return None
        oldest = min(unused, key=lambda node: node.last_used)
        return Eviction(tuple(sorted(oldest.sequences)), max(oldest.start, oldest.end - n_cells))

    def _nodes(self) -> Iterator[_Node]:
        """All but the root."""
        branches = list(self._root.children)
        while branches:
            node = branches.pop()
            branches += node.children
            yield node

    def _up(self, node: _Node) -> Iterator[_Node]:
        """From a node up to the one below the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _dereference(self, node: _Node) -> None:
        node.references -= 1
        if node.references == 0:
            self._n_referenced -= len(node.tokens)

    def _boundary(self, seq_id: int, length: int) -> _Node:
        """The node of a sequence that ends at `length`, made by splitting one where it has to be."""
        node = self._paths[seq_id].leaf
        assert 0 < length <= node.end
        while node.start >= length:
            assert node.parent is not None
            node = node.parent
        if node.end > length:
            self._split(node, length)
        return node

    def _split(self, node: _Node, length: int) -> None:
        """Make a node end at position `length`, with the rest of it as its only child."""
        at = length - node.start
        rest = _Node(
            length, node.tokens[at:], node, node.children, set(node.sequences), node.references, node.last_used
        )
        for child in rest.children:
            child.parent = rest
        for seq_id in rest.sequences:
            path = self._paths[seq_id]
            if path.leaf is node:
                path.leaf = rest
        node.tokens = node.tokens[:at]
        node.children = [rest]


def common_length(run: Sequence[int], tokens: Sequence[int], start: int, limit: int) -> int:
    """How many tokens of `run` are those of `tokens[start:limit]`.

    Compares growing slices: most texts differ soon or not at all.
    """
    length = min(len(run), limit - start)
    done, size = 0, _FIRST_SLICE
    while done < length:
        end = min(done + size, length)
        ours, theirs = run[done:end], tokens[start + done : start + end]
        if ours != theirs:
            return done + next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        done, size = end, 4 * size
    return length
