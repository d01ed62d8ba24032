"""A GGUF file as the source: the output is what llama_model_quantize of the same library makes, to the byte."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import llama_config, write_checkpoint
from ggufs import write_gguf

from edgeinfer.api.convert import convert, plan_conversion
from edgeinfer.convert.file_types import FILE_TYPES
from edgeinfer.errors import CheckFailedError, NotFoundError, UnusableInputError, UsageError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.native.library import llama
from edgeinfer.options import ConvertOptions

# Rows of 64, which fall back, and of 256, which don't.
SMALL, LARGE = llama_config(), llama_config(hidden_size=256, intermediate_size=256, num_hidden_layers=8)


def _reference(source: Path, target: Path, file_type: str) -> bytes:
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = FILE_TYPES[file_type].id, True, 2
    assert llama.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params)) == 0
    return target.read_bytes()


def _ours(source: Path, target: Path, file_type: str, **options: Any) -> bytes:
    settings = ConvertOptions(type=file_type, **{"allow_requantize": True, "verify": False, **options})
    return Path(convert(source, target, settings).output).read_bytes()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    found = {}
    for size, config in (("small", SMALL), ("large", LARGE)):
        checkpoint = write_checkpoint(folder / size, config, dtype="F32")
        for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_K_M", "Q4_1"):
            target = folder / f"{size}-{kind}.gguf"
            convert(checkpoint, target, ConvertOptions(type=kind, verify=False))
            found[f"{size}-{kind}"] = target
    return found


TARGETS = ("F32", "F16", "BF16", "Q8_0", "Q4_K_M", "Q3_K_S", "Q5_1", "IQ4_XS", "TQ1_0")
SLOWLY = ("IQ4_XS",)
"""Two seconds: of one source of each kind."""


@pytest.mark.parametrize(
    ("size", "source", "target"),
    [
        (size, source, target)
        for size in ("small", "large")
        for source in ("F32", "F16", "BF16", "Q8_0", "Q4_K_M", "Q4_1")
        for target in TARGETS
        if size == "small" or target not in SLOWLY or source in ("F32", "Q8_0")
    ],
)
def test_the_file_is_llama_quantize_s_to_the_byte(
    sources: dict[str, Path], size: str, source: str, target: str, tmp_path: Path
) -> None:
    path = sources[f"{size}-{source}"]
    assert _ours(path, tmp_path / "a.gguf", target) == _reference(path, tmp_path / "b.gguf", target)


def test_a_type_that_looks_up_a_grid_and_needs_no_matrix(sources: dict[str, Path], tmp_path: Path) -> None:
    path = sources["large-F32"]
    assert _ours(path, tmp_path / "a.gguf", "IQ3_S") == _reference(path, tmp_path / "b.gguf", "IQ3_S")


def _expert_model(path: Path) -> Path:
    """Stacks of four experts, and tensors that are never quantized, some with trailing dimensions of 1."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 2), (writer.add_context_length, 128), (writer.add_embedding_length, 256),
        (writer.add_feed_forward_length, 256), (writer.add_head_count, 8), (writer.add_head_count_kv, 2),
        (writer.add_expert_count, 4), (writer.add_expert_used_count, 2),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_vocab_size, 64),
    ):  # fmt: skip
        add(value)  # type: ignore[operator]
    writer.add_float64("test.double", 0.1)
    writer.add_int64("test.negative", -(2**40))
    writer.add_array("test.flags", [True, False])
    writer.add_array("test.texts", ["ä", "", "x"])
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (64, 256), "output_norm.weight": (256,)}
    for i in (1, 0):  # the quantizer sorts them
        at = f"blk.{i}"
        shapes |= {f"{at}.ffn_down_exps.weight": (4, 256, 256), f"{at}.ffn_gate_inp.weight": (4, 256)}
        shapes |= {f"{at}.attn_v.weight": (64, 256), f"{at}.attn_q.weight": (256, 256), f"{at}.odd.weight": (1, 1, 32)}
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("target", ["Q4_K_M", "Q2_K", "Q8_0", "MXFP4_MOE", "F16"])
def test_experts_odd_values_and_order(tmp_path: Path, target: str) -> None:
    path = _expert_model(tmp_path / "experts.gguf")
    assert _ours(path, tmp_path / "a.gguf", target) == _reference(path, tmp_path / "b.gguf", target)


@pytest.mark.model
@pytest.mark.parametrize("target", ["Q8_0", "Q4_K_M", "F16"])
def test_a_real_model(smollm2_gguf: Path, tmp_path: Path, target: str) -> None:
    ours = _ours(smollm2_gguf, tmp_path / "a.gguf", target, verify=True)
    assert ours == _reference(smollm2_gguf, tmp_path / "b.gguf", target)


