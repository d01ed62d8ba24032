"""The public names, each on first use and again: a package has the name of one of the functions."""

from __future__ import annotations

import subprocess
import sys


def test_every_name_stays_what_it_is() -> None:
    code = (
        "import edgeinfer\n"
        "for _ in range(2):\n"
        "    assert all(callable(getattr(edgeinfer, name)) for name in ('convert', 'inspect', 'load', 'Model'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
