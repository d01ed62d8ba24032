"""Importance matrices: both formats read, every damage refused, a matrix of another model not used."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import llama_config, write_checkpoint
from numpy.typing import NDArray

from edgeinfer.api.vocabulary import open_vocabulary
from edgeinfer.convert.imatrix import load_imatrix, save_imatrix
from edgeinfer.convert.pipeline import Planned, prepare
from edgeinfer.errors import EdgeinferError, NotFoundError, UnusableInputError, UsageError
from edgeinfer.options import ConvertOptions
from edgeinfer.types import Importance

F32 = np.float32
Entries = dict[str, tuple[Any, Any]]
ENTRIES: Entries = {"blk.0.ffn_up.weight": ([2.0, 4.0, 6.0], [2.0]), "blk.1.x.weight": ([1.0, 2, 3, 4], [2.0, 0.0])}


def write_gguf(path: Path, entries: Entries, *, datasets: list[str] | None = None, chunks: int = 3) -> Path:
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", datasets or ["/home/somebody/text.txt", "other.txt"])
    writer.add_uint32("imatrix.chunk_count", chunks)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (sums, counts) in entries.items():
        if sums is not None:
            writer.add_tensor(f"{name}.in_sum2", np.asarray(sums, getattr(sums, "dtype", F32)))
        if counts is not None:
            writer.add_tensor(f"{name}.counts", np.asarray(counts, F32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def legacy(entries: dict[str, tuple[int, list[float]]], dataset: bytes | None = b"C:\\texts\\t.txt") -> bytes:
    parts = [struct.pack("<i", len(entries))]
    for name, (calls, values) in entries.items():
        parts.append(struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values)))
        parts.append(np.array(values, "<f4").tobytes())
    tail = b"" if dataset is None else struct.pack("<ii", 7, len(dataset)) + dataset
    return b"".join(parts) + tail


def test_gguf_gives_mean_squares_and_ones_for_what_was_never_used(tmp_path: Path) -> None:
    matrix = load_imatrix(write_gguf(tmp_path / "m.gguf", ENTRIES))
    assert matrix.entries["blk.0.ffn_up.weight"].weights(0, 3).tolist() == [1, 2, 3]
    stacked = matrix.entries["blk.1.x.weight"]
    assert stacked.weights(0, 2).tolist() == [0.5, 1]
    assert stacked.weights(1, 2).tolist() == [1, 1]
    assert matrix.metadata() == {
        "quantize.imatrix.file": "m.gguf",
        "quantize.imatrix.dataset": "text.txt",
        "quantize.imatrix.entries_count": 2,
        "quantize.imatrix.chunks_count": 3,
    }


@pytest.mark.parametrize("dataset", [b"C:\\texts\\t.txt", b"", None])
def test_legacy_values_are_divided_by_the_number_of_calls(tmp_path: Path, dataset: bytes | None) -> None:
    path = tmp_path / "m.dat"
    path.write_bytes(legacy({"a.weight": (4, [2.0, 6.0]), "odd": (0, [5.0])}, dataset))
    matrix = load_imatrix(path)
    assert matrix.entries["a.weight"].weights(0, 2).tolist() == [0.5, 1.5]
    assert matrix.entries["odd"].weights(0, 1).tolist() == [5]
    assert matrix.datasets == (("C:\\texts\\t.txt",) if dataset else ())
    assert matrix.metadata().get("quantize.imatrix.dataset") == ("t.txt" if dataset else None)
    assert matrix.metadata().get("quantize.imatrix.chunks_count") == (None if dataset is None else 7)


def test_what_is_written_is_what_an_independent_reader_finds(tmp_path: Path) -> None:
    entries = {
        "blk.1.up.weight": Importance(np.array([1, 2], F32), np.array([4], F32)),
        "blk.0.exps.weight": Importance(np.arange(6, dtype=F32), np.array([1, 0, 2], F32)),
    }
    path = tmp_path / "m.gguf"
    save_imatrix(path, entries, ["t.txt"], 9, 256)
    reader = gguf.GGUFReader(path)
    assert [(t.name, t.shape.tolist(), t.data.ravel().tolist()) for t in reader.tensors] == [
        ("blk.0.exps.weight.in_sum2", [2, 3], [0, 1, 2, 3, 4, 5]),
        ("blk.0.exps.weight.counts", [1, 3], [1, 0, 2]),
        ("blk.1.up.weight.in_sum2", [2], [1, 2]),
        ("blk.1.up.weight.counts", [1], [4]),
    ]
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["t.txt"]
    assert reader.fields["imatrix.chunk_count"].contents() == 9
    assert reader.fields["imatrix.chunk_size"].contents() == 256
    assert load_imatrix(path).entries["blk.0.exps.weight"].weights(2, 2).tolist() == [2, 2.5]


def test_long_names_are_cut_as_llama_quantize_cuts_them(tmp_path: Path) -> None:
    matrix = load_imatrix(write_gguf(tmp_path / "m.gguf", ENTRIES, datasets=["/x/" + "ä" * 100]))
    assert matrix.metadata()["quantize.imatrix.dataset"] == "ä" * 63


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("where", ["sums", "counts"])
def test_values_that_cannot_be_are_refused_by_name(tmp_path: Path, value: float, where: str) -> None:
    bad = ([1.0, value], [1.0]) if where == "sums" else ([1.0, 1.0], [value])
    path = write_gguf(tmp_path / "m.gguf", {**ENTRIES, "blk.2.bad.weight": bad})
    with pytest.raises(UnusableInputError, match=r"blk\.2\.bad\.weight"):
        load_imatrix(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_legacy_values_that_cannot_be_are_refused(tmp_path: Path, value: float) -> None:
    path = tmp_path / "m.dat"
    path.write_bytes(legacy({"bad": (1, [1.0, value])}))
    with pytest.raises(UnusableInputError, match="bad"):
        load_imatrix(path)


@pytest.mark.parametrize(
    "entry",
    [([1.0], None), ([1.0, 2.0, 3.0], [1.0, 1.0]), (np.ones(4, np.float16), [1.0]), ([1e20], [1.0])],
    ids=["no counts", "odd counts", "F16", "overflow"],
)
def test_sums_and_counts_that_do_not_fit_are_refused(tmp_path: Path, entry: tuple[Any, Any]) -> None:
    with pytest.raises(UnusableInputError, match="name"):
        load_imatrix(write_gguf(tmp_path / "m.gguf", {"name": entry}))


def test_a_model_is_no_matrix(tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match="not an importance matrix"):
        load_imatrix(write_gguf(tmp_path / "m.gguf", {"blk.0.weight": (None, [1.0])}))


def test_a_legacy_file_may_end_nowhere_but_at_its_ends(tmp_path: Path) -> None:
    data, path = legacy({"a.weight": (4, [2.0, 6.0]), "b": (1, [5.0])}), tmp_path / "m.dat"
    sound = []
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        try:
            load_imatrix(path)
            sound.append(length)
        except UnusableInputError:
            pass
    assert sound == [len(data) - 8 - len("C:\\texts\\t.txt"), len(data)]


@pytest.mark.parametrize("position", [0, 4, 8 + len("a.weight"), 12 + len("a.weight")])
@pytest.mark.parametrize("value", [2**31 - 1, -1, -(2**31)])
def test_absurd_lengths_of_a_legacy_file_are_refused_before_they_are_used(
    tmp_path: Path, position: int, value: int
) -> None:
    data, path = bytearray(legacy({"a.weight": (4, [2.0, 6.0])})), tmp_path / "m.dat"
    data[position : position + 4] = struct.pack("<i", value)
    path.write_bytes(data)
    if position == 8 + len("a.weight"):  # the number of calls: one below 1 stands for 1, as in llama.cpp
        assert load_imatrix(path).entries["a.weight"].counts[0] == max(value, 1)
        return
    with pytest.raises(UnusableInputError):
        load_imatrix(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        load_imatrix(tmp_path / "none.gguf")
    with pytest.raises(UnusableInputError):
        load_imatrix(tmp_path)


# ---- in a plan -------------------------------------------------------------------------------------------------------

CONFIG = llama_config(hidden_size=256, intermediate_size=512)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("imatrix") / "model", CONFIG)


def _layer_entries() -> Entries:
    rows = {"attn_q": 256, "attn_k": 256, "attn_v": 256, "attn_output": 256, "ffn_gate": 256, "ffn_up": 256}
    names = {f"blk.{i}.{name}.weight": length for i in range(2) for name, length in {**rows, "ffn_down": 512}.items()}
    return {name: (_values(length), [3.0]) for name, length in names.items()}


def _values(length: int) -> NDArray[np.float32]:
    return np.linspace(1, 2, length, dtype=F32)


def _plan(checkpoint: Path, matrix: Path | None, type_: str = "IQ2_XXS", **options: Any) -> Planned:
    return prepare(checkpoint, None, ConvertOptions(type=type_, imatrix=matrix, **options), open_vocabulary)


def _refused(checkpoint: Path, matrix: Path | None, kind: type[EdgeinferError], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        _plan(checkpoint, matrix, **options)
    return caught.value.message


def test_every_tensor_of_the_layers_gets_its_weights(checkpoint: Path, tmp_path: Path) -> None:
    plan = _plan(checkpoint, write_gguf(tmp_path / "m.gguf", _layer_entries())).plan
    weighted = {t.name for t in plan.tensors if t.importance is not None}
    assert weighted == _layer_entries().keys()
    assert plan.unweighted == ()
    assert list(plan.metadata)[-5:] == [
        "general.file_type",
        "quantize.imatrix.file",
        "quantize.imatrix.dataset",
        "quantize.imatrix.entries_count",
        "quantize.imatrix.chunks_count",
    ]
    assert plan.metadata["quantize.imatrix.entries_count"] == 14


def test_a_matrix_of_a_deeper_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    deeper = {**_layer_entries(), "blk.2.attn_q.weight": (_values(256), [3.0])}
    message = _refused(checkpoint, write_gguf(tmp_path / "m.gguf", deeper), UnusableInputError)
    assert "another model" in message
    assert "blk.2.attn_q.weight (1 of 15 entries" in message


@pytest.mark.parametrize("entry", [(_values(512), [3.0]), (_values(256), [1.0, 1.0])], ids=["size", "experts"])
def test_a_matrix_of_another_size_is_refused(checkpoint: Path, tmp_path: Path, entry: tuple[Any, Any]) -> None:
    wrong = {**_layer_entries(), "blk.1.ffn_up.weight": entry}
    message = _refused(checkpoint, write_gguf(tmp_path / "m.gguf", wrong), UnusableInputError)
    assert "another model" in message
    assert "blk.1.ffn_up.weight" in message


def test_the_embedding_is_passed_over_when_its_size_differs(checkpoint: Path, tmp_path: Path) -> None:
    entries = {**_layer_entries(), "token_embd.weight": (_values(320), [3.0])}
    plan = _plan(checkpoint, write_gguf(tmp_path / "m.gguf", entries)).plan
    assert next(t for t in plan.tensors if t.name == "token_embd.weight").importance is None


def test_a_type_that_needs_weights_is_refused_where_they_lack(checkpoint: Path, tmp_path: Path) -> None:
    entries = _layer_entries()
    del entries["blk.1.attn_q.weight"]
    path = write_gguf(tmp_path / "m.gguf", entries)
    message = _refused(checkpoint, path, UsageError)
    assert "needs an importance matrix (for 1 tensors, the first blk.1.attn_q.weight as IQ2_XXS" in message
    assert [t.name for t in _plan(checkpoint, path, "Q4_K_M").plan.unweighted] == ["blk.1.attn_q.weight"]


def test_the_rules_of_the_mixtures_ask_for_the_matrix(checkpoint: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", _layer_entries())
    types = {t.name: t.type.name for t in _plan(checkpoint, path, "IQ3_XXS").plan.tensors}
    assert types["blk.0.attn_v.weight"] == "IQ3_XXS"
    assert types["blk.0.ffn_down.weight"] == "IQ3_XXS"


def test_options_that_contradict_each_other(checkpoint: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", _layer_entries())
    assert "no effect" in _refused(checkpoint, path, UsageError, type_="F16")
    with pytest.raises(UsageError, match="both"):
        ConvertOptions(imatrix=path, calibrate="text.txt")


def test_before_calibration_the_plan_is_the_later_one(checkpoint: Path, tmp_path: Path) -> None:
    """Sizes must be known before the work: file name, dataset and types are."""
    assumed = prepare(
        checkpoint, None, ConvertOptions(type="IQ2_XXS", calibrate=tmp_path / "text.txt"), open_vocabulary
    )
    path = write_gguf(tmp_path / "text.imatrix.gguf", _layer_entries())
    assert assumed.nbytes == _plan(checkpoint, path).nbytes
