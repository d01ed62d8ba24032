"""Finds each tensor of the output in the checkpoint; complains about all that doesn't fit at once."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgeinfer.convert.architectures.base import ConstantRule, Part, TensorRule
from edgeinfer.convert.architectures.transforms import Elementwise, RowTransform
from edgeinfer.convert.checkpoint import Checkpoint, TensorSpec
from edgeinfer.convert.reader import whole
from edgeinfer.errors import UnusableInputError, listed
from edgeinfer.ggml_types import GGMLType
from edgeinfer.types import Importance

FLOAT_TYPES = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Rows `[first_row, first_row + n_rows)` of a tensor of the checkpoint, reordered by `transform`."""

    spec: TensorSpec
    first_row: int
    n_rows: int
    row_length: int
    """Elements of a row; a vector is a column."""
    transform: RowTransform | None
    change: Elementwise | None = None

    @property
    def type(self) -> GGMLType:
        """The type that the elements have already, or can have without loss."""
        stored = self.spec.encoding.type if self.spec.encoding else GGMLType[self.spec.dtype]
        is_cut = self.spec.encoding and self.transform and not self.transform.keeps_rows(self.row_length)
        return GGMLType.F32 if is_cut else stored

    def input_nbytes(self, row0: int, n_rows: int) -> int:
        """Bytes of input of some rows; an encoded tensor's are shared out evenly."""
        total, every = self.spec.n_elements // self.row_length, self.spec.nbytes
        return every * (row0 + n_rows) // total - every * row0 // total

    @property
    def nbytes(self) -> int:
        """Bytes of input."""
        return self.input_nbytes(self.first_row, self.n_rows)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the output. `shape` is ggml's order: the row length first.

    The rows of `parts`, one after the other, are its rows; without parts, `constant` holds its F32 bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    parts: tuple[PartPlan, ...]
    constant: bytes = b""
    fallback_from: GGMLType | None = None
    importance: Importance | None = None

    @property
    def n_elements(self) -> int:
        """The product of the shape."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def own_type(self) -> GGMLType:
        """The type that holds its elements without loss: that of its parts, F32 where those differ."""
        types = {part.type for part in self.parts}
        return types.pop() if len(types) == 1 else GGMLType.F32

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return self.type.row_nbytes(self.shape[0]) * (self.n_elements // self.shape[0])

    @property
    def fallback_extra_nbytes(self) -> float:
        """What the fallback costs in the output; negative where the other type is smaller."""
        wanted = self.fallback_from or self.type
        return self.nbytes - self.n_elements / wanted.block_length * wanted.block_nbytes


# Buffers that old checkpoints saved along with the weights.
_BUFFERS = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")


MAX_BIAS_NBYTES = 1 << 20
MAX_WRONG = 10_000
"""More tensors than a checkpoint can lack, or have too many, by accident: more are looked at no further."""


MAX_ROW_ELEMENTS = 1 << 24
"""A hundred times what the largest known models have; a row is the least that is ever in memory."""


def resolve(
    checkpoint: Checkpoint, rules: Iterable[TensorRule | ConstantRule]
) -> tuple[list[TensorPlan], tuple[str, ...]]:
    """The tensors of the output, not quantized yet, and what of the checkpoint it does without, with the reason.

    Raises UnusableInputError that names the tensors that are missing, surplus, wrongly shaped or of a type that the
    rules don't expect.
    """
    there = checkpoint.tensors
    checked, idle = _checked(checkpoint, rules)
    kept = [rule for rule in checked if isinstance(rule, ConstantRule) or rule.parts[0].source in there]
    copy = _tied_copy(checkpoint, kept)
    if copy:
        kept = [rule for rule in kept if rule.name != "output.weight"]
    notes = (f"{len(idle)} tensors like {idle[0]} (biases that are all zero)",) if idle else ()
    return [_plan(checkpoint, rule) for rule in kept], copy + notes


def _checked(
    checkpoint: Checkpoint, rules: Iterable[TensorRule | ConstantRule]
) -> tuple[list[TensorRule | ConstantRule], list[str]]:
    """The rules, if the checkpoint has what they ask for and nothing else but biases of nothing, which are named."""
    there = checkpoint.tensors
    checked: list[TensorRule | ConstantRule] = []
    known: dict[str, tuple[int, ...]] = {}
    missing: dict[str, None] = {}
    uncut: set[str] = set()
    for rule in rules:
        checked.append(rule)
        if isinstance(rule, ConstantRule):
            continue
        for part in rule.parts:
            known[part.source] = part.shape
            if part.source not in there and (not rule.optional or rule.parts[0].source in there):
                missing[part.source] = None
            if part.row_length not in (0, part.shape[-1]) or len(part.shape) < 2:
                uncut.add(part.source)
        if len(missing) > MAX_WRONG:
            raise _misfit(checkpoint, {"or more tensors are missing": missing})
    surplus = [name for name in there if name not in known and not name.endswith(_BUFFERS)]
    biases = [name for name in surplus[:MAX_WRONG] if re.sub(r"\.bias$", ".weight", name) in known]
    idle = {name: None for name in biases if _is_zero(there[name])}
    problems = {
        "tensors are missing": missing,
        "tensors are surplus": [name for name in surplus if name not in idle],
        "tensors have the wrong shape": [
            f"{name} has {list(there[name].shape)}, expected {list(shape)}"
            for name, shape in known.items()
            if name in there and there[name].shape != shape
        ],
        "tensors are not floating-point": [
            f"{name} is {there[name].dtype}" for name in known if name in there and there[name].dtype not in FLOAT_TYPES
        ],
        "tensors are quantized, which only whole rows of matrices can be": [
            name for name in uncut if name in there and there[name].encoding
        ],
    }
    if any(problems.values()):
        raise _misfit(checkpoint, problems)
    return checked, list(idle)


def _is_zero(bias: TensorSpec) -> bool:
    """Whether a bias adds nothing. AutoGPTQ gave every module one, and the first Command-R7B has them, too."""
    return bias.encoding is None and bias.nbytes <= MAX_BIAS_NBYTES and not any(whole(bias))


def _misfit(checkpoint: Checkpoint, problems: Mapping[str, Collection[str]]) -> UnusableInputError:
    described = "; ".join(f"{len(names)} {what}: {listed(names)}" for what, names in problems.items() if names)
    return UnusableInputError(f"{checkpoint.path}: {described}", "do config.json and the weights belong together?")


def _tied_copy(checkpoint: Checkpoint, rules: Sequence[TensorRule | ConstantRule]) -> tuple[str, ...]:
    """A head that is tied and stored all the same is left out if it really is the embedding, kept if it isn't."""
    by_name = {rule.name: rule for rule in rules if isinstance(rule, TensorRule)}
    head, embedding = by_name.get("output.weight"), by_name.get("token_embd.weight")
    if head is None or embedding is None or not head.optional:
        return ()
    copy, original = (checkpoint.tensors[rule.parts[0].source] for rule in (head, embedding))
    return (f"{copy.name} (the same as {original.name})",) if same_bytes(copy, original) else ()


