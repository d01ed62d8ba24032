"""The names of the public API, in a process that imports nothing but the package."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import PATIENCE_S


@pytest.mark.parametrize("before", ["convert", "imatrix", "load"])
@pytest.mark.parametrize("name", ["convert", "inspect", "load", "load_encoder", "tokenize"])
def test_a_name_is_a_function_whatever_was_used_before(before: str, name: str) -> None:
    """`edgeinfer.convert` is a package as well, which `imatrix` imports too: nobody must find that instead."""
    code = f"import edgeinfer\nassert callable(edgeinfer.{before})\nassert callable(edgeinfer.{name})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
