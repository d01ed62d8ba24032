"""NVFP4 that stays as it is: the same numbers in ggml's blocks, and the library computes with their factor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from encoded_checkpoint import ENCODINGS, Encoding, Stored, _bits, _one, encode, make_encoded
from random_checkpoint import PLAIN, make_checkpoint, prompt, read_model

from edgeinfer.api.convert import convert
from edgeinfer.api.load import load
from edgeinfer.convert.kept_nvfp4 import ARCHITECTURES
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions, RuntimeOptions
from edgeinfer.types import Refusal, Row

MATRICES = r"\.(attn_(q|k|v|output)|ffn_(gate|up|down)(_exps)?)\.weight"


def _options(**more: object) -> ConvertOptions:
    return replace(ConvertOptions(type="Q8_0", tensor_type=((MATRICES, "nvfp4"),)), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "ct-nvfp4"])
def test_blocks_and_factor_are_the_stored_numbers(name: str, tmp_path: Path) -> None:
    checkpoint = make_encoded(name, tmp_path)
    convert(checkpoint, kept := tmp_path / "kept.gguf", _options(verify=False))
    convert(checkpoint, plain := tmp_path / "plain.gguf", ConvertOptions(type="F32", verify=False))
    found, expected = _tensors(kept), _tensors(plain)
    names = [name for name in expected if name.startswith("blk.") and "norm" not in name]
    assert len(names) == 7
    for weight in names:
        factor = found[weight.replace(".weight", ".scale")]
        assert factor.shape == (1,)
        np.testing.assert_allclose(found[weight] * factor, expected[weight], rtol=1e-6, atol=0)


def _tensors(path: Path) -> dict[str, np.ndarray]:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


def _moderate(module: str, rows: int, columns: int) -> Stored:
    """Of the size that weights have, once the factor is applied; without it they would be a hundred times that."""
    scales = _bits(f"{module}.s", (rows, columns // 16), "u1") & 0x0F | 0x30
    packed = _bits(module, (rows, columns // 2), "u1")
    factor = 0.004 * (1 + len(module) % 7)
    return {".weight": ("U8", packed), ".weight_scale": ("F8_E4M3", scales), ".weight_scale_2": _one(factor)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_library_computes_with_the_factors(architecture: str, tmp_path: Path) -> None:
    model = read_model({"mistral3": "ministral3"}.get(architecture, architecture))
    model = replace(model, config={**model.config, "mlp_bias": False})
    checkpoint = make_checkpoint(model, PLAIN, tmp_path)
    encode(checkpoint, Encoding({"quant_method": "modelopt"}, _moderate))
    convert(checkpoint, kept := tmp_path / "kept.gguf", _options())
    convert(checkpoint, plain := tmp_path / "plain.gguf", ConvertOptions(type="F32"))
    assert sum(t.type.name == "NVFP4" for t in read_header(kept).tensors) >= 7
    a, b = (_logits(path, prompt(model)) for path in (kept, plain))
    cosine = np.vecdot(a, b) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert cosine.min() > 0.995


def _logits(path: Path, tokens: np.ndarray) -> np.ndarray:
    with load(path, RuntimeOptions(ctx_size=64)) as loaded:
        logits = loaded.backend.forward([Row(0, tokens, 0, 0)])
        assert not isinstance(logits, Refusal)
        return logits.astype(np.float64)


def test_what_is_not_nvfp4_does_not_become_it(tmp_path: Path) -> None:
    options = ConvertOptions(type="Q8_0", tensor_type=(("weight", "nvfp4"),))
    with pytest.raises(UsageError, match="weight is not stored as NVFP4"):
        convert(make_encoded("modelopt-nvfp4", tmp_path), tmp_path / "out.gguf", options)
    with pytest.raises(UsageError, match="is not stored as NVFP4"):
        convert(make_encoded("fp8-block", tmp_path), tmp_path / "out.gguf", _options())
    convert(tmp_path / "fp8-block", source := tmp_path / "f32.gguf", ConvertOptions(type="F32", verify=False))
    with pytest.raises(UsageError, match="is not NVFP4"):
        convert(source, tmp_path / "out.gguf", _options())


@pytest.mark.parametrize(("name", "change"), [("llama", {"mlp_bias": True}), ("qwen2", {})])
def test_what_the_library_computes_otherwise_is_refused(name: str, change: dict[str, bool], tmp_path: Path) -> None:
    model = read_model(name)
    checkpoint = make_checkpoint(replace(model, config={**model.config, **change}), PLAIN, tmp_path)
    encode(checkpoint, Encoding(ENCODINGS["modelopt-nvfp4"].config, _moderate))
    with pytest.raises(UsageError, match="cannot stay NVFP4"):
        convert(checkpoint, tmp_path / "out.gguf", _options())


def test_a_negative_scale_is_named(tmp_path: Path) -> None:
    def negative(module: str, rows: int, columns: int) -> Stored:
        stored = _moderate(module, rows, columns)
        stored[".weight_scale"][1][5, 3] = 0x80
        return stored

    checkpoint = make_checkpoint(read_model("qwen3"), PLAIN, tmp_path)
    encode(checkpoint, Encoding({"quant_method": "modelopt"}, negative))
    with pytest.raises(UnusableInputError, match="weight_scale has a scale that is negative or NaN in row 5"):
        convert(checkpoint, tmp_path / "out.gguf", _options())


def test_a_size_does_not_keep_blocks_without_their_factor(tmp_path: Path) -> None:
    checkpoint = make_encoded("modelopt-nvfp4", tmp_path)
    options = ConvertOptions(target_bpw=9, verify=False)
    convert(checkpoint, out := tmp_path / "out.gguf", options)
    assert "NVFP4" not in {t.type.name for t in read_header(out).tensors}
