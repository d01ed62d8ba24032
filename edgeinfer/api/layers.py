"""Which layers of a model make the draft `layers`, and where their tensors are in its file."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.gguf_file.header import Header
from edgeinfer.native.layers import LayersModel, MappedTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Whose layers are all alike, and whose optional tensors the library takes neutral values for."""
_MIN_LAYERS = 4
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


def chosen_layers(header: Header, first: int | None) -> list[int]:
    """The layers to take: the `first` ones, or all but a sixth of them, those after the middle.

    Raises UnusableInputError for models whose layers make no other model, UsageError where there are not so many.
    """
    n_layers = header.hyperparameter("block_count") or 0
    if header.architecture not in ARCHITECTURES or header.hyperparameter("expert_count", 0):
        raise UnusableInputError(
            f"{header.path}: no draft can be made of the layers of a {header.architecture} model",
            f"use --draft FILE.gguf, or a model of {', '.join(ARCHITECTURES)} without experts",
        )
    if header.metadata.count("split.count") > 1:
        raise UnusableInputError(f"{header.path}: no draft can be made of the layers of a split file", "merge it")
    if any(header.metadata.value_type(key)[1] is not None for key in header.metadata if _is_of_layers(header, key)):
        raise UnusableInputError(
            f"{header.path}: no draft can be made of its layers, which differ in shape", "use --draft FILE.gguf"
        )
    if first is not None and first >= n_layers:
        raise UsageError(f"draft_layers is {first}, the model has {n_layers} layers", f"give 1 to {n_layers - 1}")
    if n_layers < _MIN_LAYERS:
        raise UnusableInputError(f"{header.path}: {n_layers} layers are too few to leave some out", "use another draft")
    if first:
        return list(range(first))
    middle, left_out = n_layers // 2, max(1, n_layers // 6)
    return [*range(middle), *range(middle + left_out, n_layers)]


def layers_model(header: Header, layers: Sequence[int]) -> LayersModel:
    """The model of these layers, over the file's own pages."""
    return LayersModel(header.path, f"{header.architecture}.block_count", len(layers), _tensors(header, layers))


def _tensors(header: Header, layers: Sequence[int]) -> list[MappedTensor]:
    """The tensors of the new model, by their names in it."""
    numbers = {str(old): new for new, old in enumerate(layers)}
    found = []
    for tensor in header.tensors:
        name = tensor.name
        if name.startswith("blk."):
            _, number, rest = name.split(".", 2)
            if number not in numbers:
                continue
            name = f"blk.{numbers[number]}.{rest}"
        found.append(MappedTensor(name, tensor.type, tensor.shape, tensor.offset, tensor.nbytes))
    by_name = {tensor.name: tensor for tensor in found}
    if _OUTPUT not in by_name and _EMBEDDING in by_name:  # the library does not fall back to it in a model of this kind
        tied = by_name[_EMBEDDING]
        found.append(MappedTensor(_OUTPUT, tied.type, tied.shape, tied.offset, tied.nbytes))
    return found


def _is_of_layers(header: Header, key: str) -> bool:
    return key.startswith(header.architecture + ".")
