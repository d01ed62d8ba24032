"""Fixtures that several test packages share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    path = os.environ.get("EDGEINFER_TEST_GGUF")
    if not path:
        pytest.skip("EDGEINFER_TEST_GGUF names no model")
    return Path(path)
