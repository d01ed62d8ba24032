"""A grammar over a vocabulary: which tokens may follow, and whether an answer is complete."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UsageError
from edgeinfer.grammar.automaton import DEAD, UNKNOWN, Automaton
from edgeinfer.grammar.network import Network
from edgeinfer.grammar.nodes import Grammar
from edgeinfer.grammar.pieces import PieceTree
from edgeinfer.types import Vocabulary

_MAX_MASKS_NBYTES = 1 << 25


class Lexicon:
    """A vocabulary as grammars see it, made once for all of them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tree: Future[PieceTree] | None = None

    def prepare(self) -> None:
        """Begin with what takes a while, in a thread: a prompt is being computed meanwhile, in C."""
        if self._tree is None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            self._tree = pool.submit(self._read)
            pool.shutdown(wait=False)

    def close(self) -> None:
        """The vocabulary goes away: wait until nobody reads it."""
        if self._tree is not None:
            self._tree.exception()

    @property
    def tree(self) -> PieceTree:
        """All tokens but those that end an answer."""
        self.prepare()
        assert self._tree is not None
        return self._tree.result()

    def _read(self) -> PieceTree:
        pieces = self.vocabulary.pieces()
        for token in self.ends.tolist():
            pieces[token] = b""
        return PieceTree(pieces)

    @cached_property
    def ends(self) -> NDArray[np.int32]:
        """The tokens that end an answer."""
        return np.array(sorted(self.vocabulary.end_tokens), np.int32)


class TokenGrammar:
    """A grammar that answers of one model are held to; all of them share what has been computed."""

    def __init__(self, grammar: Grammar, lexicon: Lexicon) -> None:
        self.subject = grammar.subject
        self.automaton = Automaton(Network(grammar))
        self.lexicon = lexicon
        self._masks_nbytes = 0

    def constraint(self) -> GrammarConstraint:
        """For a new answer."""
        return GrammarConstraint(self)

    def after(self, row: int, piece: bytes) -> int:
        """The position after the bytes of a token."""
        automaton = self.automaton
        for byte_class in automaton.classes[np.frombuffer(piece, np.uint8)].tolist():
            row = automaton.step(row, byte_class)
            if row == DEAD:
                return DEAD
        return row

    def mask(self, row: int) -> NDArray[np.bool_]:
        """Which tokens may stand at a position, end tokens too; shape `(n_tokens,)`."""
        position = self.automaton.position(row)
        n_tokens = self.lexicon.vocabulary.n_tokens
        if position.mask is None:
            mask = self._computed_mask(row)
            if self._masks_nbytes > _MAX_MASKS_NBYTES:
                self.automaton.forget_masks()
                self._masks_nbytes = 0
            position.mask = np.packbits(mask)
            self._masks_nbytes += position.mask.nbytes
            return mask
        return np.unpackbits(position.mask, count=n_tokens).view(np.bool_)

    def _computed_mask(self, row: int) -> NDArray[np.bool_]:
        automaton, mask = self.automaton, np.zeros(self.lexicon.vocabulary.n_tokens, np.bool_)
        if automaton.position(row).can_end:
            mask[self.lexicon.ends] = True
        rows, alive = np.array([row], np.int32), np.zeros(1, np.intp)
        tree = self.lexicon.tree
        first_child = tree.first
        for level in tree.levels:
            nodes, sources = _children(first_child, alive)
            after = self._steps(rows[sources], automaton.classes[level.byte[nodes]])
            keep = after != DEAD
            alive, rows = nodes[keep], after[keep]
            if not len(alive):
                break
            is_alive = np.zeros(len(level.byte), np.bool_)
            is_alive[alive] = True
            mask[level.tokens[is_alive[level.nodes]]] = True
            first_child = level.first_child
        return mask

    def _steps(self, rows: NDArray[np.int32], byte_classes: NDArray[np.int32]) -> NDArray[np.int32]:
        """One step from each row; what is not in the table yet is computed once."""
        after = self.automaton.table[rows, byte_classes]
        unknown = np.flatnonzero(after == UNKNOWN)
        if len(unknown):
            n_classes = self.automaton.n_classes
            keys = rows[unknown].astype(np.int64) * n_classes + byte_classes[unknown]
            for key in np.unique(keys).tolist():
                self.automaton.step(*divmod(key, n_classes))
            after = self.automaton.table[rows, byte_classes]
        return after


class GrammarConstraint:
    """`types.Constraint`: where one answer stands in its grammar."""

    def __init__(self, grammar: TokenGrammar) -> None:
        self._grammar = grammar
        self._position = grammar.automaton.start

    @property
    def is_complete(self) -> bool:
        """Whether the answer matches and nothing more may follow."""
        return self._position.can_end and self._position.must_end

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        self._grammar.automaton.rest()
        vocabulary = self._grammar.lexicon.vocabulary
        if token in vocabulary.end_tokens:
            return self._position.can_end
        piece = vocabulary.piece(token)
        return bool(piece) and self._grammar.after(self._row, piece) != DEAD

    def allowed(self) -> NDArray[np.bool_]:
        """All tokens that may come next, shape `(n_tokens,)`."""
        self._grammar.automaton.rest()
        return self._grammar.mask(self._row)

    def accept(self, token: int) -> None:
        """The answer goes on with this token. Raises UsageError for one that is not allowed."""
        vocabulary = self._grammar.lexicon.vocabulary
        if token in vocabulary.end_tokens and self._position.can_end:
            return
        row = self._grammar.after(self._row, vocabulary.piece(token))
        if row == DEAD:
            raise UsageError(f"token {token} does not match {self._grammar.subject}", "give only tokens that it allows")
        self._position = self._grammar.automaton.position(row)

    @property
    def _row(self) -> int:
        return self._grammar.automaton.row(self._position)


def _children(first_child: NDArray[np.int32], nodes: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The children of nodes, and for each the index of its parent in `nodes`."""
    starts, ends = first_child[nodes], first_child[nodes + 1]
    counts = ends - starts
    sources = np.repeat(np.arange(len(nodes)), counts)
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + (starts - before)[sources], sources
