"""`edgeinfer batch`: many prompts from a file, answered side by side."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from edgeinfer.cli import console, progress
from edgeinfer.cli.ending import leave
from edgeinfer.cli.interrupt import ending_at_once, interrupted_by, on_interrupt
from edgeinfer.cli.option_groups import with_groups
from edgeinfer.cli.runtime_options import DEFAULTS, MODEL_HELP, Verbose, answering, tell_plan
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.options import RuntimeOptions

_STANDARD_STREAM = "-"


@with_groups(options=answering)
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    rows: Annotated[str, typer.Argument(metavar="IN.jsonl", help="A JSON object per line; - is stdin.")],
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="OUT.jsonl", help="Where the answers go; - is stdout.")
    ] = _STANDARD_STREAM,
    parallel: Annotated[
        int | None,
        typer.Option("--parallel", metavar="N", help="Requests at a time [default: what suits model and memory]."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with OUT.jsonl: leave out the ids that are in it.")
    ] = False,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--ctx-size",
            metavar="N",
            help="Tokens that all requests share [default: what suits model and memory].",
        ),
    ] = DEFAULTS.ctx_size,
    *,
    options: Callable[[], RuntimeOptions],
    verbose: Verbose = False,
) -> None:
    """Answer every line of a JSONL file, many at a time, in the order of the lines.

    A row has "prompt" (continued as it is) or "messages" (through the chat template), and may have "id", "max_tokens",
    "stop", "priority", "deadline_ms", "json_schema", "grammar" and the sampling options of run. A row that is wrong
    gets an error of its own.
    """
    run_options = replace(options(), ctx_size=ctx_size)
    if resume and output == _STANDARD_STREAM:
        raise UsageError("--resume needs the file to go on with", "give it with -o")
    with contextlib.ExitStack() as stack:
        from edgeinfer.api.batch import MAX_LINE_NBYTES, batch, document, load_for_batch
        from edgeinfer.api.jsonl import read_lines

        file = _input(rows)
        _check_apart(file, output)
        write, skip, n_earlier, n_earlier_failed = _output(output, stack, resume=resume)
        if n_earlier:
            console.note(f"{output}: {progress.rows(n_earlier)} there already")
        with ending_at_once():
            loaded = load_for_batch(model, run_options, parallel=parallel, verbose=verbose)
        tell_plan(loaded, verbose=verbose)
        work = batch(loaded, read_lines(file, MAX_LINE_NBYTES), skip=skip)
        meter = progress.Meter(os.fstat(file.fileno()).st_size or None, work)
        # On a terminal, rows and a line that changes would mix.
        shows = output != _STANDARD_STREAM or not sys.stdout.isatty()

        def on_step() -> None:
            if shows:
                meter.show()
            if output == _STANDARD_STREAM:
                console.leave_without_reader()

        work.on_step = on_step
        with on_interrupt(lambda _: work.stop(), raises=False) as signals:
            for entry in work:
                write(document(entry))
                meter.count(entry.row.end_nbytes, failed=entry.error is not None)
        meter.end()
        code = 0
        if signals:
            hint = " (--resume goes on)" if output != _STANDARD_STREAM else ""
            console.note(f"error: {interrupted_by(signals[0])}{hint}")
            code = 128 + signals[0]
        elif 0 < n_earlier + meter.n_rows == n_earlier_failed + meter.n_failed:
            console.note("error: every row failed (each row of the output says why)")
            code = UnusableInputError.exit_code
    leave(loaded, code, verbose=verbose)


def _input(rows: str) -> BinaryIO:
    """The file to read. Never closed: a thread may be waiting in it, which closing would wait for."""
    if rows == _STANDARD_STREAM:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    from edgeinfer.api.jsonl import open_lines

    return open_lines(Path(rows))


def _check_apart(file: BinaryIO, output: str) -> None:
    """Refuse one file as input and output: it would have no end."""
    with contextlib.suppress(OSError):  # an output that is not there
        target = os.fstat(sys.stdout.fileno()) if output == _STANDARD_STREAM else os.stat(output)
        if stat.S_ISREG(target.st_mode) and os.path.samestat(target, os.fstat(file.fileno())):
            raise UsageError("the input would be read and written at once", "give another output")


def _output(
    output: str, stack: contextlib.ExitStack, *, resume: bool
) -> tuple[Callable[[Any], None], Callable[[Any], bool], int, int]:
    """How to write a row, which ids to leave out, how many rows are there already, and how many of those failed."""
    if output == _STANDARD_STREAM:
        return console.result_json, lambda row_id: False, 0, 0
    from edgeinfer.api.jsonl import Output

    file = stack.enter_context(Output(Path(output), resume=resume))

    def write(row: Any) -> None:
        with console.writes.one():
            file.write(row)

    return write, file.take, file.n_rows, file.n_failed
