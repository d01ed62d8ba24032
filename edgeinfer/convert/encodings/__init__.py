"""Checkpoints whose weights are quantized already: each group of stored tensors becomes one tensor of numbers.

The rules of an architecture and the plan then see an ordinary tensor. Its `encoding` says how rows of numbers are made
of the stored bytes, and which type of ggml can hold them without loss, if any can.
"""

from __future__ import annotations

from collections.abc import Callable

from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.encodings import awq, bitsandbytes, compressed_tensors, gptq, mxfp4, scaled
from edgeinfer.convert.json_file import read_object_if_there
from edgeinfer.errors import UnusableInputError

_METHODS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "awq": awq.decoded,
    "bitsandbytes": bitsandbytes.decoded,
    "compressed-tensors": compressed_tensors.decoded,
    "fbgemm_fp8": scaled.decoded,
    "fp8": scaled.decoded,
    "gptq": gptq.decoded,
    "modelopt": scaled.decoded,
    "mxfp4": mxfp4.decoded,
}


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tensors that its quantization stands for.

    Raises UnusableInputError for a method that is not known, and for stored tensors that do not fit together.
    """
    method = checkpoint.config.quantization_method or _producer(checkpoint)
    if method is None:
        return checkpoint
    if method not in _METHODS:
        raise UnusableInputError(
            f"{checkpoint.path}: the weights are quantized already ({method})",
            f"convert the checkpoint that it was made from (known methods: {', '.join(_METHODS)})",
        )
    return _METHODS[method](checkpoint)


def _producer(checkpoint: Checkpoint) -> str | None:
    """What modelopt's older checkpoints say in a file of its own."""
    producer = read_object_if_there(checkpoint.path / "hf_quant_config.json").get("producer")
    return str(producer.get("name")).lower() if isinstance(producer, dict) else None
