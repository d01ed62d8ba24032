"""`edgeinfer bench`: llama-bench's tests through this program's own engine room, and many requests at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeinfer.cli import console
from edgeinfer.cli.interrupt import interrupted_by, on_interrupt
from edgeinfer.cli.option_groups import with_groups
from edgeinfer.cli.runtime_options import DEFAULTS, MODEL_HELP, drafting, fixed_cache_types
from edgeinfer.errors import EdgeinferError, InterruptedByUser, UsageError, last_words
from edgeinfer.options import RuntimeOptions

if TYPE_CHECKING:  # a wrong command line is told before anything is imported
    from edgeinfer.bench.report import Report, Row, Schema

_FORMATS = ("md", "json", "jsonl", "csv", "sql")
_LENGTHS = ("-p", "-n", "-d", "--parallel")
# What a suite measures unless told otherwise, in the order of _LENGTHS; None is what it has no use for.
_USUAL: dict[str, tuple[str | None, ...]] = {
    "throughput": ("512", "128", "0", None),
    "latency": (None, "64", None, None),
    "speculation": (None, "", None, None),
    "batch": ("128", "32", None, "1,2,4,8,16,32"),
    "prefix": ("512", "32", None, "32"),
    "kv": ("128", "32", "512,4096", None),
}
_ALL = "all"
_SUITES = (*_USUAL, _ALL)
_WRITE_WAIT_S = 0.5
"""How long a signal waits for a row that is being written."""


def _default(flag: str) -> str:
    index = _LENGTHS.index(flag)
    return "; ".join(f"{suite} {usual[index]}" for suite, usual in _USUAL.items() if usual[index])


@with_groups(options=drafting)
def command(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=MODEL_HELP)],
    suite: Annotated[
        str, typer.Option("--suite", metavar="NAME", help="What to measure: " + ", ".join(_SUITES) + ".")
    ] = "throughput",
    n_prompt: Annotated[
        str, typer.Option("-p", "--n-prompt", metavar="N,…", help=f"Prompt lengths [default: {_default('-p')}].")
    ] = "",
    n_gen: Annotated[
        str, typer.Option("-n", "--n-gen", metavar="N,…", help=f"Generation lengths [default: {_default('-n')}].")
    ] = "",
    n_depth: Annotated[
        str,
        typer.Option(
            "-d", "--n-depth", metavar="N,…", help=f"Tokens that are there before, untimed [default: {_default('-d')}]."
        ),
    ] = "",
    repetitions: Annotated[
        int,
        typer.Option(
            "-r", "--repetitions", metavar="N", help="How often each test is repeated; batch and prefix run once."
        ),
    ] = 5,
    parallel: Annotated[
        str,
        typer.Option(
            "-npl", "--parallel", metavar="N,…", help=f"Requests at a time [default: {_default('--parallel')}]."
        ),
    ] = "",
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FORMAT", help="How to print it: " + ", ".join(_FORMATS) + ".")
    ] = "md",
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw it as well, into a .png or .svg file.")
    ] = None,
    threads: Annotated[
        str, typer.Option("-t", "--threads", metavar="N,…", help="Thread counts [default: physical cores].")
    ] = "",
    batch_size: Annotated[
        int, typer.Option("-b", "--batch-size", metavar="N", help="Tokens per pass at most.")
    ] = DEFAULTS.batch_size,
    ubatch_size: Annotated[
        int, typer.Option("-ub", "--ubatch-size", metavar="N", help="Tokens computed at once.")
    ] = DEFAULTS.ubatch_size,
    *,
    options: Callable[[], RuntimeOptions],
) -> None:
    """Measure prompt processing and generation: llama-bench's tests, method and field names.

    The suite latency tells how long one waits for the first text and between pieces, kv what smaller types of the KV
    cache save and cost. The suites batch (llama-batched-bench's names) and prefix (requests with a common beginning of
    -p tokens: nothing in common, computed first, there already) run many requests at a time. The suite speculation
    answers what people ask, with drafts and without in turn; -n shortens its answers.
    """
    if output not in _FORMATS:
        raise UsageError(f"-o is {output!r}", f"one of {', '.join(_FORMATS)}")
    with _report(output) as report:
        lengths = dict(zip(_LENGTHS, (n_prompt, n_gen, n_depth, parallel), strict=True))
        suites = _suites(suite, lengths)
        if len(suites) > 1 and output == "csv":
            raise UsageError(f"--suite {suite} has several tables, csv holds one", "take another format or suite")
        if plot is not None:
            from edgeinfer.bench import plot as plots

            plots.check(plot)
        from edgeinfer.bench.suites import Asked, begin

        run_options = replace(fixed_cache_types(options()), batch_size=batch_size, ubatch_size=ubatch_size)
        thread_counts = _numbers("-t", threads) if threads else (None,)
        measured = []
        for name in suites:
            n_prompts, n_gens, n_depths, widths = (
                _numbers(flag, lengths[flag] or usual) for flag, usual in zip(_LENGTHS, _USUAL[name], strict=True)
            )
            asked = Asked(models, n_prompts, n_gens, n_depths, widths, thread_counts, repetitions)
            measured.append((name, *begin(name, asked, run_options)))
        found = _print(report, measured)
        if plot is not None:
            plots.draw(found, plot)


def _print(report: _Report, measured: list[tuple[str, Schema, Iterator[Row]]]) -> dict[str, list[Row]]:
    """Print the rows of the suites while they are measured. Returns them by the suite's name."""
    found: dict[str, list[Row]] = {}
    for name, schema, rows in measured:
        report.begin(schema)
        for row in rows:
            report.row({"suite": name, **row} if len(measured) > 1 else row)
            found.setdefault(name, []).append(row)
    return found


