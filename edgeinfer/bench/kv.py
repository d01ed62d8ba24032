"""The suite of the KV cache: what a smaller type of its elements saves, and what it costs in speed and in answers.

Contexts over the same weights take turns, one repetition each, so that their ratios hold on a machine that others use
too; in llama.cpp, for its fork has one type. Prompts and generated tokens are random ones, as in the suite throughput;
whether the model still thinks the same is asked over a real text.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.api.load import load
from edgeinfer.api.model import Model
from edgeinfer.bench.batching import ABOUT
from edgeinfer.bench.measure import Runner, Samples, Trial
from edgeinfer.bench.report import Column, Row, Schema, model_columns
from edgeinfer.bench.throughput import machine_and_model
from edgeinfer.bench.workloads import WORKLOADS
from edgeinfer.errors import EdgeinferError, UsageError
from edgeinfer.native.context import NativeBackend
from edgeinfer.native.kernels import LLAMA_CPP
from edgeinfer.options import DEFAULT_CACHE_TYPE, RuntimeOptions
from edgeinfer.types import KVOp, Refusal, Tokens
from edgeinfer.types import Row as Part

SMALLER_TYPES = ("q8_0", "q4_0")
_PIECE_TOKENS = 64
"""Of the text, computed at once: every one of them leaves a row of logits."""
_TEXTS = ("code edit", "summarise")

Kind = tuple[str, str]
"""Types of the K and the V cache."""

KV = Schema(
    "kv",
    ABOUT
    | {
        "type_k": "TEXT",
        "type_v": "TEXT",
        "n_prompt": "INTEGER",
        "n_gen": "INTEGER",
        "n_depth": "INTEGER",
        "repetitions": "INTEGER",
        "kv_bytes_per_token": "REAL",
        "prompt_ts": "REAL",
        "prompt_ts_min": "REAL",
        "prompt_ts_max": "REAL",
        "prompt_ratio": "REAL",
        "gen_ts": "REAL",
        "gen_ts_min": "REAL",
        "gen_ts_max": "REAL",
        "gen_ratio": "REAL",
        "same_top": "REAL",
    },
    (
        *model_columns(),
        Column("KV type", 11, lambda row: "/".join(dict.fromkeys((row["type_k"], row["type_v"]))), is_text=True),
        Column("depth", 6, lambda row: str(row["n_depth"])),
        Column("KiB a token", 11, lambda row: _decimals(row["kv_bytes_per_token"], 2, 1024)),
        Column("prompt t/s", 22, lambda row: _span(row, "prompt_ts")),
        Column("ratio", 5, lambda row: _decimals(row["prompt_ratio"], 2)),
        Column("answer t/s", 22, lambda row: _span(row, "gen_ts")),
        Column("ratio", 5, lambda row: _decimals(row["gen_ratio"], 2)),
        Column("same top", 8, lambda row: "" if row["same_top"] is None else f"{100 * row['same_top']:.1f} %"),
    ),
)


@dataclass(frozen=True, slots=True)
class Suite:
    """What to measure: a prompt and an answer, at every depth; every length with every other."""

    n_prompt: tuple[int, ...] = (128,)
    n_gen: tuple[int, ...] = (32,)
    n_depth: tuple[int, ...] = (512, 4096)
    threads: tuple[int | None, ...] = (None,)
    repetitions: int = 5

    def __post_init__(self) -> None:
        """Refuse with a UsageError what cannot be measured."""
        if self.repetitions < 1 or min((*self.n_prompt, *self.n_gen), default=0) < 1:
            raise UsageError("nothing to measure", "give at least one repetition, and one token each for -p and -n")
        if min(self.n_depth, default=0) < 0:
            raise UsageError("a negative depth", "give numbers from 0 on")


@dataclass(frozen=True, slots=True)
class Looked:
    """What a context makes of the text."""

    tops: NDArray[np.intp]
    """The likeliest token after each of the text's."""
    nbytes_per_token: float | None
    """None where the state cannot be taken out."""


def run(models: Sequence[str | Path], suite: Suite, options: RuntimeOptions) -> Iterator[Row]:
    """Measure, and give the rows of a depth as soon as they are known. Raises what `load` raises.

    The types are f16 and those of the options, or smaller ones if these are f16 as well. One that a model cannot have
    gets a row without figures.
    """
    usual = (DEFAULT_CACHE_TYPE, DEFAULT_CACHE_TYPE)
    asked = (options.type_k, options.type_v)
    kinds = [usual, *([(name, name) for name in SMALLER_TYPES] if asked == usual else [asked])]
    for path, threads in itertools.product(models, suite.threads):
        for n_prompt, n_gen, n_depth in itertools.product(suite.n_prompt, suite.n_gen, suite.n_depth):
            settings = replace(options, threads=threads, prefix_cache=False, draft="off", kernels=LLAMA_CPP.name)
            yield from _rows(path, Trial(n_prompt, n_gen, n_depth), kinds, suite.repetitions, settings)


