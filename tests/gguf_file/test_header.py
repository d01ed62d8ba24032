"""Headers: read as gguf-py reads them, and nothing but UnusableInputError whatever the damage."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from ggufs import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.errors import NotFoundError, UnusableInputError
from edgeinfer.gguf_file.describe import describe
from edgeinfer.gguf_file.header import Header, ValueType, read_header
from edgeinfer.gguf_file.limits import check_limits


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "a.gguf").read_bytes()


def _read_all(path: Path) -> Header:
    """Everything that a caller may do with a header before the C library sees the file."""
    header = read_header(path)
    for key in header.metadata:
        header.metadata[key]
    describe(header)
    check_limits(header)
    return header


def _try(folder: Path, raw: bytes) -> str | None:
    """None when the file is accepted, the message when it is refused; anything else escapes."""
    path = folder / "damaged.gguf"
    path.write_bytes(raw)
    message = None
    try:
        _read_all(path)
    except UnusableInputError as error:
        message = error.message
    assert message is None or (str(path) in message and len(message) < 500)
    return message


def test_it_agrees_with_gguf_py(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", extra={"llama.rope.freq_base_test": 7})
    header, reference = read_header(path), gguf.GGUFReader(path)
    own_fields = {key for key in reference.fields if not key.startswith("GGUF.")}
    assert set(header.metadata) == own_fields
    for key in own_fields:
        value, expected = header.metadata[key], reference.fields[key].contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected
    assert [(t.name, t.shape, int(t.type), t.offset, t.nbytes) for t in header.tensors] == [
        (t.name, tuple(t.shape.tolist()), int(t.tensor_type), t.data_offset, t.n_bytes) for t in reference.tensors
    ]


def test_metadata_is_decoded_only_as_far_as_asked(tmp_path: Path) -> None:
    metadata = read_header(write_gguf(tmp_path / "a.gguf")).metadata
    assert metadata.head("tokenizer.ggml.tokens", 2) == ["token0", "token1"]
    assert metadata.head("test.numbers", 9).tolist() == [1, 2, 3]
    assert metadata.value_type("tokenizer.ggml.tokens") == (ValueType.STRING, 40)
    assert "tokenizer.ggml.tokens" in metadata
    assert "nothing" not in metadata
    assert metadata.number("test.numbers", 4) == 4
    assert metadata.text("test.signed", "x") == "x"


@pytest.mark.parametrize("sixty_fourth", range(64))
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, sound: bytes, sixty_fourth: int) -> None:
    assert _try(tmp_path, sound[: len(sound) * sixty_fourth // 64]) is not None


def test_a_header_cut_at_every_byte_is_refused(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(sound)
    for length in range(read_header(path).data_offset):
        assert _try(tmp_path, sound[:length]) is not None, length


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_changed_bytes_raise_nothing_else(tmp_path: Path, sound: bytes, data: st.DataObject) -> None:
    raw = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, 2500))
        patch = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]).map(struct.Struct("<Q").pack),
            )
        )
        raw[position : position + len(patch)] = patch
    _try(tmp_path, bytes(raw))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(raw=st.binary(max_size=300))
def test_noise_raises_nothing_else(tmp_path: Path, raw: bytes) -> None:
    assert _try(tmp_path, b"GGUF" + raw) is not None


def _field(key: str, value_type: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", value_type) + value


def _tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
    return head + struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)


def _file(fields: list[bytes] = [], tensors: list[bytes] = [], n_data: int = 0, **counts: int) -> bytes:  # noqa: B006
    n_tensors, n_fields = counts.get("n_tensors", len(tensors)), counts.get("n_fields", len(fields))
    raw = b"GGUF" + struct.pack("<IQQ", counts.get("version", 3), n_tensors, n_fields)
    raw += b"".join(fields + tensors)
    return raw + bytes(-len(raw) % 32) + bytes(n_data)


TENSOR_64 = _tensor("a", (64,), 0, 0)  # 256 bytes
MANY = struct.pack("<IQ", 5, 2**61)
BAD: dict[str, tuple[bytes, str]] = {
    "no magic": (b"GGML" + bytes(60), "not a GGUF file"),
    "empty": (b"", "not a GGUF file"),
    "version 1": (_file(version=1), "GGUF version 1"),
    "big-endian": (_file(version=3 << 24), "big-endian"),
    "huge tensor count": (_file(n_tensors=2**63), "tensors"),
    "huge field count": (_file(n_fields=2**62), "metadata pairs"),
    "huge array": (_file([_field("a", 9, MANY + bytes(64))]), "elements of 'a'"),
    "huge string": (_file([_field("a", 8, struct.pack("<Q", 2**64 - 8) + bytes(64))]), "inside the value of 'a'"),
    "string past 2**63": (_file([_field("a", 8, struct.pack("<Q", 2**63) + bytes(64))]), "inside the value of 'a'"),
    "strings that wrap": (
        _file([_field("a", 9, struct.pack("<IQQQ", 8, 2, 2**64 - 24, 0) + bytes(64))]),
        "inside the value of 'a'",
    ),
    "unknown value type": (_file([_field("a", 13, bytes(8))]), "unknown type 13"),
    "array of arrays": (_file([_field("a", 9, struct.pack("<IQ", 9, 1) + bytes(8))]), "array of arrays"),
    "bool of 2": (_file([_field("a", 7, b"\x02")]), "neither true nor false"),
    "key twice": (_file([_field("a", 0, b"\x01")] * 2), "'a' stands twice"),
    "key not UTF-8": (_file([struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1)]), "not UTF-8"),
    "alignment 3": (_file([_field("general.alignment", 4, struct.pack("<I", 3))]), "power of two"),
    "alignment 0": (_file([_field("general.alignment", 4, struct.pack("<I", 0))]), "power of two"),
    "alignment is text": (
        _file([_field("general.alignment", 8, struct.pack("<Q", 2) + b"32")]),
        "not a 32-bit number",
    ),
    "tensor twice": (_file(tensors=[TENSOR_64, _tensor("a", (64,), 0, 256)], n_data=512), "'a' stands twice"),
    "overlap": (_file(tensors=[TENSOR_64, _tensor("b", (64,), 0, 128)], n_data=512), "offset 128, expected 256"),
    "gap": (_file(tensors=[TENSOR_64, _tensor("b", (64,), 0, 512)], n_data=1024), "offset 512, expected 256"),
    "unaligned": (_file(tensors=[_tensor("a", (64,), 0, 1)], n_data=512), "offset 1, expected 0"),
    "data missing": (_file(tensors=[TENSOR_64], n_data=255), "ends at byte"),
    "5 dimensions": (_file(tensors=[_tensor("a", (1,) * 5, 0, 0)], n_data=64), "5 dimensions"),
    "zero length": (_file(tensors=[_tensor("a", (64, 0), 0, 0)], n_data=64), "impossible shape"),
    "shape overflows": (_file(tensors=[_tensor("a", (2**40, 2**40), 0, 0)], n_data=64), "impossible shape"),
    "removed type": (_file(tensors=[_tensor("a", (64,), 4, 0)], n_data=256), "unknown type 4"),
    "half a block": (_file(tensors=[_tensor("a", (48,), 8, 0)], n_data=256), "do not divide"),
    "long tensor name": (_file(tensors=[_tensor("a" * 64, (64,), 0, 0)], n_data=256), "64 bytes long"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_lie_is_named(tmp_path: Path, name: str) -> None:
    raw, expected = BAD[name]
    message = _try(tmp_path, raw)
    assert message is not None
    assert expected in message


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_header(tmp_path / "none.gguf")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match="directory"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnusableInputError, match="ordinary"):
        read_header(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"llama.block_count": 0}, "0 layers"),
        ({"llama.block_count": 513}, "513 layers"),
        ({"llama.nextn_predict_layers": 3}, "prediction layers"),
        ({"llama.expert_count": 4, "llama.expert_used_count": 5}, "5 of 4"),
        ({"llama.expert_count": 2000, "llama.expert_used_count": 5}, "5 of 2000"),
        ({"llama.expert_count": 4}, "0 of 4"),
        ({"llama.expert_used_count": [-1, -1]}, "impossible experts"),
        ({"llama.expert_used_count": [True, False]}, "1 of 0"),
        ({"llama.rope.scaling.type": "x"}, "rope scaling 'x'"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "layer_norm_rms_epsilon -1"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon nan"),
        ({"llama.rope.dimension_count": 0}, "rope.dimension_count 0"),
        ({"llama.rope.dimension_count_swa": 3}, "rope.dimension_count_swa 3"),
        ({"general.alignment": 16}, "multiples of 16 bytes"),
    ],
)
def test_what_would_end_the_process_is_refused(tmp_path: Path, extra: dict[str, Any], expected: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in ({"llama.block_count": 2} | extra).items():
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    header = read_header(tmp_path / "a.gguf")
    with pytest.raises(UnusableInputError, match=expected):
        check_limits(header)


@pytest.mark.model
def test_the_real_model_is_within_the_limits(smollm2_gguf: Path) -> None:
    header = _read_all(smollm2_gguf)
    assert header.architecture == "llama"
    assert len(header.tensors) == 272
    assert header.n_parameters == 134_515_008


def test_weights_that_no_kernel_computes_with_are_refused_by_name(tmp_path: Path) -> None:
    architecture = _field("general.architecture", 8, struct.pack("<Q", 5) + b"llama")
    for kind, name in ((24, "I8"), (26, "I32"), (28, "F64"), (9, "Q8_1")):
        (tmp_path / "a.gguf").write_bytes(_file([architecture], [_tensor("blk.0.x.weight", (64,), kind, 0)], 512))
        with pytest.raises(UnusableInputError, match=rf"blk\.0\.x\.weight \({name}\)"):
            check_limits(read_header(tmp_path / "a.gguf"))


def test_an_importance_matrix_is_called_one(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "matrix.gguf", "")
    writer.add_type("imatrix")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnusableInputError, match="an importance matrix, not a model"):
        check_limits(read_header(tmp_path / "matrix.gguf"))
