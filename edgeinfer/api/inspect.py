"""`edgeinfer.inspect`: what is in a GGUF file."""

from __future__ import annotations

from pathlib import Path

from edgeinfer.api.files import resolve
from edgeinfer.gguf_file.describe import Description, describe
from edgeinfer.gguf_file.header import read_header


def inspect(model: str | Path) -> Description:
    """Say what is in a GGUF file and what running it needs, from its header alone.

    Raises NotFoundError or UnusableInputError.
    """
    return describe(read_header(resolve(model)))
