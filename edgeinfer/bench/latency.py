"""The suite of waiting: how long a person waits for the first text of an answer, and from one piece to the next.

The whole way that a prompt takes: chat template, tokens, prefill, sampling, text. Every repetition computes its prompt
anew and starts with drafts that have learned nothing from the others.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgeinfer.api.drafts import open_drafting
from edgeinfer.api.load import load
from edgeinfer.api.model import Model
from edgeinfer.bench.batching import ABOUT, warm_up
from edgeinfer.bench.report import Column, Row, Schema, model_columns, ms
from edgeinfer.bench.throughput import machine_and_model
from edgeinfer.bench.workloads import WORKLOADS, Workload
from edgeinfer.errors import UsageError
from edgeinfer.options import RuntimeOptions, SamplingParams

_ASKED = ("chat", "question over a text")
"""A short prompt and a long one."""

LATENCY = Schema(
    "latency",
    ABOUT
    | {
        "workload": "TEXT",
        "draft": "TEXT",
        "n_prompt": "INTEGER",
        "cached_tokens": "INTEGER",
        "n_gen": "INTEGER",
        "repetitions": "INTEGER",
        "load_ms": "REAL",
        "ttft_ms": "REAL",
        "ttft_min_ms": "REAL",
        "ttft_max_ms": "REAL",
        "itl_p50_ms": "REAL",
        "itl_p95_ms": "REAL",
        "itl_p99_ms": "REAL",
        "itl_max_ms": "REAL",
        "decode_ts": "REAL",
        "decode_ts_min": "REAL",
        "decode_ts_max": "REAL",
    },
    (
        *model_columns(),
        Column("workload", 20, lambda row: row["workload"], is_text=True),
        Column("prompt", 6, lambda row: str(row["n_prompt"])),
        Column("answer", 6, lambda row: str(row["n_gen"])),
        Column("first text", 29, lambda row: _first_text(row)),
        Column("itl p50", 10, lambda row: ms(row["itl_p50_ms"])),
        Column("itl p95", 10, lambda row: ms(row["itl_p95_ms"])),
        Column("longest", 10, lambda row: ms(row["itl_max_ms"])),
        Column("t/s", 8, lambda row: "" if row["decode_ts"] is None else f"{row['decode_ts']:.2f}"),
    ),
)


@dataclass(frozen=True, slots=True)
class Suite:
    """The most tokens of an answer, and how often each prompt is answered."""

    n_gen: tuple[int, ...] = (64,)
    threads: tuple[int | None, ...] = (None,)
    repetitions: int = 5

    def __post_init__(self) -> None:
        """Refuse with a UsageError what cannot be measured."""
        if self.repetitions < 1 or min(self.n_gen, default=0) < 2:
            raise UsageError("nothing to measure", "give at least one repetition, of answers of two tokens")


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer as its reader had it."""

    ticks_ms: tuple[float, ...]
    """From the question to each piece of text."""
    n_tokens: int
    cached_tokens: int = 0
    """Of the prompt, that needed no computing: none should be."""


def run(models: Sequence[str | Path], suite: Suite, options: RuntimeOptions) -> Iterator[Row]:
    """Measure, and give each prompt's row as soon as it is known. Raises what `load` raises."""
    workloads = [workload for workload in WORKLOADS if workload.name in _ASKED]
    for path, threads in itertools.product(models, suite.threads):
        settings = replace(options, threads=threads, prefix_cache=False)
        with load(path, settings) as model:
            about = machine_and_model(path, model) | {"n_threads": model.backend.threads}
            about = {name: about[name] for name in ABOUT} | {
                "draft": settings.draft,
                "load_ms": round(model.load_ms, 3),
            }
            for workload, n_gen in itertools.product(workloads, suite.n_gen):
                _hear(model, workload, 2, settings)
                heard = [_hear(model, workload, n_gen, settings) for _ in range(suite.repetitions)]
                shape = {"workload": workload.name, "n_prompt": len(model.tokens(workload.prompt))}
                row = about | shape | figures(heard)
                yield {name: row[name] for name in LATENCY.fields}


def _hear(model: Model, workload: Workload, n_gen: int, options: RuntimeOptions) -> Heard:
    engine = model.engine
    warm_up(model)  # so that nothing of this prompt is in the KV cache
    engine.drafting = open_drafting(
        options, model.backend, engine.drafting.curve, model.drafter.source if model.drafter else None
    )
    started_s = time.perf_counter()
    stream = model.stream(workload.prompt, params=SamplingParams(temperature=0), max_tokens=n_gen)
    ticks_ms = tuple((time.perf_counter() - started_s) * 1e3 for _ in stream)
    usage = stream.answer.usage
    return Heard(ticks_ms, usage.completion_tokens, usage.cached_tokens)


def figures(heard: list[Heard]) -> Row:
    """What the answers to one prompt say; None for what a very short answer does not tell."""
    first = [one.ticks_ms[0] for one in heard if one.ticks_ms]
    between = np.concatenate([np.diff(one.ticks_ms) for one in heard])
    speeds = [1e3 * (one.n_tokens - 1) / (one.ticks_ms[-1] - one.ticks_ms[0]) for one in heard if len(one.ticks_ms) > 1]
    percentiles = np.percentile(between, [50, 95, 99, 100]).round(4).tolist() if between.size else [None] * 4
    names = ("itl_p50_ms", "itl_p95_ms", "itl_p99_ms", "itl_max_ms")
    row: Row = {"n_gen": heard[0].n_tokens, "repetitions": len(heard)}
    row |= {"cached_tokens": max(one.cached_tokens for one in heard)} | dict(zip(names, percentiles, strict=True))
    row |= dict(zip(("ttft_ms", "ttft_min_ms", "ttft_max_ms"), _middle_and_span(first), strict=True))
    return row | dict(zip(("decode_ts", "decode_ts_min", "decode_ts_max"), _middle_and_span(speeds), strict=True))


def _middle_and_span(values: list[float]) -> tuple[float | None, ...]:
    """Median, least and most."""
    if not values:
        return None, None, None
    return round(statistics.median(values), 3), round(min(values), 3), round(max(values), 3)


def _first_text(row: Row) -> str:
    if row["ttft_ms"] is None:
        return ""
    return f"{row['ttft_ms']:.1f} ({row['ttft_min_ms']:.1f}–{row['ttft_max_ms']:.1f}) ms"
