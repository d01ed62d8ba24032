"""Conversations that outlive their process: one file each, for its owner only.

    NAME.json     what was said, the settings that were given, and the tokens that stand for it
    NAME.lock     held by the process that the conversation goes on in

The KV state is not here: the prefix cache has it, under the same tokens. A file is as little trusted as any other.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from edgeinfer.atomic_file import replace_file
from edgeinfer.errors import EdgeinferError, NotFoundError, ResourceError, UnusableInputError, UsageError
from edgeinfer.file_lock import lock
from edgeinfer.home import home
from edgeinfer.runtime.conversation import Said
from edgeinfer.runtime.session import SessionState

FORMAT = 1
MAX_NBYTES = 64 << 20
_NAME = re.compile(r"\w[\w.-]*")
_MAX_NAME_NBYTES = 200
_MAX_TOKEN = 2**31 - 1
_ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A conversation as its file has it."""

    model: str = ""
    """The file of the model that answered last."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What was given of sampling options and limits, by name."""
    state: SessionState = field(default_factory=SessionState)


class SessionFile:
    """One session, held by this process until `close`.

    Raises UsageError for a name that cannot be, ResourceError when another process has it or the disk does not let us,
    UnusableInputError for a file that is none of ours.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = _path(name)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path.with_name(f"{name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            _take(self._lock, name)
            self.saved = _read(self.path)
            """What the file has; None where there is none yet."""
        except OSError as error:  # a file system without locks
            self.close()
            raise self._unwritable(error) from None
        except BaseException:
            self.close()
            raise

    def write(self, saved: SavedSession) -> None:
        """Replace the file by this, wholly or not at all. Raises ResourceError."""
        try:
            replace_file(self.path, json.dumps(_document(saved), ensure_ascii=False).encode("utf-8", "replace"))
        except OSError as error:
            raise self._unwritable(error) from None
        self.saved = saved

    def close(self) -> None:
        """Let other processes have it."""
        with suppress(OSError):
            os.close(self._lock)

    def __enter__(self) -> SessionFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _unwritable(self, error: OSError) -> EdgeinferError:
        return ResourceError(
            f"{self.path}: cannot be written ({error.strerror})",
            "check the permissions and the space, or EDGEINFER_HOME",
        )


def existing_session(name: str) -> SessionFile:
    """The session of this name. Raises NotFoundError when there is none, and what `SessionFile` raises."""
    if not _path(name).exists():
        names = sorted(path.stem for path in home().glob("sessions/*.json"))
        raise NotFoundError(
            f"there is no session {name}", f"there are {', '.join(names[:20])}" if names else "/save one"
        )
    return SessionFile(name)


def _path(name: str) -> Path:
    if not _NAME.fullmatch(name) or len(name.encode()) > _MAX_NAME_NBYTES:
        raise UsageError(f"{name!r} cannot name a session", "give letters, digits, dots, hyphens and underscores")
    return home() / "sessions" / f"{name}.json"


def _take(file: int, name: str) -> None:
    if not lock(file, wait_s=0):
        raise ResourceError(
            f"session {name} is in use by another process", "wait until that ends, or give another --session"
        )


def _read(path: Path) -> SavedSession | None:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_NBYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableInputError(f"{path}: cannot be read ({error.strerror})", "check the permissions") from None
    try:
        if len(data) > MAX_NBYTES:
            raise ValueError(f"longer than {MAX_NBYTES} bytes")
        return _parse(json.loads(data))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnusableInputError(f"{path}: not a session ({error})", "give another --session, or remove it") from None


def _document(saved: SavedSession) -> dict[str, Any]:
    state = saved.state
    return {
        "format": FORMAT,
        "model": saved.model,
        "settings": saved.settings,
        "system": state.system,
        "messages": list(state.messages),
        "dropped_messages": state.n_dropped,
        "text": state.text,
        "tokens": list(state.tokens),
    }


def _parse(document: Any) -> SavedSession:
    """Raises ValueError, KeyError or TypeError for whatever `_document` does not give."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError("not of a format that is known")
    messages = tuple(map(_message, _need(document, "messages", list)))
    n_dropped = _need(document, "dropped_messages", int)
    if not 0 <= n_dropped <= len(messages):
        raise ValueError(f"dropped_messages is {n_dropped}")
    tokens = _need(document, "tokens", list)
    if not all(type(token) is int and 0 <= token <= _MAX_TOKEN for token in tokens):
        raise ValueError("tokens are whole numbers")
    system, text = _need(document, "system", str), _need(document, "text", str)
    state = SessionState(system, messages, n_dropped, text, tuple(tokens))
    return SavedSession(_need(document, "model", str), _need(document, "settings", dict), state)


def _message(value: Any) -> Said:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise ValueError("a message is neither the user's nor the assistant's")
    message = {"role": value["role"], "content": _need(value, "content", str)}
    if "reasoning" in value:
        message["reasoning"] = _need(value, "reasoning", str)
    return message


def _need(document: dict[str, Any], key: str, kind: type[Any]) -> Any:
    value = document[key]
    if type(value) is not kind:
        raise ValueError(f"{key} is {value!r:.40}")
    if isinstance(value, str):
        value.encode()  # a lone surrogate is a ValueError
    return value
