"""The stream: the right rows of the right weights, whatever the threads; NaN and infinity named; sources distrusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Tensors, llama_config, qwen2_config, random_tensors, write_checkpoint, write_safetensors
from numpy.typing import NDArray
from safetensors_writer import to_bf16

from edgeinfer.api.vocabulary import open_vocabulary
from edgeinfer.convert import stream
from edgeinfer.convert.checkpoint import read_safetensors_header
from edgeinfer.convert.pipeline import Planned, prepare
from edgeinfer.errors import UnusableInputError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import read_header
from edgeinfer.native.quantize import GGMLQuantizer
from edgeinfer.options import ConvertOptions

F32, BF16 = GGMLType.F32, GGMLType.BF16


def _write(planned: Planned, out: Path, threads: int = 2) -> list[int]:
    """Write the file; returns what progress was told."""
    told: list[int] = []
    stream.write(planned.plan, out, GGMLQuantizer(), threads, told.append)
    return told


def _planned(folder: Path, tensors: Tensors, config: dict[str, Any], dtype: str, file_type: str) -> Planned:
    return prepare(
        write_checkpoint(folder, config, tensors, dtype=dtype), None, ConvertOptions(type=file_type), open_vocabulary
    )


def _values(path: Path) -> dict[str, NDArray[np.float32]]:
    """The float tensors of a GGUF file, rows as Hugging Face has them."""
    raw = path.read_bytes()
    found = {}
    for tensor in read_header(path).tensors:
        data = raw[tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.type is BF16:
            flat = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            flat = np.frombuffer(data, {F32: "<f4", GGMLType.F16: "<f2"}[tensor.type]).astype(np.float32)
        found[tensor.name] = flat.reshape(tensor.shape[::-1])
    return found


def _rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (to_bf16(values).astype(np.uint32) << 16).view(np.float32)
    return values.astype({"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_float_weights_arrive_as_they_were(tmp_path: Path, dtype: str) -> None:
    config = qwen2_config()
    tensors = random_tensors(config)
    _write(_planned(tmp_path / "m", tensors, config, dtype, "F32"), tmp_path / "out.gguf")
    found = _values(tmp_path / "out.gguf")
    for ours, theirs in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("blk.0.attn_k.bias", "model.layers.0.self_attn.k_proj.bias"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ):
        np.testing.assert_array_equal(found[ours], _rounded(tensors[theirs], dtype))


@pytest.mark.parametrize("slab_elements", [1, 70, 1000, 1 << 20])
@pytest.mark.parametrize("file_type", ["F32", "BF16"])
def test_rotary_rows_of_llama_become_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_type: str, slab_elements: int
) -> None:
    """Row j of a head's first half goes to row 2j, of its second half to 2j + 1, however the slabs are cut."""
    monkeypatch.setattr(stream, "SLAB_ELEMENTS", slab_elements)
    config = llama_config(attention_bias=True, head_dim=8)
    tensors = random_tensors(config)
    planned = _planned(tmp_path / "m", tensors, config, "BF16", file_type)
    _write(planned, tmp_path / "out.gguf", threads=3)
    found = _values(tmp_path / "out.gguf")
    for name, heads in (("q", 4), ("k", 2)):
        for part in ("weight", "bias"):
            source = _rounded(tensors[f"model.layers.0.self_attn.{name}_proj.{part}"], "BF16")
            ours = found[f"blk.0.attn_{name}.{part}"]
            for head in range(heads):
                for j in range(4):
                    np.testing.assert_array_equal(ours[head * 8 + 2 * j], source[head * 8 + j])
                    np.testing.assert_array_equal(ours[head * 8 + 2 * j + 1], source[head * 8 + 4 + j])
    np.testing.assert_array_equal(
        found["blk.0.attn_v.weight"], _rounded(tensors["model.layers.0.self_attn.v_proj.weight"], "BF16")
    )


@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q8_0", "IQ4_NL"])
def test_threads_and_slabs_do_not_change_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_type: str
) -> None:
    config = llama_config(hidden_size=256, intermediate_size=512)
    planned = _planned(tmp_path / "m", random_tensors(config), config, "BF16", file_type)
    _write(planned, tmp_path / "one.gguf", threads=1)
    monkeypatch.setattr(stream, "SLAB_ELEMENTS", 5000)
    _write(planned, tmp_path / "many.gguf", threads=64)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "many.gguf").read_bytes()


