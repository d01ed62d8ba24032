"""The terminal of a chat: the line editor, its keyboard while an answer streams, and the state it is left in."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.styles import Style

from edgeinfer.cli import commands
from edgeinfer.cli.answer_view import is_dumb
from edgeinfer.errors import EdgeinferError, NotFoundError, UsageError, last_words

PROMPT, CONTINUATION = ">>> ", "... "
MAX_REMEMBERED_CHARS = 1 << 16
"""Of a message; a pasted book need not be in the history."""
# Bracketed paste off, cursor visible, no attributes: what an editor that was ended midway may have left.
_SANE = "\x1b[?2004l\x1b[?25h\x1b[0m"


class Editor(Protocol):
    """Reads messages and commands."""

    def read(self) -> str:
        """What is typed next. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
        ...


def open_editor(history: Path, status: Callable[[], str], *, plain: bool) -> Editor:
    """The editor that this terminal can have."""
    return _DumbEditor() if is_dumb() else _LineEditor(history, status, plain=plain)


class _DumbEditor:
    """For terminals that take no escape codes: a line as the terminal itself reads it."""

    def read(self) -> str:
        typed = input(PROMPT)
        while commands.is_open(typed):
            typed += "\n" + input(CONTINUATION)
        return typed


class _LineEditor:
    """Reads messages and commands. `status` is shown below the line that is typed."""

    def __init__(self, history: Path, status: Callable[[], str], *, plain: bool) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            completer=_CommandCompleter(),
            complete_while_typing=False,
            multiline=Condition(lambda: commands.is_open(self._session.default_buffer.text)),
            prompt_continuation=lambda width, line, wraps: "" if wraps else CONTINUATION,
            bottom_toolbar=status,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            style=Style.from_dict({"bottom-toolbar": "noreverse" if plain else "noreverse ansibrightblack"}),
        )

    def read(self) -> str:
        return self._session.prompt(PROMPT)


class _CommandCompleter(Completer):
    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        for word, n_typed in commands.completions(document.text):
            yield Completion(word, start_position=-n_typed)


class _OwnHistory(FileHistory):
    def store_string(self, string: str) -> None:
        if len(string) <= MAX_REMEMBERED_CHARS:
            with suppress(OSError):  # a full disk is no reason to end a chat
                super().store_string(string)


def _history(path: Path) -> History:
    """What was typed before, in a file for its owner only; in memory where there can be none."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return _OwnHistory(str(path))


def edit_text(text: str) -> str:
    """What a person makes of a text in $VISUAL or $EDITOR. Raises UsageError or NotFoundError when there is none."""
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not command:
        raise UsageError("no editor is set", "set EDITOR, for example to nano")
    with tempfile.TemporaryDirectory(prefix="edgeinfer-") as folder:  # for its owner only
        path = Path(folder) / "message.md"
        path.write_text(text, "utf-8")
        previous = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the editor's
        try:
            code = subprocess.run([*shlex.split(command), str(path)], check=False).returncode
        except (OSError, ValueError) as error:
            raise NotFoundError(f"{command}: cannot be run ({error})", "set EDITOR to an editor") from None
        finally:
            signal.signal(signal.SIGINT, previous)
        if code:
            raise UsageError(f"{command} ended with {code}", "nothing was said")
        try:
            return path.read_text("utf-8", "replace")
        except OSError:
            return ""


@contextmanager
def left_sane() -> Iterator[None]:
    """After the block the terminal is as it was before, however the block ends, also when the C library ends it."""
    try:
        import termios
    except ImportError:  # Windows: the line editor alone has to do with it
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def restore() -> None:
        with suppress(termios.error, OSError):
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
            if not is_dumb():
                os.write(sys.stdout.fileno(), _SANE.encode())

    def die_sane(error: EdgeinferError) -> None:
        restore()
        if len(last_words) > 1:
            last_words[-2](error)

    last_words.append(die_sane)
    try:
        yield
    finally:
        last_words.remove(die_sane)
        restore()


@contextmanager
def without_echo() -> Iterator[None]:
    """Within the block, what is typed does not show (it would stand in the answer); it is read afterwards."""
    try:
        import termios
    except ImportError:
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(keyboard, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
