"""Every error that a user can meet, each class with its exit code.

    EdgeinferError
    ├── UsageError             2   wrong flag, bad value, contradictory options
    ├── NotFoundError          3   model, file, tensor name, hub repository
    ├── UnusableInputError     4   corrupt, truncated or unsupported checkpoint, GGUF or template
    ├── ResourceError          5   memory or disk do not suffice, output cannot be written
    │   └── OverloadError      5   more requests than are taken at a time
    ├── ContextOverflowError   6   the prompt does not fit the context
    ├── CheckFailedError       7   a verification or a threshold failed
    └── InterruptedByUser    130   Ctrl-C

Anything else that escapes is a bug of ours: exit code 1. `message` is one line that names the subject,
`hint` one line that names the remedy; `cli.console` is the one place that prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar, Self


class EdgeinferError(Exception):
    """The root of the tree; raise one of its subclasses."""

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "internal"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def bare(self) -> Self:
        """Without how it came about, which would keep alive whatever the code that failed had in its hands."""
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self

    def as_json(self) -> dict[str, Any]:
        """The contract's error document: `{"error": {"code", "message", "hint"}}`."""
        return {"error": {"code": self.code, "message": self.message, "hint": self.hint}}


class UsageError(EdgeinferError):
    """The command line (or the call) is wrong in itself.

    Where the message begins with the name of an option's field, `field` is that name.
    """

    exit_code = 2
    code = "usage"

    def __init__(self, message: str, hint: str = "", field: str = "") -> None:
        super().__init__(message, hint)
        self.field = field


class NotFoundError(EdgeinferError):
    """Something that was named does not exist."""

    exit_code = 3
    code = "not_found"


class UnusableInputError(EdgeinferError):
    """A file exists but cannot be used as it is."""

    exit_code = 4
    code = "unusable_input"


class ResourceError(EdgeinferError):
    """Memory or disk do not suffice, or the output cannot be written."""

    exit_code = 5
    code = "resources"


class OverloadError(ResourceError):
    """Too many requests wait already; the same one is taken later."""

    code = "overloaded"


class ContextOverflowError(EdgeinferError):
    """The prompt and the room for an answer exceed the context."""

    exit_code = 6
    code = "context_overflow"


class CheckFailedError(EdgeinferError):
    """A requested check found a difference."""

    exit_code = 7
    code = "check_failed"

    def __init__(self, message: str, hint: str = "", found: dict[str, Any] | None = None) -> None:
        super().__init__(message, hint)
        self.found = found or {}

    def as_json(self) -> dict[str, Any]:
        """The error document, with what the check found before it."""
        return {**self.found, **super().as_json()}


class InterruptedByUser(EdgeinferError):
    """Ctrl-C; whatever was finished before it has been kept."""

    exit_code = 130
    code = "interrupted"


last_words: list[Callable[[EdgeinferError], None]] = []
"""What is called, the last one only, before the C library ends the process over an assertion of its own.

Nothing can be raised there any more; the command line reports the error and exits with its code.
"""


MAX_LISTED = 50


def listed(names: Collection[str]) -> str:
    """Names for a message, one after the other; of a great many only the first, as an error is one line."""
    first = [name for name, _ in zip(names, range(MAX_LISTED), strict=False)]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")
