"""`edgeinfer tokenize`: the tokens of a text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeinfer.cli import console, inputs
from edgeinfer.cli.runtime_options import MODEL_HELP
from edgeinfer.errors import UsageError

if TYPE_CHECKING:
    from edgeinfer.api.vocabulary import Token


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The text [default: standard input].")] = None,
    pieces: Annotated[bool, typer.Option("--pieces", help="One token a line, with its text.")] = False,
    count: Annotated[bool, typer.Option("--count", help="Print only how many tokens there are.")] = False,
    no_special: Annotated[
        bool, typer.Option("--no-special", help="Don't add the tokens that belong around a text.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the ids of the tokens that a model's vocabulary splits a text into."""
    if pieces + count + as_json > 1:
        raise UsageError("--pieces, --count and --json exclude each other", "give one of them")
    from edgeinfer.api.vocabulary import tokenize

    tokens = tokenize(
        model, inputs.standard_input() if text is None else inputs.argument(text, "TEXT"), add_special=not no_special
    )
    if as_json:
        console.result_json({"count": len(tokens), "tokens": [{"id": t.id, "piece": _piece(t)} for t in tokens]})
    elif count:
        console.result(str(len(tokens)))
    elif pieces:
        for token in tokens:
            console.result(f"{token.id}\t{json.dumps(_piece(token), ensure_ascii=False)}")
    else:
        console.result(" ".join(str(token.id) for token in tokens))


def _piece(token: Token) -> Any:
    """A token's text; the bytes as numbers where they are only a part of a character."""
    try:
        return token.piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(token.piece)
