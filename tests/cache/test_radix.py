"""The tree of resident tokens against a plain dictionary of sequences."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgeinfer.cache.radix import RadixTree

TOKENS = st.lists(st.integers(0, 2), max_size=8)


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class TreeAgainstDictionary(RuleBasedStateMachine):
    """Cells have names of their own, so what is shared, and how many there are, is known exactly."""

    def __init__(self):
        super().__init__()
        self.tree = RadixTree()
        self.cells = {}  # sequence -> its (cell, token) pairs
        self.in_use = set()
        self.new_cell = iter(range(10**9))
        self.new_sequence = iter(range(10**9))

    def pick(self, data, sequences):
        return data.draw(st.sampled_from(sorted(sequences)))

    @rule()
    def open_empty(self):
        seq_id = next(self.new_sequence)
        self.tree.open(seq_id)
        self.cells[seq_id] = []
        self.in_use.add(seq_id)

    @precondition(lambda self: self.cells)
    @rule(data=st.data())
    def open_shared(self, data):
        source = self.pick(data, self.cells)
        length = data.draw(st.integers(0, len(self.cells[source])))
        seq_id = next(self.new_sequence)
        self.tree.open(seq_id, source, length)
        self.cells[seq_id] = self.cells[source][:length]
        self.in_use.add(seq_id)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data(), tokens=TOKENS)
    def extend(self, data, tokens):
        seq_id = self.pick(data, self.in_use)
        self.tree.extend(seq_id, tokens)
        self.cells[seq_id] = self.cells[seq_id] + [(next(self.new_cell), token) for token in tokens]

    @precondition(lambda self: self.cells)
    @rule(data=st.data())
    def cut(self, data):
        seq_id = self.pick(data, self.cells)
        length = data.draw(st.integers(0, len(self.cells[seq_id]) + 1))
        self.tree.cut(seq_id, length)
        self.cells[seq_id] = self.cells[seq_id][:length]

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def release(self, data):
        seq_id = self.pick(data, self.in_use)
        self.tree.release(seq_id)
        self.in_use.remove(seq_id)

    @precondition(lambda self: self.cells.keys() - self.in_use)
    @rule(data=st.data())
    def hold(self, data):
        seq_id = self.pick(data, self.cells.keys() - self.in_use)
        self.tree.hold(seq_id)
        self.in_use.add(seq_id)

    @precondition(lambda self: self.cells)
    @rule(data=st.data())
    def close(self, data):
        seq_id = self.pick(data, self.cells)
        self.tree.close(seq_id)
        del self.cells[seq_id]
        self.in_use.discard(seq_id)

    @rule(n_cells=st.integers(1, 5))
    def evict(self, n_cells):
        eviction = self.tree.eviction(n_cells)
        used = {cell for seq_id in self.in_use for cell in self.cells[seq_id]}
        unused = {cell for cells in self.cells.values() for cell in cells} - used
        assert (eviction is None) == (not unused)
        if eviction is None:
            return
        freed = {cell for seq_id in eviction.seq_ids for cell in self.cells[seq_id][eviction.length :]}
        assert freed
        assert freed <= unused
        assert len(freed) <= n_cells
        for seq_id in eviction.seq_ids:
            self.tree.cut(seq_id, eviction.length)
            self.cells[seq_id] = self.cells[seq_id][: eviction.length]

    @rule(tokens=TOKENS, limit=st.integers(0, 8))
    def match(self, tokens, limit):
        limit = min(limit, len(tokens))
        found = self.tree.match(tokens, limit)
        held = {seq_id: [t for _, t in cells] for seq_id, cells in self.cells.items()}
        assert found.length == max((common(tokens[:limit], h) for h in held.values()), default=0)
        if found.length:
            assert held[found.seq_id][: found.length] == tokens[: found.length]
        whole = self.tree.match_idle(tokens, limit)
        idle = [held[s] for s in held.keys() - self.in_use]
        assert whole.length == max((len(h) for h in idle if h == tokens[: len(h)] and len(h) <= limit), default=0)

    @invariant()
    def agrees(self):
        assert {s: self.tree.tokens(s) for s in self.cells} == {s: [t for _, t in c] for s, c in self.cells.items()}
        assert self.tree.n_cells == len({cell for cells in self.cells.values() for cell in cells})
        assert self.tree.n_referenced == len({cell for s in self.in_use for cell in self.cells[s]})
        assert set(self.tree.idle()) == self.cells.keys() - self.in_use
        for seq_id in self.in_use:
            others = {cell for s in self.in_use - {seq_id} for cell in self.cells[s]}
            assert self.tree.shared_length(seq_id) == sum(cell in others for cell in self.cells[seq_id])
        for seq_id in self.cells:
            others = {cell for s in self.cells.keys() - {seq_id} for cell in self.cells[s]}
            assert self.tree.is_redundant(seq_id) == (set(self.cells[seq_id]) <= others)


TreeAgainstDictionary.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestTree = TreeAgainstDictionary.TestCase


def test_what_was_used_longest_ago_goes_first():
    tree = RadixTree()
    for seq_id, tokens in enumerate(([1, 2, 3], [4, 5], [6])):
        tree.open(seq_id)
        tree.extend(seq_id, tokens)
        tree.release(seq_id)
    tree.hold(0)
    tree.release(0)
    assert tree.idle() == [1, 2, 0]
    assert tree.eviction(2).seq_ids == (1,)


def test_a_shared_beginning_outlives_the_ends():
    tree = RadixTree()
    tree.open(0)
    tree.extend(0, [1, 2, 3, 4])
    tree.release(0)
    tree.open(1, 0, 2)
    eviction = tree.eviction(2)
    assert (eviction.seq_ids, eviction.length) == ((0,), 2)
    tree.cut(0, 2)
    assert tree.eviction(2) is None
    assert tree.is_redundant(0)


@given(st.lists(TOKENS.filter(bool), min_size=1, max_size=6))
def test_evicting_everything_empties_the_tree(texts):
    tree = RadixTree()
    for seq_id, tokens in enumerate(texts):
        found = tree.match(tokens, len(tokens))
        tree.open(seq_id, found.seq_id, found.length)
        tree.extend(seq_id, tokens[found.length :])
        tree.release(seq_id)
    assert tree.n_cells == len({tuple(t[: i + 1]) for t in texts for i in range(len(t))})
    while eviction := tree.eviction(2):
        for seq_id in eviction.seq_ids:
            tree.cut(seq_id, eviction.length)
    assert tree.n_cells == tree.n_referenced == 0


def test_a_sequence_that_is_in_use_cannot_be_released_twice():
    tree = RadixTree()
    tree.open(0)
    tree.release(0)
    with pytest.raises(AssertionError):
        tree.release(0)