def _rows(path: str | Path, test: Trial, kinds: list[Kind], repetitions: int, options: RuntimeOptions) -> Iterator[Row]:
    usual = replace(options, ctx_size=test.n_ctx, cache_type_k=kinds[0][0], cache_type_v=kinds[0][1])
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(load(path, usual))
        about = machine_and_model(path, model) | {"n_threads": model.backend.threads}
        about |= {"n_prompt": test.n_prompt, "n_gen": test.n_gen, "n_depth": test.n_depth, "repetitions": repetitions}
        backends: dict[Kind, NativeBackend | None] = {kinds[0]: model.backend}
        for kind in kinds[1:]:
            backends[kind] = _backend(model, usual, kind, stack)
        figures = _figures(model, {kind: b for kind, b in backends.items() if b is not None}, test, repetitions)
    for kind in kinds:
        row = about | {"type_k": kind[0], "type_v": kind[1]} | figures.get(kind, {})
        yield {name: row.get(name) for name in KV.fields}


def _backend(model: Model, usual: RuntimeOptions, kind: Kind, stack: contextlib.ExitStack) -> NativeBackend | None:
    try:
        options = replace(usual, cache_type_k=kind[0], cache_type_v=kind[1])
        return stack.enter_context(NativeBackend(model.native, options))
    except UsageError:  # also where flash attention is off, or heads do not divide into blocks
        return None


def _figures(model: Model, backends: dict[Kind, NativeBackend], test: Trial, repetitions: int) -> dict[Kind, Row]:
    bos = model.vocabulary.bos if model.vocabulary.adds_bos else None
    text = _text(model)[: test.n_ctx]
    looked = {kind: look(backend, text) for kind, backend in backends.items()}
    turns = zip(*(Runner(backend, bos=bos).repeat(test) for backend in backends.values()), strict=True)
    rounds = [dict(zip(backends, turn, strict=True)) for turn in itertools.islice(turns, repetitions)]
    usual = next(iter(backends))
    return {kind: compare(rounds, kind, usual, test) | _said(looked[kind], looked[usual]) for kind in backends}


def compare(rounds: list[dict[Kind, Samples]], kind: Kind, usual: Kind, test: Trial) -> Row:
    """Rates of a type, and the median of its ratios to the usual one in the same round."""
    row: Row = {}
    for name, n_tokens, ns in (("prompt", test.n_prompt, _prompt_ns), ("gen", test.n_gen, _gen_ns)):
        rates = [n_tokens * 1e9 / ns(samples[kind]) for samples in rounds]
        ratios = [ns(samples[usual]) / ns(samples[kind]) for samples in rounds]
        row |= {f"{name}_ts": round(statistics.median(rates), 4), f"{name}_ratio": round(statistics.median(ratios), 4)}
        row |= {f"{name}_ts_min": round(min(rates), 4), f"{name}_ts_max": round(max(rates), 4)}
    return row


def _prompt_ns(samples: Samples) -> int:
    return samples.prompt_ns[0]


def _gen_ns(samples: Samples) -> int:
    return samples.total_ns[0] - samples.prompt_ns[0]


def _said(looked: Looked, usual: Looked) -> Row:
    nbytes = looked.nbytes_per_token
    return {
        "kv_bytes_per_token": None if nbytes is None else round(nbytes, 1),
        "same_top": round(float(np.mean(looked.tops == usual.tops)), 4),
    }


def look(backend: NativeBackend, text: Tokens) -> Looked:
    """Run a text from an empty cache on, and take its state out again."""
    backend.apply(KVOp("remove", 0, 0, 0, -1))
    tops = []
    for start in range(0, len(text), _PIECE_TOKENS):
        logits = backend.forward([Part(0, text[start : start + _PIECE_TOKENS], start, 0)])
        if isinstance(logits, Refusal):
            raise EdgeinferError(f"the backend ran out: {logits.value}")
        tops.append(logits.argmax(axis=1))
    state = backend.save_range(0, 0, len(text))
    return Looked(np.concatenate(tops), None if state is None else len(state) / len(text))


def _text(model: Model) -> Tokens:
    text = "\n\n".join(workload.prompt for workload in WORKLOADS if workload.name in _TEXTS)
    return model.vocabulary.tokenize(text, add_special=True, parse_special=False)


def _decimals(value: float | None, digits: int, unit: float = 1) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def _span(row: Row, name: str) -> str:
    if row[name] is None:
        return ""
    return f"{row[name]:.1f} ({row[f'{name}_min']:.1f}–{row[f'{name}_max']:.1f})"
