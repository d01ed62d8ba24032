"""`edgeinfer cache`: what the prefix cache holds, and an end to it."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import typer

from edgeinfer.cli import console, table

app = typer.Typer(help="Show or clear the prefix cache: KV state of prompts on disk.")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("info")
def info(as_json: AsJson = False) -> None:
    """Show where the prefix cache is, how large it is and whose it is."""
    from edgeinfer.api.prefix_cache import cache_info

    found = cache_info()
    if as_json:
        console.result_json(asdict(found))
        return
    console.result(table.printable(found.path))
    console.result(f"{table.size(found.bytes)} of {table.size(found.budget_bytes)} in {found.blocks} blocks")
    if found.models:
        rows = [
            (_when(m.last_used_s), str(m.blocks), table.size(m.bytes), table.printable(m.model)) for m in found.models
        ]
        console.result("\n" + table.render(("last used", "blocks", "size", "model"), rows, "<>><"))


@app.command("clear")
def clear(as_json: AsJson = False) -> None:
    """Delete everything in the prefix cache."""
    from edgeinfer.api.prefix_cache import clear_cache

    nbytes = clear_cache()
    if as_json:
        console.result_json({"cleared_bytes": nbytes})
    else:
        console.result(f"cleared {table.size(nbytes)}")


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
