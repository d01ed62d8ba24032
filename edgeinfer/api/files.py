"""Which file MODEL names, and whether the C library may see it."""

from __future__ import annotations

import os
from pathlib import Path

from edgeinfer.errors import NotFoundError, UnusableInputError, UsageError, listed
from edgeinfer.gguf_file.header import Header, read_header
from edgeinfer.gguf_file.limits import check_limits
from edgeinfer.gguf_file.shards import read_shards, shard_parts
from edgeinfer.registry.store import Store, split_quant

_HINT = "give a path to a .gguf file, to a directory with one, or a name that `edgeinfer models list` has"

MAX_TEXT_CHARS = 1 << 30
"""More is no text that anybody measures with: a device that never ends."""


def resolve(model: str | Path, *, fetch: bool = True) -> Path:
    """The file that MODEL names: a path to a `.gguf` (a split's first shard) or to a directory with one, a name or
    alias in the store, or `ORG/NAME[:QUANT]` on the Hub, which is fetched when it is nowhere here, and if `fetch`.

    Raises NotFoundError, UsageError for an empty name, and what `registry.pull.pull` raises.
    """
    if model == "":  # a script's variable that is not set; `Path` would take it for the current directory
        raise UsageError("the name of the model is empty", _HINT)
    path = Path(model)
    if isinstance(model, str) and not os.path.lexists(model) and (named := _named(model, fetch=fetch)) is not None:
        return named
    try:
        if not os.path.exists(path):  # False too for a name that no file can have, where `Path` raises
            raise NotFoundError(f"{path}: no such model", _HINT)
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


def _named(model: str, *, fetch: bool) -> Path | None:
    """A model of the store, of the cache shared with other programs, or of the Hub, in this order."""
    if model.endswith((".gguf", "/")):
        return None
    store = Store()
    if (found := store.find(model)) is not None:
        return found
    hub_id, quant = split_quant(model)
    if hub_id is None:
        return None
    from edgeinfer.registry.pull import in_shared_cache, pull

    found = in_shared_cache(hub_id, quant)
    if found is None and not fetch:
        raise NotFoundError(f"{model}: not on this machine", f"`edgeinfer models pull {model}` fetches it")
    return found or pull(store, hub_id, quant).path


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
