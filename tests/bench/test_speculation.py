"""The figures of the suite of drafts, from answers that were made up."""

import json

import pytest

from edgeinfer.bench.report import FORMATS
from edgeinfer.bench.speculation import SPECULATION, Answered, Suite, _figures
from edgeinfer.bench.workloads import WORKLOADS
from edgeinfer.errors import UsageError
from edgeinfer.speculation.cost import CostCurve

CURVE = CostCurve({1: 1, 2: 1.5, 3: 2, 4: 2, 8: 4})
PLAIN = Answered(list(range(13)), 10.0, [(0, 0)] * 12)
# Twelve tokens after the first: 4 of a draft of 3, 2 of a draft of 3 with its second token wrong, 6 without a draft.
DRAFTED = Answered([*range(10), 99, 98, 97], 15.0, [(3, 3), (3, 1), *[(0, 0)] * 6])


def figures(*pairs):
    return _figures(WORKLOADS[0], "auto", list(pairs), CURVE)


def test_speed_up_is_the_median_of_the_pairs():
    fast = Answered(DRAFTED.tokens, 30.0, DRAFTED.steps)
    row = figures((PLAIN, DRAFTED), (PLAIN, DRAFTED), (PLAIN, fast))
    assert (row["speed_up_min"], row["speed_up"], row["speed_up_max"]) == (1.5, 1.5, 3.0)
    assert row["repetitions"] == 3


def test_what_was_drafted_and_accepted_and_what_that_should_have_brought():
    row = figures((PLAIN, DRAFTED))
    assert (row["drafted_tokens"], row["accepted_tokens"]) == (6, 4)
    assert row["acceptance"] == pytest.approx(4 / 5)  # what stands behind a wrong token was not tried
    assert (row["mean_draft"], row["mean_accepted"]) == (3, 2)
    assert (row["steps"], row["draft_steps"]) == (8, 2)
    assert json.loads(row["acceptance_by_position"])[:4] == [1.0, 0.5, 1.0, None]
    assert row["predicted_speed_up"] == pytest.approx(12 / (2 * 2 + 6))


def test_tokens_before_the_first_that_differs_are_counted():
    assert figures((PLAIN, DRAFTED))["same_tokens"] == 10
    assert figures((PLAIN, Answered(PLAIN.tokens, 15.0, DRAFTED.steps)))["same_tokens"] == 13


def test_an_answer_without_drafts_has_no_acceptance():
    row = figures((PLAIN, PLAIN))
    assert row["acceptance"] is row["mean_draft"] is None
    assert row["predicted_speed_up"] == 1


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(
    "answers", [(PLAIN, DRAFTED), (PLAIN, PLAIN), (Answered([1], 0.0, []), Answered([1], 0.0, []))]
)
def test_every_format_shows_a_row(format_, answers):
    about = dict.fromkeys(SPECULATION.fields, 1) | {"model_type": "m", "n_prompt": 5}
    report = FORMATS[format_]()
    lines = [*report.begin(SPECULATION), *report.row(about | figures(answers))]
    assert all(isinstance(line, str) for line in lines)


@pytest.mark.parametrize("options", [{"repetitions": 0}, {"n_gen": 1}])
def test_nothing_to_measure_is_refused(options):
    with pytest.raises(UsageError):
        Suite(**options)
