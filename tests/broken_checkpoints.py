"""Checkpoints that are damaged, lie or are meant to do harm: each a named change of a sound directory."""

# Tables of cases read better as they stand.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from checkpoints import change_json

Break = Callable[[Path], None]
"""Makes a sound checkpoint directory a broken one."""
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DEEP = "[" * 100_000
_SLOW_REGEX = "(.*)*(.*)*(.*)*(.*)*Q"


def _content(name: str, data: bytes) -> Break:
    return lambda folder: _replace(folder / name, data)


def _replace(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def _config(**changes: Any) -> Break:
    return lambda folder: change_json(folder / "config.json", changes)


def _tokenizer(change: Callable[[dict[str, Any]], Any]) -> Break:
    def apply(folder: Path) -> None:
        path = folder / "tokenizer.json"
        document = json.loads(path.read_text("utf-8"))
        change(document)
        path.write_text(json.dumps(document), "utf-8")

    return apply


def breaks() -> Iterator[tuple[str, Break]]:
    """Every way to break a checkpoint."""
    yield from _configs()
    yield from _files()
    yield from _weights()
    yield from _indexes()
    yield from _tokenizers()
    yield from _settings()


def _configs() -> Iterator[tuple[str, Break]]:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    others = ("head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta")
    values = (0, -1, 3, 2**31 - 1, 10**400, "x", [], {}, True, 1.5, float("nan"), float("inf"), 1e300)
    for key, value in product((*sizes, *others), values):
        yield f"config {key} = {str(value)[:20]}", _config(**{key: value})
    for key in (*sizes, *others, "architectures", "model_type", "tie_word_embeddings"):
        yield f"config without {key}", _config_without(key)
    ropes = (
        {"type": "x"}, {"type": {}}, {"rope_type": "yarn"}, {"rope_type": "llama3", "factor": 0},
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4, "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": -1}, {"rope_type": "linear", "factor": float("nan")}, {"rope_type": "longrope", "long_factor": [0] * 9, "short_factor": "x"},
    )
    for rope in ropes:
        yield f"rope {rope}", _config(rope_scaling=rope)
    for key, value in product(("architectures", "quantization_config", "hidden_act", "torch_dtype", "eos_token_id", "_name_or_path", "text_config", "layer_types"), (0, -1, "x", [], {}, [None], [[]], True, 10**30, "\x1b[31m", "../../x")):
        yield f"config {key} = {value!r}"[:60], _config(**{key: value})


def _config_without(key: str) -> Break:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        document = json.loads(path.read_text("utf-8"))
        document.pop(key, None)
        path.write_text(json.dumps(document), "utf-8")

    return apply