def _suites(suite: str, lengths: dict[str, str]) -> tuple[str, ...]:
    """The names of the suites to run. Raises UsageError for what a single one has no use for."""
    if suite not in _SUITES:
        raise UsageError(f"--suite is {suite!r}", f"one of {', '.join(_SUITES)}")
    if suite == _ALL:
        return tuple(_USUAL)
    for (flag, given), usual in zip(lengths.items(), _USUAL[suite], strict=True):
        if given and usual is None:
            raise UsageError(f"--suite {suite} has no use for {flag}", "drop it, or choose another suite")
    return (suite,)


class _Report:
    """Prints rows as they come, whole lines from whichever thread."""

    def __init__(self, output: str) -> None:
        from edgeinfer.bench.report import FORMATS

        self._format: Report = FORMATS[output]()
        self._writing = threading.Lock()

    def begin(self, schema: Schema) -> None:
        self._show(self._format.begin(schema))

    def row(self, row: Row) -> None:
        self._show(self._format.row(row))

    def end(self, error: EdgeinferError | None = None) -> None:
        self._show(self._format.end(error))

    def _show(self, lines: Iterable[str]) -> None:
        if not self._writing.acquire(timeout=_WRITE_WAIT_S):
            return  # a pipe that is full, and a signal that ends the program
        try:
            for line in lines:
                console.result(line)
        finally:
            self._writing.release()


@contextmanager
def _report(output: str) -> Iterator[_Report]:
    """What prints the rows, and after a failure what makes the whole valid."""
    report = _Report(output)

    def leave(number: int) -> None:
        # The C library may be busy for long; there is nothing to clean up.
        end_at_once(InterruptedByUser(interrupted_by(number)), 128 + number)

    def end_at_once(error: EdgeinferError, code: int | None = None) -> None:
        try:
            report.end(error)
        finally:
            console.fail_at_once(error, as_json=False, code=code)

    last_words.append(end_at_once)
    with on_interrupt(leave):
        try:
            yield report
        except Exception as error:
            report.end(_as_ours(error))
            raise
    report.end()


def _as_ours(error: Exception) -> EdgeinferError:
    return error if isinstance(error, EdgeinferError) else EdgeinferError(f"{type(error).__name__}: {error}")


def _numbers(flag: str, text: str | None) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} is {text!r}", "give whole numbers, separated by commas") from None
