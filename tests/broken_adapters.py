"""PEFT adapters that are damaged, lie or are meant to do harm: each a named change of a sound directory."""

# Tables of cases read better as they stand.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from checkpoints import change_json

Break = Callable[[Path], None]
"""Makes a sound adapter directory a broken one."""
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ODD: dict[str, Any] = {
    "null": None, "0": 0, "-1": -1, "1": 1, "huge": 2**70, "a fraction": 4.5, "1e308": 1e308, "true": True, "text": "x", "a list": [1], "an object": {"a": 1},
}


def breaks() -> Iterator[tuple[str, Break]]:
    """Every way to break an adapter."""
    for key, (label, value) in product(("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "peft_type", "init_lora_weights", "base_model_name_or_path", "bias"), _ODD.items()):
        yield f"{key} {label}", _config(**{key: value})
    for label, pattern in {"slow": "(.*)*(.*)*Q", "many": ".*.*.*.*.*Q", "deep": "(" * 5000, "optional": "x?" * 60 + "x" * 60, "bad": "[", "empty": "", "recursive": "(?R)"}.items():
        yield f"rank_pattern {label}", _config(rank_pattern={pattern: 4})
    yield "rank_pattern of many expressions", _config(rank_pattern={rf"\w+{i}.*Q": 4 for i in range(30_000)})
    yield "rank_pattern of objects", _config(rank_pattern={"q_proj": {"a": 1}})
    for label, base in {"empty": "", "a zero": "a\0b", "a device": "/dev/zero", "a file": "/etc/passwd", "long": "x" * 100_000, "an address": "https://localhost/x", "lines": "a\nb", "here": "."}.items():
        yield f"base {label}", _config(base_model_name_or_path=base)
    for label, data in {"empty": b"", "null": b"null", "deep": b"[" * 100_000, "not UTF-8": b"\xff\xfe", "a list": b"[]", "twice": b'{"r": 1, "r": 2}'}.items():
        yield f"config {label}", _content(_CONFIG, data)
        yield f"weights {label}", _content(_WEIGHTS, data)
    yield "config missing", lambda folder: (folder / _CONFIG).unlink()
    yield "weights missing", lambda folder: (folder / _WEIGHTS).unlink()
    yield "weights a directory", lambda folder: ((folder / _WEIGHTS).unlink(), (folder / _WEIGHTS).mkdir())[0]
    yield "weights cut", lambda folder: _content(_WEIGHTS, (folder / _WEIGHTS).read_bytes()[:-100])(folder)
    yield from _headers()


def _headers() -> Iterator[tuple[str, Break]]:
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for label, shape in {"flat": [256], "3-D": [4, 64, 1], "turned": [64, 4], "of rank 0": [0, 64], "negative": [-4, -64], "huge": [2**40, 2**40]}.items():
        yield f"shape {label}", _entry(first, shape=shape)
    for dtype in ("F64", "I32", "U8", "BOOL", "F8_E4M3", "X", "BF16"):
        yield f"type {dtype}", _entry(first, dtype=dtype)
    for label, name in {"empty": "", "long": "x" * 200_000, "long path": f"base_model.model.{'a.' * 50_000}lora_A.weight", "lines": "base_model.model.a\nb.lora_A.weight", "escapes": "base_model.model.\x1b[2J.lora_A.weight", "no module": "base_model.model..lora_A.weight", "base layer": "base_model.model.model.embed_tokens.base_layer.weight", "an unknown layer": "base_model.model.model.layers.99.mlp.up_proj.lora_A.weight"}.items():
        yield f"name {label}", _renamed(first, name)


def _content(name: str, data: bytes) -> Break:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return apply


def _config(**changes: Any) -> Break:
    return lambda folder: change_json(folder / _CONFIG, changes)


def _header(change: Callable[[dict[str, Any]], None]) -> Break:
    def apply(folder: Path) -> None:
        raw = (folder / _WEIGHTS).read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8 : 8 + length])
        change(header)
        encoded = json.dumps(header).encode()
        (folder / _WEIGHTS).write_bytes(struct.pack("<Q", len(encoded)) + encoded + raw[8 + length :])

    return apply


def _entry(name: str, **changes: Any) -> Break:
    return _header(lambda header: header[name].update(changes))


def _renamed(name: str, new: str) -> Break:
    return _header(lambda header: header.update({new: header.pop(name)}))
