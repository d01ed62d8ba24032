"""Draws what the suites measured: bars with their span, a chart or two for every suite. Needs the extra `plot`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgeinfer.bench.report import Row, row_label
from edgeinfer.convert.output import replaced_when_done
from edgeinfer.errors import ResourceError, UsageError

SUFFIXES = (".png", ".svg")
_INCHES_A_BAR, _INCHES_A_CHART = 0.3, 1.0
_WIDTH_INCHES = 9
_FEWEST_BARS = 4
"""That a chart has room for."""

Span = tuple[float | None, float | None, float | None]
"""A value, and from where to where its line goes."""


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar for every row; one without a value stays empty."""

    title: str
    label: Callable[[Row], str]
    span: Callable[[Row], Span]
    expected: str = ""
    """The field of a value that was expected: a mark beside the bar."""


@dataclass(frozen=True, slots=True)
class Lines:
    """A line for every row."""

    title: str
    label: Callable[[Row], str]
    points: Callable[[Row], list[float | None]]


def _between(value: str, low: str, high: str) -> Callable[[Row], Span]:
    return lambda row: (row[value], row[low], row[high])


def _deviation(row: Row) -> Span:
    return row["avg_ts"], row["avg_ts"] - row["stddev_ts"], row["avg_ts"] + row["stddev_ts"]


def _one(value: str) -> Callable[[Row], Span]:
    return lambda row: (row[value], None, None)


def _workload(row: Row) -> str:
    return str(row["workload"])


def _requests(row: Row) -> str:
    return f"{row['pl']} requests of {row['pp']}+{row['tg']}"


def _beginning(row: Row) -> str:
    return f"{row['n_prefix']} tokens in common: {row['state']}"


def _kv_type(row: Row) -> str:
    return f"{'/'.join(dict.fromkeys((row['type_k'], row['type_v'])))} @ d{row['n_depth']}"


CHARTS: dict[str, tuple[Bars | Lines, ...]] = {
    "throughput": (Bars("tokens per second, mean ± standard deviation", row_label, _deviation),),
    "latency": (
        Bars("first text, ms: median, least to most", _workload, _between("ttft_ms", "ttft_min_ms", "ttft_max_ms")),
        Bars("between pieces of text, ms: p50 to p95", _workload, _between("itl_p50_ms", "itl_p50_ms", "itl_p95_ms")),
    ),
    "speculation": (
        Bars(
            "speed with drafts, times that without: median, least to most (◆ as predicted)",
            _workload,
            _between("speed_up", "speed_up_min", "speed_up_max"),
            "predicted_speed_up",
        ),
        Lines("accepted, by position in the draft", _workload, lambda row: json.loads(row["acceptance_by_position"])),
    ),
    "batch": (
        Bars("prompts, tokens per second", _requests, _one("speed_pp")),
        Bars("answers, tokens per second", _requests, _one("speed_tg")),
    ),
    "prefix": (
        Bars("first token, ms: median of the requests", _beginning, _one("ttft_p50_ms")),
        Bars("answers, tokens per second", _beginning, _one("answer_speed")),
    ),
    "kv": (
        Bars("prompt, tokens per second", _kv_type, _between("prompt_ts", "prompt_ts_min", "prompt_ts_max")),
        Bars("answer, tokens per second", _kv_type, _between("gen_ts", "gen_ts_min", "gen_ts_max")),
    ),
}


def check(path: Path) -> None:
    """Before any work: UsageError for a name or the missing extra, ResourceError where nothing can be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: not a name of a picture", f"end it with {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", "pip install 'edgeinfer[plot]'")
    if os.path.lexists(path) and not path.is_file():
        raise UsageError(f"--plot {path}: not a regular file", "name another file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ResourceError(f"{path.parent}: not a directory that can be written to", "choose another --plot")


def draw(suites: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Make a picture of the rows of every suite, by its name. Raises ResourceError when it cannot be written."""
    from matplotlib.figure import Figure

    charts = [(suite, chart, rows) for suite, rows in suites.items() if rows for chart in CHARTS[suite]]
    heights = [_INCHES_A_CHART + _INCHES_A_BAR * max(len(rows), _FEWEST_BARS) for _, _, rows in charts]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights)), layout="constrained")
    every = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)
    for (axes,), (suite, chart, rows) in zip(every, charts, strict=True):
        axes.set_title(f"{suite}: {chart.title}", loc="left", fontsize="medium")
        (_draw_bars if isinstance(chart, Bars) else _draw_lines)(axes, chart, rows)
    try:
        with replaced_when_done(path, overwrite=True) as partial:
            figure.savefig(partial, format=path.suffix.lower()[1:], dpi=150)
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written ({error.strerror})", "choose another --plot") from error


def _draw_bars(axes: Any, chart: Any, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        value, low, high = chart.span(row)
        if value is None:
            continue
        axes.barh(place, value, color="C0", alpha=0.6)
        axes.text(0, place, f" {value:.4g}", va="center")
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color="black", marker="|")
        if chart.expected and row[chart.expected] is not None:
            axes.plot(row[chart.expected], place, color="C1", marker="D")
    axes.set_yticks(range(len(rows)), [_label(chart, row, rows) for row in rows])
    axes.set_ylim(max(len(rows), _FEWEST_BARS) - 0.5, -0.5)
    axes.set_xlim(left=0)


def _draw_lines(axes: Any, chart: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        points = [(i, value) for i, value in enumerate(chart.points(row), 1) if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=_label(chart, row, rows))
    axes.set_xticks(range(1, 1 + max((len(chart.points(row)) for row in rows), default=1)))
    axes.set_ylim(0, 1.05)
    if axes.lines:
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _label(chart: Bars | Lines, row: Row, rows: Sequence[Row]) -> str:
    """What a row is called: by what differs, so by the model and the threads only where there are several."""
    names = [chart.label(row)]
    if len({other["model_filename"] for other in rows}) > 1:
        names.append(Path(row["model_filename"]).stem)
    if len({other["n_threads"] for other in rows}) > 1:
        names.append(f"{row['n_threads']} threads")
    return ", ".join(names).replace("$", r"\$")  # which would begin a formula
