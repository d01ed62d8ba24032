"""Where a text can stand in a grammar: all possibilities at once, as one number that is looked up by byte.

A position is a set of (state, frame): a frame says where the rule that the state belongs to returns to, which can be
several states with frames of their own, because rules that are called at the same byte share one frame. Equal frames
and equal positions are the same object, so what was computed once for a position is a table from then on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgeinfer.grammar.network import TAIL, Network
from edgeinfer.grammar.nodes import unusable

DEAD = 0
"""The position of a text that does not match."""
UNKNOWN = -1
MAX_CELLS = 1 << 22
"""Of the table; then it is begun anew."""
MAX_ITEMS = 10_000
"""States at one position, and all that lead to them."""
MAX_FORCED_NBYTES = 256
MAX_WORK = 200_000
"""Steps between two calls of `rest`: an ambiguous grammar can be at very many states at once."""
_OUT = -1  # where the frame of the whole text returns to
_MAX_SEEDS = 64  # of a step that is remembered: longer ones take more memory than time


class Frame:
    """Where a rule returns to: pairs of a state and its frame. Compared by identity."""

    __slots__ = ("returns",)

    def __init__(self, returns: frozenset[tuple[int, Frame | None]]) -> None:
        self.returns = returns


Items = frozenset[tuple[int, Frame]]


@dataclass(slots=True, eq=False)
class Position:
    """All that is possible after a text."""

    items: Items
    """The states that read a byte next."""
    can_end: bool
    row: int
    age: int
    """Of the table that `row` is in."""
    mask: NDArray[np.uint8] | None = None
    """Which tokens may follow, a bit each; kept here by `Constraint`."""
    place: Hashable = None
    forced: bytes | None = None
    choices: frozenset[int] | None = None
    """What the automaton's methods of these names have found."""

    @property
    def must_end(self) -> bool:
        """Whether nothing may follow."""
        return not self.items


@dataclass(slots=True, eq=False)
class _Closure:
    """What is reached without a byte from some items. Frames of rules that begin here are named by their rule."""

    reading: set[tuple[int, Frame | int]] = field(default_factory=set)
    returns: dict[int, set[tuple[int, Frame | int]]] = field(default_factory=dict)
    """By rule that begins here."""
    tails: dict[int, set[Frame | int]] = field(default_factory=dict)
    """Frames whose returns are those of the rule, because nothing follows the call."""
    empty: set[int] = field(default_factory=set)
    """Rules that end where they begin."""
    can_end: bool = False


