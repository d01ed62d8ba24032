"""Which file MODEL names, and whether the C library may see it."""

from __future__ import annotations

import re
from pathlib import Path

from edgeinfer.errors import NotFoundError, UnusableInputError
from edgeinfer.gguf_file.header import Header, read_header
from edgeinfer.gguf_file.limits import check_limits

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def resolve(model: str | Path) -> Path:
    """The file that MODEL names: a `.gguf` (a split's first shard) or a directory with one. Raises NotFoundError."""
    path = Path(model)
    if not path.exists():
        raise NotFoundError(f"{path}: no such model", "give a path to a .gguf file, or to a directory with one")
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.gguf"))
    firsts = [f for f in found if not (shard := _SHARD.search(f.name)) or int(shard[1]) == 1]
    if len(firsts) != 1:
        names = ", ".join(f.name for f in firsts) or "none"
        raise NotFoundError(f"{path}: not one .gguf file in this directory ({names})", "name the file")
    return firsts[0]


def checked_header(path: Path) -> Header:
    """The header of a model that the library can be given: sound, with all its shards, ending no process.

    Raises NotFoundError and UnusableInputError.
    """
    header = read_header(path)
    check_limits(header)
    check_shards(header)
    return header


def check_shards(header: Header) -> None:
    """A split model's first file must be given, and all its files must be sound."""
    count = header.metadata.number("split.count", 0)
    if count <= 1:
        return
    path = header.path
    match = _SHARD.search(path.name)
    if match is None or int(match[2]) != count:
        raise UnusableInputError(
            f"{path}: one of {count} shards, but not named like one", f"NAME-00001-of-{count:05}.gguf"
        )
    names = [f"{path.name[: match.start()]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if int(match[1]) != 1:
        raise UnusableInputError(f"{path}: shard {int(match[1])} of {count}", f"give the first shard, {names[0]}")
    for name in names[1:]:
        read_header(path.with_name(name))


def read_text(path: Path) -> str:
    """A UTF-8 text file. Raises NotFoundError and UnusableInputError."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file", "check the path") from None
    except UnicodeDecodeError as error:
        raise UnusableInputError(f"{path}: not UTF-8 text (byte {error.start})", "convert it to UTF-8") from None
    except OSError as error:
        raise UnusableInputError(f"{path}: cannot be read ({error.strerror})", "check the path") from None
