"""A grammar over a vocabulary: which tokens may follow, and whether an answer is complete."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UsageError
from edgeinfer.grammar.automaton import DEAD, UNKNOWN, Automaton, Position
from edgeinfer.grammar.network import Network
from edgeinfer.grammar.nodes import Grammar
from edgeinfer.grammar.pieces import PieceTree
from edgeinfer.types import Vocabulary

_MAX_MASKS_NBYTES = 1 << 25
_MAX_AFTER = 1 << 16
_MAX_CUT = 4096
"""Forced texts whose tokens are kept."""


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

    def cut(self, before: bytes, data: bytes) -> tuple[int, ...]:
        """The tokens of a text that stands behind another; none where the tokenizer writes across the border."""
        for context in (before, b""):  # alone, a vocabulary may put a blank in front of it
            text = (context + data).decode("utf-8", "ignore")
            tokens = self.vocabulary.tokenize(text, add_special=False, parse_special=False).tolist()
            length, start = 0, len(tokens)
            while start and length < len(data):
                start -= 1
                length += len(self.vocabulary.piece(tokens[start]))
            if b"".join(map(self.vocabulary.piece, tokens[start:])) == data:
                return tuple(tokens[start:])
        return ()

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
        self._after: dict[tuple[int, int], int] = {}
        self._after_age = 0
        self._cut: dict[tuple[int | None, bytes], tuple[int, ...]] = {}
        """The tokens of forced texts, by the token before them."""

    def constraint(self) -> GrammarConstraint:
        """For a new answer."""
        return GrammarConstraint(self)

    def after_token(self, row: int, token: int) -> int:
        """The position after a token; known at once where it was asked before, by a draft or a check of it.

        No answer goes on with a token that ends it, or that stands for nothing.
        """
        if self._after_age != self.automaton.age or len(self._after) >= _MAX_AFTER:
            self._after, self._after_age = {}, self.automaton.age
        found = self._after.get((row, token))
        if found is None:
            vocabulary = self.lexicon.vocabulary
            piece = b"" if token in vocabulary.end_tokens else vocabulary.piece(token)
            found = self._after[row, token] = self.after(row, piece) if piece else DEAD
        return found

    def after(self, row: int, piece: bytes) -> int:
        """The position after the bytes of a token."""
        automaton = self.automaton
        for byte_class in piece.translate(automaton.class_table):
            row = automaton.step(row, byte_class)
            if row == DEAD:
                return DEAD
        return row

    def forced(self, row: int, last: int | None) -> tuple[int, ...]:
        """The tokens of what must follow a position, as they are cut after the token `last`."""
        key = (last, self.automaton.forced(row))
        found = self._cut.get(key) if key[1] else ()
        if found is None:
            if len(self._cut) >= _MAX_CUT:
                self._cut.clear()
            before = b"" if last is None else self.lexicon.vocabulary.piece(last)
            found = self._cut[key] = self.lexicon.cut(before, key[1])
        return found

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
        tree = self.lexicon.tree
        reached = [np.zeros(1, np.intp)]
        rows = np.array([row], np.int32)
        while len(reached[-1]):
            nodes, sources = tree.children(reached[-1])
            after = self._steps(rows[sources], automaton.classes[tree.byte[nodes]])
            keep = after != DEAD
            reached.append(nodes[keep])
            rows = after[keep]
        mask[tree.tokens(np.concatenate(reached))] = True
        return mask

    def _steps(self, rows: NDArray[np.int32], byte_classes: NDArray[np.int32]) -> NDArray[np.int32]:
        """One step from each row; what is not in the table yet is computed once."""
        after = self.automaton.table[rows, byte_classes]
        unknown = np.flatnonzero(after == UNKNOWN)
        if len(unknown):
            n_classes = self.automaton.n_classes
            keys = rows[unknown].astype(np.int64) * n_classes + byte_classes[unknown]
            for key in set(keys.tolist()):
                self.automaton.step(*divmod(key, n_classes))
            after = self.automaton.table[rows, byte_classes]
        return after


class GrammarConstraint:
    """`types.Constraint`: where one answer stands in its grammar."""

    def __init__(self, grammar: TokenGrammar, position: Position | None = None, last: int | None = None) -> None:
        self._grammar = grammar
        self._position = position or grammar.automaton.start
        self._last = last
        """The last token, None at the beginning."""

    def copy(self) -> GrammarConstraint:
        """Another one at the same place."""
        return GrammarConstraint(self._grammar, self._position, self._last)

    @property
    def place(self) -> Hashable:
        """The states and where they return to; see `Automaton.place`."""
        return self._grammar.automaton.place(self._row)

    @property
    def n_choices(self) -> int:
        """How many bytes what comes next can begin with."""
        return self._grammar.automaton.n_choices(self._row)

    def forced(self) -> tuple[int, ...]:
        """What must come next, as the vocabulary's own tokenizer cuts it after the last token."""
        return self._grammar.forced(self._row, self._last)

    @property
    def is_complete(self) -> bool:
        """Whether the answer matches and nothing more may follow."""
        return self._position.can_end and self._position.must_end

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        return next(self.allowed_of((token,)), None) is not None

    def allowed_of(self, tokens: Iterable[int]) -> Iterator[int]:
        """Those of some tokens that may come next, each looked at when it is asked for; one work for all of them."""
        self._grammar.automaton.rest()
        ends = self._grammar.lexicon.vocabulary.end_tokens if self._position.can_end else ()
        for token in tokens:
            if self._grammar.after_token(self._row, token) != DEAD or token in ends:
                yield token

    def allowed(self) -> NDArray[np.bool_]:
        """All tokens that may come next, shape `(n_tokens,)`."""
        self._grammar.automaton.rest()
        return self._grammar.mask(self._row)

    def accept(self, token: int) -> None:
        """The answer goes on with this token. Raises UsageError for one that is not allowed."""
        row = self._grammar.after_token(self._row, token)
        if row == DEAD:
            if self._position.can_end and token in self._grammar.lexicon.vocabulary.end_tokens:
                return
            raise UsageError(f"token {token} does not match {self._grammar.subject}", "give only tokens that it allows")
        self._position, self._last = self._grammar.automaton.position(row), token

    @property
    def _row(self) -> int:
        return self._grammar.automaton.row(self._position)
