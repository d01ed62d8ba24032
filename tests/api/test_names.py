"""The names of the public API."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["convert", "inspect", "load", "tokenize"])
def test_a_function_stays_a_function(name: str) -> None:
    code = f"import edgeinfer; first = edgeinfer.{name}; assert callable(first) and edgeinfer.{name} is first"
    subprocess.run([sys.executable, "-c", code], check=True)
