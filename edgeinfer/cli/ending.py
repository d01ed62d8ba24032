"""The end of a process that has run a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from edgeinfer.cli import console

if TYPE_CHECKING:
    from edgeinfer.api.model import Model

_HURRIED_WAIT_S = 0.2


def leave(model: Model, code: int, *, verbose: bool) -> NoReturn:
    """End the process when what it computed is kept; who ended it by a signal does not wait for all of it."""
    if code:
        model.finish_writing(wait_s=_HURRIED_WAIT_S)
    else:
        model.finish_writing()
    if verbose:
        for line in model.notes():
            console.note(f"note: {line}")
    console.leave(code)
