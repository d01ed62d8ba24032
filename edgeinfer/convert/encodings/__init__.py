"""Checkpoints whose weights are quantized already: each group of stored tensors becomes one tensor of numbers.

The rules of an architecture and the plan then see an ordinary tensor. Its `encoding` says how rows of numbers are made
of the stored bytes, and which type of ggml can hold them without loss, if any can.
"""

from __future__ import annotations

from collections.abc import Callable

from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.encodings import mxfp4
from edgeinfer.errors import UnusableInputError

_METHODS: dict[str, Callable[[Checkpoint], Checkpoint]] = {"mxfp4": mxfp4.decoded}


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tensors that its quantization stands for.

    Raises UnusableInputError for a method that is not known, and for stored tensors that do not fit together.
    """
    method = checkpoint.config.quantization_method
    if method is None:
        return checkpoint
    if method not in _METHODS:
        raise UnusableInputError(
            f"{checkpoint.path}: the weights are quantized already ({method})",
            f"convert the checkpoint that it was made from (known methods: {', '.join(_METHODS)})",
        )
    return _METHODS[method](checkpoint)
