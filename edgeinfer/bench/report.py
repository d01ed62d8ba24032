"""Rows in llama-bench's five formats: md, json, jsonl, csv, sql."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Iterator
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
TABLE = "llama_bench"

Row = dict[str, Any]


class Report(Protocol):
    """Turns rows into text, piece by piece; each piece is a line or several, without the last newline."""

    def begin(self) -> Iterator[str]:
        """What stands before the first row."""
        ...

    def row(self, row: Row) -> Iterator[str]:
        """One row."""
        ...

    def end(self, error: EdgeinferError | None) -> Iterator[str]:
        """What stands after the last row; after a failure too, so that the whole stays valid."""
        ...


class Markdown:
    """A table for people, a line as soon as it is measured."""

    _HEAD = ("model", "size", "params", "threads", "test", "t/s", "first token", "per token", "bandwidth")
    _WIDTHS = (24, 10, 9, 7, 14, 18, 11, 10, 9)

    def begin(self) -> Iterator[str]:
        """The head."""
        yield self._line(self._HEAD)
        yield "| " + " | ".join("-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(self._WIDTHS)) + " |"

    def row(self, row: Row) -> Iterator[str]:
        """A line."""
        fraction = row["fraction_of_bandwidth"]
        yield self._line(
            (
                row["model_type"],
                f"{row['model_size'] / 2**20:.2f} MiB",
                f"{row['model_n_params'] / 1e6:.2f} M",
                str(row["n_threads"]),
                test_label(row),
                f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
                _ms(row["ttft_ms"]),
                _ms(row["itl_p50_ms"]),
                "" if fraction is None else f"{100 * fraction:.0f} %",
            )
        )

    def end(self, error: EdgeinferError | None) -> Iterator[str]:
        """Nothing: the error goes to stderr."""
        yield from ()

    def _line(self, cells: tuple[str, ...]) -> str:
        padded = (
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, self._WIDTHS, strict=True))
        )
        return "| " + " | ".join(padded) + " |"


class Json:
    """One array of rows; after a failure its last element is the error document."""

    def __init__(self) -> None:
        self._held_back = ""  # the latest element, until it is known whether a comma follows

    def begin(self) -> Iterator[str]:
        """The bracket."""
        yield "["

    def row(self, row: Row) -> Iterator[str]:
        """The element before this one."""
        yield from self._next(row)

    def end(self, error: EdgeinferError | None) -> Iterator[str]:
        """The last element, the error if there is one, and the bracket."""
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

    def begin(self) -> Iterator[str]:
        """Nothing."""
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

    def begin(self) -> Iterator[str]:
        """The names."""
        yield ",".join(FIELDS)

    def row(self, row: Row) -> Iterator[str]:
        """The values."""
        line = io.StringIO()
        csv.writer(line, quoting=csv.QUOTE_NONNUMERIC, lineterminator="").writerow([row[name] for name in FIELDS])
        yield line.getvalue()

    def end(self, error: EdgeinferError | None) -> Iterator[str]:
        """Nothing."""
        yield from ()


class Sql:
    """A table that SQLite reads, and an INSERT per row."""

    def begin(self) -> Iterator[str]:
        """The table."""
        columns = ",\n".join(f"  {name} {kind}" for name, kind in FIELDS.items())
        yield f"CREATE TABLE IF NOT EXISTS {TABLE} (\n{columns}\n);\n"

    def row(self, row: Row) -> Iterator[str]:
        """The INSERT."""
        yield f"INSERT INTO {TABLE} ({', '.join(FIELDS)}) VALUES ({', '.join(_sql(row[name]) for name in FIELDS)});"

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


def test_label(row: Row) -> str:
    """`pp512`, `tg128 @ d4096`."""
    name = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
    return name + (f" @ d{row['n_depth']}" if row["n_depth"] else "")


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} ms"


def _sql(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(int(value)) if isinstance(value, bool) else str(value)
