"""`edgeinfer bench`: llama-bench's tests through this program's own engine room, and many requests at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import typer

from edgeinfer.cli import console
from edgeinfer.cli.interrupt import interrupted_by, on_interrupt
from edgeinfer.cli.option_groups import with_groups
from edgeinfer.cli.runtime_options import DEFAULTS, MODEL_HELP, drafting, fixed_cache_types
from edgeinfer.errors import EdgeinferError, InterruptedByUser, UsageError, last_words
from edgeinfer.options import RuntimeOptions

_FORMATS = ("md", "json", "jsonl", "csv", "sql")
_SUITES = ("throughput", "batch", "prefix", "speculation")
# What a suite measures unless told otherwise: prompt lengths, answer lengths.
_LENGTHS = {"throughput": ("512", "128"), "batch": ("128", "32"), "prefix": ("512", "32")}
_WIDTHS = {"batch": "1,2,4,8,16,32", "prefix": "32"}


def _default(index: int) -> str:
    return "; ".join(f"{suite} {lengths[index]}" for suite, lengths in _LENGTHS.items())


@with_groups(options=drafting)
def command(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=MODEL_HELP)],
    suite: Annotated[
        str, typer.Option("--suite", metavar="NAME", help="What to measure: " + ", ".join(_SUITES) + ".")
    ] = "throughput",
    n_prompt: Annotated[
        str, typer.Option("-p", "--n-prompt", metavar="N,…", help=f"Prompt lengths [default: {_default(0)}].")
    ] = "",
    n_gen: Annotated[
        str, typer.Option("-n", "--n-gen", metavar="N,…", help=f"Generation lengths [default: {_default(1)}].")
    ] = "",
    n_depth: Annotated[
        str, typer.Option("-d", "--n-depth", metavar="N,…", help="Tokens that are there before, untimed.")
    ] = "0",
    repetitions: Annotated[
        int,
        typer.Option(
            "-r", "--repetitions", metavar="N", help="How often each test of throughput and speculation is repeated."
        ),
    ] = 5,
    parallel: Annotated[
        str,
        typer.Option(
            "-npl", "--parallel", metavar="N,…", help="Requests at a time [default: batch 1 to 32; prefix 32]."
        ),
    ] = "",
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FORMAT", help="How to print it: " + ", ".join(_FORMATS) + ".")
    ] = "md",
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

    The suites batch (llama-batched-bench's names) and prefix (requests with a common beginning of -p tokens: nothing in
    common, computed first, there already) run many requests at a time. The suite speculation answers what people ask,
    with drafts and without in turn; -n shortens its answers.
    """
    if output not in _FORMATS:
        raise UsageError(f"-o is {output!r}", f"one of {', '.join(_FORMATS)}")
    if suite not in _SUITES:
        raise UsageError(f"--suite is {suite!r}", f"one of {', '.join(_SUITES)}")
    with _printer(output, suite) as print_row:
        run_options = replace(fixed_cache_types(options()), batch_size=batch_size, ubatch_size=ubatch_size)
        thread_counts = _numbers("-t", threads) if threads else (None,)
        usual = _LENGTHS.get(suite, ("", ""))
        prompts, answers = n_prompt or usual[0], n_gen or usual[1]
        rows: Iterator[dict[str, Any]]
        if suite == "speculation":
            from edgeinfer.bench import speculation

            most = min(_numbers("-n", n_gen)) if n_gen else None
            rows = speculation.run(models, speculation.Suite(thread_counts, repetitions, most), run_options)
        elif suite == "throughput":
            from edgeinfer.bench import throughput

            lengths = _numbers("-p", prompts), _numbers("-n", answers), _numbers("-d", n_depth)
            rows = throughput.run(models, throughput.Suite(*lengths, thread_counts, repetitions), run_options)
        else:
            from edgeinfer.bench import batching

            widths = _numbers("--parallel", parallel or _WIDTHS[suite])
            tests = batching.Suite(_numbers("-p", prompts), _numbers("-n", answers), widths, thread_counts)
            rows = {"batch": batching.run_batch, "prefix": batching.run_prefix}[suite](models, tests, run_options)
        for row in rows:
            print_row(row)


@contextmanager
def _printer(output: str, suite: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Prints rows as they come, and after a failure what makes the whole valid."""
    from edgeinfer.bench.report import FORMATS, THROUGHPUT

    schema = THROUGHPUT
    if suite == "speculation":
        from edgeinfer.bench.speculation import SPECULATION

        schema = SPECULATION
    elif suite != "throughput":
        from edgeinfer.bench import batching

        schema = {"batch": batching.BATCH, "prefix": batching.PREFIX}[suite]
    format_ = FORMATS[output](schema)

    writing = threading.Lock()

    def show(lines: Iterable[str]) -> None:
        with writing:
            for line in lines:
                console.result(line)

    def leave(number: int) -> None:
        # The C library may be busy for long; there is nothing to clean up.
        end_at_once(InterruptedByUser(interrupted_by(number)), 128 + number)

    def end_at_once(error: EdgeinferError, code: int | None = None) -> None:
        try:
            show(format_.end(error))
        finally:
            console.fail_at_once(error, as_json=False, code=code)

    show(format_.begin())
    last_words.append(end_at_once)
    with on_interrupt(leave):
        try:
            yield lambda row: show(format_.row(row))
        except Exception as error:
            show(format_.end(_as_ours(error)))
            raise
    show(format_.end(None))


def _as_ours(error: Exception) -> EdgeinferError:
    return error if isinstance(error, EdgeinferError) else EdgeinferError(f"{type(error).__name__}: {error}")


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} is {text!r}", "give whole numbers, separated by commas") from None
