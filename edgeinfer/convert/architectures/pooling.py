"""What comes after the model when texts become vectors or scores, as sentence-transformers states it beside it."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from edgeinfer.convert.config import Config
from edgeinfer.convert.json_file import MAX_JSON_NBYTES, parse_object, read_file, read_object
from edgeinfer.errors import NotFoundError, UnusableInputError

# llama.cpp's numbers (include/llama.h, llama_pooling_type) by sentence-transformers' names, of old and new files.
_KINDS = {
    "pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2, "pooling_mode_lasttoken": 3,
    "mean": 1, "cls": 2, "lasttoken": 3,
}  # fmt: skip


def pooling_metadata(config: Config, *others: str) -> dict[str, Any]:
    """The key of the pooling; nothing when the checkpoint states none.

    Raises UnusableInputError for a pooling, or a module that is none of `others`, that llama.cpp does not have.
    """
    found = [_pooling_type(folder / "config.json") for kind, folder in modules(config, *others) if kind == "Pooling"]
    return {"pooling_type": found[-1]} if found else {}


def modules(config: Config, *others: str) -> list[tuple[str, Path]]:
    """Kind and directory of the modules after the model, in order, without those that norm; none where none is stated.

    Raises UnusableInputError for one that is neither a Pooling nor one of `others`.
    """
    path = config.path.with_name("modules.json")
    try:
        data = read_file(path, MAX_JSON_NBYTES)
    except NotFoundError:
        return []
    listed = parse_object(b'{"modules":%s}' % data, str(path))["modules"]
    found: list[tuple[str, Path]] = []
    for module in listed if isinstance(listed, list) else []:
        match module:
            case {"type": str(kind), "path": str(folder)} if (name := kind.rpartition(".")[2]) in ("Pooling", *others):
                found.append((name, path.parent / _plain_name(path, folder)))
            case {"type": str(kind)} if kind.endswith((".Transformer", ".Normalize")):
                pass
            case _:
                known = ", ".join(("Transformer", "Pooling", *others))
                raise UnusableInputError(
                    f"{path}: unknown module {reprlib.repr(module)}", f"known are {known} and Normalize"
                )
    return found


def _plain_name(path: Path, folder: str) -> str:
    """The name of a module's directory, which lies beside `path`. Raises UnusableInputError for none."""
    name = Path(folder).name
    if name in ("", "..") or "\0" in name:
        raise UnusableInputError(f"{path}: a module in {reprlib.repr(folder)}", "download the file again")
    return name


def _pooling_type(path: Path) -> int:
    stated = read_object(path)
    modes = [key for key, value in stated.items() if key.startswith("pooling_mode_") and value is True]
    modes = modes or [str(stated.get("pooling_mode"))]
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise UnusableInputError(f"{path}: unknown pooling {' + '.join(modes)}", "known are mean, cls and last token")
    return _KINDS[modes[0]]
