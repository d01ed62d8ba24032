"""A Hugging Face Hub on loopback in place of the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, serving
from huggingface_hub import constants


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server of `repository`, which the test's module defines; nothing of whoever runs the tests is used."""
    with serving(repository) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path)
        yield server
