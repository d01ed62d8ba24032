"""Chat templates, rendered as Hugging Face does, in a process that can be stopped.

A template is a program that comes with the model's file, and that is not trusted. jinja2's immutable sandbox keeps it
away from Python; nothing in it limits time and memory (`{{ "a" * 10**10 }}` is one operation), so compiling and
rendering happen in a forked child with limits of the operating system on both. A fork costs a few milliseconds and
shares everything that is already imported. Where there is no fork (Windows), only the sandbox and the size limits hold.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from edgeinfer.errors import UnusableInputError

Message = Mapping[str, Any]

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 1 << 26
MAX_SECONDS = 5.0
MAX_GROWTH_NBYTES = 1 << 30
_OK, _FAILED = b"+", b"-"
_outside_the_child = threading.Lock()
"""Held by who renders here, for jinja2 has locks that a child forked meanwhile would find held by nobody; and by who
forks, for another thread's child would hold this one's pipe open."""


class ChatTemplate:
    """A model's chat template, with its begin- and end-of-sequence tokens as they are spelled."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        self._source = source
        self._variables = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt's text for a conversation.

        Raises UnusableInputError when the template is wrong, refuses the conversation, or exceeds its limits.
        """
        if len(self._source) > MAX_TEMPLATE_CHARS:  # not said before: with --raw, any template will do
            raise _unusable(f"it has {len(self._source)} characters, more than {MAX_TEMPLATE_CHARS}")
        context = {
            **self._variables,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        preload()  # before the fork, so that no child has to do it again
        text = _render_in_child(self._source, context) if hasattr(os, "fork") else _render_here(self._source, context)
        if not text:
            raise _unusable("it writes nothing")
        return text


def _render_here(source: str, context: dict[str, Any]) -> str:
    try:
        return _render(source, context)
    except Exception as error:
        raise _unusable(_reason(error)) from None


def preload() -> None:
    """Import what rendering needs and render something, so that the next render finds everything warm."""
    with _outside_the_child:
        _render("{% if true %}{{ eos_token }}{% endif %}", {})


def _render(source: str, context: dict[str, Any]) -> str:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    pieces, n_chars = [], 0
    for piece in environment.from_string(source).generate(context):
        n_chars += len(piece)
        if n_chars > MAX_OUTPUT_CHARS:
            raise OverflowError(f"it writes more than {MAX_OUTPUT_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _generation_tag() -> Any:
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; its content is passed through."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return GenerationTag


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's tojson: jinja2's own would escape `<`, `>`, `&` and `'`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _render_in_child(source: str, context: dict[str, Any]) -> str:
    with _outside_the_child:
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Python warns of locks that other threads hold. The child runs jinja2 alone and ends without cleaning up.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os.close(reader)  # else its own copy would let it wait for ever to write, once the parent has gone
            _child(source, context, writer)
        os.close(writer)
    try:
        output = _read_all(reader, time.monotonic() + MAX_SECONDS)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if output[:1] == _OK:
        return output[1:].decode("utf-8")
    raise _unusable(output[1:].decode("utf-8", "replace") or "it needs too much time or memory")


def _child(source: str, context: dict[str, Any], writer: int) -> NoReturn:
    """Render and leave by `_exit`, whatever happens: nothing of the parent's may be flushed or freed here."""
    try:
        gc.disable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the child too, but is the parent's
        if (wakeup := signal.set_wakeup_fd(-1)) >= 0:
            os.close(wakeup)  # who reads there waits until nobody has it open any more
        _limit_child()
        try:
            output = _OK + _render(source, context).encode("utf-8")
        except Exception as error:
            output = _FAILED + _reason(error).encode("utf-8", "replace")
        while output:
            output = output[os.write(writer, output) :]
    finally:
        os._exit(0)


def _limit_child() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(MAX_SECONDS) + 1, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # The child has the parent's whole address space, mapped weights too: limit what it adds.
        with open("/proc/self/statm") as file:
            mapped_nbytes = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped_nbytes + MAX_GROWTH_NBYTES, hard))


def _read_all(reader: int, deadline_s: float) -> bytes:
    """What the child writes until it ends, b"" if that takes too long."""
    chunks: list[bytes] = []
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return b""
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError | RecursionError):
        return "it needs too much time or memory"
    line = getattr(error, "lineno", None)
    return f"{error or type(error).__name__}" + (f" (line {line})" if line else "")


def _unusable(reason: str) -> UnusableInputError:
    return UnusableInputError(f"the chat template fails: {reason}", "use --raw, or another file")
