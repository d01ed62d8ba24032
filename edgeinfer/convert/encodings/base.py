"""What the methods of quantization share: finding the stored tensors that belong together, and checking them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from edgeinfer.convert.checkpoint import Checkpoint, Encoding, TensorSpec, encoded
from edgeinfer.errors import UnusableInputError

Parts = Mapping[str, TensorSpec]
"""Stored tensors by the suffix of their names."""
Decoder = Callable[[str, Parts], tuple[tuple[int, ...], Encoding]]
"""The logical shape and the encoding of a tensor, of its name and parts."""


def with_decoded(
    checkpoint: Checkpoint, required: Sequence[str], decode: Decoder, optional: Sequence[str] = (), becomes: str = ""
) -> Checkpoint:
    """The checkpoint in which stored tensors `NAME + suffix` are one, `NAME + becomes`.

    There is a group wherever one of the suffixes `required` occurs, and it must be complete.
    """
    tensors = dict(checkpoint.tensors)
    stems = dict.fromkeys(name.removesuffix(suffix) for name in tensors for suffix in required if name.endswith(suffix))
    for stem in stems:
        missing = [f"{stem}{suffix}" for suffix in required if f"{stem}{suffix}" not in tensors]
        if missing:
            there = next(name for suffix in required if (name := f"{stem}{suffix}") in tensors)
            raise misfit(tensors[there], f"comes without {missing[0]}")
        present = (suffix for suffix in (*required, *optional) if f"{stem}{suffix}" in tensors)
        parts = {suffix: tensors.pop(f"{stem}{suffix}") for suffix in present}
        name = f"{stem}{becomes}"
        if name in tensors:
            raise misfit(tensors[name], f"stands beside {parts[required[0]].name}, which is the same tensor")
        shape, encoding = decode(name, parts)
        tensors[name] = encoded(name, shape, encoding)
    return replace(checkpoint, tensors=tensors)


def check(spec: TensorSpec, dtypes: Sequence[str], shape: tuple[int, ...] | None = None) -> None:
    """Raise UnusableInputError unless a stored tensor has one of the types, and the shape."""
    if spec.dtype not in dtypes:
        raise misfit(spec, f"is {spec.dtype}, expected {' or '.join(dtypes)}")
    if shape is not None and spec.shape != shape:
        raise misfit(spec, f"has the shape {list(spec.shape)}, expected {list(shape)}")


def misfit(spec: TensorSpec, what: str) -> UnusableInputError:
    """The error for a stored tensor that does not fit the others or the config."""
    return UnusableInputError(
        f"{spec.path}: tensor {spec.name} {what}", "do config.json and the weights belong together?"
    )
