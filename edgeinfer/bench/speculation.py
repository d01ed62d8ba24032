"""The suite of drafts: what people ask, answered plainly and with drafts at the same time, in one process.

Two engines over the same weights take turns step by step, whichever has written less, so that their ratio holds on a
machine that others use too. Every answer starts with drafts that have learned nothing from the others; what a pass
costs they share.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgeinfer.api.drafts import open_drafting
from edgeinfer.api.load import load
from edgeinfer.api.model import Model
from edgeinfer.bench.batching import ABOUT
from edgeinfer.bench.report import Column, Row, Schema, model_columns
from edgeinfer.bench.throughput import machine_and_model
from edgeinfer.bench.workloads import WORKLOADS, Workload
from edgeinfer.errors import UsageError
from edgeinfer.native.context import NativeBackend
from edgeinfer.native.sampler import NativeSamplerFactory
from edgeinfer.options import RuntimeOptions, SamplingParams
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.request import Generation
from edgeinfer.speculation.cost import CostCurve
from edgeinfer.types import Request

_POSITIONS = 8
"""Of a draft, whose acceptance is told one by one."""

SPECULATION = Schema(
    "speculation",
    ABOUT
    | {
        "workload": "TEXT",
        "draft": "TEXT",
        "n_prompt": "INTEGER",
        "n_gen": "INTEGER",
        "repetitions": "INTEGER",
        "plain_ts": "REAL",
        "draft_ts": "REAL",
        "speed_up": "REAL",
        "speed_up_min": "REAL",
        "speed_up_max": "REAL",
        "predicted_speed_up": "REAL",
        "drafted_tokens": "INTEGER",
        "accepted_tokens": "INTEGER",
        "acceptance": "REAL",
        "mean_draft": "REAL",
        "mean_accepted": "REAL",
        "steps": "INTEGER",
        "draft_steps": "INTEGER",
        "acceptance_by_position": "TEXT",
        "same_tokens": "INTEGER",
    },
    (
        *model_columns(),
        Column("workload", 20, lambda row: row["workload"], is_text=True),
        Column("answer", 6, lambda row: str(row["n_gen"])),
        Column("plain t/s", 9, lambda row: f"{row['plain_ts']:.2f}"),
        Column("t/s", 9, lambda row: f"{row['draft_ts']:.2f}"),
        Column("speed-up", 20, lambda row: _span(row)),
        Column("predicted", 9, lambda row: _times(row["predicted_speed_up"])),
        Column("α", 5, lambda row: "" if row["acceptance"] is None else f"{row['acceptance']:.2f}"),
        Column("drafted", 7, lambda row: str(row["drafted_tokens"])),
        Column("accepted", 8, lambda row: str(row["accepted_tokens"])),
        Column("same", 9, lambda row: f"{row['same_tokens']} / {row['n_gen']}"),
    ),
)


@dataclass(frozen=True, slots=True)
class Suite:
    """How often each workload is answered each way, and the most tokens of an answer (None: the workload's own)."""

    threads: tuple[int | None, ...] = (None,)
    repetitions: int = 5
    n_gen: int | None = None
    workloads: tuple[Workload, ...] = WORKLOADS

    def __post_init__(self) -> None:
        """Refuse with a UsageError what cannot be measured."""
        if self.repetitions < 1 or (self.n_gen is not None and self.n_gen < 2):
            raise UsageError("nothing to measure", "give at least one repetition, of answers of two tokens")


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, how fast it was written, and of every step with a draft its length and how much was accepted."""

    tokens: list[int]
    speed: float
    steps: list[tuple[int, int]]


def run(models: Sequence[str | Path], suite: Suite, options: RuntimeOptions) -> Iterator[Row]:
    """Measure, and give each workload's row as soon as it is known. Raises what `load` raises."""
    for path, threads in itertools.product(models, suite.threads):
        settings = replace(options, threads=threads, prefix_cache=False)
        with load(path, settings) as model, NativeBackend(model.native, model.options) as backend:
            plain = Engine(backend, NativeSamplerFactory(model.native.vocabulary), limits=model.engine.limits)
            about = machine_and_model(path, model) | {"n_threads": model.backend.threads}
            about = {name: about[name] for name in ABOUT}
            for workload in suite.workloads:
                yield about | _measure(model, plain, workload, suite, settings)


def _measure(model: Model, plain: Engine, workload: Workload, suite: Suite, options: RuntimeOptions) -> Row:
    limit = min(workload.max_tokens, suite.n_gen or workload.max_tokens)
    curve = model.engine.drafting.curve
    tokens = model.tokens(workload.prompt)
    params = SamplingParams(temperature=workload.temperature, seed=1)
    request = Request(0, tokens, params, limit, end_tokens=model.vocabulary.end_tokens)

    def pair(request: Request) -> tuple[Answered, Answered]:
        held = [replace(request, constraint=model.constraint(workload.json_schema)) for _ in range(2)]
        return _answers(plain, model.engine, *held)

    pair(replace(request, max_tokens=2))  # from here on the prompt is computed
    pairs = []
    source = model.drafter.source if model.drafter else None
    for _ in range(suite.repetitions):
        model.engine.drafting = open_drafting(options, model.backend, curve, source)
        pairs.append(pair(request))
    return _figures(workload, options.draft, pairs, curve) | {"n_prompt": len(tokens)}


class _Writer:
    """One engine with one request; the time of its steps counts from the first token on."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine = engine
        self.generation = engine.submit(request)
        self._seconds = 0.0
        self._steps: list[tuple[int, int]] = []

    def step(self) -> None:
        before, started_s = _counts(self.generation), time.perf_counter()
        self.engine.step()
        if self.generation.error is not None:
            raise self.generation.error
        if before[0]:
            self._seconds += time.perf_counter() - started_s
            _, drafted, accepted = (after - b for after, b in zip(_counts(self.generation), before, strict=True))
            self._steps.append((drafted, accepted))

    @property
    def answered(self) -> Answered:
        tokens = self.generation.tokens[self.generation.prompt_tokens :]
        return Answered(tokens, (len(tokens) - 1) / self._seconds if self._seconds else 0.0, self._steps)


def _answers(plain: Engine, drafting: Engine, one: Request, other: Request) -> tuple[Answered, Answered]:
    """The same request to both, in turns; what it is held to goes along with one answer, so it is given twice."""
    writers = _Writer(plain, one), _Writer(drafting, other)
    while working := [writer for writer in writers if writer.engine.has_work]:
        min(working, key=lambda writer: writer.generation.n_answered).step()
    return writers[0].answered, writers[1].answered


def _counts(generation: Generation) -> tuple[int, int, int]:
    return generation.n_answered, generation.drafted_tokens, generation.accepted_tokens


def _figures(workload: Workload, draft: str, pairs: list[tuple[Answered, Answered]], curve: CostCurve) -> Row:
    """What the pairs of answers, plain and drafted, say; counts are those of the first pair."""
    ratios = [drafted.speed / plain.speed for plain, drafted in pairs if plain.speed]
    plain, drafted = pairs[0]
    used = [step for step in drafted.steps if step[0]]
    n_drafted, n_accepted = (sum(step[i] for step in used) for i in (0, 1))
    n_tried = n_accepted + sum(accepted < length for length, accepted in used)
    cost = sum(curve.cost(1 + length) for length, _ in drafted.steps)
    same = next((i for i, (a, b) in enumerate(zip(plain.tokens, drafted.tokens, strict=False)) if a != b), None)
    row: Row = {
        "workload": workload.name,
        "draft": draft,
        "n_gen": len(drafted.tokens),
        "repetitions": len(pairs),
        "plain_ts": round(statistics.median(plain.speed for plain, _ in pairs), 4),
        "draft_ts": round(statistics.median(drafted.speed for _, drafted in pairs), 4),
        "speed_up": round(statistics.median(ratios), 4) if ratios else None,
        "speed_up_min": round(min(ratios), 4) if ratios else None,
        "speed_up_max": round(max(ratios), 4) if ratios else None,
        "predicted_speed_up": round((len(drafted.tokens) - 1) / cost, 4) if cost else None,
        "drafted_tokens": n_drafted,
        "accepted_tokens": n_accepted,
        "acceptance": round(n_accepted / n_tried, 4) if n_tried else None,
        "mean_draft": round(n_drafted / len(used), 4) if used else None,
        "mean_accepted": round(n_accepted / len(used), 4) if used else None,
        "steps": len(drafted.steps),
        "draft_steps": len(used),
        "acceptance_by_position": json.dumps(_by_position(used)),
        "same_tokens": len(drafted.tokens) if same is None else same,
    }
    return {name: row.get(name) for name in SPECULATION.fields if name not in ABOUT}


def _by_position(steps: list[tuple[int, int]]) -> list[float | None]:
    """Of the drafts that reached a position with all before it right, the part that was right there too."""
    found = []
    for position in range(_POSITIONS):
        tried = sum(length > position and accepted >= position for length, accepted in steps)
        right = sum(accepted > position for _, accepted in steps)
        found.append(round(right / tried, 3) if tried else None)
    return found


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f} ×"


def _span(row: Row) -> str:
    if row["speed_up"] is None:
        return ""
    return f"{_times(row['speed_up'])} ({row['speed_up_min']:.2f}–{row['speed_up_max']:.2f})"
