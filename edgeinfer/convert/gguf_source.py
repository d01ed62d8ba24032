"""A GGUF file as the source: its tensors quantized, its metadata kept, as llama_model_quantize does it.

The architecture needs no module here: names, order and shapes are final already, and the mixture's rules ask only for
hyper-parameters that the file states (src/llama-quant.cpp, llama_model_quantize_impl).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.convert.checkpoint import TensorSpec
from edgeinfer.convert.file_types import TENSOR_TYPES, FileType, file_type
from edgeinfer.convert.imatrix import ImportanceMatrix
from edgeinfer.convert.mixture_rules import ModelFacts
from edgeinfer.convert.plan import QUANTIZATION_VERSION, ConvertPlan, choose_types, expected_matrix, file_order
from edgeinfer.convert.resolve import PartPlan, TensorPlan
from edgeinfer.convert.writer import ALIGNMENT
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import Header, TensorInfo, read_header
from edgeinfer.gguf_file.limits import check_limits
from edgeinfer.gguf_file.shards import read_shards
from edgeinfer.options import ConvertOptions

READABLE = frozenset({*TENSOR_TYPES, GGMLType.Q1_0, GGMLType.Q2_0})
"""The types that can be widened to F32."""
_OF_A_SPLIT = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True, slots=True)
class GGUFSource:
    """The headers of a model's files, the first one with the metadata."""

    headers: tuple[Header, ...]

    @property
    def first(self) -> Header:
        """The header with the metadata."""
        return self.headers[0]

    @property
    def path(self) -> Path:
        """The file that was given."""
        return self.first.path


def open_gguf(path: Path) -> GGUFSource:
    """Read the headers of a GGUF model, of all its shards when it is split.

    Raises NotFoundError for missing files, UnusableInputError for damaged ones and for what is not a model.
    """
    header = read_header(path)
    source = GGUFSource(read_shards(header))
    check_limits(header)
    kind = header.metadata.text("general.type", "model")
    if kind != "model":
        raise UnusableInputError(f"{path}: is of the kind {kind!r}, not a model", "give the model's own file")
    if not any(h.tensors for h in source.headers):
        raise UnusableInputError(f"{path}: has no tensors", "give a file with weights")
    return source


def build_from_gguf(source: GGUFSource, options: ConvertOptions, given: ImportanceMatrix | None) -> ConvertPlan:
    """Plan the conversion of a GGUF model, with an importance matrix if one is given or to be computed.

    Raises UsageError for contradictory options and for a quantized tensor that would get another type without
    `allow_requantize`, NotFoundError for a pattern that fits no tensor, UnusableInputError for a tensor of a type that
    cannot be widened.
    """
    wanted = file_type(options.file_type)
    draft = [_tensor(info, header.path) for header in source.headers for info in header.tensors]
    draft.sort(key=lambda t: file_order(t.name))
    matrix = expected_matrix(options, given)
    tensors = choose_types(draft, wanted, _facts(source.first), options, matrix)
    for before, after in zip(draft, tensors, strict=True):
        if before.type is not after.type:
            _check_change(source.path, before, after, options)
    metadata = _metadata(source.first, wanted, matrix)
    return ConvertPlan(source.first.architecture, wanted, metadata, tensors, split_max_nbytes=options.split_max_size)


def _tensor(info: TensorInfo, path: Path) -> TensorPlan:
    """A tensor as it is, without the trailing dimensions of 1, which the library does not write either."""
    shape = info.shape or (1,)
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    rows = shape[::-1]
    if len(shape) == 1 and info.type.is_quantized:  # never changed, so copied by the block
        rows = (shape[0] // info.type.block_length, info.type.block_length)
    spec = TensorSpec(info.name, rows, info.type.name, path, info.offset, info.nbytes)
    n_rows, row_length = (math.prod(rows[:-1]), rows[-1]) if len(rows) > 1 else (rows[0], 1)
    return TensorPlan(info.name, shape, info.type, (PartPlan(spec, 0, n_rows, row_length, None),))


def _check_change(path: Path, before: TensorPlan, after: TensorPlan, options: ConvertOptions) -> None:
    if after.type is GGMLType.NVFP4:
        raise UsageError(f"{path}: tensor {before.name} is not NVFP4", "let the pattern fit only tensors that are")
    if before.type.is_quantized and not options.allow_requantize:
        raise UsageError(
            f"{path}: tensor {before.name} is quantized already ({before.type.name}); {after.type.name} made of it "
            "is worse than made of the original",
            "give --allow-requantize, or convert the original checkpoint",
        )
    if before.type not in READABLE:
        raise UnusableInputError(
            f"{path}: tensor {before.name} is {before.type.name}, which cannot become {after.type.name}",
            "convert the original checkpoint",
        )


def _facts(header: Header) -> ModelFacts:
    n_layers = header.metadata.count(f"{header.architecture}.block_count")
    if not n_layers:
        raise UnusableInputError(
            f"{header.path}: {header.architecture}.block_count is missing", "the file was converted wrongly"
        )
    n_heads = _of_layer_0(header, "attention.head_count", 0)
    return ModelFacts(
        header.architecture,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=_of_layer_0(header, "attention.head_count_kv", n_heads),
        n_experts=header.metadata.count(f"{header.architecture}.expert_count"),
    )


def _of_layer_0(header: Header, name: str, default: int) -> int:
    """A hyper-parameter that is one whole number, or one per layer."""
    value = header.metadata.get(f"{header.architecture}.{name}")
    if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
        value = int(value[0])
    return value if type(value) is int and value >= 0 else default


def _metadata(header: Header, wanted: FileType, matrix: ImportanceMatrix | None) -> dict[str, Any]:
    """Every value of the source to the byte, then what is new."""
    new = {
        "general.quantization_version": QUANTIZATION_VERSION,
        "general.file_type": wanted.id,
        **(matrix.metadata() if matrix is not None else {}),
    }
    kept = {key: header.metadata.encoded(key) for key in header.metadata if key not in (*new, *_OF_A_SPLIT)}
    if header.alignment != ALIGNMENT:
        kept.pop("general.alignment")  # tensors are aligned as everywhere else, whatever the source's were
    return {**kept, **new}
