"""`edgeinfer batch`: many prompts from a file, answered side by side."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from edgeinfer.cli import console
from edgeinfer.cli.ending import leave
from edgeinfer.cli.interrupt import ending_at_once, on_interrupt
from edgeinfer.cli.progress import Meter
from edgeinfer.cli.runtime_options import (
    DEFAULTS,
    MODEL_HELP,
    CacheTypeK,
    CacheTypeV,
    FlashAttn,
    GpuLayers,
    MainGpu,
    Mlock,
    NoMmap,
    NoPrefixCache,
    SplitMode,
    TensorSplit,
    Threads,
    tell_plan,
)
from edgeinfer.errors import InterruptedByUser, UsageError
from edgeinfer.options import RuntimeOptions, parse_gpu_layers, parse_tensor_split

_STANDARD_STREAM = "-"


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    rows: Annotated[str, typer.Argument(metavar="IN.jsonl", help="A JSON object per line; - is stdin.")],
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="OUT.jsonl", help="Where the answers go; - is stdout.")
    ] = _STANDARD_STREAM,
    parallel: Annotated[
        int | None, typer.Option("--parallel", help="Requests at a time [default: what suits model and memory].")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with OUT.jsonl: leave out the ids that are in it.")
    ] = False,
    ctx_size: Annotated[
        int | None,
        typer.Option("-c", "--ctx-size", help="Tokens that all requests share [default: what suits model and memory]."),
    ] = DEFAULTS.ctx_size,
    threads: Threads = DEFAULTS.threads,
    flash_attn: FlashAttn = DEFAULTS.flash_attn,
    cache_type_k: CacheTypeK = DEFAULTS.cache_type_k,
    cache_type_v: CacheTypeV = DEFAULTS.cache_type_v,
    no_mmap: NoMmap = False,
    no_prefix_cache: NoPrefixCache = False,
    mlock: Mlock = DEFAULTS.mlock,
    gpu_layers: GpuLayers = "auto",
    split_mode: SplitMode = DEFAULTS.split_mode,
    tensor_split: TensorSplit = "",
    main_gpu: MainGpu = DEFAULTS.main_gpu,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the C library's log.")] = False,
) -> None:
    """Answer every line of a JSONL file, many at a time, in the order of the lines.

    A row has "prompt" (continued as it is) or "messages" (through the chat template), and may have "id", "max_tokens",
    "stop", "priority", "deadline_ms" and the sampling options of run. A row that is wrong gets an error of its own.
    """
    options = RuntimeOptions(
        ctx_size=ctx_size,
        threads=threads,
        flash_attn=flash_attn,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        mmap=not no_mmap,
        prefix_cache=not no_prefix_cache,
        mlock=mlock,
        gpu_layers=parse_gpu_layers(gpu_layers),
        split_mode=split_mode,
        tensor_split=parse_tensor_split(tensor_split),
        main_gpu=main_gpu,
    )
    if resume and output == _STANDARD_STREAM:
        raise UsageError("--resume needs the file to go on with", "give it with -o")
    if _STANDARD_STREAM not in (rows, output) and os.path.exists(output) and os.path.samefile(rows, output):
        raise UsageError(f"{output} would be read and written at once", "give another output")
    with contextlib.ExitStack() as stack:
        from edgeinfer.api.batch import MAX_LINE_NBYTES, batch, document, load_for_batch
        from edgeinfer.api.jsonl import read_lines

        file, total_nbytes = _input(rows, stack)
        write, skip, n_skipped = _output(output, stack, resume=resume)
        if n_skipped:
            console.note(f"{output}: {n_skipped} rows are there already")
        with ending_at_once():
            loaded = load_for_batch(model, options, parallel=parallel, verbose=verbose)
        tell_plan(loaded, verbose=verbose)
        work = batch(loaded, read_lines(file, MAX_LINE_NBYTES), skip=skip)
        meter = Meter(total_nbytes, work)
        work.on_step = meter.show
        with on_interrupt(lambda _: work.stop()):
            for entry in work:
                write(document(entry))
                meter.count(entry.row.end_nbytes, failed=entry.error is not None)
        meter.end()
        if work.stopped:
            hint = "--resume goes on" if output != _STANDARD_STREAM else ""
            console.note("error: interrupted" + (f" ({hint})" if hint else ""))
    leave(loaded, InterruptedByUser.exit_code if work.stopped else 0, verbose=verbose)


def _input(rows: str, stack: contextlib.ExitStack) -> tuple[BinaryIO, int | None]:
    """The file to read and how long it is, if that can be known."""
    if rows == _STANDARD_STREAM:
        return sys.stdin.buffer, None
    from edgeinfer.api.jsonl import open_lines

    file = stack.enter_context(open_lines(Path(rows)))
    return file, os.fstat(file.fileno()).st_size or None


def _output(
    output: str, stack: contextlib.ExitStack, *, resume: bool
) -> tuple[Callable[[Any], None], Callable[[Any], bool], int]:
    """How to write a row, which ids to leave out, and how many there are of those."""
    if output == _STANDARD_STREAM:
        return console.result_json, lambda row_id: False, 0
    from edgeinfer.api.jsonl import Output

    file = stack.enter_context(Output(Path(output), resume=resume))
    return file.write, file.has, file.n_rows