def _files() -> Iterator[tuple[str, Break]]:
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", _INDEX, _WEIGHTS, "README.md", "chat_template.jinja")
    contents = (b"", b"null", b"[]", b"{}", b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"a":1,"a":2}', b"1" * 5000, _DEEP.encode(), b'{"a":' * 900 + b"1" + b"}" * 900, b"\0" * 100, b'{"a": "\\ud800"}', b'{"a":NaN}')
    for name in names:
        yield f"{name}: missing", lambda folder, name=name: (folder / name).unlink(missing_ok=True)
        yield f"{name}: a directory", lambda folder, name=name: _in_place_of(folder / name, lambda path: path.mkdir())
        yield f"{name}: a pipe", lambda folder, name=name: _in_place_of(folder / name, os.mkfifo)
        yield f"{name}: endless", lambda folder, name=name: _in_place_of(folder / name, lambda path: path.symlink_to("/dev/zero"))
        yield f"{name}: leads nowhere", lambda folder, name=name: _in_place_of(folder / name, lambda path: path.symlink_to("nowhere"))
        yield f"{name}: leads to itself", lambda folder, name=name: _in_place_of(folder / name, lambda path: path.symlink_to(path.name))
        for content in contents:
            yield f"{name}: {content[:12]!r}", _content(name, content)
    for name, yaml in _YAML.items():
        yield f"README.md: {name}", _content("README.md", yaml.encode())


def _in_place_of(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink(missing_ok=True)
    make(path)


_YAML = {
    "aliases of aliases": "---\na0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)) + "tags: *a11\nlicense: *a11\n---\n",
    "a list of itself": "---\ntags: &a [*a]\n---\n",
    "code": "---\nlicense: !!python/object/apply:os.system ['true']\n---\n",
    "deep": "---\na: " + _DEEP + "\n---\n",
    "escape codes": '---\nlicense: "\\e[31m"\n---\n',
}


def _weights() -> Iterator[tuple[str, Break]]:
    def header(change: Callable[[dict[str, Any]], Any]) -> Break:
        def apply(folder: Path) -> None:
            path = folder / _WEIGHTS
            raw = path.read_bytes()
            (length,) = struct.unpack_from("<Q", raw)
            document = json.loads(raw[8 : 8 + length])
            change(document)
            new = json.dumps(document).encode()
            path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])

        return apply

    def cut(part: float) -> Break:
        def apply(folder: Path) -> None:
            raw = (folder / _WEIGHTS).read_bytes()
            (folder / _WEIGHTS).write_bytes(raw[: int(len(raw) * part)])

        return apply

    def patch(at: int, data: bytes) -> Break:
        def apply(folder: Path) -> None:
            raw = bytearray((folder / _WEIGHTS).read_bytes())
            raw[at : at + len(data)] = data
            (folder / _WEIGHTS).write_bytes(raw)

        return apply

    for part in (0.0001, 0.01, 0.5, 0.999):
        yield f"weights cut at {part}", cut(part)
    for length in (0, 1, 2**31, 2**63, 2**64 - 1):
        yield f"weights' header of {length} bytes", patch(0, struct.pack("<Q", length))
    yield "weights: header of noise", patch(8, bytes(range(256)))
    yield "weights of NaN", lambda folder: patch((folder / _WEIGHTS).stat().st_size - 4000, b"\xff" * 4000)(folder)
    first = "model.embed_tokens.weight"
    entries = {
        "no dtype": {"shape": [1], "data_offsets": [0, 2]}, "a strange dtype": {"dtype": "X9"}, "another dtype": {"dtype": "F64"}, "a dtype that is none": {"dtype": 5},
        "a negative shape": {"shape": [-1, 64]}, "a huge shape": {"shape": [2**62, 2**62]}, "a shape of text": {"shape": "xx"}, "a shape of fractions": {"shape": [1.5, 2]},
        "a deep shape": {"shape": [1] * 5000}, "no shape": {"shape": []}, "an empty shape": {"shape": [0, 64]}, "offsets in reverse": {"data_offsets": [4, 0]},
        "huge offsets": {"data_offsets": [0, 2**63]}, "one offset": {"data_offsets": [0]}, "negative offsets": {"data_offsets": [-2, 0]}, "transposed": {"shape": [64, 320]},
    }
    for name, entry in entries.items():
        yield f"weights: {name}", header(lambda document, entry=entry: document[first].update(entry))
    yield "weights: a tensor missing", header(lambda document: document.pop("model.norm.weight"))
    yield "weights: an entry that is a list", header(lambda document: document.update({first: [1]}))
    yield "weights: a strange name", header(lambda document: document.update({"\x1b[2J\n": document.pop("model.norm.weight")}))
    yield "weights: overlapping", header(lambda document: document.update({"model.norm.weight": document["model.layers.0.input_layernorm.weight"]}))
    yield "weights: metadata of numbers", header(lambda document: document.update({"__metadata__": 5}))


def _indexes() -> Iterator[tuple[str, Break]]:
    def index(weight_map: Any) -> Break:
        return lambda folder: (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map}), "utf-8") and None

    maps = {
        "of a missing shard": {"a": "no.safetensors"}, "of a stale tensor": {"gone": _WEIGHTS}, "outside": {"a": "../model.safetensors"}, "absolute": {"a": "/etc/passwd"},
        "of pickles": {"a": "x.bin"}, "empty": {}, "a list": [], "of numbers": {"a": 1}, "of nothing": {"a": ""}, "of a directory": {"a": "."}, "with NUL": {"a": "x\0.safetensors"},
        "of a part": {"model.norm.weight": _WEIGHTS}, "long": {f"t{i}": f"s{i}.safetensors" for i in range(20_000)}, "of a long name": {"a": "x" * 5000 + ".safetensors"},
    }
    for name, weight_map in maps.items():
        yield f"index {name}", index(weight_map)


