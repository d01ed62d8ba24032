"""Adapter files that the C library would end the process over, or compute otherwise, are refused with the reason."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_parts import T, Tensor, array, f32, take_apart, text, texts, u32, value

from edgeinfer.errors import NotFoundError, UnusableInputError
from edgeinfer.gguf_file.adapter import check_finite, check_fits, read_adapter
from edgeinfer.gguf_file.header import Header, read_header

X, EXPERTS, TABLE = "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight", "token_embd.weight"
SHAPES = {
    X: (48, 64),
    EXPERTS: (3, 32, 64),
    TABLE: (40, 64),
    "output.weight": (40, 64),
    "blk.0.attn_norm.weight": (64,),
}
"""Of the model, the row length last."""


def write(path: Path, tensors: dict[str, tuple[int, ...]], kind: str, arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(kind)
    if kind == "adapter":
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 8.0)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pairs(name: str, rank: int = 4) -> dict[str, tuple[int, ...]]:
    *stack, rows, columns = SHAPES[name]
    if name == TABLE:
        return {f"{name}.lora_a": (rows, rank), f"{name}.lora_b": (columns, rank)}
    return {f"{name}.lora_a": (*stack, rank, columns), f"{name}.lora_b": (*stack, rows, rank)}


@pytest.fixture
def model(tmp_path: Path) -> Header:
    return read_header(write(tmp_path / "model.gguf", SHAPES, "model"))


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return write(tmp_path / "adapter.gguf", pairs(X) | pairs(EXPERTS) | pairs(TABLE), "adapter")


def test_a_sound_adapter(sound: Path, model: Header) -> None:
    adapter = read_adapter(sound)
    assert (adapter.alpha, [(pair.name, pair.rank) for pair in adapter.pairs]) == (
        8,
        [(X, 4), (EXPERTS, 4), (TABLE, 4)],
    )
    check_fits(adapter, [model])
    check_finite(adapter)


def test_there_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_adapter(tmp_path / "gone.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.type": None}, "no text for general.type"),
        ({"general.type": u32(1)}, "no text for general.type"),
        ({"general.type": texts(["adapter"])}, "no text for general.type"),
        ({"general.type": text("model")}, "not an adapter (general.type is 'model')"),
        ({"general.architecture": u32(1)}, "no text for general.architecture"),
        ({"general.architecture": None}, "no text for general.architecture"),
        ({"adapter.type": None}, "no text for adapter.type"),
        ({"adapter.type": f32(1)}, "no text for adapter.type"),
        ({"adapter.type": text("loha")}, "the adapter.type 'loha'"),
        ({"adapter.lora.alpha": u32(8)}, "no 32-bit number for adapter.lora.alpha"),
        ({"adapter.lora.alpha": text("8")}, "no 32-bit number for adapter.lora.alpha"),
        ({"adapter.lora.alpha": value(T.FLOAT64, 8)}, "no 32-bit number for adapter.lora.alpha"),
        ({"adapter.lora.alpha": array(T.FLOAT32, [8])}, "no 32-bit number for adapter.lora.alpha"),
        ({"adapter.lora.alpha": f32(float("nan"))}, "the adapter.lora.alpha nan"),
        ({"adapter.lora.alpha": f32(0)}, "the adapter.lora.alpha 0"),
        ({"adapter.lora.alpha": f32(3e38)}, "the adapter.lora.alpha 3e+38"),
        ({"adapter.alora.invocation_tokens": array(T.UINT32, [1])}, "an activated LoRA"),
    ],
    ids=str,
)
def test_metadata(sound: Path, changes: dict[str, bytes | None], message: str) -> None:
    sound.write_bytes(take_apart(sound).changed(changes).encoded())
    with pytest.raises(UnusableInputError, match=re.escape(message)):
        read_adapter(sound)


def test_without_an_alpha_the_scale_is_1(sound: Path) -> None:
    sound.write_bytes(take_apart(sound).changed({"adapter.lora.alpha": None}).encoded())
    assert read_adapter(sound).alpha == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{X}.lora_a": None}, f"has only lora_b for {X}"),
        ({"blk.0.attn_norm.weight": (64,)}, "are no part of a LoRA adapter: blk.0.attn_norm.weight"),
        ({"x.lora_a.lora_a": (4, 64), "x.lora_a.lora_b": (48, 4)}, "are no part of a LoRA adapter: x.lora_a.lora_a"),
        ({f"{X}.lora_a": (5, 64)}, "that don't go together: [64, 5] and [4, 48]"),
        ({f"{EXPERTS}.lora_a": (2, 4, 64)}, "that don't go together"),
        ({f"{TABLE}.lora_a": (40, 5)}, "that don't go together"),
        ({f"{X}.lora_b": (1, 3, 48, 4)}, "that don't go together"),
    ],
    ids=str,
)
def test_tensors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tensors = {name: shape for name, shape in (pairs(X) | pairs(EXPERTS) | pairs(TABLE) | changes).items() if shape}
    with pytest.raises(UnusableInputError, match=re.escape(message)):
        read_adapter(write(tmp_path / "adapter.gguf", tensors, "adapter"))


def test_no_tensors(sound: Path) -> None:
    sound.write_bytes(replace(take_apart(sound), tensors=()).encoded())
    with pytest.raises(UnusableInputError, match="has no tensors"):
        read_adapter(sound)


def test_types_that_no_adapter_has(sound: Path) -> None:
    for kind, data in ((26, bytes(4 * 64 * 4)), (2, bytes(4 * 36))):
        sound.write_bytes(take_apart(sound).with_tensor(f"{X}.lora_a", type=kind, data=data).encoded())
        with pytest.raises(UnusableInputError, match=r"lora_a as (I32|Q4_0), not F32, F16, BF16, Q8_0"):
            read_adapter(sound)
        sound = write(sound.with_name("again.gguf"), pairs(X), "adapter")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"blk.1.attn_q.weight.lora_a": (4, 64), "blk.1.attn_q.weight.lora_b": (48, 4)},
            "1 tensors that the model does",
        ),
        ({f"{X}.lora_a": (4, 32), f"{X}.lora_b": (48, 4)}, f"{X} (32 x 48, the model has 64 x 48)"),
        ({f"{X}.lora_a": (4, 64), f"{X}.lora_b": (64, 4)}, "(64 x 64, the model has 64 x 48)"),
        (
            {f"{EXPERTS}.lora_a": (2, 4, 64), f"{EXPERTS}.lora_b": (2, 32, 4)},
            "(64 x 32 x 2, the model has 64 x 32 x 3)",
        ),
        ({f"{EXPERTS}.lora_a": (4, 64), f"{EXPERTS}.lora_b": (32, 4)}, "the model has 64 x 32 x 3)"),
        ({f"{TABLE}.lora_a": (4, 64), f"{TABLE}.lora_b": (40, 4)}, "don't go together"),
        ({f"{TABLE}.lora_a": (64, 4), f"{TABLE}.lora_b": (40, 4)}, "(40 x 64, the model has 64 x 40)"),
        ({"blk.0.attn_norm.weight.lora_a": (4, 64), "blk.0.attn_norm.weight.lora_b": (64, 4)}, "the model has 64 x 1)"),
    ],
    ids=str,
)
def test_another_model(tmp_path: Path, model: Header, tensors: dict[str, tuple[int, ...]], message: str) -> None:
    path = write(tmp_path / "adapter.gguf", tensors, "adapter")
    with pytest.raises(UnusableInputError, match=re.escape(message)):
        check_fits(read_adapter(path), [model])


def test_another_architecture(tmp_path: Path, model: Header) -> None:
    adapter = read_adapter(write(tmp_path / "adapter.gguf", pairs(X), "adapter", "qwen2"))
    with pytest.raises(UnusableInputError, match="is for qwen2, the model is llama"):
        check_fits(adapter, [model])


def test_an_embedding_that_is_the_head_too(sound: Path, tmp_path: Path) -> None:
    tied = {name: shape for name, shape in SHAPES.items() if name != "output.weight"}
    with pytest.raises(UnusableInputError, match="which is the output matrix of this model, too"):
        check_fits(read_adapter(sound), [read_header(write(tmp_path / "tied.gguf", tied, "model"))])


@pytest.mark.parametrize(
    ("kind", "bits"), [(0, 0x7F800000), (0, 0xFFC00000), (1, 0x7C00), (1, 0xFE00), (30, 0xFF80), (8, 0x7C00)]
)
def test_values_that_are_not_finite(sound: Path, kind: int, bits: int) -> None:
    width = {0: 4, 1: 2, 30: 2, 8: 34}[kind]
    n_blocks = 4 * 64 // (32 if kind == 8 else 1)
    data = bytearray(b"\0" * width * n_blocks)
    name = f"{X}.lora_a"
    parts = take_apart(sound)
    sound.write_bytes(parts.with_tensor(name, type=kind, data=bytes(data)).encoded())
    check_finite(read_adapter(sound))
    struct.pack_into("<I" if kind == 0 else "<H", data, width * (n_blocks - 1), bits)
    sound.write_bytes(parts.with_tensor(name, type=kind, data=bytes(data)).encoded())
    with pytest.raises(UnusableInputError, match=f"values in {re.escape(name)} that are not finite"):
        check_finite(read_adapter(sound))


def test_a_weight_in_nvfp4(sound: Path, model: Header) -> None:
    parts = take_apart(model.path)
    model.path.write_bytes(parts.with_tensor(X, type=40, data=bytes(48 * 36)).encoded())
    with pytest.raises(UnusableInputError, match="NVFP4"):
        check_fits(read_adapter(sound), [read_header(model.path)])


def test_more_than_one_dimension_of_matrices(tmp_path: Path, model: Header) -> None:
    tensors = (
        Tensor(f"{X}.lora_a".encode(), (64, 4, 1, 2), 0, bytes(2048)),
        Tensor(f"{X}.lora_b".encode(), (4, 48, 1, 2), 0, bytes(1536)),
    )
    path = write(tmp_path / "adapter.gguf", pairs(X), "adapter")
    path.write_bytes(replace(take_apart(path), tensors=tensors).encoded())
    with pytest.raises(UnusableInputError, match="don't go together"):
        check_fits(read_adapter(path), [model])
