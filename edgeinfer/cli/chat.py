"""The chat that `run` opens on a terminal when it is given no prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from edgeinfer.api.model import Model
from edgeinfer.cli import console
from edgeinfer.cli.interrupt import on_interrupt
from edgeinfer.errors import EdgeinferError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.answer import AnswerStream
from edgeinfer.runtime.session import ChatSession

_HELP = """\
/system TEXT  begin anew with this system prompt (without TEXT: with none)
/clear        begin anew
/regen        answer the last turn again
/bye          leave (so does Ctrl-D, or Ctrl-C twice)
Ctrl-C stops an answer and keeps what was said."""


def run(
    model: Model, *, system: str | None, params: SamplingParams, max_tokens: int | None, stop: Sequence[str]
) -> None:
    """Talk until the person leaves. Errors of a turn are told, and the chat goes on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history in input()
    session = model.chat(system=system, params=params, max_tokens=max_tokens, stop=stop)
    console.note("Chat: /help for help, Ctrl-D to leave.")
    leaving = False
    while True:
        try:
            line = input(">>> ").strip()
        except EOFError:
            console.note("")
            return
        except KeyboardInterrupt:
            if leaving:
                console.note("")
                return
            console.note("\n(Ctrl-C again, Ctrl-D or /bye leaves)")
            leaving = True
            continue
        leaving = False
        if line == "/bye":
            return
        try:
            leaving = _turn(model, session, line)
        except EdgeinferError as error:
            console.note(f"error: {error.message}" + (f" ({error.hint})" if error.hint else ""))


def _turn(model: Model, session: ChatSession, line: str) -> bool:
    """Do what a line says; returns whether Ctrl-C ended it."""
    command, _, argument = line.partition(" ")
    match command:
        case "":
            pass
        case "/help" | "/?":
            console.note(_HELP)
        case "/clear":
            session.clear()
        case "/system":
            session.clear(system=argument.strip())
        case "/regen":
            return _show(model, session.regenerate)
        case _ if command.startswith("/"):
            console.note(f"{command} is not a command; /help lists them")
        case _:
            return _show(model, lambda: session.ask(line))
    return False


def _show(model: Model, start: Callable[[], AnswerStream]) -> bool:
    """Print an answer while it comes; returns whether Ctrl-C ended it."""
    output = console.Stream()
    with on_interrupt(lambda _: model.interrupt()):
        stream = start()
        for piece in stream:
            output.write(piece)
    output.end()
    return stream.answer.finish_reason == "interrupted"
