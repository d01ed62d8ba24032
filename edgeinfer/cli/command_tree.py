"""The commands by name. A command's module is imported when the command is asked for: a start pays for no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup

from edgeinfer.cli.usage import Command

# In the order of the help, each with what it says there in a line. Each is a module of this package.
_ABOUT = {
    "convert": "Make one quantized GGUF file of a checkpoint.",
    "run": "Answer a prompt, or chat on a terminal.",
    "batch": "Answer every line of a JSONL file, many at a time.",
    "bench": "Measure prompt processing and generation.",
    "eval": "Measure how well a model predicts a text.",
    "imatrix": "Find out which weights matter, for convert.",
    "tokenize": "Print the tokens of a text.",
    "inspect": "Show what is in a model file, and its memory.",
    "doctor": "Show what this machine offers, and how a model would run.",
    "models": "List, fetch and delete models.",
    "cache": "Show or clear the prefix cache.",
}


class Commands(TyperGroup):
    """The program: a group of all commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Commands()


class _Commands(Mapping[str, Any]):
    """Names to commands of the command library, whose class for these is private."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_ABOUT)

    def __len__(self) -> int:
        return len(_ABOUT)


@cache
def _command(name: str) -> Any:
    about = _ABOUT[name]
    module = import_module(f"edgeinfer.cli.{name}")
    tree = typer.Typer(rich_markup_mode=None, add_completion=False)
    if hasattr(module, "app"):  # a group of its own
        tree.add_typer(module.app, name=name, short_help=about)
        return typer.main.get_group(tree).commands[name]
    tree.command(name, cls=Command, short_help=about)(module.command)
    return typer.main.get_command(tree)
