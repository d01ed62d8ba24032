"""`edgeinfer inspect`: what is in a GGUF file, and what running it needs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeinfer.cli import console, table
from edgeinfer.cli.runtime_options import MODEL_HELP

if TYPE_CHECKING:
    from edgeinfer.gguf_file.describe import Description

MAX_TEXT = 120


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, with --json too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show a model's metadata, tensor types, bits per weight and the memory it needs."""
    from edgeinfer.api.inspect import inspect

    found = inspect(model)
    if as_json:
        document = asdict(found)
        if not tensors:
            del document["tensors"]
        console.result_json(document)
        return
    parts = [_summary(found), _types(found), _memory(found), _metadata(found)]
    if tensors:
        parts.append(_tensors(found))
    console.result("\n\n".join(part for part in parts if part))


def _summary(found: Description) -> str:
    lines = [
        table.printable(found.path),
        table.one_line(f"  architecture   {found.architecture}" + (f" ({found.name})" if found.name else "")),
        f"  file           {table.size(found.file_nbytes)}, GGUF version {found.version}",
        f"  weights        {table.size(found.tensor_nbytes)} in {sum(t.tensors for t in found.types)} tensors",
        f"  parameters     {found.parameters:,}",
        f"  bits/weight    {found.bits_per_weight:.2f}",
        f"  chat template  {'yes' if found.has_chat_template else 'no'}",
    ]
    if found.shards > 1:
        lines.append(f"  shard          {found.shard} of {found.shards}: only this file is counted")
    return "\n".join(lines)


def _types(found: Description) -> str:
    rows = [
        (
            t.type,
            str(t.tensors),
            f"{t.parameters:,}",
            table.size(t.nbytes),
            f"{_percent(t.nbytes, found.tensor_nbytes)}",
        )
        for t in found.types
    ]
    return "Types\n" + table.render(("type", "tensors", "parameters", "size", "share"), rows, "<>>>>") if rows else ""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _memory(found: Description) -> str:
    if not found.memory:
        return ""
    has_state = any(m.state_nbytes for m in found.memory)
    columns = ["context", "weights", "KV cache", *(["state"] if has_state else []), "total"]
    rows = [
        (str(m.ctx_size), *(table.size(n) for n in (m.weights_nbytes, m.kv_nbytes, m.state_nbytes, m.total_nbytes)))
        for m in found.memory
    ]
    if not has_state:
        rows = [row[:3] + row[4:] for row in rows]
    text = "Memory (KV cache at F16; working buffers come on top)\n"
    text += table.render(columns, rows, ">" * len(columns))
    if has_state:
        text += "\nEach sequence that runs at a time has a state of its own."
    if found.window:
        text += f"\nSome layers see only {found.window} tokens back; their cache is full-size all the same."
    return text


def _metadata(found: Description) -> str:
    lines = [f"  {table.one_line(f'{key} = {_shown(value)}', 2)}" for key, value in found.metadata.items()]
    return "\n".join(["Metadata", *lines])


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        kind, count = value["type"].lower(), value["count"]
        return f"[{', '.join(_shown(element) for element in value['first'][:3])}, …] ({count:,} x {kind})"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_TEXT else value[:MAX_TEXT] + "…")
    return str(value)


def _tensors(found: Description) -> str:
    rows = [
        (table.one_line(t.name), " x ".join(map(str, t.shape)), t.type, table.size(t.nbytes)) for t in found.tensors
    ]
    return "Tensors (row length first)\n" + table.render(("name", "shape", "type", "size"), rows, "<<<>")
