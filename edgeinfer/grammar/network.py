"""A grammar as a network of states: a finite automaton over bytes for each rule, with calls from one to another.

What could make following it endless is refused here: left recursion (a rule that begins with itself and goes on after
it), and a text that could never end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from edgeinfer.grammar.nodes import ROOT, Alt, Chars, Grammar, Node, Repeat, Rule, Seq, Text, unusable
from edgeinfer.grammar.utf8 import byte_spans

MAX_STATES = 400_000
MAX_BEGINNINGS = 200
"""Of rules that begin with each other."""
TAIL = -1
"""The state that a call returns to when nothing follows it: whatever the caller returns to."""
_EXPANDED = 8
"""Copies are cheaper than counting up to so many."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A state that counts: `least` to `most` (None: no end) calls of `rule`, then on to `exit`."""

    rule: int
    least: int
    most: int | None
    exit: int


class Network:
    """States are numbers. What a state can do is in the dictionaries, and only where there is something."""

    def __init__(self, grammar: Grammar) -> None:
        self.subject = grammar.subject
        self.n_states = 0
        self.moves: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """First byte, last byte, next state."""
        self.jumps: defaultdict[int, list[int]] = defaultdict(list)
        """States that are reached without a byte."""
        self.calls: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """Rule, and the state (or TAIL) that goes on after it."""
        self.counters: dict[int, Counter] = {}
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.owner: list[int] = []
        """The rule of every state."""
        self.names: list[str] = []
        """Of the rules; "" for what a counter counts."""
        self._numbers = {name: self._new_rule(name) for name in grammar.rules}
        self.root = self._numbers[ROOT]
        for name, node in grammar.rules.items():
            rule = self._numbers[name]
            self._add(node, self.starts[rule], self.ends[rule], rule)
        self.live = self._live_states()
        if not self.live[self.starts[self.root]]:
            unusable(self.subject, "no text matches it", "check for rules or schemas that contradict themselves")
        _refuse_left_recursion(self, nullable_and_begun(self))

    def callers(self) -> Iterator[tuple[int, int, int]]:
        """Every call: the calling state, the rule, where it returns to (TAIL resolved to the end of the caller)."""
        for state, calls in self.calls.items():
            for rule, back in calls:
                yield state, rule, self.ends[self.owner[state]] if back == TAIL else back

    def _new_rule(self, name: str) -> int:
        rule = len(self.names)
        self.names.append(name)
        self.starts.append(self._new_state(rule))
        self.ends.append(self._new_state(rule))
        return rule

    def _new_state(self, rule: int) -> int:
        if self.n_states >= MAX_STATES:
            unusable(self.subject, f"it needs more than {MAX_STATES} states", "make it smaller")
        self.owner.append(rule)
        self.n_states += 1
        return self.n_states - 1

    def _add(self, node: Node, start: int, end: int, rule: int) -> None:
        """States for a node, from `start`, which nothing of it leads back to, to `end`."""
        match node:
            case Text(data):
                self._add_texts([data], start, end, rule)
            case Chars(spans):
                self._add_chars(spans, start, end, rule)
            case Seq(parts):
                if not parts:
                    self.jumps[start].append(end)
                for part in parts[:-1]:
                    start, before = self._new_state(rule), start
                    self._add(part, before, start, rule)
                if parts:
                    self._add(parts[-1], start, end, rule)
            case Alt(parts):
                self._add_texts([part.data for part in parts if isinstance(part, Text)], start, end, rule)
                for part in parts:
                    if not isinstance(part, Text):
                        self._add(part, start, end, rule)
            case Repeat():
                self._add_repeat(node, start, end, rule)
            case Rule(name):
                self.calls[start].append((self._numbers[name], TAIL if end == self.ends[rule] else end))

    def _add_texts(self, texts: list[bytes], start: int, end: int, rule: int) -> None:
        """A tree of what texts begin with: of a thousand alternatives only one has to be followed."""
        branches: dict[tuple[int, int], int] = {}
        for data in texts:
            at = start
            for byte in data[:-1]:
                after = branches.get((at, byte))
                if after is None:
                    after = branches[at, byte] = self._new_state(rule)
                    self.moves[at].append((byte, byte, after))
                at = after
            if data:
                self.moves[at].append((data[-1], data[-1], end))
            else:
                self.jumps[at].append(end)

    def _add_chars(self, spans: tuple[tuple[int, int], ...], start: int, end: int, rule: int) -> None:
        before: dict[tuple[tuple[int, int], ...], int] = {(): end}  # the state that these bytes lead on from
        for first, last in spans:
            for sequence in byte_spans(first, last):
                for i in range(len(sequence) - 1, 0, -1):
                    rest = sequence[i:]
                    if rest not in before:
                        before[rest] = self._new_state(rule)
                        self.moves[before[rest]].append((*rest[0], before[rest[1:]]))
                self.moves[start].append((*sequence[0], before[sequence[1:]]))

    def _add_repeat(self, node: Repeat, start: int, end: int, rule: int) -> None:
        part, least, most = node.part, node.least, node.most
        if most is None and least <= 1:
            before, after = self._new_state(rule), self._new_state(rule)
            self.jumps[start].append(before)
            self._add(part, before, after, rule)
            self.jumps[after] += [before, end]
            if least == 0:
                self.jumps[before].append(after)
        elif most is not None and (most <= 1 or (most <= _EXPANDED and isinstance(part, Text | Chars))):
            for i in range(most):
                if i >= least:
                    self.jumps[start].append(end)
                after = end if i + 1 == most else self._new_state(rule)
                self._add(part, start, after, rule)
                start = after
            if most == 0:
                self.jumps[start].append(end)
        else:
            counted, at = self._new_rule(""), self._new_state(rule)
            self._add(part, self.starts[counted], self.ends[counted], counted)
            self.jumps[start].append(at)
            self.counters[at] = Counter(counted, least, most, end)

    def _live_states(self) -> list[bool]:
        """For every state whether the end of its rule can be reached from it."""
        before: defaultdict[int, list[int]] = defaultdict(list)
        for state, moves in self.moves.items():
            for _, _, after in moves:
                before[after].append(state)
        for state, jumps in self.jumps.items():
            for after in jumps:
                before[after].append(state)
        returning: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # by either of two states, the other
        for state, rule, back in self.callers():
            returning[self.starts[rule]].append((back, state))
            returning[back].append((self.starts[rule], state))
        for state, counter in self.counters.items():
            if counter.least == 0:
                before[counter.exit].append(state)
            else:
                returning[self.starts[counter.rule]].append((counter.exit, state))
                returning[counter.exit].append((self.starts[counter.rule], state))
        live = [False] * self.n_states
        todo = list(self.ends)
        while todo:
            state = todo.pop()
            if not live[state]:
                live[state] = True
                todo += before[state]
                todo += [caller for other, caller in returning[state] if live[other]]
        return live


