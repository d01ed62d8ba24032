"""What can be typed in a chat, without a terminal."""

import json

import pytest

from edgeinfer.cli.commands import HELP, Command, Message, completions, help_text, is_open, parse
from edgeinfer.cli.settings import Settings, saved_settings
from edgeinfer.cli.status import status_line, token_table
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.options import SamplingParams
from edgeinfer.types import Answer, Timings, Usage


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("hello there", Message("hello there")),
        ("  \n ", None),
        ("/set temp 0.5", Command("/set", "temp 0.5")),
        ("/?", Command("/help")),
        (" /usr/bin is a folder", Message("/usr/bin is a folder")),
        ('"""\n/help\n  x"""', Message("/help\n  x")),
        ('""""""', None),
        ('"""never closed', Message("never closed")),
    ],
)
def test_what_is_typed(typed, wanted):
    assert parse(typed) == wanted


@pytest.mark.parametrize(
    ("typed", "expected"),
    [('"""', True), ('""""', True), ('"""a\nb', True), ('"""a"""', False), ('""""""', False), ("a", False)],
)
def test_quotes_that_are_open(typed, expected):
    assert is_open(typed) == expected


def test_completion():
    assert completions("/re") == [("/regen", 3)]
    assert completions("/set t") == [(name, 1) for name in ("temperature", "top_k", "top_p", "typical_p")]
    assert completions("/show s") == [("settings", 1), ("system", 1)]
    assert completions("hello") == completions("/clear x") == []
    assert all(usage in help_text() for usage in HELP)


def test_settings_go_over_what_the_model_recommends_and_can_be_taken_back():
    settings = Settings(SamplingParams(temperature=0.3), {"top_k": 5})
    settings.set("temp", "0.7")
    settings.set("max-tokens", "9")
    settings.set("stop", "END")
    settings.set("logit_bias", "5-inf 7+1.5")
    assert (settings.params.temperature, settings.params.top_k, settings.max_tokens) == (0.7, 5, 9)
    assert settings.stop == ("END",)
    assert settings.params.logit_bias == ((5, float("-inf")), (7, 1.5))
    assert ("logit_bias", "5-inf 7+1.5") in settings.table()
    settings.set("temperature", "none")
    assert settings.params.temperature == 0.3
    assert saved_settings(json.loads(json.dumps(settings.given)), "s") == settings.given


@pytest.mark.parametrize(
    ("name", "value"),
    [("temp", "hot"), ("temp", "-1"), ("temp", "nan"), ("top_k", "1.5"), ("max_tokens", "0"), ("ignore_eos", "maybe")],
)
def test_a_setting_that_cannot_be_changes_nothing(name, value):
    settings = Settings(SamplingParams(), {"temperature": 0.5})
    with pytest.raises(UsageError):
        settings.set(name, value)
    assert settings.given == {"temperature": 0.5}


@pytest.mark.parametrize(
    "values",
    [
        {"nonsense": 1},
        {"temperature": "1"},
        {"temperature": True},
        {"temperature": -1},
        {"top_k": 1e300},
        {"stop": "x"},
        {"stop": [""]},
        {"logit_bias": [[1]]},
        {"logit_bias": [["1", 2]]},
        {"max_tokens": 0},
    ],
)
def test_settings_of_a_file_are_checked(values):
    with pytest.raises(UnusableInputError, match=r"^x\.json: "):
        saved_settings(values, "x.json")


ANSWER = Answer("m", "k", "t", "stop", 7, Usage(100, 90, 20), Timings(decode_tps=12.34))


def test_the_status_line_leaves_out_what_does_not_fit():
    assert status_line(4096, None, 80) == "4096 of 4096 tokens of context left"
    whole = "20 tokens, 90 of 100 cached, 12.3 t/s, 3976 of 4096 tokens of context left"
    assert status_line(4096, ANSWER, 80) == whole
    assert status_line(4096, ANSWER, 60) == "12.3 t/s, 3976 of 4096 tokens of context left"
    for n_columns in range(1, 90):
        assert len(status_line(4096, ANSWER, n_columns)) <= n_columns
    assert "90 cached" in token_table(4096, ANSWER)
    assert "3976 of 4096" in token_table(4096, ANSWER)
