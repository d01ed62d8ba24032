"""Rows of a suite in llama-bench's five formats: md, json, jsonl, csv, sql."""

from __future__ import annotations

import csv
import io
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from edgeinfer.errors import EdgeinferError

# llama-bench's fields in its order, with their SQL types, then ours.
FIELDS: dict[str, str] = {
    "build_commit": "TEXT",
    "build_number": "INTEGER",
    "cpu_info": "TEXT",
    "gpu_info": "TEXT",
    "backends": "TEXT",
    "model_filename": "TEXT",
    "model_type": "TEXT",
    "model_size": "INTEGER",
    "model_n_params": "INTEGER",
    "n_batch": "INTEGER",
    "n_ubatch": "INTEGER",
    "n_threads": "INTEGER",
    "cpu_mask": "TEXT",
    "cpu_strict": "INTEGER",
    "poll": "INTEGER",
    "type_k": "TEXT",
    "type_v": "TEXT",
    "n_gpu_layers": "INTEGER",
    "n_cpu_moe": "INTEGER",
    "split_mode": "TEXT",
    "main_gpu": "INTEGER",
    "no_kv_offload": "INTEGER",
    "flash_attn": "INTEGER",
    "devices": "TEXT",
    "tensor_split": "TEXT",
    "tensor_buft_overrides": "TEXT",
    "load_mode": "TEXT",
    "lazy_mode": "TEXT",
    "embeddings": "INTEGER",
    "no_op_offload": "INTEGER",
    "no_host": "INTEGER",
    "repack": "INTEGER",
    "fit_target": "INTEGER",
    "fit_min_ctx": "INTEGER",
    "n_prompt": "INTEGER",
    "n_gen": "INTEGER",
    "n_depth": "INTEGER",
    "test_time": "TEXT",
    "avg_ns": "INTEGER",
    "stddev_ns": "INTEGER",
    "avg_ts": "REAL",
    "stddev_ts": "REAL",
    "ttft_ms": "REAL",
    "itl_p50_ms": "REAL",
    "itl_p95_ms": "REAL",
    "peak_rss_bytes": "INTEGER",
    "load_ms": "REAL",
    "memory_bandwidth_gbps": "REAL",
    "fraction_of_bandwidth": "REAL",
}
JSON_ONLY_FIELDS = ("samples_ns", "samples_ts")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """Of the table for people; numbers stand on the right."""

    head: str
    width: int
    cell: Callable[[Row], str]
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class Schema:
    """What a suite's rows hold."""

    table: str
    fields: dict[str, str]
    """Names with their SQL types, in order."""
    columns: tuple[Column, ...]


def ms(value: float | None) -> str:
    """Milliseconds for people."""
    return "" if value is None else f"{value:.2f} ms"


def model_columns() -> tuple[Column, ...]:
    """What stands first in every table."""
    return (
        Column("model", 24, _model, is_text=True),
        Column("size", 10, lambda row: f"{row['model_size'] / 2**20:.2f} MiB"),
        Column("params", 9, lambda row: f"{row['model_n_params'] / 1e6:.2f} M"),
        Column("threads", 7, lambda row: str(row["n_threads"])),
    )


def _model(row: Row) -> str:
    """llama.cpp's words with the type as everyone writes it: `llama 8B Q4_K_M`, not `llama 8B Q4_K - Medium`."""
    return re.sub(r" - (Small|Medium|Large)$", lambda size: f"_{size[1][0]}", row["model_type"])


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.0f} %"


def row_label(row: Row) -> str:
    """`pp512`, `tg128 @ d4096`."""
    name = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
    return name + (f" @ d{row['n_depth']}" if row["n_depth"] else "")


