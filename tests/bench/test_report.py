"""Every format is what its readers expect, after a failure too."""

from __future__ import annotations

import csv
import json
import sqlite3
from typing import Any

import pytest

from edgeinfer.bench.report import FIELDS, FORMATS, JSON_ONLY_FIELDS
from edgeinfer.errors import EdgeinferError, UnusableInputError

ROW: dict[str, Any] = {
    name: 1 if kind == "INTEGER" else 1.5 if kind == "REAL" else "it's" for name, kind in FIELDS.items()
}
ROW |= {
    "model_type": "llama 256M Q4_K - Medium",
    "n_prompt": 512,
    "n_gen": 0,
    "itl_p50_ms": None,
    "fraction_of_bandwidth": None,
    "cpu_strict": False,
}
ROW |= {name: [1, 2] for name in JSON_ONLY_FIELDS}
ERROR = UnusableInputError("bad.gguf: broken", "get another")


def _text(name: str, n_rows: int, error: EdgeinferError | None = None) -> str:
    report = FORMATS[name]()
    lines = [*report.begin()]
    for _ in range(n_rows):
        lines += report.row(ROW)
    return "\n".join([*lines, *report.end(error)]) + "\n"


@pytest.mark.parametrize("n_rows", [0, 1, 3])
@pytest.mark.parametrize("error", [None, ERROR])
def test_json_is_one_valid_array(n_rows: int, error: EdgeinferError | None) -> None:
    documents = json.loads(_text("json", n_rows, error))
    assert documents == [ROW] * n_rows + ([ERROR.as_json()] if error else [])


@pytest.mark.parametrize("error", [None, ERROR])
def test_every_line_of_jsonl_is_a_document(error: EdgeinferError | None) -> None:
    documents = [json.loads(line) for line in _text("jsonl", 2, error).splitlines()]
    assert documents == [ROW] * 2 + ([ERROR.as_json()] if error else [])


def test_csv_has_a_head_and_the_fields() -> None:
    rows = list(csv.DictReader(_text("csv", 2).splitlines()))
    assert [row["cpu_info"] for row in rows] == ["it's"] * 2
    assert list(rows[0]) == list(FIELDS)


def test_sql_fills_a_table() -> None:
    database = sqlite3.connect(":memory:")
    database.executescript(_text("sql", 3))
    found = database.execute("SELECT count(*), min(cpu_info), max(itl_p50_ms) FROM llama_bench").fetchone()
    database.close()
    assert found == (3, "it's", None)


def test_markdown_has_columns_of_one_width() -> None:
    *lines, blank, build = _text("md", 2).splitlines()
    assert (blank, build) == ("", "build: it's")
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 100
    assert "| llama 256M Q4_K_M " in lines[2]
    assert "pp512" in lines[2]
    assert "1.50 ± 1.50" in lines[2]
