"""The files of a split model: all there, in order, and of one model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from edgeinfer.errors import EdgeinferError, NotFoundError, UnusableInputError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.gguf_file.shards import read_shards, shard_parts


def _write(path: Path, *, no: int, count: int, total: int, names: tuple[str, ...]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", no)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", total)
    for name in names:
        writer.add_tensor(name, np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def first(tmp_path: Path) -> Path:
    for i in range(3):
        _write(tmp_path / f"m-0000{i + 1}-of-00003.gguf", no=i, count=3, total=3, names=(f"t{i}",))
    return tmp_path / "m-00001-of-00003.gguf"


def _refused(path: Path, kind: type[EdgeinferError] = UnusableInputError) -> EdgeinferError:
    with pytest.raises(kind) as caught:
        read_shards(read_header(path))
    return caught.value


def test_all_files_in_order(first: Path) -> None:
    assert [h.tensors[0].name for h in read_shards(read_header(first))] == ["t0", "t1", "t2"]


def test_a_file_that_is_not_split(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", no=0, count=1, total=1, names=("t",))
    assert len(read_shards(read_header(path))) == 1


def test_every_missing_shard_is_named(first: Path) -> None:
    for number in (2, 3):
        first.with_name(f"m-0000{number}-of-00003.gguf").unlink()
    message = _refused(first, NotFoundError).message
    assert "2 of 3 shards are missing: m-00002-of-00003.gguf, m-00003-of-00003.gguf" in message


def test_a_later_shard_is_refused_and_the_first_named(first: Path) -> None:
    assert "m-00001-of-00003.gguf" in _refused(first.with_name("m-00002-of-00003.gguf")).hint


def test_a_shard_under_another_name(first: Path, tmp_path: Path) -> None:
    assert "NAME-00001-of-00003.gguf" in _refused(first.rename(tmp_path / "model.gguf")).hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no": 2}, "says that it is shard 3, its name 2"),
        ({"names": ("t0",)}, "stand in an earlier shard too: t0"),
        ({"names": ("t1", "t9")}, "have 4 tensors, 3 are announced"),
    ],
)
def test_shards_of_another_model(first: Path, change: dict[str, object], message: str) -> None:
    second = {"no": 1, "count": 3, "total": 3, "names": ("t1",), **change}
    _write(first.with_name("m-00002-of-00003.gguf"), **second)  # type: ignore[arg-type]
    assert message in _refused(first).message


def test_a_damaged_shard(first: Path) -> None:
    third = first.with_name("m-00003-of-00003.gguf")
    third.write_bytes(third.read_bytes()[:-40])
    assert third.name in _refused(first).message


def test_names() -> None:
    assert shard_parts("a-b-00002-of-00010.gguf") == ("a-b", 2, 10)
    assert shard_parts("a-2-of-10.gguf") is None
