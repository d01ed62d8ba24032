"""The names of the public API, in a process that imports nothing but the package."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import PATIENCE_S


@pytest.mark.parametrize("name", ["convert", "inspect", "load", "load_encoder", "tokenize"])
def test_a_name_stays_a_function(name: str) -> None:
    """`edgeinfer.convert` is a package as well: the second look must not find that."""
    code = f"import edgeinfer\nassert callable(edgeinfer.{name})\nassert callable(edgeinfer.{name})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
