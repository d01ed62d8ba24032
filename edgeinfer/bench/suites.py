"""The suites by name: what each measures, made of what was asked for on a command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgeinfer.bench.report import Row, Schema
from edgeinfer.options import RuntimeOptions

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure; a suite looks at what it has a use for. Empty numbers are its own."""

    models: list[str]
    n_prompt: Numbers
    n_gen: Numbers
    n_depth: Numbers
    parallel: Numbers
    threads: tuple[int | None, ...]
    repetitions: int


def begin(suite: str, asked: Asked, options: RuntimeOptions) -> tuple[Schema, Iterator[Row]]:
    """What a suite's rows hold, and the rows as they are measured. Raises UsageError for what cannot be measured."""
    return _SUITES[suite](asked, options)


def _throughput(asked: Asked, options: RuntimeOptions) -> tuple[Schema, Iterator[Row]]:
    from edgeinfer.bench.report import THROUGHPUT
    from edgeinfer.bench.throughput import Suite, run

    tests = Suite(asked.n_prompt, asked.n_gen, asked.n_depth, asked.threads, asked.repetitions)
    return THROUGHPUT, run(asked.models, tests, options)


def _latency(asked: Asked, options: RuntimeOptions) -> tuple[Schema, Iterator[Row]]:
    from edgeinfer.bench.latency import LATENCY, Suite, run

    return LATENCY, run(asked.models, Suite(asked.n_gen, asked.threads, asked.repetitions), options)


def _speculation(asked: Asked, options: RuntimeOptions) -> tuple[Schema, Iterator[Row]]:
    from edgeinfer.bench.speculation import SPECULATION, Suite, run

    most = min(asked.n_gen) if asked.n_gen else None
    return SPECULATION, run(asked.models, Suite(asked.threads, asked.repetitions, most), options)


def _batch(asked: Asked, options: RuntimeOptions) -> tuple[Schema, Iterator[Row]]:
    from edgeinfer.bench.batching import BATCH, Suite, run_batch

    return BATCH, run_batch(asked.models, Suite(asked.n_prompt, asked.n_gen, asked.parallel, asked.threads), options)


def _prefix(asked: Asked, options: RuntimeOptions) -> tuple[Schema, Iterator[Row]]:
    from edgeinfer.bench.batching import PREFIX, Suite, run_prefix

    return PREFIX, run_prefix(asked.models, Suite(asked.n_prompt, asked.n_gen, asked.parallel, asked.threads), options)


def _kv(asked: Asked, options: RuntimeOptions) -> tuple[Schema, Iterator[Row]]:
    from edgeinfer.bench.kv import KV, Suite, run

    tests = Suite(asked.n_prompt, asked.n_gen, asked.n_depth, asked.threads, asked.repetitions)
    return KV, run(asked.models, tests, options)


_SUITES = {
    "throughput": _throughput,
    "latency": _latency,
    "speculation": _speculation,
    "batch": _batch,
    "prefix": _prefix,
    "kv": _kv,
}
