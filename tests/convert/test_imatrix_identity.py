"""With an importance matrix the tensors are those of `llama_model_quantize` with the same one, to the byte.

The library itself is asked, here and now, on a small checkpoint; golden_imatrix.json has the same for larger ones,
made by scripts/golden_imatrix.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Tensors, llama_config, random_tensors, write_checkpoint, write_safetensors
from golden_conversions import CHECKPOINTS, summarize
from golden_imatrix import GOLDEN, TYPES, prepare, quantize_with_matrix, random_matrix
from numpy.typing import NDArray
from shared_work import shared_by_conversions

from edgeinfer.api.convert import convert
from edgeinfer.convert import stream
from edgeinfer.convert.checkpoint import TensorSpec
from edgeinfer.convert.file_types import FILE_TYPES
from edgeinfer.convert.imatrix import load_imatrix, save_imatrix
from edgeinfer.convert.plan import ConvertPlan
from edgeinfer.convert.resolve import PartPlan, TensorPlan
from edgeinfer.convert.stream import write
from edgeinfer.errors import UnusableInputError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import read_header
from edgeinfer.native.quantize import GGMLQuantizer
from edgeinfer.options import ConvertOptions
from edgeinfer.types import Importance

# Rows of attn_output fall back. What depends on a layer's number is the business of test_mixture.py.
CONFIG = llama_config(hidden_size=256, intermediate_size=256, head_dim=16, num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("identity")
    write_checkpoint(path / "model", CONFIG)
    convert(path / "model", path / "bf16.gguf", ConvertOptions(type="BF16", verify=False))
    save_imatrix(path / "m.gguf", random_matrix(read_header(path / "bf16.gguf")), ["text"], 1, 512)
    return path


SLOW = ("IQ1_S", "IQ1_M")
"""The library takes eleven seconds to make their grid: `make conformance` runs them."""
SLOW_IF_LARGE = ("IQ3_XXS", "IQ4_NL")
"""A matter of minutes: there, too."""
QUANTIZED = [t.name for t in FILE_TYPES.values() if t.default.is_quantized]


@pytest.mark.parametrize("name", [pytest.param(t, marks=[pytest.mark.slow] * (t in SLOW)) for t in QUANTIZED])
def test_every_type_is_llama_cpps_to_the_byte(name: str, folder: Path, tmp_path: Path) -> None:
    matrix = load_imatrix(folder / "m.gguf")
    quantize_with_matrix(folder / "bf16.gguf", tmp_path / "theirs.gguf", FILE_TYPES[name], matrix)
    convert(
        folder / "model", tmp_path / "ours.gguf", ConvertOptions(type=name, imatrix=folder / "m.gguf", verify=False)
    )
    ours, theirs = read_header(tmp_path / "ours.gguf"), read_header(tmp_path / "theirs.gguf")
    assert summarize(ours) == summarize(theirs)


# The real model too, if one asks for what takes long: rows that fall back have the small one, too.
@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "smollm2")) for name in CHECKPOINTS]
)
def larger(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, Path]]:
    """Name, checkpoint and matrix."""
    with shared_by_conversions():
        checkpoint, _, matrix = prepare(request.param, tmp_path_factory.mktemp("larger"))
        yield request.param, checkpoint, matrix


@pytest.mark.model
@pytest.mark.parametrize("type_name", [pytest.param(t, marks=[pytest.mark.slow] * (t in SLOW_IF_LARGE)) for t in TYPES])
def test_larger_models_are_llama_cpps_to_the_byte(
    larger: tuple[str, Path, Path], type_name: str, tmp_path: Path
) -> None:
    name, checkpoint, matrix = larger
    convert(checkpoint, tmp_path / "out.gguf", ConvertOptions(type=type_name, imatrix=matrix, verify=False))
    golden = json.loads(GOLDEN.read_text("utf-8"))["checkpoints"]
    assert summarize(read_header(tmp_path / "out.gguf")) == golden[name][type_name]


@pytest.mark.parametrize("type_name", ["IQ4_NL", "IQ2_XXS"])
def test_weights_that_would_make_the_library_end_the_process_are_refused(
    type_name: str, folder: Path, tmp_path: Path
) -> None:
    tensors = random_tensors(CONFIG)
    tensors["model.layers.1.mlp.up_proj.weight"][7, 3] = 1e15
    write_checkpoint(tmp_path / "model", CONFIG, tensors, dtype="F32")
    options = ConvertOptions(type=type_name, imatrix=folder / "m.gguf")
    with pytest.raises(UnusableInputError, match=r"blk\.1\.ffn_up\.weight has values up to 1e\+15 near row 7"):
        convert(tmp_path / "model", tmp_path / "out.gguf", options)


def _experts(tmp_path: Path, tensors: Tensors) -> dict[str, TensorSpec]:
    path = write_safetensors(tmp_path / "x.safetensors", tensors, "F32")
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    specs, offset = {}, start
    for name, values in tensors.items():
        specs[name] = TensorSpec(name, values.shape, "F32", path, offset, values.nbytes)
        offset += values.nbytes
    return specs


@pytest.mark.parametrize("stacked", [True, False], ids=["one source", "a source per expert"])
@pytest.mark.parametrize("slab_elements", [256, 1000, 1 << 20])
def test_each_expert_of_a_stack_is_quantized_with_its_own_weights(
    stacked: bool, slab_elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SLAB_ELEMENTS", slab_elements)
    n_experts, n_rows, length = 3, 5, 256
    rng = np.random.default_rng(0)
    values = rng.standard_normal((n_experts, n_rows, length), np.float32)
    importance = Importance(rng.random(n_experts * length, np.float32), np.array([2, 0, 5], np.float32))
    sources: Tensors = {"all": values} if stacked else {str(i): values[i] for i in range(n_experts)}
    parts = tuple(
        PartPlan(spec, 0, int(np.prod(spec.shape[:-1])), spec.shape[-1], None)
        for spec in _experts(tmp_path, sources).values()
    )
    tensor = TensorPlan("blk.0.x.weight", (length, n_rows, n_experts), GGMLType.IQ2_XXS, parts, importance=importance)
    plan = ConvertPlan("llama", FILE_TYPES["IQ2_XXS"], {"general.type": "model"}, (tensor,))
    write(plan, tmp_path / "out.gguf", GGMLQuantizer(), 2, lambda _: None)
    info = read_header(tmp_path / "out.gguf").tensors[0]
    written = (tmp_path / "out.gguf").read_bytes()[info.offset :][: info.nbytes]
    assert written == _quantized_one_by_one(values, importance)


def _quantized_one_by_one(values: NDArray[np.float32], importance: Importance) -> bytes:
    n_experts, n_rows, length = values.shape
    sums = importance.sums.reshape(n_experts, length)
    out = np.empty(n_rows * GGMLType.IQ2_XXS.row_nbytes(length), np.uint8)
    found = b""
    for expert, count in enumerate(importance.counts):
        weights = sums[expert] / count if count else np.ones(length, np.float32)
        GGMLQuantizer().quantize(GGMLType.IQ2_XXS, values[expert], out, weights)
        found += out.tobytes()
    return found


def test_weights_that_do_not_fit_never_reach_the_library() -> None:
    rows, out = np.ones((1, 256), np.float32), np.empty(66, np.uint8)
    for weights in (None, np.ones(255, np.float32), np.ones(256), np.ones(512, np.float32)[::2]):
        with pytest.raises(ValueError, match="weights"):
            GGMLQuantizer().quantize(GGMLType.IQ2_XXS, rows, out, weights)


def test_random_tensors_are_not_the_same_with_and_without() -> None:
    """Otherwise the tests above would not see whether the weights are used."""
    rows = random_tensors(CONFIG)["model.layers.0.self_attn.q_proj.weight"]
    plain = np.empty(len(rows) * GGMLType.Q4_K.row_nbytes(256), np.uint8)
    weighted = plain.copy()
    GGMLQuantizer().quantize(GGMLType.Q4_K, rows, plain)
    GGMLQuantizer().quantize(GGMLType.Q4_K, rows, weighted, np.linspace(0, 1, 256, dtype=np.float32))
    assert plain.tobytes() != weighted.tobytes()
