"""Quantized checkpoints: the numbers that other libraries make of them; broken ones are refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import change_json
from encoded_checkpoint import ENCODINGS, make_encoded, read_tensors, write_tensors
from golden_encodings import GOLDEN, tensor_hashes

from edgeinfer.api.convert import convert
from edgeinfer.convert import stream
from edgeinfer.convert.checkpoint import TensorSpec, open_checkpoint
from edgeinfer.convert.encodings import decoded
from edgeinfer.convert.encodings.grid import fit
from edgeinfer.convert.reader import SourceReader
from edgeinfer.errors import UnusableInputError
from edgeinfer.options import ConvertOptions

MODULES = {
    f"model.layers.0.{part}": (rows, columns)
    for part, rows, columns in (
        ("self_attn.q_proj", 256, 256),
        ("self_attn.k_proj", 64, 256),
        ("self_attn.v_proj", 64, 256),
        ("self_attn.o_proj", 256, 256),
        ("mlp.gate_proj", 320, 256),
        ("mlp.up_proj", 320, 256),
        ("mlp.down_proj", 256, 320),
    )
}
OTHER_TYPES = (("F16", "<f2"), ("I64", "<i8"), ("U8", "u1"), ("I8", "i1"), ("F8_E4M3", "u1"))
ACTIVATIONS = ("input_scale", "activation_scale", "_ub", "k_scale", "v_scale", "input_global_scale")
"""How names end that say nothing about weights."""
FIRST = "model.layers.0.self_attn.k_proj"


@pytest.fixture(params=ENCODINGS)
def name(request: pytest.FixtureRequest) -> str:
    """Every encoding."""
    return str(request.param)


def test_the_numbers_are_those_of_other_libraries(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SLAB_ELEMENTS", 64 * 320)  # several slabs for a tensor
    checkpoint = make_encoded(name, tmp_path)
    convert(checkpoint, out := tmp_path / "out.gguf", ConvertOptions(type="F32", verify=False))
    assert tensor_hashes(out) == json.loads(GOLDEN.read_text("utf-8"))[name]


def test_any_rows_can_be_had_alone(name: str, tmp_path: Path) -> None:
    tensors = decoded(open_checkpoint(make_encoded(name, tmp_path))).tensors
    reader = SourceReader()
    for module, (rows, columns) in MODULES.items():
        spec = tensors[f"{module}.weight"]
        assert spec.shape == (rows, columns)
        assert spec.nbytes == sum(stored.nbytes for stored in spec.stored)
        whole = _rows(reader, spec, 0, rows).copy()
        for row0, n_rows in ((0, 1), (1, 1), (7, 13), (rows - 1, 1), (31, 33)):
            assert _rows(reader, spec, row0, n_rows).tobytes() == whole[row0 : row0 + n_rows].tobytes()
    reader.close()


def _rows(reader: SourceReader, spec: TensorSpec, row0: int, n_rows: int) -> np.ndarray:
    out = np.full((n_rows, spec.shape[-1]), np.nan, np.float32)
    reader.begin()
    reader.floats(spec, row0, out)
    return out


@pytest.mark.parametrize(
    "encoding", ["fp8-block", "modelopt-nvfp4", "ct-mixed", "gptq3", "gptq4-order", "awq", "bnb-nf4-nested", "bnb-int8"]
)
def test_a_quantized_file_passes_its_verification(encoding: str, tmp_path: Path) -> None:
    checkpoint = make_encoded(encoding, tmp_path)
    convert(checkpoint, tmp_path / "out.gguf", ConvertOptions(type="Q4_0"))


def test_scales_of_activations_are_left_out_and_said(tmp_path: Path) -> None:
    checkpoint = decoded(open_checkpoint(make_encoded("modelopt-fp8", tmp_path)))
    assert checkpoint.left_out == (
        f"9 tensors like {FIRST.replace('k_proj', 'q_proj')}.input_scale (for quantized activations)",
    )
    assert not [name for name in checkpoint.tensors if name.endswith("scale")]


def test_the_biases_of_zeros_that_the_first_versions_of_autogptq_added_do_no_harm(tmp_path: Path) -> None:
    checkpoint, options = make_encoded("gptq4", tmp_path), ConvertOptions(type="F32", verify=False)
    convert(checkpoint, tmp_path / "without.gguf", options)
    biases = {f"{module}.bias": ("F16", np.zeros(rows, np.float16)) for module, (rows, _) in MODULES.items()}
    write_tensors(checkpoint, {**read_tensors(checkpoint), **biases})
    convert(checkpoint, tmp_path / "with.gguf", options)
    assert tensor_hashes(tmp_path / "with.gguf") == tensor_hashes(tmp_path / "without.gguf")
    biases[f"{FIRST}.bias"][1][3] = 1
    write_tensors(checkpoint, {**read_tensors(checkpoint), **biases})
    with pytest.raises(UnusableInputError, match=rf"1 tensors are surplus: {FIRST}\.bias$"):
        convert(checkpoint, tmp_path / "other.gguf", options)


def test_a_tensor_that_is_only_called_scale_is_none(tmp_path: Path) -> None:
    checkpoint = make_encoded("ct-int8", tmp_path)
    write_tensors(checkpoint, {**read_tensors(checkpoint), "model.logit_scale": ("F32", np.ones(1, np.float32))})
    assert not _problem(checkpoint)
    assert "model.logit_scale" in decoded(open_checkpoint(checkpoint)).tensors


def test_a_block_can_be_larger_than_the_matrix(tmp_path: Path) -> None:
    spec = TensorSpec("scales", (2, 1), "F32", tmp_path, 0, 8)
    grid = fit((6, 10), spec, [(3, 1 << 30)])
    values = np.ones((6, 10), np.float32)
    grid.apply(np.multiply, values, np.arange(6, dtype=np.float32)[:, None])
    assert (values == np.arange(6)[:, None]).all()


@pytest.mark.parametrize(("producer", "known"), [("modelopt", True), ("x", False), (None, False)])
def test_the_method_can_stand_in_a_file_of_its_own(producer: str | None, known: bool, tmp_path: Path) -> None:
    checkpoint = make_encoded("modelopt-fp8", tmp_path)
    change_json(checkpoint / "config.json", {"quantization_config": None})
    section = {"producer": {"name": producer}, "quantization": {"quant_algo": "FP8"}}
    (checkpoint / "hf_quant_config.json").write_text(json.dumps(section), "utf-8")
    assert (_problem(checkpoint) == "") == known


def _otherwise(dtype: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The same kind of contents in other shapes and types."""
    for axis, length in enumerate(values.shape):
        yield dtype, np.take(values, range(length - 1), axis)
        yield dtype, np.concatenate([values, np.take(values, [0], axis)], axis)
    flat = values.reshape(-1)
    yield from ((dtype, shape) for shape in (flat[:0], flat[None, :0], values[None], np.stack([values, values])))
    yield from ((kind, np.zeros(values.shape, stored)) for kind, stored in OTHER_TYPES if kind != dtype)


