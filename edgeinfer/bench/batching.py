"""The suites of many requests at a time: `batch`, with prompts of their own, and `prefix`, with a common beginning.

`batch` has llama-batched-bench's names (tools/batched-bench): `pl` requests of `pp` random tokens, `tg` tokens each.
But requests here do not wait for each other: who has its prompt done goes on. So prompts count until the last first
token, answers from there on, and tokens that were written before count only in the whole.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgeinfer.api.batch import MAX_PARALLEL
from edgeinfer.api.load import load
from edgeinfer.api.model import Model
from edgeinfer.bench.report import FIELDS, Column, Row, Schema, model_columns, ms
from edgeinfer.bench.throughput import machine_and_model
from edgeinfer.errors import UsageError
from edgeinfer.options import RuntimeOptions, SamplingParams
from edgeinfer.runtime.request import Generation
from edgeinfer.types import Request, Tokens

TAIL_TOKENS = 16
"""Of every prompt of the prefix suite, after the common beginning."""
_GREEDY = SamplingParams(temperature=0)
ABOUT = {
    name: FIELDS[name]
    for name in (
        "build_commit",
        "build_number",
        "cpu_info",
        "gpu_info",
        "backends",
        "model_filename",
        "model_type",
        "model_size",
        "model_n_params",
        "n_threads",
    )
}
_FIGURES = {
    "pp": "INTEGER",
    "tg": "INTEGER",
    "pl": "INTEGER",
    "n_kv": "INTEGER",
    "t_pp": "REAL",
    "speed_pp": "REAL",
    "t_tg": "REAL",
    "speed_tg": "REAL",
    "t": "REAL",
    "speed": "REAL",
}

BATCH = Schema(
    "batch",
    ABOUT | _FIGURES,
    (
        *model_columns(),
        Column("prompt", 6, lambda row: str(row["pp"])),
        Column("answer", 6, lambda row: str(row["tg"])),
        Column("requests", 8, lambda row: str(row["pl"])),
        Column("prefill t/s", 11, lambda row: f"{row['speed_pp']:.2f}"),
        Column("decode t/s", 10, lambda row: f"{row['speed_tg']:.2f}"),
        Column("all t/s", 9, lambda row: f"{row['speed']:.2f}"),
        Column("seconds", 8, lambda row: f"{row['t']:.2f}"),
    ),
)
PREFIX = Schema(
    "prefix",
    ABOUT
    | {"n_prefix": "INTEGER", "n_tail": "INTEGER", "state": "TEXT"}
    | _FIGURES
    | {"cached_tokens": "INTEGER", "ttft_p50_ms": "REAL", "answer_speed": "REAL"},
    (
        *model_columns(),
        Column("beginning", 9, lambda row: str(row["n_prefix"])),
        Column("state", 7, lambda row: row["state"]),
        Column("requests", 8, lambda row: str(row["pl"])),
        Column("cached", 7, lambda row: f"{100 * row['cached_tokens'] / (row['pp'] * row['pl']):.1f} %"),
        Column("first token", 12, lambda row: ms(row["ttft_p50_ms"])),
        Column("answers t/s", 11, lambda row: f"{row['answer_speed']:.2f}"),
        Column("seconds", 8, lambda row: f"{row['t']:.2f}"),
    ),
)


@dataclass(frozen=True, slots=True)
class Suite:
    """What to measure: every length of prompts (`prefix`: of beginnings) with every answer's, at every width."""

    n_prompt: tuple[int, ...] = (128,)
    n_gen: tuple[int, ...] = (32,)
    parallel: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    threads: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        """Refuse with a UsageError what cannot be measured."""
        if min((*self.n_prompt, *self.n_gen), default=0) < 1:
            raise UsageError("a prompt or an answer without tokens", "give numbers from 1 on")
        if not all(1 <= width <= MAX_PARALLEL for width in self.parallel):
            raise UsageError(f"--parallel is {self.parallel}", f"give numbers from 1 to {MAX_PARALLEL}")


def run_batch(models: Sequence[str | Path], suite: Suite, options: RuntimeOptions) -> Iterator[Row]:
    """Measure, and give each row as soon as it is known. Raises what `load` raises."""
    for path, pp, tg, width, threads in _cases(models, suite):
        settings = replace(options, threads=threads, ctx_size=width * (pp + tg), prefix_cache=False, draft="off")
        with load(path, settings, max_sequences=width, latency_target_ms=math.inf) as model:
            warm_up(model)
            prompts = [_random(model, pp, seed=i) for i in range(width)]
            figures = _figures(model, prompts, tg)
            about = machine_and_model(path, model) | {"n_threads": model.backend.threads}
        yield {name: value for name, value in (about | figures).items() if name in BATCH.fields}


