"""What an architecture does with rows (experts, fused and transposed matrices) it does with encoded ones, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import change_json
from encoded_checkpoint import ENCODINGS, encode, read_tensors, write_tensors
from golden_encodings import tensor_hashes
from random_checkpoint import PLAIN, make_checkpoint, read_model

from edgeinfer.api.convert import convert, plan_conversion
from edgeinfer.convert import stream
from edgeinfer.convert.checkpoint import TensorSpec, open_checkpoint
from edgeinfer.convert.encodings import decoded
from edgeinfer.convert.encodings.grid import fit
from edgeinfer.convert.encodings.scaled import Scaled
from edgeinfer.convert.reader import SourceReader
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import read_header
from edgeinfer.native.quantize import GGMLQuantizer
from edgeinfer.options import ConvertOptions


@pytest.mark.parametrize(
    ("model", "encoding"),
    [("deepseek-v3", "fp8-block"), ("qwen3moe", "gptq4-order"), ("phi-short", "awq"), ("mixtral", "bnb-nf4")],
)
def test_encoded_rows_go_where_plain_ones_go(
    model: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SLAB_ELEMENTS", 1 << 14)
    checkpoint = make_checkpoint(read_model(model), PLAIN, tmp_path)
    encode(checkpoint, ENCODINGS[encoding])
    options = ConvertOptions(type="F32", verify=False)
    convert(checkpoint, found := tmp_path / "encoded.gguf", options)
    reader = SourceReader()
    plain = {
        name: ("F32", _numbers(reader, spec)) for name, spec in decoded(open_checkpoint(checkpoint)).tensors.items()
    }
    reader.close()
    write_tensors(checkpoint, plain)
    change_json(checkpoint / "config.json", {"quantization_config": None})
    convert(checkpoint, expected := tmp_path / "plain.gguf", options)
    assert tensor_hashes(found) == tensor_hashes(expected)


@pytest.mark.parametrize(
    ("model", "half"), [("deepseek-v3", "blk.0.attn_v_b.weight"), ("phi-short", "blk.0.ffn_up.weight")]
)
def test_blocks_go_where_numbers_go(model: str, half: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(read_model(model), PLAIN, tmp_path)
    encode(checkpoint, ENCODINGS["ct-mxfp4"])
    options = ConvertOptions(type="Q8_0", tensor_type=(("blk", "mxfp4"),), verify=False)
    planned = plan_conversion(checkpoint, tmp_path / "kept.gguf", options).plan.tensors
    kept = {t.name for t in planned if {part.type for part in t.parts} == {GGMLType.MXFP4}}
    assert half in kept
    convert(checkpoint, tmp_path / "kept.gguf", options)
    convert(checkpoint, plain := tmp_path / "plain.gguf", ConvertOptions(type="F32", verify=False))
    numbers = {
        t.name: np.fromfile(plain, np.float32, t.nbytes // 4, offset=t.offset) for t in read_header(plain).tensors
    }
    for tensor in read_header(tmp_path / "kept.gguf").tensors:
        if tensor.name in kept:
            blocks = np.fromfile(tmp_path / "kept.gguf", np.uint8, tensor.nbytes, offset=tensor.offset)
            found = np.empty_like(numbers[tensor.name])
            GGMLQuantizer().dequantize(tensor.type, blocks, found)
            assert found.tobytes() == numbers[tensor.name].tobytes(), tensor.name


def test_a_stack_of_blocks_and_floats_has_no_type_that_loses_nothing_but_f32(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(read_model("qwen3moe"), PLAIN, tmp_path)
    floats = read_tensors(checkpoint)
    encode(checkpoint, ENCODINGS["ct-mxfp4"])
    last = "model.layers.1.mlp.experts.3.down_proj.weight"
    blocks = {name: stored for name, stored in read_tensors(checkpoint).items() if not name.startswith(last)}
    write_tensors(checkpoint, {**blocks, last: floats[last]})
    plan = plan_conversion(checkpoint, options=ConvertOptions(target_bpw=8.2)).plan
    types = {t.name: t.type for t in plan.tensors}
    assert types["blk.0.ffn_down_exps.weight"] is GGMLType.MXFP4
    assert types["blk.1.ffn_down_exps.weight"] is not GGMLType.MXFP4


def _numbers(reader: SourceReader, spec: TensorSpec) -> np.ndarray:
    rows = np.empty((spec.n_elements // spec.shape[-1], spec.shape[-1]), np.float32)
    reader.begin()
    reader.floats(spec, 0, rows)
    return rows.reshape(spec.shape)


@pytest.mark.parametrize(
    "grid", [(), (1,), (3, 1, 1), (3,), (3, 5), (3, 5, 1), (3, 1, 8), (3, 5, 2), (3, 3, 3), (3, 1, 4)], ids=str
)
def test_stacks_have_scales_of_every_kind(grid: tuple[int, ...], tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    codes, scales = rng.integers(-127, 128, (3, 5, 8), np.int8), rng.random(grid, np.float32)
    path = tmp_path / "data"
    path.write_bytes(codes.tobytes() + scales.tobytes())
    specs = (
        TensorSpec("codes", codes.shape, "I8", path, 0, codes.nbytes),
        TensorSpec("scales", grid, "F32", path, codes.nbytes, scales.nbytes),
    )
    encoding = Scaled(*specs, None, fit(codes.shape, specs[1], [(2, 3)]))
    factors = scales.reshape(grid + (1,) * (3 - len(grid)))
    for axis, (block, length) in enumerate(((1, 3), (2, 5), (3, 8))):
        if factors.shape[axis] not in (1, length):
            factors = np.repeat(factors, block if grid == (3, 3, 3) else length // factors.shape[axis], axis)
    expected = (codes * factors[:, :5, :8]).reshape(15, 8)
    reader = SourceReader()
    for row0, end in ((0, 15), (4, 6), (5, 10), (14, 15)):
        out = np.empty((end - row0, 8), np.float32)
        reader.begin()
        encoding.dequantize(reader, row0, out)
        assert out.tobytes() == expected[row0:end].astype(np.float32).tobytes()
    reader.close()
