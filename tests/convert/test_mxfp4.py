"""MXFP4 checkpoints: the same numbers in ggml's blocks, or as floats; broken ones are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from random_checkpoint import make_checkpoint, read_model

from edgeinfer.api.convert import convert
from edgeinfer.convert.encodings import mxfp4
from edgeinfer.errors import UnusableInputError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions


def _random_blocks(rows: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (rows, 16 * blocks), dtype=np.uint8)
    return packed, rng.integers(0, mxfp4.MAX_SCALE + 1, (rows, blocks), dtype=np.uint8)


def test_the_numbers_are_those_of_the_format() -> None:
    packed, scales = _random_blocks(7, 5)
    found = np.empty((7, 160), np.float32)
    mxfp4.dequantize(packed, scales, found)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row, column in np.ndindex(found.shape):
        nibble = int(packed[row, column // 2]) >> (4 if column % 2 else 0) & 15
        number = magnitudes[nibble & 7] * (-1 if nibble & 8 else 1)
        assert found[row, column] == np.float32(number * 2.0 ** (int(scales[row, column // 32]) - 127))
    assert np.isfinite(found).all()


def test_repacked_blocks_hold_the_same_numbers() -> None:
    packed, scales = _random_blocks(7, 5)
    expected = np.empty((7, 160), np.float32)
    mxfp4.dequantize(packed, scales, expected)
    repacked = mxfp4.repack(packed, scales)
    assert repacked.shape == (7, 17 * 5)
    found = gguf.quants.dequantize(repacked, gguf.GGMLQuantizationType.MXFP4)
    assert found.tobytes() == expected.tobytes()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(read_model("gpt-oss"), "mxfp4", tmp_path)


def _tensor(path: Path, name: str) -> tuple[str, np.ndarray]:
    (info,) = (t for t in read_header(path).tensors if t.name == name)
    return info.type.name, np.fromfile(path, np.uint8, info.nbytes, offset=info.offset)


def _stored(checkpoint: Path, name: str) -> np.ndarray:
    with open(checkpoint / "model.safetensors", "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        entry = json.loads(file.read(length))[name]
        begin, end = entry["data_offsets"]
        return np.fromfile(file, np.uint8, end - begin, offset=begin).reshape(entry["shape"])


def test_experts_stay_as_they_are_or_become_what_was_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    at = "model.layers.1.mlp.experts.gate_up_proj"
    packed, scales = _stored(checkpoint, f"{at}_blocks")[:, 1::2], _stored(checkpoint, f"{at}_scales")[:, 1::2]
    packed, scales = packed.reshape(-1, 128), scales.reshape(-1, 8)
    for name, expected_type in (("MXFP4_MOE", "MXFP4"), ("F32", "F32")):
        convert(checkpoint, tmp_path / name, ConvertOptions(type=name))
        kind, found = _tensor(tmp_path / name, "blk.1.ffn_up_exps.weight")
        assert kind == expected_type
        numbers = np.empty((len(packed), 256), np.float32)
        mxfp4.dequantize(packed, scales, numbers)
        expected = mxfp4.repack(packed, scales) if kind == "MXFP4" else numbers
        assert found.tobytes() == expected.tobytes()


def _write_at(checkpoint: Path, name: str, index: int, value: int) -> None:
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = struct.unpack_from("<Q", data)[0]
    begin = json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    data[8 + length + begin + index] = value
    path.write_bytes(data)


@pytest.mark.parametrize("file_type", ["MXFP4_MOE", "Q8_0"])
@pytest.mark.parametrize("scale", [253, 255])
def test_a_scale_that_is_no_number_is_named(checkpoint: Path, tmp_path: Path, file_type: str, scale: int) -> None:
    name = "model.layers.0.mlp.experts.down_proj_scales"
    _write_at(checkpoint, name, 8 * 300 + 3, scale)
    with pytest.raises(UnusableInputError, match=f"{name} has an infinite scale in row 300"):
        convert(checkpoint, tmp_path / "out.gguf", ConvertOptions(type=file_type))
    assert not list(tmp_path.glob("*.gguf"))
    assert not list(tmp_path.glob(".*partial"))


def _change_header(checkpoint: Path, change: str, name: str) -> None:
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + length])
    if change == "missing":
        header["other"] = header.pop(name)
    elif change == "type":
        header[name]["dtype"] = "I8"
    else:
        header[name]["shape"] = header[name]["shape"][::-1]
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])


@pytest.mark.parametrize("part", ["blocks", "scales"])
@pytest.mark.parametrize("change", ["missing", "type", "shape"])
def test_halves_that_do_not_fit_are_named(checkpoint: Path, part: str, change: str) -> None:
    name = f"model.layers.0.mlp.experts.down_proj_{part}"
    _change_header(checkpoint, change, name)
    # Scales without anything that they could be for are surplus.
    named = name.replace("blocks", "scales") if (change, part) == ("missing", "blocks") else name
    with pytest.raises(UnusableInputError, match=named):
        convert(checkpoint, checkpoint / "out.gguf", ConvertOptions(type="MXFP4_MOE"))


def test_a_quantization_that_is_not_known_is_named(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    config["quantization_config"]["quant_method"] = "hqq"
    (checkpoint / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(UnusableInputError, match="hqq"):
        convert(checkpoint, checkpoint / "out.gguf")