def nullable_and_begun(network: Network) -> list[list[tuple[int, bool]]]:
    """For every rule the rules that it can begin with, and whether something may follow them."""
    begun: list[list[tuple[int, bool]]] = [[] for _ in network.names]
    nullable = [False] * len(network.names)
    waiting: defaultdict[int, list[int]] = defaultdict(list)  # by rule, what follows once it can be nothing
    seen = [False] * network.n_states
    todo = list(network.starts)
    while todo:
        state = todo.pop()
        if seen[state] or not network.live[state]:
            continue
        seen[state] = True
        rule = network.owner[state]
        todo += network.jumps.get(state, ())
        for called, back in network.calls.get(state, ()):
            begun[rule].append((called, back != TAIL))
            waiting[called].append(network.ends[rule] if back == TAIL else back)
            if nullable[called]:
                todo.append(waiting[called][-1])
        if counter := network.counters.get(state):
            begun[rule].append((counter.rule, True))
            if counter.least == 0:
                todo.append(counter.exit)
            else:
                waiting[counter.rule].append(counter.exit)
                if nullable[counter.rule]:
                    todo.append(counter.exit)
        if state == network.ends[rule] and not nullable[rule]:
            nullable[rule] = True
            todo += waiting[rule]
    return begun


def _refuse_left_recursion(network: Network, begun: list[list[tuple[int, bool]]]) -> None:
    """Strong components by Tarjan's algorithm, without recursion of its own; then the longest way through them."""
    order, low, component = {}, {}, {}  # type: dict[int, int], dict[int, int], dict[int, int]
    stack: list[int] = []
    longest: dict[int, int] = {}
    for root in range(len(begun)):
        if root in order:
            continue
        todo = [(root, iter(begun[root]))]
        order[root] = low[root] = len(order)
        stack.append(root)
        while todo:
            rule, edges = todo[-1]
            for called, _ in edges:
                if called not in order:
                    order[called] = low[called] = len(order)
                    stack.append(called)
                    todo.append((called, iter(begun[called])))
                    break
                if called not in component:
                    low[rule] = min(low[rule], order[called])
            else:
                todo.pop()
                if todo:
                    low[todo[-1][0]] = min(low[todo[-1][0]], low[rule])
                if low[rule] == order[rule]:
                    members: list[int] = []
                    while not members or members[-1] != rule:
                        members.append(stack.pop())
                        component[members[-1]] = rule
                    longest[rule] = _longest(network, begun, members, component, longest)


def _longest(
    network: Network,
    begun: list[list[tuple[int, bool]]],
    members: list[int],
    component: dict[int, int],
    longest: dict[int, int],
) -> int:
    """How many rules deep the beginnings of these go; refuses where that is without end."""
    here, most = component[members[0]], 0
    for rule in members:
        for called, goes_on in begun[rule]:
            if component[called] != here:
                most = max(most, longest[component[called]] + goes_on)
            elif goes_on:
                name = next((network.names[r] for r in (rule, called, *members) if network.names[r]), "")
                unusable(
                    network.subject,
                    f"the rule {name!r} begins with itself",
                    "write a repetition instead: x ::= y (op y)*",
                )
    if most > MAX_BEGINNINGS:
        unusable(network.subject, f"more than {MAX_BEGINNINGS} rules begin with each other", "nest it less")
    return most
