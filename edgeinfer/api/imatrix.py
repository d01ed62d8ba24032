"""`edgeinfer.imatrix`: an importance matrix computed from a text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.api.files import checked_header, read_text, resolve
from edgeinfer.convert.imatrix import save_imatrix
from edgeinfer.convert.output import check_outputs, replaced_when_done, written_to
from edgeinfer.errors import UsageError
from edgeinfer.gguf_file.shards import read_shards
from edgeinfer.native.activations import MIN_ROWS, ActivationSums
from edgeinfer.native.context import NativeBackend
from edgeinfer.native.model import NativeModel
from edgeinfer.options import RuntimeOptions
from edgeinfer.runtime import passages

DEFAULT_CTX_SIZE = 512


@dataclass(frozen=True, slots=True)
class ComputedImatrix:
    """What `imatrix --json` prints."""

    output: str
    model: str
    entries: int
    partial: list[str]
    """Weights some of whose experts were never used: those count as equally important."""
    chunks: int
    ctx_size: int
    seconds: float


def imatrix(
    model: str | Path,
    text: str | Path,
    output: str | Path,
    *,
    ctx_size: int = DEFAULT_CTX_SIZE,
    chunks: int | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ComputedImatrix:
    """Run a GGUF model over the file `text` and write its importance matrix, in llama-imatrix's format.

    `chunks` limits the work to that many passages of `ctx_size` tokens; `progress` is told those done and their total.
    Raises NotFoundError, UnusableInputError (a text too short, a broken model), UsageError, ResourceError.
    """
    started_s = time.perf_counter()
    path, text, output = resolve(model), Path(text), Path(output)
    if ctx_size < MIN_ROWS:  # the library computes so few tokens in another way, which is not watched
        raise UsageError(f"passages of {ctx_size} tokens", f"give at least {MIN_ROWS}")
    shards = read_shards(checked_header(path))
    content = read_text(text)
    check_outputs([output], 0, {text, *(header.path for header in shards)}, overwrite=overwrite)
    sums = ActivationSums()
    options = RuntimeOptions(ctx_size=ctx_size, threads=threads, batch_size=passages.MAX_PASS_TOKENS)
    with NativeModel(path) as native:
        pieces = passages.cut(native.vocabulary, content, ctx_size, chunks)
        with NativeBackend(native, options, observer=sums) as backend:
            for number, piece in enumerate(pieces, 1):
                # All logits are asked for, because the last layer computes only the rows that lead to some.
                for _ in passages.run(backend, piece, first=0):
                    pass
                progress(number, len(pieces))
    entries = sums.entries()
    with written_to(output), replaced_when_done(output, overwrite=overwrite) as partial:
        save_imatrix(partial, entries, [text.name], len(pieces), ctx_size)
    return ComputedImatrix(
        output=str(output),
        model=str(path),
        entries=len(entries),
        partial=[name for name, entry in entries.items() if not entry.counts.all()],
        chunks=len(pieces),
        ctx_size=ctx_size,
        seconds=round(time.perf_counter() - started_s, 3),
    )
