"""Small files that are replaced wholly or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from edgeinfer.atomic_file import replace_file

LONGEST_NAME = "x" * 255


@pytest.mark.parametrize("name", ["a.json", LONGEST_NAME])
def test_a_file_is_written_and_replaced_for_its_owner_only(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for data in (b"first", b"", b"second"):
        replace_file(path, data)
        assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), KeyboardInterrupt()])
def test_what_fails_halfway_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException
) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(type(error)):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_none_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(OSError, match=r"(No such|Not a) "):
            replace_file(folder / "a.json", b"")