def _problem(checkpoint: Path) -> str:
    """Why the first module's weight cannot be had; nothing when it can."""
    reader = SourceReader()
    try:
        spec = decoded(open_checkpoint(checkpoint)).tensors.get(f"{FIRST}.weight")
        if spec is None or spec.encoding is None or spec.shape != MODULES[FIRST]:
            return f"{FIRST} is missing, no float or has another shape"  # the architecture's rules name it
        _rows(reader, spec, 0, spec.shape[0])
    except UnusableInputError as error:
        return error.message
    finally:
        reader.close()
    return ""


def test_stored_tensors_that_do_not_fit_are_named(name: str, tmp_path: Path) -> None:
    checkpoint = make_encoded(name, tmp_path)
    tensors = read_tensors(checkpoint)
    parts = [key for key in tensors if key.startswith(FIRST) and not key.endswith(ACTIVATIONS)]
    for number, key in enumerate(parts):
        for other in _otherwise(*tensors[key]):
            write_tensors(checkpoint, {**tensors, key: other})
            problem = _problem(checkpoint)
            # Some take scales of other types, or as many bytes under another name.
            may_pass = number or other[1].nbytes == tensors[key][1].nbytes
            assert FIRST in problem if problem else may_pass, (key, other[0], other[1].shape)


@pytest.mark.parametrize("suffix", ["weight", "weight_scale_inv"])
def test_a_half_alone_is_named(suffix: str, tmp_path: Path) -> None:
    checkpoint = make_encoded("fp8-block", tmp_path)
    tensors = read_tensors(checkpoint)
    tensors.pop(f"{FIRST}.{suffix}")
    write_tensors(checkpoint, tensors)
    with pytest.raises(UnusableInputError, match=rf"{FIRST}.weight( is F8_E4M3|_scale_inv)"):
        convert(checkpoint, tmp_path / "out.gguf", ConvertOptions(type="F32", verify=False))


def test_a_part_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    checkpoint = make_encoded(name, tmp_path)
    tensors = read_tensors(checkpoint)
    optional = (
        *ACTIVATIONS,
        "g_idx",
        "qzeros" if name == "awq" else "-",
        "weight_format",
        "weight_scale_2",
        "zero_point",
    )
    for key in [key for key in tensors if key.startswith(FIRST) and not key.endswith(optional)]:
        write_tensors(checkpoint, {k: v for k, v in tensors.items() if k != key})
        assert FIRST in _problem(checkpoint), key


