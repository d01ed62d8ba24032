"""The search for the best options within a budget, held against trying all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.convert.allocation import Option, allocate, smallest_nbytes

OPTIONS = st.lists(st.builds(Option, st.integers(1, 40), st.integers(0, 1000).map(float)), min_size=1, max_size=4)
ITEMS = st.lists(OPTIONS, min_size=1, max_size=5)
Items = list[list[Option]]


def _total(items: Items, chosen: Sequence[int]) -> Option:
    picked = [options[index] for options, index in zip(items, chosen, strict=True)]
    return Option(sum(o.nbytes for o in picked), sum(o.loss for o in picked))


def _all_totals(items: Items) -> list[Option]:
    return [_total(items, chosen) for chosen in itertools.product(*(range(len(options)) for options in items))]


@given(ITEMS, st.integers(0, 100))
def test_never_more_than_the_budget_and_at_most_one_upgrade_from_the_best(items: Items, room: int) -> None:
    budget = smallest_nbytes(items) + room
    found = _total(items, allocate(items, budget))
    best = min(total.loss for total in _all_totals(items) if total.nbytes <= budget)
    assert found.nbytes <= budget
    # What a multiplier leaves unspent is less than one item's upgrade, and that is all that the best can gain by.
    largest_upgrade = max(max(o.loss for o in options) - min(o.loss for o in options) for options in items)
    assert best <= found.loss <= best + largest_upgrade


@given(ITEMS)
def test_with_room_for_everything_each_item_loses_least_with_the_fewest_bytes(items: Items) -> None:
    found = allocate(items, 10**6)
    for options, index in zip(items, found, strict=True):
        assert options[index] == min(options, key=lambda o: (o.loss, o.nbytes))


@given(ITEMS)
def test_with_room_for_nothing_more_each_item_is_smallest(items: Items) -> None:
    found = allocate(items, smallest_nbytes(items))
    for options, index in zip(items, found, strict=True):
        assert options[index] == min(options, key=lambda o: (o.nbytes, o.loss))


def test_less_than_the_smallest_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing fits 8 bytes"):
        allocate([[Option(5, 1.0)], [Option(4, 1.0), Option(6, 0.0)]], 8)


def test_bytes_go_where_they_save_most() -> None:
    items = [[Option(10, 4.0), Option(20, 0.0)], [Option(10, 9.0), Option(20, 0.0)], [Option(10, 1.0), Option(11, 0.0)]]
    assert allocate(items, 30) == [0, 0, 0]
    assert allocate(items, 31) == [0, 0, 1]
    assert allocate(items, 41) == [0, 1, 1]
    assert allocate(items, 51) == [1, 1, 1]


@given(st.lists(OPTIONS, min_size=1, max_size=2), st.integers(0, 100))
def test_the_largest_items_get_what_is_best(items: Items, room: int) -> None:
    budget = smallest_nbytes(items) + room
    found = _total(items, allocate(items, budget))
    assert found.loss == min(total.loss for total in _all_totals(items) if total.nbytes <= budget)


def test_a_large_upgrade_that_just_does_not_fit_is_made_in_place_of_many_small_ones() -> None:
    large = [Option(100, 50.0), Option(200, 0.0)]
    small = [[Option(10, 6.0), Option(20, 0.0)]] * 8 + [[Option(10, 2.0), Option(20, 0.0)]] * 6
    items = [large, *small]
    assert _total(items, allocate(items, 100 + 140 + 140)) == Option(380, 4 * 6.0 + 6 * 2.0)
