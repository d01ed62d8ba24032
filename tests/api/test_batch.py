"""Rows of a batch on a tiny real model: whatever stands in a row, it gets an answer or an error of its own."""

import json

import numpy as np
import pytest

from edgeinfer.api.batch import batch, document, load_for_batch
from edgeinfer.api.jsonl import encode
from edgeinfer.options import RuntimeOptions


@pytest.fixture(scope="module")
def model(tiny_gguf):
    with load_for_batch(tiny_gguf, RuntimeOptions(prefix_cache=False), parallel=4) as loaded:
        yield loaded


def answers(model, lines):
    return [json.loads(encode(document(entry))) for entry in batch(model, lines)]


def nested(depth):
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize("depth", [100, 900, 960, 975, 980, 985, 990, 995, 100_000])
@pytest.mark.parametrize(
    "row",
    [
        b'{"id": %s, "prompt": "x"}',
        b'{"top_k": %s, "prompt": "x"}',
        b'{"messages": %s}',
        b'{"messages": [{"role": "odd", "content": "x", "more": %s}]}',
        b'{"%s": 1}',
    ],
)
def test_depth_is_an_error_of_the_row(model, row, depth):
    rows = answers(model, [row % nested(depth), b'{"prompt": "ok", "max_tokens": 1}'])
    assert rows[0]["error"]["code"] in ("usage", "unusable_input")
    assert (rows[0]["id"], rows[1]["id"], rows[1]["error"]) == (1, 2, None)


@pytest.mark.parametrize("key", ["top_k", "seed", "max_tokens", "stop", "messages", "logit_bias", "ignore_eos", "new"])
def test_an_error_does_not_repeat_what_is_long(model, key):
    (row,) = answers(model, [json.dumps({"prompt": "x", key: "y" * 100_000}).encode()])
    assert row["error"] is None if key == "stop" else len(json.dumps(row)) < 1000
    (row,) = answers(model, [json.dumps({"prompt": "x", key * 50_000: 1, "logit_bias": ["y" * 100_000]}).encode()])
    assert len(json.dumps(row)) < 1000


@pytest.mark.parametrize("bad", [0, False, {}, 5, [1], [None]])
def test_stop_is_text(model, bad):
    (row,) = answers(model, [json.dumps({"prompt": "x", "max_tokens": 1, "stop": bad}).encode()])
    assert row["error"]["code"] == "usage"


@pytest.mark.parametrize("row_id", [None, True, 1.5, float("nan"), [], {"a": 1}])
def test_what_is_no_id_is_reported_under_the_lines_number(model, row_id):
    rows = answers(model, [b"\n", json.dumps({"id": row_id, "prompt": "x"}).encode()])
    assert [(row["id"], row["error"]["code"]) for row in rows] == [(2, "usage")]


def test_a_prompt_that_cannot_fit_is_not_kept(model):
    (entry,) = batch(model, [json.dumps({"prompt": "word " * 5000}).encode()])
    assert entry.error.code == "context_overflow"
    assert isinstance(entry.row.tokens, np.ndarray)
    assert entry.row.tokens.size == 0


def test_extremes_of_every_option_are_answered_or_refused(model):
    odd = [float("nan"), float("inf"), -1, 0, 1e-300, 1e-45, 1e300, 2**31, 2**53, 10**400, "1", [], {}, True, None]
    keys = [
        "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "presence_penalty",
        "frequency_penalty", "dry_multiplier", "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau",
        "mirostat_eta", "seed", "logit_bias", "ignore_eos", "priority", "deadline_ms",
    ]  # fmt: skip
    lines = [json.dumps({"prompt": "Hello", "max_tokens": 3, key: value}).encode() for key in keys for value in odd]
    rows = answers(model, lines)
    assert [row["id"] for row in rows] == list(range(1, len(lines) + 1))
    assert {row["error"] and row["error"]["code"] for row in rows} == {None, "usage"}