@pytest.mark.parametrize(
    ("encoding", "suffix", "change", "what"),
    [
        ("fp8-block", "weight", 0x7F, "k_proj.weight has NaN in row 0"),
        ("fp8-block", "weight_scale_inv", np.nan, "k_proj.weight has NaN in row 0"),
        ("ct-int8", "weight_scale", np.inf, "k_proj.weight has "),
        ("ct-mxfp4", "weight_scale", 255, "k_proj.weight_scale has an infinite scale in row 0"),
        ("ct-nvfp4", "weight_global_scale", 0, "k_proj.weight has "),
        ("ct-pack4", "weight_shape", 0, "k_proj.weight_shape has the shape 0 x 256"),
        ("ct-pack4", "weight_shape", 1 << 62, "k_proj.weight_packed has the shape"),
        ("ct-pack4-order", "weight_g_idx", 4, "k_proj.weight_g_idx has group 4, but there are 4"),
        ("gptq4-order", "g_idx", 8, "k_proj.g_idx has group 8, but there are 8"),
        ("gptq4-order", "g_idx", -1, "k_proj.g_idx has group -1, but there are 8"),
        ("gptq4", "scales", np.inf, "k_proj.weight has "),
        ("awq", "scales", np.nan, "k_proj.weight has NaN"),
        ("bnb-nf4", "weight.quant_map", np.nan, "k_proj.weight has NaN"),
        ("bnb-nf4-nested", "weight.nested_absmax", np.inf, "k_proj.weight has "),
        ("bnb-int8", "SCB", np.nan, "k_proj.weight has NaN in row 0"),
        ("bnb-int8", "weight_format", 1, "k_proj.weight_format states a layout"),
        ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", 0, "quant_state.bitsandbytes__nf4: not valid JSON"),
    ],
)
def test_contents_that_cannot_be_are_named(
    encoding: str, suffix: str, change: float, what: str, tmp_path: Path
) -> None:
    checkpoint = make_encoded(encoding, tmp_path)
    tensors = read_tensors(checkpoint)
    dtype, values = tensors[f"{FIRST}.{suffix}"]
    values.reshape(-1)[0] = change
    write_tensors(checkpoint, {**tensors, f"{FIRST}.{suffix}": (dtype, values)})
    assert what in _problem(checkpoint)


@pytest.mark.parametrize(
    "state",
    [
        {"shape": None}, {"shape": [64]}, {"shape": [64, 257]}, {"shape": [0, 256]}, {"shape": [-64, -256]},
        {"shape": [1 << 40, 256]}, {"shape": "64"}, {"shape": [64.0, 256]}, {"blocksize": 0}, {"blocksize": 128},
        {"blocksize": "64"}, {"blocksize": 1 << 60}, {"nested_blocksize": 0}, {"nested_offset": None},
        {"nested_offset": float("nan")}, {"nested_offset": 10**400}, {"nested_offset": [0]},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_that_lies_is_refused(state: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = make_encoded("bnb-nf4-nested", tmp_path)
    tensors = read_tensors(checkpoint)
    key = f"{FIRST}.weight.quant_state.bitsandbytes__nf4"
    known = json.loads(tensors[key][1].tobytes())
    changed = np.frombuffer(json.dumps({**known, **state}).encode(), np.uint8)
    write_tensors(checkpoint, {**tensors, key: ("U8", changed)})
    assert FIRST in _problem(checkpoint)


def test_a_state_without_end_is_not_read(tmp_path: Path) -> None:
    checkpoint = make_encoded("bnb-nf4", tmp_path)
    key = f"{FIRST}.weight.quant_state.bitsandbytes__nf4"
    write_tensors(checkpoint, {**read_tensors(checkpoint), key: ("U8", np.zeros(1 << 17, np.uint8))})
    assert f"{key} has 131072 bytes" in _problem(checkpoint)


VALUES: list[Any] = [
    None,
    0,
    -1,
    10**400,
    1.5,
    float("nan"),
    "x",
    "(.*)*Q",
    [],
    [0, 0],
    [128, 1],
    [1 << 30, 1 << 30],
    {},
    {"a": {}},
    [None],
    True,
]


@pytest.mark.parametrize("encoding", ["fp8-block", "ct-mixed", "ct-float-block", "gptq4", "awq"])
def test_settings_of_any_kind_are_refused_or_do_no_harm(encoding: str, tmp_path: Path) -> None:
    checkpoint = make_encoded(encoding, tmp_path)
    settings = json.loads((checkpoint / "config.json").read_text("utf-8"))["quantization_config"]
    names = [*settings, "format", "checkpoint_format", "sparsity_config", "config_groups", "weight_block_size", "bits"]
    changes = [{**settings, key: value} for key in names for value in VALUES]
    for group, inside in settings.get("config_groups", {}).items():
        for key in ("num_bits", "block_structure", "strategy", "group_size"):
            for value in VALUES:
                weights = {**inside, "weights": {**inside["weights"], key: value}}
                changes.append({**settings, "config_groups": {**settings["config_groups"], group: weights}})
    refused = []
    for change in changes:
        change_json(checkpoint / "config.json", {"quantization_config": change})
        refused.append(bool(_problem(checkpoint)))
    assert any(refused)
    assert not all(refused)
