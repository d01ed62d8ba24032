"""The figures of the suite of waiting, from answers that were made up."""

import pytest

from edgeinfer.bench import latency
from edgeinfer.bench.latency import LATENCY, Heard, Suite, figures, run
from edgeinfer.bench.report import FORMATS
from edgeinfer.errors import UsageError
from edgeinfer.options import RuntimeOptions

SLOW = Heard((100.0, 110.0, 120.0, 150.0), 4)
FAST = Heard((50.0, 55.0, 60.0, 65.0), 4)


def test_the_first_text_is_the_median_of_the_repetitions_with_their_span():
    row = figures([SLOW, FAST, FAST])
    assert (row["ttft_min_ms"], row["ttft_ms"], row["ttft_max_ms"]) == (50, 50, 100)
    assert row["repetitions"] == 3


def test_waits_between_pieces_are_of_all_repetitions_and_none_is_between_two_answers():
    row = figures([SLOW, FAST])
    assert (row["itl_p50_ms"], row["itl_max_ms"]) == (7.5, 30)  # of 10, 10, 30, 5, 5, 5
    assert 10 < row["itl_p95_ms"] < row["itl_p99_ms"] < 30


def test_speed_counts_tokens_and_not_the_pieces_that_drafts_make_of_them():
    assert figures([SLOW])["decode_ts"] == 60
    row = figures([Heard((100.0, 150.0), 4)])
    assert (row["decode_ts"], row["itl_p50_ms"]) == (60, 50)


def test_a_prompt_that_was_not_computed_is_seen():
    assert figures([FAST, Heard((1.0, 2.0), 2, cached_tokens=9)])["cached_tokens"] == 9


@pytest.mark.parametrize("heard", [[SLOW, FAST], [Heard((5.0,), 1)], [Heard((), 1)]])
@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_shows_a_row_of_a_short_answer_too(format_, heard):
    report = FORMATS[format_]()
    about = dict.fromkeys(LATENCY.fields, 1) | {"model_type": "m", "workload": "chat", "build_commit": "b"}
    assert len([*report.begin(LATENCY), *report.row(about | figures(heard)), *report.end(None)]) >= 1


@pytest.mark.parametrize("options", [{"repetitions": 0}, {"n_gen": (1,)}, {"n_gen": ()}])
def test_nothing_to_measure_is_refused(options):
    with pytest.raises(UsageError):
        Suite(**options)


@pytest.mark.model
def test_every_repetition_computes_its_prompt_anew(smollm2_gguf, monkeypatch):
    monkeypatch.setattr(latency, "_ASKED", ("chat",))  # the other prompt takes seconds
    (row,) = run([smollm2_gguf], Suite((6,), (None,), 2), RuntimeOptions(draft="off"))
    assert list(row) == list(LATENCY.fields)
    assert (row["workload"], row["n_gen"], row["cached_tokens"]) == ("chat", 6, 0)
    assert row["n_prompt"] > 20
    assert 0 < row["itl_p50_ms"] <= row["itl_p95_ms"] <= row["itl_max_ms"]
    assert row["ttft_min_ms"] > row["itl_p50_ms"], "a prompt of tens of tokens takes longer than a token"
