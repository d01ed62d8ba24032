"""Progress on stderr."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from edgeinfer.cli import console


@contextmanager
def steps() -> Iterator[Callable[[int, int], None]]:
    """A bar, on a terminal only, that is told how many (passages of a text, tensors) are done, and their total."""
    with _bar("{n_fmt}/{total_fmt}, {remaining} left") as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance


@contextmanager
def weights() -> Iterator[Callable[[int, int], None]]:
    """A bar, on a terminal only, that is told the bytes of weights just done, and their total."""
    with _bar("{rate_fmt}, {remaining} left", unit="B", unit_scale=True) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done)

        yield advance


def _bar(after: str, **options: Any) -> Any:
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own is a semaphore of multiprocessing, which must be told of the end
    bar_format = "{percentage:3.0f} % |{bar}| " + after
    is_terminal = sys.stderr.isatty()
    # Nothing in the first moment, when neither the total nor the speed is known.
    return tqdm(file=sys.stderr, disable=not is_terminal, leave=False, delay=0.3, bar_format=bar_format, **options)


class Counts(Protocol):
    """What a batch counts while it runs."""

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers so far."""
        ...


class Meter:
    """Rows, tokens per second and the time left: one line that changes on a terminal, a line now and then elsewhere."""

    def __init__(self, total_nbytes: int | None, counts: Counts, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_nbytes = total_nbytes
        self._counts = counts
        self._clock = clock
        self._started_s = self._shown_s = clock()
        self._is_terminal = sys.stderr.isatty()
        self.n_rows = self.n_failed = 0
        """Rows that are done, and those of them that are errors."""
        self._first: tuple[float, int] | None = None
        """When the first row was done, and where it ended: what was skipped before it took no time."""
        self._done_nbytes = 0

    def count(self, end_nbytes: int, *, failed: bool) -> None:
        """A row is done; it ends there in the input."""
        self.n_rows += 1
        self.n_failed += failed
        self._done_nbytes = end_nbytes
        if self._first is None:
            self._first = self._clock(), end_nbytes

    def show(self) -> None:
        """Tell how far it is, if that has not just been told."""
        now_s = self._clock()
        if now_s - self._shown_s < (_TERMINAL_S if self._is_terminal else _LOG_S):
            return
        self._shown_s = now_s
        left_s = self._left_s(now_s)
        self._write(self._line(now_s) + ("" if left_s is None else f", {_duration(left_s)} left"), last=False)

    def end(self) -> None:
        """Tell what it was."""
        now_s = self._clock()
        self._write(f"{self._line(now_s)} in {_duration(now_s - self._started_s)}", last=True)

    def _line(self, now_s: float) -> str:
        tokens = self._counts.completion_tokens
        failed = f" ({self.n_failed} failed)" if self.n_failed else ""
        rate = tokens / max(now_s - self._started_s, 1e-9)
        return f"{rows(self.n_rows)}{failed}, {tokens} tokens, {rate:.1f} tokens/s"

    def _left_s(self, now_s: float) -> float | None:
        if self._total_nbytes is None or self._first is None:
            return None
        first_s, first_nbytes = self._first
        done_nbytes = self._done_nbytes - first_nbytes
        if done_nbytes <= 0:
            return None
        return max(0.0, (now_s - first_s) * (self._total_nbytes - self._done_nbytes) / done_nbytes)

    def _write(self, text: str, *, last: bool) -> None:
        with suppress(OSError), console.writes.one():
            if self._is_terminal:
                # The last line may be longer than the terminal is wide; one that is to be overwritten may not.
                text = "\r" + (text if last else text[: _width()]).ljust(_width())
            sys.stderr.write(text + ("\n" if last or not self._is_terminal else ""))
            sys.stderr.flush()


_TERMINAL_S, _LOG_S = 0.5, 10.0  # between two lines


def _width() -> int:
    """Of a line that does not wrap."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns - 1
    except (OSError, ValueError):
        return 78


def rows(count: int) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} row" + ("" if count == 1 else "s")


def _duration(seconds: float) -> str:
    """`42 s`, `3:07`, `2:05:00`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