THROUGHPUT = Schema(
    "llama_bench",
    FIELDS,
    (
        # Within 100 columns: parameters are in the other formats, and nearly in the model's name.
        Column("model", 18, _model, is_text=True),
        Column("size", 9, lambda row: f"{row['model_size'] / 2**20:.1f} MiB"),
        Column("cpu", 3, lambda row: str(row["n_threads"])),
        Column("test", 13, row_label),
        Column("t/s", 14, lambda row: f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"),
        Column("ttft ms", 8, lambda row: _ms(row["ttft_ms"])),
        Column("itl ms", 6, lambda row: _ms(row["itl_p50_ms"])),
        Column("b/w", 4, lambda row: _percent(row["fraction_of_bandwidth"])),
    ),
)


class Report(Protocol):
    """Turns rows into text, piece by piece; each piece is a line or several, without the last newline."""

    def begin(self, schema: Schema = THROUGHPUT) -> Iterator[str]:
        """What stands before the first row of a suite; one suite can follow another."""
        ...

    def row(self, row: Row) -> Iterator[str]:
        """One row."""
        ...

    def end(self, error: EdgeinferError | None) -> Iterator[str]:
        """What stands after the last row; after a failure too, so that the whole stays valid."""
        ...


class Markdown:
    """A table for people, a line as soon as it is measured."""

    def __init__(self) -> None:
        self._columns: tuple[Column, ...] = ()
        self._has_head = False
        self._builds: dict[str, None] = {}  # a set that keeps its order

    def begin(self, schema: Schema = THROUGHPUT) -> Iterator[str]:
        """Nothing, as what fails at once has no table; a line apart from the table before."""
        if self._has_head:
            yield ""
        self._columns, self._has_head = schema.columns, False

    def row(self, row: Row) -> Iterator[str]:
        """A line, the first one under the head."""
        if not self._has_head:
            self._has_head = True
            yield self._line([column.head for column in self._columns])
            yield self._line(["-" * c.width if c.is_text else "-" * (c.width - 1) + ":" for c in self._columns])
        yield self._line([column.cell(row) for column in self._columns])
        self._builds[row["build_commit"]] = None

    def end(self, error: EdgeinferError | None) -> Iterator[str]:
        """Which library it was, as llama-bench ends; the error goes to stderr."""
        if self._builds:
            yield from ("", f"build: {', '.join(self._builds)}")

    def _line(self, cells: list[str]) -> str:
        padded = (
            cell.ljust(column.width) if column.is_text else cell.rjust(column.width)
            for cell, column in zip(cells, self._columns, strict=True)
        )
        return "| " + " | ".join(padded) + " |"


class Json:
    """One array of rows; after a failure its last element is the error document."""

    def __init__(self) -> None:
        self._has_begun = False
        self._held_back = ""  # the latest element, until it is known whether a comma follows

    def begin(self, schema: Schema = THROUGHPUT) -> Iterator[str]:
        """The bracket, once for all suites."""
        if not self._has_begun:
            self._has_begun = True
            yield "["

    def row(self, row: Row) -> Iterator[str]:
        """The element before this one."""
        yield from self._next(row)

    def end(self, error: EdgeinferError | None) -> Iterator[str]:
        """The last element, the error if there is one, and the bracket."""
        yield from self.begin()  # where it failed before there was a suite
        if error is not None:
            yield from self._next(error.as_json())
        if self._held_back:
            yield self._held_back
        yield "]"

    def _next(self, document: Any) -> Iterator[str]:
        if self._held_back:
            yield self._held_back + ","
        self._held_back = textwrap.indent(json.dumps(document, indent=2, ensure_ascii=False), "  ")


class JsonLines:
    """A row per line; after a failure a last line with the error document."""

    def begin(self, schema: Schema = THROUGHPUT) -> Iterator[str]:
        """Nothing: rows say themselves what they hold."""
        yield from ()

    def row(self, row: Row) -> Iterator[str]:
        """A line."""
        yield json.dumps(row, ensure_ascii=False)

    def end(self, error: EdgeinferError | None) -> Iterator[str]:
        """The error, if any."""
        if error is not None:
            yield json.dumps(error.as_json(), ensure_ascii=False)


class Csv:
    """A head and a line per row."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def begin(self, schema: Schema = THROUGHPUT) -> Iterator[str]:
        """The names."""
        self._fields = schema.fields
        yield ",".join(self._fields)

    def row(self, row: Row) -> Iterator[str]:
        """The values."""
        line = io.StringIO()
        csv.writer(line, quoting=csv.QUOTE_NONNUMERIC, lineterminator="").writerow([row[name] for name in self._fields])
        yield line.getvalue()

    def end(self, error: EdgeinferError | None) -> Iterator[str]:
        """Nothing."""
        yield from ()


class Sql:
    """A table that SQLite reads, and an INSERT per row."""

    def __init__(self) -> None:
        self._table = ""
        self._fields: dict[str, str] = {}

    def begin(self, schema: Schema = THROUGHPUT) -> Iterator[str]:
        """The table."""
        self._table, self._fields = schema.table, schema.fields
        columns = ",\n".join(f"  {name} {kind}" for name, kind in self._fields.items())
        yield f"CREATE TABLE IF NOT EXISTS {self._table} (\n{columns}\n);\n"

    def row(self, row: Row) -> Iterator[str]:
        """The INSERT."""
        values = ", ".join(_sql(row[name]) for name in self._fields)
        yield f"INSERT INTO {self._table} ({', '.join(self._fields)}) VALUES ({values});"

    def end(self, error: EdgeinferError | None) -> Iterator[str]:
        """Nothing."""
        yield from ()


FORMATS: dict[str, type[Markdown | Json | JsonLines | Csv | Sql]] = {
    "md": Markdown,
    "json": Json,
    "jsonl": JsonLines,
    "csv": Csv,
    "sql": Sql,
}


def _sql(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(int(value)) if isinstance(value, bool) else str(value)
