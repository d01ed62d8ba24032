"""A program behind a pseudo-terminal, and the screen that a person sees. Waits for what is shown, never for time."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import pyte

PATIENCE_S = 120
_LOOK_S = 0.05


class Terminal:
    """Use it in a `with` statement; the program is ended with it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, columns: int = 80, rows: int = 24
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.output = b""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            path = {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color"}
            # Set by some runners of tests, they would stand for the window's size.
            rest = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            os.execve(command[0], list(command), {**rest, **path, **(environment or {})})
        self.resize(columns, rows)
        self.screen.write_process_input = lambda text: self._taken(text.encode())  # type: ignore[method-assign]
        self.first_modes = termios.tcgetattr(self._fd)
        self._code: int | None = None

    def type(self, text: str) -> None:
        """Keys. What a program writes that does not read them yet is taken, so that neither waits for the other."""
        data, deadline_s = text.encode(), time.monotonic() + PATIENCE_S
        while data := data[self._taken(data) :]:
            assert time.monotonic() < deadline_s, f"nobody takes {data[:40]!r}:\n{self.text}"
            if not self._read(_LOOK_S):
                return

    def _taken(self, data: bytes) -> int:
        """How many bytes the terminal has room for."""
        os.set_blocking(self._fd, False)
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0
        finally:
            os.set_blocking(self._fd, True)

    def resize(self, columns: int, rows: int) -> None:
        """Change the window's size, as a person does with the mouse."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    @property
    def lines(self) -> list[str]:
        """What the screen shows and what has scrolled away above, without spaces at the ends of lines."""
        width = self.screen.columns
        above = ["".join(line[x].data for x in range(width)) for line in self.screen.history.top]
        return [line.rstrip() for line in (*above, *self.screen.display)]

    @property
    def text(self) -> str:
        """The lines, as one text."""
        return "\n".join(self.lines)

    def wait(self, is_so: Callable[[], bool], what: object = "") -> None:
        """Read until something is so."""
        n_looks = 0  # not the clock: whoever stops the tests for a while stops the program as well
        while not is_so():
            n_looks += 1
            assert n_looks * _LOOK_S < PATIENCE_S, f"{what!r} did not come:\n{self.text}"
            assert self._read(_LOOK_S) or is_so(), f"{what!r} did not come before the end:\n{self.text}"

    def expect(self, text: str) -> None:
        """Wait until the screen shows a text."""
        self.wait(lambda: text in self.text, text)

    def expect_prompt(self) -> None:
        """Wait until the line editor waits for keys: the cursor is behind the prompt, and keys are read one by one."""
        self.wait(lambda: self._at_prompt() and not self._flags() & termios.ICANON, "the prompt")

    def expect_answer(self) -> None:
        """Wait until an answer is being made: the terminal is no longer the editor's, and shows no keys."""
        self.wait(lambda: self._flags() & (termios.ICANON | termios.ECHO) == termios.ICANON, "the answer's begin")

    def say(self, text: str) -> None:
        """Type a line when the prompt is there."""
        self.expect_prompt()
        self.type(text)
        self.wait(lambda: not self._at_prompt(), text)
        self.type("\r")

    def _flags(self) -> int:
        flags: int = termios.tcgetattr(self._fd)[3]
        return flags

    def modes(self) -> list[object]:
        """How the terminal is set."""
        return termios.tcgetattr(self._fd)

    def end(self) -> int:
        """Wait for the program's end; its exit code, or minus a signal's number."""
        self.wait(self._has_ended, "the end")
        while select.select([self._fd], [], [], 0)[0] and self._read(0):  # its last words
            pass
        assert self._code is not None
        return self._code

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if not self._has_ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def _at_prompt(self) -> bool:
        y, x = self.screen.cursor.y, self.screen.cursor.x
        return self.screen.display[y].rstrip() == ">>>" and x == 4

    def _has_ended(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is not None

    def _read(self, timeout_s: float) -> bool:
        """Take what the program writes; False when it has closed the terminal."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # Linux's way to say that nobody has it open any more
            time.sleep(0.01)
            return not self._has_ended()
        self.output += data
        self._stream.feed(data)
        return bool(data)
