"""`edgeinfer.imatrix` writes nothing that it should not, and says so before it works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoints import TEXT, write_checkpoint

from edgeinfer.api import imatrix as module
from edgeinfer.api.convert import convert
from edgeinfer.api.imatrix import imatrix
from edgeinfer.convert.imatrix import load_imatrix
from edgeinfer.errors import EdgeinferError, ResourceError, UsageError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, a text, and things that are no files."""
    convert(write_checkpoint(tmp_path / "checkpoint"), tmp_path / "model.gguf", ConvertOptions(type="F32"))
    (tmp_path / "text.txt").write_text("\n".join(TEXT) * 4, "utf-8")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.gguf").symlink_to("model.gguf")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("model.gguf", UsageError, "an input of this very command"),
        ("link.gguf", UsageError, "an input of this very command"),
        ("text.txt", UsageError, "an input of this very command"),
        ("directory", UsageError, "is a directory"),
        ("pipe", UsageError, "not a regular file"),
        ("/dev/null", UsageError, "not a regular file"),
        ("missing/matrix.gguf", ResourceError, "no such directory"),
        ("x" * 300, ResourceError, "File name too long"),
    ],
)
def test_what_may_not_be_written_is_said_before_the_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: type[EdgeinferError], what: str
) -> None:
    monkeypatch.setattr(module, "NativeModel", None)  # no work without it
    before = {path: path.stat().st_ino for path in folder.iterdir()}
    with pytest.raises(kind, match=what):
        imatrix(folder / "model.gguf", folder / "text.txt", folder / name, ctx_size=32, overwrite=True)
    assert {path: path.stat().st_ino for path in folder.iterdir()} == before


def test_passages_too_short_to_be_watched_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="passages of 15"):
        imatrix(folder / "model.gguf", folder / "text.txt", folder / "matrix.gguf", ctx_size=15)
    imatrix(folder / "model.gguf", folder / "text.txt", folder / "matrix.gguf", ctx_size=16)
    assert load_imatrix(folder / "matrix.gguf").entries


def test_a_text_whose_name_is_no_text(folder: Path) -> None:
    text = Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt"))
    (folder / "text.txt").rename(text)
    imatrix(folder / "model.gguf", text, folder / "matrix.gguf", ctx_size=32)
    assert read_header(folder / "matrix.gguf").metadata["imatrix.datasets"] == ["\ufffd.txt"]