def _tokenizers() -> Iterator[tuple[str, Break]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = {
        "negative id": {"id": -1}, "huge id": {"id": 2**32 - 1}, "larger id": {"id": 10**9}, "id of text": {"id": "1"}, "id of a fraction": {"id": 1.5}, "an id twice": {"id": 1},
        "empty": {"content": ""}, "long": {"content": "x" * 100_000}, "NUL": {"content": "a\0b"}, "number": {"content": 5}, "of nothing": {"content": None}, "surrogate": {"content": "\ud800"},
    }
    for name, entry in added.items():
        yield f"added token: {name}", _tokenizer(lambda t, entry=entry: t["added_tokens"].append({"id": 319, "content": "<zz>", **flags, **entry}))
    models: dict[str, Callable[[dict[str, Any]], Any]] = {
        "negative": lambda m: m["vocab"].update(a=-1), "twice": lambda m: m["vocab"].update(zzz=5), "huge": lambda m: m["vocab"].update(zzz=10**9), "text": lambda m: m["vocab"].update(zzz="5"),
        "fraction": lambda m: m["vocab"].update(zzz=5.0), "flag": lambda m: m["vocab"].update(zzz=True), "empty": lambda m: m.update(vocab={}), "list": lambda m: m.update(vocab=[]),
        "few": lambda m: m.update(vocab={"a": 0, "b": 1, "ab": 2}, merges=["a b"]), "no merges": lambda m: m.update(merges=None), "empty merges": lambda m: m.update(merges=[]),
        "odd merge": lambda m: m.update(merges=["a"]), "merge of three": lambda m: m.update(merges=[["a", "b", "c"]]), "merge of unknown": lambda m: m.update(merges=["qq zz"]),
        "merge of numbers": lambda m: m.update(merges=[[1, 2]]), "merges of both kinds": lambda m: m.update(merges=["e r", ["e", "r"]]), "WordPiece": lambda m: m.update(type="WordPiece"),
        "Unigram": lambda m: m.update(type="Unigram"), "unigram of text": lambda m: m.update(type="Unigram", vocab=[["a", "x"]]), "no type": lambda m: m.pop("type"),
        "dropout": lambda m: m.update(dropout=0.5), "dropout of 5": lambda m: m.update(dropout=5), "unknown token": lambda m: m.update(unk_token="zzz"), "fallback of text": lambda m: m.update(byte_fallback="x"),
    }
    for name, change in models.items():
        yield f"tokenizer's model: {name}", _tokenizer(lambda t, change=change: change(t["model"]))
    sections: dict[str, dict[str, Any]] = {
        "none": {"model": None}, "a list of them": {"model": []}, "added of text": {"added_tokens": "x"}, "added none": {"added_tokens": None}, "added objects": {"added_tokens": {}},
        "pre none": {"pre_tokenizer": None}, "pre list": {"pre_tokenizer": []}, "pre unknown": {"pre_tokenizer": {"type": "X"}}, "pre empty": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
        "pre bad regex": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}},
        "pre slow regex": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": _SLOW_REGEX}, "behavior": "Isolated", "invert": False}},
        "deep": {"normalizer": _nested(200)}, "slow regex": {"normalizer": {"type": "Replace", "pattern": {"Regex": _SLOW_REGEX}, "content": "x"}},
        "growth": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee" * 1000}] * 4}},
        "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}}, "charsmap of noise": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "//8A" * 100}},
        "charsmap of text": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}}, "charsmap none": {"normalizer": {"type": "Precompiled"}},
        "post empty": {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}}, "post of text": {"post_processor": {"type": "Sequence", "processors": "x"}},
        "post of unknown": {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "zz", "type_id": 0}}], "pair": [], "special_tokens": {}}},
        "padding": {"padding": {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}},
        "truncation": {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}},
        "decoder of noise": {"decoder": {"type": "Replace", "pattern": {"Regex": _SLOW_REGEX}, "content": ""}}, "no decoder": {"decoder": None}, "strip": {"decoder": {"type": "Strip", "content": "x", "start": 2**63, "stop": 2**63}},
    }
    for name, section in sections.items():
        yield f"tokenizer: {name}", _tokenizer(lambda t, section=section: t.update(section))


def _nested(levels: int) -> Any:
    section: Any = {"type": "Sequence", "normalizers": []}
    for _ in range(levels):
        section = {"type": "Sequence", "normalizers": [section]}
    return section


def _settings() -> Iterator[tuple[str, Break]]:
    odd: dict[str, tuple[Any, ...]] = {
        "chat_template": ({"a": 1}, [1, 2], [{"name": "default", "template": 5}], [{"name": "x" * 70_000, "template": "t"}], [{"name": "a\nb", "template": "t"}], "x" * (5 << 20)),
        "bos_token": ([], {"content": []}, 5, "nope"), "add_bos_token": ("x", 1), "add_prefix_space": (5,), "eos_token": ("nope", {}),
    }
    for key, values in odd.items():
        for number, value in enumerate(values):
            yield f"settings {key} {number}", lambda folder, key=key, value=value: change_json(folder / "tokenizer_config.json", {key: value})
    for key, number in product(("top_k", "top_p", "temperature", "repetition_penalty", "eos_token_id"), (-1, 10**30, float("nan"), float("inf"), True, "x", [[]], {})):
        yield f"generation {key} = {number}", lambda folder, key=key, number=number: _replace(folder / "generation_config.json", json.dumps({key: number}).encode())
