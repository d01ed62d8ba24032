"""What people ask small models for, as prompts: what a draft can know of the answer differs most between these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """A prompt and how its answer is sampled; greedy unless said otherwise."""

    name: str
    prompt: str
    max_tokens: int
    temperature: float = 0.0
    json_schema: str | None = None
    """What the answer is held to."""


_CODE = '''\
import csv
from pathlib import Path


def load(path):
    """Read the rows of a CSV file, each as a dictionary."""
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def total(rows, column):
    """Add up a column, leaving out what is no number."""
    result = 0.0
    for row in rows:
        try:
            result += float(row[column])
        except ValueError:
            continue
    return result


def report(path, column):
    rows = load(path)
    print(f"{len(rows)} rows, {column}: {total(rows, column):.2f}")
'''

_ARTICLE = """\
The lighthouse on Garret Point was lit for the first time in the autumn of 1871, after three ships had been lost on \
the reef in a single winter. Its keeper, Martha Lindqvist, had come to the island as a schoolteacher and took the \
post when nobody else applied. For thirty-four years she climbed the hundred and twelve steps every evening, trimmed \
the wick, and wrote the weather into a ledger with a blue cover. The ledgers survived a fire, a flood and the \
closing of the station, and are now kept in the harbour museum. Two years ago a group of oceanographers began to \
copy the entries into a database. They found that the keeper had measured the temperature of the water twice a day, \
at the same place and with the same thermometer, which makes the ledgers the longest unbroken record of sea \
temperature on that coast. According to the record, the water at Garret Point has warmed by 1.3 degrees since 1871, \
and most of the warming happened in the last forty years. The group wants to publish the record next spring. The \
museum has asked for the ledgers to be returned to their glass case by then, because the summer visitors ask for \
them."""

_TEN_BOOKS = "Write a JSON array of ten books. Each has the keys title, author, year, genre and pages. Only the JSON."
_BOOKS = """\
{"type": "array", "minItems": 10, "maxItems": 10, "items": {
  "type": "object",
  "properties": {
    "title": {"type": "string"}, "author": {"type": "string"}, "year": {"type": "integer"},
    "genre": {"type": "string"}, "pages": {"type": "integer"}
  },
  "required": ["title", "author", "year", "genre", "pages"]
}}"""

WORKLOADS = (
    Workload("chat", "What is the difference between a virus and a bacterium? Explain it to a child.", 200),
    Workload(
        "code edit",
        f"```python\n{_CODE}```\n\nRename load to read_rows, total to sum_column and report to print_report. "
        "Write the whole file with the new names.",
        260,
    ),
    Workload(
        "summarise",
        f"Summarise this text in three sentences. Reuse the text's own words.\n\n{_ARTICLE}",
        260,
    ),
    Workload(
        "question over a text",
        f"{_ARTICLE}\n\nWho kept the lighthouse, what did she measure, and why does it matter today? "
        "Answer from the text above.",
        160,
    ),
    Workload("JSON", _TEN_BOOKS, 400),
    Workload("json-schema", _TEN_BOOKS, 600, json_schema=_BOOKS),
    Workload(
        "translation",
        f"Translate this text into French.\n\n{_ARTICLE[: _ARTICLE.index('The ledgers survived')]}",
        200,
    ),
    Workload("temperature 1.5", "Tell me a strange story about a clockmaker and the sea.", 160, temperature=1.5),
)
"""The last one is the worst case: a text that hardly repeats itself, drawn from many tokens at every position."""
