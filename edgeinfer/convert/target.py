"""A size instead of a type: each tensor gets the type with which the model, no larger than asked, loses least."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgeinfer.convert.allocation import Option, allocate, smallest_nbytes
from edgeinfer.convert.file_types import file_type_of
from edgeinfer.convert.mixture import is_decided, may_quantize, requires_imatrix
from edgeinfer.convert.plan import ConvertPlan, overrides_of
from edgeinfer.convert.resolve import TensorPlan
from edgeinfer.convert.sensitivity import sensitivity
from edgeinfer.convert.writer import padding
from edgeinfer.errors import UsageError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.options import ConvertOptions

T = GGMLType
Errors = dict[GGMLType, float]
"""By type, the energy of the error as a share of the product's; a type that the values don't fit is left out."""
Measure = Callable[[Sequence[tuple[TensorPlan, Sequence[GGMLType]]]], Sequence[Errors]]
"""Finds the relative errors of types for tensors."""

FAST_TYPES = (
    T.Q8_0, T.Q6_K, T.Q5_K, T.Q5_1, T.Q5_0, T.Q4_K, T.Q4_1, T.IQ4_NL, T.IQ4_XS, T.Q4_0, T.Q3_K, T.Q2_K,
)  # fmt: skip
GRID_TYPES = (T.IQ3_S, T.IQ3_XXS, T.IQ2_S, T.IQ2_XS, T.IQ2_XXS)
"""Types that look their values up in a grid, which takes CPUs longer than the fewer bytes save."""
GRID_BELOW_BITS = 3.5
"""Bits per weight below which quality is worth more than that time."""


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor whose type is to be chosen, and the types that it may have."""

    tensor: TensorPlan
    types: tuple[GGMLType, ...]

    @property
    def own(self) -> GGMLType:
        """The type that the source has."""
        return self.tensor.parts[0].type

    def nbytes_as(self, ggml_type: GGMLType) -> int:
        """Bytes as that type."""
        return self.becomes(ggml_type).nbytes

    def becomes(self, ggml_type: GGMLType) -> TensorPlan:
        """The tensor as that type."""
        importance = self.tensor.importance if ggml_type.is_quantized else None
        return replace(self.tensor, type=ggml_type, fallback_from=None, importance=importance)


def fitted(plan: ConvertPlan, options: ConvertOptions, measure: Measure) -> ConvertPlan:
    """The plan with the types that fit the target, of a plan with the types that the user decided on.

    Raises UsageError for a target that is out of reach, and for a quantized tensor of a GGUF source that may not be
    quantized again; and what `measure` raises.
    """
    budget_nbytes = _budget_nbytes(plan, options)
    items = _items(plan, options, budget_nbytes)
    _smallest(plan, items, budget_nbytes, options)  # refuses before anything is measured
    losses = _losses(plan, items, measure)
    items = [
        replace(item, types=tuple(t for t in item.types if t in loss)) for item, loss in zip(items, losses, strict=True)
    ]
    smallest = _smallest(plan, items, budget_nbytes, options)
    room_nbytes = budget_nbytes
    while room_nbytes > _nbytes(smallest, options):
        found = _chosen(plan, items, losses, room_nbytes, options)
        surplus_nbytes = _nbytes(found, options) - budget_nbytes
        if surplus_nbytes <= 0:
            return found
        room_nbytes -= surplus_nbytes  # a split output has more headers than the plan that it began with
    return smallest


def rule_of_thumb(tensors: Sequence[tuple[TensorPlan, Sequence[GGMLType]]]) -> list[Errors]:
    """Errors as long as nothing can be measured, because the importance matrix is still to be computed.

    A bit more halves the error of each weight.
    """
    return [{t: 4.0 ** -(8 * t.block_nbytes / t.block_length) for t in types} for _, types in tensors]


def label(options: ConvertOptions) -> str:
    """What an output's name says in place of its type: `4.50bpw`, `380M`."""
    if options.target_bpw is not None:
        return f"{options.target_bpw:.2f}bpw"
    assert options.target_size is not None
    return f"{options.target_size / 1e6:.15g}M"


def _items(plan: ConvertPlan, options: ConvertOptions, budget_nbytes: int) -> list[_Item]:
    overrides = overrides_of(options, plan.file_type)
    free = [
        tensor
        for tensor in plan.tensors
        if may_quantize(tensor.name, tensor.shape) and not is_decided(overrides, tensor.name, is_tied=_is_tied(plan))
    ]
    fast = [_item(tensor, FAST_TYPES, plan, options) for tensor in free]
    others_nbytes = plan.tensor_nbytes - sum(t.nbytes for t in free)
    bits = 8 * (budget_nbytes - others_nbytes) / max(1, sum(t.n_elements for t in free))
    smallest, _ = _extremes(plan, fast)
    if bits >= GRID_BELOW_BITS and _nbytes(smallest, options) <= budget_nbytes:
        return fast
    return [_item(tensor, (*FAST_TYPES, *GRID_TYPES), plan, options) for tensor in free]


