"""Adapters that are added to the weights while those are read: a slab of rows at a time, in F32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgeinfer.convert.adapters.base_model import BaseModel, check_saved_bases, rules_of
from edgeinfer.convert.adapters.factors import (
    EMBEDDING,
    HEAD,
    adapted_rules,
    is_stored_swapped,
    read_rows,
    refuse_unknown,
    tied,
)
from edgeinfer.convert.adapters.peft import Delta, PeftAdapter, open_adapter
from edgeinfer.convert.architectures.base import Architecture, ConstantRule, TensorRule
from edgeinfer.convert.checkpoint import Checkpoint, Reader, TensorSpec, encoded
from edgeinfer.convert.config import Config
from edgeinfer.convert.encodings.base import Floats, OnlyFloats, numbers
from edgeinfer.convert.reader import RAW, check_finite
from edgeinfer.options import Adapters


@dataclass(frozen=True, slots=True)
class _Addend:
    """What is added to a weight as the checkpoint has it: `scale · b · a`, or the transpose of that."""

    delta: Delta
    scale: float
    is_swapped: bool

    def rows(self, reader: Reader, row0: int, n_rows: int) -> Floats:
        """Rows `[row0, row0 + n_rows)`."""
        a, b = self.delta.a, self.delta.b
        left = _columns(reader, a, row0, n_rows) if self.is_swapped else read_rows(reader, b, row0, n_rows)
        right = read_rows(reader, b).T if self.is_swapped else read_rows(reader, a)
        left *= np.float32(self.scale)
        return left @ right


@dataclass(frozen=True, slots=True)
class MergedRows(OnlyFloats):
    """Makes the rows of a weight with adapters in it: `checkpoint.Encoding`."""

    base: TensorSpec
    addends: tuple[_Addend, ...]

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The weight's tensors; the adapters' are read again and again, and small."""
        return self.base.stored

    def dequantize(self, reader: Reader, row0: int, out: Floats) -> None:
        """See checkpoint.Encoding."""
        reader.floats(self.base, row0, out)
        for addend in self.addends:
            out += addend.rows(reader, row0, len(out))


def _columns(reader: Reader, spec: TensorSpec, first: int, count: int) -> Floats:
    """Columns `[first, first + count)` as rows."""
    raw = reader.columns(spec, spec.row_nbytes(first), spec.row_nbytes(count))
    check_finite(spec, spec.dtype, raw.view(RAW[spec.dtype]), 0)
    return np.ascontiguousarray(numbers(spec.dtype, raw).T)


def open_adapters(lora: Adapters) -> list[tuple[PeftAdapter, float]]:
    """The adapters to merge, with their scales. Raises what `open_adapter` raises."""
    return [(open_adapter(Path(path)), scale) for path, scale in lora]


def merged(
    checkpoint: Checkpoint,
    architecture: Architecture,
    adapters: Sequence[tuple[PeftAdapter, float]],
    stated: Config,
) -> Checkpoint:
    """The checkpoint with the adapters in its weights; `stated` is its config as the file has it.

    Raises UnusableInputError for an adapter that doesn't fit.
    """
    model, rules = BaseModel(stated, architecture), rules_of(architecture, checkpoint.config)
    addends: dict[str, list[_Addend]] = {}
    for adapter, scale in adapters:
        where = str(adapter.path)
        deltas = model.named(adapter, rules)
        check_saved_bases(model.saved_bases(adapter), rules, where)
        kept = list(adapted_rules(rules, deltas))
        swapped = _swapped(kept, deltas, where)
        refuse_unknown([name for name in deltas if name not in swapped or name not in checkpoint.tensors], where)
        _refuse_tied(kept, rules, checkpoint, deltas, where)
        for name, delta in deltas.items() if scale else ():
            addends.setdefault(name, []).append(_Addend(delta, delta.scale * scale, swapped[name]))
    tensors = {
        name: encoded(name, spec.shape, MergedRows(spec, tuple(addends[name]))) if name in addends else spec
        for name, spec in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


def _swapped(rules: Sequence[TensorRule], deltas: Mapping[str, Delta], where: str) -> dict[str, bool]:
    """For each adapted weight that the rules use whether it is stored as (inputs, outputs)."""
    return {
        part.source: is_stored_swapped(deltas[part.source], part, where)
        for rule in rules
        for part in rule.parts
        if part.source in deltas
    }


def _refuse_tied(
    adapted: Sequence[TensorRule],
    rules: Sequence[TensorRule | ConstantRule],
    checkpoint: Checkpoint,
    deltas: Mapping[str, Delta],
    where: str,
) -> None:
    """An adapter of the embedding is none of the head, which would get it too."""
    heads = [rule for rule in rules if isinstance(rule, TensorRule) and rule.name == HEAD]
    is_tied = any(rule.optional and rule.parts[0].source not in checkpoint.tensors for rule in heads)
    for rule in adapted:
        of_table = any(deltas[part.source].is_embedding for part in rule.parts if part.source in deltas)
        if (is_tied and rule.name == EMBEDDING) or (of_table and rule.name == HEAD):
            raise tied(where)
