"""What most tests of a conversion begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small checkpoint of the Llama class."""
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty directory."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"
