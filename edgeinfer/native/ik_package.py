"""Which package of ik_llama.cpp is installed, and whether it is the one that is known here. Loads nothing of it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

NAME = "ik"
"""What `--kernels` and the envelopes call its kernels."""
PACKAGE = "ik_llama_cpp"
DISTRIBUTION, VERSION = "ik-llama-cpp-python", "0.1.5"
REQUIREMENT = f"{DISTRIBUTION}=={VERSION}"
"""What pip installs it by."""
_LIBRARY_VARIABLE = "IK_LLAMA_CPP_LIB_PATH"
"""Names another file than the package's own, if it is set; what that one needs is taken to lie beside it."""


def folder() -> Path | None:
    """The directory of the package; None without it. A module of the user's can have its name, and is none."""
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def is_installed() -> bool:
    """Whether there is a second library to choose."""
    return folder() is not None


def version() -> str:
    """The package's own version, "" for one that does not tell."""
    from importlib import metadata  # here, because every start imports this module

    try:
        # Of metadata that is damaged it is None, against its declaration.
        return metadata.version(DISTRIBUTION) or ""
    except (metadata.PackageNotFoundError, UnicodeDecodeError):
        return ""


def problem() -> str:
    """Why the package is not used, as far as that can be told without loading it; "" for the version known here."""
    found = version()
    return "" if found == VERSION else f"{DISTRIBUTION} is version {found or 'unknown'}, not {VERSION}"


def library_folders() -> tuple[Path, ...]:
    """Where the compiled files are: the library's own first, then those that it needs; none without the package."""
    package = folder()
    if package is None:
        return ()
    if chosen := os.environ.get(_LIBRARY_VARIABLE):
        return (Path(chosen).absolute().parent,)
    return package / "lib", package.with_name(f"{PACKAGE}_python.libs")


def identity() -> str:
    """Which files the library is made of, by name, size and time. Loads nothing."""
    package = folder()
    if package is None:
        return ""
    files = [file for place in (package, *library_folders()) for file in sorted(place.glob("*"))]
    try:
        found = [(file.name, file.stat()) for file in files if file.is_file()]
    except OSError:  # replaced at this moment
        return ""
    return f"{version()} {[(name, status.st_size, status.st_mtime_ns) for name, status in found]}"