def test_a_split_source_gives_what_the_whole_one_gives(sources: dict[str, Path], tmp_path: Path) -> None:
    whole = sources["large-F32"]
    options = ConvertOptions(type="F32", verify=False, split_max_size=3_000_000)
    first = Path(convert(whole, tmp_path / "split.gguf", options).output)
    assert len(list(tmp_path.iterdir())) > 3
    assert _ours(first, tmp_path / "a.gguf", "Q4_K_M") == _ours(whole, tmp_path / "b.gguf", "Q4_K_M")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("m-F32.gguf", "m-Q8_0.gguf"),
        ("m.q4_k_m.gguf", "m-Q8_0.gguf"),
        ("m.gguf", "m-Q8_0.gguf"),
        ("IQ4_NL.gguf", "IQ4_NL-Q8_0.gguf"),
    ],
)
def test_the_name_of_the_output(
    sources: dict[str, Path], tmp_path: Path, name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).symlink_to(sources["small-F32"])
    monkeypatch.chdir(tmp_path)
    assert plan_conversion(name, options=ConvertOptions(type="Q8_0")).output == Path(expected)


def test_what_is_quantized_is_not_quantized_again_unasked(sources: dict[str, Path]) -> None:
    with pytest.raises(UsageError) as caught:
        plan_conversion(sources["large-Q8_0"], options=ConvertOptions(type="Q4_0"))
    assert "token_embd.weight is quantized already (Q8_0)" in caught.value.message
    assert "--allow-requantize" in caught.value.hint
    plan_conversion(sources["large-F16"], options=ConvertOptions(type="Q4_0"))
    plan_conversion(sources["large-Q8_0"], options=ConvertOptions(type="Q8_0"))  # everything keeps its type


def test_a_pre_tokenizer_is_refused_where_it_would_have_no_effect(sources: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="--pre has no effect"):
        plan_conversion(sources["small-F32"], options=ConvertOptions(pre="llama-bpe"))
    with pytest.raises(UsageError, match="--pre without a name"):
        ConvertOptions(pre="")


def test_the_source_is_never_overwritten(sources: dict[str, Path]) -> None:
    before = sources["small-F32"].read_bytes()
    with pytest.raises(UsageError, match="an input of this very command"):
        convert(sources["small-F32"], sources["small-F32"], ConvertOptions(type="Q8_0", overwrite=True))
    assert sources["small-F32"].read_bytes() == before


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.type": "adapter"}, "an adapter, not a model"),
        ({"split.count": 2}, "not named like one"),
        ({"llama.block_count": 100_000}, "100000 layers"),
    ],
)
def test_what_is_no_model(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", extra=extra)
    with pytest.raises(UnusableInputError, match=message):
        plan_conversion(path, options=ConvertOptions(type="Q8_0"))


def test_files_that_are_not_gguf_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"hello")
    with pytest.raises(UnusableInputError, match="not a GGUF file"):
        plan_conversion(tmp_path / "a.gguf")
    with pytest.raises(NotFoundError):
        plan_conversion(tmp_path / "b.gguf")


@pytest.mark.parametrize(("kind", "bits"), [("F32", b"\x00\x00\xc0\x7f"), ("Q8_0", b"\x00\x7e")])
def test_nan_is_found_and_named(sources: dict[str, Path], tmp_path: Path, kind: str, bits: bytes) -> None:
    path = tmp_path / "nan.gguf"
    path.write_bytes(sources[f"large-{kind}"].read_bytes())
    info = next(t for t in read_header(path).tensors if t.name == "blk.1.attn_q.weight")
    with open(path, "r+b") as file:
        file.seek(info.offset + info.type.block_nbytes * 16)
        file.write(bits)
    with pytest.raises(UnusableInputError, match=r"blk\.1\.attn_q\.weight has"):
        _ours(path, tmp_path / "a.gguf", "Q4_0")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["nan.gguf"]


def test_a_source_that_the_library_cannot_run_is_not_called_verified(tmp_path: Path) -> None:
    path = _expert_model(tmp_path / "experts.gguf")  # without a vocabulary
    with pytest.raises(CheckFailedError) as caught:
        _ours(path, tmp_path / "a.gguf", "Q8_0", verify=True)
    assert "source" in caught.value.hint
    assert not (tmp_path / "a.gguf").exists()


def test_another_alignment(sources: dict[str, Path], tmp_path: Path) -> None:
    """The library copies the number and writes by its own 32: a file that it cannot read itself."""
    reader = gguf.GGUFReader(sources["small-F32"])
    writer = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
    writer.add_custom_alignment(128)
    for key in ("block_count", "attention.head_count", "attention.head_count_kv"):
        writer.add_uint32(f"llama.{key}", int(reader.fields[f"llama.{key}"].parts[-1][0]))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _ours(tmp_path / "wide.gguf", tmp_path / "a.gguf", "Q8_0")
    expected = read_header(Path(convert(sources["small-F32"], tmp_path / "b.gguf", ConvertOptions("Q8_0")).output))
    ours = read_header(tmp_path / "a.gguf")
    assert ours.alignment == 32
    assert ours.path.read_bytes()[ours.data_offset :] == expected.path.read_bytes()[expected.data_offset :]
