"""Opening a checkpoint: what is there is found; whatever is damaged, missing or a trap is one clear refusal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    change_json,
    llama_config,
    random_tensors,
    write_checkpoint,
    write_json,
    write_raw_safetensors,
    write_safetensors,
    write_shards,
)
from safetensors import safe_open

from edgeinfer.convert.checkpoint import INDEX_NAME, open_checkpoint, read_safetensors_header
from edgeinfer.convert.encodings import decoded
from edgeinfer.convert.tokenizer import load_tokenizer
from edgeinfer.errors import NotFoundError, UnusableInputError


def _refused(path: Path) -> str:
    with pytest.raises(UnusableInputError) as caught:
        open_checkpoint(path)
    return caught.value.message


def test_it_finds_what_the_safetensors_library_finds(checkpoint: Path) -> None:
    found = open_checkpoint(checkpoint).tensors
    raw = (checkpoint / "model.safetensors").read_bytes()
    with safe_open(checkpoint / "model.safetensors", "np") as file:
        assert set(found) == set(file.keys())
        for name, spec in found.items():
            assert list(spec.shape) == file.get_slice(name).get_shape()
    norm = found["model.norm.weight"]
    expected = random_tensors(llama_config())["model.norm.weight"]
    bits = np.frombuffer(raw[norm.offset : norm.offset + norm.nbytes], "<u2").astype(np.uint32) << 16
    np.testing.assert_allclose(bits.view(np.float32), expected, rtol=2**-8)


def test_shards_are_found_by_their_index_and_leftovers_beside_it_do_not_count(checkpoint: Path) -> None:
    tensors = random_tensors(llama_config())
    (checkpoint / "model.safetensors").unlink()
    names = list(tensors)
    write_shards(checkpoint, [{n: tensors[n] for n in names[:5]}, {n: tensors[n] for n in names[5:]}])
    write_safetensors(checkpoint / "leftover.safetensors", {names[0]: tensors[names[0]]})
    found = open_checkpoint(checkpoint).tensors
    assert set(found) == set(names)
    assert {spec.path.name for spec in found.values()} == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}


def test_without_an_index_no_tensor_may_stand_in_two_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "a.safetensors")
    tensors = random_tensors(llama_config())
    twice = {name: tensors[name] for name in ("model.norm.weight", "model.embed_tokens.weight")}
    write_safetensors(checkpoint / "b.safetensors", twice)
    message = _refused(checkpoint)
    assert all(name in message for name in twice)
    assert "a.safetensors and b.safetensors" in message


@pytest.mark.parametrize("name", ["nowhere", "x" * 300, "a\0b", "file/below"])
def test_no_directory_is_not_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError):
        open_checkpoint(tmp_path / name)


def test_a_file_or_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert "not a directory" in _refused(tmp_path / "model.gguf")
    assert "config.json" in _refused(tmp_path)


def test_pickled_weights_are_named_and_not_opened(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / "pytorch_model.bin")  # reading it would hang
    assert "pytorch_model.bin" in _refused(checkpoint)


def test_no_weights_at_all(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "no .safetensors" in _refused(checkpoint)


def test_weights_that_are_quantized_already_are_refused_by_the_method_s_name(checkpoint: Path) -> None:
    change_json(checkpoint / "config.json", {"quantization_config": {"quant_method": "hqq"}})
    with pytest.raises(UnusableInputError, match=r"quantized already \(hqq\)"):
        decoded(open_checkpoint(checkpoint))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"quantization_config": "awq"}, "'awq'"),
        ({"quantization_config": ["hqq"]}, "['hqq']"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": None}}, "unknown method"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
    ],
    ids=str,
)
def test_the_method_is_found_wherever_a_config_states_it(checkpoint: Path, change: dict[str, Any], name: str) -> None:
    change_json(checkpoint / "config.json", change)
    assert open_checkpoint(checkpoint).config.quantization_method == name


def test_a_great_many_names_are_not_all_listed(checkpoint: Path) -> None:
    write_json(checkpoint / INDEX_NAME, {"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(5000)}})
    assert "and 4950 more" in _refused(checkpoint)


def test_a_shard_s_name_that_no_file_can_have(checkpoint: Path) -> None:
    write_json(checkpoint / INDEX_NAME, {"weight_map": {"a": "x" * 300 + ".safetensors"}})
    assert "1 of 1 shards are missing" in _refused(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX_NAME])
@pytest.mark.parametrize("kind", ["directory", "fifo", "endless", "dangling", "loop", "empty"])
def test_what_is_no_ordinary_file_is_refused_at_once(checkpoint: Path, name: str, kind: str) -> None:
    path = checkpoint / name
    path.unlink(missing_ok=True)
    {
        "directory": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "endless": lambda: path.symlink_to("/dev/zero"),
        "dangling": lambda: path.symlink_to("/nowhere/at/all"),
        "loop": lambda: path.symlink_to(name),
        "empty": path.touch,
    }[kind]()
    with pytest.raises((UnusableInputError, NotFoundError)) as caught:
        open_checkpoint(checkpoint)
    assert str(checkpoint) in caught.value.message


BAD_JSON = {
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "cut off": b'{"a": 1',
    "nested deeply": b'{"a":' * 50_000,
    "a bomb of digits": b'{"a": ' + b"1" * 50_000 + b"}",
    "no text": b'{"a": "\xff"}',
    "half a surrogate pair": b'{"a": "\\ud800"}',
    "a key twice": b'{"a": 1, "a": 2}',
}


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME])
@pytest.mark.parametrize("content", BAD_JSON.values(), ids=BAD_JSON)
def test_bad_json_is_refused_by_the_file_s_name(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / name).write_bytes(content)
    assert name in _refused(checkpoint)


def test_a_whole_surrogate_pair_is_text(checkpoint: Path) -> None:
    change_json(checkpoint / "config.json", {"comment": "🚀"})
    assert b"\\ud83d" in (checkpoint / "config.json").read_bytes()
    assert open_checkpoint(checkpoint).config.get("comment") == "🚀"


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": None}, {"a": ["x"]}])
def test_an_index_without_a_map_of_names(checkpoint: Path, weight_map: Any) -> None:
    write_json(checkpoint / INDEX_NAME, {"weight_map": weight_map})
    assert INDEX_NAME in _refused(checkpoint)


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", "config.json"]
)
def test_an_index_cannot_lead_out_of_the_directory(checkpoint: Path, shard: str) -> None:
    write_json(checkpoint / INDEX_NAME, {"weight_map": {"a": shard}})
    assert "not a .safetensors file beside it" in _refused(checkpoint)


def test_all_missing_shards_and_all_stale_entries_are_named(checkpoint: Path) -> None:
    write_json(checkpoint / INDEX_NAME, {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    message = _refused(checkpoint)
    assert "one.safetensors" in message
    assert "two.safetensors" in message
    write_json(checkpoint / INDEX_NAME, {"weight_map": dict.fromkeys(("ghost.a", "ghost.b"), "model.safetensors")})
    message = _refused(checkpoint)
    assert "ghost.a" in message
    assert "ghost.b" in message


def _entry(shape: Any = (2,), begin: Any = 0, end: Any = 4, dtype: Any = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DAMAGED: dict[str, Callable[[Path], Any]] = {
    "shorter than its length field": lambda p: p.write_bytes(b"\0\0\0"),
    "a header longer than the file": lambda p: write_raw_safetensors(p, {}, b"", length=1000),
    "a header of 2^63 bytes": lambda p: write_raw_safetensors(p, {}, b"", length=2**63),
    "a header that is no JSON": lambda p: write_raw_safetensors(p, b"hello world", b""),
    "a header that is a list": lambda p: write_raw_safetensors(p, b"[]", b""),
    "the same tensor twice": lambda p: write_raw_safetensors(
        p, b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"a":{}}', bytes(2)
    ),
    "an entry that is null": lambda p: write_raw_safetensors(p, {"a": None}, b""),
    "an entry without offsets": lambda p: write_raw_safetensors(p, {"a": {"dtype": "F32", "shape": []}}, b""),
    "three offsets": lambda p: write_raw_safetensors(p, {"a": {**_entry(), "data_offsets": [0, 2, 4]}}, bytes(4)),
    "an unknown dtype": lambda p: write_raw_safetensors(p, {"a": _entry(dtype="F7")}, bytes(4)),
    "a dtype that is a list": lambda p: write_raw_safetensors(p, {"a": _entry(dtype=[])}, bytes(4)),
    "a negative shape": lambda p: write_raw_safetensors(p, {"a": _entry((-2,))}, bytes(4)),
    "a shape of text": lambda p: write_raw_safetensors(p, {"a": _entry("22")}, bytes(4)),
    "a shape of truth": lambda p: write_raw_safetensors(p, {"a": _entry([True, 2])}, bytes(4)),
    "a shape too large for its bytes": lambda p: write_raw_safetensors(p, {"a": _entry([2**40, 2**40])}, bytes(4)),
    "a fractional offset": lambda p: write_raw_safetensors(p, {"a": _entry(end=4.0)}, bytes(4)),
    "offsets backwards": lambda p: write_raw_safetensors(p, {"a": _entry(begin=4, end=0)}, bytes(4)),
    "data that is cut off": lambda p: write_raw_safetensors(p, {"a": _entry()}, bytes(3)),
    "data after the last tensor": lambda p: write_raw_safetensors(p, {"a": _entry()}, bytes(5)),
    "overlapping tensors": lambda p: write_raw_safetensors(p, {"a": _entry(), "b": _entry(begin=2, end=6)}, bytes(6)),
    "a gap": lambda p: write_raw_safetensors(p, {"a": _entry(), "b": _entry(begin=6, end=10)}, bytes(10)),
    "an overlap as long as a gap": lambda p: write_raw_safetensors(
        p, {"a": _entry(), "b": _entry(begin=2, end=6), "c": _entry([1], 8, 10)}, bytes(10)
    ),
    "two tensors in one place": lambda p: write_raw_safetensors(p, {"a": _entry(), "b": _entry()}, bytes(4)),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_or_lying_safetensors_file_is_refused(checkpoint: Path, damage: Callable[[Path], Any]) -> None:
    damage(checkpoint / "model.safetensors")
    message = _refused(checkpoint)
    assert "model.safetensors" in message
    assert len(message) < 400


def test_a_header_larger_than_the_library_s_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    with open(path, "wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # sparse
    with pytest.raises(UnusableInputError, match="claims 200000000 bytes"):
        read_safetensors_header(path)


def test_empty_tensors_take_no_place(tmp_path: Path) -> None:
    header = {"a": _entry([0, 7], 0, 0), "b": _entry(), "c": _entry([], 4, 6)}
    specs = read_safetensors_header(write_raw_safetensors(tmp_path / "x.safetensors", header, bytes(6)))
    assert {name: (spec.shape, spec.nbytes) for name, spec in specs.items()} == {
        "a": ((0, 7), 0),
        "b": ((2,), 4),
        "c": ((), 2),
    }


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_a_truncated_download(checkpoint: Path, cut: int) -> None:
    path = checkpoint / "model.safetensors"
    os.truncate(path, path.stat().st_size - cut)
    assert "model.safetensors" in _refused(checkpoint)


def test_a_damaged_byte_of_a_header_is_refused_or_harmless(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    sound = bytearray(path.read_bytes()[:2000])
    rest = path.read_bytes()[2000:]
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        damaged = sound.copy()
        damaged[int(rng.integers(len(damaged)))] = int(rng.integers(256))
        path.write_bytes(bytes(damaged) + rest)
        try:
            read_safetensors_header(path)
        except UnusableInputError:
            refused += 1
    assert refused > 100


def test_the_config_is_plain_json(checkpoint: Path) -> None:
    """Remote code is neither run nor looked for."""
    change_json(checkpoint / "config.json", {"auto_map": {"AutoConfig": "evil.Config"}})
    (checkpoint / "evil.py").write_text("raise SystemExit('ran')")
    assert open_checkpoint(checkpoint).config.hf_class == "LlamaForCausalLM"
    assert json.loads((checkpoint / "config.json").read_text())["auto_map"]


def test_a_directory_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = write_checkpoint(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
    assert load_tokenizer(open_checkpoint(folder)).metadata["tokenizer.ggml.tokens"]
