"""The chat that `run` opens on a terminal when it is given no prompt."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable

from edgeinfer.cli import commands, console
from edgeinfer.cli.answer_view import AnswerView, is_plain, printable
from edgeinfer.cli.commands import Command, Message
from edgeinfer.cli.interrupt import on_interrupt
from edgeinfer.cli.status import status_line, token_table
from edgeinfer.cli.talk import Talk
from edgeinfer.errors import EdgeinferError, UsageError
from edgeinfer.home import home
from edgeinfer.runtime.answer import AnswerStream
from edgeinfer.types import Answer

REASONING = ("show", "fold")


def run(talk: Talk, interrupt: Callable[[], None]) -> None:
    """Talk until the person leaves; `interrupt` ends an answer from another thread. Errors are told, and it goes on."""
    from edgeinfer.cli.terminal import left_sane

    with left_sane():
        Chat(talk, interrupt).run()


class Chat:
    """What a person types, done."""

    def __init__(self, talk: Talk, interrupt: Callable[[], None]) -> None:
        from edgeinfer.cli.terminal import open_editor

        self._talk = talk
        self._interrupt = interrupt
        self._plain = is_plain(sys.stdout)
        self._folds = False
        self._answer: Answer | None = None
        self._editor = open_editor(home() / "chat_history", self._status, plain=self._plain)
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: console.note(commands.help_text()),
            "/system": self._set_system,
            "/set": self._set,
            "/show": self._show,
            "/regen": lambda _: self._stream(talk.regenerate),
            "/undo": self._undo,
            "/edit": self._edit,
            "/save": self._save,
            "/load": self._load,
            "/tokens": lambda _: console.note(token_table(talk.session.n_ctx, self._answer)),
            "/clear": self._clear,
        }
        assert {*self._commands, "/bye"} == set(commands.WORDS)

    def run(self) -> None:
        """Until Ctrl-D, /bye, or Ctrl-C twice."""
        console.note("Chat: /help for help, Ctrl-D to leave.")
        if any(message["role"] != "system" for message in self._talk.session.messages):
            self._tell_where_it_goes_on()
        is_leaving = False
        while True:
            try:
                wanted = commands.parse(self._editor.read())
                if wanted == Command("/bye"):
                    return
                is_leaving = self._obey(wanted)
            except EOFError:
                return
            except KeyboardInterrupt:
                if is_leaving:
                    return
                console.note("(Ctrl-C again, Ctrl-D or /bye leaves)")
                is_leaving = True

    def _obey(self, wanted: Command | Message | None) -> bool:
        """Do what was typed; returns whether Ctrl-C ended it, so that another one leaves."""
        before = self._answer
        try:
            if isinstance(wanted, Message):
                self._say(wanted.text)
            elif wanted is not None:
                action = self._commands.get(wanted.word)
                if action is None:
                    raise UsageError(f"{wanted.word} is not a command", "/help lists them")
                action(wanted.argument)
        except EdgeinferError as error:
            console.note(console.one_line(f"error: {error.message}" + (f" ({error.hint})" if error.hint else "")))
        answer = self._answer
        return answer is not None and answer is not before and answer.finish_reason == "interrupted"

    def _say(self, text: str) -> None:
        self._stream(lambda: self._talk.ask(text))

    def _stream(self, start: Callable[[], AnswerStream]) -> None:
        """Show an answer while it comes, and keep it, or what there is of it."""
        try:
            answer = self._shown(start)
        finally:
            self._talk.keep()
        self._answer = answer
        if answer.finish_reason == "interrupted":
            console.note("(stopped)")
        elif answer.finish_reason == "length":
            console.note("(cut: the limit of tokens or the end of the context)")

    def _shown(self, start: Callable[[], AnswerStream]) -> Answer:
        from edgeinfer.cli.terminal import without_echo

        with on_interrupt(lambda _: self._interrupt(), goes_on=True) as received, without_echo():
            stream = start()
            if note := self._talk.dropped_note():
                console.note(f"note: {note}")
            if received:
                self._interrupt()  # what came while the prompt was made is void for the engine
            view = AnswerView(console.write, plain=self._plain, folded=self._folds, closing_tag=stream.closing_tag)
            try:
                for piece in stream:
                    view.feed(piece)
            finally:
                view.end()
        return stream.answer

    def _status(self) -> str:
        return status_line(self._talk.session.n_ctx, self._answer, shutil.get_terminal_size().columns - 1)

    def _set_system(self, text: str) -> None:
        self._talk.session.system = text
        self._talk.keep()
        console.note("system prompt: " + (printable(text) or "none"))

    def _set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if not value:
            raise UsageError("/set needs a name and a value", "as /set temperature 0.2; /show settings lists them")
        if name == "reasoning":
            if value not in REASONING:
                raise UsageError(f"reasoning is {value!r}", "show or fold")
            self._folds = value == "fold"
        else:
            self._talk.settings.set(name, value.strip())
            self._talk.keep()

    def _show(self, what: str) -> None:
        session = self._talk.session
        match what:
            case "" | "settings":
                rows = [("model", self._talk.model), ("session", self._talk.file.name if self._talk.file else "none")]
                rows += [*self._talk.settings.table(), ("reasoning", REASONING[self._folds])]
                console.note("\n".join(f"{name:18}{printable(value)}" for name, value in rows))
            case "system":
                console.note(printable(session.system) or "(no system prompt)")
            case "messages":
                lines = [f"{m['role']}: {printable(m['content'])}" for m in session.messages if m["role"] != "system"]
                console.note("\n".join(lines) or "(nothing was said yet)")
            case "reasoning":
                reasoning = self._answer.reasoning if self._answer else None
                console.note(printable(reasoning or "(the last answer has no reasoning)"))
            case _:
                raise UsageError(f"{what!r} cannot be shown", f"one of {', '.join(commands.SHOWN)}")

    def _undo(self, _: str) -> None:
        question = self._talk.session.undo()
        self._talk.keep()
        console.note(console.one_line(f"taken back: {question:.60}"))

    def _edit(self, text: str) -> None:
        from edgeinfer.cli.terminal import edit_text

        written = edit_text(text).strip()
        if not written:
            raise UsageError("the message is empty", "nothing was said")
        console.note(printable(written))
        self._say(written)

    def _save(self, name: str) -> None:
        name = name or (self._talk.file.name if self._talk.file else "")
        if not name:
            raise UsageError("/save needs a name", "as /save ideas")
        self._talk.save(name)
        console.note(f"kept as session {name}, from here on after every answer")

    def _load(self, name: str) -> None:
        if not name:
            raise UsageError("/load needs a name", "as /load ideas")
        self._talk.load(name)
        self._answer = None
        self._tell_where_it_goes_on()

    def _clear(self, _: str) -> None:
        self._talk.session.clear()
        self._answer = None
        self._talk.keep()
        console.note("(a new conversation)")

    def _tell_where_it_goes_on(self) -> None:
        n_turns = sum(message["role"] == "user" for message in self._talk.session.messages)
        console.note(f"(going on after {n_turns} {'turn' if n_turns == 1 else 'turns'}; /show messages shows them)")
