"""`edgeinfer imatrix`: compute an importance matrix from a text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from edgeinfer.cli import console, progress
from edgeinfer.cli.runtime_options import MODEL_HELP, Threads


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    file: Annotated[Path, typer.Option("-f", "--file", metavar="FILE", help="Text file to run the model over.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="The GGUF file to write.")],
    chunks: Annotated[
        int | None, typer.Option("--chunks", metavar="N", min=1, help="Use only so many passages [default: all].")
    ] = None,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size", metavar="N", help="Tokens of a passage.")] = 512,
    threads: Threads = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run a model over a text and write which columns of its weights matter, for `convert --imatrix`."""
    from edgeinfer.api.imatrix import imatrix

    with progress.steps() as advance:
        computed = imatrix(
            model,
            file,
            output,
            ctx_size=ctx_size,
            chunks=chunks,
            threads=threads,
            overwrite=overwrite,
            progress=advance,
        )
    if computed.partial:
        console.note(
            f"note: in {len(computed.partial)} of {computed.entries} tensors some experts were never used, first "
            f"{computed.partial[0]}: a longer text covers more"
        )
    if as_json:
        console.result_json(dataclasses.asdict(computed))
    else:
        console.note(
            f"{computed.entries} tensors, {computed.chunks} passages of {computed.ctx_size} tokens, "
            f"{computed.seconds:.1f} s"
        )
        console.result(computed.output)
