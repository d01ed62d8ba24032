"""The length that brings the most tokens per millisecond; estimates and costs that follow what happens."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.speculation.acceptance import Acceptance
from edgeinfer.speculation.controller import best_length, shared_lengths
from edgeinfer.speculation.cost import CostCurve

CURVE = CostCurve()
FREE = 1e9


def survival(chance, n=63):
    return [chance**i for i in range(1, n + 1)]


def test_a_sure_draft_is_long_an_unsure_one_short_a_bad_one_none():
    lengths = [best_length(survival(c), 1, CURVE, most_cost=FREE).length for c in (0.05, 0.3, 0.6, 0.85, 0.99)]
    assert lengths == sorted(lengths)
    assert lengths[0] == lengths[1] == 0
    assert lengths[-1] > 15


def test_lengths_fill_rows_in_fours():
    for chance in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        for n_rows in (1, 2, 5):
            length = best_length(survival(chance), n_rows, CURVE, most_cost=FREE).length
            assert length == 0 or length + n_rows < 4 or (length + n_rows) % 4 == 0


def test_it_grows_shorter_as_the_batch_grows():
    lengths = [shared_lengths([survival(0.8)] * n, n, 500, CURVE, FREE) for n in (1, 2, 4, 8, 16)]
    means = [sum(each) / len(each) for each in lengths]
    assert min(means[:2]) > max(means[-2:])


def test_of_several_drafts_the_likeliest_tokens_are_verified():
    sure, unsure, bad = shared_lengths([survival(0.98), survival(0.6), survival(0.1)], 3, 500, CURVE, FREE)
    assert sure > unsure >= bad == 0
    assert sum(shared_lengths([survival(0.98), survival(0.95)], 2, 5, CURVE, FREE)) <= 5


def test_a_step_does_not_take_longer_than_it_may():
    limit = CURVE.cost(8)
    length = best_length(survival(0.99), 1, CURVE, most_cost=limit).length
    assert 1 <= length <= 7
    assert best_length(survival(0.99), 1, CURVE, most_cost=0.5).length == 0


def test_what_a_draft_costs_makes_it_shorter_or_leaves_it_out():
    lengths = [best_length(survival(0.9), 1, CURVE, most_cost=FREE, draft_cost=c).length for c in (0, 0.1, 0.3, 0.9)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2] > lengths[3] == 0


@given(st.lists(st.floats(0.01, 1), max_size=12), st.integers(1, 6))
def test_nothing_allowed_beats_what_it_finds(chances, n_rows):
    falling = list(itertools.accumulate(chances, lambda a, b: a * b))
    found = best_length(falling, n_rows, CURVE, most_cost=FREE)
    for length in range(len(falling) + 1):
        rows = n_rows + length
        if rows % 4 and rows > 4 and length != len(falling):
            continue
        rate = (n_rows + sum(falling[:length])) / CURVE.cost(rows)
        assert rate <= found.rate * (1 + 1e-9)


def test_what_a_source_assumes_gives_way_to_what_is_seen():
    acceptance = Acceptance(general=Acceptance(lambda source, grade: 0.9))
    assert acceptance.chance("a", 3) == pytest.approx(0.9)
    for _ in range(16):
        acceptance.observe("a", 3, False)
    assert acceptance.chance("a", 3) < 0.15
    assert acceptance.chance("a", 4) == pytest.approx(0.9)
    assert acceptance.chance("b", 3) == pytest.approx(0.9)
    for _ in range(32):
        acceptance.observe("a", 3, True)
    assert acceptance.chance("a", 3) > 0.75


def test_the_next_request_begins_with_what_the_last_one_showed():
    general = Acceptance(lambda source, grade: 0.5)
    first = Acceptance(general=general)
    for _ in range(50):
        first.observe("a", 0, True)
    assert Acceptance(general=general).chance("a", 0) > 0.9


def test_survival_ends_where_a_token_is_hardly_reached():
    acceptance = Acceptance(general=Acceptance(lambda source, grade: (1.0, 0.5, 0.01)[grade]))
    assert acceptance.survival("a", (0, 1, 1, 2, 0), 0.02) == pytest.approx([1, 0.5, 0.25])


def test_the_shape_of_the_curve_follows_the_steps():
    curve = CostCurve()
    true = {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0, 8: 80.0, 16: 160.0}  # a machine on which a row more costs a row more
    for _ in range(100):
        for rows, ms in true.items():
            curve.observe(rows, ms / 1e3)
    assert curve.unit_s == pytest.approx(0.01, rel=0.25)
    for rows in true:
        assert curve.cost(rows) == pytest.approx(rows, rel=0.15)
    assert best_length(survival(0.9), 1, curve, most_cost=FREE).length == 0


def test_a_slower_machine_changes_the_unit_and_hardly_the_shape():
    curve = CostCurve()
    for speed in (1, 3, 1):
        for _ in range(30):
            for rows in (1, 8, 1, 4):
                curve.observe(rows, 0.01 * speed * CostCurve().cost(rows))
    assert curve.unit_s == pytest.approx(0.01, rel=0.05)
    assert curve.shape.keys() == {4, 8}
    for rows, cost in curve.shape.items():
        assert cost == pytest.approx(CostCurve().cost(rows), rel=0.15)


def test_an_outlier_moves_little_and_nothing_costs_less_than_one_row():
    curve = CostCurve()
    for _ in range(20):
        curve.observe(1, 0.01)
    curve.observe(8, 10.0)
    assert curve.cost(8) <= 1.5 * CostCurve().cost(8)
    for _ in range(200):
        curve.observe(1, 0.01)
        curve.observe(16, 0.001)
    assert curve.cost(16) == min(curve.cost(rows) for rows in range(1, 200)) == 1


def test_what_was_learned_too_dear_comes_down_when_more_rows_are_seen_to_cost_less():
    curve = CostCurve({4: 9.0})
    for _ in range(100):
        curve.observe(1, 0.01)
        curve.observe(8, 0.02)
    assert curve.cost(4) <= curve.cost(8) < 3


def test_rows_that_fill_a_kernel_may_cost_less_than_fewer():
    curve = CostCurve()
    for _ in range(300):
        for rows, ms in ((1, 10), (3, 21), (4, 15), (8, 25)):
            curve.observe(rows, ms / 1e3)
    assert [round(curve.cost(rows), 1) for rows in (3, 4, 8)] == [2.1, 1.5, 2.5]
    assert curve.cost(12) >= curve.cost(8)  # not seen


@given(st.dictionaries(st.sampled_from([1, 2, 4, 8, 64, 128]), st.floats(1, 1e4)))
def test_a_kept_shape_comes_back(shape):
    assert CostCurve(shape).cost(1) == 1
    assert CostCurve(CostCurve(shape).shape).shape == CostCurve(shape).shape