def run_prefix(models: Sequence[str | Path], suite: Suite, options: RuntimeOptions) -> Iterator[Row]:
    """Three rows each: prompts with nothing in common, the common beginning computed first, and there already."""
    for path, n_prefix, tg, width, threads in _cases(models, suite):
        pp = n_prefix + TAIL_TOKENS
        for states in (("none",), ("cold", "warm")):  # in a context each
            ctx_size = width * (pp + tg) if states == ("none",) else n_prefix + 2 * width * (TAIL_TOKENS + tg)
            settings = replace(options, threads=threads, ctx_size=ctx_size, prefix_cache=False, draft="off")
            with load(path, settings, max_sequences=width, latency_target_ms=math.inf) as model:
                warm_up(model)
                about = machine_and_model(path, model) | {"n_threads": model.backend.threads}
                for number, state in enumerate(states):
                    seeds = range(width) if state == "none" else [0] * width
                    beginnings = [_random(model, n_prefix, seed) for seed in seeds]
                    tails = [_random(model, TAIL_TOKENS, 1000 * (number + 1) + i) for i in range(width)]
                    prompts = [np.concatenate(parts) for parts in zip(beginnings, tails, strict=True)]
                    shape = {"n_prefix": n_prefix, "n_tail": TAIL_TOKENS, "state": state}
                    row = about | shape | _figures(model, prompts, tg)
                    yield {name: row[name] for name in PREFIX.fields}


def _cases(models: Sequence[str | Path], suite: Suite) -> Iterator[tuple[str | Path, int, int, int, int | None]]:
    for path in models:
        for threads in suite.threads:
            for n_prompt in suite.n_prompt:
                for n_gen in suite.n_gen:
                    yield from ((path, n_prompt, n_gen, width, threads) for width in suite.parallel)


def _figures(model: Model, prompts: list[Tokens], n_gen: int) -> Row:
    """Run all prompts at a time and say what it took."""
    generations, n_early = _run(model, prompts, n_gen)
    started_s = min(g.submitted_s for g in generations)
    prefilled_s = max(g.first_token_s or 0.0 for g in generations)
    finished_s = max(g.finished_s or 0.0 for g in generations)
    n_prompt, n_answer = sum(len(p) for p in prompts), sum(g.n_answered for g in generations)
    t_pp, t_tg, t = prefilled_s - started_s, finished_s - prefilled_s, finished_s - started_s
    return {
        "pp": len(prompts[0]),
        "tg": n_gen,
        "pl": len(prompts),
        "n_kv": n_prompt + n_answer,
        "t_pp": round(t_pp, 6),
        "speed_pp": round(n_prompt / t_pp, 4),
        "t_tg": round(t_tg, 6),
        "speed_tg": round((n_answer - n_early) / t_tg, 4) if t_tg > 0 else 0.0,
        "t": round(t, 6),
        "speed": round((n_prompt + n_answer) / t, 4),
        "cached_tokens": sum(g.usage.cached_tokens for g in generations),
        "ttft_p50_ms": round(statistics.median((g.first_token_s or 0.0) - started_s for g in generations) * 1e3, 3),
        "answer_speed": round(n_answer / t, 4),
    }


def _run(model: Model, prompts: Sequence[Tokens], n_gen: int) -> tuple[list[Generation], int]:
    """The finished requests, and how many tokens there were when the last one had its first."""
    engine = model.engine
    generations = [engine.submit(Request(i, prompt, _GREEDY, n_gen)) for i, prompt in enumerate(prompts)]
    n_early = 0
    while engine.has_work:
        is_prefilling = any(g.first_token_s is None for g in generations)
        engine.step()
        if is_prefilling:
            n_early = sum(g.n_answered for g in generations)
    for generation in generations:
        if generation.error is not None:
            raise generation.error
    return generations, n_early


def warm_up(model: Model) -> None:
    """The first pass of a context is slower than the others."""
    n_tokens = max(1, min(TAIL_TOKENS, model.backend.n_ctx - 2))
    _run(model, [_random(model, n_tokens, seed=time.monotonic_ns() % 2**32)], 2)


def _random(model: Model, n_tokens: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, model.backend.n_vocab, n_tokens, np.int32)
