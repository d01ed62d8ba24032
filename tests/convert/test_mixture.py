"""The mixtures against llama.cpp's own: a dry run of its quantizer says which type it would give each tensor."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgeinfer.convert.file_types import FILE_TYPES, TENSOR_TYPES, FileType
from edgeinfer.convert.mixture import Choice, Overrides, assign, may_quantize, requires_imatrix
from edgeinfer.convert.mixture_rules import ModelFacts, category
from edgeinfer.convert.plan import file_order
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.native import library

QUANTIZED = {name: kind for name, kind in FILE_TYPES.items() if kind.default.is_quantized}
ROWS = 2  # the rules look at row lengths only


def _tensors(facts: ModelFacts, *, tied: bool, row: int, ffn: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes, row length first, in file order."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (row, ROWS), "output_norm.weight": (row,)}
    if not tied:
        shapes["output.weight"] = (row, ROWS)
    experts, suffix = ((facts.n_experts,), "_exps") if facts.n_experts else ((), "")
    for i in range(facts.n_layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{i}.{name}.weight"] = (row, ROWS)
        shapes[f"blk.{i}.attn_q.bias"] = shapes[f"blk.{i}.attn_norm.weight"] = (row,)
        for name, length in (("ffn_up", row), ("ffn_gate", row), ("ffn_down", ffn)):
            shapes[f"blk.{i}.{name}{suffix}.weight"] = (length, ROWS, *experts)
        if experts:
            shapes[f"blk.{i}.ffn_gate_inp.weight"] = (row, *experts)
    return dict(sorted(shapes.items(), key=lambda item: file_order(item[0])))


def _write(path: Path, facts: ModelFacts, shapes: dict[str, tuple[int, ...]]) -> None:
    writer = gguf.GGUFWriter(path, facts.architecture)
    writer.add_block_count(facts.n_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(facts.n_heads)
    writer.add_head_count_kv(facts.n_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(ROWS)
    if facts.n_experts:
        writer.add_expert_count(facts.n_experts)
        writer.add_expert_used_count(2)
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape[::-1], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def _log() -> Iterator[list[str]]:
    """What the library logs meanwhile."""
    pieces: list[str] = []
    callback = library.llama.llama_log_callback(lambda level, text, _: pieces.append(text.decode()))
    library.llama.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        yield pieces
    finally:
        library.llama.llama_log_set(library.log_callback, ctypes.c_void_p(0))


def _types_of_llama_cpp(path: Path, file_type: FileType, **settings: Any) -> dict[str, str]:
    params = library.llama.llama_model_quantize_default_params()
    params.ftype, params.dry_run, params.nthread = file_type.id, True, 1
    for name, value in settings.items():
        setattr(params, name, value)
    with _log() as pieces:
        failed = library.llama.llama_model_quantize(str(path).encode(), b"/nowhere", ctypes.byref(params))
    assert not failed
    lines = re.findall(r"\[ *\d+/ *\d+\] +(\S+) +- \[[^]]*\], type = +(\w+), (.*)", "".join(pieces))
    return {name: (re.search(r"\((\w+)\)", rest) or [0, before])[1].upper() for name, before, rest in lines}


def _our_types(
    shapes: dict[str, tuple[int, ...]], file_type: FileType, facts: ModelFacts, overrides: Overrides | None = None
) -> dict[str, str]:
    listed = [(name, shape, GGMLType.F32) for name, shape in shapes.items()]
    choices = assign(listed, file_type, facts, overrides or Overrides())
    return {name: choice.type.name for name, choice in zip(shapes, choices, strict=True)}


LLAMA = ModelFacts("llama", n_layers=24, n_heads=4, n_kv_heads=4)
MODELS = {
    "llama": (LLAMA, {}),
    "llama, untied": (LLAMA, {"tied": False}),
    "qwen2, 36 layers, heads shared by four": (ModelFacts("qwen2", 36, 8, 2), {"tied": False}),
    "one layer": (ModelFacts("llama", 1, 4, 4), {}),
    "seven layers": (ModelFacts("qwen2", 7, 4, 1), {}),
    "llama 70B": (ModelFacts("llama", 80, 64, 8), {"tied": False}),
    "llama of 80 layers, no heads shared": (ModelFacts("llama", 80, 4, 4), {}),
    "qwen2 72B": (ModelFacts("qwen2", 80, 64, 8), {"tied": False}),
    "mixtral": (ModelFacts("llama", 32, 32, 8, n_experts=8), {"tied": False}),
    "four experts": (ModelFacts("llama", 24, 4, 4, n_experts=4), {}),
    "rows for blocks of 32": (LLAMA, {"row": 96, "ffn": 160}),
    "rows for no blocks": (LLAMA, {"row": 100, "ffn": 256, "tied": False}),
    "only ffn_down divides": (LLAMA, {"row": 576, "ffn": 1536}),  # SmolLM2
}


@pytest.mark.parametrize("model", MODELS)
def test_every_type_is_llama_cpps(model: str, tmp_path: Path) -> None:
    facts, form = MODELS[model]
    shapes = _tensors(facts, **{"tied": True, "row": 256, "ffn": 256, **form})
    _write(tmp_path / "model.gguf", facts, shapes)
    for name, file_type in QUANTIZED.items():
        ours, theirs = _our_types(shapes, file_type, facts), _types_of_llama_cpp(tmp_path / "model.gguf", file_type)
        assert list(theirs) == list(shapes)
        assert {n: (ours[n], theirs[n]) for n in shapes if ours[n] != theirs[n]} == {}, name


@pytest.mark.parametrize("model", ["qwen2, 36 layers, heads shared by four", "llama, untied"])
def test_every_type_is_llama_cpps_with_an_importance_matrix(model: str, tmp_path: Path) -> None:
    facts, form = MODELS[model]
    shapes = _tensors(facts, **{"tied": True, "row": 256, "ffn": 256, **form})
    _write(tmp_path / "model.gguf", facts, shapes)
    values = (ctypes.c_float * 1)(1.0)
    matrix = (library.llama.llama_model_imatrix_data * 2)()  # ends with an entry without a name
    matrix[0].name, matrix[0].data, matrix[0].size = b"any", values, 1
    listed = [(name, shape, GGMLType.F32) for name, shape in shapes.items()]
    for name, file_type in QUANTIZED.items():
        theirs = _types_of_llama_cpp(tmp_path / "model.gguf", file_type, imatrix=matrix)
        choices = assign(listed, file_type, facts, Overrides(), has_imatrix=True)
        assert {n: c.type.name for n, c in zip(shapes, choices, strict=True)} == theirs, name


def test_overrides_are_llama_cpps(tmp_path: Path) -> None:
    shapes = _tensors(LLAMA, tied=False, row=256, ffn=160)
    _write(tmp_path / "model.gguf", LLAMA, shapes)
    for tied_head, settings, overrides in (
        (False, {"pure": True}, Overrides(pure=True)),
        (False, {"output_tensor_type": 8}, Overrides(output=GGMLType.Q8_0)),
        (False, {"token_embedding_type": 1}, Overrides(token_embedding=GGMLType.F16)),
        (True, {"output_tensor_type": 8}, Overrides(output=GGMLType.Q8_0)),
        (True, {"token_embedding_type": 1, "output_tensor_type": 8}, Overrides((), GGMLType.Q8_0, GGMLType.F16)),
        (True, {"pure": True, "output_tensor_type": 8}, Overrides(pure=True, output=GGMLType.Q8_0)),
    ):
        some = {name: shape for name, shape in shapes.items() if name != "output.weight" or not tied_head}
        _write(tmp_path / "model.gguf", LLAMA, some)
        for name in ("Q4_K_M", "Q4_0", "Q6_K"):
            theirs = _types_of_llama_cpp(tmp_path / "model.gguf", FILE_TYPES[name], **settings)
            assert _our_types(some, FILE_TYPES[name], LLAMA, overrides) == theirs, (name, settings)


def test_a_name_s_type_holds_whatever_the_mixture_says_and_does_not_count(tmp_path: Path) -> None:
    """As in llama.cpp, whose counters skip a tensor that the user decided."""
    shapes = _tensors(LLAMA, tied=True, row=256, ffn=256)
    listed = [(name, shape, GGMLType.F32) for name, shape in shapes.items()]
    overrides = Overrides(by_name=((re.compile(r"blk\.0\.attn_v"), GGMLType.Q5_0),))
    chosen = dict(zip(shapes, assign(listed, FILE_TYPES["Q4_K_S"], LLAMA, overrides), strict=True))
    assert chosen["blk.0.attn_v.weight"] == Choice(GGMLType.Q5_0)
    # The first four that the rules see: 1 to 4 instead of 0 to 3.
    assert [chosen[f"blk.{i}.attn_v.weight"].type.name for i in (1, 4, 5)] == ["Q5_K", "Q5_K", "Q4_K"]


def test_fallbacks_are_reported_and_can_be_refused() -> None:
    listed = [("blk.0.attn_q.weight", (96, 2), GGMLType.F32), ("blk.0.attn_k.weight", (100, 2), GGMLType.F32)]
    facts = ModelFacts("llama", 1, 4, 4)
    assert assign(listed, FILE_TYPES["Q4_K_M"], facts, Overrides()) == [
        Choice(GGMLType.Q5_0, fallback_from=GGMLType.Q4_K),
        Choice(GGMLType.F16, fallback_from=GGMLType.Q4_K),
    ]
    with pytest.raises(UnusableInputError, match=r"blk\.0\.attn_q\.weight"):
        assign(listed, FILE_TYPES["Q4_K_M"], facts, Overrides(allow_fallback=False))


def test_an_override_that_does_not_divide_is_an_error_not_a_fallback() -> None:
    listed = [("output.weight", (96, 2), GGMLType.F32)]
    with pytest.raises(UsageError, match=r"output\.weight"):
        assign(listed, FILE_TYPES["Q8_0"], LLAMA, Overrides(output=GGMLType.Q6_K))


def test_vectors_and_biases_and_norms_are_never_quantized() -> None:
    assert not may_quantize("blk.0.attn_q.bias", (256, 2))
    assert not may_quantize("blk.0.attn_norm.weight", (256, 2))
    assert not may_quantize("rope_freqs.weight", (32,))
    assert may_quantize("blk.0.ffn_up.weight", (256, 2))
    assert category("blk.0.ffn_up_exps.weight") == "ffn_up"
    assert category("output_norm.weight") == "other"


@pytest.mark.parametrize("kind", TENSOR_TYPES, ids=lambda t: t.name)
def test_nothing_that_the_quantizer_cannot_make_alone_gets_through(kind: GGMLType) -> None:
    """ggml_quantize_chunk ends the process for these types without an importance matrix."""
    needs = bool(ctypes.CDLL(_ggml_base()).ggml_quantize_requires_imatrix(int(kind)) & 0xFF)
    for name in ("token_embd.weight", "output.weight", "blk.0.ffn_up.weight"):
        assert requires_imatrix(name, kind, FILE_TYPES["Q8_0"]) or not needs


def _ggml_base() -> str:
    from edgeinfer.native.quantize import _ggml

    return str(_ggml()._name)
