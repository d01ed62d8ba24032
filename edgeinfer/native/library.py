"""The C library itself: loaded once, silent unless asked, its error messages kept.

Importing this module loads the library, so only code that runs a model or quantizes imports it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from edgeinfer.errors import ResourceError, UnusableInputError, last_words
from edgeinfer.native.devices import cores_are_shared
from edgeinfer.temporary import remove_all

_INFO, _ERROR, _CONTINUATION = 2, 4, 5  # enum ggml_log_level; 1 is for who debugs the library: a line per tensor
_MAX_ERRORS = 16


def import_declarations(package: str, module: str) -> Any:
    """A module of plain ctypes declarations, without the package around it; None where there is no such package.

    `llama_cpp/__init__.py` also imports its high-level classes with jinja2, diskcache and more: about 70 ms that
    every start of a command would pay. While the declarations load, a bare package stands in for the real one;
    it goes away again, so that anybody who imports the package later gets all of it.
    """
    with _importing:
        if package in sys.modules:
            return importlib.import_module(f"{package}.{module}")
        spec = importlib.util.find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            return None
        stand_in = ModuleType(package)
        stand_in.__path__ = list(spec.submodule_search_locations)
        stand_in.__spec__ = spec  # who looks meanwhile whether it is installed asks for it
        sys.modules[package] = stand_in
        try:
            return importlib.import_module(f"{package}.{module}")
        finally:
            del sys.modules[package]


_importing = threading.Lock()


def _import_bindings() -> Any:
    bindings = import_declarations("llama_cpp", "llama_cpp")
    if bindings is None:
        raise ResourceError("the llama.cpp bindings are not installed", "pip install llama-cpp-python")
    return bindings


if "OMP_WAIT_POLICY" not in os.environ and cores_are_shared():
    # The library's threads spin while they wait for each other, by GNU OpenMP's default for milliseconds. That is
    # fastest on a machine of their own; next to other programs they spin while the one they wait for cannot run, and a
    # token can take tens of times longer. OpenMP reads this when it is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

llama: Any = _import_bindings()
"""The bindings' functions and structures, untyped; nothing outside `native` sees them."""

_verbose = False
_errors: list[str] = []
_pending = ""
_pending_level = 0


def _log(level: int, text: bytes, _: Any) -> None:
    """Collect the lines that the library logs piece by piece; keep errors, show them from _INFO on when verbose."""
    global _pending, _pending_level
    if level != _CONTINUATION:
        _pending, _pending_level = "", level
    _pending += text.decode("utf-8", "replace")
    if not _pending.endswith("\n"):
        return
    if _verbose and _pending_level >= _INFO:
        sys.stderr.write(_pending)
    if _pending_level == _ERROR and len(_errors) < _MAX_ERRORS:
        _errors.append(_pending.strip())
    _pending = ""


def c_runtime() -> ctypes.CDLL:
    """The C runtime's functions, for callbacks that must not need Python."""
    return ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)


# A ctypes callback must outlive every call: module globals do.
log_callback = llama.llama_log_callback(_log)
llama.llama_log_set(log_callback, ctypes.c_void_p(0))
llama.llama_backend_init()
# C's `abs` takes the level, and neither looks at the rest nor changes anything.
_ignore = ctypes.cast(c_runtime().abs, llama.llama_log_callback)


def load_ggml_base() -> ctypes.CDLL:
    """A handle of libggml-base, which the bindings load but do not wrap; its functions are still to be declared."""
    # A wheel may hold it twice, under two names: the copy that is in use already is found through who uses it, but not
    # on Windows. Another one would build its tables anew, and end the process without our last words.
    running = ctypes.CDLL(llama._lib._name, handle=llama._lib._handle)
    if hasattr(running, "ggml_quantize_chunk"):
        return running
    folder = Path(llama.__file__).parent / "lib"
    names = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll", "libggml-base.dll")
    return ctypes.CDLL(str(next(folder / name for name in names if (folder / name).exists())))


def _give_up(message: bytes) -> None:
    """The library is about to end the process: say so in one line, instead of its backtrace."""
    if not _giving_up.acquire(blocking=False):
        threading.Event().wait()  # several of its threads find the same; the first one speaks and ends them all
    what = " ".join(message.decode("utf-8", "replace").split()).rpartition("/")[2]
    error = UnusableInputError(f"llama.cpp gave up: {what}", "the model's file is damaged, or nothing it can run")
    if last_words:
        last_words[-1](error)
    remove_all()
    sys.stderr.write(f"{error.message} ({error.hint})\n")


_giving_up = threading.Lock()
_abort_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_give_up)
# Looked up through the library that runs: a wheel may hold the one below it twice, under two names.
llama._lib.ggml_set_abort_callback(_abort_callback)


def set_verbose(verbose: bool) -> None:
    """Show the library's log on stderr, or keep it silent (the default)."""
    global _verbose
    _verbose = verbose


@contextmanager
def muted() -> Iterator[None]:
    """Without the log, unless verbose: a call that fails is to be made again for its reason.

    Every line that is logged takes the interpreter's lock, so a call that logs waits for whatever else runs.
    """
    if not _verbose:
        llama.llama_log_set(_ignore, ctypes.c_void_p(0))
    try:
        yield
    finally:
        llama.llama_log_set(log_callback, ctypes.c_void_p(0))


def forget_errors() -> None:
    """Start a new collection of errors, before a call whose failure is to be explained."""
    # Whoever imports the bindings' own package in this process puts its callback in the place of ours.
    llama.llama_log_set(log_callback, ctypes.c_void_p(0))
    clear_errors()


clear_errors = _errors.clear
"""The same where it is done for every token: the call into the library costs 13 microseconds."""


def last_error() -> str:
    """The cause of the latest failure in the library's words, "" if it gave none.

    It is the first error since `forget_errors`: the ones after it only say that the callers failed too.
    """
    if not _errors:
        return ""
    return re.sub(r"^(\w+: )+", "", " ".join(_errors[0].split()))


def version() -> str:
    """The library's own version."""
    return str(llama.llama_version().decode())


def build() -> str:
    """Which compiled library this is, and which of its kernels this machine runs."""
    return f"{version()} {system_info()}"


def system_info(lib: Any = llama) -> str:
    """What a library was built for and found: CPU features, OpenMP, GPU backends."""
    with _telling:  # it writes every answer into the same place
        return str(lib.llama_print_system_info().decode("utf-8", "replace"))


_telling = threading.Lock()


def features() -> frozenset[str]:
    """What the CPU has that the library was built to use, and which of the library's own parts there are."""
    return frozenset(re.findall(r"(\w+) = 1", system_info()))
