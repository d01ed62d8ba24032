"""`edgeinfer models`: list, fetch and delete models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from edgeinfer.cli import console, table
from edgeinfer.cli.usage import Command

app = typer.Typer(help="List, fetch and delete models.")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the models of the store, and the aliases of models elsewhere."""
    from edgeinfer.api.models import HINT, list_models

    found = list_models()
    if as_json:
        console.result_json([asdict(model) for model in found])
    elif found:
        rows = [
            (table.one_line(m.name), ", ".join(m.aliases), table.size(m.bytes), table.one_line(m.path)) for m in found
        ]
        console.result(table.render(("name", "alias", "size", "path"), rows, "<<><"))
    else:
        console.note(f"no models yet: {HINT}")


@app.command("pull", cls=Command)
def pull(
    model: Annotated[
        str, typer.Argument(metavar="ORG/NAME[:QUANT]", help="On the Hugging Face Hub; a path only gets the alias.")
    ],
    alias: Annotated[str | None, typer.Option("--as", metavar="ALIAS", help="Another name for it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a model from the Hugging Face Hub, checked against its checksum.

    QUANT is a type like Q4_K_M; without it: Q4_K_M, else Q8_0, else the first file. Goes on where it was interrupted.
    """
    from edgeinfer.api.models import pull_model

    pulled = pull_model(model, alias)
    if as_json:
        console.result_json(asdict(pulled))
        return
    here = "" if pulled.fetched_bytes else ", is here already"
    console.note(f"{table.size(pulled.bytes)} in {pulled.files} file{'s' * (pulled.files > 1)}{here}")
    console.result(pulled.path)


@app.command("rm", cls=Command)
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `models list` has it.")], as_json: AsJson = False
) -> None:
    """Delete a model of the store; of a file elsewhere, forget the alias."""
    from edgeinfer.api.models import remove_model

    removed = remove_model(name)
    if as_json:
        console.result_json(asdict(removed))
    elif removed.freed_bytes:
        console.result(f"deleted {removed.path}, {table.size(removed.freed_bytes)} freed")
    else:
        console.result(f"forgot {name}; {removed.path} is left as it is")
