"""Progress on stderr, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def passages() -> Iterator[Callable[[int, int], None]]:
    """A bar that is told how many passages of a text are done, and their total."""
    from tqdm import tqdm

    with tqdm(unit="chunk", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance
