"""The figures of the suite of the KV cache, from measurements that were made up."""

import pytest

from edgeinfer.bench.kv import KV, Suite, compare
from edgeinfer.bench.measure import Samples, Trial
from edgeinfer.bench.report import FORMATS
from edgeinfer.errors import UsageError

F16, Q8 = ("f16", "f16"), ("q8_0", "q8_0")
TRIAL = Trial(100, 10, 50)


def _samples(prompt_s, gen_s):
    return Samples((int((prompt_s + gen_s) * 1e9),), (int(prompt_s * 1e9),), ())


# The second round is on a machine of half the speed.
ROUNDS = [
    {F16: _samples(1, 1), Q8: _samples(2, 0.5)},
    {F16: _samples(2, 2), Q8: _samples(4, 1)},
    {F16: _samples(1, 1), Q8: _samples(2, 0.5)},
]


def test_ratios_are_of_the_same_round():
    row = compare(ROUNDS, Q8, F16, TRIAL)
    assert (row["prompt_ratio"], row["gen_ratio"]) == (0.5, 2)
    assert compare(ROUNDS, F16, F16, TRIAL)["gen_ratio"] == 1


def test_rates_are_medians_with_their_span():
    row = compare(ROUNDS, Q8, F16, TRIAL)
    assert (row["prompt_ts_min"], row["prompt_ts"], row["prompt_ts_max"]) == (25, 50, 50)
    assert (row["gen_ts_min"], row["gen_ts"], row["gen_ts_max"]) == (10, 20, 20)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_type_that_the_model_cannot_have_is_a_row_without_figures(format_):
    report = FORMATS[format_]()
    row = dict.fromkeys(KV.fields) | {"model_type": "m", "model_size": 1, "model_n_params": 1, "n_threads": 1}
    row |= {"type_k": "q8_0", "type_v": "q8_0", "n_depth": 0, "build_commit": "b"}
    text = "\n".join([*report.begin(KV), *report.row(row), *report.end(None)])
    assert "q8_0" in text
    assert "None" not in text


@pytest.mark.parametrize("options", [{"repetitions": 0}, {"n_gen": (0,)}, {"n_prompt": (0,)}, {"n_depth": (-1,)}])
def test_nothing_to_measure_is_refused(options):
    with pytest.raises(UsageError):
        Suite(**options)
