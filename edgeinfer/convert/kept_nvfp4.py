"""NVFP4 tensors that stay as they are: their number for the whole matrix becomes a tensor beside them.

The library multiplies by it what the matrix gives (src/llama-graph.cpp, build_lora_mm). Not every architecture's graph
does, and none says so, so that only those are let through that have been compared (tests/convert/test_kept_nvfp4.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from edgeinfer.convert.checkpoint import encoded
from edgeinfer.convert.encodings.nvfp4 import Factors, Nvfp4
from edgeinfer.convert.resolve import PartPlan, TensorPlan
from edgeinfer.errors import UsageError
from edgeinfer.ggml_types import GGMLType

ARCHITECTURES = ("llama", "mistral3", "qwen3", "qwen3moe")


def with_factors(architecture: str, tensors: Iterable[TensorPlan]) -> tuple[TensorPlan, ...]:
    """The tensors, with `NAME.scale` before each `NAME.weight` that is NVFP4.

    Raises UsageError for one that was to become NVFP4 and isn't stored so, or that the library would compute otherwise.
    """
    tensors = tuple(tensors)
    names = {tensor.name for tensor in tensors}
    return tuple(
        planned
        for tensor in tensors
        for planned in (_with_factor(architecture, tensor, names) if tensor.type is GGMLType.NVFP4 else [tensor])
    )


def _with_factor(architecture: str, tensor: TensorPlan, names: set[str]) -> Iterator[TensorPlan]:
    if any(part.change or part.type is not GGMLType.NVFP4 for part in tensor.parts):
        raise UsageError(f"{tensor.name} is not stored as NVFP4", "let the pattern fit only tensors that are")
    stem = tensor.name.removesuffix(".weight")
    # With both, the library would add the bias first, and ends the process instead (build_ffn).
    if architecture not in ARCHITECTURES or (".ffn_" in stem and f"{stem}.bias" in names):
        raise UsageError(f"{tensor.name} cannot stay NVFP4: llama.cpp does not compute it here", "choose another type")
    encodings = [part.spec.encoding for part in tensor.parts]
    factors = [Factors(e.factor, e.is_divisor) for e in encodings if isinstance(e, Nvfp4) and e.factor]
    if factors:
        parts = tuple(_part(f"{stem}.scale", f) for f in factors)
        count = sum(part.n_rows for part in parts)
        if count != tensor.n_elements // (tensor.shape[0] * tensor.shape[1]):
            raise UsageError(f"{tensor.name} cannot stay NVFP4: it has {count} factors", "choose another type")
        yield TensorPlan(f"{stem}.scale", (count,), GGMLType.F32, parts)
    yield tensor


def _part(name: str, factors: Factors) -> PartPlan:
    count = factors.spec.n_elements
    return PartPlan(encoded(name, (count,), factors), 0, count, 1, None)
