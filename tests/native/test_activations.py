"""Sums of squared activations: held against the first layer computed here, and against what routing must add up to."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import TEXT, llama_config, random_tensors, write_checkpoint
from numpy.typing import NDArray

from edgeinfer.api.convert import convert
from edgeinfer.api.imatrix import imatrix
from edgeinfer.convert.imatrix import load_imatrix
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.native.model import NativeModel
from edgeinfer.native.tensors import prove_layout
from edgeinfer.options import ConvertOptions
from edgeinfer.runtime import passages
from edgeinfer.types import Importance, Tokens

CTX_SIZE, CHUNKS = 48, 3
N_EXPERTS, N_USED = 4, 2
CONFIG = llama_config()
HIDDEN, FFN, EPS = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["rms_norm_eps"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("activations")
    tensors = random_tensors(CONFIG)
    rng = np.random.default_rng(1)
    for name in tensors:
        if "norm" in name:
            tensors[name] = 1 + rng.random(HIDDEN, np.float32)
    write_checkpoint(path / "model", CONFIG, tensors, dtype="F32")
    convert(path / "model", path / "dense.gguf", ConvertOptions(type="F32", verify=False))
    _write_experts(path / "dense.gguf", path / "experts.gguf")
    (path / "text.txt").write_text("\n".join(TEXT) * 12, "utf-8")
    return path


def _write_experts(source: Path, target: Path) -> None:
    """The same model with its feed-forward part replaced by experts."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    writer.add_expert_count(N_EXPERTS)
    writer.add_expert_used_count(N_USED)
    rng = np.random.default_rng(2)
    for tensor in reader.tensors:
        if "ffn_" not in tensor.name or "norm" in tensor.name:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        stack = rng.standard_normal((N_EXPERTS, *tensor.data.shape), np.float32) * np.float32(0.3)
        writer.add_tensor(tensor.name.replace(".weight", "_exps.weight"), stack)
        if "ffn_up" in tensor.name:
            gate = rng.standard_normal((N_EXPERTS, HIDDEN), np.float32)
            writer.add_tensor(tensor.name.replace("ffn_up", "ffn_gate_inp"), gate)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _computed(folder: Path, model: str) -> dict[str, Importance]:
    output = folder / f"{model}.imatrix.gguf"
    imatrix(folder / model, folder / "text.txt", output, ctx_size=CTX_SIZE, chunks=CHUNKS, overwrite=True)
    return dict(load_imatrix(output).entries)


def _passages(folder: Path) -> list[Tokens]:
    with NativeModel(folder / "dense.gguf") as model:
        return passages.cut(model.vocabulary, (folder / "text.txt").read_text("utf-8"), CTX_SIZE, CHUNKS)


def _attention_inputs(folder: Path) -> NDArray[np.float64]:
    """What the first layer's queries are computed from: the normalized embeddings of all tokens."""
    tensors = {t.name: t.data for t in gguf.GGUFReader(folder / "dense.gguf").tensors}
    rows = tensors["token_embd.weight"][np.concatenate(_passages(folder))].astype(np.float64)
    return rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + EPS) * tensors["blk.0.attn_norm.weight"]


def test_the_structure_of_tensors_is_the_librarys() -> None:
    assert prove_layout()[0] > 0


def test_the_first_layers_inputs_are_summed_up(folder: Path) -> None:
    found = _computed(folder, "dense.gguf")
    expected = (_attention_inputs(folder) ** 2).sum(axis=0)
    for name in ("attn_q", "attn_k", "attn_v"):
        entry = found[f"blk.0.{name}.weight"]
        np.testing.assert_allclose(entry.sums, expected, rtol=1e-5)
        assert entry.counts.tolist() == [CTX_SIZE * CHUNKS]


def test_every_matrix_of_every_layer_is_there_and_nothing_else(folder: Path) -> None:
    matrices = ("attn_k", "attn_output", "attn_q", "attn_v", "ffn_down", "ffn_gate", "ffn_up")
    found = _computed(folder, "dense.gguf")
    assert sorted(found) == [f"blk.{i}.{name}.weight" for i in range(2) for name in matrices]
    for name, entry in found.items():
        assert entry.sums.size == (FFN if "down" in name else HIDDEN)
        assert entry.counts.tolist() == [CTX_SIZE * CHUNKS]
        assert entry.sums.min() > 0
    for i in range(2):
        assert found[f"blk.{i}.ffn_up.weight"].sums.tolist() == found[f"blk.{i}.ffn_gate.weight"].sums.tolist()


def test_experts_are_told_apart_and_add_up(folder: Path) -> None:
    """The router sees every token once, the experts together see each as often as there are used ones."""
    found = _computed(folder, "experts.gguf")
    for i in range(2):
        router = found[f"blk.{i}.ffn_gate_inp.weight"]
        assert router.counts.tolist() == [CTX_SIZE * CHUNKS]
        for name, length in (("ffn_gate_exps", HIDDEN), ("ffn_up_exps", HIDDEN), ("ffn_down_exps", FFN)):
            entry = found[f"blk.{i}.{name}.weight"]
            assert entry.counts.sum() == N_USED * CTX_SIZE * CHUNKS
            assert entry.counts.tolist() == found[f"blk.{i}.ffn_up_exps.weight"].counts.tolist()
            sums = entry.sums.reshape(N_EXPERTS, length)
            assert len({tuple(row) for row in sums.tolist()}) == N_EXPERTS
            if length == HIDDEN:
                np.testing.assert_allclose(sums.sum(axis=0), N_USED * router.sums, rtol=1e-5)


def test_a_computed_matrix_fits_the_model(folder: Path, tmp_path: Path) -> None:
    text = folder / "text.txt"
    options = ConvertOptions(type="Q4_0", calibrate=text, verify=False)
    converted = convert(folder / "model", tmp_path / "out.gguf", options)
    metadata = read_header(tmp_path / "out.gguf").metadata
    assert converted.output == str(tmp_path / "out.gguf")
    assert metadata["quantize.imatrix.file"] == "text.imatrix.gguf"
    assert metadata["quantize.imatrix.dataset"] == "text.txt"
    assert metadata["quantize.imatrix.entries_count"] == 14
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_nothing_stays_behind_when_calibration_fails(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.", "utf-8")
    options = ConvertOptions(type="Q4_0", calibrate=tmp_path / "short.txt", verify=False)
    with pytest.raises(UnusableInputError, match="1024 are needed"):
        convert(folder / "model", tmp_path / "out.gguf", options)
    (tmp_path / "out.gguf").write_bytes(b"")
    with pytest.raises(UsageError, match="exists already"):
        convert(folder / "model", tmp_path / "out.gguf", options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.gguf", "short.txt"]


def test_activations_that_are_not_finite_are_an_error_not_a_matrix(folder: Path, tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    tensors["model.layers.1.input_layernorm.weight"] = np.full(HIDDEN, 3e38, np.float32)
    write_checkpoint(tmp_path / "model", CONFIG, tensors, dtype="F32")
    convert(tmp_path / "model", tmp_path / "broken.gguf", ConvertOptions(type="F32", verify=False))
    with pytest.raises(UnusableInputError, match=r"not finite"):
        imatrix(tmp_path / "broken.gguf", folder / "text.txt", tmp_path / "m.gguf", ctx_size=CTX_SIZE)
    assert not (tmp_path / "m.gguf").exists()