class Automaton:
    """The positions of one grammar. One thread uses it."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.classes, self.n_classes = _byte_classes(network)
        """The class of each byte, shape `(256,)`: bytes of a class are the same to the whole grammar."""
        self.class_table = self.classes.astype(np.uint8).tobytes()
        """The same for `bytes.translate`."""
        self._class_sizes = np.bincount(self.classes)
        self._moves: dict[int, dict[int, list[int]]] = {}
        self._reads: dict[int, NDArray[np.intp]] = {}
        """Of a state, the classes that it goes on with."""
        self._plain = _plain_states(network)
        self._counted = {counter.rule for counter in network.counters.values()}
        self._work = 0
        self.age = 0
        """How often the table was begun anew: rows of another age mean nothing."""
        self._forget()
        bottom = Frame(frozenset({(_OUT, None)}))
        self.start = self._closed([(network.starts[network.root], bottom)])

    def step(self, row: int, byte_class: int) -> int:
        """The position after a byte of a class."""
        after: int = self.table.item(row, byte_class)
        return after if after != UNKNOWN else self._computed_step(row, byte_class)

    def row(self, position: Position) -> int:
        """Where a position is in the table; positions outlive the table."""
        if position.age != self.age:
            position.row, position.age, position.mask = self._interned(position).row, self.age, None
        return position.row

    def position(self, row: int) -> Position:
        """The position of a row."""
        return self._positions[row]

    def place(self, row: int) -> Hashable:
        """A position without what was counted on the way, and without what follows the rule after next.

        So it is the same one in every record of a list, but not in two properties of a record.
        """
        position, n_states = self._positions[row], self._network.n_states
        if position.place is None:
            position.place = frozenset(
                (state, frozenset(back % n_states for back, _ in frame.returns)) for state, frame in position.items
            )
        return position.place

    def forced(self, row: int) -> bytes:
        """What must follow, at most `MAX_FORCED_NBYTES` of it: empty where there is a choice, or an end."""
        position = self._positions[row]
        if position.forced is None:
            found, at = bytearray(), position
            while len(found) < MAX_FORCED_NBYTES and not at.can_end and len(choices := self._choices(at)) == 1:
                (byte,) = choices
                found.append(byte)
                at = self._positions[self.step(at.row, int(self.classes[byte]))]
            position.forced = bytes(found)
        return position.forced

    def n_choices(self, row: int) -> int:
        """How many bytes can be next."""
        return int(self._class_sizes[self.table[row] != DEAD].sum())

    def _choices(self, position: Position) -> frozenset[int]:
        """The bytes that can be next."""
        if position.choices is None:
            moves = (move for state, _ in position.items for move in self._network.moves[state])
            position.choices = frozenset(
                byte for first, last, after in moves if self._network.live[after] for byte in range(first, last + 1)
            )
        return position.choices

    def rest(self) -> None:
        """Between two tokens: what is done for the next one is counted anew, and a table that is too large goes."""
        self._work = 0
        if len(self._positions) * self.n_classes > MAX_CELLS:
            self._forget()

    def forget_masks(self) -> None:
        """Free what is kept at the positions."""
        for position in self._positions:
            position.mask = None

    def _forget(self) -> None:
        self.age += 1
        self.table: NDArray[np.int32] = np.full((64, self.n_classes), DEAD, np.int32)
        self._by_items: dict[tuple[Items, bool], Position] = {}
        self._by_seeds: dict[tuple[tuple[int, Frame], ...], int] = {}
        """The rows of what has been closed."""
        self._frames: dict[frozenset[tuple[int, Frame | None]], Frame] = {}
        self._positions: list[Position] = []
        self._interned(Position(frozenset(), False, DEAD, self.age))

    def _computed_step(self, row: int, byte_class: int) -> int:
        seeds = tuple(
            (after, frame)
            for state, frame in self._positions[row].items
            for after in self._moves_of(state).get(byte_class, ())
        )
        after = self._by_seeds.get(seeds)
        if after is None:  # most classes lead to where another one leads
            after = self._closed(seeds).row
            if len(seeds) <= _MAX_SEEDS:
                self._by_seeds[seeds] = after
        self.table[row, byte_class] = after
        return after

    def _moves_of(self, state: int) -> dict[int, list[int]]:
        found = self._moves.get(state)
        if found is None:
            found = self._moves[state] = {}
            for first, last, after in self._network.moves[state]:
                if self._network.live[after]:
                    for byte_class in range(self.classes[first], self.classes[last] + 1):
                        found.setdefault(byte_class, []).append(after)
            self._reads[state] = np.fromiter(found, np.intp, len(found))
        return found

    def _closed(self, seeds: Sequence[tuple[int, Frame]]) -> Position:
        if len(seeds) <= MAX_ITEMS and all(state in self._plain for state, _ in seeds):
            self._spend(len(seeds))
            return self._interned(Position(frozenset(seeds), False, UNKNOWN, self.age))
        closure = _Closure()
        seen: set[tuple[int, Frame | int]] = set()
        todo: list[tuple[int, Frame | int]] = list(seeds)
        while todo:
            item = todo.pop()
            if item not in seen:
                seen.add(item)
                if len(seen) > MAX_ITEMS:
                    self._give_up()
                self._follow(item, closure, todo)
        self._spend(len(seen))
        resolved: dict[int, Frame] = {}
        items = frozenset((state, self._frame(closure, frame, resolved)) for state, frame in closure.reading)
        return self._interned(Position(items, closure.can_end, UNKNOWN, self.age))

    def _follow(self, item: tuple[int, Frame | int], closure: _Closure, todo: list[tuple[int, Frame | int]]) -> None:
        """Add what one item leads to without a byte. A code is a state plus, for counters, its count times n_states."""
        network = self._network
        code, frame = item
        count, state = divmod(code, network.n_states)
        if not network.live[state]:
            return
        if state in network.moves:
            closure.reading.add(item)
        for after in network.jumps.get(state, ()):
            todo.append((after, frame))
        for rule, back in network.calls.get(state, ()):
            if back == TAIL or network.live[back]:
                self._call(rule, back, frame, closure, todo)
        counter = network.counters.get(state)
        if counter is not None:
            if count >= counter.least or counter.rule in closure.empty:
                todo.append((counter.exit, frame))
            if counter.most is None or count < counter.most:
                # Without an end, only whether it is enough has to be known.
                after = count + 1 if counter.most is not None else min(count + 1, counter.least)
                self._call(counter.rule, state + network.n_states * after, frame, closure, todo)
                if counter.rule in closure.empty:
                    todo.append((counter.exit, frame))
        if state == network.ends[network.owner[state]]:
            self._return(frame, closure, todo)

    def _call(
        self, rule: int, back: int, frame: Frame | int, closure: _Closure, todo: list[tuple[int, Frame | int]]
    ) -> None:
        if rule not in closure.returns:
            closure.returns[rule], closure.tails[rule] = set(), set()
            todo.append((self._network.starts[rule], rule))
        if back == TAIL:
            if frame not in closure.tails[rule]:
                closure.tails[rule].add(frame)
                if rule in closure.empty:
                    self._return(frame, closure, todo)
        elif (back, frame) not in closure.returns[rule]:
            closure.returns[rule].add((back, frame))
            if rule in closure.empty:
                todo.append(self._after_nothing(back, frame))

    def _return(self, frame: Frame | int, closure: _Closure, todo: list[tuple[int, Frame | int]]) -> None:
        """The rule of a frame has ended; so have, one after the other, those that it was the last of."""
        ended = [frame]
        while ended:
            frame = ended.pop()
            if isinstance(frame, Frame):
                for back, outer in frame.returns:
                    if outer is None:
                        closure.can_end = True
                    else:
                        todo.append((back, outer))
            elif frame not in closure.empty:
                closure.empty.add(frame)
                todo += [self._after_nothing(back, outer) for back, outer in closure.returns[frame]]
                ended += closure.tails[frame]

    def _after_nothing(self, back: int, frame: Frame | int) -> tuple[int, Frame | int]:
        """Where a rule that was nothing returns to. To count nothing is pointless: the rest can be nothing too."""
        state = back % self._network.n_states
        counter = self._network.counters.get(state)
        return (counter.exit if counter else back), frame

    def _frame(self, closure: _Closure, frame: Frame | int, resolved: dict[int, Frame]) -> Frame:
        """The frame of a rule that begins here. The recursion is as deep as rules begin with each other."""
        if isinstance(frame, Frame):
            return frame
        if frame in resolved:
            return resolved[frame]
        returns: set[tuple[int, Frame | None]] = set()
        seen: set[Frame | int] = {frame}
        todo: list[Frame | int] = [frame]
        while todo:  # through the calls that nothing follows, which may go round in circles
            part = todo.pop()
            if isinstance(part, Frame):
                returns |= part.returns
                continue
            returns |= {(back, self._frame(closure, outer, resolved)) for back, outer in closure.returns[part]}
            todo += [outer for outer in closure.tails[part] if outer not in seen]
            seen |= closure.tails[part]
        self._spend(len(returns) + len(seen))
        found = frozenset(returns)
        resolved[frame] = self._frames.setdefault(found, Frame(found))
        return resolved[frame]

    def _interned(self, position: Position) -> Position:
        key = (position.items, position.can_end)
        known = self._by_items.get(key)
        if known is None:
            known = self._by_items[key] = position
            position.row, position.age = len(self._positions), self.age
            self._positions.append(position)
            if position.row >= len(self.table):
                larger = np.full((2 * len(self.table), self.n_classes), DEAD, np.int32)
                larger[: len(self.table)] = self.table
                self.table = larger
            for state, _ in position.items:
                self._moves_of(state)
                self.table[position.row, self._reads[state]] = UNKNOWN
        return known

    def _spend(self, n_steps: int) -> None:
        self._work += n_steps
        if self._work > MAX_WORK:
            self._give_up()

    def _give_up(self) -> NoReturn:
        unusable(
            self._network.subject,
            "it is too ambiguous to be followed: a text can match it in very many ways",
            "write it so that every text matches in one way",
        )


def _plain_states(network: Network) -> frozenset[int]:
    """Those that read a byte and do nothing else."""
    others = {*network.jumps, *network.calls, *network.counters, *network.ends}
    return frozenset(state for state in network.moves if state not in others and network.live[state])


def _byte_classes(network: Network) -> tuple[NDArray[np.int32], int]:
    """Classes in the order of the bytes: a run of bytes is a run of classes."""
    cuts = np.zeros(257, np.int32)
    for moves in network.moves.values():
        for first, last, _ in moves:
            cuts[first] = cuts[last + 1] = 1
    cuts[0] = 0
    classes = np.cumsum(cuts[:256], dtype=np.int32)
    return classes, int(classes[-1]) + 1
