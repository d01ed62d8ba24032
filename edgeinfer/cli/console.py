"""Streams and exit codes: results to stdout, everything else to stderr, one line per error."""

from __future__ import annotations

import io
import json
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from edgeinfer.errors import EdgeinferError, ResourceError
from edgeinfer.temporary import remove_all


class Writes:
    """Counts what is written, so that another thread can tell when a write waits for somebody who does not read."""

    def __init__(self) -> None:
        self.begun = 0
        self.done = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """A write. One that a signal breaks off is never done."""
        self.begun += 1
        try:
            yield
        except Exception:
            self.done += 1
            raise
        self.done += 1


writes = Writes()


def prepare_streams() -> None:
    """Make the standard streams safe to use, whatever the caller left of them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Closed by the caller: no file that is opened later may land on its descriptor.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names need not be text: on UTF-8 they come out as they are, elsewhere what cannot be shown is escaped.
        is_utf8 = sys.stdout.encoding.lower() == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def result(text: str) -> None:
    """Print a result (and nothing else) to stdout."""
    write(text + "\n")


def result_json(document: Any) -> None:
    """Print one JSON document to stdout."""
    text = json.dumps(document, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:  # a file name that is no text, or a terminal without these characters
        text = json.dumps(document)
    result(text)


class Stream:
    """A result that appears piece by piece, and ends with exactly one newline."""

    def __init__(self) -> None:
        self._newlines = ""

    def write(self, piece: str) -> None:
        """Print a piece at once, but newlines at its end only when something follows them."""
        text = self._newlines + piece
        shown = text.rstrip("\n")
        self._newlines = text[len(shown) :]
        if shown:
            write(shown)

    def end(self) -> None:
        """Print the final newline."""
        write("\n")


def write(text: str) -> None:
    """Write to stdout at once; leave quietly when its reader has gone.

    The command library would turn the BrokenPipeError into exit code 1, so it does not get to see it.
    """
    try:
        with writes.one():
            sys.stdout.write(text)
            sys.stdout.flush()
    except OSError as error:
        _drop_stdout()
        if isinstance(error, BrokenPipeError):
            raise SystemExit(141) from None
        raise ResourceError(f"standard output cannot be written ({error.strerror})", "free some space") from None
    except BaseException:  # a signal: nobody may wait for who has not read so far
        _drop_stdout()
        raise


def leave_without_reader() -> None:
    """Leave quietly when nobody reads stdout any more. Only a write would tell otherwise, and one can be far off."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if poll.poll(0):
            _drop_stdout()
            raise SystemExit(141)


def _drop_stdout() -> None:
    """Python flushes stdout again at exit, and would complain, or wait, again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """Tell a person something, on stderr; there is nobody to tell when that fails."""
    with suppress(OSError), writes.one():
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def leave(code: int) -> NoReturn:
    """Exit at once, when all the work is done.

    The operating system takes the memory back in one go, where to free a loaded vocabulary piece by piece takes 50 ms.
    And threads that still read or import would be frozen by the interpreter's end in the middle of something that the
    destructors of the C libraries can wait for.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # what was written through `write` has been flushed, and its failure told
            stream.flush()
    os._exit(code)


def fail(error: EdgeinferError, *, as_json: bool = False) -> NoReturn:
    """Report an error as the contract has it, and exit with its code."""
    if as_json:
        with suppress(ResourceError):  # the error is told on stderr all the same
            result_json(error.as_json())
    note(one_line(f"error: {error.message}" + (f" ({error.hint})" if error.hint else "")))
    raise SystemExit(error.exit_code)


def fail_at_once(error: EdgeinferError, *, as_json: bool, code: Any = None) -> NoReturn:
    """Report why a signal ends the program, and end it, also from another thread than the main one.

    Not by an exception: the interpreter, when a Ctrl-C has come while it compiled something, ends by that signal.
    """
    try:
        fail(error, as_json=as_json)
    finally:
        remove_all()
        os._exit(code or error.exit_code)


def one_line(text: str) -> str:
    """What a file says stands in many a message: no line ends and no escape codes of its own."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def wants_colour(stream: Any) -> bool:
    """Whether escape codes may be written to `stream`: a terminal, and no NO_COLOR."""
    return not os.environ.get("NO_COLOR") and bool(stream.isatty())
