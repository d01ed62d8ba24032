"""Which file MODEL names, and whether the C library may see it."""

from __future__ import annotations

import os
from pathlib import Path

from edgeinfer.errors import NotFoundError, UnusableInputError, UsageError, listed
from edgeinfer.gguf_file.header import Header, read_header
from edgeinfer.gguf_file.limits import check_limits
from edgeinfer.gguf_file.shards import read_shards, shard_parts
from edgeinfer.registry.hub_id import parse_id

_HINT = "give a path to a .gguf file, or to a directory with one"
_HUB_HINT = "; of a checkpoint on the Hub, `edgeinfer convert ORG/NAME` makes one"

MAX_TEXT_CHARS = 1 << 30
"""More is no text that anybody measures with: a device that never ends."""


def resolve(model: str | Path) -> Path:
    """The file that MODEL names: a `.gguf` (a split's first shard) or a directory with one.

    Raises NotFoundError, and UsageError for an empty name.
    """
    if model == "":  # a script's variable that is not set; `Path` would take it for the current directory
        raise UsageError("the name of the model is empty", _HINT)
    path = Path(model)
    try:
        if not os.path.exists(path):  # False too for a name that no file can have, where `Path` raises
            raise NotFoundError(f"{path}: no such model", _HINT + (_HUB_HINT if _is_on_hub(str(model)) else ""))
        if not path.is_dir():
            return path
        found = sorted(path.glob("*.gguf"))
    except OSError as error:  # a name that is too long, a directory that may not be read
        raise NotFoundError(f"{path}: cannot be looked at ({error.strerror})", "check the path") from None
    firsts = [f for f in found if not (shard := shard_parts(f.name)) or shard[1] == 1]
    if len(firsts) == 1:
        return firsts[0]
    if firsts:
        names = listed([f.name for f in firsts])
        raise NotFoundError(f"{path}: more than one .gguf file in this directory ({names})", "name the file")
    if os.path.lexists(path / "config.json"):
        raise NotFoundError(f"{path}: a checkpoint, not a .gguf file", "`edgeinfer convert` makes one of it")
    raise NotFoundError(f"{path}: no .gguf file in this directory", _HINT)


def _is_on_hub(model: str) -> bool:
    """Whether it looks like `ORG/NAME`, or `ORG/NAME:QUANT` as other programs have it."""
    return not model.endswith(".gguf") and parse_id(model.partition(":")[0]) is not None


def checked_header(path: Path) -> Header:
    """The header of a model that the library can be given: sound, with all its shards, ending no process.

    Raises NotFoundError and UnusableInputError.
    """
    header = read_header(path)
    read_shards(header)
    check_limits(header)
    return header


def read_text(path: Path) -> str:
    """A UTF-8 text file. Raises NotFoundError and UnusableInputError."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_TEXT_CHARS + 1)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file", "check the path") from None
    except UnicodeDecodeError as error:
        raise UnusableInputError(f"{path}: not UTF-8 text (byte {error.start})", "convert it to UTF-8") from None
    except OSError as error:
        raise UnusableInputError(f"{path}: cannot be read ({error.strerror})", "check the path") from None
    if len(text) > MAX_TEXT_CHARS:
        raise UnusableInputError(f"{path}: longer than {MAX_TEXT_CHARS} characters", "give a part of it")
    return text