def test_a_tensor_of_several_files_is_read_from_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SLAB_ELEMENTS", 500)
    config = llama_config()
    folder = write_checkpoint(tmp_path / "m", config)
    (folder / "model.safetensors").unlink()
    tensors = random_tensors(config)
    for i, name in enumerate(tensors):
        write_safetensors(folder / f"{i:03}.safetensors", {name: tensors[name]})
    _write(prepare(folder, None, ConvertOptions(type="F32"), open_vocabulary), tmp_path / "out.gguf")
    for ours, theirs in (("token_embd", "model.embed_tokens"), ("blk.1.ffn_up", "model.layers.1.mlp.up_proj")):
        np.testing.assert_array_equal(
            _values(tmp_path / "out.gguf")[f"{ours}.weight"], _rounded(tensors[f"{theirs}.weight"], "BF16")
        )


def test_progress_adds_up_to_the_input(tmp_path: Path) -> None:
    config = llama_config()
    planned = _planned(tmp_path / "m", random_tensors(config), config, "BF16", "Q8_0")
    told = _write(planned, tmp_path / "out.gguf")
    assert sum(told) == 2 * sum(t.size for t in random_tensors(config).values())
    assert min(told) > 0


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("file_type", ["Q8_0", "F32", "BF16", "F16"])
@pytest.mark.parametrize("slab_elements", [256, 1 << 20])
def test_nan_and_infinity_are_named_with_tensor_and_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, value: float, file_type: str, slab_elements: int
) -> None:
    monkeypatch.setattr(stream, "SLAB_ELEMENTS", slab_elements)
    config = llama_config()
    tensors = random_tensors(config)
    poisoned = tensors["model.layers.1.self_attn.q_proj.weight"]
    poisoned[37, 63] = value
    folder = write_checkpoint(tmp_path / "m", config, tensors, dtype=dtype)
    if dtype == "BF16":  # to_bf16 is for finite values
        cut = (poisoned.view(np.uint32) >> 16).astype(np.uint16)
        _overwrite(folder / "model.safetensors", "model.layers.1.self_attn.q_proj.weight", cut)
    with pytest.raises(UnusableInputError) as caught:
        _write(prepare(folder, None, ConvertOptions(type=file_type), open_vocabulary), tmp_path / "out.gguf")
    kind = "NaN" if np.isnan(value) else "an infinite value"
    assert f"model.layers.1.self_attn.q_proj.weight has {kind} in row 37" in caught.value.message


def _overwrite(path: Path, name: str, values: NDArray[Any]) -> None:
    spec = read_safetensors_header(path)[name]
    with open(path, "r+b") as file:
        file.seek(spec.offset)
        file.write(values.tobytes())


def test_a_nan_in_a_vector_is_named_too(tmp_path: Path) -> None:
    config = qwen2_config()
    tensors = random_tensors(config)
    tensors["model.layers.0.self_attn.v_proj.bias"][5] = np.nan
    with pytest.raises(UnusableInputError, match=r"v_proj\.bias has NaN in row 5"):
        _write(_planned(tmp_path / "m", tensors, config, "F32", "Q8_0"), tmp_path / "out.gguf")


def test_values_too_large_for_f16_are_refused_only_where_f16_is_asked_for(tmp_path: Path) -> None:
    config = llama_config()
    tensors = random_tensors(config)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = -70_000
    with pytest.raises(UnusableInputError, match=r"blk\.0\.ffn_up\.weight has values up to 7e\+04 near row 3"):
        _write(_planned(tmp_path / "a", tensors, config, "F32", "F16"), tmp_path / "a.gguf")
    _write(_planned(tmp_path / "b", tensors, config, "F32", "BF16"), tmp_path / "b.gguf")


@pytest.mark.parametrize("change", ["truncated", "gone", "a directory"])
def test_a_source_that_changes_meanwhile_is_named(tmp_path: Path, change: str) -> None:
    config = llama_config()
    planned = _planned(tmp_path / "m", random_tensors(config), config, "BF16", "Q8_0")
    path = tmp_path / "m/model.safetensors"
    if change == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    else:
        path.unlink()
        if change == "a directory":
            path.mkdir()
    with pytest.raises(UnusableInputError, match=r"model\.safetensors: tensor model\.\S+ cannot be read"):
        _write(planned, tmp_path / "out.gguf")


def test_an_existing_file_is_never_written_into(tmp_path: Path) -> None:
    """The temporary name might be a trap that somebody has laid in a shared directory."""
    config = llama_config()
    planned = _planned(tmp_path / "m", random_tensors(config), config, "BF16", "Q8_0")
    (tmp_path / "precious").write_text("data")
    (tmp_path / "out.gguf").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        _write(planned, tmp_path / "out.gguf")
    assert (tmp_path / "precious").read_text() == "data"
