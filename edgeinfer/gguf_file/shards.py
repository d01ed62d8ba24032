"""The files that a split GGUF model consists of (src/llama-model-loader.cpp, tools/gguf-split)."""

from __future__ import annotations

import re
from pathlib import Path

from edgeinfer.errors import NotFoundError, UnusableInputError, listed
from edgeinfer.gguf_file.header import Header, read_header

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MAX_SHARDS = 65535  # split.count is a 16-bit number


def shard_name(prefix: str, number: int, count: int) -> str:
    """The name of shard `number`, counted from 1."""
    return f"{prefix}-{number:05}-of-{count:05}.gguf"


def shard_parts(name: str) -> tuple[str, int, int] | None:
    """Prefix, number and count in a shard's file name; None for any other name."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2]), int(match[3])) if match else None


def read_shards(first: Header) -> tuple[Header, ...]:
    """The headers of a model's files, `first` and those that its `split.count` asks for, checked to belong together.

    Raises NotFoundError that names every missing file; UnusableInputError when `first` is not the first shard, or when
    a file is damaged or of another model.
    """
    count = first.metadata.count("split.count")
    if count <= 1:
        return (first,)
    path, parts = first.path, shard_parts(first.path.name)
    if parts is None or parts[2] != count:
        raise UnusableInputError(
            f"{path}: one of {count} shards, but not named like one", f"NAME-00001-of-{count:05}.gguf"
        )
    prefix, number, _ = parts
    paths = [path.with_name(shard_name(prefix, i, count)) for i in range(1, count + 1)]
    if number != 1:
        raise UnusableInputError(f"{path}: shard {number} of {count}", f"give the first shard, {paths[0].name}")
    missing = [p.name for p in paths[1:] if not p.exists()]
    if missing:
        raise NotFoundError(
            f"{path}: {len(missing)} of {count} shards are missing: {listed(missing)}", "put them beside it"
        )
    headers = (first, *map(read_header, paths[1:]))
    _check_together(headers)
    return headers


def _check_together(headers: tuple[Header, ...]) -> None:
    first, seen = headers[0], set[str]()
    for number, header in enumerate(headers):
        stated = header.metadata.count("split.no", -1)
        if stated != number:
            raise _of_another_model(header.path, f"says that it is shard {stated + 1}, its name {number + 1}")
        twice = [t.name for t in header.tensors if t.name in seen]
        if twice:
            raise _of_another_model(header.path, f"{len(twice)} tensors stand in an earlier shard too: {listed(twice)}")
        seen.update(t.name for t in header.tensors)
    stated = first.metadata.count("split.tensors.count", len(seen))
    if stated != len(seen):
        raise _of_another_model(first.path, f"the shards have {len(seen)} tensors, {stated} are announced")


def _of_another_model(path: Path, what: str) -> UnusableInputError:
    return UnusableInputError(f"{path}: {what}", "the shards are not of one model: download all of them again")
