"""How an encoder's outputs become one embedding, as sentence-transformers states it beside the checkpoint."""

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


def pooling_metadata(config: Config) -> dict[str, Any]:
    """The key of the pooling; nothing when the checkpoint states none.

    Raises UnusableInputError for a pooling, or a module after it, that llama.cpp does not have.
    """
    path = config.path.with_name("modules.json")
    try:
        data = read_file(path, MAX_JSON_NBYTES)
    except NotFoundError:
        return {}
    modules = parse_object(b'{"modules":%s}' % data, str(path))["modules"]
    found: dict[str, Any] = {}
    for module in modules if isinstance(modules, list) else []:
        match module:
            case {"type": str(kind), "path": str(folder)} if kind.endswith(".Pooling"):
                found = {"pooling_type": _pooling_type(path.parent / _plain_name(path, folder) / "config.json")}
            case {"type": str(kind)} if kind.endswith((".Transformer", ".Normalize")):
                pass
            case _:
                raise UnusableInputError(
                    f"{path}: unknown module {reprlib.repr(module)}", "known are Transformer, Pooling and Normalize"
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
