"""Another file, another library or other options: another fingerprint."""

import os
import shutil

import pytest

from edgeinfer.cache.fingerprint import WeightFile, digest, fingerprint

SIZE = 1 << 16
TENSORS = [(1000, 20_000), (21_000, 10), (30_000, SIZE - 30_000)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(SIZE))
    return WeightFile(path, 1000, TENSORS)


def test_the_same_file_gives_the_same(file):
    assert digest(file) == digest(WeightFile(file.path, 1000, TENSORS))


@pytest.mark.parametrize("position", [0, 999, 1000, 11_000, 20_999, 21_005, 30_000, SIZE - 1])
def test_files_that_differ_in_header_or_samples_differ_whatever_their_times(file, tmp_path, monkeypatch, position):
    """As if everything about the two inodes were the same."""
    monkeypatch.setattr("edgeinfer.cache.fingerprint.fstat", lambda fd: os.stat_result(range(19)))
    other = tmp_path / "other.gguf"
    data = bytearray(file.path.read_bytes())
    data[position] ^= 1
    other.write_bytes(data)
    assert digest(WeightFile(other, 1000, TENSORS)) != digest(file)


def test_a_byte_changed_in_place_between_the_samples_with_the_old_times_is_noticed(file):
    before, status = digest(file), file.path.stat()
    with open(file.path, "r+b") as raw:
        raw.seek(1000 + 4096 + 50)
        byte = raw.read(1)[0]
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([byte ^ 1]))
    os.utime(file.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest(file) != before


def test_a_copy_is_another_file(file, tmp_path):
    shutil.copy2(file.path, tmp_path / "copy.gguf")
    assert digest(WeightFile(tmp_path / "copy.gguf", 1000, TENSORS)) != digest(file)


def test_every_setting_and_every_file_counts():
    settings = {"build": "1", "type_k": "f16", "rope_long": False, "window": None}
    seen = {fingerprint([b"a" * 32], settings)}
    seen |= {fingerprint([b"a" * 32], {**settings, name: "other"}) for name in settings}
    seen |= {fingerprint(files, settings) for files in ([b"b" * 32], [b"a" * 32, b"b" * 32], [b"b" * 32, b"a" * 32])}
    assert len(seen) == 1 + 4 + 3
    assert all(len(f) == 32 for f in seen)