def _item(tensor: TensorPlan, offered: Sequence[GGMLType], plan: ConvertPlan, options: ConvertOptions) -> _Item:
    own = tensor.parts[0].type
    if own.is_quantized and tensor.parts[0].spec.encoding is None and not options.allow_requantize:
        raise UsageError(
            f"tensor {tensor.name} is quantized already ({own.name}), and made of it any other is worse than made of "
            "the original",
            "give --allow-requantize, or convert the original checkpoint",
        )
    types = [
        t
        for t in offered
        if tensor.shape[0] % t.block_length == 0
        and (tensor.importance is not None or not requires_imatrix(tensor.name, t, plan.file_type))
    ]
    # NVFP4 has a factor beside it, for which only a plan that asks for the type has a place (kept_nvfp4).
    kept = [] if own is GGMLType.NVFP4 and tensor.parts[0].spec.encoding else [own]
    return _Item(tensor, tuple(dict.fromkeys((*types, *kept))))


def _losses(plan: ConvertPlan, items: Sequence[_Item], measure: Measure) -> list[Errors]:
    """What each type of each item loses; its own type nothing."""
    n_layers = len({t.name.split(".")[1] for t in plan.tensors if t.name.startswith("blk.")})
    measured = measure([(item.tensor, [t for t in item.types if t is not item.own]) for item in items])
    losses = []
    for item, errors in zip(items, measured, strict=True):
        factor = sensitivity(item.tensor.name, n_layers, is_tied=_is_tied(plan))
        losses.append({item.own: 0.0} | {t: factor * error for t, error in errors.items()})
    return losses


def _chosen(
    plan: ConvertPlan, items: Sequence[_Item], losses: Sequence[Errors], room_nbytes: int, options: ConvertOptions
) -> ConvertPlan:
    """The plan with the types that lose least in `room_nbytes`."""
    choices = [
        [Option(_cost_nbytes(item.becomes(t), options), loss[t]) for t in item.types]
        for item, loss in zip(items, losses, strict=True)
    ]
    others_nbytes = _nbytes(plan, options) - sum(_cost_nbytes(item.tensor, options) for item in items)
    picked = allocate(choices, max(room_nbytes - others_nbytes, smallest_nbytes(choices)))
    return _with_types(plan, [item.types[i] for item, i in zip(items, picked, strict=True)], items)


def _with_types(plan: ConvertPlan, types: Sequence[GGMLType], items: Sequence[_Item]) -> ConvertPlan:
    """The plan with a type for each item, and the file type that most of its weights have."""
    changed = {item.tensor.name: item.becomes(t) for item, t in zip(items, types, strict=True)}
    tensors = tuple(changed.get(t.name, t) for t in plan.tensors)
    weights: Counter[GGMLType] = Counter()
    for tensor in tensors:
        if may_quantize(tensor.name, tensor.shape) and file_type_of(tensor.type):
            weights[tensor.type] += tensor.n_elements
    most = max(weights, key=lambda t: (weights[t], -t), default=plan.file_type.default)
    named = file_type_of(most) or plan.file_type
    return replace(plan, tensors=tensors, file_type=named, metadata={**plan.metadata, "general.file_type": named.id})


def _is_tied(plan: ConvertPlan) -> bool:
    return all(t.name != "output.weight" for t in plan.tensors)


def _budget_nbytes(plan: ConvertPlan, options: ConvertOptions) -> int:
    if options.target_size is not None:
        return options.target_size
    assert options.target_bpw is not None
    return math.floor(options.target_bpw * plan.n_parameters / 8)


def _nbytes(plan: ConvertPlan, options: ConvertOptions) -> int:
    """What counts for the target: whole files for a size, the tensors' data for bits per weight."""
    return sum(file.nbytes for file in plan.files) if options.target_size is not None else plan.tensor_nbytes


def _cost_nbytes(tensor: TensorPlan, options: ConvertOptions) -> int:
    return tensor.nbytes + (padding(tensor.nbytes) if options.target_size is not None else 0)


def _smallest(plan: ConvertPlan, items: Sequence[_Item], budget_nbytes: int, options: ConvertOptions) -> ConvertPlan:
    """The smallest plan; UsageError unless the budget lies between it and the largest."""
    smallest, largest = _extremes(plan, items)
    if not _nbytes(smallest, options) <= budget_nbytes <= _nbytes(largest, options):
        raise _out_of_reach(smallest, largest, options)
    return smallest


def _extremes(plan: ConvertPlan, items: Sequence[_Item]) -> tuple[ConvertPlan, ConvertPlan]:
    smallest, largest = (
        _with_types(plan, [pick(item.types, key=item.nbytes_as) for item in items], items) for pick in (min, max)
    )
    return smallest, largest


def _out_of_reach(smallest: ConvertPlan, largest: ConvertPlan, options: ConvertOptions) -> UsageError:
    """The error, with a range that is rounded inwards, so that its ends can be asked for."""
    least, most = (_nbytes(plan, options) for plan in (smallest, largest))
    if options.target_size is not None:
        asked, low, high = (f"{options.target_size / 1e6:.15g}M", least / 1e6, most / 1e6)
        span = f"{math.ceil(low * 100) / 100:.2f}M to {math.floor(high * 100) / 100:.2f}M"
        return UsageError(f"--target-size {asked} is out of reach", f"this model can have {span} bytes")
    low, high = (8 * nbytes / smallest.n_parameters for nbytes in (least, most))
    span = f"{math.ceil(low * 100) / 100:.2f} to {math.floor(high * 100) / 100:.2f}"
    return UsageError(
        f"--target-bpw {options.target_bpw:g} is out of reach", f"this model can have {span} bits per weight"
    )
