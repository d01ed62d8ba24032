"""`edgeinfer bench`: llama-bench's tests through this program's own engine room."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from edgeinfer.cli import console
from edgeinfer.cli.interrupt import interrupted_by, on_interrupt
from edgeinfer.cli.runtime_options import DEFAULTS, CacheTypeK, CacheTypeV, FlashAttn, Mlock, NoMmap
from edgeinfer.errors import EdgeinferError, InterruptedByUser, UsageError, last_words
from edgeinfer.options import RuntimeOptions

_FORMATS = ("md", "json", "jsonl", "csv", "sql")


def command(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help=".gguf files, or directories with one.")],
    n_prompt: Annotated[str, typer.Option("-p", "--n-prompt", help="Prompt lengths, comma-separated.")] = "512",
    n_gen: Annotated[str, typer.Option("-n", "--n-gen", help="Generation lengths.")] = "128",
    n_depth: Annotated[str, typer.Option("-d", "--n-depth", help="Tokens that are there before, untimed.")] = "0",
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="How often each test is repeated.")] = 5,
    output: Annotated[str, typer.Option("-o", "--output", help=", ".join(_FORMATS))] = "md",
    threads: Annotated[str, typer.Option("-t", "--threads", help="Thread counts [default: physical cores].")] = "",
    batch_size: Annotated[
        int, typer.Option("-b", "--batch-size", help="Tokens per pass at most.")
    ] = DEFAULTS.batch_size,
    ubatch_size: Annotated[
        int, typer.Option("-ub", "--ubatch-size", help="Tokens computed at once.")
    ] = DEFAULTS.ubatch_size,
    flash_attn: FlashAttn = DEFAULTS.flash_attn,
    cache_type_k: CacheTypeK = DEFAULTS.cache_type_k,
    cache_type_v: CacheTypeV = DEFAULTS.cache_type_v,
    no_mmap: NoMmap = False,
    mlock: Mlock = DEFAULTS.mlock,
) -> None:
    """Measure prompt processing and generation: llama-bench's tests, method and field names."""
    if output not in _FORMATS:
        raise UsageError(f"-o is {output!r}", f"one of {', '.join(_FORMATS)}")
    with _printer(output) as print_row:
        from edgeinfer.bench import throughput

        options = RuntimeOptions(
            batch_size=batch_size,
            ubatch_size=ubatch_size,
            flash_attn=flash_attn,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            mmap=not no_mmap,
            mlock=mlock,
        )
        suite = throughput.Suite(
            n_prompt=_numbers("-p", n_prompt),
            n_gen=_numbers("-n", n_gen),
            n_depth=_numbers("-d", n_depth),
            threads=_numbers("-t", threads) if threads else (None,),
            repetitions=repetitions,
        )
        for row in throughput.run(models, suite, options):
            print_row(row)


@contextmanager
def _printer(output: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Prints rows as they come, and after a failure what makes the whole valid."""
    from edgeinfer.bench.report import FORMATS

    format_ = FORMATS[output]()

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