def same_bytes(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two tensors hold the same bytes; reads them only when size and type agree."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.encoding or b.encoding:
        return False
    step = 1 << 20
    try:
        with open(a.path, "rb") as file_a, open(b.path, "rb") as file_b:
            file_a.seek(a.offset)
            file_b.seek(b.offset)
            return all(
                file_a.read(min(step, a.nbytes - done)) == file_b.read(min(step, a.nbytes - done))
                for done in range(0, a.nbytes, step)
            )
    except OSError as error:
        raise UnusableInputError(f"{a.path}: cannot be read ({error.strerror})", "was it changed meanwhile?") from None


def _plan(checkpoint: Checkpoint, rule: TensorRule | ConstantRule) -> TensorPlan:
    if isinstance(rule, ConstantRule):
        data = rule.values.astype("<f4").tobytes()
        return TensorPlan(rule.name, rule.values.shape[::-1], GGMLType.F32, (), constant=data)
    parts = tuple(_part(checkpoint, part) for part in rule.parts)
    planned = sum(p.row_length * (p.transform.n_kept(p.n_rows) if p.transform else p.n_rows) for p in parts)
    assert planned == math.prod(rule.shape), f"the rule for {rule.name} gives {planned} elements, not {rule.shape}"
    shape = rule.shape
    while len(shape) > 1 and shape[0] == 1:  # llama.cpp's writer has no trailing dimensions of 1 either
        shape = shape[1:]
    return TensorPlan(rule.name, shape[::-1], GGMLType.F32, parts)


def _part(checkpoint: Checkpoint, part: Part) -> PartPlan:
    spec = checkpoint.tensors[part.source]
    n_elements = math.prod(spec.shape)
    row_length = part.row_length or (spec.shape[-1] if len(spec.shape) > 1 else 1)
    if row_length > MAX_ROW_ELEMENTS:
        raise _misfit(checkpoint, {f"tensors have rows of more than {MAX_ROW_ELEMENTS} elements": [spec.name]})
    n_rows = n_elements // row_length - part.first_row if part.n_rows is None else part.n_rows
    return PartPlan(spec, part.first_row, n_rows, row_length, part.transform, part.change)
